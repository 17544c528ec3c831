"""mw.linear: values, gradients, routes, what it remembers, errors with their hints."""

import gc
import weakref

import pytest
import torch
from torch.nn.functional import linear as dense_linear

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from maskwise.ops.linear import SparseLayout
from maskwise.ops.linear.sparse import Product, product_routes
from maskwise.plan.cost import BUILT_IN
from maskwise.plan.dispatch import Facts, Skips, force

both_routes = pytest.mark.parametrize("route", ["plain", "kernel"])


def sample(*lead, inputs=33, outputs=20, dtype=torch.float32):
    x = torch.randn(*lead, inputs).to(dtype)
    return x, torch.randn(outputs, inputs).to(dtype), torch.rand(outputs, inputs) < 0.3, torch.randn(outputs).to(dtype)


@both_routes
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 5), (0,), (3, 0, 2)])
def test_values_and_gradients_are_those_of_the_masked_dense_weight(lead, route):
    x, weight, mask, bias = sample(*lead)
    for form in (mask, mw.Mask(mask)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        with force(route):
            out = mw.linear(leaves[0], leaves[1], form, leaves[2])
        above = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, above)
        exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
        truth = dense_linear(exact[0], exact[1] * mask, exact[2])
        expected = torch.autograd.grad(truth, exact, above.double())
        assert out.shape == truth.shape
        # Sums of 33 products, in another order.
        torch.testing.assert_close(out.double(), truth.detach(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        assert not found[1][~mask].any()


@both_routes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_in_dropped_weights_changes_no_bit_of_output_or_gradients(poison, route):
    x, weight, mask, bias = sample(9)
    found = []
    for value in (0.0, poison):
        leaves = [x.clone().requires_grad_(), torch.where(mask, weight, value).requires_grad_()]
        with force(route):
            out = mw.linear(leaves[0], leaves[1], mask, bias)
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for clean, poisoned in zip(*found, strict=True):
        assert torch.equal(clean, poisoned)


@both_routes
def test_nothing_kept_gives_the_bias_and_everything_kept_the_dense_product(route):
    x, weight, _, bias = sample(6)
    with force(route):
        nothing = mw.linear(x, weight, mw.Mask.none((20, 33)), bias)
        everything = mw.linear(x, weight, mw.Mask.full((20, 33)), bias)
    assert torch.equal(nothing, bias.expand(6, 20))
    torch.testing.assert_close(everything, dense_linear(x, weight, bias))


def test_gradients_are_those_of_finite_differences_twice():
    x, weight, mask, bias = sample(3, inputs=4, outputs=3, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: mw.linear(x, w, mask, b), leaves)
    assert torch.autograd.gradgradcheck(lambda x, w, b: mw.linear(x, w, mask, b), leaves)


def test_a_mask_that_comes_again_gets_a_layout_and_one_that_comes_once_does_not():
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    mask = mw.Mask(torch.rand(512, 512) < 0.05)
    with mw.explain() as log:
        for _ in range(30):
            mw.linear(x, weight, mask)
    routes = [call.route for call in log]
    assert routes[0] == "plain"
    assert "a layout would cost" in log.calls[0].reason
    assert routes[-1] == "sparse"
    assert (log.calls[-1].elements, log.calls[-1].skipped) == (512 * 512, 512 * 512 - mask.count())


def test_a_bool_tensor_is_remembered_until_it_is_changed_or_gone():
    x, weight, mask, bias = sample(9)
    with force("kernel"):
        mw.linear(x, weight, mask, bias)
        mask[0] = ~mask[0]
        out = mw.linear(x, weight, mask, bias)
    torch.testing.assert_close(out, dense_linear(x, weight * mask, bias))
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_a_dense_mask_takes_the_dense_product():
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    with mw.explain() as log:
        for _ in range(30):
            mw.linear(x, weight, mw.Mask(torch.rand(512, 512) < 0.9))
    assert {call.route for call in log} == {"plain"}


def test_it_compiles_into_one_graph():
    torch._dynamo.reset()
    x, weight, mask, bias = sample(9)
    compiled = torch.compile(mw.linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, mask, bias), dense_linear(x, weight * mask, bias))


def test_vmap_and_forward_mode_see_through_it():
    x, weight, mask, bias = sample(4, 9)
    mapped = torch.func.vmap(lambda x: mw.linear(x, weight, mask, bias))(x)
    torch.testing.assert_close(mapped, dense_linear(x, weight * mask, bias))
    _, tangent = torch.func.jvp(lambda x: mw.linear(x, weight, mask, bias), (x,), (x,))
    torch.testing.assert_close(tangent, dense_linear(x, weight * mask))


@both_routes
def test_autocast_computes_in_the_lower_precision(route):
    x, weight, mask, bias = sample(9)
    with torch.autocast("cpu", torch.bfloat16), force(route):
        out = mw.linear(x, weight, mask, bias)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), dense_linear(x, weight * mask, bias), rtol=0.03, atol=0.2)


