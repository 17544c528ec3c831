"""Filling as a loop body, for the law suites."""

import torch

from tests.laws.slices import Law

LAWS = {"fill": Law("elementwise", 0.0, 2, lambda row, keep, value: torch.where(keep, row, value), unsigned=True)}
KWARGS = {"fill": [{"value": 0.0}, {"value": -7.5}]}
