"""The other conventions, as named converters both ways; and what torch does with a Mask: functions, pytrees, batches.

`Mask` has each of the converters as a method.
"""

# The first argument is the class or the mask itself, which the reader of a method never passes.
# ruff: noqa: D417

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask.checks import as_ints, need_data, need_dense, readable
from maskwise.mask.structures import Constant, Dense, Intervals
from maskwise.mask.structures.base import Skeleton, assemble, take_apart
from maskwise.ops.torch_private import SequenceKey, default_collate_fn_map, register_pytree_node

if TYPE_CHECKING:
    import numpy as np

    from maskwise.mask.mask import Mask

__all__ = [
    "call",
    "from_additive",
    "from_attention_mask",
    "from_cu_seqlens",
    "from_key_padding",
    "from_numpy",
    "register",
    "to_additive",
    "to_attention_mask",
    "to_cu_seqlens",
    "to_float",
    "to_key_padding",
    "to_list",
    "to_masked_array",
    "to_numpy",
]

# Fills in use are -inf, finfo.min of any float dtype (perhaps cast to another), -1e9, and BERT's -10000, which bfloat16
# rounds to this. Softmax gives exactly zero for all of them.
_DROP_AT = -9984.0


def from_key_padding(
    cls: type[Mask],
    padding: Tensor,  # (..., L) bool
) -> Mask:
    """Take a key padding mask, where True means ignore, as `nn.MultiheadAttention` has it.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_key_padding(torch.tensor([[False, False, True]])).to_bool().tolist()
    [[True, True, False]]

    Args:
        padding: (..., L) bool, True where ignored. Where each row of a host tensor keeps one run, the mask is
            intervals.

    Raises:
        DtypeError: ``padding`` is not a bool tensor.

    """
    op = "Mask.from_key_padding"
    _tensor(op, "padding", padding)
    if padding.dtype != torch.bool:
        hint = "Mask.from_additive(t)" if padding.is_floating_point() else "Mask.from_attention_mask(t) if 1 means keep"
        raise DtypeError(say(op, "padding", must="be a bool tensor, True = ignore", got=padding.dtype, hint=hint))
    return _of_rows(cls, ~padding)


#: The most positions that are searched for runs.
_SEARCHED = 1 << 22


def _of_rows(
    cls: type[Mask],
    bits: Tensor,  # (..., L) bool, of which the mask is the only owner
) -> Mask:
    """The mask of a host tensor whose values have been read: intervals where each row keeps one run, else bits."""
    if not readable(bits) or bits.dim() == 0 or not 0 < bits.numel() <= _SEARCHED:
        return cls._wrap(Dense(bits))
    counts, starts = bits.sum(-1), bits.view(torch.uint8).argmax(-1)
    ends, place = starts + counts, torch.arange(bits.shape[-1])
    if not torch.equal((place >= starts[..., None]) & (place < ends[..., None]), bits):
        return cls._wrap(Dense(bits))
    from_start = None if not starts.any() else starts
    mask = cls._wrap(Intervals.between(from_start, ends, tuple(bits.shape), bits.device, int(counts.sum())))
    mask._cache["bits"] = (bits, None if bits.is_inference() else bits._version)
    return mask


def to_key_padding(mask: Mask) -> Tensor:
    """Return the bool tensor where True means ignore, for `nn.MultiheadAttention(key_padding_mask=...)`.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2], max_len=3).to_key_padding().tolist()
    [[False, False, True]]
    """
    return ~mask.to_bool()


def from_attention_mask(
    cls: type[Mask],
    attention_mask: Tensor,  # (...) of 0 and 1
) -> Mask:
    """Take an attention mask of zeros and ones, where 1 means keep, as Hugging Face tokenizers return it.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_attention_mask(torch.tensor([[1, 1, 0]])).to_bool().tolist()
    [[True, True, False]]

    Args:
        attention_mask: (...) ints, floats or bools that are 0 or 1. A device tensor is not read to check that. Where
            each row of a host tensor of numbers keeps one run, the mask is intervals.

    Raises:
        DtypeError: it is not a tensor.
        ArgumentError: it holds values other than 0 and 1.

    """
    op = "Mask.from_attention_mask"
    _tensor(op, "attention_mask", attention_mask)
    if attention_mask.dtype == torch.bool:
        return cls._wrap(Dense(attention_mask))
    if readable(attention_mask):
        odd = (attention_mask != 0) & (attention_mask != 1)
        hint = "Mask.from_additive(t) for 0 and -inf, Mask.from_segments(t) for ids, Mask.from_lengths(t) for lengths"
        _refuse(op, "attention_mask", attention_mask, odd=odd, must="hold only 0 (drop) and 1 (keep)", hint=hint)
    return _of_rows(cls, attention_mask != 0)


