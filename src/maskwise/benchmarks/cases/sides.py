"""What the cases of several families share: inputs with a random mask, and sides that need a compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from maskwise.benchmarks.case import Case, Side

__all__ = ["Masked", "compiled", "masked_inputs", "no_compiler", "torch_dtype"]


@dataclass(frozen=True)
class Masked:
    """A tensor and what is kept of it, both as a bool tensor and as a Mask."""

    x: Tensor
    keep: Tensor
    mask: mw.Mask
    dim: Any


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
    return Masked(x, keep, mw.Mask(keep), case.dim)


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
