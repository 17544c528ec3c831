"""A stream of images through a U-Net: each frame computes what has changed.

    python examples/video_stream.py

A square moves over a still background of 256 x 256. `mw.nn.Incremental` compares each frame with the last one, follows
the change through the layers, and recomputes the part of each map that it reaches. Results equal those of the model.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw

SIDE, WIDTH = 256, 16


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with a norm and an activation each."""
    layers: list[nn.Module] = []
    for each in (inputs, outputs):
        layers += [nn.Conv2d(each, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down and up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = twice(3, WIDTH), twice(WIDTH, 2 * WIDTH)
        self.bottom = twice(2 * WIDTH, 2 * WIDTH)
        self.up = nn.Upsample(scale_factor=2)
        self.third, self.fourth = twice(4 * WIDTH, 2 * WIDTH), twice(3 * WIDTH, WIDTH)
        self.head = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, 1, H, W)."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = self.up(self.bottom(F.max_pool2d(second, 2)))
        x = self.up(self.third(torch.cat([second, x], 1)))
        return self.head(self.fourth(torch.cat([first, x], 1)))


def frame(background: Tensor, at: int) -> Tensor:
    """The background with a square on it."""
    image = background.clone()
    image[..., 100:116, at : at + 16] = 1.0
    return image


def picture(difference: Tensor) -> str:
    """Where a result has changed, one sign for 16 x 16 positions."""
    cells = F.max_pool2d(difference.abs(), 16)[0, 0] > 1e-6
    return "\n".join("".join("██" if cell else "··" for cell in row) for row in cells.tolist())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = UNet().eval().requires_grad_(False)
    background = torch.rand(1, 3, SIDE, SIDE)
    incremental = mw.nn.Incremental(model)
    last = incremental(frame(background, 20))
    times, largest = [0.0, 0.0], 0.0
    for at in range(24, 64, 4):
        image = frame(background, at)
        start = time.perf_counter()
        result = incremental.update(image)
        middle = time.perf_counter()
        truth = model(image)
        times = [times[0] + middle - start, times[1] + time.perf_counter() - middle]
        largest = max(largest, float((result - truth).abs().max()))
        difference, last = result - last, result
    print(incremental.report)
    print("what the last frame has changed of the result:")
    print(picture(difference))
    print(f"{100 * incremental.report.share:.1f} % of all positions were computed; largest difference {largest:.1e}")
    print(f"{times[1] / times[0]:.1f} x faster than the model")
