"""apply: a row-wise function gets kept rows only, on every route."""

import pytest
import torch

import maskwise as mw
from maskwise.errors import DtypeError, ShapeError
from maskwise.ops.select.apply import _decision


@pytest.fixture(params=["packs", "dense"])
def route(request):
    """Both routes, whichever dispatch would choose."""
    with mw.force("kept" if request.param == "packs" else "dense"):
        yield request.param


def test_fn_gets_kept_rows_only_and_the_layout_is_restored(route):
    x, mask = torch.randn(4, 5, 3), torch.rand(4, 5) < 0.5
    linear = torch.nn.Linear(3, 7)
    out = mw.apply(linear, x, mask=mask)
    torch.testing.assert_close(out, torch.where(mask[..., None], linear(x), 0.0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -5.0])
def test_dropped_rows_are_never_computed_forward_or_backward(route, poison):
    mask = torch.tensor([[True, False], [True, True]])
    weight = torch.tensor(2.0, requires_grad=True)
    x = torch.where(mask, torch.tensor([[1.0, 0.0], [4.0, 2.0]]), poison).requires_grad_()
    out = mw.apply(lambda rows: (weight * rows).log(), x, mask=mask)
    torch.testing.assert_close(out, torch.where(mask, (2 * x).log(), 0.0).nan_to_num())
    gradients = torch.autograd.grad(out.sum(), (x, weight))
    torch.testing.assert_close(gradients[0], torch.tensor([[1.0, 0.0], [0.25, 0.5]]))
    torch.testing.assert_close(gradients[1], torch.tensor(1.5))


def test_other_makes_it_a_selective_update(route):
    # The feature map of the seeds: a mask over regions, the same for all channels.
    x, value = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8)
    mask = torch.rand(1, 1, 8, 8) < 0.5
    out = mw.apply(torch.add, x, value, mask=mask, other=x)
    torch.testing.assert_close(out, torch.where(mask, x + value, x))


def test_fn_may_change_size_and_dtype_and_return_a_tuple(route):
    x, mask = torch.randn(6, 4), torch.rand(6) < 0.5
    largest, wide = mw.apply(lambda rows: (rows.argmax(-1), rows.repeat(1, 2)), x, mask=mask, fill=-1)
    assert largest.dtype == torch.int64
    assert torch.equal(largest, torch.where(mask, x.argmax(-1), -1))
    assert torch.equal(wide, torch.where(mask[:, None], x.repeat(1, 2), -1.0))


def test_more_tensors_are_cut_to_the_same_rows_and_scalars_pass(route):
    x, y, mask = torch.randn(4, 5), torch.randn(1, 5), torch.rand(4, 5) < 0.5
    out = mw.apply(lambda a, b, c: a * b + c, x, y, 3, mask=mask)
    torch.testing.assert_close(out, torch.where(mask, x * y + 3, 0.0))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_and_everything_kept(route, density):
    x, mask = torch.rand(4, 5, 3) + 1, torch.rand(4, 5) < density
    leaf = x.clone().requires_grad_()
    out = mw.apply(torch.log, leaf, mask=mask, fill=2.0)
    torch.testing.assert_close(out, x.log() if density else torch.full_like(x, 2.0))
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(gradient, 1 / x if density else torch.zeros_like(x))


def test_gradients_are_those_of_finite_differences(route):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    x = torch.rand(2, 3, 2, dtype=torch.float64).add(0.5).requires_grad_()
    other = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, other: mw.apply(torch.log, x, mask=mask, other=other), (x, other))


def test_apply_in_place_changes_kept_rows_only(route):
    x, mask = torch.randn(5, 3), torch.tensor([True, False, True, False, True])
    before = x.clone()
    assert mw.apply_(torch.exp, x, mask=mask) is x
    assert torch.equal(x[~mask], before[~mask])
    torch.testing.assert_close(x[mask], before[mask].exp())


