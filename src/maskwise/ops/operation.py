"""An operation as the ops layer sees it: one name, three ways down (see `maskwise.plan.plan.ROUTES`).

A call is checked and planned once for each combination of static facts (shapes, dtypes, devices, dim, whether a
gradient is asked for); the outcome is a `Recipe`, and a repeated call costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, check, dims_of
from maskwise.plan import Plan, planner
from maskwise.plan.explain import listeners, record

__all__ = ["Operation", "Recipe", "recipe_for"]

_RECIPES_KEPT = 4096
_recipes: dict[tuple[Any, ...], Recipe] = {}
planner.on_forget(_recipes.clear)


class Recipe(NamedTuple):
    """A call that was checked and planned: the dims, not negative and sorted, and the plan."""

    dims: list[int]
    plan: Plan


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

    def __call__(self, x: torch.Tensor, mask: MaskLike, dim: Dim, *rest: Any) -> Any:
        """Check and plan the call, or find that it was, and run it."""
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        # Inside a compiled graph the choice must be a constant of the graph: dtype and device are, the caches are not.
        if torch.compiler.is_compiling():
            check(self.name, x, bits)
            by_kernel = planner.has_kernel(self.name, x.dtype, x.device.type)
            run = self.fused if by_kernel and not (self.fuses and x.device.type == "cuda") else self.plain
            return run(x, bits, dims_of(self.name, x, dim), *rest)
        recipe = recipe_for(self.name, x, bits, dim)
        if listeners:
            record(recipe.plan, x, mask)
        route = recipe.plan.route
        run = self.bare if route == "bare" else self.taped or self.fused if route == "fused" else self.plain
        return run(x, bits, recipe.dims, *rest)


def recipe_for(op: str, x: torch.Tensor, bits: torch.Tensor, dim: Dim) -> Recipe:
    """The recipe of this call: from the cache, or checked and planned now."""
    try:
        grad = x.requires_grad and torch.is_grad_enabled()
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        facts = (op, dim, x.shape, bits.shape, x.dtype, bits.dtype, x.device, bits.device, x.layout)
        key = (*facts, grad, transformed, x.is_contiguous())
        recipe = _recipes.get(key)
    except (AttributeError, TypeError):
        # Not tensors, which the checks below will say in full; or a list of dims, which cannot be a key.
        if isinstance(dim, list):
            return recipe_for(op, x, bits, tuple(dim))
        check(op, x, bits)
        dims_of(op, x, dim)
        raise
    if recipe is not None:
        return recipe
    check(op, x, bits)
    dims = dims_of(op, x, dim)
    plan = planner.make(
        op,
        tuple(x.shape),
        x.dtype,
        x.device.type,
        grad=grad,
        transformed=transformed,
        contiguous=x.is_contiguous(),
    )
    if len(_recipes) >= _RECIPES_KEPT:
        _recipes.clear()
    recipe = _recipes[key] = Recipe(dims, plan)
    return recipe
