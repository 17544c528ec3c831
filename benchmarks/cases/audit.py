"""``mw.audit`` beside the training steps that it may take, and ``mw.optimize`` beside what it applies, by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

import maskwise as mw
from benchmarks.case import Case, Side, at_most
from benchmarks.cases.compress import FEED_FORWARD, Block, _run
from benchmarks.cases.models import MINILM, Texts, _hidden
from benchmarks.cases.sides import Call

__all__ = ["FAMILY", "cases"]

FAMILY = "audit"
BY_HAND, PASS = "by hand", "a forward and a backward pass"
#: The audit of a model takes no more than so many forward and backward passes.
PASSES = 20
#: What is applied reaches at least this share of the speed that it has by hand.
SHARE = 0.95


def _audit(i: Texts) -> Call:
    return lambda: torch.tensor(mw.audit(i.padded, i.batch).profile.kept)


def _pass(i: Texts) -> Call:
    model = copy.deepcopy(i.padded)

    def run() -> Tensor:
        model.zero_grad()
        model(**i.batch).last_hidden_state.square().sum().backward()
        return i.keep.sum()

    return run


def _optimized(i: Texts) -> Call:
    return _hidden(mw.optimize(copy.deepcopy(i.padded).eval(), i.batch)[0], i)


def _optimized_block(i: Block) -> Call:
    return _run(mw.optimize(i.model, i.x)[0], i.x)


def cases() -> tuple[Case, ...]:
    """The cases of the family."""
    hidden = (Side("mw.optimize", _optimized, "ours"), Side(BY_HAND, lambda i: _hidden(i.unpadded, i)))
    block = (
        Side("mw.optimize", _optimized_block, "ours"),
        Side(BY_HAND, lambda i: _run(mw.compress(i.model, i.x)[0], i.x)),
    )
    passes = (Side("mw.audit", _audit, "ours"), Side(PASS, _pass))
    by_hand = (at_most(round(1 / SHARE, 3), BY_HAND),)
    return (
        replace(MINILM, family=FAMILY, function="audit", sides=passes, targets=(at_most(PASSES, PASS),)),
        replace(MINILM, family=FAMILY, function="optimize", sides=hidden, targets=by_hand),
        replace(FEED_FORWARD, family=FAMILY, function="optimize", sides=block, targets=by_hand),
    )
