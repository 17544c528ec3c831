"""Products with a weight of which some is kept, by a kernel that multiplies kept weights only: ops, gradients, routes.

``linear_product`` is x times a sparse weight; ``linear_sampled`` the gradient of the kept weights; ``linear_sparse``
the product with its gradients, for which it takes the layout of the transposed weight along. `mw.linear`, MaskedLinear
and SparseLinear share the routes: ``sparse`` is the kernel, ``plain`` the dense product, and those of `delegated` are
torch's own sparse products on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maskwise.ops import backends
from maskwise.ops.backends import is_kernel_allowed, why_not_served
from maskwise.ops.linear import delegated, reference
from maskwise.ops.linear.cost import Product, plain_cost, plain_work, sparse_cost, sparse_work
from maskwise.ops.linear.layouts import Block, SparseLayout
from maskwise.ops.operation import define, differentiate, eager_function
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import calibration
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Decision, Facts, Route, Skips, decide

__all__ = [
    "DeferredLayout",
    "Saving",
    "decide_product",
    "is_sparse_promising",
    "multiply",
    "product_routes",
    "sparse_linear",
]

# -- the ops -----------------------------------------------------------------------------------------------------------
DTYPES = (torch.float32, torch.bfloat16)
#: On a GPU kernels serve blocks of 16 x 16; other blocks are made dense.
ON_GPU = (*DTYPES, torch.float16)
_SPARSE = (
    "(Tensor x, Tensor values, Tensor? bias, Tensor starts, Tensor columns, Tensor t_starts, Tensor t_columns, "
    "Tensor t_order, int outputs, int rows, int width) -> Tensor"
)


def _product_flops(x: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Each stored value once for each row of x."""
    return 2 * x.shape[0] * values.numel()


def _sampled_flops(grad: Tensor, x: Tensor, starts: Tensor, columns: Tensor, rows: int, width: int, **_: Any) -> int:
    """Each stored value once for each row of x."""
    return 2 * x.shape[0] * columns.shape[0] * rows * width


define(
    "linear_product",
    "(Tensor x, Tensor values, Tensor starts, Tensor columns, Tensor? bias, int outputs, int rows, int width)"
    " -> Tensor",
    reference=reference.product,
    fake=lambda x, values, starts, columns, bias, outputs, rows, width: x.new_empty(x.shape[0], outputs),
    gpu=ON_GPU,
    gpu_from="maskwise.ops.linear.gpu:product",
    traces=True,
    flops=_product_flops,
)
define(
    "linear_sampled",
    "(Tensor grad, Tensor x, Tensor starts, Tensor columns, int rows, int width) -> Tensor",
    reference=reference.sampled,
    fake=lambda grad, x, starts, columns, rows, width: x.new_empty(columns.shape[0] * rows * width),
    gpu=ON_GPU,
    gpu_from="maskwise.ops.linear.gpu:sampled",
    traces=True,
    flops=_sampled_flops,
)
define(
    "linear_delegated",
    "(Tensor x, Tensor values, Tensor starts, Tensor columns, Tensor? bias, int outputs, int rows, int width)"
    " -> Tensor",
    reference=delegated.product,
    fake=lambda x, values, starts, columns, bias, outputs, rows, width: x.new_empty(x.shape[0], outputs),
    flops=_product_flops,
)
product = torch.ops.maskwise.linear_product.default
delegated_product = torch.ops.maskwise.linear_delegated.default
sampled = torch.ops.maskwise.linear_sampled.default


#: Starts and columns; starts, columns and order of the transposed layout.
Indices: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def run_sparse(x: Tensor, values: Tensor, bias: Tensor | None, starts: Tensor, columns: Tensor, *rest: Any) -> Tensor:
    """The product, by the kernel where there is one, or by torch's."""
    # Torch's kernels are chosen by the size of a batch, and so no part of a graph: the registered op has no argument.
    outputs, rows, width, *is_delegated = rest[3:]
    run = delegated_product if any(is_delegated) else product
    out: Tensor = run(x, values, starts, columns, bias, outputs, rows, width)
    return out


