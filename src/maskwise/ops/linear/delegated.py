"""Products with a sparse weight by torch's own kernels on a GPU.

``bsr`` is torch's Triton kernel of block-sparse weights, where torch has tuned it for the device and the shape; ``csr``
the product of cuSPARSE, for few kept weights; ``semi_structured`` the sparse tensor cores, for weights of which two of
each four neighbours are kept. None of them reads data on the host.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from maskwise.ops.backends import INTERPRETED
from maskwise.ops.linear.cost import Product, copy_on_gpu, gpu_cost
from maskwise.ops.torch_private import bsr_dense_addmm, is_bsr_tuned
from maskwise.plan.cost import Rates, Work
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts

__all__ = [
    "BY_LAYOUT", "is_two_of_four", "product", "semi_structured", "semi_structured_cost",
    "semi_structured_work", "serves_semi_structured",
]  # fmt: skip

#: The side of a block.
SIDE = 16
HALVES = (torch.float16, torch.bfloat16)


# -- the products ------------------------------------------------------------------------------------------------------
def product(
    x: Tensor,  # (batch, inputs), contiguous
    values: Tensor,  # (count,)
    starts: Tensor,  # int32
    columns: Tensor,  # int32
    bias: Tensor | None,  # (outputs,)
    outputs: int,
    rows: int,
    width: int,
) -> Tensor:
    """X times the transposed weight, plus the bias, by torch's product with a sparse weight: (batch, outputs)."""
    size = (outputs, x.shape[1])
    _load_sparse()
    if (rows, width) == (1, 1):
        # Rows are cut into ranges of columns.
        ranges = (starts.shape[0] - 1) // max(1, outputs)
        crow = starts if ranges <= 1 else starts[::ranges].contiguous()
        weight = torch.sparse_csr_tensor(crow, columns, values, size, check_invariants=False)
    else:
        blocks = values.reshape(-1, rows, width)
        weight = torch.sparse_bsr_tensor(starts, columns, blocks, size, check_invariants=False)
    if (rows, width) == (1, 1) or not (x.is_cuda or INTERPRETED):
        return F.linear(x, weight, bias).contiguous()
    batch = x.shape[0]
    # The kernel's tiles divide the batch.
    padded = F.pad(x, (0, 0, 0, -batch % SIDE))
    out = x.new_empty(padded.shape[0], outputs)
    added = x.new_empty(()).expand(outputs, padded.shape[0]) if bias is None else bias[:, None].expand_as(out.T)
    # Where torch has tuned nothing for the shape, its own choice is tiles of one block, with a warning.
    tile = next(tile for tile in (64, 32, SIDE) if padded.shape[0] % tile == 0)
    untuned = {"SPLIT_N": padded.shape[0] // tile, "GROUP_SIZE_ROW": 4, "num_stages": 2, "num_warps": 4}
    meta = None if is_bsr_tuned(outputs, x.shape[1], padded.shape[0], SIDE, x.dtype) else untuned
    bsr_dense_addmm()(added, weight, padded.T, beta=0 if bias is None else 1, out=out.T, meta=meta)
    return out[:batch]


@functools.cache
def _load_sparse() -> None:
    """Make a first sparse tensor, for which torch warns that they are in beta state: that is ours to know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        crow, columns = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        torch.sparse_csr_tensor(crow, columns, torch.zeros(0), (0, 1), check_invariants=False)


# -- two of each four --------------------------------------------------------------------------------------------------
def is_two_of_four(bits: Tensor) -> bool:
    """Whether a mask (outputs, inputs) keeps at most two of each four neighbours along the inputs.

    >>> is_two_of_four(torch.tensor([[True, False, True, False]])), is_two_of_four(torch.ones(1, 4, dtype=torch.bool))
    (True, False)
    """
    if bits.dim() != 2 or bits.shape[1] % 4 or 2 * int(bits.sum()) > bits.numel():
        return False
    return bool((bits.reshape(-1, 4).sum(1) <= 2).all())


def semi_structured(
    weight: Tensor,  # (outputs, inputs), contiguous
) -> Tensor:
    """The weight compressed for the sparse tensor cores: a tensor that ``F.linear`` multiplies with."""
    backend = _backend()
    assert backend is not None
    kind = getattr(torch.sparse, f"SparseSemiStructuredTensor{backend}")
    with warnings.catch_warnings():
        # That the API is a prototype is ours to know.
        warnings.simplefilter("ignore", UserWarning)
        compressed: Tensor = kind.from_dense(weight.contiguous())
    return compressed


#: What outputs and inputs are multiples of, by what multiplies.
_MULTIPLES = {"CUSPARSELT": (16, 16), "CUTLASS": (32, 64)}


@functools.cache
def _backend() -> str | None:
    """What multiplies on this device, as torch names it: cuSPARSELt, or CUTLASS, which has kernels for sm_8x only."""
    if not torch.cuda.is_available():
        return None
    if torch.backends.cusparselt.is_available():
        return "CUSPARSELT"
    return "CUTLASS" if torch.cuda.get_device_capability()[0] == 8 else None


def serves_semi_structured(facts: Facts) -> str | None:
    """Why the sparse tensor cores do not support a call, or None."""
    product: Product = facts.detail
    if facts.device != "cuda":
        return NOT_APPLICABLE
    if facts.traced:
        return "what is compressed of a weight is no part of a graph"
    if facts.grad:
        return "a compressed weight has no gradient"
    if not product.is_two_of_four:
        return "more than two of four neighbouring weights are kept"
    if facts.dtype not in HALVES or product.is_mixed:
        return f"the sparse tensor cores multiply float16 and bfloat16, not {facts.dtype}"
    backend = _backend()
    if backend is None:
        return "this device has neither cuSPARSELt nor the CUTLASS kernels of sm_8x"
    down, along = _MULTIPLES[backend]
    if product.outputs % down or product.inputs % along or not product.batch:
        return f"{backend} takes outputs by {down} and inputs by {along}"
    return None


# -- what they serve and cost ------------------------------------------------------------------------------------------
#: How fast they multiply, as a part of the dense product: estimates. That of CSR is of float32, for halves too, which
#: no tensor core multiplies.
_BSR, _CSR, _SEMI_STRUCTURED = 0.75, 0.05, 1.6
#: Microseconds of Python in torch's calls.
_BSR_CALL, _SEMI_STRUCTURED_CALL = 100.0, 40.0
#: The share of unstructured weights above which the dense product is taken.
_FEW = 0.05


def _serves_layout(facts: Facts) -> str | None:
    if facts.device != "cuda":
        return NOT_APPLICABLE
    if facts.traced:
        # Which kernel is the fastest depends on the batch, to which a graph is not bound.
        return "a graph is not bound to a size of batch"
    return "input and weight have different dtypes" if facts.detail.is_mixed else None


def _serves_bsr(facts: Facts) -> str | None:
    product: Product = facts.detail
    why = _serves_layout(facts)
    if why is not None:
        return why
    if product.block != (SIDE, SIDE) or product.outputs % SIDE or product.inputs % SIDE:
        return f"torch's kernel supports whole blocks of {SIDE} x {SIDE}"
    return None if facts.dtype in HALVES else "torch's kernel adds float32 up in float64"


def _pays_bsr(facts: Facts) -> str | None:
    product: Product = facts.detail
    padded = -(-product.batch // SIDE) * SIDE
    is_tuned = is_bsr_tuned(product.outputs, product.inputs, padded, SIDE, facts.dtype)
    return None if is_tuned else "torch has tuned its kernel for other devices or shapes"


def _bsr_cost(facts: Facts, work: Work, rates: Rates) -> float:
    padded = 0.0 if facts.detail.batch % SIDE == 0 else copy_on_gpu(facts._replace(contiguous=False), rates)
    return _BSR_CALL + gpu_cost(facts, facts.kept or 0, rates, _BSR) + copy_on_gpu(facts, rates) + padded


def _serves_csr(facts: Facts) -> str | None:
    if facts.detail.block != (1, 1):
        return NOT_APPLICABLE
    if facts.dtype not in (*HALVES, torch.float32):
        return f"torch's product is used for float32 and halves, not {facts.dtype}"
    return _serves_layout(facts)


def _pays_csr(facts: Facts) -> str | None:
    if facts.kept is None or facts.kept > _FEW * facts.detail.inputs * facts.detail.outputs:
        return f"more than {_FEW:.0%} of the weight is kept"
    return None


def _csr_cost(facts: Facts, work: Work, rates: Rates) -> float:
    # Rates of halves are those of the tensor cores.
    part = _CSR / (10.0 if facts.dtype.itemsize == 2 else 1.0)
    kept = gpu_cost(facts, facts.kept or 0, rates, part, weight_bytes=facts.dtype.itemsize + 4)
    return 3 * rates.plain_call + kept + copy_on_gpu(facts, rates)


def semi_structured_cost(facts: Facts, work: Work, rates: Rates) -> float:
    """The predicted time: half of the weights and two bits for each of them are read."""
    weights = facts.detail.inputs * facts.detail.outputs
    size = facts.dtype.itemsize / 2 + 1 / 8
    multiplied = gpu_cost(facts, weights, rates, _SEMI_STRUCTURED, weight_bytes=size)
    return _SEMI_STRUCTURED_CALL + multiplied + copy_on_gpu(facts, rates)


def semi_structured_work(facts: Facts) -> Work:
    """The work: half of the weights."""
    weights = max(1, facts.detail.inputs * facts.detail.outputs)
    streamed = facts.dtype.itemsize * weights // 2 + weights // 8
    return Work(calls=1, streamed=streamed, flops=facts.detail.batch * weights)


Reason = Callable[[Facts], str | None]
Cost = Callable[[Facts, Work, Rates], float]
#: The routes that need a layout: name, what they serve, where they pay, what they cost.
BY_LAYOUT: tuple[tuple[str, Reason, Reason, Cost], ...] = (
    ("bsr", _serves_bsr, _pays_bsr, _bsr_cost),
    ("csr", _serves_csr, _pays_csr, _csr_cost),
)
