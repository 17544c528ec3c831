"""What the layers check: their input, how a mask lines up with it, the module they are made from, and ``empty``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, check, fits, input_hint, need_dense
from maskwise.ops.primitives import replace_empty
from maskwise.ops.torch_private import is_tracing, is_transformed, is_vmapped_or_functional
from maskwise.plan.dispatch import is_dry_run

__all__ = [
    "GivesEmpty",
    "along_dims",
    "beside_channels",
    "check_channels",
    "check_dims",
    "check_empty",
    "check_features",
    "check_initialized",
    "check_linear",
    "check_module",
    "check_tensor",
    "fit_dtype",
    "in_groups",
    "keeps_all",
    "leading",
    "packs",
    "with_empty",
]


# -- inputs: checked first, since a wrong size may fit a part of the weight --------------------------------------------
def check_tensor(op: str, input: object) -> None:
    """Raise unless the input is a tensor."""
    if not isinstance(input, Tensor):
        hint = "torch.as_tensor(input)"
        raise DtypeError(say(op, "input", must="be a tensor", got=type(input).__name__, hint=hint))
    need_dense(op, "input", input)


def check_features(
    op: str,
    input: Tensor,  # (..., features)
    features: int,
    weight: Tensor,
) -> None:
    """Raise unless the input ends in the layer's features, in the dtype of its weight and on its device."""
    check_tensor(op, input)
    if not input.dim() or input.shape[-1] != features:
        must, hint = f"end in {features} features", input_hint(input, features)
        raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=hint))
    if input.dtype is not weight.dtype or input.device != weight.device:
        _check_kind(op, input, weight)


def check_channels(
    op: str,
    input: Tensor,  # (N, channels, H, W) or (channels, H, W)
    channels: int,
    weight: Tensor,
) -> None:
    """The same for images: as many channels as the layer has, before height and width."""
    check_tensor(op, input)
    if input.dim() not in (3, 4) or input.shape[-3] != channels:
        sizes = tuple(input.shape)
        must = f"be (N, {channels}, H, W) or ({channels}, H, W)"
        hint = (
            f"a layer of {sizes[-3]} channels" if len(sizes) in (3, 4) else f"input.unflatten(-1, ({channels}, H, W))"
        )
        if len(sizes) in (3, 4) and sizes[-1] == channels:
            hint = "input.movedim(-1, -3)"
        elif len(sizes) == 2 and channels == 1:
            hint = "input[None]"
        raise ShapeError(say(op, "input", must=must, got=sizes, hint=hint))
    if input.dtype is not weight.dtype or input.device != weight.device:
        _check_kind(op, input, weight)


def check_dims(op: str, input: Tensor, *shapes: str) -> None:
    """Raise unless the input has as many dims as one of these shapes, such as ``"(N, C, L)"``."""
    check_tensor(op, input)
    dims = [shape.count(",") + 1 for shape in shapes]
    if input.dim() not in dims:
        hint = "input[None]" if input.dim() + 1 == dims[-1] else f"input.flatten({dims[-1] - 1})"
        hint = hint if input.dim() + 1 >= dims[-1] else f"input.unflatten(-1, {shapes[-1]})"
        raise ShapeError(say(op, "input", must=f"be {' or '.join(shapes)}", got=tuple(input.shape), hint=hint))


def _check_kind(op: str, input: Tensor, weight: Tensor) -> None:
    if input.device != weight.device:
        must, hint = f"be on the layer's device {weight.device}", f"input.to({str(weight.device)!r})"
        raise DeviceError(say(op, "input", must=must, got=input.device, hint=hint))
    kind = input.device.type
    # Autocast casts both.
    if not is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        must, hint = f"have the layer's dtype {weight.dtype}", f"input.to({weight.dtype}), or layer.to({input.dtype})"
        raise DtypeError(say(op, "input", must=must, got=input.dtype, hint=hint))


# -- modules -----------------------------------------------------------------------------------------------------------
def check_module(op: str, module: object, argument: str = "model") -> None:
    """Raise unless it is a module, and no class of them."""
    if not isinstance(module, nn.Module):
        hint = f"{module.__name__}(...)" if isinstance(module, type) else "torch.nn.Sequential(...)"
        raise DtypeError(say(op, argument, must="be a torch.nn.Module", got=type(module).__name__, hint=hint))


def check_linear(op: str, linear: object) -> None:
    """Raise unless it is a torch.nn.Linear with weights."""
    if not isinstance(linear, nn.Linear):
        hint = "module.linear, or mw.nn.prune(model, ...) for a whole model; convolutions have no such form"
        raise DtypeError(say(op, "linear", must="be a torch.nn.Linear", got=type(linear).__name__, hint=hint))
    check_initialized(op, "linear", linear.weight)


