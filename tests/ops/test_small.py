"""Small calls go to torch first: what comes back is what the long way gives, and wrong arguments are told as ever."""

import math

import pytest
import torch

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.primitives import number

X = torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, 6.0]])
KEEP = torch.tensor([[True, False, True], [False, False, True]])


@pytest.fixture(params=["plain", "kernel"])
def the_long_way(request):
    """A log listens, so that nothing is skipped, and a route is forced."""
    with mw.explain(), mw.force(request.param):
        yield


def test_small_calls_give_what_the_long_way_gives(the_long_way):
    by_the_long_way = mw.fill(X, KEEP, -1.0), mw.count(KEEP, dim=1), mw.count(KEEP, dim=-1, keepdim=True)
    with mw.force(None):
        short = mw.fill(X, KEEP, -1.0), mw.count(KEEP, dim=1), mw.count(KEEP, dim=-1, keepdim=True)
    for a, b in zip(short, by_the_long_way, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize("shape", [(70, 50), (3, 1500), (5000,)])
def test_calls_that_are_not_small_need_no_more_than_a_mask_of_the_same_shape(shape):
    x, keep = torch.rand(shape), torch.rand(shape) < 0.5
    x[~keep] = torch.nan
    for lies in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
        assert torch.equal(mw.fill(lies, keep, -2.0), torch.where(keep, lies, -2.0))
        column = keep[..., :1]
        filled, expected = mw.fill(lies, column, -2.0), torch.where(column, x, -2.0)
        torch.testing.assert_close(filled, expected, equal_nan=True)
    with pytest.raises(ShapeError, match="broadcast"):
        mw.fill(x, keep[..., :-1], 0.0)
    with mw.force("dense"):
        assert torch.equal(mw.fill(x, keep, -2.0), torch.where(keep, x, -2.0))


def test_a_mask_and_a_bool_tensor_are_the_same():
    assert torch.equal(mw.fill(X, mw.Mask(KEEP), 0.0), mw.fill(X, KEEP, 0.0))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: mw.fill(X, KEEP.T, 0.0), ShapeError),
        (lambda: mw.fill(X[:1], KEEP, 0.0), ShapeError),
        (lambda: mw.fill(X, KEEP.to(torch.uint8), 0.0), DtypeError),
        (lambda: mw.fill(X, KEEP.float(), 0.0), DtypeError),
        (lambda: mw.fill(X, None, 0.0), DtypeError),
        (lambda: mw.fill(X, KEEP.tolist(), 0.0), DtypeError),
        (lambda: mw.fill(X, KEEP.to("meta"), 0.0), DeviceError),
        (lambda: mw.fill(X.to_sparse(), KEEP, 0.0), ArgumentError),
        (lambda: mw.fill(X, KEEP.to_sparse(), 0.0), ArgumentError),
        (lambda: mw.count(KEEP, dim=2), OutOfRangeError),
        (lambda: mw.count(KEEP.int(), dim=0), DtypeError),
        (lambda: mw.count(KEEP.to_sparse(), dim=0), ArgumentError),
    ],
)
def test_a_wrong_argument_of_a_small_call_is_told_as_ever(call, error):
    with pytest.raises(error, match=r"fill|count"):
        call()


def test_a_number_that_does_not_fit_is_refused_in_small_calls_too():
    with pytest.raises(ArgumentError, match=r"fit x's dtype torch\.float16"):
        mw.fill(X.half(), KEEP, 1e30)


def test_what_learns_goes_the_long_way_and_learns_the_same():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(mw.fill(x, KEEP, 0.0).sum(), x)
    assert torch.equal(grad, KEEP.float())


def test_small_calls_are_plain_and_large_ones_are_not():
    x, mask = torch.rand(8), torch.rand(8) < 0.5
    assert mw.plan(mw.fill, x, mask, 0.0).route == "plain"
    assert mw.plan(mw.fill, torch.rand(1 << 16), torch.rand(1 << 16) < 0.5, 0.0).route == "bare"
    with mw.force("kernel"):
        assert mw.plan(mw.fill, x, mask, 0.0).route == "bare"


def test_numbers_are_remembered_by_sign_and_not_across_modes():
    from torch._subclasses import FakeTensorMode

    zero, minus = number(0.0, torch.float32, "cpu"), number(-0.0, torch.float32, "cpu")
    assert number(0.0, torch.float32, "cpu") is zero
    assert not zero.signbit()
    assert minus.signbit()
    with FakeTensorMode():
        assert number(0.0, torch.float32, "cpu") is not zero
    with torch.inference_mode():
        assert not number(2.0, torch.float32, "cpu").requires_grad
    assert not number(2.0, torch.float32, "cpu").is_inference()
