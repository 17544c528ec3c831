"""The dispatcher is pure arithmetic on static facts: no tensors, no surprises."""

import pytest
import torch

import maskwise as mw
from maskwise.ops import backends
from maskwise.ops.reduce.sums import _sum
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work, microseconds


def plan(shape, *, dtype=torch.float32, device="cpu", grad=False, transformed=False):
    facts = dispatch.Facts("sum", shape, dtype, device, grad=grad, transformed=transformed)
    return dispatch.decide(facts, _sum.routes).plan


def test_without_a_gradient_the_bare_kernel_wins_at_every_size():
    assert {plan((n,)).route for n in (1, 32, 10**4, 10**8)} == {"bare"}


def test_with_a_gradient_tiny_inputs_take_the_plain_route_and_large_ones_the_kernel():
    assert plan((4, 8), grad=True).route == "plain"
    assert plan((4096, 4096), grad=True).route == "fused"


def test_a_rejected_route_reports_its_predicted_cost():
    (refusal,) = plan((4096, 4096)).refused
    assert refusal.route == "plain"
    assert "µs against" in refusal.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": torch.complex64}, "the cpu kernel of sum does not support torch.complex64"),
        ({"device": "mps"}, "sum has no kernel on mps"),
        ({"transformed": True}, "torch.func transforms"),
    ],
)
def test_an_unsupported_call_falls_back_to_plain_with_the_reason(facts, reason):
    made = plan((4096, 4096), **facts)
    assert made.route == "plain"
    assert reason in made.reason
    assert made.refused[0].reason == made.reason


def test_a_device_without_kernels_is_rejected_with_its_own_reason(monkeypatch):
    monkeypatch.setitem(backends._probes, "cpu", lambda: "the C++ extension is not built")
    assert plan((64, 64)).reason == "the C++ extension is not built"


def test_plans_are_values():
    assert plan((3, 4)) == plan((3, 4))
    assert hash(plan((3, 4))) == hash(plan((3, 4)))
    with pytest.raises(AttributeError):
        plan((3, 4)).route = "plain"


def test_force_sets_a_route_and_restores_it():
    with dispatch.force("plain"):
        assert plan((4096, 4096)).route == "plain"
    with dispatch.force("kernel"):
        assert plan((4, 8), grad=True).route == "fused"
    assert plan((4096, 4096)).route == "bare"


def test_forcing_reaches_calls_that_were_planned_before():
    x, mask = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)
    routes = []
    for route in ("kernel", "plain", "kernel"):
        with dispatch.force(route), mw.explain() as log:
            mw.sum(x, mask)
            routes.append(log.calls[0].route)
    assert routes == ["bare", "plain", "bare"]


def test_large_allocations_cost_more_than_streaming():
    rates = Rates(streamed=1000.0, fresh=100.0, fresh_from=5000)
    small = microseconds(Work(calls=0, streamed=0, fresh=4000), 1.0, rates)
    large = microseconds(Work(calls=0, streamed=0, fresh=6000), 1.0, rates)
    assert (small, large) == (4.0, 60.0)
