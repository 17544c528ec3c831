"""Law 5: plain tensors in, plain tensors out; compile, autocast and torch.func work."""

import pytest
import torch

import maskwise as mw
from maskwise.ops.registry import FUNCTIONS
from maskwise.plan.planner import force
from tests.laws.samples import ROUTES, cases

ALL = [pytest.param(f, id=f.name) for f in FUNCTIONS.values()]
DIFFERENTIABLE = [p for p in ALL if p.values[0].gradient]


def example(n=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, n, generator=generator), torch.rand(4, n, generator=generator) < 0.6


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), cases())
def test_results_and_gradients_are_plain_tensors_of_x_dtype_and_device(function, sample, route):
    x = sample.x.clone().requires_grad_(function.gradient > 0)
    with force(route):
        out = function.call(x, sample.mask, **sample.kwargs)
    assert type(out) is torch.Tensor
    assert out.device == x.device
    if function.gradient:
        assert out.requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert type(gradient) is torch.Tensor
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("as_mask", [False, True], ids=["bool", "Mask"])
@pytest.mark.parametrize("function", ALL)
def test_compiles_into_one_graph_with_the_eager_result_and_gradient(function, as_mask):
    torch._dynamo.reset()
    x, bits = example()
    mask = mw.Mask(bits) if as_mask else bits
    compiled = torch.compile(lambda x, mask: function.call(x, mask, dim=-1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), function.call(x, mask, dim=-1))
    if function.gradient:
        gradients = []
        for call in (compiled, lambda x, mask: function.call(x, mask, dim=-1)):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(call(leaf, mask).sum(), leaf)[0])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", ALL)
def test_compiles_with_dynamic_shapes_without_recompiling(function):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda x, mask: function.call(x, mask, dim=-1), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for n in (6, 9, 13):
        x, mask = example(n)
        torch.testing.assert_close(compiled(x, mask), function.call(x, mask, dim=-1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("function", ALL)
def test_a_mask_made_inside_a_compiled_graph_works(function):
    torch._dynamo.reset()
    x, _ = example()

    def call(x):
        return function.call(x, mw.Mask(x > 0), dim=-1)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


@pytest.mark.parametrize("function", ALL)
def test_vmap_equals_a_loop(function):
    x, mask = example()
    mapped = torch.func.vmap(lambda row, kept: function.call(row, kept, dim=-1))(x, mask)
    torch.testing.assert_close(mapped, function.call(x, mask, dim=-1))


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_func_grad_and_jvp_agree_with_autograd(function):
    x, mask = example()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function.call(leaf, mask, dim=-1).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: function.call(x, mask, dim=-1).sum())(x), expected)
    tangent = torch.linspace(-1, 1, x.numel()).reshape(x.shape)
    _, directional = torch.func.jvp(lambda x: function.call(x, mask, dim=-1).sum(), (x,), (tangent,))
    torch.testing.assert_close(directional, (expected * tangent).sum())


@pytest.mark.parametrize("function", ALL)
def test_works_under_autocast(function):
    x, mask = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function.call(x, mask, dim=-1)
    torch.testing.assert_close(out, function.call(x, mask, dim=-1))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(function, route):
    x, mask = example()
    x = x.double().requires_grad_()

    def call(x):
        return function.call(x, mask, dim=-1)

    with force(route):
        assert torch.autograd.gradcheck(call, (x,))
        if function.gradient > 1:
            assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("function", ALL)
def test_runs_on_fake_cuda_tensors_without_reading_data(function):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda")
        out = function.call(x, torch.empty(4, 6, dtype=torch.bool, device="cuda"), dim=-1)
        assert out.device.type == "cuda"
