"""Models with a known answer: what is wrong, where, and the repaired form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw

B, L, D = 4, 12, 8
LENGTHS = [12, 5, 9, 3]


def keep_mask(side="right"):
    return mw.Mask.from_lengths(LENGTHS, max_len=L, side=side).to_bool()


def floats():
    return torch.randn(B, L, D)


class ConformerBlock(nn.Module):
    """Pointwise, depthwise over time, pointwise."""

    def __init__(self, repaired):
        super().__init__()
        self.repaired = repaired
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)
        self.depthwise = nn.Conv1d(D, D, 5, padding=2, groups=D)

    def forward(self, x, mask):
        h = F.silu(self.before(x)).transpose(1, 2)
        if self.repaired:
            h = mw.conv1d(h, self.depthwise.weight, self.depthwise.bias, padding=2, groups=D, mask=mask)
        else:
            h = self.depthwise(h)
        return x + self.after(h.transpose(1, 2))


class WithNorm(nn.Module):
    """A norm over padded sequences, channels first."""

    def __init__(self, norm, takes_mask):
        super().__init__()
        self.project, self.norm, self.takes_mask = nn.Linear(D, D), norm, takes_mask

    def forward(self, x, mask):
        h = self.project(x).transpose(1, 2)
        h = self.norm(h, mask) if self.takes_mask else self.norm(h)
        return h.transpose(1, 2).relu()


class Pooled(nn.Module):
    def __init__(self, repaired):
        super().__init__()
        self.repaired, self.embed, self.head = repaired, nn.Embedding(50, D), nn.Linear(D, 3)

    def forward(self, input_ids, attention_mask):
        h = self.embed(input_ids)
        pooled = mw.mean(h, attention_mask.bool()[..., None], dim=1) if self.repaired else h.mean(1)
        return self.head(pooled)


class SelfAttention(nn.Module):
    def __init__(self, repaired):
        super().__init__()
        self.repaired = repaired
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (layer(x).view(*x.shape[:2], 2, D // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.repaired:
            h = mw.attention(q, k, v, mask[:, None, None, :], query_mask=mask)
        else:
            h = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return self.out(h.transpose(1, 2).flatten(2))


class AttentionModel(nn.Module):
    def __init__(self, repaired):
        super().__init__()
        self.layers = nn.ModuleList([SelfAttention(True), SelfAttention(repaired)])

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


class PackedModel(nn.Module):
    """Sequences packed into rows."""

    def __init__(self, repaired):
        super().__init__()
        self.repaired, self.embed = repaired, nn.Embedding(50, D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 50)

    def forward(self, input_ids, segment_ids):
        q, k, v = (each[:, None] for each in self.qkv(self.embed(input_ids)).chunk(3, -1))
        mask = mw.Mask.from_segments(segment_ids)[:, None] if self.repaired else None
        h = mw.attention(q, k, v, mask, is_causal=True) if self.repaired else F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # fmt: skip
        return self.out(h[:, 0])


class Positioned(nn.Module):
    """Learned positions."""

    def __init__(self, repaired):
        super().__init__()
        self.repaired, self.tokens, self.positions = repaired, nn.Embedding(50, D), nn.Embedding(64, D)

    def forward(self, input_ids, attention_mask):
        if self.repaired:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        else:
            positions = torch.arange(input_ids.shape[1])[None]
        return self.tokens(input_ids) + self.positions(positions)


def tokens(side="right"):
    return {"input_ids": torch.randint(1, 50, (B, L)), "attention_mask": keep_mask(side).long()}


SEGMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3] * 2)

#: name: (the model, repaired or not), the batch, the module, the cause, what the repair names, the modes.
LEAKS = {
    "Conformer-style convolution block": (
        ConformerBlock, lambda: (floats(), keep_mask()), "depthwise", "convolution over padding", "mw.conv1d",
        {"eval", "train"},
    ),
    "BatchNorm on padded sequences": (
        lambda repaired: WithNorm(mw.nn.MaskedBatchNorm1d(D) if repaired else nn.BatchNorm1d(D), repaired),
        lambda: (floats(), keep_mask()), "norm", "BatchNorm over padding", "mw.nn.MaskedBatchNorm1d(8)", {"train"},
    ),
    "mean pooling without mask": (Pooled, tokens, "", "mean without mask", "mw.mean", {"eval", "train"}),
    "attention without mask": (
        AttentionModel, lambda: (floats(), keep_mask()), "layers.1", "attention without mask", "mw.attention",
        {"eval", "train"},
    ),
    "HuBERT-style group norm": (
        lambda repaired: WithNorm(mw.nn.MaskedGroupNorm(D, D) if repaired else nn.GroupNorm(D, D), repaired),
        lambda: (floats(), keep_mask()), "norm", "GroupNorm over padding", "mw.nn.MaskedGroupNorm(8, 8)",
        {"eval", "train"},
    ),
    "packed batch without boundaries": (
        PackedModel, lambda: {"input_ids": torch.randint(1, 50, (2, L)), "segment_ids": SEGMENTS}, "",
        "packed sequences attend to each other", "mw.Mask.from_segments", {"eval", "train"},
    ),
    "left-padded positions": (
        Positioned, lambda: tokens("left"), "positions", "position ids from padding", "attention_mask.cumsum",
        {"eval"},
    ),
}  # fmt: skip
