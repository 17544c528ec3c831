"""Law 3: one rule for nothing kept: the function's empty value, ``empty=`` instead of it, and a gradient of zero."""

import pytest
import torch

from maskwise.plan.dispatch import force
from tests.laws.samples import ROUTES, UNDER_LAW, needed
from tests.laws.subjects import SUBJECTS, total

REDUCTIONS = [pytest.param(f, id=f.name) for f in UNDER_LAW if f.kind in ("reduction", "position")]


def half_empty():
    x = torch.full((3, 5), float("nan"))
    x[1] = torch.arange(1.0, 6.0)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1] = True
    return x, mask


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", REDUCTIONS)
def test_an_empty_slice_gives_the_empty_value(function, route):
    x, mask = half_empty()
    with force(route):
        out = function.call(x, mask, dim=1, **needed(function))
    expected = torch.tensor([function.empty] * 2, dtype=out.dtype)
    torch.testing.assert_close(out[[0, 2]], expected, rtol=0, atol=0, equal_nan=True)
    assert out[1].isfinite()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", REDUCTIONS)
def test_empty_replaces_that_value_and_no_other(function, route):
    x, mask = half_empty()
    with force(route):
        out = function.call(x, mask, dim=1, empty=-7, **needed(function))
        unchanged = function.call(x, mask, dim=1, **needed(function))[1]
    assert out[[0, 2]].tolist() == [-7, -7]
    assert out[1] == unchanged


@pytest.mark.parametrize("empty", [None, -7])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", [p for p in REDUCTIONS if p.values[0].gradient])
def test_the_gradient_of_an_empty_slice_is_exactly_zero(function, route, empty):
    x, mask = half_empty()
    x.requires_grad_()
    with force(route):
        out = function.call(x, mask, dim=1, empty=empty, **needed(function))
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient[[0, 2]], torch.zeros(2, 5))


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("function", REDUCTIONS)
def test_a_slice_of_no_elements_is_an_empty_slice(function, shape, route):
    x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    with force(route):
        out = function.call(x, mask, dim=-1, **needed(function))
    assert out.shape == shape[:-1]
    torch.testing.assert_close(out, torch.full_like(out, function.empty), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_call_or_a_layer_that_keeps_nothing_has_no_gradient_and_no_nan(subject):
    mask = torch.zeros(subject.mask, dtype=torch.bool)
    leaves = [x.requires_grad_() for x in subject.tensors()]
    dropped = subject.dropped(mask)
    given = tuple(
        x if gone is None else torch.where(gone, torch.nan, x) for x, gone in zip(leaves, dropped, strict=True)
    )
    out = subject.call(given, mask)
    # What a pool gives for nothing is told in its own suite.
    if subject.empty is not None:
        assert torch.equal(out, torch.full_like(out, subject.empty))
    for gradient in torch.autograd.grad(total([out]), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))
