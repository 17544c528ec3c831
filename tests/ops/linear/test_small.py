"""Small products are checked once for their sizes, and then go straight to the dense product."""

import pytest
import torch

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError


def _call(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(4, 8, generator=generator), torch.randn(6, 8, generator=generator)
    return x, weight, torch.rand(6, 8, generator=generator) < 0.5, torch.randn(6, generator=generator)


def test_a_second_small_call_gives_what_the_first_gave_and_nothing_leaks():
    x, weight, mask, bias = _call()
    weight[~mask] = torch.nan
    expected = torch.nn.functional.linear(x, weight.nan_to_num(0.0), bias)
    for _ in range(2):
        torch.testing.assert_close(mw.linear(x, weight, mask, bias), expected)
    assert mw.plan(mw.linear, x, weight, mask, bias).reason == "too small a product for a kernel to pay"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x, w, m, b: (x[:, :7], w, m, b), ShapeError),
        (lambda x, w, m, b: (x, w, m[:5], b), ShapeError),
        (lambda x, w, m, b: (x, w, m.float(), b), DtypeError),
        (lambda x, w, m, b: (x, w.double(), m, b), DtypeError),
        (lambda x, w, m, b: (x, w, m, b[:5]), ShapeError),
        (lambda x, w, m, b: (x, w, m.tolist(), b), DtypeError),
        (lambda x, w, m, b: (x, w, m, b.double()), DtypeError),
        (lambda x, w, m, b: (x, w.to("meta"), m.to("meta"), b), DeviceError),
        (lambda x, w, m, b: (x, w, m, b.to("meta")), DeviceError),
        (lambda x, w, m, b: (x, w, m.to("meta"), b), DeviceError),
        (lambda x, w, m, b: (x.to_sparse(), w, m, b), ArgumentError),
        (lambda x, w, m, b: (x, w.to_sparse(), m, b), ArgumentError),
    ],
)
@pytest.mark.parametrize("route", [None, "dense", "kernel"])
def test_a_wrong_argument_is_refused_after_a_right_call(change, error, route):
    call = _call()
    with mw.force(route):
        mw.linear(*call)
        with pytest.raises(error, match="linear: "):
            mw.linear(*change(*call))


def test_another_mask_of_the_same_shape_is_not_the_one_before():
    x, weight, mask, bias = _call()
    mw.linear(x, weight, mask, bias)
    torch.testing.assert_close(mw.linear(x, weight, ~mask, bias), torch.nn.functional.linear(x, weight * ~mask, bias))


def test_a_forced_route_and_a_log_see_small_calls_too():
    x, weight, mask, bias = _call()
    mw.linear(x, weight, mask, bias)
    with mw.explain() as log:
        mw.linear(x, weight, mask, bias)
    with mw.force("kernel"), mw.explain() as forced:
        out = mw.linear(x, weight, mask, bias)
    assert [call.route for call in log] == ["plain"]
    assert [call.route for call in forced] == ["sparse"]
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight * mask, bias))


def test_gradients_of_a_small_call_reach_kept_weights_only():
    x, weight, mask, bias = _call()
    weight.requires_grad_()
    for _ in range(2):
        (grad,) = torch.autograd.grad(mw.linear(x, weight, mask, bias).sum(), weight)
        torch.testing.assert_close(grad, x.sum(0).expand(6, 8) * mask)
