"""Which kernels exist: for an op, a device and a dtype, either yes or the reason why not.

A CPU kernel that meets a dtype it lacks raises; it does not fall back to the reference by itself. So this table is what
keeps a call away from a kernel that cannot serve it. Op families enter their kernels when they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

__all__ = ["FLOATING", "INTEGRAL", "can_serve", "provide", "register_probe"]

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_kernels: dict[tuple[str, str], frozenset[torch.dtype]] = {}
_probes: dict[str, Callable[[], str | None]] = {}


def provide(op: str, device: str, dtypes: Iterable[torch.dtype]) -> None:
    """Enter into the table that ``op`` has a kernel on ``device`` for these dtypes."""
    _kernels[op, device] = frozenset(dtypes)


def register_probe(device: str, probe: Callable[[], str | None]) -> None:
    """Name the function that tells why kernels of ``device`` cannot run at all here; None when they can."""
    _probes[device] = probe


def can_serve(op: str, device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether a kernel serves this call, and the reason if none does."""
    dtypes = _kernels.get((op, device))
    if dtypes is None:
        return False, f"{op} has no kernel on {device}"
    if dtype not in dtypes:
        return False, f"the {device} kernel of {op} does not take {dtype}"
    fault = _probes[device]() if device in _probes else None
    return (False, fault) if fault else (True, "")


def served(op: str, device: str) -> frozenset[torch.dtype]:
    """The dtypes that the kernel of ``op`` on ``device`` takes; none when there is no kernel."""
    return _kernels.get((op, device), frozenset())
