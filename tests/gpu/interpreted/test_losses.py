"""The losses that have a Triton kernel, against the plain route in float64, with poison wherever it is dropped."""

import os

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.ops.gpu import launch
from maskwise.plan.dispatch import force
from tests.gpu.interpreter import permuted
from tests.laws.odd_bytes import odd

#: `make test-gpu` has every loss in every layout; the default run has each in one of them.
EVERYTHING = os.environ.get("MASKWISE_INTERPRET_ALL") == "1"
ELEMENTS = [
    (F.mse_loss, {}),
    (F.l1_loss, {}),
    (F.smooth_l1_loss, {"beta": 0.5}),
    (F.huber_loss, {"delta": 0.7}),
    (F.binary_cross_entropy_with_logits, {}),
    (F.kl_div, {"log_target": False}),
    (F.kl_div, {"log_target": True}),
    (F.poisson_nll_loss, {"log_input": True}),
    (F.poisson_nll_loss, {"log_input": False}),
    (F.soft_margin_loss, {}),
    (F.hinge_embedding_loss, {"margin": 0.5}),
]


def assert_as_plain(call, x, others, **tolerance):
    results = []
    for route, dtype in (("kernel", x.dtype), ("plain", torch.float64)):
        with force(route):
            leaf = x.detach().clone().to(dtype).requires_grad_()
            out = call(leaf, *(t.to(dtype) if t.is_floating_point() else t for t in others))
            weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape).to(dtype)
            (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
            results.append((out.detach(), gradient))
    (mine, of_x), (truth, of_truth) = results
    torch.testing.assert_close((mine, of_x), (truth.to(mine.dtype), of_truth.to(mine.dtype)), **tolerance)


LAYOUTS = [
    ((3, 4, 9), (4, 1), torch.float32),
    ((1, 4097), (1, 4097), torch.float32),
    ((5, 37), (5, 37), torch.bfloat16),
]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    ("fn", "kwargs", "shape", "mask_shape", "dtype"),
    [
        pytest.param(fn, kwargs, *layout, id=f"{fn.__name__}-{kwargs}-{layout[0]}")
        for i, (fn, kwargs) in enumerate(ELEMENTS)
        for j, layout in enumerate(LAYOUTS)
        if EVERYTHING or (i + j) % 3 == 0
    ],
)
def test_losses_of_elements(fn, kwargs, shape, mask_shape, dtype, reduction):
    x, target = torch.randn(shape).mul(2).to(dtype), torch.rand(shape).to(dtype)
    mask = torch.rand(mask_shape) < 0.5
    if fn is F.poisson_nll_loss:
        # A rate is positive.
        x = x.abs() + 0.5
    if fn in (F.soft_margin_loss, F.hinge_embedding_loss):
        # A target is 1 or -1.
        target = (target - 0.5).sign()
    x = torch.where(mask, x, float("nan"))
    # Half precision rounds the result, and a sum of its weights in the test; float32 adds 4097 terms.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert_as_plain(lambda x, t: mw.loss(fn, x, t, mask, reduction=reduction, **kwargs), x, (target,), **tolerance)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("option", ["", "weight", "label_smoothing"])
@pytest.mark.parametrize("shape", [(6, 11), (3, 11, 5), (4, 1500)] if EVERYTHING else [(3, 11, 5), (2, 1100)])
def test_cross_entropy(shape, option, reduction):
    x, lead = torch.randn(shape).mul(2), (shape[0], *shape[2:])
    mask, target = torch.rand(lead) < 0.6, torch.randint(0, shape[1], lead)
    # Neither a class that does not exist nor a NaN is seen where it is dropped, or ignored.
    target[~mask] = 99_999
    target.view(-1)[0] = -100
    x.movedim(1, -1)[~mask] = float("nan")
    others = (target, torch.rand(shape[1])) if option == "weight" else (target,)

    def call(x, target, weight=None):
        smoothing = 0.2 if option == "label_smoothing" else 0.0
        kwargs = {"label_smoothing": smoothing} if smoothing else {}
        return mw.loss(F.cross_entropy, x, target, mask, reduction=reduction, weight=weight, **kwargs)

    assert_as_plain(call, x, others, rtol=1e-5, atol=1e-5)


