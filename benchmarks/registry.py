"""All benchmark cases. A new family is one file in ``cases/`` and one line here."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache

from benchmarks.case import Case
from benchmarks.cases import (
    attention,
    audit,
    compress,
    conv,
    distributed,
    fill,
    head,
    kept,
    linear,
    loss,
    masked_linear,
    models,
    order,
    recipes,
    reduce,
    reductions,
    scan,
    serving,
    softmax,
    startup,
    sweep,
)
from benchmarks.cases import select as selection
from maskwise.errors import ArgumentError, say

__all__ = ["all_cases", "named_cases", "select"]

FAMILIES = (
    reduce.cases,
    reductions.cases,
    softmax.cases,
    scan.cases,
    order.cases,
    fill.cases,
    loss.cases,
    selection.cases,
    linear.cases,
    models.cases,
    distributed.cases,
    compress.cases,
    attention.cases,
    conv.cases,
    masked_linear.cases,
    recipes.cases,
    startup.cases,
)
NAMED = {
    sweep.FAMILY: sweep.cases,
    kept.FAMILY: kept.cases,
    head.FAMILY: lambda: tuple(head.cases()),
    serving.FAMILY: serving.cases,
    audit.FAMILY: audit.cases,
}
"""The families of hundreds of short cases, or of a few long ones, which run only when they are named."""


@cache
def all_cases() -> tuple[Case, ...]:
    """Return every case but those of the families that must be named, in the order of the table."""
    return tuple(case for family in FAMILIES for case in family())


@cache
def named_cases(family: str) -> tuple[Case, ...]:
    """Return the cases of a family that runs only when it is named."""
    return NAMED[family]()


def select(pattern: str = "") -> tuple[Case, ...]:
    """Return the cases whose family or name contains every word of the pattern; commas separate alternatives.

    The families `sweep`, `kept`, `head`, `serving` and `audit` match only patterns that name them. A pattern without a
    match raises, and the error lists the nearest names.

    >>> [case.name for case in select("startup IMPORT, sum 4x8 bool")]
    ['sum 4x8 from a bool tensor', 'import maskwise after torch']
    >>> select("sweep softmax 8x16 2% strided")[0].name
    'softmax sweep 8x16 keep=2% strided'
    """
    alternatives = [alternative.split() for alternative in pattern.lower().split(",")]
    named = [family for family in NAMED if any(family in words for words in alternatives)]
    chosen = tuple(
        case
        for case in (*all_cases(), *(case for family in named for case in named_cases(family)))
        if any(_matches(case, words) for words in alternatives)
    )
    if not chosen:
        must, near = f"match one of {len(all_cases())} benchmarks", _near(alternatives)
        hint = " or ".join(f"--filter '{name}'" for name in near) or "python -m benchmarks --list"
        raise ArgumentError(say("bench", "filter", must=must, got=repr(pattern), hint=hint))
    return chosen


def _near(alternatives: list[list[str]]) -> list[str]:
    """The names of up to three cases that match the most words, or words that are spelled almost so."""
    texts = {case.name: _text(case) for case in all_cases()}
    # Families that must be named are named in the hint, too.
    texts |= {f"{family} {case.name}": _text(case) for family in NAMED for case in named_cases(family)}
    vocabulary = {word for text in texts.values() for word in text.split()}
    found: list[tuple[int, str]] = []
    for words in alternatives:
        spelled = [
            [word] if any(word in each for each in vocabulary) else get_close_matches(word, vocabulary, 3)
            for word in words
        ]
        matched = {name: sum(any(each in text for each in near) for near in spelled) for name, text in texts.items()}
        best = max(matched.values(), default=0)
        found += [(count, name) for name, count in matched.items() if count == best > 0]
    most = max((count for count, _ in found), default=0)
    return [name for count, name in found if count == most][:3]


def _text(case: Case) -> str:
    return f"{case.family} {case.name}".lower()


def _matches(case: Case, words: list[str]) -> bool:
    text = _text(case)
    return all(word in text for word in words) and (case.family not in NAMED or case.family in words)
