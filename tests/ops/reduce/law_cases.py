"""The reductions as loop bodies over kept values, for the law suites."""

import torch


def var(kept, correction=1):
    squares = ((kept - kept.mean()) ** 2).sum()
    return squares / max(len(kept) - correction, 0)


def position_of(kind):
    def position(row, keep):
        kept = torch.arange(len(row))[keep]
        return kept[kind(row[keep])]

    return position


SLICES = {
    "sum": lambda kept: kept.sum(),
    "prod": lambda kept: kept.prod(),
    "mean": lambda kept: kept.mean(),
    "var": var,
    "std": lambda kept, correction=1: var(kept, correction).sqrt(),
    "norm": lambda kept, ord=2: torch.linalg.vector_norm(kept, ord),
    "amax": lambda kept: kept.max(),
    "amin": lambda kept: kept.min(),
    "argmax": position_of(torch.argmax),
    "argmin": position_of(torch.argmin),
    "logsumexp": lambda kept: kept.logsumexp(0),
    "any": lambda kept: (kept != 0).any(),
    "all": lambda kept: (kept != 0).all(),
}

DIMS = [{}, {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, -1)}]
KWARGS = {
    "var": [*DIMS, {"dim": 1, "correction": 0}],
    "norm": [*DIMS, *({"dim": -1, "ord": ord} for ord in (1, 0, 0.5, float("inf"), -float("inf")))],
}