def test_apply_in_place_rejects_other_shapes_and_modifies_nothing():
    x = torch.ones(3, 2)
    with pytest.raises(ShapeError, match=r"rows of x's own shape and dtype, \(3, 2\) torch.float32, got \(3, 4\)"):
        mw.apply_(lambda rows: rows.repeat(1, 2), x, mask=torch.tensor([True, False, True]))
    assert torch.equal(x, torch.ones(3, 2))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_poison_under_the_mask_changes_no_bit_of_output_or_gradient(route, poison):
    x, y, mask = torch.rand(4, 5, 3) + 0.5, torch.rand(4, 5, 3) + 0.5, torch.rand(4, 5) < 0.5
    linear = torch.nn.Linear(3, 2)
    found = []
    for value in (0.0, poison):
        a, b = (torch.where(mask[..., None], t, value).requires_grad_() for t in (x, y))
        out = mw.apply(lambda a, b: linear(a.log() / b), a, b, mask=mask, fill=-1.0)
        above = torch.where(mask[..., None], torch.linspace(0.5, 2.0, 40).reshape(4, 5, 2), value)
        found.append((out.detach(), *torch.autograd.grad(out, (a, b, *linear.parameters()), above)))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean.view(torch.int32), dirty.view(torch.int32))


def test_a_full_mask_gives_fn_everything_as_it_is():
    seen = []

    def fn(rows):
        seen.append(rows)
        return rows * 2

    x = torch.randn(40, 50, 3)
    for _ in range(2):
        assert torch.equal(mw.apply(fn, x, mask=torch.ones(40, 50, dtype=torch.bool)), x * 2)
    # Once the check found that fn does not modify its input.
    assert seen[-1].data_ptr() == x.data_ptr()


def test_explain_reports_the_route():
    x, linear = torch.randn(4, 5, 3), torch.nn.Linear(3, 3)
    with mw.explain() as log:
        mw.apply(linear, x, mask=mw.Mask.from_lengths([1, 1, 1, 1], max_len=5))
        mw.apply(linear, x, mask=mw.Mask.full((4, 5)))
    assert [(call.op, call.route, call.skipped) for call in log] == [("apply", "kept", 48), ("apply", "plain", 0)]


def test_it_compiles_into_one_graph_and_maps():
    torch._dynamo.reset()
    x, mask = torch.rand(4, 5) + 0.1, torch.rand(4, 5) < 0.5

    def call(x, mask):
        return mw.apply(torch.log, x, mask=mask)

    expected = torch.where(mask, x.log(), 0.0)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x, mask), expected)
    torch.testing.assert_close(torch.func.vmap(call)(x, mask), expected)


def test_rows_are_gathered_only_where_that_pays():
    x = torch.rand(100, 100, 3)
    masks = [mw.Mask.from_lengths([length] * 100, max_len=100) for length in (10, 50, 95, 99, 100)]

    def routes(fn, x, *, learns):
        return [_decision(fn, x, mask, mask.facts.count, grad=learns).plan.route for mask in masks]

    apart = x.transpose(0, 1)
    assert routes(torch.nn.Linear(3, 3), x, learns=False) == ["kept", "kept", "kept", "plain", "plain"]
    assert routes(torch.exp, x, learns=True) == ["kept", "kept", "kept", "kept", "plain"]
    assert routes(torch.exp, apart, learns=True) == ["kept", "kept", "plain", "plain", "plain"]
    # Without a gradient, dropped inputs of an elementwise function need not be replaced, and gathering does not pay.
    assert routes(torch.exp, x, learns=False) == ["kept", "plain", "plain", "plain", "plain"]


def test_few_rows_are_gathered_by_torch_with_the_same_result_and_gradient():
    x = torch.tensor([[1.0, float("nan")], [4.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    out = mw.apply(torch.log2, x, mask=mask, fill=-1.0)
    assert out.tolist() == [[0.0, -1.0], [2.0, 1.0]]
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.where(mask, 1 / (x.detach() * torch.log(torch.tensor(2.0))), 0.0))


ERRORS = [
    (lambda x, m: mw.apply(torch.log, x, torch.ones(7, 2), mask=m), ShapeError, r"functools\.partial\(fn, value\)"),
    (lambda x, m: mw.apply(lambda r: r.sum(0), x, mask=m), ShapeError, r"as many as it got"),
    (lambda x, m: mw.apply(lambda r: 3, x, mask=m), DtypeError, r"a tensor or a tuple of tensors, got int"),
    (lambda x, m: mw.apply(torch.log, x, mask=m.float()), DtypeError, r"Mask\.from_attention_mask"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(torch.ones(2, 3), torch.tensor([True, False]))
    assert str(caught.value).startswith("apply: ")
