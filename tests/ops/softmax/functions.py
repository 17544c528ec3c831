"""What the tests of this family share: the functions as ``call(x, mask, dim)``, and what they must give."""

from __future__ import annotations

import math

import torch

import maskwise as mw
from maskwise.ops.softmax import reference
from maskwise.ops.softmax.softmax import log_softmax_gradient, softmax_gradient
from tests.laws.samples import as_bool

CALLS = {
    "softmax": mw.softmax,
    "softmin": mw.softmin,
    "log_softmax": mw.log_softmax,
    "normalize": lambda x, mask, dim: mw.normalize(x, mask, dim=dim),
    "normalize-1": lambda x, mask, dim: mw.normalize(x, mask, 1.0, dim),
    "normalize-3": lambda x, mask, dim: mw.normalize(x, mask, 3.0, dim),
    "normalize-0.5": lambda x, mask, dim: mw.normalize(x, mask, 0.5, dim),
    "normalize-inf": lambda x, mask, dim: mw.normalize(x, mask, math.inf, dim),
    "normalize--inf": lambda x, mask, dim: mw.normalize(x, mask, -math.inf, dim, eps=0.5),
    "normalize-0": lambda x, mask, dim: mw.normalize(x, mask, 0.0, dim),
    "standardize": mw.standardize,
    "standardize-1": lambda x, mask, dim: mw.standardize(x, mask, dim, correction=1),
}

#: The same on plain torch operations.
PLAIN = {
    "softmax": reference.softmax,
    "softmin": reference.softmin,
    "log_softmax": reference.log_softmax,
    "normalize": lambda x, mask, dim: reference.normalize(x, mask, dim, 2.0, 1e-12),
    "normalize-1": lambda x, mask, dim: reference.normalize(x, mask, dim, 1.0, 1e-12),
    "normalize-3": lambda x, mask, dim: reference.normalize(x, mask, dim, 3.0, 1e-12),
    "normalize-0.5": lambda x, mask, dim: reference.normalize(x, mask, dim, 0.5, 1e-12),
    "normalize-inf": lambda x, mask, dim: reference.normalize(x, mask, dim, math.inf, 1e-12),
    "normalize--inf": lambda x, mask, dim: reference.normalize(x, mask, dim, -math.inf, 0.5),
    "normalize-0": lambda x, mask, dim: reference.normalize(x, mask, dim, 0.0, 1e-12),
    "standardize": lambda x, mask, dim: reference.standardize(x, mask, dim, 0.0, 1e-5),
    "standardize-1": lambda x, mask, dim: reference.standardize(x, mask, dim, 1.0, 1e-5),
}

#: The public functions, each once.
NAMES = ["softmax", "softmin", "log_softmax", "normalize", "standardize"]


def with_gradient(call, x, mask, dim, above):
    """The result, and the gradient of x when ``above`` is that of the result."""
    leaf = x.detach().requires_grad_()
    out = call(leaf, mask, dim)
    (gradient,) = torch.autograd.grad(out, leaf, above)
    return out.detach(), gradient


#: The gradients that are functions of the result. A half precision result was rounded, and they start from there.
OF_RESULT = {
    "softmax": lambda grad, out, mask, dim: softmax_gradient(grad, out, mask, dim, False),
    "softmin": lambda grad, out, mask, dim: softmax_gradient(grad, out, mask, dim, True),
    "log_softmax": log_softmax_gradient,
}


def assert_exact(name, mine, x, mask, dim, above):
    """Result and gradient are those of plain torch operations in float64, as near as x's dtype allows."""
    dims, mask = [dim % max(x.dim(), 1)], as_bool(mask)
    out, gradient = with_gradient(PLAIN[name], x.double(), mask, dims, above.double())
    if name in OF_RESULT and x.dtype.itemsize == 2:
        gradient = OF_RESULT[name](above.double(), mine[0].double(), mask, dims)
    assert_near(mine[0], out, x)
    assert_near(mine[1], gradient, x)


def assert_near(mine, exact, x):
    """As near as torch's own ops of that dtype come: some 100 roundings of the arithmetic, and one of the result.

    Values are divided by sums of many terms and gradients are differences of such, so the bound is in proportion to the
    largest magnitude rather than to each one. Float64 serves the tests of layouts, where slices of a single value make
    gradients cancel: the bound leaves 6 digits to that, and no element in a wrong place is that near.
    """
    assert mine.dtype == x.dtype
    assert mine.shape == exact.shape
    bound = 1e-10 if x.dtype is torch.float64 else 100 * torch.finfo(torch.float32).eps
    finite = exact[exact.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        mine.double(),
        exact,
        rtol=torch.finfo(x.dtype).eps + bound,
        atol=bound * max(1.0, largest) + torch.finfo(x.dtype).smallest_normal,
        equal_nan=True,
    )
