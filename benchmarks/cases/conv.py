"""Convolutions of regions against torch's own of the whole map, as it is and with masks around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskwise as mw
from benchmarks.case import Case, Side, Target, at_least, at_most, never_slower
from benchmarks.cases.sides import Call, torch_dtype

__all__ = ["cases"]

FLOOR, FLOOR_LAST, IDIOM = "unmasked, contiguous", "unmasked, channels_last", "where+conv+where"
#: The side of a square of wanted positions.
_SIDE = 8


@dataclass(frozen=True)
class Inputs:
    """A map, its weight, and which positions are valid and wanted: (batch, *positions)."""

    x: Tensor
    weight: Tensor
    keep: Tensor
    options: dict[str, Any]

    @property
    def dense(self) -> Callable[..., Tensor]:
        return F.conv1d if self.x.dim() == 3 else F.conv2d

    @property
    def ours(self) -> Callable[..., Tensor]:
        return mw.conv1d if self.x.dim() == 3 else mw.conv2d


def _squares(case: Case, generator: torch.Generator) -> Tensor:
    """Squares of positions on a grid, so many of them that the density is kept."""
    rows, columns = (-(-size // _SIDE) for size in case.shape[2:])
    order = torch.randperm(rows * columns, generator=generator)
    chosen = order < max(1, round((case.density or 0.0) * rows * columns))
    grid = chosen.view(rows, columns).repeat_interleave(_SIDE, 0).repeat_interleave(_SIDE, 1)
    return grid[: case.shape[2], : case.shape[3]].expand(case.shape[0], *case.shape[2:])


def _pixels(case: Case, generator: torch.Generator) -> Tensor:
    return torch.rand(case.shape[0], *case.shape[2:], generator=generator) < (case.density or 0.0)


def _padded(case: Case, generator: torch.Generator) -> Tensor:
    """Entries of a batch that are padded to the largest: of images, along both dims."""
    share = (case.density or 0.0) ** (1 / (len(case.shape) - 2))
    keep = torch.ones(case.shape[0], *case.shape[2:], dtype=torch.bool)
    for d, size in enumerate(case.shape[2:]):
        lengths = (torch.linspace(0.6, 1.4, case.shape[0]) * share * size).round().clamp(1, size)
        at = torch.arange(size).view(-1, *[1] * (len(case.shape) - 3 - d))
        keep &= at < lengths.view(-1, *[1] * (len(case.shape) - 2))
    return keep


def _setup(
    make: Callable[[Case, torch.Generator], Tensor], kernel: int, *, depthwise: bool = False, last: bool = False
) -> Callable[[Case], Inputs]:
    def build(case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        channels, dims = case.shape[1], len(case.shape) - 2
        x = torch.rand(case.shape, generator=generator).to(torch_dtype(case))
        shape = (channels, 1 if depthwise else channels, *[kernel] * dims)
        weight = torch.rand(shape, generator=generator).to(torch_dtype(case))
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        options = {"padding": kernel // 2, "groups": channels if depthwise else 1}
        return Inputs(x, weight, make(case, generator).contiguous(), options)

    return build


def _ours(i: Inputs) -> Call:
    return lambda: i.ours(i.x, i.weight, **i.options, mask=i.keep)


def _idiom(i: Inputs) -> Call:
    kept = i.keep.unsqueeze(1)
    return lambda: torch.where(kept, i.dense(torch.where(kept, i.x, 0.0), i.weight, **i.options), 0.0)


def _unmasked(layout: torch.memory_format) -> Callable[[Inputs], Call]:
    def build(i: Inputs) -> Call:
        x = i.x.contiguous(memory_format=layout) if i.x.dim() == 4 else i.x
        if i.x.requires_grad:
            x = x.detach().requires_grad_()
        return lambda: i.dense(x, i.weight, **i.options)

    return build


def _with_backward(side: Side) -> Side:
    """The result with its gradients for x and weight; a floor has those of its own x, which nothing compares."""

    def build(i: Inputs) -> Call:
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (i.x, i.weight)]
        forward: Call = side.prepare(replace(i, x=leaves[0], weight=leaves[1]))
        above = torch.rand(i.x.shape, generator=torch.Generator().manual_seed(1)).to(i.x)
        above = above if i.x.is_contiguous() else above.contiguous(memory_format=torch.channels_last)

        def run() -> tuple[Tensor, ...]:
            out = forward()
            if side.kind == "floor":
                # All there is to differentiate: its x is a copy in another layout.
                out.backward(above)
                return ()
            return torch.autograd.grad(out, leaves, above)

        return run

    return replace(side, prepare=build)


_SIDES = (
    Side("mw.conv", _ours, kind="ours"),
    Side(IDIOM, _idiom),
    Side(FLOOR, _unmasked(torch.contiguous_format), kind="floor"),
    Side(FLOOR_LAST, _unmasked(torch.channels_last), kind="floor"),
)
_BACKWARD = tuple(map(_with_backward, _SIDES))
#: By the share of tiles: how many times faster than torch's own of the whole map, in the faster of its two layouts.
_FORWARD_TARGETS = {2: 9.0, 5: 9.0, 10: 5.2, 25: 2.7, 50: 1.0, 60: 1.0}
_BOTH_TARGETS = {5: 8.5, 10: 5.5, 25: 2.7, 50: 1.0}


def _faster(factor: float) -> tuple[Target, ...]:
    return (at_least(factor, FLOOR), at_least(factor, FLOOR_LAST), never_slower(IDIOM))


def _at_most(factor: float, sides: tuple[Side, ...]) -> tuple[Target, ...]:
    return (*(at_most(factor, side.name) for side in sides if side.kind == "floor"), never_slower(IDIOM))


# -- whole networks ----------------------------------------------------------------------------------------------------
class _Block(nn.Module):
    """A residual block, as in a ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        is_plain = stride == 1 and inputs == outputs
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module = nn.Identity() if is_plain else shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))
        return out


