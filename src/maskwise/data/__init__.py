"""Batches that waste little: sequences grouped by a budget of tokens."""

from __future__ import annotations

from maskwise.data.context import context_shares as context_shares
from maskwise.data.sampler import TokenBudgetSampler as TokenBudgetSampler
from maskwise.data.sampler import Waste as Waste

__all__ = ["TokenBudgetSampler", "Waste", "context_shares"]
