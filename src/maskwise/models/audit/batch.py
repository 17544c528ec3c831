"""The batch that a model is audited with: its arguments by name, its rows, and which of its positions are dropped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask

__all__ = ["IGNORED", "SEGMENTS", "Batch", "Embedded", "Tokens", "find_tokens"]

OP = "audit"
IGNORED = -100
"""The label that torch's losses, and those of transformers, ignore."""
#: Of an iterable, so many batches are looked at, and the one that drops most is audited.
LOOKED_AT = 8
LABELS = ("labels", "label", "targets", "target", "y")
KEEPS = ("attention_mask", "mask", "keep", "key_mask", "valid", "valid_mask", "token_mask")
DROPS = ("src_key_padding_mask", "key_padding_mask", "padding_mask", "encoder_padding_mask")
LENGTHS = ("lengths", "length", "input_lengths", "seq_lens", "seqlens")
SEGMENTS = ("segment_ids", "document_ids", "sequence_ids", "seq_idx", "doc_ids")
MaskLike: TypeAlias = Mask | Tensor


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, by the names of the model's parameters."""

    values: dict[str, Any]
    #: The names of those that are passed by position, in order.
    positional: tuple[str, ...]
    #: What the model does not take: for the loss alone.
    spare: frozenset[str]
    #: How the user passed it: as a dict, a tuple, or a single tensor.
    kind: type
    #: What embeddings of token ids return at dropped positions is replaced, instead of the ids.
    embedded: Embedded | None = None

    @classmethod
    def of(cls, model: nn.Module, given: Any, op: str = OP) -> Batch:
        """Bind what the user passed to the parameters of ``forward``."""
        found = [cls._bind(model, each) for each in islice(_batches(given, op), LOOKED_AT)]
        if not found:
            raise ArgumentError(
                say(op, "batch", must="hold a batch", got="an empty iterable", hint="next(iter(loader))")
            )
        return max(found, key=lambda batch: batch._dropped_share()) if len(found) > 1 else found[0]

    @classmethod
    def _bind(cls, model: nn.Module, given: Any) -> Batch:
        parameters = inspect.signature(model.forward).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        kinds = {p.kind for p in parameters}
        if isinstance(given, Mapping):
            taken = {p.name for p in parameters}
            any_name = inspect.Parameter.VAR_KEYWORD in kinds
            spare = frozenset() if any_name else frozenset(str(name) for name in given if name not in taken)
            return cls({str(name): value for name, value in given.items()}, (), spare, dict)
        values = [given] if isinstance(given, Tensor) else list(given)
        names = named + [f"arguments[{index}]" for index in range(len(named), len(values))]
        names = names[: len(values)]
        many = inspect.Parameter.VAR_POSITIONAL in kinds
        spare = frozenset() if many else frozenset(names[len(named) :])
        kind = Tensor if isinstance(given, Tensor) else tuple
        return cls(dict(zip(names, values, strict=True)), tuple(names), spare, kind)

    def call(self, model: nn.Module) -> Any:
        """Call the model with copies of the tensors: it may write into them."""
        args = [_copied(self.values[name]) for name in self.positional if name not in self.spare]
        names = [name for name in self.values if name not in self.positional and name not in self.spare]
        named = {name: _copied(self.values[name]) for name in names}
        if self.embedded is None:
            return model(*args, **named)
        with self.embedded.hooked(model):
            return model(*args, **named)

    def as_passed(self) -> Any:
        """The batch in the form in which the user passed it: what a loss gets."""
        if self.kind is dict:
            return dict(self.values)
        values = tuple(self.values[name] for name in self.positional)
        return values[0] if self.kind is Tensor else values

    def with_values(self, changed: Mapping[str, Any]) -> Batch:
        """The same call with other values of some arguments."""
        return replace(self, values={**self.values, **changed})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The arguments that are tensors."""
        return ((name, value) for name, value in self.values.items() if isinstance(value, Tensor))

    @property
    def rows(self) -> int | None:
        """How many rows the batch has, if every tensor of it has as many; else None."""
        sizes = {value.shape[0] for _, value in self.tensors() if value.dim()}
        return sizes.pop() if len(sizes) == 1 else None

    def take(self, rows: Tensor | list[int]) -> Batch:
        """Some rows of the batch."""
        index = torch.as_tensor(rows, dtype=torch.long)
        taken = {name: value[index.to(value.device)] for name, value in self.tensors() if value.dim()}
        return self.with_values(taken)

    def labels(self) -> tuple[str, Tensor] | None:
        """The integer labels, with their name."""
        for name in LABELS:
            if isinstance(value := self.values.get(name), Tensor) and not value.is_floating_point() and value.dim():
                return name, value
        return None

    def _dropped_share(self) -> float:
        try:
            found = find_tokens(self, None)
        except ShapeError:
            return 0.0
        return max((float((~each.keep).float().mean()) for each in found), default=0.0)


def _batches(given: Any, op: str) -> Iterator[Any]:
    """The batches of what the user passed, which may be one."""
    if isinstance(given, Tensor | Mapping | tuple):
        yield given
        return
    if isinstance(given, list) and given and all(isinstance(each, Tensor) for each in given):
        # As the default collate function of a DataLoader gives it.
        yield tuple(given)
        return
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        must = "be a tensor, a tuple, a dict, or an iterable of them"
        raise DtypeError(say(op, "batch", must=must, got=type(given).__name__, hint="what the model is called with"))
    for each in given:
        if not isinstance(each, Tensor | Mapping | tuple | list):
            must = "hold tensors, tuples or dicts"
            raise DtypeError(
                say(op, "batch", must=must, got=type(each).__name__, hint="[batch], of what the model takes")
            )
        yield each


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Embedded:
    """Other embeddings of the same token ids: for models that read from the ids what is padding.

    Attributes:
        ids: the arguments with token ids, (B, L).
        keep: (B, L) bool.
        embedded: the paths of the embeddings that were replaced in some call.
    """

    ids: tuple[Tensor, ...]
    keep: Tensor
    embedded: set[str] = field(default_factory=set)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Replace what embeddings return at dropped positions, by embeddings of kept ones."""
        handles = [
            module.register_forward_hook(self._hook(name), prepend=True)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            given = args[0] if args else None
            if not isinstance(given, Tensor) or not any(_equal(given, ids) for ids in self.ids):
                return None
            self.embedded.add(name)
            keep = self.keep.to(output.device)
            kept, dropped = output.detach()[keep], int((~keep).sum())
            changed = output.clone()
            changed[~keep] = kept.roll(1, 0)[torch.arange(dropped, device=kept.device) % len(kept)]
            return changed

        return hook


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b.device), b)


