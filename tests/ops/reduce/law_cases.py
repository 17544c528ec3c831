"""The reductions as loop bodies over kept values, for the law suites."""

import math

import torch

from tests.laws.slices import Law


def var(kept, correction=1):
    squares = ((kept - kept.mean()) ** 2).sum()
    return squares / max(len(kept) - correction, 0)


def position_of(kind):
    def position(row, keep):
        kept = torch.arange(len(row))[keep]
        return kept[kind(row[keep])]

    return position


LAWS = {
    "sum": Law("reduction", 0.0, 2, lambda kept: kept.sum(), unsigned=True),
    "prod": Law("reduction", 1.0, 2, lambda kept: kept.prod(), unsigned=True),
    "mean": Law("reduction", math.nan, 2, lambda kept: kept.mean()),
    "var": Law("reduction", math.nan, 2, var),
    "std": Law("reduction", math.nan, 2, lambda kept, correction=1: var(kept, correction).sqrt()),
    "norm": Law("reduction", 0.0, 2, lambda kept, ord=2: torch.linalg.vector_norm(kept, ord)),
    "amax": Law("reduction", -math.inf, 2, lambda kept: kept.max()),
    "amin": Law("reduction", math.inf, 2, lambda kept: kept.min()),
    "argmax": Law("position", -1, 0, position_of(torch.argmax)),
    "argmin": Law("position", -1, 0, position_of(torch.argmin)),
    "logsumexp": Law("reduction", -math.inf, 2, lambda kept: kept.logsumexp(0), unsigned=True),
    "any": Law("reduction", False, 0, lambda kept: (kept != 0).any(), unsigned=True),
    "all": Law("reduction", True, 0, lambda kept: (kept != 0).all(), unsigned=True),
}

DIMS = [{}, {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, -1)}]
KWARGS = {
    "var": [*DIMS, {"dim": 1, "correction": 0}],
    "norm": [*DIMS, *({"dim": -1, "ord": ord} for ord in (1, 0, 0.5, float("inf"), -float("inf")))],
}
