"""The one place that talks to ``torch.library``.

An operation becomes two ops of one schema: ``<name>_fused`` with autograd, and ``<name>_fused_forward`` without, since
autograd's bookkeeping costs 5 µs even when no gradient is asked for. Both have the plain-torch reference as their
implementation on every device that has no kernel, and a fake for tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

import torch

# Imported for what it does: it loads the kernels, and tells the capability table whether they are there.
import maskwise.ops.extension  # noqa: F401
from maskwise.ops.gpu.status import DEVICE, INTERPRETED, KEY, why_not
from maskwise.ops.operation import Operation
from maskwise.plan import capability, planner
from maskwise.plan.plan import Skips

__all__ = ["define", "differentiate", "register"]

_library = torch.library.Library("maskwise", "FRAGMENT")


_registered: dict[str, Operation] = {}


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
    gpu: Iterable[torch.dtype] = (),
    gpu_from: str | None = None,
    fuses: bool = False,
    skips: Callable[[torch.Tensor, torch.Tensor], Skips] | None = None,
    adapt: Callable[[Operation], Operation] = lambda operation: operation,
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
        gpu: the dtypes that the Triton kernel serves.
        gpu_from: where that is, such as ``"maskwise.ops.reduce.gpu:sum"``.
        fuses: whether torch.compile makes one kernel of the plain torch operations and their neighbours on a GPU, so
            that a compiled graph there is better off with those.
        skips: what the CPU kernel leaves out for a dropped element; None for nothing.
        adapt: makes the operation that is called from the one that was registered.
    """
    for op in (f"{name}_fused", f"{name}_fused_forward"):
        define(op, schema, reference=reference, fake=fake, gpu=gpu, gpu_from=gpu_from)
    if backward is not None:
        differentiate(f"{name}_fused", backward, setup_context)
    planner.describe(name, work)
    if not INTERPRETED:
        capability.provide(name, "cpu", cpu)
    capability.provide(name, DEVICE, gpu)
    ops = torch.ops.maskwise
    bare = getattr(ops, f"{name}_fused_forward").default
    _registered[name] = adapt(
        Operation(
            name,
            plain=reference,
            bare=bare,
            fused=getattr(ops, f"{name}_fused").default,
            taped=None if backward is None else tape(name, schema, bare, setup_context, backward),
            fuses=fuses,
            skips=skips,
        )
    )
    return _registered[name]


#: Where the operations are that families lend each other.
_LENT = {"fill": "maskwise.ops.fill.registered", "sum": "maskwise.ops.reduce.registered"}


def find(name: str) -> Operation:
    """An operation of one family for another, which does not import it.

    >>> import torch
    >>> fill = find("fill")
    >>> fill(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), None, 0.0)
    tensor([1., 0.])
    """
    if name not in _registered:
        import_module(_LENT[name])
    return _registered[name]


def tape(
    name: str,
    schema: str,
    run: Callable[..., Any],
    setup_context: Callable[..., Any] | None,
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The kernel with its gradient as an autograd Function, which costs half of what torch.library's autograd does.

    torch.compile needs the registered op; eager code does not. Only tensors go through the Function: each argument more
    costs it a microsecond or two. The others are bound to a Function of their own, of which a few are remembered.
    """
    is_tensor = [argument.startswith("Tensor") for argument in schema[1 : schema.index(")")].split(", ")]
    count = sum(is_tensor)
    if not all(is_tensor[:count]):
        raise ValueError(
            f"{name}: the tensors of a schema that is taped must come before its settings, got {schema}. "
            "Hint: (Tensor x, int dim)."
        )

    # Typed, because 1, 1.0 and True are equal, and not the same argument.
    @lru_cache(maxsize=256, typed=True)
    def bound(*settings: Any) -> Callable[..., Any]:
        # Function.setup_context would make torch inspect the signature on every call, which costs more than the rest.
        def forward(ctx: Any, *operands: Any) -> Any:
            output = run(*operands, *settings)
            if setup_context is not None:
                setup_context(ctx, (*operands, *settings), output)
            return output

        def pull_back(ctx: Any, *grads: torch.Tensor) -> Any:
            return backward(ctx, *grads)[:count]

        members = {"forward": staticmethod(forward), "backward": staticmethod(pull_back)}
        function: Any = type(name, (torch.autograd.Function,), members)
        # Function.apply only sees to torch.func's transforms before it calls this; those never come here.
        return cast("Callable[..., Any]", super(torch.autograd.Function, function).apply)

    def taped(*arguments: Any) -> Any:
        settings = [tuple(value) if type(value) is list else value for value in arguments[count:]]
        return bound(*settings)(*arguments[:count])

    return taped


def define(
    op: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    gpu: Iterable[torch.dtype] = (),
    gpu_from: str | None = None,
) -> None:
    """Define one op with its reference, its fake and perhaps its Triton kernel, such as that of a backward pass."""
    _library.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(op, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskwise::{op}", fake, lib=_library)
    if gpu_from is not None:
        _library.impl(op, on_demand(gpu_from, frozenset(gpu), reference), KEY)


def on_demand(path: str, dtypes: frozenset[torch.dtype], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function at ``path``, imported when it is first called: Triton takes longer to import than torch.library.

    The reference serves where there is no Triton, and dtypes that the kernel does not take.
    """
    module, _, name = path.partition(":")
    found: list[Callable[..., Any]] = []

    def run(first: torch.Tensor, *rest: Any) -> Any:
        if first.dtype not in dtypes:
            return reference(first, *rest)
        if not found:
            found.append(reference if why_not() else getattr(import_module(module), name))
        return found[0](first, *rest)

    return run


def differentiate(op: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> None:
    """Give one op its gradient."""
    torch.library.register_autograd(f"maskwise::{op}", backward, setup_context=setup_context, lib=_library)
