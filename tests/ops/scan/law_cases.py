"""The scans as loop bodies, for the law suites: one step after the other, over kept values only."""

import math

import torch

from tests.laws.slices import Law


def running(step, start):
    """A scan that keeps its value where a step is dropped."""

    def body(row, keep):
        out, value = torch.empty_like(row), start
        for i, (x, kept) in enumerate(zip(row.tolist(), keep.tolist(), strict=True)):
            value = step(value, x) if kept else value
            out[i] = value
        return out

    return body


def extreme(better, start):
    """A running extreme with its place: the latest of equals, and NaN before everything."""

    def body(row, keep):
        values, places = torch.empty_like(row), torch.empty_like(row, dtype=torch.int64)
        value, place = start, -1
        for i, (x, kept) in enumerate(zip(row.tolist(), keep.tolist(), strict=True)):
            if kept and (math.isnan(x) or (not math.isnan(value) and (better(x, value) or x == value))):
                value, place = x, i
            values[i], places[i] = value, place
        return values, places

    return body


def add_exp(value, x):
    return float(torch.logaddexp(torch.tensor(value, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)))


LAWS = {
    "cumsum": Law("rowwise", 0.0, 2, running(lambda value, x: value + x, 0.0), unsigned=True),
    "cumprod": Law("rowwise", 1.0, 2, running(lambda value, x: value * x, 1.0), unsigned=True),
    "cummax": Law("rowwise", -math.inf, 2, extreme(lambda x, value: x > value, -math.inf)),
    "cummin": Law("rowwise", math.inf, 2, extreme(lambda x, value: x < value, math.inf)),
    "logcumsumexp": Law("rowwise", -math.inf, 2, running(add_exp, -math.inf)),
}
