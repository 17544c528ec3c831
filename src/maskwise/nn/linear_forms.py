"""The forms that a linear layer's effective weight is kept in, and which of them is the fastest for an input.

Exact ways only: the dense product with the effective weight, and a smaller dense one without the inputs and outputs of
which nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Forms", "forms_of", "indices_unless_all"]

# Nanoseconds, on two AVX2 cores; only their ratios matter. A multiply-add of a large product, the reading of a weight
# from memory, the moving of one number by an index, and what three more calls cost.
MULTIPLY = 0.014
READ = 0.15
MOVE = 1.2
CALLS = 20_000.0
# A prediction this much off must not make the layer slower than a dense one.
MARGIN = 1.25


@dataclass(frozen=True)
class Forms:
    """The effective weight, and the part of it that is not all zeros."""

    weight: Tensor  # (out, in)
    small: Tensor | None  # (live outputs, live inputs), or None if all are live
    outputs: Tensor | None  # indices of live outputs, or None if all are
    inputs: Tensor | None  # indices of live inputs, or None if all are

    def route(self, x: Tensor) -> tuple[str, str]:
        """Which way this input goes, and why."""
        if self.small is None:
            return "dense", "every input and every output has a weight that is kept"
        (n, k), (all_n, all_k) = self.small.shape, self.weight.shape
        live = f"{n} of {all_n} outputs and {k} of {all_k} inputs are live"
        return ("units", live) if self._pays(x) else ("dense", f"{live}, but moving them costs more than it saves")

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, by the way that is predicted to be the fastest."""
        if self.small is None or not self._pays(x):
            return F.linear(x, self.weight, bias)
        if self.inputs is not None:
            x = x.index_select(-1, self.inputs)
        if self.outputs is None:
            return F.linear(x, self.small, bias)
        out = F.linear(x, self.small)
        shape = (*out.shape[:-1], self.weight.shape[0])
        room = out.new_zeros(shape).index_copy(-1, self.outputs, out)
        # What a dead output has is its bias.
        return room if bias is None else room + bias.to(room.dtype)

    def _pays(self, x: Tensor) -> bool:
        assert self.small is not None
        rows = x.numel() // max(x.shape[-1], 1) if x.dim() else 0
        saved = (self.weight.numel() - self.small.numel()) * max(MULTIPLY * rows, READ)
        moved = 0 if self.inputs is None else self.small.shape[1]
        # Room is made, filled by index, and the bias added in a pass of its own.
        moved += 0 if self.outputs is None else self.small.shape[0] + self.weight.shape[0]
        return saved > MARGIN * (moved * rows * MOVE + CALLS)


@torch.no_grad()
def forms_of(
    effective: Tensor,  # (out, in)
) -> Forms:
    """The forms of an effective weight.

    >>> forms = forms_of(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> forms.small, forms.outputs, forms.inputs
    (tensor([[1., 2.]]), tensor([0]), tensor([1, 2]))
    """
    effective = effective.detach()
    live = effective != 0
    outputs, inputs = indices_unless_all(live.any(1)), indices_unless_all(live.any(0))
    if outputs is None and inputs is None:
        return Forms(effective, None, None, None)
    small = effective if outputs is None else effective.index_select(0, outputs)
    small = small if inputs is None else small.index_select(1, inputs)
    return Forms(effective, small.contiguous(), outputs, inputs)


def indices_unless_all(live: Tensor) -> Tensor | None:
    """Where it is True, or None if it is True everywhere."""
    return None if bool(live.all()) else live.nonzero().reshape(-1)
