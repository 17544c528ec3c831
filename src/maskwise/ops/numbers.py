"""Numbers as tensors, for ops that take tensors alone."""

from __future__ import annotations

from functools import lru_cache
from math import copysign

import torch
from torch import Tensor

from maskwise.tracing import is_tracing

__all__ = ["number"]

_modes = torch._C._len_torch_dispatch_stack


def number(value: float | complex, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of no dims that holds a number. It is not to be written into: whoever asks again gets the same.

    >>> number(1, torch.float32, "cpu")
    tensor(1.)

    Raises:
        RuntimeError: the dtype cannot hold it.
    """
    # A tensor made under a mode, such as that of fake tensors, belongs there; and inference tensors to inference.
    if type(value) is not float or is_tracing() or _modes() or torch.is_inference_mode_enabled():
        return torch.full((), value, dtype=dtype, device=device)
    return _remembered(value, copysign(1.0, value), dtype, device)


@lru_cache(maxsize=64)
def _remembered(value: float, sign: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # By its sign too: 0.0 and -0.0 are equal, and not the same number.
    return torch.full((), value, dtype=dtype, device=device)
