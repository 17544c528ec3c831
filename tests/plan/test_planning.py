"""mw.plan() returns the plan of a call without running it; mw.force() forces a route."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError, ShapeError
from maskwise.plan.dispatch import Plan
from tests.laws.functions import FUNCTIONS

X, MASK = torch.rand(64, 64), mw.Mask.causal(64)
HEADS = torch.rand(2, 2, 32, 8)
CALLS = {
    "loss": lambda: (mw.loss, F.mse_loss, X, X, MASK),
    "topk": lambda: (mw.topk, X, MASK, 3),
    "quantile": lambda: (mw.quantile, X, MASK, 0.5),
    "fill": lambda: (mw.fill, X, MASK, 0.0),
    "apply": lambda: (mw.apply, torch.exp, X),
    "apply_": lambda: (mw.apply_, torch.exp, X),
    "pack": lambda: (mw.pack, X, MASK),
    "attention": lambda: (mw.attention, HEADS, HEADS, HEADS, mw.Mask.causal(32)),
    "linear": lambda: (mw.linear, X, X, MASK),
    "linear_cross_entropy": lambda: (mw.linear_cross_entropy, X, X, X.long()[:, 0], MASK[:, 0]),
    "count": lambda: (mw.count, MASK),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *(name for name in CALLS if name not in FUNCTIONS)])
def test_every_public_function_has_a_plan_and_does_not_run(name, monkeypatch):
    call = CALLS[name]() if name in CALLS else (getattr(mw, name), X, MASK, -1)
    options = {"mask": MASK} if name.startswith("apply") else {}
    before = X.clone()
    made = mw.plan(*call, **options)
    assert isinstance(made, Plan)
    assert made.op == {"apply_": "apply"}.get(name, name)
    assert made.reason
    assert made.refused or name == "pack"
    assert torch.equal(X, before)


def test_the_plan_is_the_one_that_the_call_then_takes():
    for shape in ((2, 3), (512, 512)):
        for grad in (False, True):
            x = torch.rand(shape, requires_grad=grad)
            keep = torch.rand(shape) < 0.5
            made = mw.plan(mw.softmax, x, keep, dim=-1)
            with mw.explain() as log:
                mw.softmax(x, keep, dim=-1)
            assert made.route == log.calls[0].route


def test_a_function_argument_is_not_run():
    def must_not_run(rows):
        raise AssertionError

    assert mw.plan(mw.apply, must_not_run, X, mask=MASK).route == "kept"


def test_partial_functions_and_layers_have_plans_too():
    assert mw.plan(functools.partial(mw.softmax, dim=-1), X, MASK).op == "softmax"
    assert mw.plan(mw.nn.SparseLinear(64, 8, density=0.05), X).op == "SparseLinear"


def test_nothing_is_logged_and_no_observer_remains():
    from maskwise.plan.dispatch import observers

    with mw.explain() as log:
        mw.plan(mw.sum, X, MASK)
        assert len(log) == 0
        mw.sum(X, MASK)
    assert len(log) == 1
    assert observers.values() == ()


def test_other_threads_run_during_a_dry_run():
    done = []

    def fn(rows):  # Runs in the middle of another thread's mw.plan.
        return rows

    class Mask(mw.Mask):
        @property
        def device(self):
            # The plan is being made here: a call of another thread must not be stopped by it.
            thread = threading.Thread(target=lambda: done.append(float(mw.sum(torch.ones(3), torch.ones(3) > 0))))
            thread.start()
            thread.join()
            return super().device

    mw.plan(mw.apply, fn, X, mask=Mask(MASK.to_bool()))
    assert done
    assert set(done) == {3.0}


def test_wrong_arguments_raise_what_the_call_would_raise():
    with pytest.raises(ShapeError, match=r"mask\[\.\.\., None\]"):
        mw.plan(mw.softmax, torch.rand(2, 3, 4), torch.ones(2, 3) > 0, dim=-1)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (torch.softmax, r"Hint: mw\.softmax\."),
        (F.relu, r"Hint: with mw\.explain\(\)"),
        (mw.compress, r"Hint: with mw\.explain\(\)"),
        (torch.nn.Linear(2, 2), r"Hint: with mw\.explain\(\)"),
        ("softmax", r"got 'softmax'"),
    ],
)
def test_a_function_that_is_not_masked_is_rejected_with_a_hint(fn, hint):
    with pytest.raises(DtypeError, match=r"plan: `fn` must be a masked function of maskwise.*" + hint):
        mw.plan(fn, X, MASK)


def test_a_function_with_a_single_route_is_rejected():
    gate = mw.nn.gates.Binary(torch.ones(2, 2) > 0)
    with pytest.raises(ArgumentError, match=r"plan: `fn` must have routes to choose from, got Binary"):
        mw.plan(gate, torch.ones(2, 2))


def test_plan_stays_the_function_when_modules_of_the_package_are_imported():
    import maskwise.plan.cost  # noqa: F401
    from maskwise.plan.dispatch import force, plan

    assert mw.plan(mw.sum, X, MASK).op == "sum"
    assert mw.plan is plan
    assert mw.force is force


# -- force -------------------------------------------------------------------------------------------------------------
def test_dense_forces_the_plain_route_of_every_function():
    with mw.force("dense"):
        for name, call in CALLS.items():
            if name != "pack":
                assert mw.plan(*call(), **({"mask": MASK} if name.startswith("apply") else {})).route == "plain", name


def test_a_route_of_one_family_does_not_affect_others():
    keep = torch.rand(512, 512) < 0.999
    with mw.force("kept"):
        assert mw.plan(mw.apply, torch.exp, torch.rand(512, 512), mask=keep).route == "kept"
        assert mw.plan(mw.sum, torch.rand(512, 512), keep).route == "bare"


def test_none_plans_as_usual_inside_of_a_forced_block():
    with mw.force("dense"), mw.force(None):
        assert mw.plan(mw.sum, torch.rand(512, 512), torch.ones(512) > 0).route == "bare"


def test_an_unknown_route_is_rejected_with_the_valid_names():
    told = r"be one of dense, kernel, plain, .*, got 'fast'\. Hint: mw\.force\(\"dense\"\)\."
    with pytest.raises(ArgumentError, match=told), mw.force("fast"):
        pass
    assert mw.plan(mw.sum, torch.rand(512, 512), torch.ones(512) > 0).route == "bare"


def test_a_notebook_shows_a_plan_as_a_table_of_its_routes():
    shown = mw.plan(mw.sum, torch.ones(512, 512), mw.Mask.causal(512), dim=-1)._repr_html_()
    assert shown.startswith("<table><caption>plan of sum</caption>")
    assert shown.index("<td>bare</td>") < shown.index("<td>plain</td>")
    assert shown.count("<tr>") == 3
