"""Train a small language model on documents packed into rows; each document attends to itself only.

    python examples/segment_packed_lm.py

Documents of different lengths are packed first-fit into rows of a fixed size, instead of one padded row per document.
The mask is `causal & segments`: no token attends to another document. To check it, the loss of the packed rows is
compared with the loss of the documents one by one.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw

ROW, WIDTH, HEADS = 256, 32, 4


class Model(nn.Module):
    """One layer of attention over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(ROW, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor, positions: Tensor, mask: mw.Mask) -> Tensor:
        """(B, L) tokens and positions, (B, L, L) mask → logits (B, 128, L)."""
        x = self.embed(tokens) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + mw.attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2)
        return self.out(x).transpose(1, 2)


def loss_of(model: Model, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
    """The mean next-character loss, over positions whose next character is in the same document."""
    mask = mw.Mask.from_segments(segments) & mw.Mask.causal(tokens.shape[1])
    has_next = mw.Mask((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0))
    return mw.loss(F.cross_entropy, model(tokens, positions, mask)[..., :-1], tokens[:, 1:], has_next)


def packed_rows(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and segments, (rows, ROW) each; segment -1 is padding."""
    rows = list(mw.TokenBudgetSampler([len(d) for d in documents], budget=ROW, shuffle=False))
    tokens, positions, segments = (torch.full((len(rows), ROW), fill) for fill in (0, 0, -1))
    for i, row in enumerate(rows):
        start = 0
        for number, document in enumerate(documents[j] for j in row):
            span = slice(start, start := start + len(document))
            tokens[i, span] = document
            positions[i, span] = torch.arange(len(document))
            segments[i, span] = number
    return tokens, positions, segments


if __name__ == "__main__":
    torch.manual_seed(0)
    texts = [paragraph.strip() for paragraph in topics["formatstrings"].split("\n\n")]
    documents = [torch.tensor([min(ord(c), 127) for c in text[:ROW]]) for text in texts if len(text) > 8][:48]
    tokens, positions, segments = packed_rows(documents)
    real = sum(map(len, documents))
    padded = len(documents) * max(map(len, documents))
    print(f"{len(documents)} documents, {real} characters: {real / padded:.0%} of a padded batch are real,", end=" ")
    print(f"{real / tokens.numel():.0%} of {len(tokens)} packed rows")

    model = Model()
    together = loss_of(model, tokens, positions, segments)
    alone = [loss_of(model, d[None], torch.arange(len(d))[None], torch.zeros(1, len(d), dtype=int)) for d in documents]
    weights = torch.tensor([len(d) - 1.0 for d in documents])
    one_by_one = (torch.stack(alone) * weights).sum() / weights.sum()
    print(f"loss of the rows {together:.5f}, of the documents one by one {one_by_one:.5f}: nothing leaks between them")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(31):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, positions, segments)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"  step {step:2}: {loss:.3f}")
