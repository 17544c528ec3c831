"""Sort, argsort, topk, median and quantile as loop bodies, for the law suites."""

import math

import torch

from tests.laws.slices import Law

DIMS = [{}, {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, -1)}]

KWARGS = {
    "sort": [{"dim": -1}, {"dim": 0, "descending": True}],
    "argsort": [{"dim": -1}, {"dim": 0, "descending": True}],
    # The first of them is used where every row keeps two elements and infinities would spoil finite differences.
    "topk": [{"k": 2, "dim": -1}, {"k": 3, "dim": 0, "largest": False}],
    "quantile": [
        {"q": 0.3, **DIMS[0]},
        {"q": 0.75, "interpolation": "nearest", **DIMS[1]},
        {"q": 0.1, "interpolation": "midpoint", **DIMS[2]},
        {"q": 0.9, "interpolation": "higher", **DIMS[3]},
        {"q": 0.0, "interpolation": "lower", **DIMS[1]},
    ],
}


def sort(row, keep, descending=False):
    places = keep.nonzero()[:, 0]
    order = row[places].sort(descending=descending, stable=True).indices
    dropped = len(row) - len(places)
    values = torch.cat([row[places][order], row.new_zeros(dropped)])
    return values, torch.cat([places[order], places.new_full((dropped,), -1)])


def topk(row, keep, k, largest=True):
    values, indices = sort(row, keep, descending=largest)
    n = int(keep.sum())
    values[n:] = -torch.inf if largest else torch.inf
    return values[:k], indices[:k]


LAWS = {
    "sort": Law("rowwise", 0.0, 2, sort),
    "argsort": Law("rowwise", -1, 0, lambda row, keep, **kwargs: sort(row, keep, **kwargs)[1], unsigned=True),
    "topk": Law("rowwise", -math.inf, 2, topk),
    "median": Law("reduction", math.nan, 2, lambda kept: kept.median()),
    "quantile": Law(
        "reduction", math.nan, 2, lambda kept, q, interpolation="linear": kept.quantile(q, interpolation=interpolation)
    ),
}
