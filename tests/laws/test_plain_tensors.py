"""Law 4: plain tensors in, plain tensors out; compile, autocast and torch.func work."""

import pytest
import torch

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.laws.samples import ROUTES, UNDER_LAW, as_bool, cases, differentiable, interval_masks, outputs, samples
from tests.laws.subjects import SUBJECTS, trials
from tests.laws.subjects import total as total_of

ALL = [pytest.param(f, id=f.name) for f in UNDER_LAW]
DIFFERENTIABLE = [p for p in ALL if p.values[0].gradient]


def example(n=6):
    """An x and a mask of which every row keeps something: gradients are compared here, and must not be NaN."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(4, n, generator=generator) < 0.6
    mask[:, :2] = True
    return torch.randn(4, n, generator=generator), mask


def padded(n=6):
    """The same x, with a mask of intervals of which every row keeps three or more.

    The gradient of two that are close to each other is mostly rounding.
    """
    return example(n)[0], mw.Mask.from_lengths([n, 3, 4, n - 1], n)


def inputs_as(kind):
    """An x with a mask of a kind: a bool tensor, or a Mask of bits or of intervals."""
    x, bits = example()
    return {"bool": (x, bits), "Mask": (x, mw.Mask(bits)), "intervals": padded()}[kind]


def caller(function):
    """The function as ``call(x, mask)``, over the last dim if it has dims, with whatever else it needs."""
    kwargs = {**next(iter(samples(function))).kwargs}
    if function.kind != "elementwise":
        kwargs["dim"] = -1
    return lambda x, mask: function.call(x, mask, **kwargs)


def total(result):
    """One number of every output that has a gradient."""
    return sum((out * torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)).sum() for out in differentiable(result))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), cases())
def test_results_and_gradients_are_plain_tensors_of_x_dtype_and_device(function, sample, route):
    x = sample.x.clone().requires_grad_(function.gradient > 0)
    with force(route):
        result = function.call(x, sample.mask, **sample.kwargs)
    for out in outputs(result):
        assert type(out) is torch.Tensor
        assert out.device == x.device
    if function.gradient:
        (gradient,) = torch.autograd.grad(total(result), x)
        assert type(gradient) is torch.Tensor
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("kind", ["bool", "Mask", "intervals"])
@pytest.mark.parametrize("function", ALL)
def test_compiles_into_one_graph_with_the_eager_result_and_gradient(function, kind):
    torch._dynamo.reset()
    x, mask = inputs_as(kind)
    call = caller(function)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled(x, mask)), outputs(call(x, mask)))
    if function.gradient:
        gradients = []
        for route in (compiled, call):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(total(route(leaf, mask)), leaf)[0])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("origin", interval_masks((4, 6)))
def test_intervals_compile_as_an_argument_as_a_constant_and_through_views(origin):
    torch._dynamo.reset()
    mask, x = interval_masks((4, 6))[origin], torch.randn(4, 6, 3)
    bits = as_bool(mask)[..., None]
    expected = mw.sum(x, bits, 1) + mw.softmax(x, bits & bits.flip(-1), 0).sum(1)

    def call(x, mask):
        rows = mask[..., None]
        return mw.sum(x, rows, 1) + mw.softmax(x, rows & rows.expand(4, 6, 3), 0).sum(1)

    for compiled in (
        torch.compile(call, fullgraph=True, backend="aot_eager"),
        lambda x, mask: torch.compile(lambda x: call(x, mask), fullgraph=True, backend="aot_eager")(x),
    ):
        torch.testing.assert_close(compiled(x, mask), expected)
    torch.testing.assert_close(call(x, mask), expected)


@pytest.mark.parametrize("function", ALL)
def test_compiles_with_dynamic_shapes_without_recompiling(function):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = caller(function)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (6, 9, 13):
        x, mask = example(n)
        torch.testing.assert_close(outputs(compiled(x, mask)), outputs(call(x, mask)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("function", ALL)
def test_a_mask_made_inside_a_compiled_graph_works(function):
    torch._dynamo.reset()
    x, _ = example()
    inner = caller(function)

    def call(x):
        return inner(x, mw.Mask(x > 0))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    # Where x keeps too little, some functions are NaN: in both or in neither.
    torch.testing.assert_close(outputs(compiled(x)), outputs(call(x)), equal_nan=True)


@pytest.mark.parametrize("kind", ["bool", "intervals"])
@pytest.mark.parametrize("function", ALL)
def test_vmap_equals_a_loop(function, kind):
    x, mask = inputs_as(kind)
    call = caller(function)
    mapped = torch.func.vmap(call)(x, as_bool(mask))
    torch.testing.assert_close(outputs(mapped), outputs(call(x, mask)))
    # The same mask for all that is mapped.
    both = torch.stack([x, x.flip(0)])
    looped = [outputs(call(each, mask)) for each in both]
    shared = outputs(torch.func.vmap(lambda x: call(x, mask))(both))
    torch.testing.assert_close(shared, tuple(map(torch.stack, zip(*looped, strict=True))))


@pytest.mark.parametrize("kind", ["bool", "intervals"])
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_func_grad_and_jvp_agree_with_autograd(function, kind):
    x, mask = inputs_as(kind)
    call = caller(function)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(call(leaf, mask)), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: total(call(x, mask)))(x), expected)
    tangent = torch.linspace(-1, 1, x.numel()).reshape(x.shape)
    _, directional = torch.func.jvp(lambda x: total(call(x, mask)), (x,), (tangent,))
    torch.testing.assert_close(directional, (expected * tangent).sum())


@pytest.mark.parametrize("kind", ["bool", "intervals"])
@pytest.mark.parametrize("function", ALL)
def test_autocast_changes_nothing(function, kind):
    x, mask = inputs_as(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = caller(function)(x, mask)
    torch.testing.assert_close(outputs(result), outputs(caller(function)(x, mask)))


@pytest.mark.parametrize(("kind", "route"), [*(("bool", route) for route in ROUTES), ("intervals", "kernel")])
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(function, kind, route):
    x, mask = inputs_as(kind)
    x = x.double().requires_grad_()

    def call(x):
        # An output that is not finite, such as the logarithm of a dropped probability, has no finite differences.
        return tuple(torch.where(out.isfinite(), out, 0.0) for out in differentiable(caller(function)(x, mask)))

    with force(route):
        assert torch.autograd.gradcheck(call, (x,))
        if function.gradient > 1:
            assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("function", ALL)
def test_runs_on_fake_cuda_tensors_without_reading_data(function):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda")
        result = caller(function)(x, torch.empty(4, 6, dtype=torch.bool, device="cuda"))
        assert all(out.device.type == "cuda" for out in outputs(result))


every_subject = pytest.mark.parametrize(("subject", "mask"), trials(few=True))
in_a_graph = pytest.mark.parametrize(("subject", "mask"), trials(few=True, maps=True))
mapped_subject = pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.maps], ids=str)


@every_subject
def test_a_call_or_a_layer_gives_plain_tensors(subject, mask):
    assert type(subject.call(subject.tensors(), mask)) is torch.Tensor
    assert type(subject.call(subject.tensors(), mw.Mask(mask))) is torch.Tensor


@in_a_graph
def test_a_call_or_a_layer_compiles_without_a_break_and_with_its_gradients(subject, mask):
    torch._dynamo.reset()
    compiled = torch.compile(subject.call, fullgraph=True, backend="aot_eager")
    found = []
    for call in (compiled, subject.call):
        leaves = tuple(x.requires_grad_() for x in subject.poisoned(float("nan"), mask))
        results = subject.visible(call(leaves, mask), mask)
        found.append([*(out.detach() for out in results), *torch.autograd.grad(total_of(results), leaves)])
    # A graph may fuse a product with a sum, and attention is another kernel there.
    torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-5)


# Torch has no batching rule for what packs into a given capacity, and runs it in a loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@mapped_subject
def test_vmap_of_a_call_or_a_layer_equals_a_loop(subject):
    tensors = [torch.stack([x, x.flip(0)]) for x in subject.tensors()]
    masks = torch.stack([subject.bits(), subject.bits().flip(0)])
    mapped = torch.vmap(lambda mask, *x: subject.call(x, mask))(masks, *tensors)
    looped = torch.stack([subject.call(x, mask) for mask, *x in zip(masks, *tensors, strict=True)])
    torch.testing.assert_close(mapped, looped, equal_nan=True, rtol=1e-4, atol=1e-5)


@in_a_graph
def test_func_grad_and_jvp_of_a_call_or_a_layer_agree_with_autograd(subject, mask):
    tensors = subject.poisoned(float("nan"), mask)

    def loss(*x):
        return total_of(subject.visible(subject.call(x, mask), mask))

    wanted = tuple(range(len(tensors)))
    expected = subject.run(tensors, mask)[-len(tensors) :]
    # The transform runs the plain operations, which add in another order than the kernels.
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(list(torch.func.grad(loss, wanted)(*tensors)), expected, **close)
    tangents = tuple(torch.linspace(-1, 1, x.numel()).reshape(x.shape) for x in tensors)
    _, directional = torch.func.jvp(loss, tensors, tangents)
    along = sum((gradient * tangent).sum() for gradient, tangent in zip(expected, tangents, strict=True))
    torch.testing.assert_close(directional, along, rtol=1e-3, atol=1e-4)


@every_subject
def test_gradients_of_a_call_or_a_layer_are_those_of_finite_differences(subject, mask):
    leaves = [x.requires_grad_() for x in subject.tensors(torch.float64)]

    def call(*x):
        out = subject.call(x, mask)
        return torch.where(out.isfinite(), out, 0.0)

    if subject.name == "linear-large":
        # 49,152 arguments, one difference each; the values of the other linear subject take the same formulas.
        leaves[1] = leaves[1].detach()
        leaves[0] = leaves[0].detach()[:2].requires_grad_()
    # The whole Jacobian of one kind of mask; along random directions with the others, which take the same formulas.
    assert torch.autograd.gradcheck(call, leaves, fast_mode=isinstance(mask, mw.Mask))
