"""All benchmark cases. A new family is one file in ``cases/`` and one line here."""

from __future__ import annotations

from functools import cache

from benchmarks.case import Case
from benchmarks.cases import (
    attention,
    compress,
    fill,
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
    compress.cases,
    attention.cases,
    masked_linear.cases,
    recipes.cases,
    startup.cases,
)
NAMED = {sweep.FAMILY: sweep.cases, kept.FAMILY: kept.cases}
"""The families of hundreds of short cases, which run only when they are named."""


@cache
def all_cases() -> tuple[Case, ...]:
    """Return every case but those of the families that must be named, in the order of the table."""
    return tuple(case for family in FAMILIES for case in family())


@cache
def named_cases(family: str) -> tuple[Case, ...]:
    """Return the cases of a family that runs only when it is named."""
    return NAMED[family]()


def select(pattern: str = "") -> tuple[Case, ...]:
    """Return the cases whose family or name contains every word of the pattern, or of one of several with commas.

    Those of the sweep and of `kept` are chosen only by patterns that name the family.

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
        must, hint = f"match one of {len(all_cases())} benchmarks", "python -m benchmarks --list"
        raise ArgumentError(say("bench", "filter", must=must, got=repr(pattern), hint=hint))
    return chosen


def _matches(case: Case, words: list[str]) -> bool:
    text = f"{case.family} {case.name}".lower()
    return all(word in text for word in words) and (case.family not in NAMED or case.family in words)
