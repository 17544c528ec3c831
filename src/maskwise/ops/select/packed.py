"""Packed: the kept rows, contiguous, with their mask; and mw.pack."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import Any, cast

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.backends import DEVICE
from maskwise.ops.primitives import number
from maskwise.ops.select import conversions, reference, rows, sequences
from maskwise.ops.select.arguments import check_out, line_up
from maskwise.ops.torch_private import (
    assert_async,
    is_forward_ad,
    is_tracing,
    is_transformed,
    is_vmapped_or_functional,
    register_pytree_node,
)
from maskwise.plan import calibration, dispatch
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.dispatch import (
    NOT_APPLICABLE,
    Decision,
    Facts,
    Plan,
    Route,
    Skips,
    decide,
    forced,
    is_any_forced,
    is_any_observing,
    is_observed,
)
from maskwise.plan.explain import record

__all__ = ["Packed", "collect", "pack"]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows that a mask keeps, contiguous, with the mask. Created by `mw.pack`.

    >>> import torch, maskwise as mw
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> packed = mw.pack(x, mw.Mask.from_lengths([1, 3]))
    >>> packed.values
    tensor([0., 3., 4., 5.])
    >>> (packed * 10).unpack(-1.0)
    tensor([[ 0., -1., -1.],
            [30., 40., 50.]])
    >>> packed.mean()
    tensor([0., 4.])

    Attributes:
        values: the kept rows, (n, *rest); with a capacity, that many rows, of which the last are zero and ignored.
        mask: (*lead). The rows of its last dim are the sequences.
        capacity: the fixed number of rows, or None.
    """

    values: Tensor
    mask: Mask
    capacity: int | None = None

    # -- there and back ------------------------------------------------------------------------------------------------
    def unpack(self, fill: float | Tensor = 0.0, *, out: Tensor | None = None) -> Tensor:
        """The padded layout, (*lead, *rest), with ``fill`` at dropped rows.

        >>> import torch, maskwise as mw
        >>> mw.pack(torch.tensor([1, 2, 3]), torch.tensor([True, False, True])).unpack(fill=-1)
        tensor([ 1, -1,  3])

        Args:
            fill: a number, or a tensor that broadcasts to the padded layout.
            out: the output tensor, contiguous and without grad; it is also returned. A large result is written faster
                into a preallocated tensor.

        Raises:
            ShapeError: ``out`` has another shape, or is not contiguous.
            DtypeError: ``out`` is not a tensor, or of another dtype.
            DeviceError: ``out`` is on another device.
            ArgumentError: ``out`` shares memory with an input, or a gradient is required.
        """
        values = self.values
        other = fill_for(values, fill)
        if out is not None:
            check_out("Packed.unpack", out, (*self.mask.shape, *values.shape[1:]), values, other)
        if self.capacity is not None or _is_functional():
            bits = self.mask.to_bool()
            static = by_kernel(bits, rows.unpack_capacity, reference.unpack_static)
            expanded: Tensor = static(values, bits, other)
            return expanded if out is None else out.copy_(expanded)
        mask = rows.mask_of_rows(self.mask)
        if out is not None:
            rows.unpack_rows_out(values.contiguous(), mask, other, out)
            return out
        run = rows.unpack_rows if _may_differentiate(values, other) else rows.unpack_rows_forward
        unpacked: Tensor = run(values.contiguous(), mask, other)
        return unpacked

    def map(self, fn: Callable[[Tensor], Tensor]) -> Packed:
        """Apply a row-wise function to the kept rows: ``fn`` takes (n, *rest) and returns (n, ...).

        >>> import torch, maskwise as mw
        >>> mw.pack(torch.tensor([4.0, -1.0]), torch.tensor([True, False])).map(torch.log2).unpack()
        tensor([2., 0.])

        Args:
            fn: takes (n, *rest) and returns n rows; it may change their shape and dtype.

        Raises:
            ShapeError: ``fn`` does not return one row per input row.
        """
        return self._like(fn(self.values))

    def _like(self, values: Tensor) -> Packed:
        if values.dim() == 0 or values.shape[0] != self.values.shape[0]:
            rows, got = self.values.shape[0], tuple(values.shape)
            hint = "a row-wise function keeps the first dim"
            raise ShapeError(say("Packed.map", "fn", must=f"return {rows} rows", got=got, hint=hint))
        return Packed(values, self.mask, self.capacity)

    # -- arithmetic ----------------------------------------------------------------------------------------------------
    def _aligned(self, other: Any, symbol: str) -> Any:
        """The other operand aligned with the values: a scalar, or rows."""
        if isinstance(other, Packed):
            if other.mask is not self.mask and not other.mask.equal(self.mask):
                raise ArgumentError(
                    f"Packed {symbol}: both sides must be packed by the same mask. Left:\n{self.mask}\nRight:\n"
                    f"{other.mask}\nHint: pack both with one mask, or unpack() first."
                )
            if other.capacity != self.capacity:
                must, hint = f"have the capacity {self.capacity}", f"pack(x, mask, capacity={self.capacity})"
                raise ArgumentError(say(f"Packed {symbol}", "other", must=must, got=other.capacity, hint=hint))
            return other.values
        if not isinstance(other, Tensor) or other.dim() == 0:
            return other
        # The rows of a tensor that broadcasts against the padded layout: a view, of which only kept rows are read.
        lead, rest = tuple(self.mask.shape), tuple(self.values.shape[1:])
        try:
            layout = torch.broadcast_shapes(other.shape, (*lead, *rest))  # type: ignore[no-untyped-call]
        except RuntimeError:
            layout = torch.Size()
        if tuple(layout[: len(lead)]) != lead:
            must = f"broadcast against the padded layout {(*lead, *rest)}"
            hint = "t[:, None] adds a dim, packed.map(fn) works on rows"
            raise ShapeError(say(f"Packed {symbol}", "other", must=must, got=tuple(other.shape), hint=hint))
        return collect(other.expand(layout), self.mask, capacity=self.capacity).values

    def _binary(self, fn: Callable[[Any, Any], Tensor], symbol: str, other: Any) -> Packed:
        return self._like(fn(self.values, self._aligned(other, symbol)))

    def _reflected(self, fn: Callable[[Any, Any], Tensor], symbol: str, other: Any) -> Packed:
        return self._like(fn(self._aligned(other, symbol), self.values))

    def __add__(self, other: Any) -> Packed:
        return self._binary(operator.add, "+", other)

    def __sub__(self, other: Any) -> Packed:
        return self._binary(operator.sub, "-", other)

    def __mul__(self, other: Any) -> Packed:
        return self._binary(operator.mul, "*", other)

    def __truediv__(self, other: Any) -> Packed:
        return self._binary(operator.truediv, "/", other)

    def __pow__(self, other: Any) -> Packed:
        return self._binary(operator.pow, "**", other)

    def __radd__(self, other: Any) -> Packed:
        return self._reflected(operator.add, "+", other)

    def __rsub__(self, other: Any) -> Packed:
        return self._reflected(operator.sub, "-", other)

    def __rmul__(self, other: Any) -> Packed:
        return self._reflected(operator.mul, "*", other)

    def __rtruediv__(self, other: Any) -> Packed:
        return self._reflected(operator.truediv, "/", other)

    def __rpow__(self, other: Any) -> Packed:
        return self._reflected(operator.pow, "**", other)

    def __neg__(self) -> Packed:
        return self._like(-self.values)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `tensor + packed`: torch calls this first; on NotImplemented, Python tries __radd__ and the like.
        return NotImplemented

    # -- sequences -----------------------------------------------------------------------------------------------------
    @property
    def lengths(self) -> Tensor:
        """The number of rows of each sequence: int64, the mask's shape without its last dim."""
        return sequences.lengths(self)

    @property
    def cu_seqlens(self) -> Tensor:
        """The cumulative sequence lengths, from 0: int32, (sequences + 1,)."""
        return sequences.cu_seqlens(self)

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence of each row: int64, (n,); unused rows of a capacity have the last id."""
        return sequences.sequence_ids(self)

    @property
    def position_ids(self) -> Tensor:
        """The position of each row along the mask's last dim: int64, (n,)."""
        return sequences.position_ids(self)

    sum = sequences.sum
    mean = sequences.mean
    amax = sequences.amax
    amin = sequences.amin
    logsumexp = sequences.logsumexp
    softmax = sequences.softmax
    first = sequences.first
    last = sequences.last

    # -- other formats -------------------------------------------------------------------------------------------------
    to_sparse_coo = conversions.to_sparse_coo
    to_sparse_csr = conversions.to_sparse_csr
    to_nested = conversions.to_nested
    to_packed_sequence = conversions.to_packed_sequence
    from_list = classmethod(conversions.from_list)
    from_sparse = classmethod(conversions.from_sparse)
    from_nested = classmethod(conversions.from_nested)
    from_packed_sequence = classmethod(conversions.from_packed_sequence)

    def __repr__(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        return f"Packed(values={tuple(self.values.shape)} {self.values.dtype}, mask={tuple(self.mask.shape)}{capacity})"


def pack(x: Tensor, mask: MaskLike, *, capacity: int | None = None, out: Tensor | None = None) -> Packed:
    """Gather the kept rows into one contiguous tensor.

    >>> import torch, maskwise as mw
    >>> mw.pack(torch.arange(8).reshape(2, 2, 2), torch.tensor([[True, False], [True, True]])).values
    tensor([[0, 1],
            [4, 5],
            [6, 7]])

    Args:
        x: (*lead, *rest).
        mask: a Mask or a bool tensor of x's leading dims, or of as many dims as x, which broadcasts and selects single
            elements; True means keep.
        capacity: a fixed number of rows, for a static shape, as full graphs and CUDA graphs require; the remaining rows
            are zero and ignored. It must be at least the number of kept rows.
        out: the output tensor, (n, *rest), contiguous and without grad: the values of the result. A large result is
            written faster into a preallocated tensor. On a GPU it causes a host-device sync for n.

    Returns:
        A `Packed`; gradients flow through its values to the kept rows.

    Raises:
        ShapeError: the mask does not line up with x, or ``out`` has another shape than the result.
        DtypeError: the mask is not bool, x is not a tensor, or ``out`` is of another dtype than x.
        DeviceError: the mask or ``out`` is on another device.
        ArgumentError: the mask keeps more than ``capacity``, or there is no capacity where the count is unknown (in
            torch.func transforms, and on the meta device); ``out`` cannot be written; or x or the mask is sparse.
    """
    if is_tracing() or capacity is not None or out is not None:
        lead = line_up("pack", x, mask)
        if is_observed() and (planned := _report(_decide(x, lead), x, lead)):
            return planned  # type: ignore[return-value]
        return collect(x, lead, capacity=capacity, out=out)
    try:
        key = _key(x, mask)
        decision = dispatch.cache.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or nested ones without a shape, which the checks report.
        line_up("pack", x, mask)
        raise
    if decision is None or not decision.prepared:
        lead = line_up("pack", x, mask)
        decision = dispatch.cache[key] = decision or _decide(x, lead, is_lined_up=lead is mask)
    else:
        lead = cast("Mask", mask)
    if is_any_observing() and (planned := _report(decision, x, lead)):
        return planned  # type: ignore[return-value]
    packed: Packed = decision.run(x, lead)
    return packed


def collect(x: Tensor, lead: Mask, *, capacity: int | None = None, out: Tensor | None = None) -> Packed:
    """`pack` with an aligned mask, as a step of another function: no log records it."""
    if capacity is not None:
        bits = lead.to_bool()
        run = by_kernel(bits, rows.pack_capacity, reference.pack_static)
        static = run(x, bits, _enough(lead, capacity))
        if out is not None:
            static = check_out("pack", out, tuple(static.shape), x, bits).copy_(static)
        return Packed(static, lead, capacity)
    if is_tracing():
        return Packed(rows.pack_rows(x, lead.to_bool()), lead)
    key = _key(x, lead)
    decision = dispatch.cache.get(key)
    if decision is None:
        decision = dispatch.cache[key] = _decide(x, lead, is_lined_up=True)
    if out is not None and decision.run is not _gather_transformed:
        mask = rows.mask_of_rows(lead)
        rows.pack_rows_out(x, mask, check_out("pack", out, (lead.count(), *x.shape[lead.dim() :]), x, mask))
        return Packed(out, lead)
    packed: Packed = decision.run(x, lead)
    return packed


# -- the routes of pack ------------------------------------------------------------------------------------------------
def _gather_transformed(x: Tensor, lead: Mask) -> Packed:
    if is_vmapped_or_functional():
        must, hint = "be given inside torch.func transforms", "capacity=mask.numel()"
        raise ArgumentError(say("pack", "capacity", must=must, got=None, hint=hint))
    # Forward-mode AD, which torch.library's autograd supports.
    return _gather_with_gradient(x, lead)


def _gather_on_device(x: Tensor, lead: Mask) -> Packed:
    count = lead.facts.count
    if count is not None:
        # A count that is cached on the host needs no host-device sync.
        return Packed(rows.pack_capacity(x, lead.to_bool(), count), lead)
    if x.device.type == "meta":
        must, hint = "be given on the meta device", "capacity=mask.numel()"
        raise ArgumentError(say("pack", "capacity", must=must, got=None, hint=hint))
    return _gather_with_gradient(x, lead) if _may_differentiate(x) else _gather_forward(x, lead)


def _gather_forward(x: Tensor, lead: Mask) -> Packed:
    return Packed(rows.pack_rows_forward(x, rows.mask_of_rows(lead)), lead)


def _gather_with_gradient(x: Tensor, lead: Mask) -> Packed:
    return Packed(rows.pack_rows(x, rows.mask_of_rows(lead)), lead)


def _gather_by_torch(x: Tensor, lead: Mask) -> Packed:
    return Packed(index_rows(x, lead.to_bool()), lead)


def why_torch_indexes(facts: Facts) -> str | None:
    """Why torch's own indexing is faster than our kernel with its gradient, or None: for a small x on the CPU."""
    rates = calibration.rates_for("cpu")
    # Indexing takes two calls; the time of our kernel per byte is negligible next to torch's.
    few = rates.indexed * (rates.fused_call - 2 * rates.plain_call)
    is_few = facts.device == "cpu" and prod(facts.shape) * facts.dtype.itemsize < few
    return "too few rows for a kernel to pay" if is_few else None


_COPIED = "kept rows are gathered"
_ROUTES = (
    Route(
        "kept",
        _gather_transformed,
        lambda facts: None if facts.transformed else NOT_APPLICABLE,
        reason=_COPIED,
        flops=0,
        transforms=True,
    ),
    Route(
        "kept",
        _gather_on_device,
        lambda facts: None if facts.device in (DEVICE, "meta") else NOT_APPLICABLE,
        reason=_COPIED,
        flops=0,
        is_kernel=True,
    ),
    Route(
        "kept",
        _gather_forward,
        lambda facts: NOT_APPLICABLE if facts.grad else None,
        reason=_COPIED,
        flops=0,
        is_kernel=True,
    ),
    Route("kept", _gather_with_gradient, pays=why_torch_indexes, reason=_COPIED, flops=0, is_kernel=True),
    Route("plain", _gather_by_torch, reason=_COPIED, flops=0, transforms=True),
)


def _key(x: Tensor, mask: MaskLike) -> tuple[Any, ...]:
    # fmt: off
    return (
        "pack", x.shape, mask.shape, x.dtype, mask.dtype, x.device, mask.device, x.layout, type(x), type(mask),
        mask.operand if type(mask) is Mask else "bits",
        x.requires_grad and _is_grad_enabled(), is_transformed(), is_any_forced() and forced(),
    )
    # fmt: on


def _decide(x: Tensor, lead: Mask, *, is_lined_up: bool = False) -> Decision:
    facts = Facts(
        "pack",
        tuple(x.shape),
        x.dtype,
        x.device.type,
        grad=x.requires_grad and torch.is_grad_enabled(),
        transformed=is_transformed(),
        mask=lead.operand,
    )
    return decide(facts, _ROUTES, is_lined_up)


#: Bytes of a cache line: reading a kept row also reads a part of a shorter dropped row next to it.
_LINE = 64


def row_skips(x: Tensor, lead: Mask) -> Skips:
    """What gathering kept rows skips: dropped rows are not read, unless they are shorter than a cache line."""
    row = x.element_size() * (x.numel() // max(lead.numel(), 1))
    return Skips.READING if row >= _LINE and x.is_contiguous() else Skips.COMPUTING


def _report(decision: Decision, x: Tensor, lead: Mask) -> Plan | None:
    """Record a call of pack, with its work for the number of kept rows."""
    density, rates = lead.facts.density, calibration.rates_for(x.device.type)
    # Each kept row is read and written once; all rows, where they are not counted.
    gathered = round(2 * x.nbytes * (1.0 if density is None else density))
    work = Work(calls=1, streamed=lead.numel(), gathered=gathered)
    plan = replace(
        decision.plan,
        microseconds=microseconds(work, rates.bare_call, rates),
        work=work,
        dense=Work(calls=1, streamed=x.nbytes, fresh=x.nbytes),
        skips=row_skips(x, lead),
    )
    return record(plan, x, lead)


def index_rows(x: Tensor, bits: Tensor) -> Tensor:
    """The kept rows by torch's own operations; masked_select is faster for single elements."""
    return x.masked_select(bits) if bits.dim() == x.dim() else x[bits].contiguous()


def fill_for(values: Tensor, fill: float | Tensor) -> Tensor:
    """The fill value as a tensor of the values' dtype."""
    if type(fill) is float and values.is_floating_point() and (fill == 0.0 or not isfinite(fill)):
        return number(fill, values.dtype, values.device)
    if isinstance(fill, int | float | complex) and not values.is_cpu:
        # Written by the device: a copy from the host would be captured in a CUDA graph with its address.
        return torch.full((), fill, device=values.device).to(values.dtype)
    return torch.as_tensor(fill, device=values.device).to(values.dtype)


def by_kernel(bits: Tensor, op: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op on a device with a kernel; plain operations under torch.func transforms."""
    return op if bits.device.type == DEVICE and not _is_functional() else plain


def _may_differentiate(*operands: Tensor) -> bool:
    """Whether there may be a gradient: always in a compiled graph, and in forward-mode AD."""
    if is_tracing() or is_forward_ad():
        return True
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def _is_functional() -> bool:
    """Whether a torch.func transform is active outside of a graph, so that shapes must not depend on data."""
    return not is_tracing() and is_vmapped_or_functional()


def _enough(mask: Mask, capacity: int) -> int:
    """``capacity``, if it suffices; on a GPU by a device-side assert, without a host-device sync."""
    if not isinstance(capacity, (int, torch.SymInt)):
        must, hint = "be an int or None", "capacity=mask.numel()"
        raise DtypeError(say("pack", "capacity", must=must, got=type(capacity).__name__, hint=hint))
    if is_tracing() or not (mask.facts.on_host or mask.device.type == "cpu"):
        assert_async(mask.to_bool().sum() <= capacity, "pack: the mask keeps more than `capacity`")
    elif capacity < mask.numel() and (kept := mask.count()) > capacity:
        raise ArgumentError(
            say(
                "pack",
                "capacity",
                must=f"be at least the number of kept rows, {kept}",
                got=capacity,
                hint=f"capacity={kept}",
            )
        )
    return capacity


def _flatten(packed: Packed) -> tuple[list[Any], int | None]:
    return [packed.values, packed.mask], packed.capacity


def _unflatten(children: Iterable[Any], capacity: int | None) -> Packed:
    values, mask = children
    return Packed(values, mask, capacity)


register_pytree_node(Packed, _flatten, _unflatten)
