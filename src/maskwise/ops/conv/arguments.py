"""What a convolution is called with: its checks, and how the positions of its input and output relate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, fits, mask_hint, need_dense

__all__ = ["Geometry", "Ints", "Options", "check", "geometry_of", "line_up", "seen_through", "wanted_by_default"]

Ints: TypeAlias = int | Sequence[int]
Pair: TypeAlias = tuple[int, int]


class Options(NamedTuple):
    """The arguments of a call as they were passed."""

    op: str
    dims: int
    stride: Ints
    padding: Ints | str
    dilation: Ints
    groups: int
    #: Of a transposed convolution; None for others.
    output_padding: Ints | None = None

    @property
    def is_transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.output_padding is not None


class Geometry(NamedTuple):
    """How positions relate: ``fine = coarse * stride - before + tap * dilation``, for each of two dims.

    A convolution reads fine positions and writes coarse ones, a transposed one the reverse. One-dimensional
    convolutions have a first dim of size 1.
    """

    kernel: Pair
    stride: Pair
    before: Pair
    dilation: Pair
    groups: int
    fine: Pair
    coarse: Pair

    @property
    def span(self) -> Pair:
        """The distance from the first to the last tap."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))  # type: ignore[return-value]

    @property
    def taps(self) -> int:
        """The number of taps."""
        return self.kernel[0] * self.kernel[1]


def check(
    options: Options, x: Tensor, weight: Tensor, bias: Tensor | None, other: float | Tensor | None, autocast: bool
) -> tuple[Geometry, tuple[int, ...]]:
    """The geometry of a call and the shape of its result, or raise."""
    op, dims, groups = options.op, options.dims, options.groups
    _check_tensors(op, x, weight, bias, autocast)
    if x.dim() not in (dims + 1, dims + 2):
        must = f"have {dims + 2} dims, or {dims + 1} without a batch"
        raise ShapeError(say(op, "x", must=must, got=tuple(x.shape), hint=_dims_hint(x, dims)))
    if weight.dim() != dims + 2:
        first = "in, out / groups" if options.is_transposed else "out, in / groups"
        must, hint = f"have {dims + 2} dims, ({first}, *kernel)", f"weight.reshape(-1, {x.shape[-dims - 1]}, ...)"
        raise ShapeError(say(op, "weight", must=must, got=tuple(weight.shape), hint=hint))
    if 0 in (weight.shape[0], *weight.shape[2:]):
        must, hint = "have at least one channel and one tap", "torch.zeros(channels, channels, 3, 3)"
        raise ShapeError(say(op, "weight", must=must, got=tuple(weight.shape), hint=hint))
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1 or weight.shape[0] % groups:
        must = f"be a positive int that divides the weight's {weight.shape[0]}"
        raise ArgumentError(say(op, "groups", must=must, got=groups, hint="groups=1"))
    inputs = weight.shape[0] if options.is_transposed else weight.shape[1] * groups
    outputs = weight.shape[1] * groups if options.is_transposed else weight.shape[0]
    if x.shape[-dims - 1] != inputs:
        must = f"have the weight's {inputs} channels in dim {-dims - 1}"
        hint = (
            "x.movedim(-1, 1)"
            if x.dim() == dims + 2 and x.shape[-1] == inputs
            else f"a weight of shape {_like(x, weight, options)}"
        )
        raise ShapeError(say(op, "x", must=must, got=tuple(x.shape), hint=hint))
    if bias is not None and tuple(bias.shape) != (outputs,):
        must = f"have one value for each of the {outputs} output channels"
        hint = "bias.flatten()" if bias.numel() == outputs else f"torch.zeros({outputs})"
        raise ShapeError(say(op, "bias", must=must, got=tuple(bias.shape), hint=hint))
    geometry = geometry_of(options, tuple(x.shape[-dims:]), tuple(weight.shape[2:]))
    spatial = geometry.fine if options.is_transposed else geometry.coarse
    shape = (*x.shape[: -dims - 1], outputs, *spatial[-dims:])
    if isinstance(other, Tensor):
        need_dense(op, "other", other)
        if other.device != x.device and other.dim():
            must, hint = f"be on x's device {x.device}", "other.to(x.device)"
            raise DeviceError(say(op, "other", must=must, got=other.device, hint=hint))
        if other.is_complex() and not x.is_complex():
            must, hint = f"fit x's dtype {x.dtype}", "other.real"
            raise DtypeError(say(op, "other", must=must, got=other.dtype, hint=hint))
        if not fits(other.shape, shape):
            must, hint = f"broadcast to the result's shape {shape}", "other=0.0, or the result of an earlier call"
            raise ShapeError(say(op, "other", must=must, got=tuple(other.shape), hint=hint))
    elif other is not None and (not isinstance(other, (int, float)) or isinstance(other, bool)):
        must = "be a number, a tensor or None"
        raise DtypeError(say(op, "other", must=must, got=type(other).__name__, hint="other=0.0"))
    return geometry, shape