def test_errors_name_the_argument_and_what_to_write_instead():
    x, weight, mask, bias = sample(9)
    with pytest.raises(ShapeError, match=r"linear: `mask` must have the weight's shape .* Hint: mask\.T\."):
        mw.linear(x, weight, mask.T, bias)
    with pytest.raises(ShapeError, match=r"linear: `mask` must have the weight's shape"):
        mw.linear(x, weight, mask[:5], bias)
    with pytest.raises(ShapeError, match=r"linear: `x` must end in the weight's 33 inputs, got \(9, 32\)"):
        mw.linear(x[:, 1:], weight, mask, bias)
    with pytest.raises(ShapeError, match=r"linear: `weight` must have two dims"):
        mw.linear(x, weight[0], mask, bias)
    with pytest.raises(ShapeError, match=r"linear: `bias` must have one value for each of the weight's 20 outputs"):
        mw.linear(x, weight, mask, bias[1:])
    with pytest.raises(DtypeError, match=r"linear: `mask` must be a Mask or a bool tensor, got torch\.float32"):
        mw.linear(x, weight, mask.float(), bias)
    with pytest.raises(DtypeError, match=r"linear: `weight` must have x's dtype"):
        mw.linear(x, weight.double(), mask, bias)
    with pytest.raises(DtypeError, match=r"linear: `x` must be a tensor, got list"):
        mw.linear([1.0], weight, mask, bias)
    with pytest.raises(DeviceError, match=r"linear: `weight` must be on x's device cpu, got meta"):
        mw.linear(x, weight.to("meta"), mask, bias)


def test_a_layout_refuses_blocks_that_it_does_not_have_and_parts_of_blocks():
    with pytest.raises(ArgumentError, match="keep whole blocks"):
        SparseLayout.from_mask(torch.eye(16, dtype=torch.bool), (4, 1))
    with pytest.raises(ArgumentError, match="`block` must be one of"):
        SparseLayout.from_mask(torch.eye(16, dtype=torch.bool), (2, 2))
    with pytest.raises(ShapeError, match="two dims"):
        SparseLayout.from_mask(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_dense", [False, True])
def test_predictions_for_a_gpu_are_made_of_its_rates_alone(dtype, is_dense):
    """A product of 0.4 ms was predicted to take 1.9 s, by the speed of a CPU at gathering weights."""
    rates = BUILT_IN["cuda"]
    inputs, outputs, batch = 16384, 16384, 64
    weights = inputs * outputs
    detail = Product(batch, inputs, outputs, (16, 16), is_dense=is_dense)
    routes = product_routes(print, print, skips=Skips.COMPUTING)
    facts = Facts("linear", (batch, inputs), dtype, "cuda", kept=weights // 10, detail=detail)
    (_, sparse), (_, plain) = (route.predict(facts) for route in routes)
    passes = 2 * dtype.itemsize + 1 if is_dense else 0
    bytes_moved = (dtype.itemsize + passes) * weights
    flops = 2 * batch * weights / rates.flops
    assert bytes_moved / rates.streamed <= plain <= 2 * bytes_moved / rates.streamed + flops
    assert sparse < plain
    # With most of it kept, the kernel of blocks does not pay.
    (_, sparse), (_, plain) = (route.predict(facts._replace(kept=weights)) for route in routes)
    assert sparse > plain or is_dense
