"""mw.where and mw.mul: torch's own results, with a Mask too, and gradients that end at what was not taken."""

import pytest
import torch

import maskwise as mw
from maskwise import Mask

X, OTHER = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), -1.0)
BITS = torch.tensor([[True, False, False], [True, True, False]])
OPERANDS = {
    "two tensors": (BITS, X, OTHER),
    "a number for what is dropped": (BITS, X, 7.0),
    "a number for what is kept": (BITS, 7.0, X),
    "ints and a float": (BITS, X.long(), 0.5),
    "ints and floats": (BITS, X.long(), OTHER),
    "floats and an int": (BITS, X, 3),
    "bools and an int": (BITS, X > 2, 3),
    "a float64 of no dims": (BITS, X, torch.tensor(2.0, dtype=torch.float64)),
    "a row of x": (BITS, X[0], OTHER),
    "a column of others": (BITS, X, OTHER[:, :1]),
    "a mask larger than both": (BITS, X[0, 0], OTHER[1]),
    "a mask smaller than both": (BITS[0], X, OTHER),
    "half precision": (BITS, X.bfloat16(), 0.1),
    "complex": (BITS, X, 1j),
}


@pytest.mark.parametrize("route", ["kernel", "plain"])
@pytest.mark.parametrize("name", OPERANDS)
def test_where_is_torchs_where_in_values_shape_and_dtype(name, route):
    mask, x, other = OPERANDS[name]
    expected = torch.where(mask, x, other)
    with mw.force(route):
        for given in (mask, Mask(mask)):
            found = mw.where(given, x, other)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_where_of_intervals_is_that_of_their_bits():
    mask = Mask.from_lengths([1, 2], max_len=3)
    assert torch.equal(mw.where(mask, X, 9.0), torch.where(mask.to_bool(), X, 9.0))
    assert torch.equal(mw.where(mask, 9.0, X), torch.where(mask.to_bool(), 9.0, X))


@pytest.mark.parametrize("mask", [BITS, Mask(BITS)], ids=["bool", "Mask"])
def test_each_side_of_where_has_a_gradient_only_where_it_was_taken(mask):
    x = torch.where(BITS, X, torch.nan).requires_grad_()
    other = torch.where(BITS, torch.nan, OTHER).requires_grad_()
    (mw.where(mask, x, other) * (1 + X)).sum().backward()
    assert torch.equal(x.grad, torch.where(BITS, 1 + X, 0.0))
    assert torch.equal(other.grad, torch.where(BITS, 0.0, 1 + X))


def test_where_and_mul_compile_without_a_break():
    torch._dynamo.reset()

    def call(x, mask):
        return mw.where(mask, x, 0), mw.where(mask, 1.0, x), mw.mul(x, mask)

    found = torch.compile(call, fullgraph=True, backend="eager")(X, BITS)
    for mine, eager in zip(found, call(X, BITS), strict=True):
        assert torch.equal(mine, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_mul_is_the_product_with_the_mask_in_xs_own_dtype(dtype):
    x = X.to(dtype)
    assert torch.equal(mw.mul(x, BITS), (x * BITS).to(dtype))


def test_mul_is_zero_where_the_product_is_nan():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    keep = torch.tensor([True, False, False])
    assert (x * keep).isnan().tolist() == [False, True, True]
    assert mw.mul(x, keep).tolist() == [1.0, 0.0, 0.0]


def test_they_are_reported_by_the_names_that_were_called():
    with mw.explain() as log:
        mw.where(BITS, X, 0.0)
        mw.mul(X, BITS)
    assert [call.op for call in log] == ["where", "mul"]
    assert mw.plan(mw.mul, X, BITS).op == "mul"
