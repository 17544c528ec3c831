"""The grammar of mask expressions: words, and the tree that they make. Nothing is ever evaluated as Python.

    expression = exclusive { "|" exclusive }
    exclusive  = both { "^" both }
    both       = difference { "&" difference }
    difference = inverse { "-" inverse }
    inverse    = "~" inverse | postfix
    postfix    = ( call | "(" expression ")" ) { ".T" }
    call       = name "(" [ argument { "," argument } ] ")"
    argument   = [ name "=" ] value
    value      = [ "-" ] integer | string | name | "[" [ value { "," value } ] "]" | "(" ... ")"

The operators bind as they do in Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from maskwise.cli.drawing.problems import ExpressionError

__all__ = ["Call", "Inverse", "Node", "Operator", "Span", "Transposed", "Value", "parse"]

Value: TypeAlias = "int | str | list[Value]"
#: Where a part stands in the text: from, and up to.
Span: TypeAlias = "tuple[int, int]"

#: The binary operators, the loosest first.
LEVELS = ("|", "^", "&", "-")
#: Deeper than anyone writes, and far from Python's own limit.
DEEPEST = 50
LONGEST = 10_000

_WORD = re.compile(r"\s*(?:(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)|(?P<string>\"[^\"]*\"|'[^']*')|(?P<sign>\S))")


@dataclass(frozen=True)
class Call:
    """A constructor with its arguments."""

    name: str
    arguments: tuple[Value, ...]
    options: dict[str, Value]
    span: Span


@dataclass(frozen=True)
class Operator:
    """Two masks and the sign between them."""

    sign: str
    left: Node
    right: Node
    span: Span


@dataclass(frozen=True)
class Inverse:
    """What a mask drops."""

    of: Node


@dataclass(frozen=True)
class Transposed:
    """A mask with its last two dims exchanged."""

    of: Node
    span: Span


Node: TypeAlias = "Call | Operator | Inverse | Transposed"


@dataclass(frozen=True)
class _Word:
    kind: str
    text: str
    span: Span


def parse(text: str) -> Node:
    """The tree of an expression.

    >>> parse("causal(4)")
    Call(name='causal', arguments=(4,), options={}, span=(0, 9))

    Raises:
        ExpressionError: it is none.
    """
    if len(text) > LONGEST:
        what, hint = (
            f"an expression has at most {LONGEST:,} characters, got {len(text):,}",
            "Mask.from_lengths in Python",
        )
        raise ExpressionError(text[:40], 0, 40, what, hint)
    parser = _Parser(text, _words(text))
    tree = parser.expression(0)
    parser.end()
    return tree


def _words(text: str) -> list[_Word]:
    words, place = [], 0
    while match := _WORD.match(text, place):
        kind = str(match.lastgroup)
        words.append(_Word(kind, match[kind], match.span(kind)))
        place = match.end()
    return [*words, _Word("end", "", (len(text), len(text)))]


class _Parser:
    """Reads the words from left to right, one method for each line of the grammar."""

    def __init__(self, text: str, words: list[_Word]) -> None:
        self.text, self.words, self.place, self.depth = text, words, 0, 0

    @property
    def word(self) -> _Word:
        return self.words[self.place]

    def take(self) -> _Word:
        taken = self.word
        self.place += taken.kind != "end"
        return taken

    def meets(self, sign: str) -> bool:
        if self.word.kind == "sign" and self.word.text == sign:
            self.take()
            return True
        return False

    def fail(self, what: str, hint: str) -> ExpressionError:
        return ExpressionError(self.text, *self.word.span, what, hint)

    def expect(self, sign: str, hint: str) -> _Word:
        found = self.word
        if found.kind == "end":
            raise self.fail(f"`{sign}` is missing at the end", hint)
        if not self.meets(sign):
            raise self.fail(f"`{sign}` was expected here", hint)
        return found

    def end(self) -> None:
        if self.word.kind != "end":
            hint = "& (both), | (either), ^ (one of them), - (the first without the second)"
            raise self.fail("an operator was expected here", hint)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.fail(f"parentheses are nested more than {DEEPEST} deep", "fewer parentheses")

    # -- masks ---------------------------------------------------------------------------------------------------------
    def expression(self, level: int) -> Node:
        if level == len(LEVELS):
            return self.inverse()
        tree = self.expression(level + 1)
        while self.word.kind == "sign" and self.word.text == LEVELS[level]:
            sign = self.take()
            tree = Operator(sign.text, tree, self.expression(level + 1), sign.span)
        return tree

    def inverse(self) -> Node:
        turns = 0
        while self.meets("~"):
            turns += 1
        tree = self.postfix()
        return Inverse(tree) if turns % 2 else tree

    def postfix(self) -> Node:
        tree = self.primary()
        while self.word.text == ".":
            dot = self.take()
            if self.word.text != "T":
                raise self.fail("only `.T` can stand here", ".T exchanges the last two dims")
            tree = Transposed(tree, (dot.span[0], self.take().span[1]))
        return tree

    def primary(self) -> Node:
        if self.word.kind == "name":
            return self.call()
        if self.meets("("):
            self.deeper()
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
        while not (self.word.kind == "sign" and self.word.text == ")"):
            following = self.words[min(self.place + 1, len(self.words) - 1)]
            if self.word.kind == "name" and following.text == "=":
                option = self.take()
                self.take()
                if option.text in options:
                    raise ExpressionError(
                        self.text, *option.span, f"`{option.text}` is given twice", "each option once"
                    )
                options[option.text] = self.value()
            elif options:
                raise self.fail("what has no name comes before what has one", "lengths(5, 9, max_len=12)")
            else:
                arguments.append(self.value())
            if not self.meets(","):
                break
        close = self.expect(")", f"{name.text}(...)")
        return Call(name.text, tuple(arguments), options, (name.span[0], close.span[1]))

    # -- what masks are made of ----------------------------------------------------------------------------------------
    def value(self) -> Value:
        if self.meets("-"):
            if self.word.kind != "number":
                raise self.fail("a number was expected here", "window(8, left=2, right=-1)")
            return -self.number()
        if self.word.kind == "number":
            return self.number()
        if self.word.kind == "string":
            return self.take().text[1:-1]
        if self.word.kind == "name":
            return self.take().text
        for opening, closing in ("[]", "()"):
            if self.meets(opening):
                return self.values(closing)
        raise self.fail("a number, a list or a name was expected here", "lengths(5, 9), full([3, 5])")

    def values(self, closing: str) -> list[Value]:
        self.deeper()
        found: list[Value] = []
        while not (self.word.kind == "sign" and self.word.text == closing):
            found.append(self.value())
            if not self.meets(","):
                break
        self.expect(closing, "[3, 5]")
        self.depth -= 1
        return found

    def number(self) -> int:
        if len(self.word.text) > 15:
            raise self.fail("no mask is that large", "causal(16)")
        return int(self.take().text)