def _check_tensors(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool) -> None:
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        need_dense(op, name, value)
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise DtypeError(
                say(op, name, must="be a tensor", got=type(value).__name__, hint=f"torch.as_tensor({name})")
            )
    if not (x.is_floating_point() or x.is_complex()):
        raise DtypeError(say(op, "x", must="be floating", got=x.dtype, hint="x.float()"))
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if value.device != x.device:
            must, hint = f"be on x's device {x.device}", f"{name}.to(x.device)"
            raise DeviceError(say(op, name, must=must, got=value.device, hint=hint))
        if value.dtype != x.dtype and not autocast:
            must, hint = f"have x's dtype {x.dtype}", f"{name}.to(x.dtype)"
            raise DtypeError(say(op, name, must=must, got=value.dtype, hint=hint))


def _dims_hint(x: Tensor, dims: int) -> str:
    if x.dim() == dims:
        return "x[None] for one channel"
    if x.dim() == dims + 3:
        return "mw.conv2d" if dims == 1 else "x.flatten(0, 1)"
    return "(batch, channels, *positions)"


def _like(x: Tensor, weight: Tensor, options: Options) -> tuple[int, ...]:
    channels, shape = x.shape[-options.dims - 1], list(weight.shape)
    shape[0 if options.is_transposed else 1] = channels if options.is_transposed else channels // options.groups
    return tuple(shape)


# -- numbers -----------------------------------------------------------------------------------------------------------
def _ints(options: Options, name: str, value: Ints, least: int) -> tuple[int, ...]:
    """One number for each dim."""
    dims = options.dims
    each = (value,) * dims if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    each = each * dims if len(each) == 1 else each
    is_whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= least for number in each)
    if len(each) != dims or isinstance(value, str) or not is_whole:
        kind = "int of at least" if dims == 1 else f"int, or {dims} of them, of at least"
        hint = f"{name}={least}" if dims == 1 else f"{name}={(least,) * dims}"
        raise ArgumentError(say(options.op, name, must=f"be an {kind} {least}", got=repr(value), hint=hint))
    return each


