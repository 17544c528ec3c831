"""Measuring on a GPU: inputs are moved there, times come from the device's own events, its cache is flushed before.

A call that starts a kernel returns before the kernel has run, so a clock of the host tells nothing; and a result that
still lies in the cache from the call before would be read at a speed that no real step has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from maskwise.benchmarks.case import Case
from maskwise.benchmarks.measure import Timer
from maskwise.mask import Mask

__all__ = ["for_device", "moved", "timer", "why_not"]

#: What is written to flush the cache where the device does not tell its size: more than any has.
FLUSHED = 256 * 2**20
#: What runs on the host alone.
ON_HOST = ("startup",)


def why_not(device: str) -> str | None:
    """The reason why nothing can be measured on the device, or None when it can.

    >>> why_not("tpu")
    "maskwise bench measures on 'cpu' and 'cuda', not on 'tpu'."
    """
    if device.split(":", maxsplit=1)[0] != "cuda":
        return f"maskwise bench measures on 'cpu' and 'cuda', not on {device!r}."
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA or ROCm" if torch.version.cuda is None else "torch finds no GPU"
        return f"no GPU to measure on: {built} (torch {torch.__version__}). `maskwise doctor` tells more."
    return None


def for_device(case: Case, device: str) -> Case:
    """The case as it counts there: factors are promised for the CPU, never to be slower everywhere."""
    if device == "cpu":
        return case
    targets = tuple(target for target in case.targets if target.text.startswith("never slower"))
    case = replace(case, targets=targets)
    return replace(case, unavailable=lambda: "it runs on the host alone") if case.family in ON_HOST else case


def moved(inputs: Any, device: str) -> Any:
    """The inputs of a case with every tensor, mask and module in them on the device."""
    if device == "cpu":
        return inputs
    if isinstance(inputs, torch.Tensor | Mask | torch.nn.Module):
        return inputs.to(device)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(inputs, **{f.name: moved(getattr(inputs, f.name), device) for f in fields(inputs) if f.init})
    if isinstance(inputs, dict):
        return {key: moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(moved(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(moved(value, device) for value in inputs)
    return inputs


def timer(device: str) -> Timer:
    """Seconds that the device is busy with a call, made so many times, each with a cache that holds nothing of it."""
    size = max(2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0), FLUSHED)
    scratch = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(call: Callable[[], object], times: int) -> float:
        events = []
        for _ in range(times):
            scratch.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(device)
        # Events tell milliseconds.
        return float(sum(start.elapsed_time(end) for start, end in events)) / 1e3

    return seconds
