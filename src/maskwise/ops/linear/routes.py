"""Which way a product with a partly kept weight goes, from sizes alone.

``plain``: the dense product with the weight, 0 where dropped. ``sparse``: the kernel, for kept weights only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from maskwise.ops.backends import why_not_served
from maskwise.ops.linear.layouts import Block
from maskwise.plan import Plan, planner
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Refusal, Skips

__all__ = ["Extra", "Sizes", "build_cost", "choose", "dense_cost", "hopeless", "sparse_cost"]

#: How fast the kernels multiply, by block, as a part of how fast the dense product does.
_PART: dict[Block, float] = {(1, 1): 0.52, (4, 1): 0.68, (16, 16): 0.76}
#: Weights come faster than other memory: they are read in order, again and again.
_WEIGHTS = 1.5
#: What a strip of the batch is rounded up to, and what a call costs.
_STRIP = 8
_CALL = 12.0
#: With a weight that was written just before, the dense product runs at half its speed for as many microseconds.
_COLD = 55.0
#: To make a layout, a microsecond for this many positions of the mask.
_BUILT = 150.0
#: Weights that are picked in a microsecond, and weights that are zeroed; and elements of an input that is put in order.
_PICKED, _ZEROED, _TURNED = 600.0, 4000.0, 700.0


class Sizes(NamedTuple):
    """What a product is made of."""

    batch: int
    inputs: int
    outputs: int
    kept: int
    block: Block = (1, 1)


def dense_cost(sizes: Sizes) -> float:
    """The predicted time of the dense product, in microseconds."""
    rates, weights = planner.rates_for("cpu"), sizes.inputs * sizes.outputs
    # A small batch waits for the weight to come from memory.
    return rates.plain_call + max(2 * sizes.batch * weights / rates.flops, 4 * weights / (_WEIGHTS * rates.streamed))


def sparse_cost(sizes: Sizes) -> float:
    """The predicted time of the sparse product, in microseconds."""
    strips = sizes.batch if sizes.batch == 1 else -(-sizes.batch // _STRIP) * _STRIP
    moved = sizes.batch * (sizes.inputs + sizes.outputs)
    rates, rate = planner.rates_for("cpu"), _PART[sizes.block]
    multiplied = 2 * sizes.kept * strips / (rate * rates.flops)
    return _CALL + max(multiplied, 8 * sizes.kept / (_WEIGHTS * rates.streamed)) + 5 * moved / rates.streamed


def build_cost(sizes: Sizes) -> float:
    """The predicted time of making a layout from a mask, in microseconds."""
    return 50.0 + sizes.inputs * sizes.outputs / _BUILT + sizes.kept / 20.0


class Extra(NamedTuple):
    """What a product costs in microseconds beside itself, where its weight is a dense one, whichever way it goes."""

    dense: float = 0.0
    sparse: float = 0.0

    @classmethod
    def of(cls, sizes: Sizes, *, contiguous: bool) -> Extra:
        """Dropped weights are zeroed for the dense product, kept ones picked for the sparse, every time; and that wants
        its input in order.
        """
        weights = sizes.inputs * sizes.outputs
        cold = min(_COLD, 2 * sizes.batch * weights / planner.rates_for("cpu").flops)
        turned = 0.0 if contiguous else sizes.batch * sizes.inputs / _TURNED
        return cls(weights / _ZEROED + cold, sizes.kept / _PICKED + turned)


@lru_cache(maxsize=16)
def hopeless(forced: str | None) -> tuple[float, float, float]:
    """What a multiplication costs the dense product with a dense weight at most, what a weight does, and what it may
    cost in all for the kernel not to pay even if nothing were kept; nothing where a route is `forced`.
    """
    if forced not in (None, "plain"):
        return 0.0, 0.0, -1.0
    rates = planner.rates_for("cpu")
    return 4 / rates.flops, 1 / _ZEROED + 4 / (_WEIGHTS * rates.streamed), _CALL - rates.plain_call


planner.on_forget(hopeless.cache_clear)


def choose(
    op: str,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    *,
    transformed: bool = False,
    extra: Extra = Extra(),  # noqa: B008
) -> Plan:
    """The plan of one product, as if a layout were there."""
    return _choose(op, sizes, dtype, device, transformed, extra, planner.forced())


@lru_cache(maxsize=4096)
def _choose(
    op: str, sizes: Sizes, dtype: torch.dtype, device: str, transformed: bool, extra: Extra, forced: str | None
) -> Plan:
    if forced == "plain":
        return Plan(op, "plain", "forced", 0.0)
    if transformed:
        reason = "torch.func transforms and forward-mode AD see through plain torch operations only"
        return Plan(op, "plain", reason, 0.0, (Refusal("sparse", reason),))
    why = why_not_served("linear", device, dtype)
    dense, sparse = dense_cost(sizes) + extra.dense, sparse_cost(sizes) + extra.sparse
    total = max(1, sizes.inputs * sizes.outputs)
    by_all = Work(calls=1, streamed=dtype.itemsize * total, flops=2 * sizes.batch * total)
    # A kept weight comes with its column.
    by_kept = Work(calls=1, streamed=(dtype.itemsize + 4) * sizes.kept, flops=2 * sizes.batch * sizes.kept)
    if why is not None:
        return Plan(op, "plain", why, dense, (Refusal("sparse", why),), by_all, by_all)
    # The kernel multiplies kept weights only; whether it reads others depends on where it has them from.
    skips, flops = Skips.COMPUTING, 2 * sizes.batch
    if forced in ("kernel", "sparse"):
        refused = Refusal("plain", "another is forced")
        return Plan(op, "sparse", "forced", sparse, (refused,), by_kept, by_all, skips, flops)
    told = f"{sizes.kept / total:.1%} of the weight is kept"
    if dense <= sparse:
        refused = Refusal("sparse", f"predicted {sparse:.0f} µs against {dense:.0f} µs")
        return Plan(op, "plain", told, dense, (refused,), by_all, by_all)
    refused = Refusal("plain", f"predicted {dense:.0f} µs against {sparse:.0f} µs")
    return Plan(op, "sparse", told, sparse, (refused,), by_kept, by_all, skips, flops)


planner.on_forget(_choose.cache_clear)