# -- which positions are dropped ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tokens:
    """Which positions of some arguments are kept.

    Attributes:
        keep: (B, L) bool.
        source: the argument that says so.
        inputs: the arguments that have these positions, each with the dim of its positions.
        segments: (B, L) numbers of the sequences of packed rows, or None.
    """

    keep: Tensor
    source: str
    inputs: dict[str, int]
    segments: Tensor | None = None


def find_tokens(batch: Batch, mask: MaskLike | None, op: str = OP) -> list[Tokens]:
    """The masks of a batch: the one that was passed, or those that its arguments are known for."""
    found: list[tuple[str, Tensor]] = []
    if mask is not None:
        keep = mask.to_bool() if isinstance(mask, Mask) else mask
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool:
            got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
            raise DtypeError(
                say(op, "mask", must="be a Mask or a bool tensor, True meaning keep", got=got, hint="mask != 0")
            )
        if keep.dim() != 2 or not _inputs(batch, keep, "mask"):
            shapes = {name: tuple(value.shape) for name, value in batch.tensors()}
            must, hint = f"be (B, L), as the tensors of the batch {shapes}", "mask[:, 0, 0] for one of pairs"
            raise ShapeError(say(op, "mask", must=must, got=tuple(keep.shape), hint=hint))
        found.append(("mask", keep))
    else:
        found += _named_masks(batch)
    tokens = [Tokens(keep, name, _inputs(batch, keep, name)) for name, keep in found]
    tokens = [each for each in tokens if each.inputs]
    segments = _segments(batch)
    if segments is not None:
        name, numbers = segments
        same = next((each for each in tokens if each.keep.shape == numbers.shape), None)
        keep = torch.ones_like(numbers, dtype=torch.bool) if same is None else same.keep
        packed = Tokens(keep, name, _inputs(batch, keep, name), numbers)
        tokens = [each for each in tokens if each is not same] + [packed]
    if not tokens and (by_labels := _by_labels(batch)) is not None:
        tokens.append(by_labels)
    return tokens


