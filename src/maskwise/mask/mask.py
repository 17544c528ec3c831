"""The Mask: an immutable value that says what is kept."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import nan, prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import algebra, block_mask, constructors, conversions, display, indexing
from maskwise.mask import facts as _facts
from maskwise.mask.checks import bool_tensor, need_dense
from maskwise.mask.facts import Facts
from maskwise.mask.structures import Dense, Intervals, Operand, Structure
from maskwise.mask.structures.affine import permute
from maskwise.ops.torch_private import is_tracing

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Mask"]

Fact = TypeVar("Fact")


class Mask:
    """What is kept, True meaning keep: an immutable value with a shape, a device, an algebra and facts.

    >>> import torch
    >>> from maskwise import Mask
    >>> mask = Mask.from_lengths([2, 4, 3], max_len=5) & ~Mask.from_indices([0], size=5)
    >>> mask.count(), mask.lengths
    (6, tensor([1, 3, 2]))
    >>> torch.arange(5.0).masked_fill(~mask[1], 0.0)
    tensor([0., 1., 2., 3., 0.])

    A mask holds a structure (lengths, indices, a function, ...) and becomes a bool tensor only when one is needed.
    ``==`` and ``!=`` compare each position and give a Mask, as they do with tensors; `Mask.equal` compares two masks as
    wholes. Masks are hashable by identity, as tensors are. ``len()`` is refused, because torch would take a mask with a
    length for a sequence of indices in ``x[mask]``.

    Args:
        bits: a bool tensor of any shape. It is not copied; a mask whose tensor was changed in place afterwards raises
            StaleMaskError when it is used.

    Raises:
        DtypeError: it is not a bool tensor; the hint names the converter to use.
        ArgumentError: they are nested or sparse.
        StaleMaskError: the tensor was changed in place since; every use of the mask raises it.

    """

    __slots__ = ("__weakref__", "_bits", "_cache", "_structure")

    # The bool tensor of a dense mask, else None: an attribute read for hot paths. `to_bool` is for everyone else.
    _bits: Tensor | None
    _structure: Structure
    _cache: dict[Hashable, Any]

    def __init__(self, bits: Tensor | Mask) -> None:
        structure = bits._structure if isinstance(bits, Mask) else Dense(bool_tensor(bits))
        _fill(self, structure)

    @classmethod
    def _wrap(cls, structure: Structure) -> Mask:
        mask = cls.__new__(cls)
        _fill(mask, structure)
        return mask

    @classmethod
    def _from_bounds(cls, bounds: Tensor, along: int, shape: tuple[int, ...]) -> Mask:
        """Return the mask of intervals along a dim, from their `_bounds`."""
        ndim = len(shape)
        order = [*range(ndim + along), *range(ndim + along + 1, ndim), ndim + along]
        starts, ends = bounds.movedim(along, -1)[..., 0].unbind()
        rows = Intervals(starts, ends, tuple(shape[d] for d in order), bounds.device)
        back = sorted(range(ndim), key=order.__getitem__)
        mask = cls._wrap(rows if along == -1 else rows.view(permute(rows.shape, back)))
        mask._cache["bounds"] = (bounds, None)
        return mask

    @classmethod
    def _coerce(cls, value: Any, symbol: str) -> Mask:
        if isinstance(value, Mask):
            return value
        need_dense(f"Mask {symbol}", "other", value)
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return cls._wrap(Dense(value))
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise DtypeError(
            say(f"Mask {symbol}", "other", must="be a Mask or a bool tensor", got=got, hint="Mask(other.bool())")
        )

    # -- how to make one -----------------------------------------------------------------------------------------------
    from_lengths = classmethod(constructors.from_lengths)
    from_indices = classmethod(constructors.from_indices)
    from_values = classmethod(constructors.from_values)
    from_segments = classmethod(constructors.from_segments)
    from_function = classmethod(constructors.from_function)
    causal = classmethod(constructors.causal)
    window = classmethod(constructors.window)
    full = classmethod(constructors.full)
    random = classmethod(constructors.random)
    none = classmethod(constructors.none)
    cat = classmethod(algebra.cat)
    stack = classmethod(algebra.stack)

    # -- the other conventions -----------------------------------------------------------------------------------------
    from_key_padding = classmethod(conversions.from_key_padding)
    to_key_padding = conversions.to_key_padding
    from_attention_mask = classmethod(conversions.from_attention_mask)
    to_attention_mask = conversions.to_attention_mask
    from_additive = classmethod(conversions.from_additive)
    to_additive = conversions.to_additive
    from_cu_seqlens = classmethod(conversions.from_cu_seqlens)
    to_cu_seqlens = conversions.to_cu_seqlens
    from_block_mask = classmethod(block_mask.from_block_mask)
    to_block_mask = block_mask.to_block_mask
    from_numpy = classmethod(conversions.from_numpy)
    to_numpy = conversions.to_numpy
    to_masked_array = conversions.to_masked_array
    float = conversions.to_float
    tolist = conversions.to_list

    # -- views and moves -----------------------------------------------------------------------------------------------
    __getitem__ = indexing.subscript
    unsqueeze = indexing.unsqueeze
    squeeze = indexing.squeeze
    expand = indexing.expand
    expand_as = indexing.expand_as
    permute = indexing.permute
    transpose = indexing.transpose
    movedim = indexing.movedim
    reshape = indexing.reshape
    view = indexing.reshape
    flatten = indexing.flatten
    to = indexing.to
    cpu = indexing.cpu
    cuda = indexing.cuda
    pin_memory = indexing.pin_memory
    clone = indexing.clone
    contiguous = indexing.contiguous

    T = property(indexing.reversed_dims)
    mT = property(indexing.last_two_swapped)  # noqa: N815 - torch spells it so

    def to_bool(self) -> Tensor:
        """Return the bool tensor, True where kept; computed once. It may be an expanded view: do not write into it.

        >>> Mask.from_lengths([1, 2]).to_bool()
        tensor([[ True, False],
                [ True,  True]])

        Raises:
            StaleMaskError: the tensor that the mask was made of has been changed in place.

        """
        structure = self._structure
        if isinstance(structure, Dense):
            return structure.current()
        return self._once("bits", structure.materialize)

    # -- shape and device ----------------------------------------------------------------------------------------------
    @property
    def shape(self) -> torch.Size:
        """The shape.

        >>> Mask.causal(2, 3).shape
        torch.Size([2, 3])
        """
        return torch.Size(self._structure.shape) if self._bits is None else self._bits.shape

    @property
    def device(self) -> torch.device:
        """The device that the mask is for: its bool tensor and the tensors among its facts are there."""
        return self._structure.device

    @property
    def dtype(self) -> torch.dtype:
        """Always torch.bool."""
        return torch.bool

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._structure.shape)

    def dim(self) -> int:
        """Return the number of dims.

        >>> Mask.causal(2, 3).dim()
        2
        """
        return self.ndim

    def numel(self) -> int:
        """Return how many positions there are, kept or not.

        >>> Mask.causal(2, 3).numel()
        6
        """
        return prod(self._structure.shape)

    size = indexing.size

    @property
    def operand(self) -> Operand:
        """How the mask reaches a kernel, which it knows without reading data.

        ``"intervals"`` where each line along one dim keeps one run, through any view; else ``"bits"``.

        >>> Mask.causal(4).operand, Mask.from_lengths([2, 4])[..., None].operand, Mask.from_indices([1, 3], 4).operand
        ('intervals', 'intervals', 'bits')
        """
        return "bits" if self._along is None else "intervals"

    @property
    def _along(self) -> int | None:
        """The dim, counted from the right, along which each line keeps one run; None where the mask is bits."""
        if self._bits is not None:
            return None
        hit = self._cache.get("along")
        if hit is None:
            hit = self._structure.along, None
            if not is_tracing():
                self._cache["along"] = hit
        return cast("int | None", hit[0])

    def _bounds(self, device: torch.device | None = None) -> Tensor:
        """Return the starts and ends of the intervals as kernels take them: int64, of the mask's dims and one in front.

        They lie on a device if one is named, else where the mask's own tensors lie. Sizes are 1 where bounds are equal.
        """
        bounds = self._once("bounds", lambda: _facts.bounds(self._structure))
        if device is None or bounds.device == device:
            return bounds
        return self._once(f"bounds on {device}", lambda: bounds.to(device))

    # -- facts ---------------------------------------------------------------------------------------------------------
    @property
    def facts(self) -> Facts:
        """What is known at no cost: reading this computes nothing, and takes no host-device sync.

        >>> Mask.from_lengths([2, 4]).facts
        Facts(kind='intervals', numel=8, count=6, is_prefix=True, on_host=True)
        """
        return _facts.facts(self)

    count = _facts.count
    indices = _facts.indices
    equal = _facts.equal
    equals = _facts.equal
    sum = _facts.sum
    any = _facts.any
    all = _facts.all

    @property
    def density(self) -> builtins.float:
        """The share that is kept, between 0 and 1; NaN for a mask of no positions.

        >>> Mask.from_lengths([2, 4]).density
        0.75
        """
        numel = self.numel()
        return self.count() / numel if numel else nan

    @property
    def lengths(self) -> Tensor:
        """How many each row of the last dim keeps: int64 of shape[:-1], on the mask's device.

        >>> Mask.window(4, left=1).lengths
        tensor([1, 2, 2, 2])

        Raises:
            ShapeError: the mask has no dim.

        """
        return self._once("lengths", lambda: self._host_lengths().to(self.device, non_blocking=True))

    @property
    def cu_seqlens(self) -> Tensor:
        """The cumulative lengths of all rows from 0 on: int32 of shape (rows + 1,), on the mask's device.

        >>> Mask.from_lengths([2, 4]).cu_seqlens
        tensor([0, 2, 6], dtype=torch.int32)
        """
        return self._once(
            "cu_seqlens", lambda: _facts.cumulative(self._host_lengths()).to(self.device, non_blocking=True)
        )

    @property
    def is_full(self) -> bool:
        """Whether everything is kept.

        >>> Mask.from_lengths([3, 3]).is_full
        True
        """
        return self.count() == self.numel()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept.

        >>> Mask.from_lengths([0, 0], max_len=2).is_empty
        True
        """
        return self.count() == 0

    @property
    def is_prefix(self) -> bool:
        """Whether each row of the last dim keeps a leading run, which may be empty or the whole row.

        >>> Mask.causal(4).is_prefix, Mask.window(4, left=1).is_prefix
        (True, False)
        """
        return self._once("is_prefix", lambda: _facts.is_prefix(self._local, self._seen))

    # -- algebra -------------------------------------------------------------------------------------------------------
    def __and__(self, other: Mask | Tensor) -> Mask:
        """Keep what both keep."""
        return self._combine("and", other, "&")

    def __or__(self, other: Mask | Tensor) -> Mask:
        """Keep what either keeps."""
        return self._combine("or", other, "|")

    def __xor__(self, other: Mask | Tensor) -> Mask:
        """Keep what exactly one of both keeps."""
        return self._combine("xor", other, "^")

    def __invert__(self) -> Mask:
        """Keep what this mask drops."""
        return self._wrap(self._structure.invert())

    def logical_not(self) -> Mask:
        """Return ``~mask``. Dynamo cannot trace ``~`` of an object, so this is the spelling inside of torch.compile.

        >>> Mask.from_lengths([1, 3]).logical_not().to_bool().int().tolist()
        [[0, 1, 1], [0, 0, 0]]
        """
        return self._wrap(self._structure.invert())

    def __sub__(self, other: Mask | Tensor) -> Mask:
        """Keep what this mask keeps and the other drops."""
        return self._combine("and", self._coerce(other, "-").logical_not(), "-")

    def __eq__(self, other: object) -> Mask:  # type: ignore[override]
        """Keep the positions at which both agree."""
        different = self._differs(other, "==")
        return NotImplemented if different is None else different.logical_not()

    def __ne__(self, other: object) -> Mask:  # type: ignore[override]
        """Keep the positions at which both differ."""
        different = self._differs(other, "!=")
        return NotImplemented if different is None else different

    # By identity: what was defined with __eq__ takes the default away.
    __hash__ = object.__hash__

    def _differs(self, other: object, symbol: str) -> Mask | None:
        """Return where this mask differs from another, or from a number; None for what cannot be compared."""
        if isinstance(other, (bool, int, builtins.float)):
            return self if other == 0 else self.logical_not() if other == 1 else self.full(self.shape, self.device)
        if isinstance(other, Tensor) and other.dtype is not torch.bool:
            need_dense(f"Mask {symbol}", "other", other)
            return self._wrap(Dense(self.to_bool() != other))
        return self._combine("xor", other, symbol) if isinstance(other, (Mask, Tensor)) else None

    # `tensor & mask` reaches these through __torch_function__ too; both give a Mask.
    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def __rsub__(self, other: Mask | Tensor) -> Mask:
        """Keep what the other keeps and this mask drops."""
        return self._coerce(other, "-") - self

    def _combine(self, op: str, other: Mask | Tensor, symbol: str) -> Mask:
        right = self._coerce(other, symbol)
        return self._wrap(algebra.combine(op, self._structure, right._structure, symbol=symbol))

    # -- Python's own methods ------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return display.text(self)

    def _repr_html_(self) -> str:
        return display.html(self)

    def __bool__(self) -> bool:
        if self.numel() == 1:
            # On meta only the structure may know.
            return bool(self.count() if self.device.type == "meta" else self.to_bool())
        must = f"have one position to be True or False, not {tuple(self.shape)}"
        hint = "mask.is_full, mask.is_empty or mask.equal(other)"
        raise ArgumentError(say("bool(mask)", "mask", must=must, got=f"{self.numel()} positions", hint=hint))

    def __len__(self) -> NoReturn:
        # torch calls it in x[mask], and only an error shows that a mask is no sequence of indices.
        raise DtypeError("len(mask): a Mask has no len(). Hint: mask.shape[0], or mask.count().")

    def __iter__(self) -> Iterator[Mask]:
        if not self.ndim:
            raise DtypeError(say("iter(mask)", "mask", must="have at least one dim", got=(), hint="bool(mask)"))
        return (self[i] for i in range(self.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.to_numpy()
        return array if dtype is None else array.astype(dtype)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Mask.{name} cannot be set: a Mask is immutable. Hint: mask & other, mask[...].")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Mask.{name} cannot be deleted: a Mask is immutable. Hint: del mask.")

    def __reduce__(self) -> tuple[Callable[..., Mask], tuple[Structure]]:
        # What can be computed again is not worth carrying along.
        return type(self)._wrap, (self._structure,)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return conversions.call(cls, func, args, kwargs or {})

    # -- the cache -----------------------------------------------------------------------------------------------------
    def _once(self, name: Hashable, compute: Callable[[], Fact]) -> Fact:
        """Return what was computed before under this name, or compute and cache it."""
        # A graph that is recorded holds how a fact is computed, and not what it was: the next input has others.
        if is_tracing():
            return compute()
        if isinstance(self._structure, Dense):
            self._structure.current()
        hit = self._cache.get(name)
        # A tensor that somebody wrote into is no longer the fact that it was; one of inference mode serves there alone.
        if hit is not None and (_serves(hit[0]) if hit[1] is None else hit[0]._version == hit[1]):
            return cast(Fact, hit[0])
        value = compute()
        # The facts hold more now.
        self._cache.pop("facts", None)
        if not isinstance(value, Tensor):
            self._cache[name] = (value, None)
        elif type(value) is Tensor:
            self._cache[name] = (value, None if value.is_inference() else value._version)
        return value

    @property
    def _local(self) -> Structure:
        """The structure where its facts are cheapest to compute: on the host, if that is where its data lies."""
        structure = self._structure
        return structure.to(torch.device("cpu")) if structure.on_host and self.device.type != "cpu" else structure

    @property
    def _seen(self) -> Tensor | None:
        """The bool tensor, if it is there already, and has values."""
        there = self._bits is not None or "bits" in self._cache
        return self.to_bool() if there and self.device.type != "meta" else None

    def _host_lengths(self) -> Tensor:
        """Return the lengths where they were computed: on the host for host data, without any device."""
        if not self.ndim:
            raise ShapeError(say("Mask.lengths", "mask", must="have at least one dim", got=(), hint="mask[None]"))
        counts = lambda: _facts.row_counts(self._local, self._seen).expand(self.shape[:-1]).contiguous()  # noqa: E731
        return self._once("host_lengths", counts)


def _serves(fact: Any) -> bool:
    """Whether a fact without a version may be used: autograd saves no tensor that was made in inference mode."""
    return not isinstance(fact, Tensor) or torch.is_inference_mode_enabled() or not fact.is_inference()


def _fill(mask: Mask, structure: Structure) -> None:
    object.__setattr__(mask, "_structure", structure)
    object.__setattr__(mask, "_bits", structure.bits if isinstance(structure, Dense) else None)
    object.__setattr__(mask, "_cache", {})


conversions.register(Mask)
