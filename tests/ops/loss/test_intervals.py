"""mw.loss of masks that are intervals: what bits give, without making bits, and without touching what is dropped."""

import math

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.ops.backends import status
from maskwise.ops.loss.element_losses import KERNEL_LOSSES
from maskwise.plan.dispatch import force

needs_kernel = pytest.mark.skipif(not status().loaded, reason="there is no kernel without the extension")
REDUCTIONS = ("none", "sum", "mean", "sequence")
LENGTHS = torch.tensor([3, 0, 11, 7, 1, 11])
PADDED = mw.Mask.from_lengths(LENGTHS, 11)
#: Masks by origin, each with the shape of its loss. The bounds of windows lie outside of their rows.
MASKS = {
    "right": (PADDED, (6, 11)),
    "left": (mw.Mask.from_lengths(LENGTHS, 11, side="left"), (6, 11)),
    "along rows": (PADDED.T, (11, 6)),
    "one for all rows": (mw.Mask.from_lengths([7], 11)[0], (6, 11)),
    "of one dim": (mw.Mask.from_lengths([7], 11)[0], (11,)),
    "broadcast along its intervals": (mw.Mask.from_lengths([1, 0, 1, 1, 0, 1], 1), (6, 11)),
    "of inner dims": (PADDED[..., None], (6, 11, 5)),
    "between": (PADDED[:, None], (6, 5, 11)),
    "causal": (mw.Mask.causal(11), (11, 11)),
    "causal of many": (mw.Mask.causal(11), (2, 11, 11)),
    "window": (mw.Mask.window(11, left=2), (2, 11, 11)),
    "window of columns": (mw.Mask.window(11, left=2).T, (11, 11)),
    "full": (mw.Mask.full((6, 11)), (6, 11)),
    "none": (mw.Mask.none((6, 11)), (6, 11)),
    "two": (PADDED[..., None] & PADDED[:, None], (6, 11, 11)),
    "long rows": (mw.Mask.from_lengths([300, 0, 129], 300), (3, 300)),
}
every_mask = pytest.mark.parametrize(("mask", "shape"), MASKS.values(), ids=MASKS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def elements(mask, shape, dtype=torch.float64):
    """Operands that every loss of elements takes, poisoned under the mask."""
    bits = mask.to_bool().expand(shape)
    x, target = (torch.rand(shape, dtype=torch.float64).add(0.1).to(dtype) for _ in range(2))
    return x.masked_fill(~bits, math.nan), target.masked_fill(~bits, math.inf)


def classes(mask, shape, count=19, dtype=torch.float64):
    """Logits and classes, poisoned under the mask."""
    bits = mask.to_bool().expand(shape)
    x = torch.randn(shape[0], count, *shape[1:], dtype=torch.float64).mul(3).to(dtype)
    return x.masked_fill(~bits.unsqueeze(1), math.nan), torch.randint(0, count, shape).where(bits, 10**9)


def with_gradient(fn, x, target, mask, reduction, **kwargs):
    leaf = x.detach().requires_grad_()
    out = mw.loss(fn, leaf, target, mask, reduction, **kwargs)
    above = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


def assert_as_bits(fn, x, target, mask, reduction, **kwargs):
    """The same values as with bits: sums of other parts may differ in their last digits."""
    found = with_gradient(fn, x, target, mask, reduction, **kwargs)
    for mine, theirs in zip(found, with_gradient(fn, x, target, mask.to_bool(), reduction, **kwargs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    shared = mask.to_bool() if x.shape == target.shape else mask.to_bool().expand(target.shape).unsqueeze(1)
    assert not torch.where(shared, 0.0, found[1]).any()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "classes last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x,
    "with gaps": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_reduction
@every_mask
def test_cross_entropy_of_intervals_is_that_of_bits(mask, shape, reduction, layout):
    x, target = classes(mask, shape)
    assert_as_bits(F.cross_entropy, LAYOUTS[layout](x), target, mask, reduction)


@pytest.mark.parametrize(
    "settings",
    [{"ignore_index": 1}, {"label_smoothing": 0.2}, {"weight": torch.linspace(0.5, 2.0, 19, dtype=torch.float64)}],
    ids=lambda settings: next(iter(settings)),
)
@every_reduction
@every_mask
def test_settings_of_cross_entropy_hold_for_intervals(mask, shape, reduction, settings):
    x, target = classes(mask, shape)
    assert_as_bits(F.cross_entropy, x, target, mask, reduction, **settings)
    if "label_smoothing" not in settings:
        # nll_loss takes logarithms, and what is dropped must stay what it is.
        assert_as_bits(F.nll_loss, x.log_softmax(1), target, mask, reduction, **settings)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
@every_reduction
@every_mask
def test_losses_of_elements_of_intervals_are_those_of_bits(mask, shape, reduction, layout):
    x, target = elements(mask, shape)
    for fn in (F.mse_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy):
        valid = target.clamp(0, 1) if fn is F.binary_cross_entropy else target
        valid_x = x.clamp(0, 1) if fn is F.binary_cross_entropy else x
        assert_as_bits(fn, LAYOUTS[layout](valid_x), valid, mask, reduction)


@pytest.mark.parametrize("route", ["plain", "kept", "filled", "pieces", "kernel"])
@every_reduction
def test_every_route_takes_intervals(route, reduction):
    for make, fns in ((elements, (F.mse_loss, F.gaussian_nll_loss)), (classes, (F.cross_entropy, F.nll_loss))):
        x, target = make(PADDED, (6, 11))
        for fn in fns:
            kwargs = {"var": torch.ones(6, 11, dtype=torch.float64)} if fn is F.gaussian_nll_loss else {}
            expected = with_gradient(fn, x, target, PADDED.to_bool(), reduction, **kwargs)
            with force(route):
                found = with_gradient(fn, x, target, PADDED, reduction, **kwargs)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_mask
def test_every_dtype_takes_intervals(mask, shape, dtype):
    for fn, make in ((F.mse_loss, elements), (F.cross_entropy, classes)):
        x, target = make(mask, shape, dtype=dtype)
        for mine, theirs in zip(
            with_gradient(fn, x, target, mask, "none"),
            with_gradient(fn, x, target, mask.to_bool(), "none"),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


@every_reduction
def test_the_second_derivative_of_intervals_is_that_of_bits(reduction):
    for fn, make in ((F.mse_loss, elements), (F.cross_entropy, classes)):
        x, target = make(PADDED, (6, 11))
        found = []
        for mask in (PADDED, PADDED.to_bool()):
            leaf = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(mw.loss(fn, leaf, target, mask, reduction).sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
        torch.testing.assert_close(*found)
        assert found[0].isfinite().all()


def test_a_kept_class_that_does_not_exist_is_found_inside_of_the_interval_only():
    x, target = torch.randn(2, 4, 3), torch.tensor([[1, 99, 98], [97, 2, 3]])
    assert mw.loss(F.cross_entropy, x, target, mw.Mask.from_lengths([1, 0], 3)).isfinite()
    with pytest.raises(IndexError, match="got 99"):
        mw.loss(F.cross_entropy, x, target, mw.Mask.from_lengths([2, 1], 3))


def test_an_interval_mask_that_does_not_broadcast_is_refused_as_bits_are():
    for mask in (PADDED, PADDED.to_bool()):
        with pytest.raises(mw.errors.ShapeError, match="must broadcast to the unreduced loss"):
            mw.loss(F.mse_loss, torch.ones(6, 10), torch.ones(6, 10), mask)


@pytest.mark.parametrize("fn", [*{served.fn: None for served in KERNEL_LOSSES}, F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.kernel
@needs_kernel
def test_the_kernels_get_no_bits(fn, reduction, monkeypatch):
    mask = mw.Mask.from_lengths([2000, 0, 700], 2000)
    x, target = (torch.rand(3, 2000) for _ in range(2))
    if fn in (F.cross_entropy, F.nll_loss):
        x, target = torch.rand(3, 5, 2000).log_softmax(1), torch.randint(0, 5, (3, 2000))
    expected = with_gradient(fn, x, target, mask.to_bool(), reduction)
    mask = mw.Mask.from_lengths([2000, 0, 700], 2000)
    monkeypatch.setattr(mw.Mask, "to_bool", lambda self: pytest.fail("bits were made of intervals"))
    for mine, theirs in zip(with_gradient(fn, x, target, mask, reduction), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# -- large gradients: zeros that are not written -----------------------------------------------------------------------
LARGE = {
    "a prefix": mw.Mask.from_lengths([70], 600)[0],
    "a suffix": mw.Mask.from_lengths([70], 600, side="left")[0],
    "everything": mw.Mask.full((600,)),
    "nothing": mw.Mask.none((600,)),
    "scattered rows": torch.arange(600) % 13 == 5,
    "every second row": torch.arange(600) % 2 == 0,
}


@pytest.mark.parametrize("mask", LARGE.values(), ids=LARGE)
@pytest.mark.kernel
@needs_kernel
def test_a_large_gradient_is_zero_where_it_is_dropped(mask):
    # 48 MB: memory that comes from the system anew, unlike the small gradients of the other tests.
    bits = mask if isinstance(mask, torch.Tensor) else mask.to_bool()
    x = torch.randn(600, 20011).masked_fill(~bits[:, None], math.nan)
    target = torch.randint(0, 20011, (600,)).where(bits, -7)
    _, grad = with_gradient(F.cross_entropy, x, target, mask, "sum")
    expected = x[bits].softmax(1)
    expected[torch.arange(len(expected)), target[bits]] -= 1
    assert not grad[~bits].any()
    # 0.5 is what with_gradient puts above a single number. Exponentials of float32, and one rounding.
    torch.testing.assert_close(grad[bits], expected * 0.5, rtol=1e-5, atol=1e-6)
    rows = mask[..., None]
    for reduction in ("none", "sum"):
        out, grad = with_gradient(F.mse_loss, x, torch.zeros_like(x), rows, reduction)
        assert not grad[~bits].any()
        if reduction == "none":
            assert not out[~bits].any()
            torch.testing.assert_close(out[bits], x[bits].square())
        else:
            torch.testing.assert_close(grad[bits], x[bits])


@pytest.mark.parametrize("mask", [mw.Mask.from_lengths([100, 0, 1000], 3000), mw.Mask.full((3, 3000))])
@pytest.mark.kernel
@needs_kernel
def test_a_large_gradient_with_positions_next_to_each_other_is_zero_where_it_is_dropped(mask):
    bits = mask.to_bool()
    x = torch.randn(3, 1001, 3000).masked_fill(~bits[:, None], math.nan)
    target = torch.randint(0, 1001, (3, 3000)).where(bits, -7)
    _, grad = with_gradient(F.cross_entropy, x, target, mask, "sum")
    assert not grad.movedim(1, -1)[~bits].any()
    leaf = x.movedim(1, -1)[bits].requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(leaf, target[bits], reduction="sum"), leaf, torch.tensor(0.5))[0]
    torch.testing.assert_close(grad.movedim(1, -1)[bits], expected, rtol=1e-5, atol=1e-6)
