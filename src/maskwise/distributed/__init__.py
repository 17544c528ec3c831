"""Training over micro-batches and ranks: one denominator for all of them."""

from __future__ import annotations

from maskwise.distributed.accumulate import Result as Result
from maskwise.distributed.accumulate import Window as Window
from maskwise.distributed.accumulate import Windows as Windows
from maskwise.distributed.accumulate import accumulate as accumulate
from maskwise.distributed.adapters import LightningMixin as LightningMixin
from maskwise.distributed.adapters import trainer_loss as trainer_loss

__all__ = ["LightningMixin", "Result", "Window", "Windows", "trainer_loss"]
