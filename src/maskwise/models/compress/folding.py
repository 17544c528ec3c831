"""Constant folding of units: those whose output is constant, and those that the next layer does not read.

A unit without a kept weight outputs its bias for every input. In the next layer that is a constant, which is added
to the bias there. A unit that the next layer does not read is removed altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from maskwise.models.compress.candidates import MARGIN, Choice, Layer, choose
from maskwise.models.compress.chains import Link
from maskwise.models.compress.surgery import dense_like

__all__ = ["Swap", "choose_folded", "connected"]


@dataclass
class Swap:
    """Modules that replace others, all or none of them."""

    choices: dict[nn.Module, Choice]  # by the layer that is replaced
    norms: dict[nn.Module, nn.Module] = field(default_factory=dict)
    #: The module that joins layers which have fewer units now, and in which alone they may run.
    owner: nn.Module | None = None


@dataclass
class _Folded:
    """What is left of a layer."""

    weight: Tensor
    bias: Tensor | None
    live: Tensor
    #: The indices, in the original layer, of the inputs and outputs that are left.
    inputs: Tensor
    outputs: Tensor
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, layer: Layer) -> _Folded:
        weight = layer.module.weight.detach()
        bias = None if layer.module.bias is None else layer.module.bias.detach()
        outputs, inputs = (torch.arange(size, device=weight.device) for size in weight.shape[:2])
        return cls(weight, bias, layer.live, inputs, outputs)


def connected(links: list[Link]) -> list[list[Link]]:
    """The links, grouped into chains."""
    found: list[list[Link]] = []
    for link in links:
        for chain in found:
            if any(link.first is other.second or link.second is other.first for other in chain):
                chain.append(link)
                break
        else:
            found.append([link])
    return found


def choose_folded(
    links: list[Link],
    layers: dict[nn.Module, Layer],
    inputs: dict[nn.Module, Tensor],
    alone: dict[nn.Module, Choice],
    why_dense: dict[nn.Module, str],
    seconds: float,
) -> Swap | None:
    """The layers of a chain without the units that need not be computed, if that is faster.

    Args:
        links: the chain.
        layers: the layers, by module.
        inputs: the input of each.
        alone: the choice for each without folding.
        why_dense: which of them must stay dense, and why.
        seconds: about how long to measure each.
    """
    folded, norms = _fold(links, layers)
    choices: dict[nn.Module, Choice] = {}
    for module, left in folded.items():
        if not left.notes:
            continue
        layer = Layer(dense_like(layers[module].module, left.weight, left.bias), left.live)
        x = inputs[module].index_select(-1 if isinstance(module, nn.Linear) else -3, left.inputs)
        choice = choose(layer, x, seconds, why_dense=why_dense.get(module))
        reason = f"{', '.join(dict.fromkeys(left.notes))}; {choice.reason}"
        choices[module] = Choice(f"smaller {choice.kind}", choice.module, reason, choice.times, alone[module].before)
    # The ops between the layers are smaller as well, so equal times but for noise are enough.
    if not choices or _total(choices) * MARGIN > _total({module: alone[module] for module in choices}):
        return None
    return Swap(choices, {norm: _shrink_norm(norm, units) for norm, units in norms.items()}, links[0].owner)


def _total(choices: dict[nn.Module, Choice]) -> float:
    return sum(choice.times.best for choice in choices.values() if choice.times is not None)


@torch.no_grad()
def _fold(
    links: list[Link], layers: dict[nn.Module, Layer]
) -> tuple[dict[nn.Module, _Folded], dict[nn.Module, Tensor]]:
    """What is left of each layer of a chain, and which units are left of each norm between them."""
    modules: list[nn.Module] = [layer for link in links for layer in (link.first, link.second)]
    folded = {module: _Folded.of(layers[module]) for module in dict.fromkeys(modules)}
    norms: dict[nn.Module, Tensor] = {}
    # A unit removed from one layer may make one of its neighbours dead or unread.
    while sum(_fold_link(link, folded, norms) for link in links):
        pass
    return folded, norms


def _fold_link(link: Link, folded: dict[nn.Module, _Folded], norms: dict[nn.Module, Tensor]) -> bool:
    """Remove the units between two layers that need not be computed; returns whether there were any."""
    first, second = folded[link.first], folded[link.second]
    dead = ~(first.weight != 0).flatten(1).any(1)
    unread = ~(second.weight != 0).transpose(0, 1).flatten(1).any(1)
    constants = _constants(link, first)
    folds = dead & ~unread & constants.isfinite()
    if isinstance(link.second, nn.Conv2d) and not _is_unpadded(link.second):
        # At its border the convolution reads zeros instead of the constant.
        folds &= constants == 0
    drop = folds | unread
    if drop.numel() and bool(drop.all()):
        # A layer needs at least one unit.
        drop[0] = folds[0] = False
    if not bool(drop.any()):
        return False
    total = second.weight.double().flatten(2).sum(2) if second.weight.dim() > 2 else second.weight.double()
    total = total @ torch.where(folds, constants.double(), 0.0)
    if bool((total != 0).any()):
        second.bias = (total if second.bias is None else second.bias.double() + total).to(second.weight.dtype)
    keep = (~drop).nonzero().reshape(-1)
    first.weight, first.live, first.outputs = first.weight[keep], first.live[keep], first.outputs[keep]
    first.bias = None if first.bias is None else first.bias[keep]
    second.weight, second.live, second.inputs = second.weight[:, keep], second.live[:, keep], second.inputs[keep]
    for op in link.ops:
        if isinstance(op.module, nn.BatchNorm1d | nn.BatchNorm2d):
            norms[op.module] = first.outputs
    dropped, constant = int(drop.sum()), int(folds.sum())
    first.notes.append(f"{dropped} outputs removed")
    second.notes.append(
        f"{dropped} inputs removed" + (f", {constant} of them folded into its bias" if constant else "")
    )
    return True


def _constants(link: Link, first: _Folded) -> Tensor:
    """The inputs of the next layer if this layer outputs its bias: (units,)."""
    bias = first.weight.new_zeros(first.weight.shape[0]) if first.bias is None else first.bias
    # At their original indices, since norms have parameters for all units.
    values = bias.new_zeros(link.first.weight.shape[0]).index_copy(0, first.outputs, bias)
    values = values[None] if isinstance(link.first, nn.Linear) else values[None, :, None, None]
    for op in link.ops:
        # Activations may work in place.
        values = op.run(values.clone())
    return values.reshape(-1)[first.outputs]


def _is_unpadded(conv: nn.Conv2d) -> bool:
    return conv.padding == "valid" or (not isinstance(conv.padding, str) and not any(conv.padding))


@torch.no_grad()
def _shrink_norm(norm: nn.Module, units: Tensor) -> nn.Module:
    """A batch norm of these units only."""
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    small = type(norm)(units.numel(), norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    tensors = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    for name, tensor in norm.state_dict().items():
        tensors[name].data = tensor[units].clone() if tensor.dim() else tensor.clone()
    return small.train(norm.training)
