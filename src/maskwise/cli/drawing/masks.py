"""From the tree of an expression to a Mask."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from maskwise.cli.drawing.problems import ExpressionError
from maskwise.cli.drawing.syntax import Call, Inverse, Node, Operator, Span, Transposed, Value, parse
from maskwise.errors import MaskwiseError
from maskwise.mask import Mask

__all__ = ["EXAMPLES", "mask_of"]

OPERATORS: dict[str, Callable[[Mask, Mask], Mask]] = {
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "-": operator.sub,
}


@dataclass(frozen=True)
class Known:
    """A constructor: what makes the mask, the names of its options, and what its mask is about."""

    make: Callable[..., Mask]
    options: tuple[str, ...]
    #: "pairs" of a query and a key; "keys", the lengths of sequences; or anything, "".
    about: str
    example: str


@dataclass(frozen=True)
class _Made:
    mask: Mask
    about: str


def _many(make: Callable[..., Mask]) -> Callable[..., Mask]:
    """A constructor that takes a list, as one that also takes its items one after the other."""

    def call(*items: Value, **options: Any) -> Mask:
        if len(items) == 1:
            return make(items[0], **options)
        return make(list(items), **options)

    return call


def _shaped(make: Callable[..., Mask]) -> Callable[..., Mask]:
    return _many(lambda shape: make(shape if isinstance(shape, list) else [shape]))


def _indices(*items: Value, **options: Any) -> Mask:
    size = options.get("size")
    if isinstance(size, list):
        options["size"] = tuple(size)
    found = items[0] if len(items) == 1 and isinstance(items[0], list) else list(items)
    return Mask.from_indices(found, **options)


def _values(tokens: Value, *kept: Value) -> Mask:
    keep = kept[0] if len(kept) == 1 and isinstance(kept[0], list) else list(kept)
    return Mask.from_values(torch.tensor(tokens), keep)


KNOWN = {
    "causal": Known(Mask.causal, ("q", "k", "offset"), "pairs", "causal(16)"),
    "window": Known(Mask.window, ("q", "left", "right", "k"), "pairs", "window(16, 3, right=1)"),
    "segments": Known(_many(Mask.from_segments), (), "pairs", "segments(0, 0, 1, 1, 1, -1)"),
    "lengths": Known(_many(Mask.from_lengths), ("max_len", "side"), "keys", "lengths(5, 9, max_len=16)"),
    "indices": Known(_indices, ("size",), "", "indices(2, 5, 7, size=10)"),
    "values": Known(_values, (), "", "values([[7, 0, 3], [0, 0, 5]], 0)"),
    "full": Known(_shaped(Mask.full), (), "", "full(3, 5)"),
    "none": Known(_shaped(Mask.none), (), "", "none(3, 5)"),
}
EXAMPLES = tuple(known.example for known in KNOWN.values())


def mask_of(text: str) -> Mask:
    """The mask that an expression means.

    Masks combine as `Mask` does, with two conveniences. Lengths without ``max_len`` are as long as the masks around
    them. And next to masks of pairs (causal, window, segments) they are the lengths of keys, one for each entry of a
    batch: `causal(16) & lengths(5, 9)` is of shape (2, 16, 16).

    >>> print(mask_of("causal(3) & lengths(2, 3)"))
    Mask (2, 3, 3)  intervals  11 of 18 kept (61.1 %)
    [0]
    0 █··
    1 ██·
    2 ██·
    [1]
    0 █··
    1 ██·
    2 ███
    █ kept  · dropped

    Raises:
        ExpressionError: it means none; the message shows the place, and a hint.
    """
    tree = parse(text)
    return _Builder(text, _width(tree)).build(tree).mask


def _width(tree: Node) -> int | None:
    """The last dim of the masks in an expression that have one without asking; else the longest of all lengths."""
    longest = []
    for call in _calls(tree):
        first = call.arguments[0] if call.arguments else None
        numbers = first if isinstance(first, list) else list(call.arguments)
        if call.name in ("causal", "window"):
            told = call.options.get("k", call.options.get("q", first))
        elif call.name == "lengths":
            told = call.options.get("max_len")
            longest += [number for number in numbers if isinstance(number, int)]
        elif call.name in ("full", "none", "segments"):
            told = len(numbers) if call.name == "segments" else (numbers[-1] if numbers else None)
        else:
            told = None
        if isinstance(told, int):
            return told
    return max(longest, default=None)


def _calls(tree: Node) -> Iterator[Call]:
    if isinstance(tree, Call):
        yield tree
    elif isinstance(tree, Operator):
        yield from _calls(tree.left)
        yield from _calls(tree.right)
    else:
        yield from _calls(tree.of)


class _Builder:
    def __init__(self, text: str, width: int | None) -> None:
        self.text, self.width = text, width

    def build(self, tree: Node) -> _Made:
        if isinstance(tree, Call):
            return self.call(tree)
        if isinstance(tree, Inverse):
            made = self.build(tree.of)
            return _Made(~made.mask, made.about)
        if isinstance(tree, Transposed):
            made = self.build(tree.of)
            return _Made(self.guarded(tree.span, lambda: made.mask.T, "causal(4).T"), "")
        left, right = self.build(tree.left), self.build(tree.right)
        about = {left.about, right.about}
        first, second = left.mask, right.mask
        if about == {"pairs", "keys"}:
            # Lengths of keys: every query of an entry sees the same ones.
            first, second = (made.mask[..., None, :] if made.about == "keys" else made.mask for made in (left, right))
        try:
            together = OPERATORS[tree.sign](first, second)
        except MaskwiseError as error:
            what = f"shapes {tuple(first.shape)} and {tuple(second.shape)} do not fit"
            hint = "sizes line up from the right, and each is the other's or 1"
            raise ExpressionError(self.text, *tree.span, what, hint) from error
        return _Made(together, "pairs" if "pairs" in about else left.about if len(about) == 1 else "")

    def call(self, call: Call) -> _Made:
        known = KNOWN.get(call.name)
        if known is None:
            near = get_close_matches(call.name.removeprefix("from_"), KNOWN, 1)
            start = call.span[0]
            hint = KNOWN[near[0]].example if near else f"one of {', '.join(KNOWN)}"
            raise ExpressionError(self.text, start, start + len(call.name), f"there is no mask `{call.name}`", hint)
        for option in call.options:
            if option not in known.options:
                takes = ", ".join(f"{name}=" for name in known.options) or "no options"
                raise ExpressionError(self.text, *call.span, f"{call.name} takes {takes}, not {option}=", known.example)
        options = dict(call.options)
        if call.name == "lengths" and "max_len" not in options and self.width is not None:
            options["max_len"] = self.width
        made = self.guarded(call.span, lambda: known.make(*call.arguments, **options), known.example)
        return _Made(made, known.about)

    def guarded(self, span: Span, make: Callable[[], Mask], example: str) -> Mask:
        """A mask, or what is wrong with it at its place in the text."""
        try:
            return make()
        except MaskwiseError as error:
            what, _, hint = str(error).partition(" Hint: ")
            raise ExpressionError(self.text, *span, what.rstrip("."), hint.rstrip(".") or example) from error
        except (TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            told = "the arguments do not fit" if isinstance(error, TypeError) else str(error).splitlines()[0]
            raise ExpressionError(self.text, *span, told, example) from error
