"""PyTorch's own samples of its masked reductions: the same values, and gradients that no NaN under the mask spoils."""

import pytest
import torch
from torch.testing._internal.opinfo.definitions._masked import op_db

import maskwise as mw
from maskwise.plan.planner import force
from tests.laws.samples import ROUTES

NAMES = ["sum", "prod", "mean", "var", "std", "norm", "amax", "amin", "argmax", "argmin", "logsumexp"]
OPINFO = {info.name: info for info in op_db}


def samples(name):
    """(x, mask, keyword arguments) in the words of mw."""
    for sample in OPINFO[f"masked.{name}"].sample_inputs("cpu", torch.float64, requires_grad=False):
        kwargs = {**dict(zip(("dim",), sample.args[-1:], strict=False)), **sample.kwargs}
        if name == "norm":
            kwargs = {**dict(zip(("ord", "dim"), sample.args, strict=False)), **sample.kwargs}
        mask = kwargs.pop("mask", None)
        x = sample.input.detach()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        if "unbiased" in kwargs:
            kwargs["correction"] = int(kwargs.pop("unbiased"))
        if mask.dim() <= x.dim() and x.numel():
            yield x, mask, kwargs


def expected(name, x, mask, kwargs):
    words = dict(kwargs)
    if name in ("var", "std"):
        words["correction"] = words.get("correction", 1)
    arguments = (words.pop("ord", 2),) if name == "norm" else ()
    return getattr(torch.masked, name)(x, *arguments, mask=mask.expand(x.shape), **words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_torchs_samples_give_torchs_values_and_unspoilt_gradients(name, route):
    tried = 0
    for x, mask, kwargs in samples(name):
        keep = mask.expand(x.shape)
        with force(route):
            out = getattr(mw, name)(x, mask, **kwargs)
        theirs = expected(name, x, mask, kwargs)
        dims = kwargs.get("dim")
        some = keep.any() if dims is None or dims == () else keep
        for d in sorted([dims] if isinstance(dims, int) else dims or (), key=lambda d: d % max(x.dim(), 1))[::-1]:
            some = some.any(d, keepdim=kwargs.get("keepdim", False)) if x.dim() else some
        some = some.reshape(out.shape)
        torch.testing.assert_close(out[some], theirs.reshape(out.shape)[some], equal_nan=True)
        tried += 1
        if not out.is_floating_point():
            continue
        gradients = []
        for fill in (0.25, float("nan")):
            leaf = torch.where(keep, x, fill).requires_grad_()
            with force(route):
                result = getattr(mw, name)(leaf, mask, **kwargs)
            gradients.append(torch.autograd.grad(torch.where(result.isfinite(), result, 0.0).sum(), leaf)[0])
        torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(gradients[1][~keep], torch.zeros_like(gradients[1][~keep]))
    assert tried > 10
