"""The kernel of cross entropy, forward and backward: dtypes, layouts, weights, threads, SIMD levels, special values."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw

# Imported for what it does: it registers the ops.
import maskwise.ops.loss
from maskwise.ops.backends import FLOATING, status
from maskwise.plan.dispatch import force
from tests.simd import SIMD_LEVELS

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not status().loaded, reason="there is no kernel without the extension"),
]

REDUCTIONS = ("none", "sum", "mean", "sequence")
SETTINGS = [
    {},
    {"ignore_index": 1},
    {"label_smoothing": 0.2},
    {"weight": torch.linspace(0.5, 2.0, 19, dtype=torch.float64)},
]


def inputs(*shape, dtype=torch.float64):
    """Logits (N, C, ...), classes, a mask that keeps a half; NaN and classes that do not exist under it."""
    x = torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    mask = torch.rand(target.shape) < 0.5
    mask.view(-1)[0] = True
    target = torch.where(mask, target, 10**9)
    return x.masked_fill(~mask.unsqueeze(1), math.nan), target, mask


def with_gradient(x, target, mask, reduction, **kwargs):
    """The loss by the kernel, and the gradient of x under weights that tell every element from the others."""
    leaf = x.detach().requires_grad_()
    with mw.explain() as log:
        out = mw.loss(F.cross_entropy, leaf, target, mask, reduction, **kwargs)
    assert list(log)[-1].route == "fused"
    above = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).to(out.dtype).reshape(out.shape)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


def exact(x, target, mask, reduction, **kwargs):
    """The same in float64 by the plain route."""
    leaf = x.detach().double().requires_grad_()
    kwargs = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with force("plain"):
        out = mw.loss(F.cross_entropy, leaf, target, mask, reduction, **kwargs)
    above = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).to(x.dtype).double().reshape(out.shape)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


def assert_exact(mine, x, *rest, **kwargs):
    # The kernel computes in float32 or better and rounds once: half a unit of x's dtype, or a few of float32 where
    # logarithms of sums and elements cancel.
    tolerance = max(torch.finfo(x.dtype).eps, 0.0 if x.dtype is torch.float64 else 2e-6)
    tolerance = 1e-12 if x.dtype is torch.float64 else tolerance
    for a, b in zip(mine, exact(x, *rest, **kwargs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "rows": lambda x: x,
    "classes last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "neither": lambda x: torch.stack((x, x), -1)[..., 0],
    "a slice of classes last": lambda x: F.pad(x.movedim(1, -1), (0, 0, 1, 2))[..., 1:-2, :].movedim(-1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 19), (1, 19), (5, 19, 13), (3, 19, 130), (2, 19, 5, 8), (4, 19, 1, 1), (9, 1)])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "ignored", "smooth", "weight"])
def test_every_layout_and_setting_agrees_with_the_reference(shape, settings, layout):
    x, target, mask = inputs(*shape)
    if "weight" in settings:
        settings = {"weight": settings["weight"][: shape[1]]}
    x = LAYOUTS[layout](x) if x.dim() > 2 or layout == "neither" else x
    for reduction in REDUCTIONS[: 3 if "weight" in settings else 4]:
        assert_exact(with_gradient(x, target, mask, reduction, **settings), x, target, mask, reduction, **settings)


@pytest.mark.parametrize("shape", [(33, 1031), (6, 1031, 17)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_dtype_agrees_with_float64(dtype, shape):
    x, target, mask = inputs(*shape, dtype=dtype)
    for reduction in REDUCTIONS[:3]:
        mine = with_gradient(x, target, mask, reduction)
        assert mine[0].dtype == mine[1].dtype == dtype
        assert_exact(mine, x, target, mask, reduction)


@pytest.mark.parametrize("shape", [(20, 37), (4, 37, 9)])
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_simd_level_that_this_cpu_has_agrees_with_the_reference(dtype, level, shape):
    x, target, mask = inputs(*shape, dtype=dtype)
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        mine = with_gradient(x, target, mask, "mean")
    finally:
        torch.ops.maskwise.simd_level(before)
    assert_exact(mine, x, target, mask, "mean")


@pytest.mark.parametrize("shape", [(3001, 97), (21, 97, 131), (2, 50_001)])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape):
    x, target, mask = inputs(*shape, dtype=torch.float32)
    threads, runs = torch.get_num_threads(), []
    try:
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            runs.append(with_gradient(x, target, mask, "mean"))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert torch.equal(run[0], runs[0][0])
        assert torch.equal(run[1], runs[0][1])
    assert_exact(runs[0], x, target, mask, "mean")


@pytest.mark.parametrize("shape", [(12, 40), (6, 40, 4)])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_special_value_among_the_kept_gives_what_torch_gives(special, shape):
    x, target = torch.randn(shape), torch.randint(0, 40, (shape[0], *shape[2:]))
    x[::2, 3] = special
    x[1, :] = special
    x[3, :9] = special
    mask = torch.ones(target.shape, dtype=torch.bool)
    out, grad = with_gradient(x, target, mask, "none")
    leaf = x.clone().requires_grad_()
    theirs = F.cross_entropy(leaf, target, reduction="none")
    torch.testing.assert_close(out, theirs.detach(), equal_nan=True)
    above = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)
    torch.testing.assert_close(grad, torch.autograd.grad(theirs, leaf, above)[0], equal_nan=True)


@pytest.mark.parametrize("shape", [(8, 50), (2, 50, 4)])
def test_logits_with_a_large_common_part_lose_no_digits(shape):
    x = (torch.randn(shape) + 5000).float()
    target, mask = torch.randint(0, 50, (shape[0], *shape[2:])), torch.ones(shape[0], *shape[2:], dtype=torch.bool)
    mine = with_gradient(x, target, mask, "mean")
    for a, b in zip(mine, exact(x, target, mask, "mean"), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("bad", [5, -1])
@pytest.mark.parametrize("grad", [False, True])
def test_a_kept_class_that_does_not_exist_is_named_with_its_hint(bad, grad):
    x, target = torch.randn(3, 5, requires_grad=grad), torch.tensor([1, bad, 2])
    told = (
        rf"`target` must name a class in \[0, 4\] where it is kept, got {bad}. Hint: mask & .*, or ignore_index={bad}"
    )
    with pytest.raises(IndexError, match=told):
        mw.loss(F.cross_entropy, x, target, torch.ones(3, dtype=torch.bool))
    assert mw.loss(F.cross_entropy, x, target, torch.tensor([True, False, True])).isfinite()


@pytest.mark.parametrize("mask_shape", [(6,), (1, 6), (4, 1), (1, 1), ()])
def test_masks_that_broadcast_and_targets_with_gaps_are_read_where_they_lie(mask_shape):
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    target = torch.randint(0, 5, (4, 9))[:, 2:8]
    mask = torch.rand(mask_shape) < 0.6
    assert_exact(with_gradient(x, target, mask, "mean"), x, target, mask, "mean")


@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3)])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=["plain", "ignored", "smooth"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_registered_op_passes_opcheck(shape, settings, weighted):
    x, target, mask = inputs(*shape)
    x = x.nan_to_num().requires_grad_()
    weight = torch.rand(5, dtype=torch.float64) if weighted and not settings else None
    rest = (settings.get("ignore_index", -100), settings.get("label_smoothing", 0.0))
    for reduction in (0, 1, 2):
        args = (x, target, mask, weight, *rest, reduction)
        torch.library.opcheck(torch.ops.maskwise.cross_entropy_fused.default, args)
        _, sums, facts = torch.ops.maskwise.cross_entropy_fused_forward(*args)
        grad = torch.ones(target.shape if reduction == 0 else (), dtype=torch.float64)
        backward = (grad, x.detach(), target, mask, weight, sums.detach(), facts.detach(), *rest, reduction)
        torch.library.opcheck(torch.ops.maskwise.cross_entropy_fused_backward.default, backward)


def test_a_weight_that_is_smoothed_and_soft_targets_go_by_torch():
    x, mask = torch.randn(6, 5), torch.tensor([True, False] * 3)
    weight = torch.rand(5)
    with mw.explain() as log:
        hard = mw.loss(F.cross_entropy, x, torch.arange(6) % 5, mask, weight=weight, label_smoothing=0.1)
        soft = mw.loss(F.cross_entropy, x, x.softmax(1), mask)
    assert {call.route for call in log} <= {"filled", "pieces"}
    target = (torch.arange(6) % 5)[mask]
    torch.testing.assert_close(hard, F.cross_entropy(x[mask], target, weight, label_smoothing=0.1))
    torch.testing.assert_close(soft, F.cross_entropy(x[mask], x[mask].softmax(1)))


def test_nll_loss_of_a_kept_nan_is_nan_and_of_nothing_is_zero():
    x = torch.randn(4, 5).log_softmax(1)
    target, mask = torch.tensor([0, 1, 2, 99]), torch.tensor([True, True, False, False])
    torch.testing.assert_close(mw.loss(F.nll_loss, x, target, mask), F.nll_loss(x[:2], target[:2]))
    assert mw.loss(F.nll_loss, x, target, torch.zeros(4, dtype=torch.bool)) == 0
    x[0, 0] = math.nan
    assert mw.loss(F.nll_loss, x, target, mask).isnan()


# -- classes last ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", [None, "kernel", "plain"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "sequence"])
@pytest.mark.parametrize("fn", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 4, 3, 7), (4, 6, 4)])
def test_logits_with_the_classes_last_give_what_torchs_layout_gives(shape, fn, reduction, route):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    target = torch.randint(shape[-1], shape[:-1], generator=generator)
    keep = torch.rand(shape[:-1], generator=generator) < 0.6
    logits[~keep], target[~keep] = torch.nan, 10**6
    weight = torch.rand(shape[-1], generator=generator)
    # torch's own has no gradient of other strides there.
    copies = fn is F.nll_loss and len(shape) == 4
    for options in ({}, {"ignore_index": 1}, {"weight": weight}):
        for mask in (keep, mw.Mask(keep)):
            found = []
            for move in (lambda x: x, lambda x: x.movedim(-1, 1).contiguous() if copies else x.movedim(-1, 1)):
                leaf = logits.clone().requires_grad_()
                with mw.force(route) if route else contextlib.nullcontext():
                    out = mw.loss(fn, move(leaf), target, mask, reduction, **options)
                found += [out, *torch.autograd.grad(out.sum(), leaf)]
            assert torch.equal(found[0], found[2])
            assert torch.equal(found[1], found[3])
            assert torch.equal(found[1][~keep], torch.zeros_like(found[1][~keep]))


def test_logits_that_could_be_both_are_torchs():
    logits, target = torch.randn(2, 5, 5), torch.randint(5, (2, 5))
    keep = torch.rand(2, 5) < 0.5
    expected = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(mw.loss(F.cross_entropy, logits, target, keep, "none"), torch.where(keep, expected, 0.0))


def test_logits_with_the_classes_last_compile_without_a_break():
    torch._dynamo.reset()
    logits, target, keep = torch.randn(2, 5, 7), torch.randint(7, (2, 5)), torch.rand(2, 5) < 0.5

    def call(x, y, mask):
        return mw.loss(F.cross_entropy, x, y, mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, target, keep), call(logits, target, keep))
