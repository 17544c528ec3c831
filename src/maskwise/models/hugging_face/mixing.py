"""What lets a token read others besides attention: convolutions, recurrences, norms over time, running sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MixingError", "MixingWatch", "mixing_module", "quantized_module"]

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten._convolution.default, aten.mkldnn_convolution.default}
NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_group_norm.default,
}
SCANS = {aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default}


class MixingError(Exception):
    """An operation lets a token read others; the message says which."""


class MixingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `MixingError` at the first operation of a packed call that mixes along its tokens.

    The tokens are found by the size of their dim, which should be a size that nothing else has.
    """

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width = width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CONVOLUTIONS:
            self._convolution(*args[:2])
        elif func in NORMS and self.width in (args[0].shape[2:] if args[0].dim() > 2 else args[0].shape[:1]):
            raise MixingError("a norm counts all tokens of a batch")
        elif func in SCANS and args[0].is_floating_point() and args[0].shape[args[1]] == self.width:
            raise MixingError("a running sum goes over the tokens")
        return func(*args, **(kwargs or {}))

    def _convolution(self, x: Tensor, weight: Tensor) -> None:
        for size, kernel in zip(x.shape[2:], weight.shape[2:], strict=False):
            # Some are padded beforehand, on one side or on both.
            if kernel > 1 and self.width <= size <= self.width + 2 * (kernel - 1):
                raise MixingError("a convolution reads neighbouring tokens")


def mixing_module(model: nn.Module, inner: tuple[str, ...] = ()) -> str | None:
    """The module that mixes tokens in a model that has no weights to run with; None without one.

    Args:
        model: the model without its head.
        inner: the paths of models in it, such as those of images and sounds, which have no tokens of text to mix.
    """
    if (quantized := quantized_module(model)) is not None:
        return quantized
    for path, module in model.named_modules():
        if path.startswith(inner):
            continue
        wide = isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size != (1,)
        if wide or isinstance(module, (nn.RNNBase, nn.BatchNorm1d, nn.InstanceNorm1d)):
            return f"{path}, a {type(module).__name__}, mixes tokens"
    return None


def quantized_module(model: nn.Module) -> str | None:
    """The module whose inputs are quantized by the largest of a batch, so that all tokens count; None without one."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.quantization")):
            return f"{path}, a {type(module).__name__}, quantizes a token by the largest of all"
    return None
