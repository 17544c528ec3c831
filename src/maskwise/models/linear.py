"""Linear layers of packed inference in float32: by oneDNN on processors where MKL, torch's choice, is slower.

MKL uses no AVX-512 on processors that are not Intel's; oneDNN does. Weights stay as they are: nothing is copied, and no
layer is changed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from maskwise.ops.torch_private import onednn_linear
from maskwise.plan.machine import cpu_model

__all__ = ["fast_linear", "is_onednn_faster"]

ROWS = 64
"""Below so many tokens both take the same time."""


@cache
def is_onednn_faster() -> bool:
    """Whether this is a processor with AVX-512 that is not Intel's."""
    is_wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    has_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return onednn_linear is not None and is_wide and has_mkl and "Intel" not in cpu_model()


def fast_linear(*, tokens: int) -> AbstractContextManager[Any]:
    """Let the linear layers of a packed call without gradients compute by oneDNN, where that is faster.

    Args:
        tokens: how many are packed.
    """
    if tokens < ROWS or torch.is_grad_enabled() or not is_onednn_faster() or torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return _OneDNN()


class _OneDNN(TorchFunctionMode):
    """``functional.linear`` of plain float32 tensors by oneDNN; everything else as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs and _is_plain(*args):
            return onednn_linear(*args, *(None,) * (3 - len(args)))  # type: ignore[misc]
        return func(*args, **(kwargs or {}))


def _is_plain(x: Any, weight: Any, bias: Any = None) -> bool:
    return bool(
        type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and type(bias) in (Tensor, nn.Parameter, type(None))
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() >= ROWS * x.shape[-1]
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.enabled
    )