def sparse_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradients need."""
    x, values, _, *layout = inputs
    ctx.save_for_backward(x, values, *layout[:5])
    ctx.sizes = layout[5:]


def sparse_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """To x by the transposed product, to the values by the sampled one, to the bias by a sum."""
    x, values, starts, columns, t_starts, t_columns, t_order = ctx.saved_tensors
    outputs, rows, width, *is_delegated = ctx.sizes
    of_x = of_values = of_bias = None
    # Where a second derivative is required, plain operations: torch differentiates them again.
    again = torch.is_grad_enabled() and not is_tracing()
    grad = grad.contiguous()
    if ctx.needs_input_grad[0]:
        if again:
            layout = reference.layout_of(starts, columns, outputs, x.shape[1], rows, width)
            of_x = grad @ layout.dense(values)
        else:
            square = 16 if rows == 16 else 1
            run = delegated_product if any(is_delegated) else product
            of_x = run(grad, values.index_select(0, t_order), t_starts, t_columns, None, x.shape[1], square, square)
    if ctx.needs_input_grad[1]:
        of_values = (reference.sampled if again else sampled)(grad, x, starts, columns, rows, width)
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    return of_x, of_values, of_bias, *[None] * 8


define(
    "linear_sparse",
    _SPARSE,
    reference=run_sparse,
    fake=lambda x, *rest: x.new_empty(x.shape[0], rest[7]),
    traces=True,
    flops=_product_flops,
)
differentiate("linear_sparse", sparse_backward, sparse_setup)
backends.provide("linear", "cpu", DTYPES)
backends.provide("linear", "cuda", ON_GPU)

_eager = eager_function("linear_sparse", _SPARSE, run_sparse, sparse_setup, sparse_backward)
_fused = torch.ops.maskwise.linear_sparse.default


def sparse_linear(
    x: Tensor,  # (..., inputs)
    values: Tensor,  # (count,)
    layout: SparseLayout,
    bias: Tensor | None = None,  # (outputs,)
) -> Tensor:
    """X times the transposed weight that has these values at the places of a layout, plus the bias: (..., outputs).

    Gradients go to x, values and bias. All dtypes are one dtype, and the sizes were checked. Plain operations serve
    where no kernel does.

    >>> import torch
    >>> layout = SparseLayout.from_mask(torch.tensor([[True, False], [True, True]]))
    >>> sparse_linear(torch.tensor([[1.0, 10.0]]), torch.tensor([1.0, 2.0, 3.0]), layout)
    tensor([[ 1., 32.]])
    """
    if not is_kernel_allowed("linear", x.device.type, x.dtype):
        return torch.nn.functional.linear(x, layout.dense(values), bias)
    return multiply(x, values, bias, layout)


def multiply(
    x: Tensor,  # (..., inputs)
    values: Tensor,  # (count,)
    bias: Tensor | None,  # (outputs,)
    layout: SparseLayout | tuple[Indices, int, Block],
    *,
    is_delegated: bool = False,
) -> Tensor:
    """As `sparse_linear`, by the kernel, which must serve; from a layout, or its tensors, outputs and block.

    Args:
        x: any leading dims.
        values: the kept weights.
        bias: of the outputs.
        layout: where the values are.
        is_delegated: whether torch's own kernel multiplies.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    grad = torch.is_grad_enabled() and (
        x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    )
    if isinstance(layout, SparseLayout):
        outputs, block, starts, columns = layout.shape[0], layout.block, layout.starts, layout.columns
        if grad:
            back = layout.transposed
            indices = (starts, columns, back.starts, back.columns, back.order)
        else:
            # The layout of the transposed weight is not made where no gradient is required.
            indices = (starts, columns, starts, columns, columns)
    else:
        indices, outputs, block = layout
    if is_tracing():
        out = _fused(flat, values, bias, *indices, outputs, *block)
    elif grad:
        out = _eager(flat, values, bias, *indices, outputs, *block, is_delegated)
    else:
        run = delegated_product if is_delegated else product
        out = run(flat, values, indices[0], indices[1], bias, outputs, *block)
    result: Tensor = out if x.dim() == 2 else out.reshape(*x.shape[:-1], outputs)
    return result


# -- routes ------------------------------------------------------------------------------------------------------------
_NEW = "the weight is new, and nothing is cached for it until it is used again"
_TOO_SMALL = "too small a product for a kernel to pay"
_NO_LAYOUT = "a layout would cost more than it has been worth so far"


def _serves_sparse(facts: Facts) -> str | None:
    product: Product = facts.detail
    if facts.traced and 2 * (facts.kept or 0) >= product.inputs * product.outputs:
        # The choice is a constant of the graph, so it does not depend on the size of the batch.
        return "half of the weight or more is kept"
    if product.is_mixed:
        return "input and weight have different dtypes"
    if facts.device == "cuda" and product.block != (16, 16):
        return "on a GPU the kernel supports blocks of 16 x 16"
    return why_not_served("linear", facts.device, facts.dtype)


def _pays_sparse(facts: Facts) -> str | None:
    if facts.detail.is_new:
        return _NEW
    if facts.kept is None:
        return _TOO_SMALL
    return None if facts.detail.has_layout or not is_sparse_promising(facts) else _NO_LAYOUT


def _pays_semi_structured(facts: Facts) -> str | None:
    return _NEW if facts.detail.is_new else None


def _then(first: Callable[[Facts], str | None], second: Callable[[Facts], str | None]) -> Callable[[Facts], str | None]:
    return lambda facts: first(facts) or second(facts)


def is_sparse_promising(facts: Facts) -> bool:
    """Whether the sparse product itself is predicted to be faster than the dense one; for none kept, if not counted."""
    return _cost_with_layout(facts) < plain_cost(facts, _NO_WORK, calibration.rates_for(facts.device))


