"""Linear layers of Hugging Face models that compute the kept tokens of a running call, and give 0 for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.hugging_face.calls import original
from maskwise.models.packing import Packing, on_kept_tokens
from maskwise.models.quantized import is_quantized, own_forward
from maskwise.nn.binding import bind, is_bound, unbind

__all__ = [
    "DECODER",
    "INPUT",
    "SEQUENCE",
    "Reads",
    "Tokens",
    "computing",
    "hold",
    "is_computing",
    "kept_tokens",
    "linear_forward",
    "release",
    "rows_first",
    "sequences_of",
    "watch_padding",
]

SEQUENCE = "_maskwise_sequence"
"""The attribute of a layer that holds what it `Reads`."""
INPUT, DECODER = "input", "decoder"
DIMS = ((0, 1), (1, 0), (0, 2))
"""Where batch and length stand in what a layer reads: (B, L, D), (L, B, D) or (B, D, L)."""


class Reads(NamedTuple):
    """Of which sequence a layer reads one row for each token, and which dims of its input are batch and length."""

    sequence: str
    dims: tuple[int, int] = DIMS[0]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The kept tokens of a running call, by the sequence that they are of.

    Attributes:
        packings: the kept tokens of a padded batch.
        wider: how many columns of padding the model itself has added on the right of a sequence, and those tokens.
    """

    packings: dict[str, Packing] = field(default_factory=dict)
    wider: dict[str, tuple[int, Packing | None]] = field(default_factory=dict)

    def widen(self, sequence: str, columns: int) -> None:
        """Let layers read a sequence with so many columns of padding on its right."""
        packing = self.packings.get(sequence)
        wide = None if packing is None else Packing.of(functional.pad(packing.keep, (0, columns)))
        self.wider[sequence] = columns, wide

    def of(self, reads: Reads, x: Tensor) -> Packing | None:
        """The kept tokens of what a layer reads, or None where it computes all."""
        if x.dim() < 3:
            return None
        shape = tuple(x.shape[dim] for dim in reads.dims)
        _, wide = self.wider.get(reads.sequence, (0, None))
        found = (self.packings.get(reads.sequence), wide)
        return next((each for each in found if each is not None and each.keep.shape == shape), None)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Tokens] = []


_stack = _Stack()


@contextmanager
def computing(tokens: Tokens) -> Iterator[None]:
    """Let layers that are held compute these tokens only."""
    _stack.calls.append(tokens)
    try:
        yield
    finally:
        _stack.calls.pop()


def is_computing() -> bool:
    """Whether a call runs in this thread of which layers are held."""
    return bool(_stack.calls)


def kept_tokens(named: dict[str, Any]) -> Tokens:
    """The kept tokens of each sequence, with the first and the last column, which heads and generation read as well."""
    found = {}
    for sequence, name in ((INPUT, "attention_mask"), (DECODER, "decoder_attention_mask")):
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            keep = mask != 0
            keep[:, [0, -1]] = True
            found[sequence] = Packing.of(keep)
    return Tokens(found)


def linear_forward(self: Any, x: Tensor) -> Tensor:
    """A linear layer on the kept tokens of the running call; 0 for the others."""
    reads: Reads = vars(self)[SEQUENCE]
    packing = _stack.calls[-1].of(reads, x) if _stack.calls else None
    forward = own_forward(self)
    if packing is None:
        out: Tensor = forward(self, x)
        return out
    rows = packing.pack(x.movedim(reads.dims, (0, 1)))
    with on_kept_tokens(packing):
        found = forward(self, rows.t()).t() if isinstance(self, nn.Conv1d) else forward(self, rows)
    # Contiguous, as a layer's own result is: models call `view` on it.
    return packing.unpack(found).movedim((0, 1), reads.dims).contiguous()


def hold(model: nn.Module, sequences: dict[str, Reads]) -> None:
    """Let layers compute the kept tokens of a sequence: by path, each with what it reads."""
    release(model)
    for path, reads in sequences.items():
        layer = model.get_submodule(path)
        vars(layer)[SEQUENCE] = reads
        bind(layer, "forward", linear_forward)


