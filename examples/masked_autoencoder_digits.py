"""A masked autoencoder on digits: the encoder computes the kept half of the patches only.

    pip install 'maskwise[examples]'
    python examples/masked_autoencoder_digits.py

Images of 8 x 8 are cut into 16 patches of 2 x 2, of which a random half is kept. `mw.apply` runs the encoder on kept
patches only, a masked mean pool averages their features, and the decoder reconstructs the image. The loss covers the
hidden patches.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw

SIDE, PIXELS, WIDTH, KEPT = 4, 4, 128, 8
PATCHES = SIDE * SIDE
SHADES = " ░▒▓█"


def patches_of(images: Tensor) -> Tensor:
    """(n, 64) → (n, 16 patches, 4 pixels)."""
    return images.view(-1, SIDE, 2, SIDE, 2).transpose(2, 3).reshape(-1, PATCHES, PIXELS)


class Autoencoder(nn.Module):
    """An MLP on each kept patch, a mean pool, and an MLP that reconstructs every patch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(PIXELS + PATCHES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.pool = mw.nn.MaskedMeanPool()
        self.decode = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, PATCHES * PIXELS))

    def forward(self, patches: Tensor, mask: mw.Mask) -> Tensor:
        """Reconstruct all patches (n, 16, 4) from those that the mask (n, 16) keeps."""
        positions = torch.eye(PATCHES).expand(len(patches), -1, -1)
        features = mw.apply(self.encode, torch.cat([patches, positions], -1), mask=mask)
        return self.decode(self.pool(features, mask)).view_as(patches)


def random_mask(n: int) -> mw.Mask:
    """Keep KEPT random patches of each image."""
    return mw.Mask(torch.rand(n, PATCHES).argsort(-1) < KEPT)


def render(patches: Tensor, mask: mw.Mask | None = None) -> list[str]:
    """The image as eight lines of text, with dots for hidden patches."""
    pixels = patches.clamp(0, 1) if mask is None else mw.fill(patches, mask[..., None], -1.0)
    image = pixels.view(SIDE, SIDE, 2, 2).transpose(1, 2).reshape(8, 8)
    return ["".join("··" if p < 0 else 2 * SHADES[min(4, int(5 * p))] for p in row) for row in image.tolist()]


if __name__ == "__main__":
    torch.manual_seed(0)
    patches = patches_of(torch.tensor(load_digits().data, dtype=torch.float32) / 16)
    train, test = patches[:1500], patches[1500:]
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        batch = train[torch.randint(len(train), (128,))]
        mask = random_mask(len(batch))
        optimizer.zero_grad()
        mw.loss(F.mse_loss, model(batch, mask), batch, ~mask[..., None]).backward()
        optimizer.step()

    mask = random_mask(len(test))
    with torch.no_grad():
        output = model(test, mask)
    hidden = ~mask[..., None]
    error = mw.loss(F.mse_loss, output, test, hidden)
    mean = mw.loss(F.mse_loss, train.mean(0).expand_as(test), test, hidden)
    print(f"error of hidden patches {error:.3f}, of the mean image {mean:.3f}; the encoder saw {mask.density:.0%}")
    print(f"{'digit':19}{'kept patches':19}reconstruction")
    for i in (0, 3):
        restored = torch.where(mask[i][:, None], test[i], output[i])
        images = (render(test[i]), render(test[i], mask[i]), render(restored))
        print("\n".join("   ".join(lines).rstrip() for lines in zip(*images, strict=True)), end="\n\n")