def to_float(mask: Mask) -> Tensor:
    """Return a float32 tensor of 1 where kept and 0 where dropped, as ``float()`` of a bool tensor.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2], max_len=3).float()
    tensor([[1., 1., 0.]])
    """
    return mask.to_bool().float()


def to_list(mask: Mask) -> Any:
    """Return nested lists of bools, as ``tolist()`` of a bool tensor.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([1, 2]).tolist()
    [[True, False], [True, True]]

    Raises:
        DeviceError: the mask is on the meta device, which holds no values.

    """
    need_data("Mask.tolist", mask._local.device)
    bits = mask._local.materialize() if mask._seen is None else mask._seen
    return bits.tolist()


def to_attention_mask(mask: Mask, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor with 1 where kept and 0 where dropped.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2], max_len=3).to_attention_mask()
    tensor([[1, 1, 0]])

    Args:
        dtype: the dtype of the result.

    """
    return mask.to_bool().to(dtype)


def from_additive(
    cls: type[Mask],
    additive: Tensor,  # (...) floating point
) -> Mask:
    """Take a mask that is added to scores: 0 keeps; -inf, or a number as negative as -10000 or finfo.min, drops.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_additive(torch.tensor([0.0, float("-inf"), torch.finfo(torch.float16).min])).to_bool().tolist()
    [True, False, False]

    Args:
        additive: (...) floats. A device tensor is not read to check its values.

    Raises:
        DtypeError: it is not a float tensor.
        ArgumentError: it holds a bias that is neither 0 nor very negative, or NaN.

    """
    op = "Mask.from_additive"
    _tensor(op, "additive", additive)
    if not additive.is_floating_point():
        hint = "Mask(t)" if additive.dtype == torch.bool else "Mask.from_attention_mask(t)"
        raise DtypeError(say(op, "additive", must="be a float tensor", got=additive.dtype, hint=hint))
    kept = additive > _DROP_AT
    if readable(additive):
        odd = (kept & (additive != 0)) | additive.isnan()
        hint = f"{op}(t.masked_fill(t > {_DROP_AT:.0f}, 0)), and add the bias to the scores"
        must = "hold only 0 (keep) and -inf or very negative numbers (drop)"
        _refuse(op, "additive", additive, odd=odd, must=must, hint=hint)
    return cls._wrap(Dense(kept))


def to_additive(mask: Mask, dtype: torch.dtype = torch.float32, value: float = float("-inf")) -> Tensor:
    """Return a tensor with 0 where kept and ``value`` where dropped, to be added to scores.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_lengths([2], max_len=3).to_additive(torch.bfloat16)
    tensor([[0., 0., -inf]], dtype=torch.bfloat16)

    Args:
        dtype: a float dtype.
        value: what dropped positions get; ``torch.finfo(dtype).min`` where a row may keep nothing.

    Raises:
        DtypeError: ``dtype`` is not a float dtype.

    """
    if not dtype.is_floating_point:
        hint = "mask.to_attention_mask(dtype)"
        raise DtypeError(say("Mask.to_additive", "dtype", must="be a float dtype", got=dtype, hint=hint))
    bits = mask.to_bool()
    return torch.zeros(bits.shape, dtype=dtype, device=bits.device).masked_fill_(~bits, value)


def from_cu_seqlens(
    cls: type[Mask],
    cu_seqlens: Tensor,  # (B + 1,)
    max_len: int | None = None,
) -> Mask:
    """Take the cumulative sequence lengths of variable-length attention kernels.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_cu_seqlens(torch.tensor([0, 2, 6], dtype=torch.int32), max_len=5).lengths
    tensor([2, 4])

    Args:
        cu_seqlens: (B + 1,) ints, from 0 on, never falling.
        max_len: the size of the mask's last dim; by default the longest length. A device tensor needs it.

    Returns:
        A length mask of shape (B, max_len).

    Raises:
        ShapeError: it does not have one dim and at least one entry.
        ArgumentError: it does not start at 0, or falls; or ``max_len`` is missing or negative.
        DtypeError: it does not hold ints.
        OutOfRangeError: a sequence is longer than ``max_len``.

    """
    op = "Mask.from_cu_seqlens"
    cu = as_ints(op, "cu_seqlens", cu_seqlens)
    if cu.ndim != 1 or not cu.shape[0]:
        hint = "cu_seqlens.flatten()"
        raise ShapeError(say(op, "cu_seqlens", must="be of shape (batch + 1,)", got=tuple(cu.shape), hint=hint))
    lengths = cu.diff()
    if readable(cu) and (int(cu[0]) or bool((lengths < 0).any())):
        hint = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        raise ArgumentError(say(op, "cu_seqlens", must="start at 0 and never fall", got=cu.tolist()[:8], hint=hint))
    if max_len is None and not readable(cu):
        must, hint = "be given when cu_seqlens is a device tensor", f"{op}(cu_seqlens, max_len=longest)"
        raise ArgumentError(say(op, "max_len", must=must, got=None, hint=hint))
    return cls.from_lengths(lengths, max_len)


def to_cu_seqlens(mask: Mask) -> tuple[Tensor, int]:
    """Return the cumulative kept lengths and the longest, for variable-length attention kernels.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4], max_len=5).to_cu_seqlens()
    (tensor([0, 2, 6], dtype=torch.int32), 4)

    Returns:
        (rows + 1,) int32 over the flattened leading dims, and the most that a row keeps.

    Raises:
        DeviceError: the mask is on the meta device, which holds no values.

    """
    lengths = mask._host_lengths()
    need_data("Mask.to_cu_seqlens", lengths.device)
    return mask.cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def from_numpy(cls: type[Mask], array: np.ndarray[Any, Any]) -> Mask:
    """Take a numpy bool array (True = keep), or a numpy masked array, whose own mask hides where it is True.

    >>> import numpy as np
    >>> from maskwise import Mask
    >>> Mask.from_numpy(np.array([True, False])).to_bool().tolist()
    [True, False]
    >>> Mask.from_numpy(np.ma.masked_array([1.0, 2.0], mask=[True, False])).to_bool().tolist()
    [False, True]

    Args:
        array: a bool array, shared and not copied; or a masked array of any dtype.

    Raises:
        DtypeError: it is neither.

    """
    import numpy as np

    op = "Mask.from_numpy"
    # Nobody can hold a masked array unless numpy.ma was imported, so there is no need to import it here.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        hidden = masked.getmask(array)
        if hidden is masked.nomask:
            return cls._wrap(Constant(tuple(array.shape), torch.device("cpu"), True))
        return cls._wrap(Dense(torch.from_numpy(np.asarray(~hidden))))
    if not isinstance(array, np.ndarray) or array.dtype != np.bool_:
        got = getattr(array, "dtype", type(array).__name__)
        raise DtypeError(say(op, "array", must="be a bool or a masked array", got=got, hint="array.astype(bool)"))
    # torch warns about arrays that must not be written, and cannot take negative strides: both are copied.
    plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return cls._wrap(Dense(torch.from_numpy(array if plain else array.copy())))


def to_numpy(mask: Mask) -> np.ndarray[Any, Any]:
    """Return a numpy bool array, True where kept.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2], max_len=3).to_numpy().tolist()
    [[True, True, False]]

    Raises:
        DeviceError: the mask is on the meta device, which holds no values.

    """
    need_data("Mask.to_numpy", mask._local.device)
    bits = mask._local.materialize() if mask.device.type == "meta" else mask.to_bool()
    array: np.ndarray[Any, Any] = bits.cpu().numpy()
    return array


def to_masked_array(mask: Mask, data: Any) -> Any:
    """Return a numpy masked array of ``data`` that hides what this mask drops.

    >>> from maskwise import Mask
    >>> Mask.from_lengths(2, max_len=3).to_masked_array([1.0, 2.0, 9.0]).sum().item()
    3.0

    Args:
        data: an array or tensor to which the mask broadcasts.

    Raises:
        ShapeError: the mask does not broadcast to the data.

    """
    import numpy as np
    import numpy.ma

    values = data.detach().cpu().numpy() if isinstance(data, Tensor) else np.asarray(data)
    try:
        hidden = np.broadcast_to(~mask.to_numpy(), values.shape)
    except ValueError:
        must = f"be of a shape that the mask {tuple(mask.shape)} broadcasts to"
        hint = "mask[..., None].to_masked_array(data)"
        raise ShapeError(say("Mask.to_masked_array", "data", must=must, got=values.shape, hint=hint)) from None
    return numpy.ma.masked_array(values, mask=hidden)


def _tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        hint = f"torch.tensor({name})"
        raise DtypeError(say(op, name, must="be a tensor", got=type(value).__name__, hint=hint))
    need_dense(op, name, value)


def _refuse(op: str, name: str, values: Tensor, *, odd: Tensor, must: str, hint: str) -> None:
    if bool(odd.any()):
        at = tuple(int(i) for i in odd.nonzero()[0])
        got = f"{values[at].item():g} at position {at[0] if len(at) == 1 else at}"
        raise ArgumentError(say(op, name, must=must, got=got, hint=hint))


# -- torch functions, pytrees, DataLoader ------------------------------------------------------------------------------
def call(cls: type[Mask], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that was given a Mask: the set algebra and joins give masks, all else gets a bool tensor."""
    if func in _ALGEBRA and not kwargs and len(args) == 2:
        return _ALGEBRA[func](cls, *args)
    if func in (torch.cat, torch.stack) and all(isinstance(m, cls) for m in args[0]):
        return (cls.cat if func is torch.cat else cls.stack)(*args, **kwargs)
    return func(*(_plain(cls, a) for a in args), **{k: _plain(cls, v) for k, v in kwargs.items()})


