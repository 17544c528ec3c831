"""A Conformer's convolution that padding cannot reach.

    python examples/conformer_padding.py

The depthwise convolution of a Conformer reads 31 frames, so the last frames of a short utterance read padding: what the
layers below have made of it, which is not zero. With `mw.conv1d` and a masked norm, an utterance gives the same alone
and in a padded batch, and padded frames are not computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import maskwise as mw

WIDTH, KERNEL = 64, 31


class ConvolutionModule(nn.Module):
    """The convolution module of a Conformer: (B, L, D) and a mask (B, L) to (B, L, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.depthwise = mw.nn.RegionConv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)
        self.batch_norm = mw.nn.MaskedBatchNorm1d(WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: mw.Mask | None = None) -> Tensor:
        """Mix frames; without a mask, as a Conformer does."""
        frames = nn.functional.glu(self.widen(self.norm(x)), -1).transpose(1, 2)
        frames = self.batch_norm(self.depthwise(frames, mask), mask)
        return x + self.narrow(nn.functional.silu(frames).transpose(1, 2))


def picture(error: Tensor) -> str:
    """Errors of frames as text: one sign for each, dots for none."""
    return "".join("·" if e < 1e-5 else "▒" if e < 0.1 else "█" for e in error.tolist())


if __name__ == "__main__":
    torch.manual_seed(0)
    module = ConvolutionModule().eval().requires_grad_(False)
    lengths = [60, 25]
    mask = mw.Mask.from_lengths(lengths, max_len=60)
    batch = torch.randn(2, 60, WIDTH)
    alone = module(batch[1:, :25])[0]
    naive = (module(batch)[1, :25] - alone).abs().amax(-1)
    masked = (module(batch, mask)[1, :25] - alone).abs().amax(-1)
    print("frames of the short utterance that differ from those of the utterance alone")
    print(f"  without a mask: {picture(naive)}  largest {naive.max():.2f}")
    print(f"  with a mask:    {picture(masked)}  largest {masked.max():.1e}")
    with mw.explain() as log:
        module.depthwise(torch.randn(16, WIDTH, 512), mw.Mask.from_lengths([205] * 16, max_len=512))
    call = log.calls[0]
    print(f"of 16 x 512 frames, 40 % of them real, {call.computed / call.elements:.0%} are computed ({call.route})")
