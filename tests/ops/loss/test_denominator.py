"""A loss as a part of a mean over several calls: mw.loss(..., denominator=)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw

LENGTHS = [4, 2, 0, 1, 3, 4]
PARTS = (slice(0, 1), slice(1, 3), slice(3, 6))
KEPT = mw.Mask.from_lengths(LENGTHS, max_len=4)


def sample(dtype=torch.float64, classes=5):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, classes, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(classes, (6, 4), generator=generator)
    target[1, 0] = -100
    return logits.requires_grad_(), target


def of_parts(fn, x, y, denominator, reduction="mean", **kwargs):
    """The loss of micro-batches, summed up."""
    return sum(mw.loss(fn, x[p], y[p], KEPT[p], reduction, denominator=denominator, **kwargs) for p in PARTS)


def same(found, wanted, x, **tolerances):
    torch.testing.assert_close(found, wanted, **tolerances)
    ours, theirs = (torch.autograd.grad(loss, x)[0] for loss in (found, wanted))
    torch.testing.assert_close(ours, theirs, **tolerances)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("form", [int, float, torch.tensor, lambda n: torch.tensor(float(n))])
def test_parts_by_the_count_of_all_are_the_mean_of_all(form, smoothing):
    x, y = sample()
    # One label of the two in row 1 is to be ignored.
    parts = of_parts(F.cross_entropy, x, y, form(sum(LENGTHS) - 1), label_smoothing=smoothing)
    same(parts, mw.loss(F.cross_entropy, x, y, KEPT, label_smoothing=smoothing), x)


def test_rows_are_divided_by_how_many_keep_something():
    x, y = sample()
    same(of_parts(F.cross_entropy, x, y, 5, "sequence"), mw.loss(F.cross_entropy, x, y, KEPT, "sequence"), x)


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
def test_with_weights_of_classes_the_denominator_is_what_they_weigh(reduction):
    x, y = sample()
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    wanted = mw.loss(F.cross_entropy, x, y, KEPT, reduction, weight=weight)
    kept = KEPT & (y != -100)
    by = 5 if reduction == "sequence" else weight[y.clamp(min=0)][kept.to_bool()].sum()
    same(of_parts(F.cross_entropy, x, y, by, reduction, weight=weight), wanted, x)


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
@pytest.mark.parametrize(
    "fn", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, partial(F.huber_loss, delta=0.5)]
)
def test_losses_of_elements_too(fn, reduction):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    by = 5 if reduction == "sequence" else sum(LENGTHS)
    same(of_parts(fn, x, y, by, reduction), mw.loss(fn, x, y, KEPT, reduction), x)


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
def test_a_loss_of_ones_own_too(reduction):
    def fourth(x, y, reduction):
        return (x - y) ** 4

    x, y = torch.randn(6, 4, requires_grad=True, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    by = 5 if reduction == "sequence" else sum(LENGTHS)
    same(of_parts(fourth, x, y, by, reduction), mw.loss(fourth, x, y, KEPT, reduction), x)


def test_batchmean_of_kl_div_is_divided_by_rows():
    x = torch.randn(6, 4, dtype=torch.float64).log_softmax(-1).requires_grad_()
    y = torch.rand(6, 4, dtype=torch.float64)
    same(of_parts(F.kl_div, x, y, 5, "batchmean"), mw.loss(F.kl_div, x, y, KEPT, "batchmean"), x)
    with mw.accumulate([KEPT[p] for p in PARTS]) as window:
        same(of_parts(F.kl_div, x, y, window, "batchmean"), mw.loss(F.kl_div, x, y, KEPT, "batchmean"), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_that_does_not_fit_a_half_is_divided_before_it_is_rounded(dtype):
    x = torch.full((1000, 1000), 4.0, dtype=dtype, requires_grad=True)
    loss = mw.loss(F.mse_loss, x, torch.zeros_like(x), mw.Mask.full((1000, 1000)), denominator=2_000_000)
    assert loss.dtype is torch.float32
    assert loss.item() == 8.0
    loss.backward()
    # 2 * 4 / 2e6: of the 1 / 2e6 that it starts from, a float16 holds three bits.
    assert x.grad[0, 0].item() == pytest.approx(4e-6, rel=2**-4)


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
@pytest.mark.parametrize("denominator", [0, 0.0, torch.tensor(0), torch.tensor(0.0), 7], ids=repr)
def test_nothing_kept_gives_zero_and_zero_gradients_whatever_the_denominator(denominator, reduction):
    x, y = sample(torch.float32)
    with torch.no_grad():
        x[0] = float("nan")
    loss = mw.loss(F.cross_entropy, x, y, mw.Mask.none((6, 4)), reduction, denominator=denominator)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_dropped_values_reach_neither_the_loss_nor_a_gradient():
    found = []
    for junk in (0.0, float("nan"), float("inf")):
        x, y = sample(torch.float32)
        with torch.no_grad():
            x.masked_fill_(~KEPT.to_bool()[..., None], junk)
        for reduction in ("mean", "sequence"):
            loss = mw.loss(F.cross_entropy, x, y, KEPT, reduction, denominator=torch.tensor(40))
            found.append((junk, loss.detach(), *torch.autograd.grad(loss, x)))
    for index in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(found[index][1:], found[0][1:], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found[index + 1][1:], found[1][1:], strict=True))


def test_a_denominator_of_another_dtype_does_not_change_the_dtype_of_the_loss():
    x, y = sample(torch.float32)
    for by in (torch.tensor(3.0, dtype=torch.float64), torch.tensor(3, dtype=torch.int16), 3):
        assert mw.loss(F.cross_entropy, x, y, KEPT, denominator=by).dtype is torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
def test_it_compiles_without_a_graph_break(reduction):
    x, y = sample(torch.float32)
    keep = KEPT.to_bool()

    @partial(torch.compile, fullgraph=True, backend="eager")
    def step(x, by):
        return mw.loss(F.cross_entropy, x, y, keep, reduction, denominator=by)

    for by in (torch.tensor(9), 9):
        wanted = mw.loss(F.cross_entropy, x, y, KEPT, reduction, denominator=by)
        torch.testing.assert_close(step(x, by), wanted)
    with mw.accumulate([keep, keep]) as window:
        torch.testing.assert_close(step(x, window), mw.loss(F.cross_entropy, x, y, KEPT, reduction, denominator=window))
    wanted = 2 * mw.loss(F.cross_entropy, x, y, KEPT, reduction, denominator=1).double()
    # What a compiled call scales is summed up, too.
    torch.testing.assert_close(window.result("token" if reduction == "mean" else "sequence").sum, wanted.detach())


def test_it_is_planned_and_recorded_as_without_one():
    x, y = sample(torch.float32)
    assert mw.plan(mw.loss, F.cross_entropy, x, y, KEPT, denominator=3).op == "loss"
    with mw.explain() as log:
        mw.loss(F.cross_entropy, x, y, KEPT, denominator=3)
    assert len(log) == 1