def geometry_of(options: Options, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> Geometry:
    """How the positions of an input of some sizes relate to those of the result."""
    stride, dilation = _ints(options, "stride", options.stride, 1), _ints(options, "dilation", options.dilation, 1)
    span = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    before, after = _padding(options, stride, span)
    if options.output_padding is None:
        out = [
            (size + b + a - total - 1) // s + 1
            for size, b, a, total, s in zip(sizes, before, after, span, stride, strict=True)
        ]
    else:
        extra = _ints(options, "output_padding", options.output_padding, 0)
        if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
            must, hint = "be less than stride or dilation", "output_padding=stride - 1 at most"
            raise ArgumentError(say(options.op, "output_padding", must=must, got=options.output_padding, hint=hint))
        out = [
            (size - 1) * s - b - a + total + e + 1
            for size, s, b, a, total, e in zip(sizes, stride, before, after, span, extra, strict=True)
        ]
    if min(*out, *sizes) < 1:
        must = f"have at least one position under a kernel of {tuple(kernel)}, with its padding and dilation"
        raise ShapeError(say(options.op, "x", must=must, got=sizes, hint="padding=kernel_size // 2"))
    fine, coarse = (out, sizes) if options.is_transposed else (sizes, out)
    return Geometry(
        _pair(kernel, 1),
        _pair(stride, 1),
        _pair(before, 0),
        _pair(dilation, 1),
        options.groups,
        _pair(fine, 1),
        _pair(coarse, 1),
    )


def _padding(options: Options, stride: tuple[int, ...], span: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after: of "same", torch adds the odd one after."""
    if isinstance(options.padding, str) and not options.is_transposed and options.padding in ("same", "valid"):
        if options.padding == "valid":
            return (0,) * options.dims, (0,) * options.dims
        if any(s != 1 for s in stride):
            must, hint = "be a number where there is a stride", "padding=kernel_size // 2"
            raise ArgumentError(say(options.op, "padding", must=must, got="'same'", hint=hint))
        return tuple(total // 2 for total in span), tuple(total - total // 2 for total in span)
    each = _ints(options, "padding", options.padding, 0)  # type: ignore[arg-type]
    return each, each


def _pair(each: Sequence[int], fill: int) -> Pair:
    return (fill, each[0]) if len(each) == 1 else (each[0], each[1])


# -- masks -------------------------------------------------------------------------------------------------------------
def line_up(
    op: str, name: str, mask: MaskLike | None, x: Tensor, positions: tuple[int, ...], dims: int
) -> Tensor | None:
    """The bits of a mask of positions, expanded to (batch, *positions), or to (*positions) for x without a batch.

    Args:
        op: the function.
        name: of the argument.
        mask: of as many dims as x with one channel, or of fewer dims without channels.
        x: the input.
        positions: the sizes of the input or of the result, without batch and channels.
        dims: of a position.
    """
    if mask is None:
        return None
    need_dense(op, name, mask)
    if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(op, name, must=MUST, got=got, hint=mask_hint(mask, "(batch, *positions)")))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    if bits.device != x.device:
        must, hint = f"be on x's device {x.device}", f"{name}.to(x.device)"
        raise DeviceError(say(op, name, must=must, got=bits.device, hint=hint))
    expected = (*x.shape[: x.dim() - dims - 1], *positions)
    channel = bits.dim() - dims - 1
    if bits.dim() == x.dim() and bits.shape[channel] == 1:
        bits = bits.squeeze(channel)
    if bits.dim() > len(expected) or not fits(bits.shape, expected):
        must = f"have the positions {expected}, or broadcast to them"
        hint = (
            f"{name}.any({channel}), since all channels share it" if bits.dim() == x.dim() else f"{name} of {expected}"
        )
        raise ShapeError(say(op, name, must=must, got=tuple(mask.shape), hint=hint))
    return bits.expand(expected)


def seen_through(bits: Tensor, geometry: Geometry, dims: int, is_transposed: bool) -> Tensor:
    """The outputs that are wanted by default: those whose centre is valid.

    That is the position under the central tap, or the nearest one where that lies in the padding; of a transposed
    convolution, the position that it is the central part of.

    Args:
        bits: (batch, *positions) or (*positions), of the input.
        geometry: of the convolution.
        dims: of a position.
        is_transposed: whether it is a transposed one.
    """
    for d in range(-dims, 0):
        stride, before = geometry.stride[d], geometry.before[d]
        centre = geometry.dilation[d] * ((geometry.kernel[d] - 1) // 2) - before
        size, wanted = bits.shape[d], (geometry.fine if is_transposed else geometry.coarse)[d]
        if not is_transposed and centre == 0 and (size - 1) // stride + 1 == wanted:
            bits = bits if stride == 1 else bits.transpose(d, -1)[..., ::stride].transpose(d, -1)
            continue
        if is_transposed and centre == 0 and stride == 1 and size == wanted:
            continue
        at = torch.arange(wanted, device=bits.device)
        at = (at - centre).div(stride, rounding_mode="floor") if is_transposed else at * stride + centre
        bits = bits.index_select(d, at.clamp(0, size - 1))
    return bits


def wanted_by_default(options: Options, mask: MaskLike, kernel: tuple[int, ...]) -> Tensor:
    """The outputs that a convolution wants of inputs with a mask, bool, (..., *positions of the result).

    Args:
        options: of the convolution.
        mask: of positions, (..., *positions).
        kernel: the size of the kernel.
    """
    dims = options.dims
    if not isinstance(mask, (Mask, Tensor)) or mask.dtype is not torch.bool or mask.ndim < dims:
        got = f"{type(mask).__name__} {tuple(mask.shape)}" if isinstance(mask, (Mask, Tensor)) else type(mask).__name__
        must = f"be a Mask or a bool tensor of {dims} dims or more"
        raise ShapeError(say(options.op, "mask", must=must, got=got, hint="Mask.full(input.shape[2:])"))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    geometry = geometry_of(options, tuple(bits.shape[-dims:]), kernel)
    return seen_through(bits, geometry, dims, options.is_transposed)
