"""What the cases of several families share: inputs with a random mask, and sides that need a compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from benchmarks.case import Case, Side

__all__ = [
    "Call",
    "Masked",
    "compiled",
    "distinct",
    "masked_inputs",
    "named",
    "near_one",
    "no_compiler",
    "torch_dtype",
    "with_backward",
]

Call = Callable[[], Any]
"""A side, ready to run: no arguments, and whatever result can be compared."""


@dataclass(frozen=True)
class Masked:
    """A tensor and what is kept of it, both as a bool tensor and as a Mask."""

    x: Tensor
    keep: Tensor
    mask: mw.Mask
    dim: Any


def named(title: str, package: str) -> str:
    """Return a peer's name with its version, where it is installed.

    >>> named("A peer", "no_such_package")
    'A peer'
    """
    try:
        return f"{title} {version(package)}"
    except PackageNotFoundError:
        return title


def torch_dtype(case: Case) -> torch.dtype:
    """Return the dtype that the case names: a case is plain data, and torch's dtypes are not JSON."""
    dtype = getattr(torch, case.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def masked_inputs(case: Case, mask_shape: tuple[int, ...] | None = None) -> Masked:
    """Build values in [0, 1) of the case's shape and dtype, each kept with the probability that is the case's density.

    They are positive, so that no sum is near zero by cancellation and results can be compared by relative error.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(case.shape, generator=generator).to(torch_dtype(case))
    keep = torch.rand(mask_shape or case.shape, generator=generator) < (case.density or 0.0)
    if isinstance(case.dim, int):
        # Two of each slice at least, so that no variance is NaN: peers do not agree on what nothing kept means.
        keep.narrow(case.dim, 0, min(2, keep.shape[case.dim])).fill_(True)
    return Masked(x, keep, mw.Mask(keep), case.dim)


def near_one(x: Tensor) -> Tensor:
    """Values in [0, 1) as values near 1: a product of thousands of the former is 0, and slow on the way there."""
    return 1 + (x - 0.5) / 64


def distinct(x: Tensor) -> Tensor:
    """Values in [0, 1) of which no two are equal, laid out as x is: nobody promises in which order equal ones come."""
    # Whole numbers below 2^24, which float32 tells apart.
    ranks = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1)).reshape(x.shape)
    return torch.empty_like(x).copy_(ranks).div_(x.numel())


def no_compiler() -> str | None:
    """Say why torch.compile cannot run on the CPU here, or None when it can."""
    if shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++"):
        return None
    return "torch.compile needs a C++ compiler, and none is on the PATH"


def compiled(name: str, prepare: Callable[[Any], Callable[[], object]]) -> Side:
    """Return the side that runs another side's call under torch.compile, for exactly these shapes."""

    def build(inputs: Any) -> Callable[[], object]:
        # Dynamo caches by code object and gives up on the ninth shape; every case starts afresh instead.
        torch.compiler.reset()
        return torch.compile(prepare(inputs), fullgraph=True, dynamic=False)

    return Side(f"compile({name})", build, unavailable=no_compiler)


def with_backward(side: Side) -> Side:
    """Return the side that runs another side's call and the gradient of x, and gives that gradient."""

    def build(i: Masked) -> Call:
        x = i.x.clone().requires_grad_()
        forward: Call = side.prepare(replace(i, x=x))
        # The gradient that comes from above is not constant, as after any real layer.
        above = torch.rand(forward().shape, generator=torch.Generator().manual_seed(1)).to(x)
        if above.shape == x.shape:
            # What a dropped place gives is a constant. The idioms pass a gradient through some all the same.
            above = torch.where(i.keep, above, 0.0)
        return lambda: torch.autograd.grad(forward(), x, above)[0]

    return replace(side, prepare=build)