# `tensor & mask` reaches torch first, which calls this; `tensor - mask` comes as Tensor.sub.
_ALGEBRA: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__and__: lambda cls, left, right: cls._coerce(left, "&") & right,
    Tensor.__or__: lambda cls, left, right: cls._coerce(left, "|") | right,
    Tensor.__xor__: lambda cls, left, right: cls._coerce(left, "^") ^ right,
    Tensor.sub: lambda cls, left, right: cls._coerce(left, "-") - right,
    # Both are symmetric, so the mask may come first.
    Tensor.eq: lambda cls, left, right: left == right if isinstance(left, cls) else right == left,
    Tensor.ne: lambda cls, left, right: left != right if isinstance(left, cls) else right != left,
}


def _plain(cls: type[Mask], value: Any) -> Any:
    if isinstance(value, cls):
        return value.to_bool()
    if type(value) in (tuple, list):
        return type(value)(_plain(cls, v) for v in value)
    return value


class _Context(NamedTuple):
    """What a pytree keeps of a mask besides its tensors."""

    skeleton: Skeleton
    ndims: tuple[int, ...]
    on_host: bool


def _flatten(mask: Mask) -> tuple[list[Tensor], _Context]:
    tensors, skeleton = take_apart(mask._structure)
    plain = [t for t in tensors if isinstance(t, Tensor)]
    ndims = tuple(t.ndim for t in plain)
    return tensors, _Context(skeleton, ndims, all(t.device.type == "cpu" for t in plain))


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Tensor]], _Context]:
    tensors, context = _flatten(mask)
    return [(SequenceKey(i), t) for i, t in enumerate(tensors)], context