def _resnet() -> nn.Module:
    """The layers and widths of a ResNet-18, without its classifier."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    blocks = [
        block
        for at in range(4)
        for block in (
            _Block(widths[at], widths[at + 1], 1 if at == 0 else 2),
            _Block(widths[at + 1], widths[at + 1], 1),
        )
    ]
    return nn.Sequential(*stem, *blocks)


class _UNet(nn.Module):
    """Three levels of 32, 64 and 128 channels down and up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128)
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = _twice(128, 128)
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w, 2, 2) for w in (128, 128, 64))
        self.right = nn.ModuleList(_twice(a, b) for a, b in ((256, 128), (192, 64), (96, 32)))
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for block in self.down:
            levels.append(block(x))
            x = F.max_pool2d(levels[-1], 2)
        x = self.middle(x)
        for up, block, level in zip(self.up, self.right, levels[::-1], strict=True):
            x = block(torch.cat([level, up(x)], 1))
        out: Tensor = self.head(x)
        return out


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for each in (inputs, outputs):
        layers += [nn.Conv2d(each, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Network:
    """A network in evaluation, its input, which positions of that are valid, and an edit of it."""

    model: nn.Module
    x: Tensor
    mask: Tensor
    edited: Tensor
    box: tuple[slice, slice]


#: The side of the patches of a network: as many pixels as its last map has one position for.
_PATCH = 32


def _network(make: Callable[[], nn.Module]) -> Callable[[Case], Network]:
    def build(case: Case) -> Network:
        torch.manual_seed(0)
        model = make().eval().requires_grad_(False)
        x = torch.rand(case.shape)
        rows, columns = (size // _PATCH for size in case.shape[2:])
        chosen = torch.randperm(rows * columns) < max(1, round((case.density or 0.0) * rows * columns))
        mask = chosen.view(rows, columns).repeat_interleave(_PATCH, 0).repeat_interleave(_PATCH, 1)
        side = round(((case.density or 0.0) * case.shape[2] * case.shape[3]) ** 0.5)
        box = (slice(200, 200 + side), slice(100, 100 + side))
        edited = x.clone()
        edited[..., box[0], box[1]] += 1.0
        return Network(model, x, mask.expand(case.shape[0], *mask.shape).contiguous(), edited, box)

    return build


def _on_regions(i: Network) -> Call:
    regions = mw.nn.Regions(i.model)
    return lambda: regions(i.x, i.mask)


def _update(i: Network) -> Call:
    incremental = mw.nn.Incremental(i.model)
    incremental(i.x)
    return lambda: incremental.update(i.edited, i.box)


def _whole(layout: torch.memory_format, *, edited: bool = False) -> Callable[[Network], Call]:
    def build(i: Network) -> Call:
        model = copy.deepcopy(i.model).to(memory_format=layout)
        x = (i.edited if edited else i.x).contiguous(memory_format=layout)

        def run() -> Tensor:
            with torch.no_grad():
                out: Tensor = model(x)
                return out

        return run

    return build


def _networks(base: Case) -> list[Case]:
    regions = (
        Side("mw.nn.Regions", _on_regions, kind="ours"),
        Side(FLOOR, _whole(torch.contiguous_format), kind="floor"),
        Side(FLOOR_LAST, _whole(torch.channels_last), kind="floor"),
    )
    update = (
        Side("mw.nn.Incremental", _update, kind="ours"),
        Side("the model again", _whole(torch.contiguous_format, edited=True)),
        Side(FLOOR_LAST, _whole(torch.channels_last, edited=True), kind="floor"),
    )
    on = replace(base, function="Regions", sides=regions, density=0.05)
    again = replace(base, function="Incremental", sides=update, density=0.01, shape=(1, 3, 512, 512))
    six = (at_least(6.0, FLOOR), at_least(6.0, FLOOR_LAST))
    eight = (at_least(8.0, "the model again"), at_least(8.0, FLOOR_LAST))
    return [
        replace(on, variant="ResNet-18 tiles=5%", setup=_network(_resnet), shape=(1, 3, 512, 512), targets=six),
        replace(on, variant="ResNet-18 batch=4 tiles=5%", setup=_network(_resnet), shape=(4, 3, 512, 512), targets=six),
        replace(on, variant="U-Net tiles=5%", setup=_network(_UNet), shape=(1, 3, 512, 512), targets=six),
        replace(again, variant="U-Net edit=1%", setup=_network(_UNet), targets=eight),
        # Its deep layers see most of the image, so an edit reaches most of their maps.
        replace(
            again, variant="ResNet-18 edit=1%", setup=_network(_resnet), targets=(never_slower("the model again"),)
        ),
    ]


def cases() -> tuple[Case, ...]:
    """Return the cases of convolutions."""
    # Sums of some hundred products of values in [0, 1), in float32; gradients of some ten thousand.
    base = Case("conv", "conv2d", "", _setup(_squares, 3), _SIDES, (1, 64, 256, 256), relative_tolerance=1e-3)
    found = []
    for last in (False, True):
        layout = "channels_last" if last else "contiguous"
        setup = _setup(_squares, 3, last=last)
        for share, factor in _FORWARD_TARGETS.items():
            variant = f"3x3 {layout} tiles={share}%"
            found.append(replace(base, variant=variant, setup=setup, density=share / 100, targets=_faster(factor)))
        for share, factor in _BOTH_TARGETS.items():
            variant = f"3x3 {layout} tiles={share}% forward+backward"
            found.append(
                replace(
                    base, variant=variant, setup=setup, density=share / 100, sides=_BACKWARD, targets=_faster(factor)
                )
            )
    random = _setup(_pixels, 3)
    found += [
        replace(base, variant="3x3 random pixels=2%", setup=random, density=0.02, targets=_faster(5.0)),
        replace(base, variant="3x3 everywhere", density=1.0, targets=(never_slower(IDIOM),)),
    ]
    one_layout = tuple(side for side in _SIDES if side.name != FLOOR_LAST)
    wide, long = _setup(_padded, 7, depthwise=True), _setup(_padded, 31, depthwise=True)
    for sides, suffix in ((_SIDES, ""), (_BACKWARD, " forward+backward")):
        some = tuple(side for side in sides if side.name in {each.name for each in one_layout})
        found += [
            replace(
                base,
                variant=f"7x7 depthwise padded images keep=40%{suffix}",
                setup=wide,
                shape=(4, 64, 128, 128),
                density=0.4,
                sides=sides,
                targets=_at_most(0.5, sides),
            ),
            replace(
                base,
                variant=f"7x7 depthwise tiles=40%{suffix}",
                setup=_setup(_squares, 7, depthwise=True),
                shape=(4, 64, 128, 128),
                density=0.4,
                sides=sides,
                targets=_at_most(0.5, sides),
            ),
            replace(
                base,
                function="conv1d",
                variant=f"31 depthwise lengths keep=40%{suffix}",
                setup=long,
                shape=(16, 256, 512),
                density=0.4,
                sides=some,
                targets=_at_most(0.5, some),
            ),
            replace(
                base,
                function="conv1d",
                variant=f"31 lengths keep=40%{suffix}",
                setup=_setup(_padded, 31),
                shape=(16, 64, 512),
                density=0.4,
                sides=some,
                targets=_at_most(0.5, some),
            ),
        ]
    tiny = replace(base, shape=(1, 4, 8, 8), density=0.5, targets=(never_slower(IDIOM),))
    return (*found, *_networks(base), replace(tiny, variant="3x3 1x4x8x8"))
