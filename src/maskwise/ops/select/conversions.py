"""Conversions of a Packed from and to sparse tensors, nested tensors and PackedSequence."""

# These are methods of Packed: the first argument is cls or self, and not documented.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.mask.checks import need_dense

if TYPE_CHECKING:
    from maskwise.ops.select.packed import Packed

__all__ = [
    "from_list",
    "from_nested",
    "from_packed_sequence",
    "from_sparse",
    "to_nested",
    "to_packed_sequence",
    "to_sparse_coo",
    "to_sparse_csr",
]


def to_sparse_coo(self: Packed) -> Tensor:
    """As a coalesced sparse COO tensor, with the mask's dims sparse and the row's dims dense.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.to_sparse_coo().indices()
    tensor([[0, 0, 1],
            [0, 1, 0]])
    """
    places = self.mask.indices()
    indices = places[None] if self.mask.ndim == 1 else places.T
    size = (*self.mask.shape, *self.values.shape[1:])
    return torch.sparse_coo_tensor(indices, _kept(self), size, is_coalesced=True, check_invariants=False)


def to_sparse_csr(self: Packed) -> Tensor:
    """As a sparse CSR tensor; the mask must have two dims.

    Raises:
        ShapeError: the mask does not have two dims.
    """
    _need_two_dims(self, "to_sparse_csr")
    columns = self.mask.indices()[:, 1]
    size = (*self.mask.shape, *self.values.shape[1:])
    starts = self.mask.cu_seqlens.to(torch.int64)
    return torch.sparse_csr_tensor(starts, columns, _kept(self), size, check_invariants=False)


def from_sparse(cls: type[Packed], sparse: Tensor) -> Packed:
    """From a sparse COO or CSR tensor: its stored elements are the kept ones.

    >>> import torch
    >>> from maskwise.ops.select import Packed
    >>> Packed.from_sparse(torch.tensor([[0.0, 3.0], [4.0, 0.0]]).to_sparse()).unpack()
    tensor([[0., 3.],
            [4., 0.]])

    Args:
        sparse: a tensor of layout torch.sparse_coo or torch.sparse_csr.

    Raises:
        DtypeError: it is not one.
    """
    if not isinstance(sparse, Tensor) or sparse.layout not in (torch.sparse_coo, torch.sparse_csr):
        raise DtypeError(
            _wrong_type("from_sparse", "sparse", "a sparse COO or CSR tensor", sparse, "sparse.to_sparse()")
        )
    coo = (sparse.to_sparse() if sparse.layout is torch.sparse_csr else sparse).coalesce()
    lead = tuple(coo.shape[: coo.sparse_dim()])
    places = coo.indices()[0] if len(lead) == 1 else coo.indices().T
    return cls(coo.values(), Mask.from_indices(places, size=lead if len(lead) > 1 else lead[0]))


def from_list(cls: type[Packed], tensors: Sequence[Tensor], max_len: int | None = None) -> Packed:
    """From the sequences themselves, one tensor for each; nothing is padded.

    >>> import torch, maskwise as mw
    >>> packed = mw.Packed.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> packed.values, packed.unpack()
    (tensor([1., 2., 3.]), tensor([[1., 2.],
            [3., 0.]]))

    Args:
        tensors: (length, *rest) each, of any lengths, 0 included.
        max_len: the size of the mask's last dim; by default the longest length.

    Raises:
        DtypeError: they are not tensors of one dtype.
        ArgumentError: there are none, or one is sparse.
        ShapeError: a tensor has no dim, or their dims after the first differ.
        DeviceError: they are on several devices.
        OutOfRangeError: one is longer than max_len.
    """
    op = "Packed.from_list"
    if not isinstance(tensors, Sequence):
        raise DtypeError(say(op, "tensors", must="be a list of tensors", got=type(tensors).__name__, hint="[t1, t2]"))
    parts = list(tensors)
    if not parts:
        raise ArgumentError(say(op, "tensors", must="hold at least one tensor", got="none", hint="[torch.empty(0, 8)]"))
    for part in parts:
        _check_part(op, part, parts[0])
    lengths = [len(part) for part in parts]
    mask = Mask.from_lengths(lengths, max_len=max_len, device=parts[0].device)
    return cls(torch.cat(parts), mask)


def _check_part(op: str, part: object, first: Tensor) -> None:
    """Raise unless a tensor fits behind the first one of a list."""
    if not isinstance(part, Tensor):
        hint = "[torch.as_tensor(t) for t in tensors]"
        raise DtypeError(say(op, "tensors", must="hold tensors", got=type(part).__name__, hint=hint))
    need_dense(op, "tensors", part)
    if not part.dim():
        raise ShapeError(say(op, "tensors", must="have at least one dim", got=(), hint="t[None] for each of them"))
    if part.shape[1:] != first.shape[1:]:
        must = f"all have rows of {tuple(first.shape[1:])}"
        raise ShapeError(say(op, "tensors", must=must, got=tuple(part.shape[1:]), hint="(length, features) each"))
    if part.dtype != first.dtype:
        raise DtypeError(say(op, "tensors", must=f"all be {first.dtype}", got=part.dtype, hint=f"t.to({first.dtype})"))
    if part.device != first.device:
        hint = f'[t.to("{first.device}") for t in tensors]'
        raise DeviceError(say(op, "tensors", must=f"all be on {first.device}", got=part.device, hint=hint))