def _unflattener(cls: type[Mask]) -> Callable[[Iterable[Any], _Context], Mask]:
    def unflatten(leaves: Iterable[Any], context: _Context) -> Mask:
        tensors = list(leaves)
        skeleton = context.skeleton
        if skeleton.cls is not Dense:
            for leaf, ndim in zip(tensors, context.ndims, strict=False):
                if isinstance(leaf, Tensor) and leaf.ndim != ndim:
                    must, hint = f"keep the {ndim} dims that the mask's structure has", "pass mask.to_bool() to vmap"
                    raise ShapeError(say("Mask", "leaf", must=must, got=leaf.ndim, hint=hint))
            moved = {t.device for t in tensors if isinstance(t, Tensor)}
            # Leaves that were sent to another device take the mask along; host data for a device is left as it is.
            if len(moved) == 1 and (not context.on_host or next(iter(moved)).type != "cpu"):
                skeleton = skeleton.on(moved.pop())
        return cls._wrap(assemble(skeleton, tensors))

    return unflatten


def register(cls: type[Mask]) -> None:
    """Make a Mask a pytree node, and let the DataLoader stack masks."""
    register_pytree_node(cls, _flatten, _unflattener(cls), flatten_with_keys_fn=_flatten_with_keys)

    def collate(batch: Sequence[Mask], *, collate_fn_map: object = None) -> Mask:
        return cls.stack(batch)

    default_collate_fn_map[cls] = collate
