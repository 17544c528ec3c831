"""Networks of the kinds that regions are for, small; and random chains of layers."""

from __future__ import annotations

import itertools
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block, as in a ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.is_plain = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.is_plain else self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, four stages of two blocks, and a head that pools the map."""

    def __init__(self, width: int = 8, classes: int = 5, *, head: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(a, b, 1 + (at > 0)), Block(b, b))
                for at, (a, b) in enumerate(itertools.pairwise(widths))
            )
        )
        self.head = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes)) if head else None
        )

    def forward(self, x: Tensor) -> Tensor:
        maps = self.stages(self.stem(x))
        return maps if self.head is None else self.head(maps)


class UNet(nn.Module):
    """Three levels down and up, with the maps of each level concatenated."""

    def __init__(self, width: int = 8, classes: int = 2, *, up: str = "transposed") -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]

        def twice(inputs: int, outputs: int) -> nn.Sequential:
            layers = []
            for each in (inputs, outputs):
                layers += [nn.Conv2d(each, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            return nn.Sequential(*layers)

        self.down = nn.ModuleList(twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = twice(widths[-1], widths[-1])
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(w, w, 2, 2) if up == "transposed" else nn.Upsample(scale_factor=2, mode=up)
            for w in [widths[-1], *widths[:0:-1]]
        )
        self.right = nn.ModuleList(
            twice(below + side, side) for below, side in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=False)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block, side in zip(self.ups, self.right, kept[::-1], strict=True):
            x = block(torch.cat([side, up(x)], 1))
        return self.head(x)


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in evaluation, with statistics and weights of its norms that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for each in (module.running_mean, module.bias):
                if each is not None:
                    each.data.copy_(0.3 * torch.randn(each.shape, generator=generator))
            for each in (module.running_var, module.weight):
                if each is not None:
                    each.data.copy_(torch.rand(each.shape, generator=generator) + 0.5)
    return model.eval().requires_grad_(False)


class Chain(nn.Module):
    """Random layers, some of whose results are added to, or concatenated with, earlier maps of the same positions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        channels, self.layers, self.plan = 3, nn.ModuleList(), []
        for _ in range(rng.randint(3, 7)):
            kind = rng.choice(("conv", "conv", "conv", "depthwise", "max", "avg", "up", "transposed", "act", "bn"))
            layer, channels = self._layer(kind, channels, rng)
            self.layers.append(layer)
            self.plan.append(rng.choice(("", "", "add", "cat", "mul")))
            if self.plan[-1] == "cat":
                channels *= 2

    def _layer(self, kind: str, channels: int, rng: random.Random) -> tuple[nn.Module, int]:
        outputs = rng.choice((2, 3, 4))
        kernel, stride, dilation = rng.choice((1, 2, 3, 5)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
        padding = rng.choice((0, kernel // 2, kernel - 1))
        if kind == "conv":
            mode = rng.choice(("zeros", "zeros", "replicate", "reflect" if padding < 2 else "zeros"))
            return nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, padding_mode=mode), outputs
        if kind == "depthwise":
            return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), channels
        if kind == "max":
            return nn.MaxPool2d(
                kernel, stride, min(padding, kernel // 2), dilation, ceil_mode=rng.random() < 0.3
            ), channels
        if kind == "avg":
            options = {"count_include_pad": rng.random() < 0.5, "ceil_mode": rng.random() < 0.2}
            return nn.AvgPool2d(kernel, stride, min(padding, kernel // 2), **options), channels
        if kind == "up":
            mode = rng.choice(("nearest", "bilinear", "bicubic"))
            return nn.Upsample(scale_factor=rng.choice((2, 3)), mode=mode), channels
        if kind == "transposed":
            more = rng.randrange(max(stride, dilation))
            return nn.ConvTranspose2d(
                channels, outputs, kernel, stride, min(padding, 1), more, 1, True, dilation
            ), outputs
        if kind == "bn":
            return nn.BatchNorm2d(channels), channels
        return rng.choice(
            (nn.GELU(), nn.PReLU(channels), nn.ReLU(inplace=True), nn.Softmax(1), nn.Dropout(0.5))
        ), channels

    def forward(self, x: Tensor) -> Tensor:
        for layer, then in zip(self.layers, self.plan, strict=True):
            x = layer(x)
            if then == "add":
                x = x + torch.tanh(x)
            elif then == "cat":
                x = torch.cat([x, x.sigmoid()], 1)
            elif then == "mul":
                x *= 0.5
        return x


def chain(seed: int, sizes: tuple[int, int]) -> Chain | None:
    """A random chain in evaluation, or None where a map becomes too small or too large."""
    model = settled(Chain(seed), seed)
    try:
        out = model(torch.zeros(1, 3, *sizes))
    except RuntimeError:
        return None
    return model if min(out.shape[2:]) > 0 and out.numel() < 10**6 else None
