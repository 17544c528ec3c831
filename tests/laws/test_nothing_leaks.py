"""Law 1: outputs and gradients do not depend on what is masked out, to the last bit."""

import pytest
import torch

from maskwise.plan.dispatch import force
from tests.laws.samples import ROUTES, as_bool, cases, differentiable, outputs
from tests.laws.subjects import trials

POISONS = [float("nan"), float("inf"), -float("inf"), 3e38]


def poisoned(x, mask, value):
    return torch.where(mask, x, torch.tensor(value, dtype=x.dtype))


def forward_and_gradient(function, x, mask, kwargs):
    """Every output, and the gradient of a weighted sum of those that have one."""
    x = x.detach().clone().requires_grad_(function.gradient > 0)
    result = function.call(x, mask, **kwargs)
    total = 0.0
    for out in differentiable(result) if function.gradient else []:
        # Weights that differ by element, so that no two gradients cancel by chance.
        weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape).to(out.dtype)
        total = total + (torch.where(out.isfinite(), out, 0.0) * weights).sum()
    gradient = torch.autograd.grad(total, x) if function.gradient else ()
    return [out.detach() for out in outputs(result)], *gradient


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), cases())
def test_poison_under_the_mask_changes_no_bit_of_output_or_gradient(function, sample, route):
    with force(route):
        clean = forward_and_gradient(function, poisoned(sample.x, sample.bits, 0.0), sample.mask, sample.kwargs)
        for value in POISONS:
            dirty = forward_and_gradient(function, poisoned(sample.x, sample.bits, value), sample.mask, sample.kwargs)
            for a, b in zip((*clean[0], *clean[1:]), (*dirty[0], *dirty[1:]), strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), [case for case in cases() if case.values[0].gradient])
def test_the_gradient_of_what_is_dropped_is_exactly_zero(function, sample, route):
    with force(route):
        _, gradient = forward_and_gradient(
            function, poisoned(sample.x, sample.bits, float("nan")), sample.mask, sample.kwargs
        )
    of_dropped = gradient[~sample.bits.expand(sample.x.shape)]
    assert torch.equal(of_dropped, torch.zeros_like(of_dropped))


@pytest.mark.kernel
@pytest.mark.parametrize(("subject", "mask"), trials())
def test_poison_in_what_a_call_or_a_layer_drops_changes_no_bit_of_what_may_be_read(subject, mask):
    clean = subject.run(subject.poisoned(0.0, mask), mask)
    for value in POISONS:
        for a, b in zip(clean, subject.run(subject.poisoned(value, mask), mask), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("subject", "mask"), trials())
def test_the_gradient_of_what_a_call_or_a_layer_drops_is_exactly_zero(subject, mask):
    found = subject.run(subject.poisoned(float("nan"), mask), mask)
    gradients = found[len(found) - len(subject.shapes) :]
    for gradient, dropped in zip(gradients, subject.dropped(as_bool(mask)), strict=True):
        if dropped is not None:
            of_dropped = gradient[dropped.expand(gradient.shape)]
            assert torch.equal(of_dropped, torch.zeros_like(of_dropped))
