"""``mw.nn.masked(model)``: the norms and pools of a model become masked ones, and nn.Sequential passes the mask on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import beside_channels, check_module, check_tensor, leading
from maskwise.nn.conv import MaskedConv2d
from maskwise.nn.linear import MaskedLinear
from maskwise.nn.norm import (
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    MaskedBatchNorm3d,
    MaskedGroupNorm,
    MaskedInstanceNorm1d,
    MaskedLayerNorm,
)
from maskwise.nn.pool import MaskedAttentionPool, MaskedMaxPool, MaskedMeanPool
from maskwise.nn.sparse_linear import SparseLinear
from maskwise.nn.sync_norm import SYNCED
from maskwise.ops.arguments import MaskLike, check, fits
from maskwise.ops.primitives import fill_dropped

__all__ = ["MaskedSequential", "masked"]

OP = "masked"
Pattern: TypeAlias = str | type[nn.Module]
M = TypeVar("M", bound=nn.Module)


def masked(model: M, *, pointwise: Pattern | Sequence[Pattern] = ()) -> M:
    """Make a model accept a mask: masked layers replace norms and pools, and nn.Sequential passes the mask on.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
    >>> model = mw.nn.masked(model)
    >>> x, mask = torch.randn(2, 2, 6), mw.Mask.from_lengths([6, 3])
    >>> padded = x.masked_fill(~mask.to_bool()[:, None], torch.nan)
    >>> torch.equal(model(padded, mask), model(x, mask)), type(model[1]).__name__
    (True, 'MaskedBatchNorm1d')

    The result is a new model that shares its parameters and buffers with the original, so optimizers, ``state_dict``
    and training work for both. The original is not modified. ``model(x)`` is bitwise unchanged; ``model(x, mask)``
    takes a Mask or a bool tensor (N, *places), True meaning keep. Outputs at kept positions and gradients of parameters
    do not depend on dropped values. Outputs at dropped positions are 0.

    From layer to layer, the mask

    - is unchanged by elementwise layers, by layers that compute each position independently (Linear, LayerNorm,
      Embedding, convolutions of kernel size 1), and by norms, whose statistics exclude dropped positions;
    - is reduced by convolutions and pools with windows. Dropped positions are 0 for a convolution, as if the sequence
      ended there. With a padding of half the kernel, an output is kept if the centre of its window is kept; without
      padding, if its whole window is kept. In a right-padded batch, each sequence has the same outputs as without
      padding, for any stride. Other paddings are rejected;
    - becomes a mask of batch entries after a pool of output size 1 or ``nn.Flatten``: an entry is kept if one of its
      positions is kept.

    A module whose ``forward`` takes a ``mask`` receives it; norms, pools and nn.Sequential inside it are swapped too.
    Swapped modules keep their hooks. Any other module is rejected, with its name and the reason.

    Args:
        model: an nn.Sequential, a norm, a pool of output size 1, or a module whose forward takes a ``mask``.
        pointwise: names, with wildcards, or classes of modules that compute each place by itself. They are left as they
            are, and called without the mask, which stays.

    Returns:
        The new model, of the class of the old one or of a subclass; ``print`` shows what was swapped.

    Raises:
        DtypeError: ``model`` is not a module.
        ArgumentError: a mask cannot be seen through a part of it, or a name of ``pointwise`` matches nothing.
    """
    check_module(OP, model)
    patterns = (pointwise,) if isinstance(pointwise, (str, type)) else tuple(pointwise)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if isinstance(pattern, str) and not any(fnmatchcase(name, pattern) for name in names):
            must, hint = "match the name of a module", f"names are {[name for name in names if name][:5]}, ..."
            raise ArgumentError(say(OP, "pointwise", must=must, got=repr(pattern), hint=hint))
    swap = _Swap(patterns)
    new: Any = swap.of(model, "")
    if new is model and not takes_mask(model):
        must, hint = "be an nn.Sequential, a norm or a pool, or take a mask", "nn.Sequential(model)"
        raise ArgumentError(say(OP, "model", must=must, got=type(model).__name__, hint=hint))
    return new  # type: ignore[no-any-return]


# -- the container -----------------------------------------------------------------------------------------------------
class MaskedSequential(nn.Sequential):
    """``torch.nn.Sequential`` that passes a mask on from layer to layer; made by `masked`."""

    #: The names of children that compute each place by itself.
    pointwise: frozenset[str] = frozenset()

    def forward(self, input: Tensor, mask: MaskLike | Threaded | None = None) -> Tensor:
        """Call the layers one after the other, each with what the mask is by then."""
        if mask is None:
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        if isinstance(mask, Threaded):
            return self._thread(input, mask)
        check_tensor(OP, input)
        if not isinstance(mask, Mask) and (not isinstance(mask, Tensor) or mask.dtype is not torch.bool):
            check(OP, input, mask, "input")
        channels = _layout_of(self)
        threaded = Threaded(mask, None if channels == "unknown" else channels)
        if mask.ndim >= input.dim() and input.is_floating_point():
            must, hint = f"have one bool for each place of input {tuple(input.shape)}", "a mask (N, *places)"
            raise ShapeError(say(OP, "mask", must=must, got=tuple(mask.shape), hint=hint))
        # What is dropped must not reach the backward pass either, where 0 * NaN is NaN.
        return threaded.fill(self._thread(threaded.fill(input), threaded))

    def _thread(self, x: Tensor, threaded: Threaded) -> Tensor:
        for name, module in self._modules.items():
            assert module is not None
            x = _step(name, module, x, threaded, name in self.pointwise)
        return x


@dataclass(eq=False)
class Threaded:
    """A mask on its way through a model: what it keeps by now.

    Attributes:
        mask: (N, *places).
        channels: "first" for (N, C, *places), "last" for (N, *places, C), None where no layer has shown it.
        is_zero: whether dropped places are known to hold 0.
    """

    mask: MaskLike
    channels: str | None
    is_zero: bool = False

    def fill(self, x: Tensor, value: float = 0.0) -> Tensor:
        """X with a value where it is dropped."""
        if self.is_zero and value == 0.0:
            return x
        self.is_zero = value == 0.0
        channels = self.channels
        if channels is None and 1 < self.mask.ndim < x.dim():
            # No layer since one that may have moved them has shown where they are; if sizes do not either, x stays.
            shape, kept = tuple(x.shape), tuple(self.mask.shape)
            first = fits(kept, (shape[0], *shape[2:]))
            if first == fits(kept, shape[: len(kept)]):
                self.is_zero = False
                return x
            channels = "first" if first else "last"
        is_first = channels == "first" and self.mask.ndim > 1
        return fill_dropped(x, (beside_channels if is_first else leading)(OP, x, self.mask), value)

    def need(self, channels: str, name: str, module: nn.Module) -> None:
        """Record where a layer has its channels; raise if that is where others have places."""
        if self.mask.ndim > 1 and self.channels not in (None, channels):
            dims = {"first": "dim 1", "last": "the last dim"}
            must = f"have channels in {dims[str(self.channels)]} throughout, as (N, {_shape(self.channels)})"
            got = f"{name!r} ({type(module).__name__}), of which they are {dims[channels]}"
            hint = "a module that moves them and takes a mask, or another order of layers"
            raise ShapeError(say(OP, "model", must=must, got=got, hint=hint))
        self.channels = channels

    def pooled(self, keepdim: bool) -> None:
        """Keep the batch entries of which a place is kept: (N,), or (N, 1, ...)."""
        bits = self.mask.to_bool() if isinstance(self.mask, Mask) else self.mask
        if bits.dim() > 1:
            places = tuple(range(1, bits.dim()))
            self.mask = bits.any(places, keepdim=keepdim)
        if not keepdim:
            self.channels = None


def _shape(channels: str | None) -> str:
    return "C, *places" if channels == "first" else "*places, C"


# -- pools of output size 1 --------------------------------------------------------------------------------------------
class _ToOne(nn.Module):
    """Torch's pool without a mask, a pool of what is kept with one."""

    ours: MaskedMeanPool | MaskedMaxPool

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Pool (N, C, *places) to (N, C, 1, ...) over what a mask (N, *places) keeps."""
        return super().forward(input) if mask is None else self.ours(input, mask)  # type: ignore[no-any-return]


class MaskedAdaptiveAvgPool1d(_ToOne, nn.AdaptiveAvgPool1d):
    """The mean of kept places of (N, C, L)."""

    ours = MaskedMeanPool((2,), keepdim=True)


class MaskedAdaptiveAvgPool2d(_ToOne, nn.AdaptiveAvgPool2d):
    """The mean of kept places of (N, C, H, W)."""

    ours = MaskedMeanPool((2, 3), keepdim=True)


class MaskedAdaptiveAvgPool3d(_ToOne, nn.AdaptiveAvgPool3d):
    """The mean of kept places of (N, C, D, H, W)."""

    ours = MaskedMeanPool((2, 3, 4), keepdim=True)


class MaskedAdaptiveMaxPool1d(_ToOne, nn.AdaptiveMaxPool1d):
    """The largest of kept places of (N, C, L)."""

    ours = MaskedMaxPool((2,), keepdim=True)


class MaskedAdaptiveMaxPool2d(_ToOne, nn.AdaptiveMaxPool2d):
    """The largest of kept places of (N, C, H, W)."""

    ours = MaskedMaxPool((2, 3), keepdim=True)


class MaskedAdaptiveMaxPool3d(_ToOne, nn.AdaptiveMaxPool3d):
    """The largest of kept places of (N, C, D, H, W)."""

    ours = MaskedMaxPool((2, 3, 4), keepdim=True)


# -- one layer ---------------------------------------------------------------------------------------------------------
def _step(name: str, module: nn.Module, x: Tensor, threaded: Threaded, is_pointwise: bool) -> Tensor:
    """Call a layer, and leave what the mask is after it."""
    kind = None if is_pointwise else _kind(module)
    if kind is not None:
        return _STEPS[kind](name, module, x, threaded)
    threaded.is_zero = False
    out: Tensor
    if is_pointwise:
        out = module(x)
    else:
        out = module(x, mask=threaded.mask)
        # It may have moved them.
        threaded.channels = None
    return out


def _elementwise(name: str, module: nn.Module, x: Tensor, threaded: Threaded) -> Tensor:
    threaded.is_zero = threaded.is_zero and type(module) in _ZERO_AT_ZERO
    out: Tensor = module(x)
    return out


def _of_features(name: str, module: nn.Module, x: Tensor, threaded: Threaded) -> Tensor:
    threaded.need("last", name, module)
    threaded.is_zero = False
    out: Tensor = module(x)
    return out


def _along_channels(name: str, module: Any, x: Tensor, threaded: Threaded) -> Tensor:
    """A function of all channels of a place: along dim 1, or along the last dim."""
    if getattr(module, "num_parameters", None) != 1:  # a PReLU of one parameter is elementwise
        dim = getattr(module, "dim", -3 if isinstance(module, nn.Softmax2d) else 1) % x.dim()
        if dim not in (1, x.dim() - 1):
            must, got = "keep places apart", f"{name!r} ({type(module).__name__}), which goes along dim {dim}"
            raise ShapeError(say(OP, "model", must=must, got=got, hint="dim=1, or dim=-1, where channels are"))
        threaded.need("first" if dim == 1 else "last", name, module)
    threaded.is_zero = False
    out: Tensor = module(x)
    return out


def _norm(channels: str) -> Callable[..., Tensor]:
    def step(name: str, module: Any, x: Tensor, threaded: Threaded) -> Tensor:
        threaded.need(channels, name, module)
        out: Tensor = module(x, threaded.mask)
        threaded.is_zero = module.empty == 0.0
        return out

    return step


def _pool_to_one(name: str, module: nn.Module, x: Tensor, threaded: Threaded) -> Tensor:
    threaded.need("first", name, module)
    out: Tensor = module(x, threaded.mask)
    threaded.pooled(keepdim=True)
    threaded.is_zero = True
    return out


def _own_pool(name: str, module: Any, x: Tensor, threaded: Threaded) -> Tensor:
    out: Tensor = module(x, threaded.mask)
    threaded.pooled(keepdim=getattr(module, "keepdim", False))
    threaded.is_zero = module.empty == 0.0
    return out


def _flatten(name: str, module: nn.Module, x: Tensor, threaded: Threaded) -> Tensor:
    # What follows reads every place.
    out: Tensor = module(threaded.fill(x))
    threaded.pooled(keepdim=False)
    return out


def _sequential(name: str, module: nn.Module, x: Tensor, threaded: Threaded) -> Tensor:
    out: Tensor = module(x, threaded)
    return out


def _windows(name: str, module: Any, x: Tensor, threaded: Threaded) -> Tensor:
    """A convolution, or a pool with windows."""
    threaded.need("first", name, module)
    is_max = isinstance(module, _MAX_POOLS)
    if is_max or any(window.size > 1 for window in _windows_of(module)):
        # A kept place must not read its dropped neighbours; to a largest value, they are what torch pads with.
        x = threaded.fill(x, -inf if is_max else 0.0)
    out: Tensor = module(x)
    beside_channels(OP, x, threaded.mask)  # raises where it does not fit
    mask = threaded.mask.expand(x.shape[0], *x.shape[2:])
    threaded.mask, threaded.is_zero = _seen_through(_windows_of(module), mask), False
    return threaded.fill(out) if is_max else out


# -- windows -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Window:
    """A window along one dim of places."""

    size: int
    stride: int
    dilation: int
    padding: int | None  # None: as many places come out as go in

    @property
    def is_centred(self) -> bool:
        """Whether an output stands for the input at the centre of its window."""
        return self.padding is None or 2 * self.padding == self.dilation * (self.size - 1)


def _windows_of(module: Any) -> list[_Window]:
    kind = _kind(module)
    dims = 1 if kind is None else int(kind.__name__[-2])  # the 2 of Conv2d

    def each(value: Any) -> tuple[Any, ...]:
        return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims

    padding = {"same": None, "valid": 0}[module.padding] if isinstance(module.padding, str) else module.padding
    dilation = getattr(module, "dilation", 1)
    numbers = zip(each(module.kernel_size), each(module.stride), each(dilation), each(padding), strict=True)
    return [_Window(*each) for each in numbers]


def _seen_through(windows: Sequence[_Window], mask: MaskLike) -> MaskLike:
    """Which outputs are kept: by the centre of their window where it is padded, else by all of it.

    >>> _seen_through([_Window(3, 2, 1, 1)], Mask.from_lengths([5, 2], 6)).tolist()
    [[True, True, True], [True, False, False]]
    >>> _seen_through([_Window(2, 2, 1, 0)], Mask.from_lengths([5, 2], 6)).tolist()
    [[True, True, False], [True, False, False]]
    """
    for dim, window in enumerate(windows, 1):
        before = (slice(None),) * dim
        if window.is_centred:
            mask = mask if window.stride == 1 else mask[(*before, slice(None, None, window.stride))]
            continue
        reach = window.dilation * (window.size - 1)
        last = mask.shape[dim] - reach
        taps = range(0, reach + 1, window.dilation)
        first, *rest = (mask[(*before, slice(tap, tap + last, window.stride))] for tap in taps)
        for each in rest:
            first = first & each
        mask = first
    return mask


# -- what can be seen through ------------------------------------------------------------------------------------------
_ZERO_AT_ZERO = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU,
    nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh, nn.Softsign, nn.Tanhshrink,
    nn.Hardshrink, nn.Softshrink,
)  # fmt: skip
_ELEMENTWISE = (
    *_ZERO_AT_ZERO, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus,
    nn.Threshold, nn.Hardtanh,
)  # fmt: skip
_OF_FEATURES = (nn.Linear, nn.RMSNorm, nn.Embedding, MaskedLinear, SparseLinear)
_ALONG_CHANNELS = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU, nn.PReLU)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, MaskedConv2d)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_CHANNEL_NORMS = {
    nn.BatchNorm1d: MaskedBatchNorm1d,
    nn.BatchNorm2d: MaskedBatchNorm2d,
    nn.BatchNorm3d: MaskedBatchNorm3d,
    nn.GroupNorm: MaskedGroupNorm,
    nn.InstanceNorm1d: MaskedInstanceNorm1d,
}
_POOLS_TO_ONE = {
    nn.AdaptiveAvgPool1d: MaskedAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: MaskedAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: MaskedAdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d: MaskedAdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d: MaskedAdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d: MaskedAdaptiveMaxPool3d,
}
#: What each kind of module becomes; all others stay what they are.
_SWAPPED: dict[type[nn.Module], type[nn.Module]] = {
    **_CHANNEL_NORMS,
    **_POOLS_TO_ONE,
    nn.LayerNorm: MaskedLayerNorm,
}
_STEPS: dict[type[nn.Module], Callable[..., Tensor]] = {
    MaskedSequential: _sequential,
    nn.Flatten: _flatten,
    MaskedLayerNorm: _norm("last"),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_OF_FEATURES, _of_features),
    **dict.fromkeys(_ALONG_CHANNELS, _along_channels),
    **dict.fromkeys((*_CONVOLUTIONS, *_MAX_POOLS, *_MEAN_POOLS), _windows),
    **dict.fromkeys((*_CHANNEL_NORMS.values(), *SYNCED), _norm("first")),
    **dict.fromkeys(_POOLS_TO_ONE.values(), _pool_to_one),
    **dict.fromkeys((MaskedMeanPool, MaskedMaxPool, MaskedAttentionPool), _own_pool),
}
#: Norms that read more than one place, and what to write instead where there is no masked one.
_OTHER_NORMS = {
    nn.InstanceNorm2d: "nn.GroupNorm(C, C), which is the same",
    nn.InstanceNorm3d: "nn.GroupNorm(C, C), which is the same",
    nn.SyncBatchNorm: "nn.BatchNorm1d, 2d or 3d, and mw.nn.convert_sync_masked(model) afterwards",
    nn.LocalResponseNorm: "nn.GroupNorm",
}
_MIXING = (*_CHANNEL_NORMS, *_OTHER_NORMS)


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """The kind of layer that this is, by what its forward does: a subclass may have another."""
    own = type(module)
    for each in own.__mro__:
        if each in _STEPS:
            return each if own.forward is each.forward else None
    return None


def _layout_of(model: MaskedSequential) -> str | None:
    """Where the first layer that shows it has its channels; "unknown" after a layer that may move them."""
    for name, module in model._modules.items():
        assert module is not None
        kind = _kind(module)
        if name in model.pointwise:
            continue
        if isinstance(module, MaskedSequential):
            if (found := _layout_of(module)) is not None:
                return found
        elif kind is None or kind is nn.Flatten:
            return "unknown"
        elif _STEPS[kind] is _of_features or kind is MaskedLayerNorm:
            return "last"
        elif _STEPS[kind] in (_windows, _pool_to_one) or issubclass(kind, tuple(_CHANNEL_NORMS)):
            return "first"
    return None


# -- swapping ----------------------------------------------------------------------------------------------------------
class _Swap:
    """What becomes of each module; one that is used twice stays one."""

    def __init__(self, pointwise: tuple[Pattern, ...]) -> None:
        self._pointwise = pointwise
        self._new: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module, path: str) -> nn.Module:
        """The module with a mask, or itself where it stays what it is; raise where no mask can be seen through."""
        if module not in self._new:
            self._new[module] = self._made(module, path)
        return self._new[module]

    def _made(self, module: nn.Module, path: str) -> nn.Module:
        kind = type(module)
        if "forward" in vars(module):
            raise _refused(
                path, module, "something has replaced its forward", "mw.models.repad(model), if it was unpadded"
            )
        if kind in _SWAPPED:
            if reason := _pool_reason(module) if kind in _POOLS_TO_ONE else None:
                raise _refused(path, module, *reason)
            return _like(_SWAPPED[kind], module)
        if kind.forward is nn.Sequential.forward:
            return self._sequential(module, path)
        if _kind(module) is not None:
            if reason := _reason(module):
                raise _refused(path, module, *reason)
            return module
        for norm, instead in _OTHER_NORMS.items():
            if isinstance(module, norm):
                raise _refused(path, module, f"there is no masked {norm.__name__}", instead)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise _refused(path, module, "it has no forward", "nn.Sequential(*modules)")
        if kind.__module__.startswith("torch.nn."):
            hint = f"a module around it whose forward takes a mask, or pointwise={path!r} if it keeps places apart"
            raise _refused(path, module, "it may read other places, and takes no mask of them", hint)
        if not takes_mask(module):
            hint = f"forward(self, x, mask=None), or pointwise={path!r} if it computes each place by itself"
            raise _refused(path, module, "its forward takes no mask", hint)
        return self._around(module, path)

    def _sequential(self, module: nn.Module, path: str) -> nn.Module:
        new, names = _like(MaskedSequential, module), set()
        for name, child in module.named_children():
            if self._is_pointwise(child, _join(path, name)):
                names.add(name)
            else:
                new._modules[name] = self.of(child, _join(path, name))
        vars(new)["pointwise"] = frozenset(names)
        return new

    def _around(self, module: nn.Module, path: str) -> nn.Module:
        """A module that sees to the mask itself: its children are called as it likes, those that have one with it."""
        new = _like(type(module), module)
        for name, child in module.named_children():
            inner = _join(path, name)
            if self._is_pointwise(child, inner):
                continue
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                new._modules[name] = self._around(child, inner)
                continue
            try:
                new._modules[name] = self.of(child, inner)
            except ArgumentError:
                # Without norms of more than one place, its caller may call it as before.
                if any(isinstance(each, _MIXING) for each in child.modules()):
                    raise
        return new

    def _is_pointwise(self, module: nn.Module, path: str) -> bool:
        return any(
            fnmatchcase(path, each) if isinstance(each, str) else isinstance(module, each) for each in self._pointwise
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _like(kind: type[M], module: nn.Module) -> M:
    """A module of another kind, or of the same, around the same parameters and buffers, with children of its own."""
    new = kind.__new__(kind)
    own = {name: value.copy() if "_hooks" in name else value for name, value in vars(module).items()}
    # The dicts of parameters and buffers are shared: `.to()` puts new buffers there.
    vars(new).update(own, _modules=dict(module._modules))
    return new


def takes_mask(module: nn.Module) -> bool:
    """Whether the forward of a module has a parameter ``mask``."""
    return "mask" in inspect.signature(module.forward).parameters


def _refused(path: str, module: nn.Module, reason: str, hint: str) -> ArgumentError:
    must = "be made of layers that a mask can be seen through"
    got = f"{path!r} ({type(module).__name__}): {reason}" if path else f"a {type(module).__name__}: {reason}"
    return ArgumentError(say(OP, "model", must=must, got=got, hint=hint))


def _pool_reason(module: Any) -> tuple[str, str] | None:
    """Why an adaptive pool has no masked form, and what to write instead."""
    sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
    if any(size != 1 for size in sizes):
        return f"its windows depend on the padded size, with output size {module.output_size}", "output size 1"
    if getattr(module, "return_indices", False):
        return "it returns indices", "return_indices=False"
    return None


def _reason(module: Any) -> tuple[str, str] | None:
    """Why no mask can be seen through a layer of a known kind, and what to write instead."""
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return "it merges some dims, of which the mask may have one", "nn.Flatten()"
    if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) > 1:
        return "it normalizes more than a place", "nn.RMSNorm(features)"
    if isinstance(module, _ALONG_CHANNELS) and getattr(module, "dim", 1) is None:
        return "it has no dim", f"nn.{type(module).__name__}(dim=-1)"
    if not isinstance(module, (*_CONVOLUTIONS, *_MAX_POOLS, *_MEAN_POOLS)):
        return None
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"it pads with values of other places ({module.padding_mode})", 'padding_mode="zeros"'
    if getattr(module, "ceil_mode", False):
        return "it has windows that reach over the end", "ceil_mode=False"
    if getattr(module, "return_indices", False):
        return "it returns indices", "return_indices=False"
    windows = _windows_of(module)
    if not all(each.is_centred or each.padding == 0 for each in windows):
        half = tuple(each.dilation * (each.size - 1) // 2 for each in windows)
        return "its padding is neither 0 nor half its kernel", f"padding={half[0] if len(half) == 1 else half}, or 0"
    if any(each.padding for each in windows) and not getattr(module, "count_include_pad", True):
        return "it counts the places of a window up to the padded end", "count_include_pad=True"
    return None
