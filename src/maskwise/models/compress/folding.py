"""Units that need not be computed: those that nobody reads, and those that are always the same.

A unit of a layer of which no weight is kept puts out its bias, whatever comes in. What that becomes in the next layer
is a constant, and is added to the next layer's bias. A unit that the next layer does not read is left out altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from maskwise.models.compress.candidates import Layer, rebuilt
from maskwise.models.compress.chains import Link
from maskwise.models.compress.elementwise import Step

__all__ = ["Folded", "fold", "groups"]


@dataclass
class Folded:
    """A layer while units are folded: what is left of it."""

    weight: Tensor
    bias: Tensor | None
    live: Tensor
    #: Which of the first inputs and outputs are left.
    inputs: Tensor
    outputs: Tensor
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, layer: Layer) -> Folded:
        """All of a layer."""
        weight = layer.module.weight.detach()
        bias = None if layer.module.bias is None else layer.module.bias.detach()
        units = [torch.arange(size, device=weight.device) for size in weight.shape[:2]]
        return cls(weight, bias, layer.live, units[1], units[0])

    @property
    def changed(self) -> bool:
        """Whether anything was folded."""
        return bool(self.notes)

    def built(self, module: nn.Linear | nn.Conv2d) -> Layer:
        """The layer that is left."""
        return Layer(rebuilt(module, self.weight, self.bias), self.live)


@dataclass
class Group:
    """Layers that are linked to each other, and what is left of them and of the norms between them."""

    links: list[Link]
    layers: dict[nn.Module, Folded]
    norms: dict[nn.Module, Tensor] = field(default_factory=dict)  # which of its units are left


def groups(links: list[Link]) -> list[list[Link]]:
    """The links that hang together."""
    found: list[list[Link]] = []
    for link in links:
        for group in found:
            if any(link.first is other.second or link.second is other.first for other in group):
                group.append(link)
                break
        else:
            found.append([link])
    return found


@torch.no_grad()
def fold(links: list[Link], layers: dict[nn.Module, Layer]) -> Group:
    """Leave out of these layers, which hang together, all units that need not be computed."""
    left: dict[nn.Module, Folded] = {
        layer: Folded.of(layers[layer]) for link in links for layer in (link.first, link.second)
    }
    group = Group(links, left)
    # What is left out of one layer may leave nothing of a unit of the layer before or after it.
    left_out = True
    while left_out:
        left_out = sum(_fold_link(link, group) for link in links) > 0
    return group


def _fold_link(link: Link, group: Group) -> bool:
    first, second = group.layers[link.first], group.layers[link.second]
    dead = ~(first.weight != 0).flatten(1).any(1)
    unread = ~(second.weight != 0).transpose(0, 1).flatten(1).any(1)
    constants = _constants(link, first, group)
    folds = dead & ~unread & constants.isfinite()
    if isinstance(link.second, nn.Conv2d) and not _is_unpadded(link.second):
        # At the border the next convolution reads zeros, and not the constant.
        folds &= constants == 0
    drop = folds | unread
    if drop.numel() and bool(drop.all()):
        # A layer without units is none; one is left, as it is.
        drop[0] = folds[0] = False
    if not bool(drop.any()):
        return False
    added = torch.where(folds, constants.double(), 0.0)
    weights = second.weight.double().flatten(2).sum(2) if second.weight.dim() > 2 else second.weight.double()
    total = weights @ added
    if bool((total != 0).any()):
        second.bias = (total if second.bias is None else second.bias.double() + total).to(second.weight.dtype)
    keep = (~drop).nonzero().reshape(-1)
    first.weight, first.live, first.outputs = first.weight[keep], first.live[keep], first.outputs[keep]
    first.bias = None if first.bias is None else first.bias[keep]
    second.weight, second.live, second.inputs = second.weight[:, keep], second.live[:, keep], second.inputs[keep]
    for step in link.steps:
        if step.has_units and step.module is not None:
            group.norms[step.module] = first.outputs
    dropped, always = int(drop.sum()), int(folds.sum())
    first.notes.append(f"{dropped} outputs left out")
    second.notes.append(f"{dropped} inputs left out" + (f", {always} of them folded into its bias" if always else ""))
    return True


def _constants(link: Link, first: Folded, group: Group) -> Tensor:
    """What a unit gives the next layer if its own layer gives nothing but its bias: (units,)."""
    units = first.weight.shape[0]
    # In their first places, since the norms between hold something for each of those.
    bias = first.weight.new_zeros(units) if first.bias is None else first.bias
    values = bias.new_zeros(link.first.weight.shape[0]).index_copy(0, first.outputs, bias)
    values = values[None] if isinstance(link.first, nn.Linear) else values[None, :, None, None]
    for step in link.steps:
        # Activations may work in place.
        values = step.run(values.clone())
    return values.reshape(-1)[first.outputs]


def _is_unpadded(conv: nn.Conv2d) -> bool:
    return conv.padding == "valid" or (not isinstance(conv.padding, str) and not any(conv.padding))


def shrunk(step: Step, units: Tensor) -> nn.Module:
    """The norm of a step with these of its units only."""
    norm = step.module
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    made = type(norm)(units.numel(), norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    with torch.no_grad():
        for name, tensor in norm.state_dict().items():
            made_tensor = made.get_parameter(name) if name in dict(made.named_parameters()) else made.get_buffer(name)
            made_tensor.data = tensor[units].clone() if tensor.dim() else tensor.clone()
    return made.train(norm.training)
