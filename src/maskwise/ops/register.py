"""The one place that talks to ``torch.library``.

An operation becomes two ops of one schema: ``<name>_fused`` with autograd, and ``<name>_fused_forward`` without, since
autograd's bookkeeping costs 5 µs even when no gradient is asked for. Both have the plain-torch reference as their
implementation on every device that has no kernel, and a fake for tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, cast

import torch

# Imported for what it does: it loads the kernels, and tells the capability table whether they are there.
import maskwise.ops.extension  # noqa: F401
from maskwise.ops.operation import Operation
from maskwise.plan import capability, planner

__all__ = ["define", "differentiate", "register"]

_library = torch.library.Library("maskwise", "FRAGMENT")


def register(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    work: planner.Describe,
    cpu: Iterable[torch.dtype] = (),
) -> Operation:
    """Register ``maskwise::<name>_fused`` and ``maskwise::<name>_fused_forward``.

    Args:
        name: the public name, such as ``"sum"``.
        schema: arguments and results, such as ``"(Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor"``.
        reference: the same function in plain torch operations: leak-proof, differentiable, the ground truth.
        fake: results without data, for tracing.
        backward: the gradient, as ``torch.library.register_autograd`` takes it; None where there is none.
        setup_context: what the gradient must remember.
        work: how much each route has to do, for the planner.
        cpu: the dtypes that the C++ kernel serves.
    """
    for op in (f"{name}_fused", f"{name}_fused_forward"):
        define(op, schema, reference=reference, fake=fake)
    if backward is not None:
        differentiate(f"{name}_fused", backward, setup_context)
    planner.describe(name, work)
    capability.provide(name, "cpu", cpu)
    ops = torch.ops.maskwise
    numbers_only = schema.startswith("(Tensor x, Tensor mask, int[] dim") and schema.count("[]") == 1
    taped = tape_bound if numbers_only else tape
    bare = getattr(ops, f"{name}_fused_forward").default
    return Operation(
        name,
        plain=reference,
        bare=bare,
        fused=getattr(ops, f"{name}_fused").default,
        taped=None if backward is None else taped(name, bare, setup_context, backward),
    )


def tape(
    name: str, run: Callable[..., Any], setup_context: Callable[..., Any] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel with its gradient as an autograd Function, which costs half of what torch.library's autograd does.

    torch.compile needs the registered op; eager code does not.
    """

    # Function.setup_context would make torch inspect the signature on every call, which costs more than the rest.
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        if setup_context is not None:
            setup_context(ctx, inputs, output)
        return output

    return _function(name, forward, backward)


def tape_bound(
    name: str, run: Callable[..., Any], setup_context: Callable[..., Any] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The same for ops of x, mask and numbers.

    The numbers are bound to a Function of their own: each argument that apply is handed costs it a microsecond or two.
    """

    @lru_cache(maxsize=256)
    def bound(dims: tuple[int, ...], *rest: Any) -> Callable[..., Any]:
        plain = (list(dims), *rest)

        def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
            output = run(x, mask, *plain)
            if setup_context is not None:
                setup_context(ctx, (x, mask, *plain), output)
            return output

        def pull_back(ctx: Any, *grads: torch.Tensor) -> Any:
            return backward(ctx, *grads)[:2]

        return _function(name, forward, pull_back)

    return lambda x, mask, dims, *rest: bound(tuple(dims), *rest)(x, mask)


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    return cast("Callable[..., Any]", function.apply)


def define(op: str, schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define one op with its reference and its fake, such as the kernel of a backward pass."""
    _library.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(op, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskwise::{op}", fake, lib=_library)


def differentiate(op: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> None:
    """Give one op its gradient."""
    torch.library.register_autograd(f"maskwise::{op}", backward, setup_context=setup_context, lib=_library)