def to_nested(self: Packed) -> Tensor:
    """As a jagged nested tensor: one component per sequence; the mask must have two dims.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> [part.tolist() for part in packed.to_nested().unbind()]
    [[1.0, 2.0], [3.0]]

    Raises:
        ShapeError: the mask does not have two dims.
    """
    _need_two_dims(self, "to_nested")
    return torch.nested.nested_tensor_from_jagged(_kept(self), offsets=self.mask.cu_seqlens.to(torch.int64))


def from_nested(cls: type[Packed], nested: Tensor, max_len: int | None = None) -> Packed:
    """From a jagged nested tensor: each component is a right-padded sequence.

    >>> import torch, maskwise as mw
    >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    >>> mw.Packed.from_nested(nested).unpack()
    tensor([[1., 1.],
            [1., 0.]])

    Args:
        nested: a nested tensor of layout torch.jagged.
        max_len: the size of the mask's last dim; by default the longest length.

    Raises:
        DtypeError: it is not a jagged nested tensor.
    """
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout is not torch.jagged:
        hint = "torch.nested.nested_tensor(parts, layout=torch.jagged)"
        raise DtypeError(_wrong_type("from_nested", "nested", "a jagged nested tensor", nested, hint))
    # Only jagged tensors have offsets, and torch has no type for them.
    offsets: Tensor = nested.offsets()  # type: ignore[attr-defined]
    lengths = offsets.diff()
    longest = int(lengths.max()) if max_len is None and lengths.numel() else max_len or 0
    return cls(nested.values(), Mask.from_lengths(lengths, max_len=longest))


def to_packed_sequence(self: Packed) -> PackedSequence:
    """As a PackedSequence for torch's recurrent layers: time-major, longest sequence first.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.to_packed_sequence().batch_sizes
    tensor([2, 1])

    Raises:
        ArgumentError: a sequence is empty, which a PackedSequence cannot represent.
        ShapeError: the mask does not have two dims.
    """
    _need_two_dims(self, "to_packed_sequence")
    lengths = self.mask.lengths
    if bool((lengths == 0).any()):
        got = f"none of sequence {int((lengths == 0).to(torch.uint8).argmax())}"
        hint = "pack(x[mask.lengths > 0], mask[mask.lengths > 0])"
        raise ArgumentError(
            say("Packed.to_packed_sequence", "mask", must="keep at least one row of every sequence", got=got, hint=hint)
        )
    order = torch.argsort(lengths, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ids = self.sequence_ids[: self.mask.count()]
    # The time step of a row counts kept rows, so gaps in the mask are removed.
    steps = torch.arange(len(ids), device=ids.device) - self.mask.cu_seqlens.long()[ids]
    by_time = torch.argsort(steps * max(len(order), 1) + rank[ids])
    batch_sizes = torch.bincount(steps).cpu()
    return PackedSequence(_kept(self)[by_time], batch_sizes, order, rank)


def from_packed_sequence(cls: type[Packed], sequence: PackedSequence) -> Packed:
    """From a PackedSequence, such as the output of a recurrent layer.

    >>> import torch, maskwise as mw
    >>> sequence = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    >>> mw.Packed.from_packed_sequence(sequence).unpack()
    tensor([[1., 1.],
            [1., 0.]])

    Args:
        sequence: a torch.nn.utils.rnn.PackedSequence.

    Raises:
        DtypeError: it is not one.
    """
    if not isinstance(sequence, PackedSequence):
        hint = "torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)"
        raise DtypeError(_wrong_type("from_packed_sequence", "sequence", "a PackedSequence", sequence, hint))
    sizes = sequence.batch_sizes
    steps = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(sequence.data.device)
    starts = (sizes.cumsum(0) - sizes).to(sequence.data.device)
    rank = torch.arange(len(steps), device=steps.device) - starts[steps]
    ids = rank if sequence.sorted_indices is None else sequence.sorted_indices[rank]
    count = int(sizes[0]) if len(sizes) else 0
    lengths = torch.bincount(ids, minlength=count)
    by_sequence = torch.argsort(ids * max(len(sizes), 1) + steps)
    return cls(sequence.data[by_sequence], Mask.from_lengths(lengths, max_len=len(sizes)))


def _wrong_type(name: str, argument: str, expected: str, value: object, hint: str) -> str:
    """The message for a value of another type or layout."""
    got = f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__
    return say(f"Packed.{name}", argument, must=f"be {expected}", got=got, hint=hint)


def _kept(self: Packed) -> Tensor:
    """The values without the unused rows of a capacity."""
    return self.values if self.capacity is None else self.values[: self.mask.count()]


def _need_two_dims(self: Packed, name: str) -> None:
    if self.mask.ndim != 2:
        hint = "pack with a (sequences, positions) mask"
        raise ShapeError(say(f"Packed.{name}", "mask", must="have two dims", got=tuple(self.mask.shape), hint=hint))
