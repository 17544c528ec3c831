"""mw.apply with elementwise functions runs on all rows, without a leak."""

import pytest
import torch

import maskwise as mw


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(6, 7, generator=generator) + 0.5, torch.rand(6, 7, generator=generator) + 0.5
    keep = torch.ones(6, 7, dtype=torch.bool)
    keep[2, 3:] = False
    dirty = [t.masked_fill(~keep, torch.nan) for t in (x, y)]
    return x, y, keep, dirty


@pytest.mark.parametrize("fn", [torch.add, torch.mul, torch.div])
def test_nothing_dropped_reaches_the_result(fn, inputs):
    x, y, keep, dirty = inputs
    out = mw.apply(fn, *dirty, mask=keep, other=x)
    assert torch.equal(out, torch.where(keep, fn(x, y), x))


@pytest.mark.parametrize("fn", [torch.add, torch.mul, torch.div])
def test_nothing_dropped_reaches_a_gradient(fn, inputs):
    x, y, keep, dirty = inputs
    dirty = [t.requires_grad_() for t in dirty]
    found = torch.autograd.grad(mw.apply(fn, *dirty, mask=keep).sum(), dirty)
    clean = [t.clone().requires_grad_() for t in (x, y)]
    expected = torch.autograd.grad(torch.where(keep, fn(*clean), 0.0).sum(), clean)
    # The same values go through the same operations, so they agree to the last bit.
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_function_of_one_element_can_be_differentiated_inside_of_a_transform(inputs):
    x, _, keep, (dirty, _) = inputs
    found = torch.func.grad(lambda t: mw.apply(torch.log, t, mask=keep).sum())(dirty)
    assert torch.allclose(found, torch.where(keep, 1 / x, 0.0))


def test_ints_are_filled_with_ones_of_their_own_kind():
    x = torch.tensor([[4, 0], [2, 1]])
    keep = torch.tensor([[True, False], [True, True]])
    out = torch.func.vmap(lambda row, kept: mw.apply(torch.mul, row, row, mask=kept))(x, keep)
    assert out.tolist() == [[16, 0], [4, 1]]
