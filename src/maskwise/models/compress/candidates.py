"""The exact replacements of a layer, and the choice between them: all are timed on its input, and the fastest wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from maskwise.models.compress.live_units import without_dead_units
from maskwise.nn import SparseLinear
from maskwise.ops.backends import is_kernel_allowed
from maskwise.ops.linear import BLOCKS, Block
from maskwise.plan.measure import measure, synced_timer

__all__ = ["DENSE", "MARGIN", "Choice", "Layer", "Times", "candidates", "choose", "time_calls"]

DENSE = "dense"
#: Above this share of kept weights no kernel beats the dense product, and none is tried.
TOO_DENSE = 0.75
#: Blocks may store this many values per kept one; the others are stored zeros.
COVER = 1.25
#: The ratio of times below which one call counts as faster than another: less is noise.
MARGIN = 0.97
#: The fewest and the most rounds, and how long one sample lasts at least, in seconds.
ROUNDS = (7, 60)
SAMPLE = 2e-4
#: The ratio of median and best time above which up to three times the rounds are taken: the machine is busy.
NOISY = 1.3


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution, and which of its weights are kept."""

    module: nn.Linear | nn.Conv2d
    live: Tensor  # bool, of the weight's shape

    @classmethod
    def of(cls, module: nn.Linear | nn.Conv2d, mask: Tensor | None = None) -> Layer:
        """The layer with this mask, or that of its nonzero weights if the mask does not cover them."""
        nonzero = module.weight.detach() != 0
        if mask is None or mask.shape != nonzero.shape or bool((nonzero & ~mask).any()):
            mask = nonzero
        return cls(module, mask)

    @property
    def kept(self) -> int:
        """How many weights are kept."""
        return int(self.live.sum())

    @property
    def density(self) -> float:
        """The share of weights that is kept; 1 for a layer without weights."""
        return self.kept / self.live.numel() if self.live.numel() else 1.0


def candidates(layer: Layer, x: Tensor) -> tuple[dict[str, nn.Module], list[str]]:
    """The exact replacements of this layer for such an input, and why there are no others."""
    module, found = layer.module, dict[str, nn.Module]()
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return {}, ["groups tie its channels together"]
    live = without_dead_units(module)
    if live is not None:
        found["live units"] = live
    if isinstance(module, nn.Conv2d):
        return found, [] if found else ["no whole channel is dead, and there is no sparse convolution"]
    if not is_kernel_allowed("linear", x.device.type, module.weight.dtype):
        return found, [f"there is no sparse kernel for {module.weight.dtype} on {x.device.type}"]
    if layer.density > TOO_DENSE:
        return found, ["too dense for a sparse kernel"]
    for block in BLOCKS:
        cover = _cover(layer.live, block)
        if int(cover.sum()) <= COVER * layer.kept:
            name = "sparse" if block == (1, 1) else f"sparse {block[0]}x{block[1]}"
            found[name] = _sparse(module, cover, block)
    return found, []


def _cover(live: Tensor, block: Block) -> Tensor:
    """The mask of all blocks with a kept weight."""
    if block == (1, 1):
        return live
    height, width = block
    padded = nn.functional.pad(live, (0, -live.shape[1] % width, 0, -live.shape[0] % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    cover = blocks.any(3, keepdim=True).any(1, keepdim=True).expand_as(blocks).reshape(padded.shape)
    return cover[: live.shape[0], : live.shape[1]]


@torch.no_grad()
def _sparse(linear: nn.Linear, mask: Tensor, block: Block) -> SparseLinear:
    sparse = SparseLinear.from_linear(linear, mask, block=block)
    sparse.values.requires_grad_(linear.weight.requires_grad)
    if sparse.bias is not None:
        sparse.bias.requires_grad_(linear.bias.requires_grad)
    return sparse


# -- times -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """Seconds per call."""

    best: float
    median: float

    def beats(self, other: Times) -> bool:
        """Whether this is faster by more than noise: by the best times, which other processes disturb the least.

        >>> Times(0.9, 1.0).beats(Times(1.0, 1.1)), Times(0.99, 1.0).beats(Times(1.0, 1.1))
        (True, False)
        """
        return self.best < MARGIN * other.best


def time_calls(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Time calls, interleaved in rounds, for about this long in all.

    >>> sorted(time_calls({"a": lambda: None, "b": lambda: None}, 0.01))
    ['a', 'b']
    """
    timer = synced_timer("cuda") if torch.cuda.is_available() else None
    samples = measure(calls, budget=seconds, rounds=ROUNDS, sample_seconds=SAMPLE, timer=timer, noisy=NOISY)
    return {name: Times(samples.best(name), samples.median(name)) for name in calls}


# -- the choice --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Choice:
    """The module chosen for one layer, why, its times, and those of the layer before."""

    kind: str
    module: nn.Module
    reason: str
    times: Times | None = None
    before: Times | None = None
    #: Whether the layer must stay as it is, so that its neighbours cannot change it either.
    is_fixed: bool = False


def choose(
    layer: Layer, x: Tensor, seconds: float, before: nn.Module | None = None, *, why_dense: str | None = None
) -> Choice:
    """Time the candidates of a layer on an input; dense wins unless another is faster by more than noise.

    >>> layer = Layer.of(nn.Linear(2, 2))
    >>> choose(layer, torch.ones(1, 2), 0.01).kind
    'dense'

    Args:
        layer: the layer.
        x: its input.
        seconds: about how long to measure.
        before: what the layer was before its mask was materialized, timed for the report.
        why_dense: the reason why it must stay dense, if it must.
    """
    # Under autocast, the input may have another dtype than the weight.
    x = x.to(layer.module.weight.dtype)
    found, refused = candidates(layer, x) if why_dense is None else ({}, [why_dense] if layer.density < 1 else [])
    modules: dict[str, nn.Module] = {DENSE: layer.module, **found}
    if before is not None:
        modules["before"] = before
    with torch.no_grad():
        times = time_calls({name: partial(module, x) for name, module in modules.items()}, seconds)
    faster = [name for name in found if times[name].beats(times[DENSE])]
    best = min(faster, key=lambda name: times[name].best, default=DENSE)
    if best == DENSE:
        slower = [f"{name} took {times[name].best / times[DENSE].best:.2f} × as long" for name in found]
        reasons = [*refused, *slower]
    else:
        reasons = [f"{times[DENSE].best / times[best].best:.2f} × as fast as dense"]
    reason = "; ".join([f"{layer.density:.1%} kept", *reasons])
    return Choice(best, modules[best], reason, times[best], times["before" if before is not None else DENSE])