def check_initialized(op: str, argument: str, weight: Tensor | None) -> None:
    """Raise for the weight of a lazy module that has had no input yet."""
    if weight is not None and is_lazy(weight):
        must, hint = "have weights of a known shape", "model(example) once before, which initializes lazy modules"
        raise ArgumentError(say(op, argument, must=must, got="an uninitialized parameter of a lazy module", hint=hint))


# -- masks: by positions, and not by broadcasting alone ----------------------------------------------------------------
# Each function returns a mask with as many dims as the input, which broadcasts to it: intervals as a Mask, else bits.
def keeps_all(mask: MaskLike) -> bool:
    """Whether everything is known to be kept; without a host-device sync, and never in a graph."""
    if is_tracing() or is_vmapped_or_functional():
        return False
    if isinstance(mask, Mask):
        facts = mask.facts
        if facts.count is not None:
            return facts.count == facts.numel
        return mask.device.type == "cpu" and mask.is_full
    return isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.device.type == "cpu" and bool(mask.all())


def packs(x: Tensor) -> bool:
    """Whether a layer of single rows runs on kept rows alone: where counting them takes no host-device sync."""
    return x.device.type == "cpu" and not is_tracing() and not is_transformed()


def beside_channels(
    op: str,
    x: Tensor,  # (N, C, *places) or, with channels=0, (C, *places)
    mask: MaskLike,  # (N, *places), or as many dims as x has
    channels: int = 1,
) -> MaskLike:
    """A mask of x's shape without its channels, with a dim of size 1 for them; or one of x's dims, as it is."""
    kept = _operand(op, x, mask)
    if kept.dim() == x.dim() - 1:
        kept = _view(kept, (*[slice(None)] * channels, None))

    def needs() -> tuple[str, str]:
        shape = tuple(x.shape)
        places = shape[:channels] + shape[channels + 1 :]
        must = f"be input's shape without its channels, {places}, or broadcast to input's shape {shape}"
        return must, _channel_hint(tuple(mask.shape), shape, places, channels)

    return _fitting(op, x, kept, mask, needs)


def in_groups(mask: MaskLike, sizes: tuple[int, int]) -> MaskLike:
    """A mask of (N, C, *places) as one of (N, G, C / G, *places); where its channels have size 1, both have."""
    if mask.shape[1] == 1:
        return _view(mask, (slice(None), None))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    return bits.reshape(bits.shape[0], *sizes, *bits.shape[2:])


def leading(
    op: str,
    x: Tensor,  # (*lead, *rest)
    mask: MaskLike,  # (*lead), or as many dims as x has
) -> MaskLike:
    """A mask of x's leading dims, as ``x[mask]`` takes it, with dims of size 1 for the rest; or one of all x's dims."""
    kept = _operand(op, x, mask)
    if kept.dim() < x.dim():
        kept = _view(kept, (..., *[None] * (x.dim() - kept.dim())))

    def needs() -> tuple[str, str]:
        must = f"be input's leading dims, or broadcast to all of them, {tuple(x.shape)}"
        return must, "mask.T" if mask.ndim == 2 and fits(tuple(mask.shape)[::-1], x.shape[:2]) else _LEADING

    return _fitting(op, x, kept, mask, needs)


def along_dims(
    op: str,
    x: Tensor,
    mask: MaskLike,
    dims: list[int],  # not negative, sorted
) -> MaskLike:
    """A mask of the batch (dim 0) and the dims that are pooled, wherever these are; else as `leading`."""
    kept = _operand(op, x, mask)
    if kept.dim() == x.dim() or kept.dim() != 1 + len(dims) or 0 in dims:
        return leading(op, x, mask)
    key = tuple([slice(None) if d == 0 or d in dims else None for d in range(x.dim())])

    def needs() -> tuple[str, str]:
        pooled = tuple(x.shape[d] for d in (0, *dims))
        must = f"be the batch and the pooled dims, {pooled}, or broadcast to input's shape {tuple(x.shape)}"
        elsewhere = [d for d in range(1, x.dim()) if len(dims) == 1 and fits(kept.shape, (x.shape[0], x.shape[d]))]
        return must, (
            f"pool along dim={elsewhere[0]}" if elsewhere else f"input is pooled along {tuple(dims)}; dim= says where"
        )

    return _fitting(op, x, _view(kept, key), mask, needs)


_LEADING = "a mask of fewer dims lines up from the left, as input[mask] does"


