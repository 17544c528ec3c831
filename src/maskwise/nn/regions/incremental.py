"""mw.nn.Incremental: a model that recomputes what an edit of its input can reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_module
from maskwise.nn.regions.area import Area, of_bits, reached, union, whole
from maskwise.nn.regions.program import (
    DIFFERS_IN_TRAINING,
    Program,
    Step,
    map_nodes,
    plan_steps,
    run_whole,
    trace,
    versions_of,
)
from maskwise.nn.regions.run import choose, compute, dense, geometry_of_step, place, saved
from maskwise.ops.arguments import MaskLike

__all__ = ["Incremental", "UpdateReport"]

_OP = "Incremental"
#: Values that are compared: sizes and the like, which an edit does not change.
_PLAIN = (int, float, str, torch.Size, torch.dtype, torch.device, type(None))
#: What may say where an input has changed.
Changed = MaskLike | tuple[slice, slice] | None


class Row(NamedTuple):
    """What an update did with one step of the model."""

    #: The layer, by its name in the model.
    name: str
    #: ``"box"``, ``"tiles"``, ``"pixels"``, ``"whole"`` or ``"reused"``.
    route: str
    #: Positions that the edit can reach, and positions of the map.
    reached: int
    positions: int
    #: Why it was computed as a whole, where it was.
    reason: str = ""


class UpdateReport(NamedTuple):
    """What an update recomputed, one row for each step."""

    rows: tuple[Row, ...]

    @property
    def share(self) -> float:
        """The share of all positions that was reached."""
        return sum(row.reached for row in self.rows) / max(1, sum(row.positions for row in self.rows))

    def __str__(self) -> str:
        lines = [f"{'step':<32} {'route':<8} {'reached':>8}"]
        for row in self.rows:
            share = f"{100 * row.reached / max(1, row.positions):.1f} %"
            lines.append(f"{row.name:<32} {row.route:<8} {share:>8}  {row.reason}".rstrip())
        return "\n".join(lines)


class Incremental:
    """A model in evaluation that recomputes only what an edit of its input can reach.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 3, padding=1)
    ... ).eval()
    >>> inc, image = mw.nn.Incremental(model), torch.zeros(1, 3, 64, 64)
    >>> y = inc(image)
    >>> edited = image.clone()
    >>> edited[..., 10:12, 20:22] = 1.0
    >>> y = inc.update(edited, (slice(10, 12), slice(20, 22)))
    >>> torch.allclose(y, model(edited), atol=1e-6)
    True
    >>> print(inc.report)
    step                             route     reached
    0                                box         0.4 %
    2                                box         0.9 %

    ``inc(x)`` runs the model and caches its feature maps, channels last. ``inc.update(x_new, changed)`` overwrites the
    positions that the edit reaches: a convolution or a pooling layer extends them by its kernel; activations, batch
    norms, sums and concatenated channels keep them. A layer that reads the whole map, such as a GroupNorm, is
    recomputed in full when its input has changed, and so are all layers after it; `report` lists them with the reason.
    Results equal those of the model up to rounding. They are copies: a later update does not modify them. There are no
    gradients.

    The model is not modified, and must be in evaluation mode. When its parameters or buffers change, the next update
    recomputes everything; what is written through ``.data`` has no version, so call `reset` after that. If a call or an
    update raises, the cache is unchanged.

    Args:
        model: a module that torch.fx can trace, in evaluation mode.

    Raises:
        ArgumentError: the model is in training mode, is random, writes into its tensors, or cannot be traced; the
            message says where.
        DtypeError: it is no module.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module(_OP, model)
        self.model = model
        self._traced = trace(_OP, model)
        self._program: Program | None = None
        self._key: Any = None
        self._values: dict[fx.Node, Any] = {}
        self._inputs: list[Any] = []
        self._is_last = False
        self._report: UpdateReport | None = None

    def __repr__(self) -> str:
        return f"Incremental({type(self.model).__name__}, {'ready' if self._program else 'no input yet'})"

    @property
    def report(self) -> UpdateReport:
        """What the last call or update computed.

        Raises:
            ArgumentError: there was none.
        """
        if self._report is None:
            raise ArgumentError(say(_OP, "report", must="follow a call", got="none", hint="inc(x)"))
        return self._report

    def reset(self) -> None:
        """Drop everything that is cached."""
        self._program, self._key, self._values, self._inputs, self._report = None, None, {}, [], None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have the model, and start without an input.
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def _state(self) -> tuple[Any, ...]:
        """What cached maps depend on besides the inputs."""
        autocast = tuple(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")
        )
        return autocast, versions_of(self.model)

    # -- the whole -----------------------------------------------------------------------------------------------------
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Run the model on whole inputs, and cache what lies between its layers.

        Args:
            inputs: what the model takes; maps are (batch, channels, height, width).

        Returns:
            What the model gives.

        Raises:
            ArgumentError: the model is in training mode, does not take the inputs, or no layer of it works on regions.
            ShapeError: there is no map among the inputs, or an empty one.
            DtypeError: a map is not floating.
        """
        self._check_mode()
        if not any(isinstance(each, Tensor) and each.dim() == 4 for each in inputs):
            got = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in inputs]
            must, hint = "have a map of (batch, channels, height, width)", "x[None] for one image"
            raise ShapeError(say(_OP, "inputs", must=must, got=got, hint=hint))
        for each in inputs:
            if not isinstance(each, Tensor) or each.dim() != 4:
                continue
            if not each.is_floating_point():
                raise DtypeError(say(_OP, "inputs", must="be floating", got=each.dtype, hint="x.float()"))
            if each.numel() == 0:
                must, hint = "have at least one position", "if x.numel(): y = inc(x)"
                raise ShapeError(say(_OP, "inputs", must=must, got=tuple(each.shape), hint=hint))
        key = (_shapes_of(inputs), self._state())
        program = self._program
        if program is None or key != self._key:
            program = plan_steps(_OP, self._traced, inputs)
            if not any(step.head is not None for step in program.steps):
                must, why = "have a layer that works on regions", "; ".join(program.reasons[:3]) or "none"
                raise ArgumentError(say(_OP, "model", must=must, got=why, hint="a model with nn.Conv2d"))
        taken = [_copied(each) for each in inputs]
        values, rows = self._run_all(program, taken)
        is_last = any(_is_last(each) for each in inputs)
        self._program, self._key, self._values, self._inputs, self._is_last = program, key, values, taken, is_last
        self._report = UpdateReport(rows)
        return self._result()

    def _run_all(self, program: Program, inputs: Sequence[Any]) -> tuple[dict[fx.Node, Any], tuple[Row, ...]]:
        values: dict[fx.Node, Any] = dict(zip(program.inputs, inputs, strict=False))
        rows = []
        read = _reader(program, values)
        for step in program.steps:
            values[step.out] = run_whole(step, self._traced, read) if step.reason else dense(step, read)
            positions = _positions(program.shapes.get(step.out))
            rows.append(Row(step.name, "whole", positions, positions, step.reason or ""))
        return values, tuple(rows)

    def _check_mode(self) -> None:
        differs = ((name, m) for name, m in self.model.named_modules() if isinstance(m, DIFFERS_IN_TRAINING))
        training = next((name for name, m in differs if m.training), None)
        if training is not None:
            got = f"{training or type(self.model).__name__!r} in training mode"
            raise ArgumentError(say(_OP, "model", must="be in evaluation mode", got=got, hint="model.eval()"))

    def _result(self) -> Any:
        assert self._program is not None
        layout = torch.channels_last if self._is_last else torch.contiguous_format
        read = _reader(self._program, self._values)

        def copy(node: fx.Node) -> Any:
            value = read(node)
            if not isinstance(value, Tensor):
                return value
            return value.clone(memory_format=layout if value.dim() == 4 else torch.preserve_format)

        return map_nodes(self._program.output, copy)

    # -- an edit -------------------------------------------------------------------------------------------------------
    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, x_new: Any, changed: Any = None) -> Any:
        """Run the model on edited inputs: only what the edit can reach is computed.

        >>> import torch, maskwise as mw
        >>> inc = mw.nn.Incremental(torch.nn.Conv2d(1, 1, 3, padding=1).eval())
        >>> x = torch.zeros(1, 1, 32, 32)
        >>> y = inc(x)
        >>> x[..., 5, 5] = 1.0
        >>> y = inc.update(x)
        >>> inc.report.rows[0].reached
        9

        Args:
            x_new: the edited input, of the same shape; a tuple, where the model takes several.
            changed: where it differs from the last one: a bool tensor or a Mask of (H, W), (B, H, W) or (B, 1, H, W),
                True meaning changed; or a box as two slices, ``(slice(10, 20), slice(30, 40))``. Everything else is
                taken to be as it was. By default, the inputs are compared. For several inputs, a tuple of these.

        Returns:
            What the model gives.

        Raises:
            ArgumentError: there was no call before, a box is no pair of slices, or the model is in training mode.
            ShapeError: an input or ``changed`` has another shape.
            DtypeError: an input has another dtype, or ``changed`` is not bool.
            DeviceError: an input or ``changed`` is on another device.
        """
        if self._program is None:
            raise ArgumentError(say("Incremental.update", "x_new", must="follow a call", got="none", hint="inc(x)"))
        self._check_mode()
        given = list(x_new) if isinstance(x_new, (tuple, list)) else [x_new]
        several = isinstance(x_new, (tuple, list))
        where = list(changed) if several and isinstance(changed, (tuple, list)) else [changed] * len(given)
        _check_inputs(given, where, self._inputs)
        if self._state() != self._key[1]:
            inputs = [_merged(new, old, c) for new, old, c in zip(given, self._inputs, where, strict=True)]
            return self(*inputs)
        areas = [_area(new, old, c) for new, old, c in zip(given, self._inputs, where, strict=True)]
        undo: list[Callable[[], None]] = []
        try:
            rows = self._update(self._program, given, areas, undo)
            result = self._result()
        except BaseException:
            for back in reversed(undo):
                back()
            raise
        self._report = UpdateReport(tuple(rows))
        return result

    def _update(
        self, program: Program, given: Sequence[Any], areas: Sequence[Any], undo: list[Callable[[], None]]
    ) -> list[Row]:
        values, changed = self._values, {}
        for at, (node, new, area) in enumerate(zip(program.inputs, given, areas, strict=False)):
            if area is None:
                continue
            changed[node] = area
            if isinstance(area, Area):
                _overwrite(values[node], new, area, undo)
            else:
                self._replace(node, _copied(new), undo)
                old = self._inputs[at]
                self._inputs[at] = values[node]
                undo.append(lambda at=at, old=old: self._inputs.__setitem__(at, old))  # type: ignore[misc]
        read = _reader(program, values)
        return [self._update_step(step, program, changed, read, undo) for step in program.steps]

    def _replace(self, node: fx.Node, value: Any, undo: list[Callable[[], None]]) -> None:
        old = self._values[node]
        undo.append(lambda: self._values.__setitem__(node, old))
        self._values[node] = value

    def _update_step(
        self,
        step: Step,
        program: Program,
        changed: dict[fx.Node, Any],
        read: Callable[[fx.Node], Any],
        undo: list[Callable[[], None]],
    ) -> Row:
        shape = program.shapes.get(step.out)
        positions = _positions(shape)
        if step.reason:
            if not any(node in changed for node in step.operands):
                return Row(step.name, "reused", 0, positions)
            old, new = self._values[step.out], run_whole(step, self._traced, read)
            if not (isinstance(new, _PLAIN) and new == old):
                changed[step.out] = whole((shape[2], shape[3])) if shape is not None and len(shape) == 4 else True
            self._replace(step.out, new, undo)
            return Row(step.name, "whole", positions, positions, step.reason)
        area = _reached_by(step, program, changed)
        if area is None:
            return Row(step.name, "reused", 0, positions)
        changed[step.out] = area
        count = area.positions(program.shapes[step.out][0])
        out = self._values[step.out]
        cover, route = choose(step, area, program, out.dtype, out.device)
        if cover is None:
            self._replace(step.out, dense(step, read), undo)
            return Row(step.name, "whole", count, positions, "most of it is reached" if count < positions else "")
        batch = compute(step, cover, program, read)
        held = saved(cover, out)
        undo.append(lambda: place(held, cover, out))
        place(batch, cover, out)
        return Row(step.name, route, count, positions)


# -- values ------------------------------------------------------------------------------------------------------------
def _reader(program: Program, values: dict[fx.Node, Any]) -> Callable[[fx.Node], Any]:
    return lambda node: values[node] if node in values else program.constants[node]


def _positions(shape: Any) -> int:
    return int(shape[0] * shape[2] * shape[3]) if shape is not None and len(shape) == 4 else 0


def _reached_by(step: Step, program: Program, changed: dict[fx.Node, Any]) -> Area | None:
    """The positions of a step's result that what has changed can reach."""
    batch, _, height, width = program.shapes[step.out]
    geometry, is_transposed = geometry_of_step(step, (height, width))
    found: Area | None = None
    if step.source in changed:
        found = reached(changed[step.source], geometry, is_transposed)
    for node in step.operands:
        if node not in changed:
            continue
        shape = program.shapes.get(node)
        is_aligned = shape is not None and len(shape) == 4 and tuple(shape[2:]) == (height, width)
        area = changed[node] if is_aligned and isinstance(changed[node], Area) else whole((height, width))
        if shape is not None and len(shape) == 4 and shape[0] != batch:
            area = whole((height, width))
        found = area if found is None else union(found, area, batch)
    return found


