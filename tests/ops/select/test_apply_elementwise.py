"""mw.apply with elementwise functions runs on all rows, without a leak."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("size", [(6, 7), (600, 70)], ids=str)
@pytest.mark.parametrize("fill", [0.0, 2.5, -torch.inf, 3])
@pytest.mark.parametrize("kind", ["elements", "rows", "column", "Mask", "lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_repeated_call_reads_the_mask_of_its_own(size, fill, kind, dtype):
    if not dtype.is_floating_point:
        fill = 3
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.rand(size, generator=generator) * 10).to(dtype)
        keep = torch.rand(size if kind in ("elements", "Mask") else size[:1], generator=generator) > 0.5
        mask = keep
        if kind == "column":
            keep = mask = keep[:, None]
        elif kind == "rows":
            keep = keep[:, None]
        elif kind == "Mask":
            mask = mw.Mask(keep)
        elif kind == "lengths":
            mask = mw.Mask.from_lengths(torch.randint(0, size[1] + 1, size[:1], generator=generator), max_len=size[1])
            keep = mask.to_bool()
        assert torch.equal(mw.apply(torch.neg, x, mask=mask, fill=fill), torch.where(keep, -x, fill).to(dtype))


def test_a_repeated_call_notices_that_a_gradient_is_required(inputs):
    x, _, keep, (dirty, _) = inputs
    for _ in range(2):
        assert torch.equal(mw.apply(torch.log, dirty, mask=keep), torch.where(keep, x.log(), 0.0))
    leaf = dirty.requires_grad_()
    mw.apply(torch.log, leaf, mask=keep).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.where(keep, 1 / x, 0.0))
    with mw.explain() as log:
        mw.apply(torch.log, dirty.detach(), mask=keep)
    assert [call.op for call in log] == ["apply"]


def test_a_repeated_call_of_a_small_x_takes_a_tanh_and_a_where(inputs):
    x, _, keep, _ = inputs
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.__name__)
            return func(*args, **kwargs or {})

    mw.apply(torch.tanh, x, mask=keep)
    with Count():
        mw.apply(torch.tanh, x, mask=keep)
    assert calls == ["tanh.default", "scalar_tensor.default", "where.self"]