def _operand(op: str, x: Tensor, mask: MaskLike) -> MaskLike:
    """The mask as functions take it: a Mask of intervals as it is, any other as bools."""
    if isinstance(mask, Mask):
        if mask.operand == "intervals" and isinstance(x, Tensor) and not is_tracing():
            return mask
        mask = mask.to_bool()
    need_dense(op, "mask", mask)
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not isinstance(x, Tensor):
        check(op, x, mask, "input")
    return mask


def _view(kept: MaskLike, key: tuple[Any, ...]) -> MaskLike:
    """The mask with further dims of size 1. A Mask caches it, with its bounds: the next layer takes the same."""
    return kept._once(f"layer {key}", lambda: kept[key]) if isinstance(kept, Mask) else kept[key]


def _fitting(op: str, x: Tensor, kept: MaskLike, mask: MaskLike, needs: Callable[[], tuple[str, str]]) -> MaskLike:
    """The mask if it fits x; ``needs`` gives the requirement and the hint of the message."""
    if kept.dim() != x.dim() or not fits(kept.shape, x.shape):
        must, hint = needs()
        raise ShapeError(say(op, "mask", must=must, got=tuple(mask.shape), hint=hint))
    if isinstance(kept, Tensor):
        check(op, x, kept, "input")
    elif kept.device != x.device:
        check(op, x, torch.empty((), dtype=torch.bool, device=kept.device).expand(kept.shape), "input")
    return kept


def _channel_hint(mask: tuple[int, ...], x: tuple[int, ...], places: tuple[int, ...], channels: int) -> str:
    """What to write instead.

    >>> _channel_hint((8, 128), (8, 128, 64), (8, 64), 1)
    'input.movedim(-1, 1), since channels are dim 1'
    """
    if len(mask) == len(x) - 1 and fits(mask, x[:-1]):
        return f"input.movedim(-1, {channels}), since channels are dim {channels}"
    if len(mask) == 2 and fits(mask[::-1], places):
        return "mask.T"
    return "one bool for each position, which all its channels share"


# -- slices of which nothing is kept -----------------------------------------------------------------------------------
# They give 0, or ``empty``: a NaN would reach every weight of the layer that follows, whose gradient is a product with
# this output.
def check_empty(op: str, empty: float) -> float:
    """The argument ``empty`` of a layer as a float, or raise.

    >>> check_empty("MaskedMeanPool", 1)
    1.0
    """
    if not isinstance(empty, (int, float)) or isinstance(empty, bool):
        hint = 'empty=0.0, or float("nan") for a value that must not go unseen'
        raise DtypeError(say(op, "empty", must="be a number", got=type(empty).__name__, hint=hint))
    return float(empty)


def with_empty(
    op: str,
    out: Tensor,  # x's shape, or that with ``dims`` reduced
    x: Tensor,
    mask: MaskLike,  # broadcasts to x
    dims: list[int],
    keepdim: bool,
    empty: float,
) -> Tensor:
    """``out`` with ``empty`` where nothing along ``dims`` is kept; the gradient of such a slice is zero."""
    return replace_empty(op, x, mask, dims, keepdim, fit_dtype(op, empty, out.dtype))(out)


class GivesEmpty(nn.Module):
    """What the norms have in common: torch's arguments, and ``empty``."""

    #: What a slice of which nothing is kept gives; a class attribute too, for layers that were pickled without it.
    empty: float = 0.0

    def __init__(self, *args: Any, empty: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.empty = check_empty(type(self).__name__, empty)

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        return f"{super().extra_repr()}, empty={self.empty}"

    def _with_empty(self, out: Tensor, x: Tensor, mask: MaskLike, dims: list[int]) -> Tensor:
        """The output, which is 0 where it is dropped, with ``empty`` where nothing along ``dims`` is kept."""
        return (
            out
            if self.empty == 0.0 or is_dry_run()
            else with_empty(type(self).__name__, out, x, mask, dims, True, self.empty)
        )


def fit_dtype(op: str, empty: float, dtype: torch.dtype) -> float:
    """A number that keeps the dtype of what it is put into, or raise."""
    if dtype.is_floating_point or dtype.is_complex:
        if not torch.finfo(dtype).max < abs(empty) < math.inf:
            return empty
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if empty.is_integer() and least <= empty <= most:
            return bool(empty) if dtype is torch.bool else int(empty)
    must, hint = f"fit the input's dtype {dtype}", f"{op}(..., empty=0.0), or an input of torch.float32"
    raise ArgumentError(say(op, "empty", must=must, got=empty, hint=hint))
