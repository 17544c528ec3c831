"""What the suites of the reductions share: every function with the arguments it is tried with, and its exact value.

"Exact" is the plain route in float64, which the laws hold against a loop over what is kept.
"""

import torch

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.ops.reduce.law_cases import LAWS

INF = float("inf")

#: The keyword arguments to try, of the functions that have some.
SETTINGS = {
    "var": [{}, {"correction": 0}],
    "std": [{}, {"correction": 0.5}],
    "norm": [{"ord": ord} for ord in (2, 1, 0, 3, 0.5, -1, -2.5, INF, -INF)],
}
CALLS = [(name, kwargs) for name in LAWS for kwargs in SETTINGS.get(name, [{}])]
GRADIENTS = [(name, kwargs) for name, kwargs in CALLS if LAWS[name].gradient]


def label(value):
    if isinstance(value, list):
        return str(value)
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


def run(route, name, x, mask, dim=None, **kwargs):
    if name in ("argmax", "argmin") and isinstance(dim, (tuple, list)):
        dim = dim[0] if dim else None
    with force(route):
        return getattr(mw, name)(x, mask, dim=dim, **kwargs)


def exact(name, x, mask, dim=None, **kwargs):
    wide = x.double() if x.is_floating_point() else x
    return run("plain", name, wide, mask, dim, **kwargs)


def tolerance(dtype, length):
    """Relative error of a reduction: one rounding of the result, and those of float32 that accumulate on the way.

    Within a lane at most 64 partial results are joined before they widen to float64; halves are added in float32.
    """
    return torch.finfo(dtype).eps + 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def assert_agrees(out, x, mask, exactly, name, magnitude=1.0):
    """Out is the exact value, to the tolerance of its dtype; errors are in proportion to magnitudes that may cancel."""
    assert out.dtype == (exactly.dtype if not x.is_floating_point() or not out.is_floating_point() else x.dtype)
    if not out.is_floating_point():
        torch.testing.assert_close(out, exactly, rtol=0, atol=0)
        return
    # The powers and the root of a norm round a few times more.
    rtol = tolerance(x.dtype, x.numel()) * (4 if name == "norm" else 1)
    # What the dtype cannot hold is inf.
    exactly = exactly.to(out.dtype).double()
    torch.testing.assert_close(out.double(), exactly, rtol=rtol, atol=rtol * magnitude, equal_nan=True)


def gradient(route, name, x, mask, dim=None, **kwargs):
    """The gradient of a sum of results, each with a weight of its own."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = run(route, name, leaf, mask, dim, **kwargs)
    weights = torch.linspace(0.5, 2.0, max(out.numel(), 1))[: out.numel()].reshape(out.shape).to(out.dtype)
    return torch.autograd.grad(out, leaf, weights)[0]
