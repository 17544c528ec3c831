"""mw.nn.Regions: a whole network on the regions of its input, with masks that flow along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_module, check_tensor
from maskwise.nn.regions.area import Area, Cover
from maskwise.nn.regions.pool import reduce_windows
from maskwise.nn.regions.program import Program, Step, map_nodes, plan_steps, run_tail, run_whole, trace, versions_of
from maskwise.nn.regions.rules import Local
from maskwise.nn.regions.run import choose, compute, dense, geometry_of_step, place
from maskwise.ops.arguments import MaskLike
from maskwise.ops.conv import conv2d, conv_transpose2d, line_up, seen_through, tiles
from maskwise.ops.primitives import fill_dropped, number
from maskwise.ops.reduce import amax, mean

__all__ = ["Regions"]

_OP = "Regions"


class Regions(nn.Module):
    """Run a network on regions: dropped positions are not computed, and have no influence.

    >>> import torch, maskwise as mw
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> regions = mw.nn.Regions(net.eval())
    >>> mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    >>> mask[:, 4:8, 8:12] = True
    >>> y = regions(torch.randn(1, 3, 16, 16), mask)
    >>> y.shape, int(regions.outputs(mask).count()), int((y != 0).any(1).sum())
    (torch.Size([1, 8, 8, 8]), 4, 4)

    The mask propagates from layer to layer: each layer computes the positions whose centre is valid in its input (see
    `mw.conv2d`), and all others count as zero for the next layer. Pooling reduces the valid positions of a window.
    Activations, batch norms, sums, concatenated channels and resampling compute the positions of their inputs, or the
    union of them for inputs with different masks. Global pooling, such as ``AdaptiveAvgPool2d(1)``, reduces valid
    positions; the layers after it are torch's own.

    In evaluation mode without grad, each convolution and the pointwise layers after it run together, on tiles with a
    valid position. With grad, the network runs layer by layer. In training mode, batch norms compute statistics over
    valid positions.

    Args:
        model: a module that torch.fx can trace, with one map as its input. Its parameters stay where they are:
            ``regions.model`` is the model itself.

    Raises:
        ArgumentError: it cannot be traced, or writes into its tensors.
        DtypeError: it is no module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_module(_OP, model)
        self.model = model
        self._traces: dict[bool, fx.GraphModule] = {}
        self._programs: dict[Any, Program] = {}
        self._trace()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles trace their own model.
        return {**self.__dict__, "_traces": {}, "_programs": {}}

    def _trace(self) -> fx.GraphModule:
        # Not as an attribute of a module: its parameters are the model's.
        mode = self.model.training
        if mode not in self._traces:
            self._traces[mode] = trace(_OP, self.model, is_random_allowed=True)
        return self._traces[mode]

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Any:
        """The network on what is valid.

        Args:
            input: (B, C, H, W).
            mask: a Mask or a bool tensor of (B, H, W), (B, 1, H, W) or (H, W), which positions are valid; True means
                keep. Without one, this is the model itself.

        Returns:
            What the model gives; maps hold 0 where they are not valid.

        Raises:
            ArgumentError: a layer reads a whole map in a way that has no rule for masks; the message says which.
            ShapeError: the input is no map, or shapes do not fit each other.
            DtypeError: the mask is not bool.
            DeviceError: devices differ.
        """
        check_tensor(_OP, input)
        if input.dim() != 4:
            must, hint = "be a map of (batch, channels, height, width)", "x[None] for one image"
            raise ShapeError(say(_OP, "input", must=must, got=tuple(input.shape), hint=hint))
        if mask is None:
            return self.model(input)
        valid = line_up(_OP, "mask", mask, input, (input.shape[2], input.shape[3]), 2)
        assert valid is not None
        grad = torch.is_grad_enabled() and (
            input.requires_grad or any(each.requires_grad for each in self.model.parameters())
        )
        traced, program = self._trace(), self._program(input)
        run = _Run(traced, program, input, valid.contiguous())
        if grad or self.model.training:
            return run.layer_by_layer()
        with torch.no_grad():
            return run.on_tiles()

    def outputs(self, mask: MaskLike, channels: int | None = None) -> Mask:
        """The mask of the result, where the model gives one map.

        Args:
            mask: of the input, (B, H, W) or (H, W).
            channels: of the input, where the first layer does not say.

        Raises:
            ArgumentError: the result is no map.
            ShapeError: the mask has other dims.
            DtypeError: it is not bool.
        """
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        if not isinstance(bits, Tensor) or bits.dtype is not torch.bool:
            got = bits.dtype if isinstance(bits, Tensor) else type(bits).__name__
            raise DtypeError(say(_OP, "mask", must="be a Mask or a bool tensor", got=got, hint="mask != 0"))
        if not 2 <= bits.dim() <= 4:
            raise ShapeError(say(_OP, "mask", must="be (B, H, W) or (H, W)", got=tuple(bits.shape), hint="mask[None]"))
        bits = bits.squeeze(1) if bits.dim() == 4 else bits if bits.dim() == 3 else bits[None]
        first = next((m.in_channels for m in self.model.modules() if isinstance(m, nn.Conv2d)), 1)
        parameter = next(self.model.parameters(), torch.zeros(()))
        shape = (bits.shape[0], channels or first, *bits.shape[1:])
        program = self._program(torch.empty(shape, dtype=parameter.dtype, device="meta"))
        found = _flow(program, bits)
        out = program.output
        if not isinstance(out, fx.Node) or found.get(out) is None:
            raise ArgumentError(
                say(_OP, "model", must="give one map", got="another result", hint="outputs of a backbone")
            )
        return Mask(found[out])  # type: ignore[arg-type]

    def _program(self, x: Tensor) -> Program:
        versions = versions_of(self.model)
        key = (tuple(x.shape), x.dtype, self.model.training)
        found = self._programs.get(key)
        # In training, weights change with every step, and are not read from the program.
        if found is None or (found.versions != versions and not self.model.training):
            found = plan_steps(_OP, self._trace(), (x,))
            found.versions = versions
            self._programs[key] = found
        return found


