"""Softmax and normalization as loops over one slice, for the law suites. What ``keep`` drops is NaN in ``row``."""

import math

import torch

from tests.laws.slices import Law


def placed(row, keep, values, fill):
    """The values where kept, fill elsewhere."""
    out = torch.full_like(row, fill)
    out[keep] = values
    return out


def normalize(row, keep, p=2.0, eps=1e-12):
    kept = row[keep]
    return placed(row, keep, kept / max(torch.linalg.vector_norm(kept, p), eps) if keep.any() else kept, 0.0)


def standardize(row, keep, correction=0, eps=1e-5):
    kept = row[keep]
    if not keep.any():
        return torch.zeros_like(row)
    if len(kept) <= correction:
        return placed(row, keep, math.nan, 0.0)
    return placed(row, keep, (kept - kept.mean()) / (kept.var(correction=correction) + eps).sqrt(), 0.0)


LAWS = {
    "softmax": Law("rowwise", 0.0, 2, lambda row, keep: placed(row, keep, row[keep].softmax(0), 0.0)),
    "softmin": Law("rowwise", 0.0, 2, lambda row, keep: placed(row, keep, (-row[keep]).softmax(0), 0.0)),
    "log_softmax": Law(
        "rowwise", -math.inf, 2, lambda row, keep: placed(row, keep, row[keep].log_softmax(0), -math.inf)
    ),
    "normalize": Law("rowwise", 0.0, 2, normalize),
    "standardize": Law("rowwise", 0.0, 2, standardize),
}

KWARGS = {
    "normalize": [
        {"dim": -1},
        {"dim": 0},
        {"dim": -1, "p": 1.0},
        {"dim": 0, "p": 3.0},
        {"dim": -1, "p": math.inf},
        {"dim": 0, "p": -math.inf, "eps": 0.1},
    ],
    "standardize": [{"dim": -1}, {"dim": 0}, {"dim": -1, "correction": 1, "eps": 0.0}],
}
