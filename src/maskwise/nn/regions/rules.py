"""What a layer does to the positions of a map: which it reads, and how it runs on a batch of tiles.

Every node of a traced model has one rule. `Local`: each position of the result reads a window of the input, as in
convolutions, pooling and resampling. `Pointwise`: each position reads the same position of its inputs. `Whole`:
anything else, such as statistics of the whole map; it runs on whole maps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from maskwise.nn.conv import MaskedConv2d
from maskwise.ops.conv import Geometry, Options, direct, geometry_of, tiles
from maskwise.ops.conv.tiles import Tiling

__all__ = ["Local", "Pointwise", "Rule", "Whole", "part_of_channels", "relu", "rule_of"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Local:
    """Each position of the result reads a window of one input.

    Attributes:
        geometry: how positions relate.
        is_transposed: whether the input has the coarse positions.
        on_windows: ``(windows, tiling) -> batch``, of which the tiles follow the crop.
        dense: the layer on a whole map.
        kind: "convolution", "max", "average" or "resampling".
        fill: what lies around a map, and counts for what is not valid.
        edge: whether the nearest position lies around it instead.
        crop: from a tiling to what precedes a tile in its batch.
        flops: per coarse position.
        fold: ``(scale, shift) -> Local`` that multiplies and adds for each channel, where it can.
        weight: of a convolution, with its bias and groups.
        on_map: ``(map, valid, tiles, tiling) -> batch`` that reads the map in place, where there is a kernel for it.
        is_mean_of_map: whether an average leaves padding out.
    """

    geometry: Geometry
    is_transposed: bool
    on_windows: Callable[[Tensor, Tiling], Tensor]
    dense: Callable[[Tensor], Tensor]
    kind: str
    fill: float | None = None
    edge: bool = False
    crop: Callable[[Tiling], Pair] = field(default=lambda tiling: (0, 0))
    flops: int = 0
    fold: Callable[[Tensor, Tensor], Local] | None = None
    weight: tuple[Tensor, Tensor | None] | None = None
    is_mean_of_map: bool = False
    on_map: Callable[[Tensor, Tensor | None, Tensor, Tiling], Tensor] | None = None

    @property
    def result(self) -> Pair:
        """The positions of the result."""
        return self.geometry.fine if self.is_transposed else self.geometry.coarse


@dataclass(frozen=True)
class Pointwise:
    """Each position of the result reads the same position of the inputs: the node runs on tiles as it does on maps."""

    run: Callable[..., Any]
    #: The scale and the shift of a batch norm in evaluation.
    affine: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Whole:
    """A node that runs on whole maps, and the reason."""

    reason: str


Rule = Local | Pointwise | Whole
_SCALAR = (int, float, bool)

_POINTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign,
    nn.LogSigmoid, nn.Threshold, nn.PReLU, nn.Identity, nn.Softmax2d, nn.Dropout, nn.Dropout2d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip
# fmt: off
_POINTWISE_NAMES = frozenset((
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "hardsigmoid",
    "hardtanh", "hardshrink", "softshrink", "tanhshrink", "sigmoid", "tanh", "softplus", "softsign", "logsigmoid",
    "threshold", "prelu", "add", "sub", "mul", "div", "truediv", "true_divide", "neg", "abs", "exp", "log", "sqrt",
    "rsqrt", "square", "pow", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "sin", "cos",
    "floor", "round", "sign", "reciprocal", "float", "double", "half", "bfloat16", "to", "type_as", "contiguous",
    "clone", "detach", "dropout", "dropout2d", "iadd", "isub", "imul", "itruediv", "ipow", "lt", "le", "gt", "ge",
    "eq", "ne", "nan_to_num", "lerp", "addcmul", "addcdiv", "cat", "concat", "concatenate", "softmax", "log_softmax",
    "normalize", "multiply", "subtract", "divide", "relu_", "add_", "sub_", "mul_", "div_", "clamp_", "sigmoid_",
    "tanh_", "leaky_relu_", "elu_", "hardtanh_", "relu6_", "part_of_channels",
))
# fmt: on
_CHANNEL_NAMES = frozenset(["cat", "concat", "concatenate", "softmax", "log_softmax", "normalize"])
_REDUCTIONS = frozenset(["mean", "sum", "amax", "amin", "std", "var", "prod", "argmax", "logsumexp", "norm"])


def rule_of(node: fx.Node, target: Any, shapes: dict[fx.Node, Any], value_of: Callable[[fx.Node], Any]) -> Rule:
    """The rule of a node.

    Args:
        node: of a traced model.
        target: its module, or its function, or the name of its method.
        shapes: of every node that gives a tensor.
        value_of: the value of a node that fetches an attribute.
    """
    if not _is_map(shapes.get(node)):
        return Whole("its result is no map of (batch, channels, height, width)")
    made = (_module_rule if node.op == "call_module" else _function_rule)(node, target, shapes, value_of)
    if isinstance(made, Local) and made.result != tuple(shapes[node][2:]):
        return Whole("its result has other sizes than expected")
    if isinstance(made, Pointwise) and (why := _misaligned(node, shapes)):
        return Whole(why)
    return made


def _is_map(shape: Any) -> bool:
    return shape is not None and len(shape) == 4


def _misaligned(node: fx.Node, shapes: dict[fx.Node, Any]) -> str | None:
    """Why the operands of a node do not line up position by position, or None."""
    own = shapes[node]
    tensors = [shapes[each] for each in node.all_input_nodes if shapes.get(each) is not None]
    for shape in tensors:
        spatial = tuple(shape[-2:]) if len(shape) >= 2 else (1, 1)
        if spatial != tuple(own[2:]) and spatial != (1, 1):
            return "its operands have other positions"
        if len(shape) > 4:
            return "its operands have other dims"
    if not any(len(shape) == 4 and tuple(shape[2:]) == tuple(own[2:]) and shape[0] == own[0] for shape in tensors):
        return "it has no operand of its own positions"
    return None


# -- modules -----------------------------------------------------------------------------------------------------------
def _module_rule(node: fx.Node, module: Any, shapes: dict[fx.Node, Any], value_of: Callable[[fx.Node], Any]) -> Rule:
    sizes = _input_sizes(node, shapes)
    if sizes is None or len(node.all_input_nodes) != 1:
        return Whole("its input is no map of (batch, channels, height, width)")
    result = tuple(shapes[node][2:])
    if isinstance(module, nn.Conv2d):
        return _convolution(module, sizes)
    if isinstance(module, nn.ConvTranspose2d):
        return _transposed(module, sizes, result)
    if isinstance(module, nn.BatchNorm2d):
        return _batch_norm(module)
    if isinstance(module, nn.MaxPool2d):
        if module.return_indices:
            return Whole("it returns indices")
        each = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
        return _max_pool(sizes, result, *each)
    if isinstance(module, nn.AvgPool2d):
        each = (module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad)
        return _avg_pool(sizes, result, *each, module.divisor_override)
    if isinstance(module, nn.Upsample):
        return _resampling(sizes, result, module.mode, module.align_corners, module.scale_factor)
    if isinstance(module, nn.PixelShuffle):
        return _shuffle(sizes, module.upscale_factor)
    if isinstance(module, nn.PixelUnshuffle):
        return _unshuffle(sizes, module.downscale_factor)
    if isinstance(module, (nn.ZeroPad2d, nn.ConstantPad2d)):
        return _pad(sizes, result, tuple(module.padding), float(module.value))
    if isinstance(module, nn.PReLU) and module.weight.numel() > 1:
        weight = module.weight
        return Pointwise(lambda x: F.prelu(x, weight))
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
        return Pointwise(module) if module.dim in (1, -3) else Whole("it normalizes over positions")
    if isinstance(module, _POINTWISE_MODULES):
        inplace = getattr(module, "inplace", False) or isinstance(module, nn.ReLU)
        if isinstance(module, (nn.Identity, nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)):
            return Pointwise(_same)
        return Pointwise(_out_of_place(module) if inplace else module)
    return Whole(f"{type(module).__name__} has no rule for regions")


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _out_of_place(module: nn.Module) -> Callable[..., Any]:
    """The function of a module that would overwrite its input: the input may be a cached map."""
    if isinstance(module, nn.ReLU):
        return relu
    return lambda x: module(x.clone(memory_format=torch.preserve_format))


def _input_sizes(node: fx.Node, shapes: dict[fx.Node, Any]) -> Pair | None:
    first = node.args[0] if node.args else node.kwargs.get("input")
    shape = shapes.get(first) if isinstance(first, fx.Node) else None
    return (shape[2], shape[3]) if shape is not None and len(shape) == 4 else None


def _convolution(module: nn.Conv2d, sizes: Pair) -> Rule:
    if module.padding_mode not in ("zeros", "replicate"):
        return Whole(f"its padding is {module.padding_mode!r}")
    # What the gate of a MaskedConv2d keeps.
    weight = module.gate(module.weight) if isinstance(module, MaskedConv2d) else module.weight
    return conv_rule(
        weight, module.bias, sizes, module.stride, module.padding, module.dilation, module.groups,
        edge=module.padding_mode == "replicate",
    )  # fmt: skip


def conv_rule(
    weight: Tensor,
    bias: Tensor | None,
    sizes: Pair,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    *,
    edge: bool,
) -> Local:
    """The rule of a convolution."""
    options = Options("conv2d", 2, stride, padding, dilation, groups)
    geometry = geometry_of(options, sizes, tuple(weight.shape[2:]))
    kernel = weight.detach().contiguous(memory_format=torch.channels_last)

    def on_windows(windows: Tensor, tiling: Tiling) -> Tensor:
        return tiles.convolve_batch(windows, kernel, bias, geometry)

    def dense(x: Tensor) -> Tensor:
        if edge:
            # Padding as torch stores it: (left, right, top, bottom).
            (top, left), (high, wide) = geometry.before, geometry.fine
            after = [
                (c - 1) * s + span + 1 - b - f
                for c, s, span, b, f in zip(
                    geometry.coarse, geometry.stride, geometry.span, (top, left), (high, wide), strict=True
                )
            ]
            pads = (left, max(0, after[1]), top, max(0, after[0]))
            return F.conv2d(F.pad(x, pads, "replicate"), kernel, bias, stride, 0, dilation, groups)
        return F.conv2d(x, kernel, bias, stride, padding, dilation, groups)

    packed: list[Tensor] = []

    def on_map(x: Tensor, valid: Tensor | None, found: Tensor, tiling: Tiling) -> Tensor:
        if not packed:
            packed.append(direct.pack(weight))
        return direct.convolve(x, valid, found, packed[0], bias, geometry, tiling, weight.shape[0])

    def fold(scale: Tensor, shift: Tensor) -> Local:
        folded = weight.detach() * scale[:, None, None, None]
        added = shift if bias is None else bias.detach() * scale + shift
        return replace(conv_rule(folded, added, sizes, stride, padding, dilation, groups, edge=edge), fold=None)

    flops = 2 * weight[0].numel() * weight.shape[0]
    is_direct = not edge and direct.serves(geometry, False, weight.shape[1], weight.dtype, weight.device) is None
    return Local(
        geometry, False, on_windows, dense, "convolution", edge=edge, flops=flops, fold=fold, weight=(kernel, bias),
        on_map=on_map if is_direct else None,
    )  # fmt: skip


def _transposed(module: nn.ConvTranspose2d, sizes: Pair, result: Any) -> Local:
    kernel, bias = module.weight.detach(), module.bias
    stride, padding, dilation = (_pair(v) for v in (module.stride, module.padding, module.dilation))
    geometry = Geometry(
        (kernel.shape[2], kernel.shape[3]), stride, padding, dilation, module.groups, tuple(result), sizes
    )

    def on_windows(windows: Tensor, tiling: Tiling) -> Tensor:
        return tiles.transposed_batch(windows, kernel, bias, geometry, tiling)

    def dense(x: Tensor) -> Tensor:
        more = _pair(module.output_padding)
        return F.conv_transpose2d(x, kernel, bias, stride, padding, more, module.groups, dilation)

    flops = 2 * kernel[0].numel() * kernel.shape[0]
    return Local(
        geometry, True, on_windows, dense, "convolution", crop=lambda tiling: tiling.crop, flops=flops,
        weight=(kernel, bias),
    )  # fmt: skip


def _batch_norm(module: nn.BatchNorm2d) -> Rule:
    mean, var = module.running_mean, module.running_var
    if mean is None or var is None:
        return Whole("it normalizes by the statistics of the whole map")
    scale = (var + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * module.weight.detach()
    shift = -mean * scale if module.bias is None else module.bias.detach() - mean * scale

    def run(x: Tensor) -> Tensor:
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None])

    return Pointwise(run, (scale, shift))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


# -- pooling and resampling --------------------------------------------------------------------------------------------
def _max_pool(
    sizes: Pair,
    result: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Local:
    size, steps, pads, gaps = _pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation)
    geometry = Geometry(size, steps, pads, gaps, 1, sizes, tuple(result))
    return Local(
        geometry,
        False,
        lambda windows, tiling: F.max_pool2d(windows, size, steps, 0, gaps),
        lambda x: F.max_pool2d(x, size, steps, pads, gaps, ceil_mode),
        "max",
        fill=float("-inf"),
    )


def _avg_pool(
    sizes: Pair,
    result: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Rule:
    size, steps, pads = _pair(kernel), _pair(stride or kernel), _pair(padding)
    if ceil_mode and not divisor_override:
        return Whole("windows of ceil_mode are averaged over fewer positions")
    geometry = Geometry(size, steps, pads, (1, 1), 1, sizes, tuple(result))
    return Local(
        geometry,
        False,
        lambda windows, tiling: F.avg_pool2d(windows, size, steps, 0, divisor_override=divisor_override),
        lambda x: F.avg_pool2d(x, size, steps, pads, ceil_mode, count_include_pad, divisor_override),
        # By a fixed divisor, what is not valid counts as zero.
        "resampling" if divisor_override else "average",
        is_mean_of_map=not count_include_pad and any(pads),
    )


def _resampling(sizes: Pair, result: Any, mode: str, align_corners: bool | None, factor: Any = None) -> Rule:
    scale = result[0] // sizes[0]
    if factor is not None and any(f * n != r for f, n, r in zip(_floats(factor), sizes, result, strict=True)):
        return Whole(f"it resamples by {factor}, which is no whole number of positions")
    if (result[0], result[1]) == (scale * sizes[0], scale * sizes[1]) and scale > 0:
        return _upsampling(sizes, scale, mode, align_corners)
    step = sizes[0] // max(1, result[0])
    if (sizes[0], sizes[1]) == (step * result[0], step * result[1]) and not align_corners:
        if mode == "nearest":
            geometry = Geometry((1, 1), (step, step), (0, 0), (1, 1), 1, sizes, (result[0], result[1]))
            run = lambda x, tiling=None: x[:, :, ::step, ::step]  # noqa: E731
            return Local(geometry, False, run, run, "resampling")
        if mode == "bilinear" and step == 2:
            geometry = Geometry((2, 2), (2, 2), (0, 0), (1, 1), 1, sizes, (result[0], result[1]))
            run = lambda x, tiling=None: F.avg_pool2d(x, 2)  # noqa: E731
            return Local(geometry, False, run, run, "resampling")
    return Whole(f"{mode} resampling from {tuple(sizes)} to {tuple(result)} positions is no rule for regions")


def _floats(value: Any) -> tuple[float, float]:
    return (float(value[0]), float(value[-1])) if isinstance(value, (tuple, list)) else (float(value), float(value))


def _upsampling(sizes: Pair, scale: int, mode: str, align_corners: bool | None) -> Rule:
    fine = (sizes[0] * scale, sizes[1] * scale)
    if mode in ("nearest", "nearest-exact"):
        kernel, before, edge, corners = scale, 0, False, None
    elif mode == "bilinear" and not align_corners:
        kernel, before, edge, corners = 2 * scale - scale % 2, scale // 2, True, False
    else:
        return Whole(f"{mode} resampling{' with aligned corners' if align_corners else ''} has no rule for regions")
    geometry = Geometry((kernel, kernel), (scale, scale), (before, before), (1, 1), 1, fine, sizes)

    def run(x: Tensor, tiling: Tiling | None = None) -> Tensor:
        return F.interpolate(x, scale_factor=scale, mode=mode, align_corners=corners)

    def crop(tiling: Tiling) -> Pair:
        return tiling.crop[0] - before, tiling.crop[1] - before

    return Local(geometry, True, run, run, "resampling", edge=edge, crop=crop)


def _shuffle(sizes: Pair, factor: int) -> Local:
    fine = (sizes[0] * factor, sizes[1] * factor)
    geometry = Geometry((factor, factor), (factor, factor), (0, 0), (1, 1), 1, fine, sizes)
    run = lambda x, tiling=None: F.pixel_shuffle(x, factor)  # noqa: E731
    return Local(geometry, True, run, run, "resampling")


def _unshuffle(sizes: Pair, factor: int) -> Local:
    coarse = (sizes[0] // factor, sizes[1] // factor)
    geometry = Geometry((factor, factor), (factor, factor), (0, 0), (1, 1), 1, sizes, coarse)
    run = lambda x, tiling=None: F.pixel_unshuffle(x, factor)  # noqa: E731
    return Local(geometry, False, run, run, "resampling")


def _pad(sizes: Pair, result: Any, pads: tuple[int, ...], value: float) -> Rule:
    if len(pads) != 4 or min(pads) < 0:
        return Whole("its padding removes positions, or pads other dims")
    geometry = Geometry((1, 1), (1, 1), (pads[2], pads[0]), (1, 1), 1, sizes, tuple(result))
    return Local(
        geometry,
        False,
        lambda windows, tiling: windows,
        lambda x: F.pad(x, pads, value=value),
        "resampling",
        fill=value,
    )


# -- functions ---------------------------------------------------------------------------------------------------------
def _function_rule(node: fx.Node, target: Any, shapes: dict[fx.Node, Any], value_of: Callable[[fx.Node], Any]) -> Rule:
    name = target if isinstance(target, str) else _name(target)
    if name in _LOCAL_FUNCTIONS:
        sizes = _input_sizes(node, shapes)
        if sizes is None:
            return Whole("its input is no map of (batch, channels, height, width)")
        call = _Call(sizes, tuple(shapes[node][2:]), value_of)
        made: Rule = _LOCAL_FUNCTIONS[name](call, *node.args, **node.kwargs)
        return made
    if name == "getitem" and _takes_channels(node.args[1]):
        return Pointwise(operator.getitem)
    if name in _REDUCTIONS:
        args = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
        over_channels = args.get("dim") in (1, -3, (1,), [1], (-3,), [-3]) and args.get("keepdim") is True
        return Pointwise(_runner(node, target)) if over_channels else Whole("it reduces over positions")
    if name not in _POINTWISE_NAMES:
        return Whole(f"`{name}` has no rule for regions")
    if name in _CHANNEL_NAMES and not _is_over_channels(node, name):
        return Whole("it works along positions")
    if name in ("dropout", "dropout2d"):
        return Pointwise(_same)
    return Pointwise(_runner(node, target))


def _name(target: Any) -> str:
    if target is F.max_pool2d:
        return "max_pool2d"
    name: str = getattr(target, "__name__", str(target))
    return name.lstrip("_")


def _takes_channels(index: Any) -> bool:
    """Whether an index takes a slice of the channels, and all positions."""
    is_slice = isinstance(index, tuple) and 2 <= len(index) <= 4 and all(isinstance(each, slice) for each in index)
    return is_slice and all(each == slice(None) for at, each in enumerate(index) if at != 1)


def _is_over_channels(node: fx.Node, name: str) -> bool:
    default = 1 if name == "normalize" else 0
    if name == "normalize":
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else default)
    else:
        dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else default))
    return dim in (1, -3)


def _runner(node: fx.Node, target: Any) -> Callable[..., Any]:
    """The function of a node; never one that overwrites its input, which may be a cached map."""
    if isinstance(target, str):
        name = target.removesuffix("_") if not target.endswith("__") else target
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    name = _name(target)
    if name in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[name]
    if node.kwargs.get("inplace") or name.endswith("_") or any(each is True for each in node.args[1:]):
        return lambda x, *args, **kwargs: target(x.clone(memory_format=torch.preserve_format), *args, **kwargs)
    return target  # type: ignore[no-any-return]


def relu(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """F.relu, whatever it says of writing in place."""
    return torch.relu(x)


def part_of_channels(x: Tensor, split: str, sizes: Any, at: int) -> Tensor:
    """One part of ``torch.chunk`` or ``torch.split`` of the channels."""
    part: Tensor = getattr(torch, split)(x, sizes, 1)[at]
    return part


_OUT_OF_PLACE: dict[str, Callable[..., Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
    "ipow": operator.pow,
    "relu": relu,
    "relu_": relu,
}


@dataclass(frozen=True)
class _Call:
    """Where a function is called: the positions of its input and of its result, and the values of attributes."""

    sizes: Pair
    result: Any
    value_of: Callable[[fx.Node], Any]


def _conv2d(
    call: _Call, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Rule:  # fmt: skip
    found = [call.value_of(each) if isinstance(each, fx.Node) else each for each in (weight, bias)]
    if not isinstance(found[0], Tensor) or not isinstance(found[1], Tensor | None):
        return Whole("its weight is computed")
    return conv_rule(found[0], found[1], call.sizes, stride, padding, dilation, groups, edge=False)


def _max_pool2d(
    call: _Call, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Rule:  # fmt: skip
    if return_indices:
        return Whole("it returns indices")
    return _max_pool(call.sizes, call.result, kernel_size, stride, padding, dilation, ceil_mode)


def _interpolate(
    call: _Call, input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: Any = None, antialias: bool = False,
) -> Rule:  # fmt: skip
    if antialias:
        return Whole("it resamples with antialiasing")
    return _resampling(call.sizes, call.result, mode, align_corners, scale_factor)


def _pad_function(call: _Call, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Rule:
    if mode != "constant":
        return Whole(f"its padding is {mode!r}")
    return _pad(call.sizes, call.result, tuple(pad), float(value or 0.0))


_LOCAL_FUNCTIONS: dict[str, Callable[..., Rule]] = {
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": lambda call, input, *args, **kwargs: _avg_pool(
        call.sizes, call.result, *args, **{k.replace("kernel_size", "kernel"): v for k, v in kwargs.items()}
    ),
    "interpolate": _interpolate,
    "pad": _pad_function,
    "pixel_shuffle": lambda call, input, upscale_factor: _shuffle(call.sizes, upscale_factor),
    "pixel_unshuffle": lambda call, input, downscale_factor: _unshuffle(call.sizes, downscale_factor),
}
