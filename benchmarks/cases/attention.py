"""Attention against SDPA with a mask: lengths, causal, windows, forward and backward, and tiny inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import maskwise as mw
from benchmarks.case import Case, Side, at_least, never_slower
from benchmarks.cases.sides import Call, torch_dtype

__all__ = ["cases"]


@dataclass(frozen=True)
class Inputs:
    """q, k and v of (B, H, L, D), and what is kept: as users hold it, and for SDPA."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: mw.Mask | Tensor
    bits: Tensor
    is_causal: bool


MakeMask = Callable[[Case], mw.Mask]


def _lengths(case: Case) -> mw.Mask:
    batch, _, length, _ = case.shape
    generator = torch.Generator().manual_seed(0)
    return mw.Mask.from_lengths(torch.randint(1, length + 1, (batch,), generator=generator), max_len=length)


def _window(case: Case) -> mw.Mask:
    length = case.shape[2]
    return mw.Mask.window(length, max(length // 16, 1))[None, None]


def _setup(make: MakeMask, *, is_causal: bool = False, bits: bool = False) -> Callable[[Case], Inputs]:
    def build(case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.rand(case.shape, generator=generator).to(torch_dtype(case)) for _ in range(3))
        mask = make(case)
        keep = mask.to_bool() if mask.ndim == 4 else mask.to_bool()[:, None, None, :]
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        return Inputs(q, k, v, mask.to_bool().clone() if bits else mask, keep, is_causal)

    return build


def _ours(i: Inputs) -> Call:
    return lambda: mw.attention(i.q, i.k, i.v, i.mask, is_causal=i.is_causal)


def _sdpa(i: Inputs) -> Call:
    bits = i.bits
    if i.is_causal:
        length = i.q.shape[2]
        bits = bits & torch.ones(length, length, dtype=torch.bool, device=bits.device).tril()
    return lambda: scaled_dot_product_attention(i.q, i.k, i.v, bits)


def _causal(i: Inputs) -> Call:
    return lambda: scaled_dot_product_attention(i.q, i.k, i.v, is_causal=True)


def _with_backward(side: Side) -> Side:
    def build(i: Inputs) -> Call:
        leaves = [x.clone().requires_grad_() for x in (i.q, i.k, i.v)]
        forward: Call = side.prepare(replace(i, q=leaves[0], k=leaves[1], v=leaves[2]))
        above = torch.rand(i.q.shape, generator=torch.Generator().manual_seed(1)).to(i.q)
        return lambda: torch.cat([g.flatten() for g in torch.autograd.grad(forward(), leaves, above)])

    return replace(side, prepare=build)


def cases() -> tuple[Case, ...]:
    """Return the cases of attention."""
    ours, sdpa = Side("mw.attention", _ours, kind="ours"), Side("SDPA with a mask", _sdpa)
    both = (ours, sdpa)
    floor = Side("SDPA is_causal, no mask", _causal, kind="floor")
    faster: dict[str, Any] = {"targets": (at_least(1.5, "SDPA with a mask"),)}
    large = Case("attention", "attention", "", _setup(_lengths), both, (16, 8, 512, 64), relative_tolerance=1e-3)
    backward = tuple(map(_with_backward, both))
    tiny = replace(large, shape=(2, 2, 8, 16), targets=(never_slower(),))
    both_ways = _setup(_lengths, is_causal=True)
    return (
        replace(large, variant="lengths 1..512", **faster),
        replace(large, variant="lengths 1..512 as a bool tensor", setup=_setup(_lengths, bits=True), **faster),
        replace(large, variant="lengths 1..512 forward+backward", sides=backward, **faster),
        replace(
            large,
            variant="causal and lengths 1..512",
            setup=both_ways,
            sides=(*both, floor),
            targets=(never_slower("SDPA is_causal, no mask"), never_slower()),
        ),
        replace(
            large,
            variant="causal and lengths 1..512 forward+backward",
            setup=both_ways,
            sides=tuple(map(_with_backward, (*both, floor))),
            targets=(never_slower("SDPA is_causal, no mask"), never_slower()),
        ),
        replace(
            large,
            variant="window of 1/16 of 2048",
            setup=_setup(_window),
            shape=(1, 8, 2048, 64),
            targets=(at_least(3, "SDPA with a mask"),),
        ),
        replace(tiny, variant="2x2x8x16", setup=_setup(_lengths, bits=True)),
        replace(tiny, variant="2x2x8x16 forward+backward", setup=_setup(_lengths, bits=True), sides=backward),
    )
