"""The inputs on which every law is tried: one list serves all suites.

A sample is (x, mask, keyword arguments). Masks are bool tensors, and intervals of every origin; they broadcast, leave
slices empty, keep everything or nothing. x has dims of size 1 and 0, and strides that are not contiguous. Each function
takes the keyword arguments of its kind: all of them with each bool tensor, one after the other with the intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch

import maskwise as mw
from tests.laws.functions import FUNCTIONS, Function
from tests.laws.slices import law_cases

#: The keyword arguments of a kind of function. A family may bring its own, by function: KWARGS in its law_cases.py.
KWARGS = {
    "reduction": [{}, {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, -1)}],
    "position": [{}, {"dim": 0}, {"dim": -1, "keepdim": True}],
    "rowwise": [{"dim": -1}, {"dim": 0}],
    "elementwise": [{}],
}

#: The functions as the laws call them, ``call(x, mask, **kwargs)``: a family whose functions are called otherwise tells
#: how in the CALLS of its law_cases.py.
UNDER_LAW = [
    replace(function, call=getattr(law_cases(function), "CALLS", {}).get(function.name, function.call))
    for function in FUNCTIONS.values()
]


@dataclass(frozen=True)
class Sample:
    label: str
    x: torch.Tensor
    mask: torch.Tensor | mw.Mask
    kwargs: dict = field(default_factory=dict)

    @property
    def bits(self) -> torch.Tensor:
        """The mask as a bool tensor."""
        return as_bool(self.mask)

    def __str__(self) -> str:
        return f"{self.label}-{'-'.join(f'{k}={v}' for k, v in self.kwargs.items()) or 'default'}"


def as_bool(mask: torch.Tensor | mw.Mask) -> torch.Tensor:
    """The bool tensor of a mask, computed anew: a mask of intervals must not have seen its bits."""
    return mask[...].to_bool() if isinstance(mask, mw.Mask) else mask


def interval_masks(shape: tuple[int, ...]) -> dict[str, mw.Mask]:
    """Masks of one shape, of at least one dim, that reach kernels as intervals: one of every origin.

    Where it is the batch, the first entry keeps everything and the second nothing in some of them.
    """
    *batch, n = shape
    rows = batch[-1] if batch else 1
    lengths = torch.randint(0, n + 1, batch, generator=torch.Generator().manual_seed(2))
    if batch:
        lengths[0], lengths[1:2] = n, 0
    longest = max(rows, n)
    # A mask of rows and columns, as one of the shape.
    whole = lambda mask: mask.expand(*batch[:-1], *mask.shape) if batch else mask[rows // 2]
    right, left = mw.Mask.from_lengths(lengths, n), mw.Mask.from_lengths(lengths, n, side="left")
    found = {
        "lengths": right,
        "left_lengths": left,
        "causal": whole(mw.Mask.causal(rows, n)),
        "window": whole(mw.Mask.window(rows, 1, 2, k=n)),
        "segments": whole(mw.Mask.from_segments(torch.arange(longest) // 3)[:rows, :n]),
        "full": mw.Mask.full(shape),
        "none": mw.Mask.none(shape),
        # Starts below 0 and ends beyond the row, by slices; starts after ends, by an AND.
        "ends_outside": mw.Mask.from_lengths(lengths * 2, 2 * n + 3)[..., 2 : n + 2],
        "starts_outside": mw.Mask.from_lengths(lengths * 2, 2 * n + 3, side="left")[..., n:-3],
        "and": right & left,
        "and_window": right & whole(mw.Mask.window(rows, 3, k=n)),
    }
    if batch:
        kept_rows = (rows - rows // 3 - torch.arange(prod(batch[:-1])).reshape(batch[:-1])).clamp(min=0)
        found["whole_rows"] = mw.Mask.from_lengths(kept_rows, rows)[..., None].expand(shape)
        found["transposed"] = whole(mw.Mask.causal(n, rows, offset=1).T)
        found["and_whole_rows"] = right & mw.Mask.from_lengths(torch.tensor(rows - rows // 4), rows)[:, None]
        found["expanded"] = mw.Mask.from_lengths(torch.tensor(n - n // 3), n).expand(shape)
    assert all(mask.operand == "intervals" and mask.shape == shape for mask in found.values())
    return found


def inputs(dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(label, x, bool mask), the same on every run."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)

    def bits(*shape: int, density: float = 0.5) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < density

    with_empty = bits(6, 9)
    with_empty[2] = False
    with_empty[:, 4] = False
    yield "with_empty_slices", values(6, 9), with_empty
    yield "row_mask", values(5, 37), bits(1, 37)
    yield "column_mask", values(37, 5), bits(37, 1)
    yield "fewer_dims", values(3, 4, 33), bits(4, 33)
    yield "nothing_kept", values(4, 8), torch.zeros(4, 8, dtype=torch.bool)
    yield "all_kept", values(4, 8), torch.ones(4, 8, dtype=torch.bool)
    yield "transposed", values(33, 7).T, bits(33, 7).T
    yield "strided", values(8, 70)[:, ::2], bits(8, 35)
    yield "expanded", values(1, 35).expand(6, 35), bits(6, 35)
    yield "three_dims", values(3, 17, 6), bits(3, 17, 6, density=0.2)


def interval_inputs(dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor, mw.Mask]]:
    """(label, x, mask of intervals), the same on every run."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)

    for place, (origin, mask) in enumerate(interval_masks((7, 37)).items()):
        yield origin, [values(7, 37), values(37, 7).T, values(7, 74)[:, ::2]][place % 3], mask
    lengths = torch.tensor([17, 0, 5])
    yield "unsqueezed", values(3, 4, 17), mw.Mask.from_lengths(lengths, 17)[:, None]
    yield "rows_of_features", values(3, 17, 6), mw.Mask.from_lengths(lengths, 17)[..., None]
    yield "left_rows_of_features", values(3, 17, 6), mw.Mask.from_lengths(lengths, 17, side="left")[..., None]
    yield "interval_with_fewer_dims", values(3, 5, 9), mw.Mask.causal(5, 9)
    yield "broadcast_along", values(3, 5, 9), mw.Mask.from_lengths([5, 2, 0], 5)[..., None][:, 1:2]


def samples(function: Function, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    """Every sample of a function."""
    options = getattr(law_cases(function), "KWARGS", {}).get(function.name, KWARGS[function.kind])
    for label, x, mask in inputs(dtype):
        for kwargs in options:
            yield Sample(label, x, mask, kwargs)
    # Each origin meets each function once, and each of the keyword arguments in some function.
    turn = list(FUNCTIONS).index(function.name)
    for place, (label, x, mask) in enumerate(interval_inputs(dtype)):
        yield Sample(label, x, mask, options[(place + turn) % len(options)])


def needed(function: Function) -> dict:
    """The keyword arguments that a function asks for beside its dims, such as q or k."""
    return {name: value for name, value in next(samples(function)).kwargs.items() if name not in ("dim", "keepdim")}


def cases(dtype: torch.dtype = torch.float32) -> list:
    """Every function with every one of its samples, for ``pytest.mark.parametrize``."""
    import pytest

    return [
        pytest.param(function, sample, id=f"{function.name}-{sample}")
        for function in UNDER_LAW
        for sample in samples(function, dtype)
    ]


ROUTES = ("plain", "kernel")


def outputs(result):
    """A result as a tuple of tensors, whether it is one or several."""
    return result if isinstance(result, tuple) else (result,)


def differentiable(result):
    """The outputs that carry a gradient: not the indices."""
    return [out for out in outputs(result) if out.is_floating_point()]
