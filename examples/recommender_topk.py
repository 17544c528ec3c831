"""Recommend the top k allowed items: factorize the observed ratings, filter, and take the top k.

    python examples/recommender_topk.py

Most ratings are missing (NaN). The loss covers observed ratings only. Recommended items are in stock, in the user's
category and not yet rated. Where fewer than k are left, the index is -1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from maskwise import Mask

USERS, ITEMS, RANK, K = 200, 120, 4, 5


def ratings() -> tuple[Tensor, Tensor]:
    """Return the true ratings of all items, and the observed ones, with NaN where missing."""
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(n, RANK, generator=generator) for n in (USERS, ITEMS))
    truth = users @ items.T + 0.5 * torch.randn(USERS, ITEMS, generator=generator)
    observed = torch.rand(USERS, ITEMS, generator=generator) < 0.3
    return truth, torch.where(observed, truth, torch.nan)


def factorize(given: Tensor, rated: mw.Mask, steps: int = 150) -> Tensor:
    """Fit factors to the observed ratings, and return the scores of all pairs."""
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(n, RANK, generator=generator).mul_(0.3).requires_grad_() for n in given.shape]
    optimizer = torch.optim.Adam(factors, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        mw.loss(F.mse_loss, factors[0] @ factors[1].T, given, rated).backward()
        optimizer.step()
    return (factors[0] @ factors[1].T).detach()


if __name__ == "__main__":
    truth, given = ratings()
    rated = mw.Mask(~given.isnan())
    scores = factorize(given, rated)
    missed = mw.loss(F.mse_loss, scores, truth, ~rated) / mw.var(truth, ~rated)
    print(f"{rated.density:.0%} of the ratings are known; of the others, {1 - missed:.0%} of the variance is predicted")

    in_stock = ~Mask.from_indices(range(0, ITEMS, 5), size=ITEMS)
    category = Mask(torch.arange(ITEMS) % 12 == torch.arange(USERS)[:, None] % 12)
    allowed = category & in_stock & ~rated
    fewest, most = allowed.lengths.aminmax()
    print(f"allowed are {allowed.density:.1%} of all pairs, {fewest} to {most} items per user")

    values, items = mw.topk(scores, allowed, K)
    for user in range(3):
        found = [(item, value) for item, value in zip(items[user], values[user], strict=True) if item >= 0]
        print(f"  user {user}: " + ", ".join(f"item {item} ({value:+.2f})" for item, value in found))

    # The usual idiom fills the missing places with items that the filters forbid.
    idiom = scores.masked_fill(~allowed, -torch.inf).topk(K).indices
    forbidden = int((~allowed.to_bool().gather(1, idiom)).sum())
    print(f"mw.topk leaves {int((items < 0).sum())} of {items.numel()} places empty (index -1);", end=" ")
    print(f"masked_fill and topk recommend {forbidden} forbidden items there")
