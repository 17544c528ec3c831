"""The language of ``maskwise draw``: from a mask expression to a `Mask`. Nothing is ever evaluated as Python.

    expression = exclusive { "|" exclusive }
    exclusive  = both { "^" both }
    both       = difference { "&" difference }
    difference = inverse { "-" inverse }
    inverse    = "~" inverse | postfix
    postfix    = ( call | "(" expression ")" ) { ".T" }
    call       = name "(" [ argument { "," argument } ] ")"
    argument   = [ name "=" ] value
    value      = [ "-" ] integer | string | name | "[" [ value { "," value } ] "]" | "(" ... ")"

Operator precedence is Python's.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias

import torch

from maskwise.errors import ArgumentError, MaskwiseError
from maskwise.mask import Mask

__all__ = ["EXAMPLES", "ExpressionError", "parse_mask"]

Value: TypeAlias = "int | str | list[Value]"
#: The start and the end of a node in the text.
Span: TypeAlias = "tuple[int, int]"

#: The binary operators, in order of precedence, the lowest first.
PRECEDENCE = ("|", "^", "&", "-")
#: Far below Python's recursion limit.
MAX_DEPTH = 50
MAX_LENGTH = 10_000

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)|(?P<string>\"[^\"]*\"|'[^']*')|(?P<sign>\S))")


class ExpressionError(ArgumentError):
    """An invalid mask expression: the message points at the error with carets.

    >>> print(ExpressionError("causal(4) & lenghts(2)", 12, 19, "there is no mask `lenghts`", "lengths(2)"))
    there is no mask `lenghts`
      causal(4) & lenghts(2)
                  ^^^^^^^
      Hint: lengths(2)
    """

    def __init__(self, text: str, start: int, end: int, what: str, hint: str) -> None:
        carets = " " * start + "^" * max(1, end - start)
        super().__init__("\n".join([what, f"  {text}", f"  {carets}", f"  Hint: {hint}"]))
        self.what, self.start, self.end, self.hint = what, start, end, hint


# -- syntax ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """A constructor with its arguments."""

    name: str
    arguments: tuple[Value, ...]
    options: dict[str, Value]
    span: Span


@dataclass(frozen=True)
class Operator:
    """A binary operator and its operands."""

    sign: str
    left: Node
    right: Node
    span: Span


@dataclass(frozen=True)
class Inverse:
    """The complement of a mask."""

    of: Node


@dataclass(frozen=True)
class Transposed:
    """A mask with its last two dims transposed."""

    of: Node
    span: Span


Node: TypeAlias = "Call | Operator | Inverse | Transposed"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    span: Span


def parse(text: str) -> Node:
    """The syntax tree of an expression.

    >>> parse("causal(4)")
    Call(name='causal', arguments=(4,), options={}, span=(0, 9))

    Raises:
        ExpressionError: a syntax error.
    """
    if len(text) > MAX_LENGTH:
        what = f"an expression has at most {MAX_LENGTH:,} characters, got {len(text):,}"
        raise ExpressionError(text[:40], 0, 40, what, "Mask.from_lengths in Python")
    parser = _Parser(text, _tokens(text))
    tree = parser.expression(0)
    parser.end()
    return tree


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while match := _TOKEN.match(text, position):
        kind = str(match.lastgroup)
        tokens.append(_Token(kind, match[kind], match.span(kind)))
        position = match.end()
    return [*tokens, _Token("end", "", (len(text), len(text)))]


class _Parser:
    """A recursive descent parser, one method per rule of the grammar."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self.text, self.tokens, self.position, self.depth = text, tokens, 0, 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def take(self) -> _Token:
        token = self.token
        self.position += token.kind != "end"
        return token

    def at(self, sign: str) -> bool:
        return self.token.kind == "sign" and self.token.text == sign

    def accept(self, sign: str) -> bool:
        if not self.at(sign):
            return False
        self.take()
        return True

    def fail(self, what: str, hint: str) -> ExpressionError:
        return ExpressionError(self.text, *self.token.span, what, hint)

    def expect(self, sign: str, hint: str) -> _Token:
        found = self.token
        if found.kind == "end":
            raise self.fail(f"`{sign}` is missing at the end", hint)
        if not self.accept(sign):
            raise self.fail(f"`{sign}` was expected here", hint)
        return found

    def end(self) -> None:
        if self.token.kind != "end":
            hint = "& (both), | (either), ^ (one of them), - (the first without the second)"
            raise self.fail("an operator was expected here", hint)

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(f"parentheses are nested more than {MAX_DEPTH} deep", "fewer parentheses")

    # -- masks ---------------------------------------------------------------------------------------------------------
    def expression(self, level: int) -> Node:
        if level == len(PRECEDENCE):
            return self.inverse()
        tree = self.expression(level + 1)
        while self.at(PRECEDENCE[level]):
            sign = self.take()
            tree = Operator(sign.text, tree, self.expression(level + 1), sign.span)
        return tree

    def inverse(self) -> Node:
        inverted = False
        while self.accept("~"):
            inverted = not inverted
        tree = self.postfix()
        return Inverse(tree) if inverted else tree

    def postfix(self) -> Node:
        tree = self.primary()
        while self.token.text == ".":
            dot = self.take()
            if self.token.text != "T":
                raise self.fail("only `.T` is allowed here", ".T transposes the last two dims")
            tree = Transposed(tree, (dot.span[0], self.take().span[1]))
        return tree

    def primary(self) -> Node:
        if self.token.kind == "name":
            return self.call()
        if self.accept("("):
            self.nest()
            tree = self.expression(0)
            self.expect(")", "(causal(4) | full(4))")
            self.depth -= 1
            return tree
        raise self.fail("a mask was expected here", "causal(16), or lengths(5, 9)")

    def call(self) -> Node:
        name = self.take()
        self.expect("(", f"{name.text}(...)")
        arguments: list[Value] = []
        options: dict[str, Value] = {}
        while not self.at(")"):
            following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
            if self.token.kind == "name" and following.text == "=":
                option = self.take()
                self.take()
                if option.text in options:
                    raise ExpressionError(
                        self.text, *option.span, f"`{option.text}` is given twice", "each option once"
                    )
                options[option.text] = self.value()
            elif options:
                raise self.fail("positional arguments come before named ones", "lengths(5, 9, max_len=12)")
            else:
                arguments.append(self.value())
            if not self.accept(","):
                break
        close = self.expect(")", f"{name.text}(...)")
        return Call(name.text, tuple(arguments), options, (name.span[0], close.span[1]))

    # -- arguments -----------------------------------------------------------------------------------------------------
    def value(self) -> Value:
        if self.accept("-"):
            if self.token.kind != "number":
                raise self.fail("a number was expected here", "window(8, left=2, right=-1)")
            return -self.number()
        if self.token.kind == "number":
            return self.number()
        if self.token.kind == "string":
            return self.take().text[1:-1]
        if self.token.kind == "name":
            return self.take().text
        for opening, closing in ("[]", "()"):
            if self.accept(opening):
                return self.values(closing)
        raise self.fail("a number, a list or a name was expected here", "lengths(5, 9), full([3, 5])")

    def values(self, closing: str) -> list[Value]:
        self.nest()
        found: list[Value] = []
        while not self.at(closing):
            found.append(self.value())
            if not self.accept(","):
                break
        self.expect(closing, "[3, 5]")
        self.depth -= 1
        return found

    def number(self) -> int:
        if len(self.token.text) > 15:
            raise self.fail("no mask is that large", "causal(16)")
        return int(self.take().text)


