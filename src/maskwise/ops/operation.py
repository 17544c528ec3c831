"""An operation as the ops layer sees it: one name, three ways down (see `maskwise.plan.plan.ROUTES`).

A call is checked and planned once for each combination of static facts (shapes, dtypes, devices, dim, whether a
gradient is asked for); the outcome is a `Recipe`, and a repeated call costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, check, dims_of
from maskwise.plan import Plan, planner
from maskwise.plan.explain import listeners, record
from maskwise.plan.remembered import Remembered
from maskwise.tracing import is_tracing, is_transformed

__all__ = ["Operation", "Recipe"]


class Recipe(NamedTuple):
    """A call that was checked and planned: the way down, the dims, not negative and sorted, and the plan."""

    run: Callable[..., Any]
    dims: list[int]
    plan: Plan


_recipes: Remembered[Recipe] = Remembered()

# Bound here, because to find it anew takes a tiny call longer than to call it.
_is_grad_enabled = torch.is_grad_enabled


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
                self.name, dim, x.shape, bits.shape, x.dtype, bits.dtype, x.device, bits.device, x.layout,
                x.requires_grad and _is_grad_enabled(),
                is_transformed(),
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
        if listeners and not self.is_step:
            record(recipe.plan, x, mask)
        return recipe.run(x, bits, recipe.dims, *rest)

    def _recipe(self, x: torch.Tensor, bits: torch.Tensor, dim: Dim, facts: tuple[Any, ...]) -> Recipe:
        """Check and plan a call that was not made before."""
        check(self.name, x, bits)
        dims = dims_of(self.name, x, dim)
        *_, grad, transformed = facts
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
