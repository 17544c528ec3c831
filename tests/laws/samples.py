"""The inputs on which every law is tried: one list serves all suites.

A sample is (x, mask, keyword arguments). Masks broadcast, leave slices empty, keep everything or nothing; x has dims of
size 1 and 0, and strides that are not contiguous. Each function takes the keyword arguments of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

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
    mask: torch.Tensor
    kwargs: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.label}-{'-'.join(f'{k}={v}' for k, v in self.kwargs.items()) or 'default'}"


def inputs(dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(label, x, mask), the same on every run."""
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


def samples(function: Function, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    """Every sample of a function."""
    of_family = getattr(law_cases(function), "KWARGS", {})
    for label, x, mask in inputs(dtype):
        for kwargs in of_family.get(function.name, KWARGS[function.kind]):
            yield Sample(label, x, mask, kwargs)


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