def _cost_with_layout(facts: Facts) -> float:
    """The predicted time of the fastest product with a layout: of the kernel, or of torch's own ones on a GPU."""
    rates = calibration.rates_for(facts.device)
    others = [
        cost(facts, _NO_WORK, rates)
        for _, serves, pays, cost in delegated.BY_LAYOUT
        if serves(facts) is None and pays(facts) is None
    ]
    return min([sparse_cost(facts, _NO_WORK, rates), *others])


_NO_WORK = Work()
#: To make a layout, a microsecond for this many positions of the mask.
_BUILT = 150.0
#: The routes that need a layout.
_WITH_LAYOUT = ("sparse", "bsr", "csr")


def _kept_share(facts: Facts) -> str:
    return f"{(facts.kept or 0) / max(1, facts.detail.inputs * facts.detail.outputs):.1%} of the weight is kept"


def _flops(facts: Facts) -> int:
    return 2 * int(facts.detail.batch)


def product_routes(
    sparse: Callable[..., Any],
    plain: Callable[..., Any],
    *between: Route,
    skips: Skips,
    by_torch: Callable[..., Any] | None = None,
    semi_structured: Callable[..., Any] | None = None,
) -> tuple[Route, ...]:
    """The routes of a product: the kernel, torch's own ones, others that the caller has, and the dense product.

    Args:
        sparse: runs the kernel.
        plain: runs the dense product.
        between: other routes.
        skips: what the kernel leaves out for a dropped weight: it computes nothing of it; whether it reads it depends
            on where the kept ones come from.
        by_torch: runs torch's own product with a sparse weight; None where how many are kept is not known without a
            host-device sync.
        semi_structured: runs torch's product with a weight of which two of each four are kept.
    """
    torchs: list[Route] = []
    if by_torch is not None:
        for name, serves, pays, cost in delegated.BY_LAYOUT:
            torchs.append(
                Route(
                    name, by_torch, serves, sparse_work, _then(pays, _pays_sparse), cost, reason=_kept_share,
                    skips=skips, flops=_flops,
                )
            )  # fmt: skip
    if semi_structured is not None:
        torchs.append(
            Route(
                "semi_structured", semi_structured, delegated.serves_semi_structured, delegated.semi_structured_work,
                _pays_semi_structured, delegated.semi_structured_cost, reason="two of each four weights are kept",
                skips=skips, flops=_flops,
            )
        )  # fmt: skip
    return (
        Route(
            "sparse", sparse, _serves_sparse, sparse_work, _pays_sparse, sparse_cost, reason=_kept_share, skips=skips,
            flops=_flops, is_kernel=True,
        ),
        *torchs,
        *between,
        Route("plain", plain, work=plain_work, cost=plain_cost, flops=_flops, transforms=True),
    )  # fmt: skip


class Saving(NamedTuple):
    """What a call would save with a layout, and what the layout costs, in microseconds."""

    per_call: float
    layout: float


def decide_product(facts: Facts, routes: tuple[Route, ...]) -> Decision:
    """The route of a product; with the `Saving` that it misses, where all that the sparse route lacks is its layout."""
    decision = decide(facts, routes)
    chosen = decision.route.predict(facts)
    # Nothing is missed where a route is forced.
    with_layout = [route for route in routes if route.name in _WITH_LAYOUT and route.refuses(facts) is None]
    lacks_layout = bool(with_layout) and _pays_sparse(facts) is _NO_LAYOUT
    if chosen is not None and lacks_layout and not decision.is_forced:
        missed = chosen[1] - _cost_with_layout(facts)
        if missed > 0.0:
            weights, kept = facts.detail.inputs * facts.detail.outputs, facts.kept or 0
            decision.prepared = Saving(missed, 50.0 + weights / _BUILT + kept / 20.0)
    return decision


class DeferredLayout:
    """The layout of a mask, built once the savings missed without it pay for it: a single call does not pay.

    >>> deferred = DeferredLayout()
    >>> [deferred.is_due(Saving(per_call=20.0, layout=50.0)) for _ in range(3)]
    [False, False, True]

    Args:
        patience: after so many calls that missed a saving it is built in any case; None for as many as pay for it.
    """

    __slots__ = ("layout", "missed", "patience", "values")

    def __init__(self, patience: float | None = None) -> None:
        self.layout: SparseLayout | None = None
        self.patience = math.inf if patience is None else patience
        #: The kept weights, where the weight stays what it is as well.
        self.values: Tensor | None = None
        self.missed = 0.0

    def is_due(self, saving: Saving) -> bool:
        """Count what one more call misses: whether the layout would have paid by now."""
        self.missed += saving.per_call
        self.patience -= 1
        return self.missed >= saving.layout or self.patience <= 0

    def build(self, bits: Tensor, block: Block = (1, 1), weight: Tensor | None = None) -> SparseLayout:
        """Build the layout of a mask, and gather the weights that it keeps."""
        # Outside of inference mode, since a later call may require a gradient.
        with torch.inference_mode(False), torch.no_grad():
            layout = SparseLayout.from_mask(bits, block)
            if weight is not None:
                self.values = layout.gather(weight)
        # Last, for other threads.
        self.layout = layout
        return layout
