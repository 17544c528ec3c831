"""PyTorch's own samples for ``torch.masked``, handed to the functions of the same name.

Forward, each result is torch.masked's wherever a slice keeps something (where none does, torch.masked has several rules
and we have one, which the laws hold). Backward, NaN lies under the mask: the gradient must be the one that torch.masked
has on clean values. torch.masked itself gives NaN for many of these (var, std).
"""

import pytest
import torch
from torch.testing._internal.opinfo.definitions._masked import op_db

import maskwise as mw
from maskwise.plan.dispatch import force

ROUTES = ("plain", "kernel")
#: torch.masked.logaddexp takes two tensors with a mask each, which is no function of ours.
OPS = [pytest.param(op, id=op.name.removeprefix("masked.")) for op in op_db if op.name != "masked.logaddexp"]


def ours(op):
    name = op.name.removeprefix("masked.")
    if not hasattr(mw, name):
        pytest.skip(f"there is no mw.{name}")
    return getattr(mw, name)


def translated(op, sample, x):
    """A sample as torch.masked's keyword arguments and as ours, its mask, and which results have something kept."""
    name = op.name.removeprefix("masked.")
    kwargs = dict(sample.kwargs)
    mask = kwargs.pop("mask", None)
    keep = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask
    mine = dict(kwargs)
    args = list(sample.args)
    if name in ("var", "std"):
        unbiased = mine.pop("unbiased", None)
        if unbiased is not None:
            mine["correction"] = int(unbiased)
        if mine.get("correction", 1) is None:
            del mine["correction"]
    if name == "norm":
        mine["ord"] = args.pop(0)
    if name == "normalize":
        mine["p"], mine["dim"] = args
    elif args:
        mine["dim"] = args[0]
    dim = mine.get("dim")
    wide = keep.expand(x.shape)
    if name in ("softmax", "log_softmax", "softmin", "normalize", "cumsum", "cumprod"):
        some = wide.any(dim, keepdim=True).expand(x.shape) if x.dim() else wide
    elif dim is None or x.dim() == 0:
        some = wide.any()
    else:
        some = wide.any(dim, keepdim=bool(mine.get("keepdim")))
    return kwargs, mine, keep, some


def samples(op, requires_grad=False):
    return [s for s in op.sample_inputs("cpu", torch.float64, requires_grad=requires_grad) if s.input.numel()]


def theirs_of(op, sample, x, kwargs, keep):
    return op.op(x, *sample.args, mask=keep, **kwargs)


def planted(x, keep):
    return torch.where(keep, x, torch.nan)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("op", OPS)
def test_the_result_is_that_of_torch_masked(op, route):
    call, compared = ours(op), 0
    for sample in samples(op):
        x = sample.input
        kwargs, mine, keep, some = translated(op, sample, x)
        theirs = theirs_of(op, sample, x, kwargs, keep)
        with force(route):
            out = call(planted(x, keep), keep, **mine)
        assert out.shape == theirs.shape
        # torch.masked gives indices in the dtype of x.
        torch.testing.assert_close(out[some], theirs[some].to(out.dtype), equal_nan=True)
        compared += int(some.sum())
    assert compared > 20


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("op", [p for p in OPS if p.values[0].supports_autograd])
def test_nan_under_the_mask_leaves_the_gradient_of_clean_values(op, route):
    call, compared = ours(op), 0
    for sample in samples(op, requires_grad=True):
        clean = sample.input.detach().requires_grad_()
        kwargs, mine, keep, some = translated(op, sample, clean)
        theirs = theirs_of(op, sample, clean, kwargs, keep)
        # What torch.masked cannot compute, such as a variance of one value, says nothing about gradients.
        counts = some & theirs.detach().isfinite()
        weights = torch.linspace(0.5, 2.0, theirs.numel(), dtype=theirs.dtype).reshape(theirs.shape)
        total = torch.where(counts, theirs * weights, 0.0).sum()
        # The norm of order 0 counts, and has no gradient.
        (expected,) = torch.autograd.grad(total, clean, materialize_grads=True)
        dirty = planted(sample.input.detach(), keep).requires_grad_()
        with force(route):
            out = call(dirty, keep, **mine)
            (gradient,) = torch.autograd.grad(torch.where(counts, out * weights, 0.0).sum(), dirty)
        assert gradient.isfinite().all(), sample
        known = expected.isfinite()
        torch.testing.assert_close(gradient[known], expected[known])
        compared += int(known.sum())
    assert compared > 20
