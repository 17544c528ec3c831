"""Law 3: one rule for nothing kept: the function's empty value, ``empty=`` instead of it, and a gradient of zero."""

import pytest
import torch

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.laws.samples import ROUTES, UNDER_LAW, as_bool, needed
from tests.laws.subjects import SUBJECTS, total

REDUCTIONS = [pytest.param(f, id=f.name) for f in UNDER_LAW if f.kind in ("reduction", "position")]


def half_empty(kind):
    x = torch.full((3, 5), float("nan"))
    x[1] = torch.arange(1.0, 6.0)
    lengths = torch.tensor([0, 5, 0])
    masks = {
        "lengths": mw.Mask.from_lengths(lengths, 5),
        "ends before the row": mw.Mask.from_lengths(lengths * 2, 10)[:, 3:8],
        "starts after the row": mw.Mask.from_lengths(lengths * 2, 10, side="left")[:, 2:7],
        "starts after ends": mw.Mask.from_lengths([2, 5, 1], 5) & mw.Mask.from_lengths([3, 5, 4], 5, side="left"),
        "whole rows": mw.Mask.from_lengths([2], 3)[0][:, None] - mw.Mask.from_lengths([1], 3)[0][:, None],
    }
    return x, masks["lengths"].to_bool() if kind == "bits" else masks[kind]


every_kind = pytest.mark.parametrize(
    "kind", ["bits", "lengths", "ends before the row", "starts after the row", "starts after ends", "whole rows"]
)


@every_kind
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", REDUCTIONS)
def test_an_empty_slice_gives_the_empty_value(function, route, kind):
    x, mask = half_empty(kind)
    with force(route):
        out = function.call(x, mask, dim=1, **needed(function))
    expected = torch.tensor([function.empty] * 2, dtype=out.dtype)
    torch.testing.assert_close(out[[0, 2]], expected, rtol=0, atol=0, equal_nan=True)
    assert out[1].isfinite()


@every_kind
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", REDUCTIONS)
def test_empty_replaces_that_value_and_no_other(function, route, kind):
    x, mask = half_empty(kind)
    with force(route):
        out = function.call(x, mask, dim=1, empty=-7, **needed(function))
        unchanged = function.call(x, mask, dim=1, **needed(function))[1]
    assert out[[0, 2]].tolist() == [-7, -7]
    assert out[1] == unchanged


@every_kind
@pytest.mark.parametrize("empty", [None, -7])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("function", [p for p in REDUCTIONS if p.values[0].gradient])
def test_the_gradient_of_an_empty_slice_is_exactly_zero(function, route, empty, kind):
    x, mask = half_empty(kind)
    x.requires_grad_()
    with force(route):
        out = function.call(x, mask, dim=1, empty=empty, **needed(function))
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient[[0, 2]], torch.zeros(2, 5))


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("function", REDUCTIONS)
def test_a_slice_of_no_elements_is_an_empty_slice(function, shape, route):
    x, lengths = torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.int64)
    for mask in (torch.zeros(shape, dtype=torch.bool), mw.Mask.from_lengths(lengths, shape[-1]), mw.Mask.full(shape)):
        with force(route):
            out = function.call(x, mask, dim=-1, **needed(function))
        assert out.shape == shape[:-1]
        torch.testing.assert_close(out, torch.full_like(out, function.empty), rtol=0, atol=0, equal_nan=True)


def nothing(shape):
    """Masks that keep nothing."""
    none = mw.Mask.from_lengths(torch.zeros(shape[:-1], dtype=torch.int64), shape[-1])
    return {"bits": none.to_bool(), "lengths": none[...], "none": mw.Mask.none(shape)}


@pytest.mark.parametrize("kind", ["bits", "lengths", "none"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_call_or_a_layer_that_keeps_nothing_has_no_gradient_and_no_nan(subject, kind):
    mask = nothing(subject.mask)[kind]
    leaves = [x.requires_grad_() for x in subject.tensors()]
    dropped = subject.dropped(as_bool(mask))
    given = tuple(
        x if gone is None else torch.where(gone, torch.nan, x) for x, gone in zip(leaves, dropped, strict=True)
    )
    out = subject.call(given, mask)
    # What a pool gives for nothing is told in its own suite.
    if subject.empty is not None:
        assert torch.equal(out, torch.full_like(out, subject.empty))
    for gradient in torch.autograd.grad(total([out]), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))
