"""Random convolutions, and what they must give: torch's own in float64, of zeros where nothing is valid."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import maskwise as mw

OURS = {
    (1, False): mw.conv1d,
    (2, False): mw.conv2d,
    (1, True): mw.conv_transpose1d,
    (2, True): mw.conv_transpose2d,
}
TORCHS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
}
ROUTES = ("dense", "tiles", "pixels", "rows")


@dataclass
class Case:
    """One convolution: its tensors, its masks and its options."""

    dims: int
    is_transposed: bool
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None
    outputs: Tensor | None
    other: float | Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = "transposed" if self.is_transposed else "conv"
        return f"{name}{self.dims}d-{'x'.join(map(str, self.x.shape))}-{'x'.join(map(str, self.weight.shape))}"

    @property
    def leaves(self) -> list[Tensor]:
        given = (self.x, self.weight, self.bias, self.other)
        return [t for t in given if isinstance(t, Tensor)]

    def ours(self, route: str | None = None) -> Tensor:
        with mw.force(route):
            return OURS[self.dims, self.is_transposed](
                self.x, self.weight, self.bias, **self.options, mask=self.mask, outputs=self.outputs, other=self.other
            )

    def wanted(self, result: Tensor) -> Tensor | None:
        """What is wanted where nothing says so: one position at a time, by the definition."""
        if self.outputs is not None or self.mask is None:
            return self.outputs
        mask = self.mask.expand(*self.x.shape[: -self.dims - 1], *self.x.shape[-self.dims :])
        for d in range(-self.dims, 0):
            index = [self.centre(o, d) for o in range(result.shape[d])]
            mask = mask.index_select(d, torch.tensor(index))
        return mask

    def centre(self, o: int, d: int) -> int:
        def of(name: str, default: int) -> int:
            value = self.options.get(name, default)
            return value if isinstance(value, int) else value[d]

        kernel, stride, dilation = self.weight.shape[d], of("stride", 1), of("dilation", 1)
        padding = self.options.get("padding", 0)
        if padding == "valid":
            before = 0
        elif padding == "same":
            before = dilation * (kernel - 1) // 2
        else:
            before = of("padding", 0)
        tap = dilation * ((kernel - 1) // 2)
        at = (o + before - tap) // stride if self.is_transposed else o * stride - before + tap
        return min(max(at, 0), self.x.shape[d] - 1)

    def truth(self) -> Tensor:
        channel = -self.dims - 1
        x = self.x if self.mask is None else torch.where(self.mask.unsqueeze(channel), self.x, 0.0)
        out = TORCHS[self.dims, self.is_transposed](x, self.weight, self.bias, **self.options)
        wanted = self.wanted(out)
        if wanted is None:
            return out
        other = 0.0 if self.other is None else self.other
        return torch.where(wanted.unsqueeze(channel), out, other)


def with_gradients(case: Case, out: Tensor) -> list[Tensor]:
    """A result, and the gradients of a weighted sum of it."""
    weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), case.leaves, allow_unused=True)
    zeros = (torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, case.leaves, strict=True))
    return [out.detach(), *zeros]


def random_case(seed: int) -> Case:
    """Sizes that are odd, small or of one position; strides, dilations, groups; nothing, some or all of it kept."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dims, is_transposed = rng.choice((1, 2, 2)), rng.random() < 0.4
    groups = rng.choice((1, 1, 1, 2, 3))
    depthwise = rng.random() < 0.25
    channels = 3 * groups if depthwise else groups * rng.choice((1, 2, 5))
    groups = channels if depthwise else groups
    out_channels = channels if depthwise else groups * rng.choice((1, 3, 4))
    largest = 40 if dims == 2 else 150
    while True:
        sizes = [rng.choice((1, 3, 8, 17, largest)) for _ in range(dims)]
        kernel = [rng.choice((1, 2, 3, 3, 5, 7)) for _ in range(dims)]
        stride = [rng.choice((1, 1, 1, 2, 3)) for _ in range(dims)]
        dilation = [rng.choice((1, 1, 2)) for _ in range(dims)]
        padding = [rng.choice((0, k // 2, k - 1)) for k in kernel]
        span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if is_transposed:
            options["output_padding"] = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
            fits = all((n - 1) * s - 2 * p + w > 0 for n, s, p, w in zip(sizes, stride, padding, span, strict=True))
        else:
            fits = all(n + 2 * p >= w for n, p, w in zip(sizes, padding, span, strict=True))
            if rng.random() < 0.2 and set(stride) == {1}:
                options["padding"], fits = "same", True
        if fits:
            break
    batch = [] if rng.random() < 0.2 else [rng.choice((1, 2, 3))]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = randn(*batch, channels, *sizes)
    if dims == 2 and batch and rng.random() < 0.4:
        x = x.contiguous(memory_format=torch.channels_last)
    elif rng.random() < 0.15:
        x = (
            x.transpose(-1, -2).contiguous().transpose(-1, -2)
            if dims == 2
            else randn(*batch, channels, 2 * sizes[0])[..., ::2]
        )
    shape = (channels, out_channels // groups) if is_transposed else (out_channels, channels // groups)
    weight, bias = randn(*shape, *kernel), randn(out_channels) if rng.random() < 0.7 else None
    case = Case(dims, is_transposed, x, weight, bias, None, None, None, options)
    out = case.truth()

    def bits(*shape: int) -> Tensor:
        kept = rng.choice((0.0, 0.05, 0.3, 0.7, 1.0))
        coarse = torch.rand(shape, generator=generator) < kept
        # Stretches, so that whole tiles are dropped.
        return (
            coarse if rng.random() < 0.5 else coarse.cummax(-1).values & (torch.rand(shape, generator=generator) < 0.9)
        )

    if rng.random() < 0.8:
        case.mask = bits(*batch, *sizes) if rng.random() < 0.8 else bits(*sizes)
    if case.mask is None or rng.random() < 0.4:
        case.outputs = bits(*batch, *out.shape[-dims:])
    case.other = rng.choice((None, None, 2.5, randn(*out.shape[-dims - 1 :])))
    for leaf in case.leaves:
        leaf.requires_grad_()
    return case