def release(model: nn.Module) -> None:
    """Undo `hold`."""
    for layer in _layers(model):
        if vars(layer).pop(SEQUENCE, None) is not None and is_bound(layer, "forward", linear_forward):
            unbind(layer, "forward")


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that may be packed: linear ones of torch and of transformers, quantized ones, convolutions of one."""
    return [
        each
        for each in model.modules()
        if type(each) is nn.Linear or _is_of_transformers(each) or is_quantized(each) or _is_pointwise(each)
    ]


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether this is a convolution that reads one token at a time, as a linear layer does."""
    if type(layer) is not nn.Conv1d:
        return False
    return layer.kernel_size == (1,) and layer.stride == (1,) and layer.padding in {(0,), "valid", "same"}


def _is_of_transformers(layer: nn.Module) -> bool:
    kind = type(layer)
    is_linear = isinstance(layer, nn.Linear) or kind.__name__ == "Conv1D"
    return is_linear and kind.__module__.startswith(("transformers.models.", "transformers.pytorch_utils"))


def _is_free(layer: nn.Module) -> bool:
    """Whether nothing is in the place of a layer's forward, but for a float layer in place of a quantized one."""
    return "forward" not in vars(layer) or own_forward(layer) is not type(layer).forward


def sequences_of(
    module: Any, named: dict[str, Any], keeps: tuple[Tensor, Tensor], without: tuple[nn.Module, ...] = ()
) -> dict[str, Reads]:
    """The layers that read one row for each token, in all that they read, and of which sequence: by path.

    Args:
        module: the model.
        named: a call whose sequences have lengths that nothing else has.
        keeps: which tokens of the input and of the decoder are kept.
        without: parts of the model whose layers are left alone.
    """
    seen: dict[nn.Module, set[Reads | None]] = {}
    sizes = {(keep.shape[0], keep.shape[1]): name for keep, name in zip(keeps[::-1], (DECODER, INPUT), strict=True)}
    tokens = Tokens()

    def look(layer: nn.Module, inputs: Any) -> None:
        seen.setdefault(layer, set()).add(_reads(layer, inputs[0]))

    def _reads(layer: nn.Module, x: Tensor) -> Reads | None:
        if x.dim() < 3:
            return None
        added = {name: tokens.wider[name][0] for name in tokens.wider}
        wide = {(rows, length + added.get(name, 0)): name for (rows, length), name in sizes.items()}
        for dims in DIMS[2:] if isinstance(layer, nn.Conv1d) else DIMS[:2] if x.dim() == 3 else DIMS[:1]:
            shape = x.shape[dims[0]], x.shape[dims[1]]
            if (sequence := sizes.get(shape, wide.get(shape))) is not None:
                return Reads(sequence, dims)
        return None

    # What else is in the place of a forward, as `mw.nn.kept_head` puts there, stays.
    others = {each for part in without for each in part.modules()}
    layers = {each for each in _layers(module) if each not in others and _is_free(each)}
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with torch.no_grad(), computing(tokens):
            original(module, **named)
    finally:
        for handle in handles:
            handle.remove()
    paths = {layer: path for path, layer in module.named_modules()}
    found = {paths[layer]: next(iter(each)) for layer, each in seen.items() if len(each) == 1}
    # The decoder of FSMT, (L, B, D), attends to tokens that its mask drops: those must be computed.
    return {
        path: reads
        for path, reads in found.items()
        if reads is not None and (reads.sequence == INPUT or reads.dims == DIMS[0])
    }


def rows_first(sequences: dict[str, Reads]) -> dict[str, Reads]:
    """Those of the layers that read (B, L, ...)."""
    return {path: reads for path, reads in sequences.items() if reads.dims == DIMS[0]}


# -- models that pad a batch further, to whole windows -----------------------------------------------------------------
PADS = "_pad_to_window_size"
"""The method that does so, of Longformer and LED; it returns first how many columns it has added on the right."""


def pad_to_window(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The method, of which the running call learns how many columns there are now."""
    output = type(self)._pad_to_window_size(self, *args, **kwargs)
    if _stack.calls:
        _stack.calls[-1].widen(INPUT, output[0])
    return output


def watch_padding(model: nn.Module, *, watch: bool = True) -> None:
    """Let calls learn how many columns models add to what they are given; or no longer."""
    for module in model.modules():
        if hasattr(type(module), PADS):
            if watch:
                bind(module, PADS, pad_to_window)
            else:
                unbind(module, PADS)