# -- meaning -----------------------------------------------------------------------------------------------------------
OPERATORS: dict[str, Callable[[Mask, Mask], Mask]] = {
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "-": operator.sub,
}


@dataclass(frozen=True)
class Constructor:
    """A constructor of masks, the names of its options, and what the last dims of its masks are."""

    make: Callable[..., Mask]
    options: tuple[str, ...]
    #: "pairs" of queries and keys, "keys", or "" for anything.
    dims: str
    example: str


@dataclass(frozen=True)
class _Built:
    mask: Mask
    dims: str


def _many(make: Callable[..., Mask]) -> Callable[..., Mask]:
    """Let a constructor that takes a list take its items as arguments too."""

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


CONSTRUCTORS = {
    "causal": Constructor(Mask.causal, ("q", "k", "offset"), "pairs", "causal(16)"),
    "window": Constructor(Mask.window, ("q", "left", "right", "k"), "pairs", "window(16, 3, right=1)"),
    "segments": Constructor(_many(Mask.from_segments), (), "pairs", "segments(0, 0, 1, 1, 1, -1)"),
    "lengths": Constructor(_many(Mask.from_lengths), ("max_len", "side"), "keys", "lengths(5, 9, max_len=16)"),
    "indices": Constructor(_indices, ("size",), "", "indices(2, 5, 7, size=10)"),
    "values": Constructor(_values, (), "", "values([[7, 0, 3], [0, 0, 5]], 0)"),
    "full": Constructor(_shaped(Mask.full), (), "", "full(3, 5)"),
    "none": Constructor(_shaped(Mask.none), (), "", "none(3, 5)"),
}
EXAMPLES = tuple(constructor.example for constructor in CONSTRUCTORS.values())


