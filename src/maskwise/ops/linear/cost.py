"""What a product with a partly kept weight costs: predictions from shapes, strides and the rates of the device."""

from __future__ import annotations

from typing import NamedTuple

from maskwise.ops import backends
from maskwise.ops.linear.layouts import Block
from maskwise.plan.cost import Rates, Work
from maskwise.plan.dispatch import Facts

__all__ = [
    "Product", "copy_on_gpu", "dense_cost", "gpu_cost", "plain_cost", "plain_work", "sparse_cost", "sparse_work",
]  # fmt: skip

#: How fast the kernels multiply, by block, as a part of how fast the dense product does.
_PART: dict[Block, float] = {(1, 1): 0.62, (4, 1): 0.68, (16, 16): 0.76}
#: Weights come faster than other memory: they are read in order, again and again.
_WEIGHTS = 1.5
#: What a strip of the batch is rounded up to, one vector, by SIMD level; and what a call costs.
_STRIP = {"avx512": 16, "avx2": 8}
_CALL = 12.0
#: What more rows of a batch the dense product takes the time of.
_NARROW = 4
#: With a weight that was written just before, the dense product runs at half its speed for as many microseconds.
_COLD = 55.0
#: Per microsecond: weights gathered, weights filled, and elements of an input made contiguous.
_GATHERED, _FILLED, _COPIED = 600.0, 4000.0, 700.0


class Product(NamedTuple):
    """What routes read besides the kept count: `Facts.detail`."""

    batch: int
    inputs: int
    outputs: int
    block: Block = (1, 1)
    #: Whether the weight is dense: then each call fills its dropped weights for one route, or gathers the kept ones
    #: for the other.
    is_dense: bool = False
    #: Whether the sparse route has its layout, or has to build it.
    has_layout: bool = True
    #: The outputs and inputs of which something is kept, where that is not all of them.
    live: tuple[int, int] | None = None
    #: Whether the weight has changed since the call before, so that nothing is derived from it.
    is_new: bool = False
    #: Whether x and the weight have different dtypes.
    is_mixed: bool = False
    #: Whether two of each four neighbours along the inputs are dropped.
    is_two_of_four: bool = False


def dense_cost(batch: int, inputs: int, outputs: int, rates: Rates) -> float:
    """The predicted time of a dense product, in microseconds."""
    weights = inputs * outputs
    rows = batch if batch == 1 else batch + _NARROW
    # A small batch waits for the weight to come from memory.
    return rates.plain_call + max(2 * rows * weights / rates.flops, 4 * weights / (_WEIGHTS * rates.streamed))


# -- on a GPU ----------------------------------------------------------------------------------------------------------
#: How many times faster a GPU multiplies halves than float32, in which rates are; and the Triton kernel of blocks, as a
#: part of torch's product.
_HALVES, _BLOCKS_ON_GPU = 10.0, 0.5


def gpu_cost(facts: Facts, weights: int, rates: Rates, part: float = 1.0, weight_bytes: float | None = None) -> float:
    """The predicted time on a GPU of a product with so many weights: of its FLOPs or of its bytes, the longer one.

    Args:
        facts: of the call.
        weights: how many are multiplied.
        rates: of the device.
        part: how fast they are multiplied, as a part of how fast the dense product does.
        weight_bytes: what is read for a weight, where that is not its size.
    """
    product: Product = facts.detail
    itemsize = facts.dtype.itemsize
    flops = part * rates.flops * (_HALVES if itemsize == 2 else 1.0)
    read = itemsize if weight_bytes is None else weight_bytes
    moved = read * weights + itemsize * product.batch * (product.inputs + product.outputs)
    return max(2 * product.batch * weights / flops, moved / rates.streamed)


def copy_on_gpu(facts: Facts, rates: Rates) -> float:
    """What it takes to make x contiguous, which all but the dense product require."""
    if facts.contiguous:
        return 0.0
    product: Product = facts.detail
    return rates.plain_call + 2 * facts.dtype.itemsize * product.batch * product.inputs / rates.streamed


def _plain_on_gpu(facts: Facts, rates: Rates) -> float:
    weights, itemsize = facts.detail.inputs * facts.detail.outputs, facts.dtype.itemsize
    cost = rates.plain_call + gpu_cost(facts, weights, rates)
    # A pass over the weight and its mask, which writes a weight with zeros.
    return cost + (rates.plain_call + (2 * itemsize + 1) * weights / rates.streamed if facts.detail.is_dense else 0.0)


def _sparse_on_gpu(facts: Facts, rates: Rates) -> float:
    kept, itemsize = facts.kept or 0, facts.dtype.itemsize
    cost = rates.bare_call + gpu_cost(facts, kept, rates, _BLOCKS_ON_GPU) + copy_on_gpu(facts, rates)
    if facts.detail.is_dense:
        cost += rates.plain_call + 2 * itemsize * kept / rates.gathered
    return cost


# -- the dense product and the kernel ----------------------------------------------------------------------------------
def plain_cost(facts: Facts, work: Work, rates: Rates) -> float:
    """The predicted time of the dense product, with the fill of its dropped weights where it has any."""
    if facts.device != "cpu":
        return _plain_on_gpu(facts, rates)
    product: Product = facts.detail
    cost = dense_cost(product.batch, product.inputs, product.outputs, rates)
    if product.is_dense:
        weights = product.inputs * product.outputs
        cost += weights / _FILLED + min(_COLD, 2 * product.batch * weights / rates.flops)
    return cost


def sparse_cost(facts: Facts, work: Work, rates: Rates) -> float:
    """The predicted time of the kernel, with the gather of its weights where those are dense."""
    if facts.device != "cpu":
        return _sparse_on_gpu(facts, rates)
    batch, inputs, outputs, block = facts.detail[:4]
    kept = facts.kept or 0
    strip = _STRIP.get(backends.status().simd, 8)
    strips = batch if batch == 1 else -(-batch // strip) * strip
    multiplied = 2 * kept * strips / (_PART[block] * rates.flops)
    moved = batch * (inputs + outputs)
    cost = _CALL + max(multiplied, 8 * kept / (_WEIGHTS * rates.streamed)) + 5 * moved / rates.streamed
    cost += 0.0 if facts.contiguous else batch * inputs / _COPIED
    return float(cost + (kept / _GATHERED if facts.detail.is_dense else 0.0))


def plain_work(facts: Facts) -> Work:
    """The work of the dense product."""
    weights = max(1, facts.detail.inputs * facts.detail.outputs)
    return Work(calls=1, streamed=facts.dtype.itemsize * weights, flops=2 * facts.detail.batch * weights)


def sparse_work(facts: Facts) -> Work:
    """The work of a product with kept weights."""
    # A kept weight comes with its column.
    kept = facts.kept or 0
    return Work(calls=1, streamed=(facts.dtype.itemsize + 4) * kept, flops=2 * facts.detail.batch * kept)
