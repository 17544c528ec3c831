"""Where the gates of a model are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maskwise.mask import Mask
from maskwise.nn.gates import Gate

__all__ = ["Gated", "chains_of", "gated", "own_gate"]


@dataclass(frozen=True)
class Gated:
    """One weight that has a gate: the module's name in the model, the module, the tensor's name in it, the gate."""

    module_name: str
    module: nn.Module
    tensor_name: str
    gate: Gate

    @property
    def name(self) -> str:
        """The weight's name in the model.

        >>> Gated("encoder.0", nn.Linear(2, 2), "weight", Gate()).name
        'encoder.0.weight'
        """
        return f"{self.module_name}.{self.tensor_name}" if self.module_name else self.tensor_name

    def weight(self) -> Tensor:
        """The weight as the gate gets it, without a graph."""
        if own_gate(self.module) is self.gate:
            weight: Tensor = getattr(self.module, self.tensor_name)
            return weight.detach()
        chain = chains_of(self.module)[self.tensor_name]
        with torch.no_grad():
            names = ["original"] if chain.is_tensor else [f"original{i}" for i in range(chain.ntensors)]
            originals = [getattr(chain, name) for name in names]
            found = originals[0]
            for position, step in enumerate(chain):
                if step is self.gate:
                    break
                found = step(*originals) if position == 0 else step(found)
        assert isinstance(found, Tensor)
        return found.detach()

    def mask(self) -> Mask:
        """What the gate keeps at the moment."""
        return self.gate.mask(self.weight())


def chains_of(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    """The parametrizations of each tensor of a module, by the tensor's name."""
    if not parametrize.is_parametrized(module):
        return {}
    found = module.parametrizations
    assert isinstance(found, nn.ModuleDict)
    return {name: chain for name, chain in found.items() if isinstance(chain, parametrize.ParametrizationList)}


def own_gate(module: nn.Module) -> Gate | None:
    """The gate of a layer that was made with one, such as MaskedLinear."""
    gate = module._modules.get("gate")
    return gate if isinstance(gate, Gate) and "weight" in module._parameters else None


def gated(model: nn.Module) -> Iterator[Gated]:
    """Every gated weight of a model, in the order of its modules.

    >>> import maskwise as mw
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> _ = mw.nn.attach(model[2], mw.nn.gates.TopK(0.5))
    >>> [found.name for found in gated(model)]
    ['2.weight']
    """
    for module_name, module in model.named_modules():
        own = own_gate(module)
        if own is not None:
            yield Gated(module_name, module, "weight", own)
        for tensor_name, chain in chains_of(module).items():
            for step in chain:
                if isinstance(step, Gate):
                    yield Gated(module_name, module, tensor_name, step)
