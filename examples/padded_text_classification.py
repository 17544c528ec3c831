"""Classify padded paragraphs, with a mean over valid tokens and with one that includes the padding.

    python examples/padded_text_classification.py

The texts are paragraphs of Python's own documentation, which ships with every Python; the class is the topic. Both
classifiers are the same bag of words with the same seed; one averages valid tokens only, the other the padding as well.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw

TOPICS = ("specialnames", "formatstrings", "compound", "typesseq")
WIDTH, LONGEST = 24, 128


def batch() -> tuple[Tensor, Tensor, Tensor, int]:
    """Return tokens (B, L) padded with 0, lengths (B,), classes (B,), and the size of the vocabulary."""
    vocabulary: dict[str, int] = {}
    rows, classes = [], []
    for label, topic in enumerate(TOPICS):
        for paragraph in topics[topic].split("\n\n"):
            words = re.findall(r"[a-z]+", paragraph.lower())
            if len(words) > 3:
                ids = [vocabulary.setdefault(word, len(vocabulary) + 1) for word in words[:LONGEST]]
                rows.append(torch.tensor(ids))
                classes.append(label)
    lengths = torch.tensor([len(row) for row in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths, torch.tensor(classes), len(vocabulary) + 1


class Classifier(nn.Module):
    """Embed, average, classify. The average is over kept tokens, or over all positions."""

    def __init__(self, vocabulary: int, *, masked: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, len(TOPICS))
        self.pool = mw.nn.MaskedMeanPool()
        self.masked = masked

    def forward(self, tokens: Tensor, mask: mw.Mask) -> Tensor:
        """Return the logits, (B, classes)."""
        return self.head(self.pool(self.embed(tokens), mask if self.masked else None))


def accuracy(*, masked: bool, epochs: int = 20) -> float:
    """Train on every other paragraph, and return the accuracy on the rest."""
    tokens, lengths, classes, vocabulary = batch()
    mask = mw.Mask.from_lengths(lengths, max_len=tokens.shape[1])
    torch.manual_seed(0)
    model = Classifier(vocabulary, masked=masked)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[::2], mask[::2]), classes[::2]).backward()
        optimizer.step()
    return float((model(tokens[1::2], mask[1::2]).argmax(-1) == classes[1::2]).float().mean())


if __name__ == "__main__":
    tokens, lengths, classes, _ = batch()
    mask = mw.Mask.from_lengths(lengths, max_len=tokens.shape[1])
    print(
        f"{len(tokens)} paragraphs of {len(TOPICS)} topics, padded to {tokens.shape[1]} tokens: {mask.density:.0%} real"
    )
    print(f"mean of the real tokens:   {accuracy(masked=True):.1%} right")
    print(f"mean with the padding:     {accuracy(masked=False):.1%} right")
    print(f"always the largest topic:  {classes[1::2].bincount().max() / len(classes[1::2]):.1%} right")
