"""Filling as a loop body, for the law suites."""

import torch

SLICES = {"fill": lambda row, keep, value: torch.where(keep, row, value)}
KWARGS = {"fill": [{"value": 0.0}, {"value": -7.5}]}