def _is_last(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _copied(x: Any) -> Any:
    """An own copy of an input; of maps, channels last."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    if x.dim() == 4:
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
    return x.clone()


def _shapes_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else type(x).__name__ for x in inputs)


# -- what has changed --------------------------------------------------------------------------------------------------
_UPDATE = "Incremental.update"


def _check_inputs(given: Sequence[Any], where: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(given) != len(inputs) or len(where) != len(inputs):
        must, counts = f"have {len(inputs)} inputs, and as many changes", f"{len(given)} and {len(where)}"
        raise ArgumentError(say(_UPDATE, "x_new", must=must, got=counts, hint="inc.update((x, y), (changed, None))"))
    for new, old, changed in zip(given, inputs, where, strict=True):
        if not isinstance(old, Tensor):
            continue
        if not isinstance(new, Tensor) or new.shape != old.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            must = f"have the shape {tuple(old.shape)} of the last input"
            raise ShapeError(say(_UPDATE, "x_new", must=must, got=got, hint="inc(x_new) for another shape"))
        if new.dtype != old.dtype:
            must, hint = f"have the last input's dtype {old.dtype}", "inc(x_new) for another dtype"
            raise DtypeError(say(_UPDATE, "x_new", must=must, got=new.dtype, hint=hint))
        if new.device != old.device:
            must, hint = f"be on the last input's device {old.device}", "inc(x_new) for another device"
            raise DeviceError(say(_UPDATE, "x_new", must=must, got=new.device, hint=hint))
        if changed is not None and old.dim() == 4:
            _check_changed(changed, old)


def _check_changed(changed: Any, x: Tensor) -> None:
    expected = (x.shape[0], *x.shape[2:])
    if isinstance(changed, tuple):
        is_box = len(changed) == 2 and all(isinstance(each, slice) and each.step in (None, 1) for each in changed)
        if not is_box:
            must, hint = "be two slices without a step", "(slice(top, bottom), slice(left, right))"
            raise ArgumentError(say(_UPDATE, "changed", must=must, got=changed, hint=hint))
        return
    if not isinstance(changed, (Mask, Tensor)) or changed.dtype is not torch.bool:
        got = changed.dtype if isinstance(changed, Tensor) else type(changed).__name__
        must, hint = "be a bool tensor, a Mask, or a box of two slices", "changed != 0"
        raise DtypeError(say(_UPDATE, "changed", must=must, got=got, hint=hint))
    if changed.device != x.device:
        must, hint = f"be on the input's device {x.device}", "changed.to(x_new.device)"
        raise DeviceError(say(_UPDATE, "changed", must=must, got=changed.device, hint=hint))
    shape = tuple(changed.shape)
    shape = (shape[0], *shape[2:]) if len(shape) == 4 and shape[1] == 1 else shape
    fits = 2 <= len(shape) <= 3 and all(s in (1, e) for s, e in zip(shape[::-1], expected[::-1], strict=False))
    if not fits:
        must, hint = f"have the positions {expected}, or broadcast to them", "(x_new != x).any(1)"
        raise ShapeError(say(_UPDATE, "changed", must=must, got=tuple(changed.shape), hint=hint))


def _area(new: Any, old: Any, changed: Changed) -> Area | bool | None:
    """What has changed of one input: an area of a map, True for what has no positions, None for nothing."""
    if not isinstance(old, Tensor):
        return None if new == old else True
    if old.dim() != 4:
        return None if torch.equal(new, old) else True
    if isinstance(changed, tuple):
        (top, bottom, _), (left, right, _) = (
            each.indices(size) for each, size in zip(changed, old.shape[2:], strict=True)
        )
        area = Area((top, left), (bottom, right), None)
        return None if area.is_empty else area
    return of_bits(_bits(new, old, changed))


def _bits(new: Tensor, old: Tensor, changed: MaskLike | None) -> Tensor:
    if changed is None:
        return (new != old).any(1)
    bits = changed.to_bool() if isinstance(changed, Mask) else changed
    bits = bits.squeeze(1) if bits.dim() == 4 else bits
    return bits.expand(old.shape[0], *old.shape[2:])


def _overwrite(held: Tensor, new: Tensor, area: Area, undo: list[Callable[[], None]]) -> None:
    """Write an area of a new input into the cached one."""
    rows, columns = slice(area.start[0], area.stop[0]), slice(area.start[1], area.stop[1])
    part = held[:, :, rows, columns]
    before = part.clone()

    def back() -> None:
        part.copy_(before)

    undo.append(back)
    inner = new[:, :, rows, columns]
    part.copy_(inner if area.bits is None else torch.where(area.bits[:, None], inner, before))


def _merged(new: Any, old: Any, changed: Changed) -> Any:
    """The new input, as far as it has changed, and the old one elsewhere."""
    area = _area(new, old, changed)
    if not isinstance(area, Area):
        return old if area is None else new
    merged = old.clone(memory_format=torch.preserve_format)
    _overwrite(merged, new, area, [])
    return merged
