"""Linear layers of packed inference in float32: by oneDNN on processors where MKL, torch's choice, is slower.

MKL uses no AVX-512 on processors that are not Intel's; oneDNN does. Weights stay as they are: nothing is copied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.hugging_face.calls import layout_of
from maskwise.nn.binding import bind, is_bound, unbind
from maskwise.ops.torch_private import onednn_linear
from maskwise.plan.machine import cpu_model

__all__ = ["cover_linear", "uncover_linear"]

ROWS = 64
"""Below so many tokens both take the same time."""


@cache
def is_onednn_faster() -> bool:
    """Whether this is a processor with AVX-512 that is not Intel's."""
    is_wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return onednn_linear is not None and is_wide and torch.backends.mkl.is_available() and "Intel" not in cpu_model()


def cover_linear(model: nn.Module) -> None:
    """Let the linear layers of a model compute by oneDNN in packed inference, where that is faster."""
    if not is_onednn_faster():
        return
    for layer in model.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            bind(layer, "forward", linear_forward)


def uncover_linear(model: nn.Module) -> None:
    """Undo `cover_linear`."""
    for layer in model.modules():
        if type(layer) is nn.Linear and is_bound(layer, "forward", linear_forward):
            unbind(layer, "forward")


def linear_forward(self: Any, x: Tensor) -> Tensor:
    """The layer's own forward, or the same by oneDNN."""
    weight, bias = self.weight, self.bias
    is_plain = (
        type(weight) is nn.Parameter and weight.dtype is torch.float32 and (bias is None or type(bias) is nn.Parameter)
    )
    if (
        layout_of() is None
        or not is_plain
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.dtype is not torch.float32
        or x.device.type != "cpu"
        or x.numel() < ROWS * x.shape[-1]
        or not torch.backends.mkldnn.enabled
        or torch.is_autocast_enabled("cpu")
    ):
        out: Tensor = type(self).forward(self, x)
        return out
    assert onednn_linear is not None
    return onednn_linear(x, weight, bias)
