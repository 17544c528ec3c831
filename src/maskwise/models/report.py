"""What an unpadded module did with a batch, for ``mw.explain()``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from maskwise.plan.explain import is_heard, record
from maskwise.plan.plan import Plan, Skips

__all__ = ["tell"]


def tell(module: nn.Module, x: Tensor, mask: Any, padded: str | None) -> None:
    """Record one call: packed, or padded for the reason that is given."""
    if is_heard():
        route, reason = ("packed", "only kept tokens are computed") if padded is None else ("padded", padded)
        skips = Skips.COMPUTING if padded is None else Skips.NOTHING
        record(Plan(f"unpad {type(module).__name__}", route, reason, 0.0, skips=skips), x, mask)