def test_a_mean_of_nothing_is_zero_with_a_gradient_of_zero():
    x, mask = torch.full((3, 4), float("nan"), requires_grad=True), torch.zeros(3, 4, dtype=torch.bool)
    with force("kernel"):
        out = mw.loss(F.mse_loss, x, torch.zeros(3, 4), mask)
        (gradient,) = torch.autograd.grad(out, x)
    assert out == 0
    assert torch.equal(gradient, torch.zeros(3, 4))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    ("fn", "kwargs"),
    [*ELEMENTS, (F.cross_entropy, {"label_smoothing": 0.1}), (F.cross_entropy, {"weight": [0.3, 0.7, 0.1]})],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_float64_stays_float64(fn, kwargs, reduction):
    x, target, mask = torch.rand(5, 3).add(0.1).double(), torch.rand(5, 3).double(), torch.rand(5, 3) < 0.6
    if fn in (F.soft_margin_loss, F.hinge_embedding_loss):
        target = (target - 0.5).sign()
    if fn is F.cross_entropy:
        target, mask = torch.randint(0, 3, (5,)), mask[:, 0]
    kwargs = {name: torch.tensor(v).double() if isinstance(v, list) else v for name, v in kwargs.items()}

    def call(x, target):
        return mw.loss(fn, x, target, mask, reduction=reduction, **kwargs)

    # A number that was rounded to float32 on the way would be off by 1e-8.
    assert_as_plain(call, x, (target,), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stray", [7, -3, 1 << 40])
def test_a_class_that_does_not_exist_makes_its_row_nan_and_is_never_read(stray, weighted):
    x, mask = torch.randn(4, 5, requires_grad=True), torch.tensor([True, True, True, False])
    target, weight = torch.tensor([1, stray, 2, stray]), torch.rand(5) if weighted else None
    settings = (mask, weight, -100, 0.0, 0)
    out, sums, facts = torch.ops.maskwise.cross_entropy_fused_forward(x, target, *settings)
    grad = torch.ops.maskwise.cross_entropy_fused_backward(
        torch.ones(4), x, target, mask, weight, sums, facts, -100, 0.0, 0
    )
    expected = F.cross_entropy(x, target.clamp(0, 4), weight, reduction="none")
    assert torch.equal(out.isnan(), torch.tensor([False, True, False, False]))
    torch.testing.assert_close(out[::2], expected[::2].detach())
    assert torch.equal(grad.isnan().all(1), torch.tensor([False, True, False, False]))
    assert torch.equal(grad[3], torch.zeros(5))


def test_an_infinite_margin_is_no_loss():
    x, target = torch.tensor([[torch.inf, 1.0]]), torch.tensor([[1.0, -1.0]])
    with force("kernel"):
        out = mw.loss(F.soft_margin_loss, x, target, torch.ones(1, 2, dtype=torch.bool), reduction="none")
    assert out[0, 0] == 0


@pytest.mark.parametrize(("fn", "kwargs"), ELEMENTS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_nan_that_is_kept_is_seen_as_by_torch(fn, kwargs):
    x, target = torch.tensor([[torch.nan, 0.5, 2.0]]), torch.tensor([[1.0, 1.0, -1.0]])
    mask = torch.tensor([[True, True, False]])

    def call(x, target):
        return mw.loss(fn, x, target, mask, reduction="none", **kwargs)

    assert_as_plain(call, x, (target,), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(3) if EVERYTHING else [1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [None, 0.0, 0.1], ids=["mse_loss", "cross_entropy", "smoothed"])
def test_the_last_program_of_a_loss_may_be_any(smoothing, reduction, seed, monkeypatch):
    # Rows of classes are split between programs, and so is their sum.
    for name, value in {"LONGEST": 32, "SHORT": 16, "WARP": 1, "FEWEST": 1}.items():
        monkeypatch.setattr(launch, name, value)
    x, rows = torch.randn(6, 100), torch.tensor([True, True, False, True, True, False])

    def call(x, target):
        if smoothing is None:
            return mw.loss(F.mse_loss, x, target, rows[:, None], reduction=reduction)
        return mw.loss(F.cross_entropy, x, target, rows, reduction=reduction, label_smoothing=smoothing)

    target = torch.randn(6, 100) if smoothing is None else torch.randint(100, (6,))
    with force("kernel"):
        before = call(x, target)
        with permuted(seed) as orders:
            after = call(x, target)
            assert_as_plain(call, x, (target,), rtol=1e-5, atol=1e-5)
    assert any(programs > 6 and order != sorted(order) for programs, order in orders.items())
    assert torch.equal(before, after)


@pytest.mark.parametrize("fn", [F.mse_loss, F.cross_entropy])
def test_any_byte_but_zero_counts(fn):
    x = torch.randn(131, 5)
    rows = torch.rand(131) < 0.5
    mask = rows if fn is F.cross_entropy else rows[:, None].expand(131, 5).contiguous()
    target = torch.randint(5, (131,)) if fn is F.cross_entropy else torch.zeros(131, 5)
    results = []
    with force("kernel"):
        for given in (mask, odd(mask)):
            leaf = x.clone().requires_grad_()
            out = mw.loss(fn, leaf, target, given)
            results.append((out.detach(), *torch.autograd.grad(out, leaf)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