def parse_mask(text: str) -> Mask:
    """The mask of an expression.

    Masks combine as `Mask` does, with two conveniences. Lengths without ``max_len`` take that of the other masks. And
    combined with masks of pairs (causal, window, segments) they are lengths of keys, one per batch entry:
    `causal(16) & lengths(5, 9)` is of shape (2, 16, 16).

    >>> print(parse_mask("causal(3) & lengths(2, 3)"))
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
        ExpressionError: it is invalid; the message points at the error, and has a hint.
    """
    tree = parse(text)
    return _Builder(text, _width(tree)).build(tree).mask


def _width(tree: Node) -> int | None:
    """The last dim of the first mask whose arguments determine it; else the longest of all lengths."""
    longest = []
    for call in _calls(tree):
        first = call.arguments[0] if call.arguments else None
        numbers = first if isinstance(first, list) else list(call.arguments)
        if call.name in ("causal", "window"):
            width = call.options.get("k", call.options.get("q", first))
        elif call.name == "lengths":
            width = call.options.get("max_len")
            longest += [number for number in numbers if isinstance(number, int)]
        elif call.name in ("full", "none", "segments"):
            width = len(numbers) if call.name == "segments" else (numbers[-1] if numbers else None)
        else:
            width = None
        if isinstance(width, int):
            return width
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

    def build(self, tree: Node) -> _Built:
        if isinstance(tree, Call):
            return self.call(tree)
        if isinstance(tree, Inverse):
            built = self.build(tree.of)
            return _Built(~built.mask, built.dims)
        if isinstance(tree, Transposed):
            built = self.build(tree.of)
            return _Built(self.checked(tree.span, lambda: built.mask.T, "causal(4).T"), "")
        left, right = self.build(tree.left), self.build(tree.right)
        dims = {left.dims, right.dims}
        first, second = left.mask, right.mask
        if dims == {"pairs", "keys"}:
            # All queries of a batch entry attend to the same keys.
            first, second = (
                built.mask[..., None, :] if built.dims == "keys" else built.mask for built in (left, right)
            )
        try:
            combined = OPERATORS[tree.sign](first, second)
        except MaskwiseError as error:
            what = f"shapes {tuple(first.shape)} and {tuple(second.shape)} do not fit"
            hint = "sizes line up from the right, and each is the other's or 1"
            raise ExpressionError(self.text, *tree.span, what, hint) from error
        return _Built(combined, "pairs" if "pairs" in dims else left.dims if len(dims) == 1 else "")

    def call(self, call: Call) -> _Built:
        constructor = CONSTRUCTORS.get(call.name)
        if constructor is None:
            near = get_close_matches(call.name.removeprefix("from_"), CONSTRUCTORS, 1)
            start = call.span[0]
            hint = CONSTRUCTORS[near[0]].example if near else f"one of {', '.join(CONSTRUCTORS)}"
            raise ExpressionError(self.text, start, start + len(call.name), f"there is no mask `{call.name}`", hint)
        for option in call.options:
            if option not in constructor.options:
                takes = ", ".join(f"{name}=" for name in constructor.options) or "no options"
                what = f"{call.name} takes {takes}, not {option}="
                raise ExpressionError(self.text, *call.span, what, constructor.example)
        options = dict(call.options)
        if call.name == "lengths" and "max_len" not in options and self.width is not None:
            options["max_len"] = self.width
        make = partial(constructor.make, *call.arguments, **options)
        return _Built(self.checked(call.span, make, constructor.example), constructor.dims)

    def checked(self, span: Span, make: Callable[[], Mask], example: str) -> Mask:
        """Make a mask; an error becomes an ExpressionError at this span."""
        try:
            return make()
        except MaskwiseError as error:
            what, _, hint = str(error).partition(" Hint: ")
            raise ExpressionError(self.text, *span, what.rstrip("."), hint.rstrip(".") or example) from error
        except (TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
            what = "the arguments do not fit" if isinstance(error, TypeError) else str(error).splitlines()[0]
            raise ExpressionError(self.text, *span, what, example) from error