def _flow(program: Program, valid: Tensor) -> dict[fx.Node, Tensor | None]:
    """The mask of every value; None for values without positions.

    Raises:
        ArgumentError: a layer has no rule for masks.
    """
    masks: dict[fx.Node, Tensor | None] = dict.fromkeys(program.inputs[1:])
    masks[program.inputs[0]] = valid
    for step in program.steps:
        masks[step.out] = _mask_of(step, program, masks)
    return masks


def _mask_of(step: Step, program: Program, masks: dict[fx.Node, Tensor | None]) -> Tensor | None:
    shape = program.shapes.get(step.out)
    if step.reason:
        if all(masks.get(node) is None for node in step.operands) or _is_of_sizes(step):
            return None
        if _pooled(step, program) is None:
            got, hint = f"{step.name!r}: {step.reason}", "mw.nn.Regions(model.backbone), without that layer"
            raise ArgumentError(say(_OP, "model", must="have a rule for each layer on a map", got=got, hint=hint))
        return None
    found: Tensor | None = None
    if step.head is not None:
        assert step.source is not None
        bits = masks[step.source]
        found = None if bits is None else seen_through(bits, step.head.geometry, 2, step.head.is_transposed)
    for node in step.operands:
        bits, operand = masks.get(node), program.shapes.get(node)
        if bits is None or operand is None or shape is None or tuple(operand[2:]) != tuple(shape[2:]):
            continue
        found = bits if found is None or found is bits else found | bits
    return found


def _is_of_sizes(step: Step) -> bool:
    """Whether a step reads no values: the shape of a map, or its dtype."""
    node = step.out
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "is_floating_point")
    return node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")


def _pooled(step: Step, program: Program) -> str | None:
    """Whether a step reduces all positions of a map: "mean" or "amax"."""
    shape, node = program.shapes[step.out], step.out
    source = program.shapes.get(step.operands[0]) if step.operands else None
    if shape is None or source is None or len(source) != 4 or len(step.operands) != 1:
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        name = program.modules[str(node.target)]
    is_pooled = tuple(shape) in ((*source[:2], 1, 1), tuple(source[:2]))
    kinds = {"mean": "mean", "amax": "amax", "adaptive_avg_pool2d": "mean", "adaptive_max_pool2d": "amax",
             "AdaptiveAvgPool2d": "mean", "AdaptiveMaxPool2d": "amax"}  # fmt: skip
    return kinds.get(name) if is_pooled else None


