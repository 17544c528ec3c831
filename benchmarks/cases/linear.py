"""Products with a sparse weight against dense ``F.linear``, ``F.linear`` with a CSR weight, and SparseLab."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import maskwise as mw
from benchmarks.case import Case, Side, never_slower
from benchmarks.cases.sides import Call
from maskwise.ops.linear import Block

__all__ = ["MEANS", "cases"]

#: (batch, inputs, outputs).
SHAPES = ((512, 768, 3072), (64, 768, 3072), (512, 3072, 768), (2048, 1024, 1024), (1, 1024, 4096))
DENSE, CSR, SPARSELAB = "F.linear, dense", "F.linear, CSR weight", "SparseLab"
#: What the geometric means over the shapes must reach: the end of a case's name, the other side, times faster.
MEANS = (
    ("keep=10%", DENSE, 5.0),
    ("keep=10%", CSR, 10.0),
    ("keep=10%", SPARSELAB, 1.5),
    ("keep=5%", DENSE, 8.0),
    ("keep=50%", DENSE, 1.0),
    ("4x1 keep=10%", DENSE, 7.0),
    ("16x16 keep=10%", DENSE, 8.0),
    ("keep=10%, training step", DENSE, 3.0),
)


@dataclass(frozen=True)
class Weights:
    """An input, a weight that is 0 where nothing is kept, and what is kept."""

    x: Tensor  # (batch, inputs)
    weight: Tensor  # (outputs, inputs)
    bias: Tensor  # (outputs,)
    mask: mw.Mask
    block: Block


def _setup(case: Case, block: Block = (1, 1)) -> Weights:
    batch, inputs, outputs = case.shape
    generator = torch.Generator().manual_seed(0)
    places = (-(-outputs // block[0]), -(-inputs // block[1]))
    bits = torch.rand(places, generator=generator) < (case.density or 0.0)
    bits = bits.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:outputs, :inputs]
    # Positive, so that no sum is near zero by cancellation.
    x, weight = torch.rand(batch, inputs, generator=generator), torch.rand(outputs, inputs, generator=generator)
    return Weights(x, torch.where(bits, weight, 0.0), torch.rand(outputs, generator=generator), mw.Mask(bits), block)


def _tall(case: Case) -> Weights:
    return _setup(case, (4, 1))


def _square(case: Case) -> Weights:
    return _setup(case, (16, 16))


def _layer(i: Weights) -> mw.nn.SparseLinear:
    dense = torch.nn.Linear(i.weight.shape[1], i.weight.shape[0], device=i.weight.device)
    with torch.no_grad():
        dense.weight.copy_(i.weight)
        dense.bias.copy_(i.bias)
    return mw.nn.SparseLinear.from_linear(dense, i.mask, block=i.block)


def _quiet(run: Call) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return run()

    return call


def _ours(i: Weights) -> Call:
    layer = _layer(i)
    return _quiet(lambda: layer(i.x))


def _function(i: Weights) -> Call:
    run = _quiet(lambda: mw.linear(i.x, i.weight, i.mask, i.bias))
    # The mask comes again and again, so what is made of it is there after a few calls.
    for _ in range(20):
        run()
    return run


def _dense(i: Weights) -> Call:
    return _quiet(lambda: linear(i.x, i.weight, i.bias))


def _masked(i: Weights) -> Call:
    bits = i.mask.to_bool()
    return _quiet(lambda: linear(i.x, i.weight * bits, i.bias))


def _csr(i: Weights) -> Call:
    with warnings.catch_warnings():
        # Torch says once a process that CSR tensors are a beta.
        warnings.simplefilter("ignore")
        weight = i.weight.to_sparse_csr()
    return _quiet(lambda: linear(i.x, weight, i.bias))


def _no_sparselab() -> str | None:
    return None if importlib.util.find_spec("sparselab") else "SparseLab is not installed (pip install sparselab)"


def _sparselab(i: Weights) -> Call:
    import sparselab

    weight = sparselab.PaddedCSR.from_dense(i.weight)
    # As its own layer does: its product wants the batch last.
    return _quiet(lambda: sparselab.spmm(weight, i.x.T.contiguous()).T + i.bias)


def _step(module: torch.nn.Module, i: Weights) -> Call:
    x = i.x.clone().requires_grad_()
    above = torch.rand(i.x.shape[0], i.weight.shape[0], generator=torch.Generator().manual_seed(1)).to(x)
    leaves = [x, *module.parameters()]
    # Both gradients are computed; that of x is what both sides can be compared by.
    return lambda: torch.autograd.grad(module(x), leaves, above)[0]


def _our_step(i: Weights) -> Call:
    return _step(_layer(i), i)


def _dense_step(i: Weights) -> Call:
    return _step(_layer(i).to_linear(), i)


def cases() -> tuple[Case, ...]:
    """Return the cases of sparse weights."""
    ours, dense = Side("mw.nn.SparseLinear", _ours, "ours"), Side(DENSE, _dense)
    others = (Side(CSR, _csr), Side(SPARSELAB, _sparselab, unavailable=_no_sparselab))
    both = (ours, dense)
    steps = (Side("mw.nn.SparseLinear", _our_step, "ours"), Side(DENSE, _dense_step))
    functions = (Side("mw.linear", _function, "ours"), Side("F.linear(x, weight * mask)", _masked), dense)
    base = Case("linear", "SparseLinear", "", _setup, both, SHAPES[0], 0.1, relative_tolerance=1e-4)
    # Every shape and density; how much faster is asked of the geometric means.
    slower = (never_slower(DENSE),)
    found = []
    for shape in SHAPES:
        case = replace(base, shape=shape)
        name = "x".join(map(str, shape))
        wide = replace(case, sides=(*both, *others))
        found += [
            replace(wide, variant=f"{name} keep=10%", targets=slower),
            replace(wide, variant=f"{name} keep=5%", density=0.05, targets=slower),
            *(
                replace(case, variant=f"{name} keep={round(100 * d)}%", density=d, targets=slower)
                for d in (0.3, 0.4, 0.5, 0.6, 0.75, 1.0)
            ),
            replace(case, variant=f"{name} 4x1 keep=10%", setup=_tall, targets=slower),
            replace(case, variant=f"{name} 16x16 keep=10%", setup=_square, targets=slower),
            replace(case, variant=f"{name} keep=10%, training step", sides=steps, targets=slower),
            *(
                replace(
                    case,
                    function="linear",
                    variant=f"{name} keep={round(100 * d)}%",
                    density=d,
                    sides=functions,
                    targets=(never_slower("F.linear(x, weight * mask)"),),
                )
                for d in (0.1, 0.5, 0.9)
            ),
        ]
    tiny = replace(base, function="linear", variant="4x8x8 keep=50%", shape=(4, 8, 8), density=0.5, sides=functions)
    return (*found, replace(tiny, targets=(never_slower("F.linear(x, weight * mask)"),)))