def _named_masks(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    seen: set[tuple[int, ...]] = set()
    for name, given in batch.values.items():
        value = given.to_bool() if isinstance(given, Mask) else given
        if not isinstance(value, Tensor) or value.dim() not in (1, 2, 3, 4):
            continue
        short = name.removeprefix("decoder_").removeprefix("encoder_")
        keep: Tensor | None = None
        if (name in KEEPS or short in KEEPS) and value.dim() >= 2:
            keep = _of_keys(value)
        elif (name in DROPS or "padding_mask" in name) and value.dim() == 2:
            keep = value == 0
        elif name in LENGTHS and value.dim() == 1 and not value.is_floating_point():
            length = next((t.shape[1] for _, t in batch.tensors() if t.dim() > 1 and t.shape[0] == len(value)), None)
            keep = None if length is None else Mask.from_lengths(value, max_len=length).to_bool()
        if keep is not None and tuple(keep.shape) not in seen:
            seen.add(tuple(keep.shape))
            yield name, keep


def _of_keys(mask: Tensor) -> Tensor | None:
    """The keys that a mask keeps for some query: (B, L)."""
    # Additive masks are 0 where they keep; bool and 0/1 masks are not 0 there.
    keep = mask > -1 if mask.is_floating_point() and bool((mask < 0).any()) else mask != 0
    while keep.dim() > 2:
        keep = keep.any(1)
    return keep


def _inputs(batch: Batch, keep: Tensor, source: str) -> dict[str, int]:
    """The tensors with these positions, other than masks, and the dim of the positions."""
    rows, length = keep.shape
    found: dict[str, int] = {}
    for name, value in batch.tensors():
        is_mask = value.dtype is torch.bool or "mask" in name or name in (*LENGTHS, *SEGMENTS, source)
        if is_mask or value.dim() < 2 or value.shape[0] != rows:
            continue
        if source.startswith("decoder_") != name.startswith("decoder_") and name not in LABELS and _has_decoder(batch):
            continue
        dims = [dim for dim in range(1, value.dim()) if value.shape[dim] == length]
        if dims:
            found[name] = dims[0]
    return found


def _has_decoder(batch: Batch) -> bool:
    return any(name.startswith("decoder_") for name in batch.values)


def _segments(batch: Batch) -> tuple[str, Tensor] | None:
    """The numbers of the sequences of packed rows, from the argument that has them or from positions that restart."""
    for name in SEGMENTS:
        if isinstance(value := batch.values.get(name), Tensor) and value.dim() == 2:
            return name, value.long()
    positions = batch.values.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    keep = batch.values.get("attention_mask")
    starts = positions[:, 1:] == 0
    if isinstance(keep, Tensor) and keep.shape == positions.shape:
        # Positions of padding are 0 by habit.
        starts = starts & (keep[:, 1:] != 0) & (keep[:, :-1] != 0)
    if not bool(starts.any()):
        return None
    return "position_ids", torch.nn.functional.pad(starts.long(), (1, 0)).cumsum(1)


def _by_labels(batch: Batch) -> Tokens | None:
    """Padding by labels: a run of ignored labels at the end of rows, at which the inputs are all the same."""
    found = batch.labels()
    if found is None or found[1].dim() != 2:
        return None
    name, labels = found
    ignored = labels == IGNORED
    # From the end of each row, up to the first label.
    dropped = ignored.flip(1).long().cumprod(1).flip(1).bool()
    if not bool(dropped.any()):
        return None
    inputs = {each: dim for each, dim in _inputs(batch, ~dropped, name).items() if each not in LABELS}
    for each, dim in inputs.items():
        values = batch.values[each].movedim(dim, 1)[dropped]
        if not bool((values == values[:1]).all()):
            return None
    return Tokens(~dropped, name, inputs) if inputs else None