class Written(NamedTuple):
    """What a buffer holds besides zeros: positions of a mask, in tiles."""

    wanted: Tensor
    cover: Cover


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are known to be one; on a GPU, they are not compared: it would be a host-device sync."""
    return one is other or (not one.is_cuda and torch.equal(one, other))


class _Run:
    """One call: the values and the masks of all nodes."""

    def __init__(self, traced: fx.GraphModule, program: Program, x: Tensor, valid: Tensor) -> None:
        self.traced, self.program, self.x = traced, program, x
        self.masks = _flow(program, valid)
        self.values: dict[fx.Node, Any] = {program.inputs[0]: x}
        self.is_last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self.results = _nodes_of(program.output)
        self.owned: dict[int, Written] = {}

    def read(self, node: fx.Node) -> Any:
        return self.values[node] if node in self.values else self.program.constants[node]

    def result(self) -> Any:
        return map_nodes(self.program.output, self._cleaned)

    def _cleaned(self, node: fx.Node) -> Any:
        value, mask = self.read(node), self.masks.get(node)
        return fill_dropped(value, mask[:, None]) if node in self.program.inputs and mask is not None else value

    def whole(self, step: Step) -> Any:
        """A step without a rule for positions: pooling of the whole map, or what has no positions."""
        mask = self.masks.get(step.operands[0]) if step.operands else None
        if mask is None or _is_of_sizes(step):
            return run_whole(step, self.traced, self._cleaned)
        reduce = {"mean": mean, "amax": amax}[_pooled(step, self.program)]  # type: ignore[index]
        shape = self.program.shapes[step.out]
        return reduce(self.read(step.operands[0]), mask[:, None], (2, 3), empty=0.0).reshape(shape)

    # -- on tiles ------------------------------------------------------------------------------------------------------
    def on_tiles(self) -> Any:
        """Every step on the tiles that have something valid."""
        covers: dict[Any, Any] = {}
        uses = {node: at for at, step in enumerate(self.program.steps) for node in step.reads}
        for at, step in enumerate(self.program.steps):
            wanted = self.masks[step.out]
            if step.reason or wanted is None:
                self.values[step.out] = self.whole(step) if step.reason else dense(step, self.read)
            else:
                self.values[step.out] = self._step_on_tiles(step, wanted, covers)
            for node in step.reads:
                if uses[node] == at and node not in self.results and node not in self.program.constants:
                    self._free(self.values.pop(node, None))
        return self.result()

    def _buffer(self, sizes: tuple[int, ...], like: Tensor, wanted: Tensor, cover: Cover) -> Tensor:
        """A map of zeros to write what is wanted into, channels last; one that was used, if there is one."""
        free = self.program.buffers.setdefault((sizes, like.dtype, like.device), [])
        at = next((at for at, (_, written) in enumerate(free) if _is_same(written.wanted, wanted)), len(free) - 1)
        if at < 0:
            out = torch.zeros(sizes, dtype=like.dtype, device=like.device).contiguous(memory_format=torch.channels_last)
        else:
            out, written = free.pop(at)
            if not _is_same(written.wanted, wanted):
                zeros = like.new_zeros(written.cover.tiles.shape[0], *written.cover.tiling.size, sizes[1])
                place(zeros.permute(0, 3, 1, 2), written.cover, out)
        self.owned[id(out)] = Written(wanted, cover)
        return out

    def _free(self, value: Any) -> None:
        written = self.owned.pop(id(value), None)
        if written is not None:
            key = (tuple(value.shape), value.dtype, value.device)
            self.program.buffers.setdefault(key, []).append((value, written))

    def _step_on_tiles(self, step: Step, wanted: Tensor, covers: dict[Any, Any]) -> Tensor:
        program = self.program
        batch, outputs, height, width = program.shapes[step.out]
        geometry, is_transposed = geometry_of_step(step, (height, width))
        inputs = None if step.source is None else program.shapes[step.source][1]
        key = (id(wanted), geometry, is_transposed, inputs, outputs, len(step.tail))
        if key not in covers:
            if id(wanted) not in covers:
                covers[id(wanted)] = (int(wanted.sum()), wanted)
            count = covers[id(wanted)][0]
            area = Area((0, 0), (height, width), wanted, count)
            # The mask is kept with what was found, so that its id stays its own.
            covers[key] = (*choose(step, area, program, self.x.dtype, self.x.device), wanted)
        cover = covers[key][0]
        is_last = self.is_last or step.out not in self.results
        if cover is None:
            out = fill_dropped(self._dense(step), wanted[:, None])
            return out.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
        found = compute(step, cover, program, self.read, self._valid)
        sizes = [batch, outputs, height, width]
        if step.out not in self.results:
            out = self._buffer(tuple(sizes), found, wanted, cover)
            place(found, cover, out, wanted)
            return out
        zero = number(0.0, found.dtype, found.device)
        return tiles.scatter(found, cover.tiles, wanted, zero, sizes, list(cover.tiling.size), [0, 0], is_last)  # type: ignore[no-any-return]

    def _dense(self, step: Step) -> Tensor:
        """A step on whole maps, which hold zeros where they are not valid."""
        value = None
        if step.head is not None:
            assert step.source is not None
            source, mask = self._cleaned(step.source), self.masks[step.source]
            if mask is not None and step.head.kind in ("max", "average"):
                value = reduce_windows(step.head.dense, step.head.kind == "max", source, mask)
            else:
                value = step.head.dense(source)
        return run_tail(step, value, self._cleaned)  # type: ignore[no-any-return]

    def _valid(self, node: fx.Node, head: Local | None) -> Tensor | None:
        """The mask of what is read, where the map itself does not hold zeros there, or zeros would count."""
        if node in self.program.inputs or (head is not None and head.kind in ("max", "average")):
            return self.masks.get(node)
        return None

    # -- layer by layer ------------------------------------------------------------------------------------------------
    def layer_by_layer(self) -> Any:
        """Every layer by itself, with gradients."""
        for step in self.program.steps:
            wanted = self.masks[step.out]
            if step.reason or wanted is None:
                value = self.whole(step) if step.reason else self._plain_step(step)
            else:
                value = self._plain_step(step)
            self.values[step.out] = value
        return self.result()

    def _plain_step(self, step: Step) -> Tensor:
        wanted = self.masks[step.out]
        value: Any = None
        found: dict[fx.Node, Any] = {}
        nodes = [*([] if step.head_node is None else [step.head_node]), *(node for node, _ in step.tail)]
        for node in nodes:
            value = self._layer(node, step, wanted, lambda n: found[n] if n in found else self._cleaned(n))
            found[node] = value
        return value if wanted is None else fill_dropped(value, wanted[:, None])

    def _layer(self, node: fx.Node, step: Step, wanted: Tensor | None, read: Callable[[fx.Node], Any]) -> Any:
        module = self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if wanted is not None and isinstance(module, nn.BatchNorm2d) and module.training:
            return _batch_norm(module, read(node.args[0]), wanted)  # type: ignore[arg-type]
        if node is step.head_node and wanted is not None:
            assert step.head is not None
            assert step.source is not None
            source, mask = read(step.source), self.masks[step.source]
            if isinstance(module, nn.Conv2d) and not step.head.edge:
                return conv2d(
                    source, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups,
                    mask=mask, outputs=wanted,
                )  # fmt: skip
            if isinstance(module, nn.ConvTranspose2d):
                assert not isinstance(module.padding, str)
                return conv_transpose2d(
                    source, module.weight, module.bias, module.stride, module.padding, module.output_padding,
                    module.groups, module.dilation, mask=mask, outputs=wanted,
                )  # fmt: skip
            if mask is not None and step.head.kind in ("max", "average"):
                return reduce_windows(step.head.dense, step.head.kind == "max", source, mask)
        args, kwargs = map_nodes((node.args, node.kwargs), read)
        if module is not None:
            return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _batch_norm(module: nn.BatchNorm2d, x: Tensor, kept: Tensor) -> Tensor:
    """A batch norm in training, by the statistics of valid positions."""
    if module.num_batches_tracked is not None and module.track_running_stats:
        module.num_batches_tracked.add_(1)
    factor = module.momentum
    if factor is None:
        factor = 1.0 / float(module.num_batches_tracked or 1)
    rows = x.permute(0, 2, 3, 1)[kept]
    if rows.shape[0] < 2:
        # No variance: what there is passes by the running statistics.
        rows = F.batch_norm(rows, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)
    else:
        rows = F.batch_norm(
            rows, module.running_mean, module.running_var, module.weight, module.bias, True, factor, module.eps
        )
    return x.new_zeros(kept.shape + x.shape[1:2]).index_put(kept.nonzero(as_tuple=True), rows).permute(0, 3, 1, 2)


def _nodes_of(output: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    map_nodes(output, found.add)
    return found
