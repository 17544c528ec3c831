"""How each gate brings a network to 5 % of its weights: what it does at first, after each step, and in the loss.

Every recipe has the same number of steps. Until a fifth of them nothing is dropped; from three fifths on the network
has its final density, and learns to live with it.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

import maskwise as mw
from maskwise.nn import schedule
from maskwise.nn.attaching import gated
from maskwise.nn.gates import NM, Binary, Block, Gate, HardConcrete, Sigmoid, Threshold, TopK

__all__ = ["RECIPES", "Dense", "Recipe", "linears", "weights"]

DENSITY = 0.05


def linears(model: nn.Module) -> list[nn.Linear]:
    """The layers whose weights are gated: all of them."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def weights(model: nn.Module) -> list[Tensor]:
    """The effective weight of every layer, sparse ones too."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | mw.nn.SparseLinear)]
    return [layer.to_dense() if isinstance(layer, mw.nn.SparseLinear) else layer.weight for layer in layers]


def gate_of(layer: nn.Linear) -> Gate:
    """The gate on a layer's weight."""
    (found,) = gated(layer)
    return found.gate


class Dense:
    """Nothing is dropped: what the others are measured against."""

    name = "dense"
    density = DENSITY

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model, self.steps = model, steps
        self.schedule = schedule.cubic(self.density, steps=2 * steps // 5, begin=steps // 5)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """What is done once there is an optimizer."""

    def loss(self) -> Tensor | float:
        """What is added to the loss."""
        return 0.0

    def after(self, step: int) -> None:
        """What is done after the optimizer's step of this number."""


Recipe: TypeAlias = type[Dense]


class WithBinary(Dense):
    """One cut, once the network has learned something: masks of the largest weights of all layers together."""

    name = "Binary"

    def after(self, step: int) -> None:
        """Cut at a fifth."""
        if step == self.schedule.begin:
            sizes = torch.cat([layer.weight.detach().abs().reshape(-1) for layer in linears(self.model)])
            level = sizes.kthvalue(sizes.numel() - round(self.density * sizes.numel())).values
            for layer in linears(self.model):
                mw.nn.attach(layer, Binary(layer.weight.detach().abs() > level))


class WithThreshold(Dense):
    """A threshold that rises; weights below it go on learning, and may come back above it."""

    name = "Threshold"

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        mw.nn.prune(model, lambda: Threshold(0.0))

    def after(self, step: int) -> None:
        """Put the threshold where it leaves as many as the schedule wants."""
        sizes = torch.cat([found.weight().abs().reshape(-1) for found in gated(self.model)])
        kept = round(self.schedule(step) * sizes.numel())
        if kept < sizes.numel():
            level = sizes.kthvalue(sizes.numel() - kept).values
            for layer in linears(self.model):
                gate = gate_of(layer)
                assert isinstance(gate, Threshold)
                gate.threshold.copy_(level)


class _Scheduled(Dense):
    """Gates with a density, driven by the schedule."""

    def gate(self) -> Gate:
        """A gate that keeps everything yet."""
        raise NotImplementedError(f"{type(self).__name__} must say which gate is scheduled.")

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        mw.nn.prune(model, self.gate)
        self.scheduler = schedule.DensityScheduler(model, self.schedule, every=5)

    def after(self, step: int) -> None:
        """One step of the schedule."""
        self.scheduler.step()


class WithTopK(_Scheduled):
    """The largest of each layer."""

    name = "TopK"

    def gate(self) -> Gate:
        """A share of each layer."""
        return TopK(1.0)


class WithGlobalTopK(_Scheduled):
    """The largest of all layers together."""

    name = "TopK, global"

    def gate(self) -> Gate:
        """A share of all layers."""
        return TopK(1.0, scope="global")


class WithBlock(_Scheduled):
    """Blocks of four outputs, which kernels like."""

    name = "Block 4 × 1"
    # A share of the blocks, of which those at the edge are smaller: a little less, to have no more weights than others.
    density = 0.049

    def gate(self) -> Gate:
        """A share of the blocks."""
        return Block((4, 1), 1.0)


class WithNM(Dense):
    """So many of every 32 inputs: 4 pixels, 1 hidden unit, 3 for the digits; more of them at first."""

    name = "NM 4:32, 1:32, 3:32"

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        self.least = (4, 1, 3)
        for layer in linears(model):
            # A layer too narrow for 32 is one group.
            m = 32 if layer.in_features % 32 == 0 else layer.in_features
            mw.nn.attach(layer, NM(m, m))

    def after(self, step: int) -> None:
        """Keep fewer of each group, as the schedule wants it."""
        if step == self.schedule.last or (step < self.schedule.last and step % 5 == 0):
            for layer, least in zip(linears(self.model), self.least, strict=True):
                gate = gate_of(layer)
                assert isinstance(gate, NM)
                gate.n = max(least, int(self.schedule(step) * gate.m))
            mw.nn.reselect(self.model)


class WithSigmoid(Dense):
    """Soft gates that are learned under pressure to shut; then the largest effective weights are kept."""

    name = "Sigmoid"
    pressure = 10.0

    def gate(self) -> Sigmoid | HardConcrete:
        """A gate that is open yet."""
        return Sigmoid(2.0)

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        mw.nn.prune(model, self.gate)
        self.scheduler: schedule.DensityScheduler | None = None

    def loss(self) -> Tensor | float:
        """The share of weights that the gates let through, times a pressure."""
        if self.scheduler is not None:
            return 0.0
        penalties, weights = [], 0
        for layer in linears(self.model):
            gate = gate_of(layer)
            assert isinstance(gate, Sigmoid | HardConcrete)
            penalties.append(gate.penalty())
            weights += layer.weight.numel()
        return self.pressure * torch.stack(penalties).sum() / weights

    def after(self, step: int) -> None:
        """At two fifths the gates have said what matters; what is still too much goes until three fifths."""
        if step == 2 * self.steps // 5:
            found = max(self.density, mw.nn.report(self.model).density)
            for layer in linears(self.model):
                mw.nn.detach(layer)
            mw.nn.prune(self.model, lambda: TopK(found, scope="global"))
            falling = schedule.cubic(self.density, steps=self.schedule.last - step, start=found)
            self.scheduler = schedule.DensityScheduler(self.model, falling, every=5)
        elif self.scheduler is not None:
            self.scheduler.step()


class WithHardConcrete(WithSigmoid):
    """Gates of zeros and ones that are learned under pressure to shut."""

    name = "HardConcrete"
    # Its gradients are those of draws, and drown a weaker one.
    pressure = 30.0

    def gate(self) -> Sigmoid | HardConcrete:
        """A gate that is open yet."""
        return HardConcrete(2.0)


class WithRigL(Dense):
    """Sparse from the first step: only what is kept exists, and the weakest make room for what is missed most."""

    name = "RigL"
    # Pixels are few and digits fewer, so their layers keep a larger share; of all together it is a twentieth.
    densities = (0.1, 0.038, 0.1)

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        assert isinstance(model, nn.Sequential)
        places = [i for i, layer in enumerate(model) if isinstance(layer, nn.Linear)]
        for i, density in zip(places, self.densities, strict=True):
            layer = model[i]
            assert isinstance(layer, nn.Linear)
            # As many inputs for each output, at random; and larger, since there are fewer of them to add up.
            kept = NM(max(1, round(density * layer.in_features)), layer.in_features).mask(torch.rand_like(layer.weight))
            with torch.no_grad():
                layer.weight.div_(density**0.5)
            model[i] = mw.nn.SparseLinear.from_linear(layer, kept)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's state follows the weights."""
        self.rewire = mw.nn.RigL(self.model, optimizer, every=max(1, self.steps // 60), until=3 * self.steps // 4)

    def after(self, step: int) -> None:
        """One step of rewiring."""
        self.rewire.step()


RECIPES: tuple[Recipe, ...] = (
    Dense,
    WithBinary,
    WithThreshold,
    WithTopK,
    WithGlobalTopK,
    WithNM,
    WithBlock,
    WithSigmoid,
    WithHardConcrete,
    WithRigL,
)
