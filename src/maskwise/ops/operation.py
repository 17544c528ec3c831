"""An operation as the ops layer sees it: one name, three ways down (see `maskwise.plan.plan.ROUTES`).

A call is checked and planned once for each combination of static facts (shapes, dtypes, devices, dim, whether a
gradient is asked for); the outcome is a `Recipe`, and a repeated call costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, check, dims_of
from maskwise.plan import Plan, planner
from maskwise.plan.explain import listeners, record
from maskwise.plan.plan import Skips
from maskwise.plan.remembered import Remembered
from maskwise.tracing import is_tracing, is_transformed

__all__ = ["Operation", "Recipe", "dropped_rows"]


class Recipe(NamedTuple):
    """A call that was checked and planned: the way down, the dims, not negative and sorted, and the plan."""

    run: Callable[..., Any]
    dims: list[int]
    plan: Plan


_recipes: Remembered[Recipe] = Remembered()

# Bound here, because to find them anew takes a tiny call longer than to call them.
_is_grad_enabled, _forced = torch.is_grad_enabled, planner.forced
_is_any_forced, _is_any_listening = planner.is_any_forced, listeners.any


@dataclass(frozen=True)
class Operation:
    """A masked operation with its three ways down; each takes (x, bits, dims, *rest)."""

    name: str
    plain: Callable[..., Any]
    bare: Callable[..., Any]
    fused: Callable[..., Any]
    #: The fused route outside of compiled graphs, where there is a cheaper one.
    taped: Callable[..., Any] | None = None
    #: Whether a compiled graph on a GPU is better off with the plain route, which Inductor fuses with its neighbours.
    fuses: bool = False
    #: Whether it is a step of another function, so that no log hears of it.
    is_step: bool = False
    #: What the CPU kernel leaves out for a dropped element, by (x, bits); None for nothing. The plain way and the
    #: kernels for GPUs leave out nothing.
    skips: Callable[[torch.Tensor, torch.Tensor], Skips] | None = None

    def __call__(self, x: torch.Tensor, mask: MaskLike, dim: Dim, *rest: Any) -> Any:
        """Check and plan the call, or find that it was, and run it."""
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        # Inside of a graph the choice must be a constant of it: dtype and device are, the caches are not.
        if is_tracing():
            check(self.name, x, bits)
            by_kernel = planner.has_kernel(self.name, x.dtype, x.device.type)
            run = self.fused if by_kernel and not (self.fuses and x.device.type == "cuda") else self.plain
            return run(x, bits, dims_of(self.name, x, dim), *rest)
        try:
            # fmt: off
            facts = (
                self.name, dim, x.shape, bits.shape, x.dtype, bits.dtype, x.device, bits.device, x.layout, bits.layout,
                x.requires_grad and _is_grad_enabled(),
                is_transformed(), _is_any_forced() and _forced(),
            )
            # fmt: on
            recipe = _recipes.get(facts)
        except (AttributeError, TypeError, RuntimeError):
            # Not tensors, or nested ones without a shape, which the checks say in full; or a list of dims, no key.
            if isinstance(dim, list):
                return self(x, mask, tuple(dim), *rest)
            check(self.name, x, bits)
            dims_of(self.name, x, dim)
            raise
        if recipe is None:
            recipe = self._recipe(x, bits, dim, facts)
        if _is_any_listening() and not self.is_step:
            record(self._declared(recipe.plan, x, bits), x, mask)
        return recipe.run(x, bits, recipe.dims, *rest)

    def _declared(self, plan: Plan, x: torch.Tensor, bits: torch.Tensor) -> Plan:
        """The plan with what the route leaves out, which takes a look at strides: for those who listen."""
        if self.skips is None or plan.route == "plain" or not x.is_cpu:
            return plan
        # One operation for each element.
        return replace(plan, skips=self.skips(x, bits), flops=1)

    def _recipe(self, x: torch.Tensor, bits: torch.Tensor, dim: Dim, facts: tuple[Any, ...]) -> Recipe:
        """Check and plan a call that was not made before."""
        check(self.name, x, bits)
        dims = dims_of(self.name, x, dim)
        *_, grad, transformed, _ = facts
        plan = planner.make(
            self.name,
            tuple(x.shape),
            x.dtype,
            x.device.type,
            grad=grad,
            transformed=transformed,
        )
        ways = {"plain": self.plain, "bare": self.bare, "fused": self.taped or self.fused}
        recipe = _recipes[facts] = Recipe(ways[plan.route], dims, plan)
        return recipe


#: Up to as many elements, and in rows up to as short, kernels copy pieces together, dropped ones too.
_HANDFUL, _SHORT = 1024, 4


def dropped_rows(x: torch.Tensor, bits: torch.Tensor) -> Skips:
    """What kernels skip that pass over a row of x if all of it is dropped by one bool, and read every other row.

    A row is what lies side by side in memory. Where a mask has a bool for each of its elements, the kernel reads x
    beside the mask, or has it fetched, before it knows what is kept.
    """
    is_in_rows = x.is_contiguous() and bits.is_contiguous() and x.dim() > 0 and x.numel() > _HANDFUL
    if is_in_rows and x.shape[-1] >= _SHORT and (bits.dim() == 0 or bits.shape[-1] == 1):
        return Skips.READING
    return Skips.NOTHING
