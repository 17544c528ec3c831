"""Masked image modelling with a ConvNet: the encoder computes visible patches only.

    pip install 'maskwise[examples]'
    python examples/masked_image_modelling.py

Images of 8 x 8 are cut into 16 patches of 2 x 2, of which a random six are visible. `mw.nn.Regions` runs an ordinary
ConvNet on those: hidden pixels are not read and not computed, and its batch norms take the statistics of visible
positions, so the encoder learns no trick from the holes. A light decoder draws the hidden patches.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw

GRID, PATCH, VISIBLE, WIDTH = 4, 2, 6, 32
SHADES = " ░▒▓█"


def encoder() -> nn.Module:
    """Two convolutions at full resolution, and two at a position for each patch."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
    )  # fmt: skip


class Modeller(nn.Module):
    """A ConvNet on visible patches, a token for hidden ones, and a decoder of the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = mw.nn.Regions(encoder())
        self.hidden = nn.Parameter(torch.zeros(WIDTH, 1, 1))
        self.decode = nn.Sequential(
            nn.Flatten(), nn.Linear(WIDTH * GRID * GRID, 256), nn.ReLU(), nn.Linear(256, 64), nn.Unflatten(1, (1, 8, 8))
        )

    def forward(self, images: Tensor, visible: Tensor) -> Tensor:
        """Draw images (n, 1, 8, 8) from their visible patches (n, 4, 4)."""
        features = self.encode(images, as_pixels(visible))
        return self.decode(torch.where(visible[:, None], features, self.hidden))


def as_pixels(patches: Tensor) -> Tensor:
    """A mask of patches as one of pixels."""
    return patches.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)


def random_patches(n: int) -> Tensor:
    """VISIBLE random patches of each image."""
    return (torch.rand(n, GRID * GRID).argsort(-1) < VISIBLE).view(n, GRID, GRID)


def render(image: Tensor, mask: Tensor | None = None) -> list[str]:
    """An image as eight lines of text, with dots for hidden pixels."""
    pixels = image[0].clamp(0, 1) if mask is None else torch.where(mask, image[0], -1.0)
    return ["".join("··" if p < 0 else 2 * SHADES[min(4, int(5 * p))] for p in row) for row in pixels.tolist()]


if __name__ == "__main__":
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    train, test = images[:1500], images[1500:]
    model = Modeller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        batch = train[torch.randint(len(train), (64,))]
        visible = random_patches(len(batch))
        # What is hidden cannot leak: not even a NaN would.
        given = torch.where(as_pixels(visible)[:, None], batch, float("nan"))
        loss = mw.loss(F.mse_loss, model(given, visible), batch, ~as_pixels(visible)[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    visible = random_patches(len(test))
    with torch.no_grad():
        drawn = model(test, visible)
    hidden = ~as_pixels(visible)[:, None]
    ours, mean = (mw.loss(F.mse_loss, guess.expand_as(test), test, hidden) for guess in (drawn, train.mean(0)))
    print(f"squared error of hidden pixels: {ours:.4f}, of the mean image {mean:.4f}")
    print(f"the encoder computed {100 * VISIBLE / GRID**2:.0f} % of the positions")
    columns = (render(test[3], as_pixels(visible)[3]), render(drawn[3]), render(test[3]))
    print("visible          drawn            the digit")
    print("\n".join(" ".join(lines) for lines in zip(*columns, strict=True)))
