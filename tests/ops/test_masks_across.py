"""A mask whose strides differ from x's (a transposed x, a contiguous mask) gives the same result."""

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from tests.laws.functions import FUNCTIONS

pytestmark = pytest.mark.kernel

#: Whole blocks of eight rows and columns, and what is left over at both ends; long columns, which threads share.
SHAPES = [(8, 16), (9, 17), (70, 33), (64, 128), (300, 45), (16, 5000)]
MORE = {"quantile": (0.3,), "topk": (3,), "fill": (-1.0,)}


def call(function, x, keep):
    if function.name == "loss":
        return (mw.loss(F.mse_loss, x, torch.flip(x.detach(), (0,)), keep),)
    dim = {} if function.name == "fill" else {"dim": -1}
    found = function.call(x, keep, *MORE.get(function.name, ()), **dim)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_the_strides_of_the_mask_make_no_difference(function, shape):
    generator = torch.Generator().manual_seed(0)
    # Distinct values near 1, so that orders are unique and products stay finite.
    values = 1 + torch.randperm(shape[0] * shape[1], generator=generator).reshape(shape) / (64.0 * shape[0] * shape[1])
    values = values > 1.008 if function.name in ("any", "all") else values
    keep = torch.rand(shape, generator=generator) < 0.5
    across = values.T.contiguous().T
    assert not across.is_contiguous()
    with mw.force("kernel"):
        for got, expected in zip(call(function, across, keep), call(function, values, keep), strict=True):
            # Sums are made in another order, which costs float32 up to 1e-5 on long rows.
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
            assert got.shape == expected.shape


@pytest.mark.parametrize("name", ["sum", "softmax", "cumsum", "amax", "logsumexp", "loss"])
def test_nor_does_it_for_gradients(name):
    function = FUNCTIONS[name]
    values = torch.rand(40, 72, generator=torch.Generator().manual_seed(1))
    keep = torch.rand(40, 72, generator=torch.Generator().manual_seed(2)) < 0.5
    gradients = []
    for x in (values.T.contiguous().T, values):
        leaf = x.detach().requires_grad_()
        with mw.force("kernel"):
            out = call(function, leaf, keep)[0]
            gradients.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_best_few_of_a_row_are_found_whatever_its_order():
    rising = torch.arange(1000.0).reshape(1, -1)
    keep = torch.ones(1, 1000, dtype=torch.bool)
    keep[0, ::3] = False
    for x in (rising, rising.flip(-1), torch.zeros(1, 1000), (rising * 37) % 101):
        for k in (1, 3, 16, 17, 40):
            values, indices = mw.topk(x, keep, k)
            expected = torch.where(keep, x, -torch.inf).sort(descending=True, stable=True)
            assert torch.equal(values, expected.values[:, :k])
            assert torch.equal(x.gather(-1, indices), values)
            assert bool(keep.gather(-1, indices).all())
            assert indices.unique().numel() == k
