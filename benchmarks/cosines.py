"""How near each side of the family ``serving`` is to float32: ``python -m benchmarks.cosines [filter]``.

The smallest cosine, over all texts, between a row and that of the padded model in torch. Rows of one
number, as the scores of pairs are, are compared as a whole.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cases import serving
from benchmarks.cases.engines import eager

__all__ = ["main", "smallest_cosine"]


def smallest_cosine(found: Tensor, exact: Tensor) -> float:
    """The smallest cosine of two rows; of all rows together where each is one number.

    >>> smallest_cosine(torch.eye(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    0.800000011920929
    """
    rows = (each.flatten()[None] if each.shape[-1] == 1 else each for each in (found.float(), exact.float()))
    return float(functional.cosine_similarity(*rows, dim=-1).min())


def main(words: list[str]) -> None:
    """Print one line for each side that can run here."""
    for case in serving.cases():
        if not all(word in case.name for word in words) or case.unavailable() is not None:
            continue
        work = case.setup(case)
        if not isinstance(work, serving.Work):
            continue
        exact = serving.serve(work, eager(work.served.model, work.served.output), 1)()
        print(case.name)
        for side in case.sides:
            if (reason := side.unavailable()) is not None:
                print(f"  {'':>10}  {side.name}: {reason}")
                continue
            found = side.prepare(work)()
            assert isinstance(found, Tensor)
            print(f"  {smallest_cosine(found, exact):10.6f}  {side.name}", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1:])
