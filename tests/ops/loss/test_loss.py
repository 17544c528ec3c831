"""mw.loss: the five laws, for every loss of the table, by every route."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from maskwise.ops.loss.functional_losses import LOSSES as FUNCTIONAL
from maskwise.ops.loss.functional_losses import REQUIRED
from maskwise.plan.dispatch import force
from tests.ops.loss.table import LOSSES, TABLE, expected, sample

REDUCTIONS = ("none", "sum", "mean", "sequence")
ROUTES = ("plain", "filled", "kernel")


def differentiable(s):
    """The operands as leaves that carry gradients, where they can."""
    return [
        x.detach().clone().requires_grad_(x.is_floating_point() and can_be_learned(s, i))
        for i, x in enumerate([*s.tensors, *s.named.values()])
    ]


def can_be_learned(s, i):
    """Whether torch has a gradient for this operand: it has none for most targets."""
    target = i == len(s.tensors) - 1
    name = [*[""] * len(s.tensors), *s.named][i]
    of_target = s.loss.fn in (F.mse_loss, F.l1_loss, F.cross_entropy, F.gaussian_nll_loss, F.triplet_margin_loss)
    return (not target or of_target) and name in ("", "var")


def gradients(s, reduction):
    leaves = differentiable(s)
    out = s.call(mw.loss, reduction, tensors=leaves)
    weights = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return out.detach(), torch.autograd.grad((out * weights).sum(), wanted)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_result_is_that_of_a_loop_over_what_is_kept(loss, reduction, route):
    s = sample(loss)
    with force(route):
        out = s.poisoned().call(mw.loss, reduction)
    torch.testing.assert_close(out, expected(s, reduction))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_poison_under_the_mask_changes_no_bit_of_loss_or_gradients(loss, reduction, route):
    s = sample(loss)
    with force(route):
        clean, clean_gradients = gradients(s, reduction)
        for turn in range(4):
            dirty, dirty_gradients = gradients(s.poisoned(turn), reduction)
            assert torch.equal(clean, dirty)
            assert all(torch.equal(a, b) for a, b in zip(clean_gradients, dirty_gradients, strict=True))
    assert clean.isfinite().all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_what_is_dropped_is_exactly_zero_and_of_what_is_kept_that_of_the_loop(loss, route):
    s = sample(loss)
    with force(route):
        _, mine = gradients(s.poisoned(), "mean")
    leaves = differentiable(s)
    n = len(s.tensors)
    wide = type(s)(s.loss, leaves[:n], dict(zip(s.named, leaves[n:], strict=True)), s.mask)
    wanted = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.requires_grad]
    theirs = torch.autograd.grad(0.5 * expected(wide, "mean"), [leaf for _, leaf in wanted])
    for (i, leaf), a, b in zip(wanted, mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
        if i not in loss.shared:
            dropped = ~s.keep_of(leaf).expand(leaf.shape)
            assert torch.equal(a[dropped], torch.zeros_like(a[dropped]))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_kept_is_a_zero_in_the_graph_with_a_gradient_of_zero(loss, reduction, route):
    s = sample(loss)
    s.mask = torch.zeros_like(s.mask)
    with force(route):
        out, grads = gradients(s.poisoned(), reduction)
    assert torch.equal(out, torch.zeros(loss.shape if reduction == "none" else (), dtype=torch.float64))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_nan_arises_in_the_backward_pass_at_all(loss):
    s = sample(loss).poisoned()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            out, grads = gradients(s, "mean")
    assert out.isfinite()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_full_mask_gives_what_torch_gives(loss, reduction, route):
    s = sample(loss)
    s.mask = torch.ones_like(s.mask)
    if not hasattr(F, loss.fn.__name__):
        pytest.skip("not torch's own loss, so torch has no reduced form of it")
    with force(route):
        out = s.call(mw.loss, reduction)
    with warnings.catch_warnings():
        # torch warns that the mean of kl_div is a mean.
        warnings.simplefilter("ignore")
        theirs = loss.fn(*s.tensors, reduction=reduction, **s.named, **loss.kwargs)
    torch.testing.assert_close(out, theirs)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(loss, route):
    s = sample(loss, seed=3)
    leaves = differentiable(s)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not leaf.requires_grad}
    learned = [leaf for leaf in leaves if leaf.requires_grad]

    def call(*given):
        rest = iter(given)
        return s.call(mw.loss, "sequence", tensors=[fixed[i] if i in fixed else next(rest) for i in range(len(leaves))])

    with force(route):
        assert torch.autograd.gradcheck(call, learned, fast_mode=True)
        if loss.name not in NO_SECOND_ORDER:
            assert torch.autograd.gradgradcheck(call, learned, fast_mode=True)


#: torch has no second derivative of these, or their first has jumps.
NO_SECOND_ORDER = ("multi_margin_loss", "multilabel_margin_loss", "linear_cross_entropy")


@pytest.mark.parametrize("reduction", ["mean", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_compiles_into_one_graph(loss, reduction):
    if loss.fn is F.gaussian_nll_loss:
        pytest.skip("torch's own gaussian_nll_loss looks at its values, which no graph can")
    if loss.name in ("l1_loss_weight", "multilabel_margin_loss"):
        pytest.skip("torch compiles its own loss into a wrong one")
    torch._dynamo.reset()
    s = sample(loss).poisoned()
    tensors = [*s.tensors, *s.named.values()]

    def call(mask, *tensors):
        return s.call(mw.loss, reduction, mask, list(tensors))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(s.mask, *tensors), call(s.mask, *tensors))


@pytest.mark.parametrize("loss", LOSSES)
def test_func_grad_and_jvp_agree_with_autograd(loss):
    s = sample(loss).poisoned()
    leaves = differentiable(s)
    out = s.call(mw.loss, tensors=leaves)
    (by_autograd,) = torch.autograd.grad(out, leaves[0])

    def call(x):
        return s.call(mw.loss, tensors=[x, *s.tensors[1:], *s.named.values()])

    torch.testing.assert_close(torch.func.grad(call)(s.tensors[0]), by_autograd)
    if loss.name in NO_FORWARD_MODE:
        return
    tangent = torch.linspace(-1, 1, by_autograd.numel(), dtype=torch.float64).reshape(by_autograd.shape)
    _, directional = torch.func.jvp(call, (s.tensors[0],), (tangent,))
    torch.testing.assert_close(directional, (by_autograd * tangent).sum())


#: torch has no forward-mode derivative of these.
NO_FORWARD_MODE = ("multi_margin_loss", "multilabel_margin_loss", "linear_cross_entropy")


@pytest.mark.parametrize("loss", [p for p in LOSSES if p.values[0].name not in ("linear_cross_entropy",)])
def test_vmap_over_masks_equals_a_loop(loss):
    if loss.fn is F.gaussian_nll_loss:
        pytest.skip("torch's own gaussian_nll_loss looks at its values, which no vmap can")
    s = sample(loss)
    masks = torch.stack([s.mask, ~s.mask, torch.ones_like(s.mask)])
    with warnings.catch_warnings():
        # torch warns of losses that it has no batching rule for, and loops.
        warnings.simplefilter("ignore")
        mapped = torch.func.vmap(lambda mask: s.call(mw.loss, mask=mask))(masks)
    torch.testing.assert_close(mapped, torch.stack([s.call(mw.loss, mask=mask) for mask in masks]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_runs_on_fake_cuda_tensors_without_reading_data(loss, reduction):
    from torch._subclasses.fake_tensor import FakeTensorMode

    if loss.fn is F.gaussian_nll_loss:
        pytest.skip("torch's own gaussian_nll_loss looks at its values")
    s = sample(loss).to(torch.float32)

    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    with FakeTensorMode():
        s.loss.kwargs.update({k: fake(v) for k, v in s.loss.kwargs.items() if isinstance(v, torch.Tensor)})
        tensors = [fake(x) for x in [*s.tensors, *s.named.values()]]
        out = s.call(mw.loss, reduction, fake(s.mask), tensors)
    assert out.device.type == "cuda"
    assert out.shape == (loss.shape if reduction == "none" else ())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_dtype_agrees_with_float64(loss, dtype, route):
    s = sample(loss).to(dtype)
    try:
        s.unreduced()
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")
    with force(route):
        out = s.poisoned().call(mw.loss)
    assert out.dtype == s.unreduced().dtype
    # The unreduced loss itself has the errors of its dtype, and cancels in places: a few of them in size of 1.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected(s, "mean"), rtol=tolerance, atol=tolerance)


def test_a_mean_of_halves_does_not_overflow():
    x = torch.full((70_000,), 100.0, dtype=torch.float16)
    out = mw.loss(F.mse_loss, x, torch.zeros_like(x), torch.ones(70_000, dtype=torch.bool))
    assert out == 10_000


FULL = torch.ones(3, 4, dtype=torch.bool)
X = torch.ones(3, 4)
LOGITS, LABELS = torch.zeros(3, 5, 4), torch.zeros(3, 4, dtype=torch.long)
ERRORS = [
    (lambda: mw.loss(F.mse_loss, X, X, torch.ones(3, dtype=torch.bool)), ShapeError, r"mask\[\.\.\., None\]"),
    (lambda: mw.loss(F.mse_loss, X, X, FULL.T), ShapeError, r"\(3, 4\), got \(4, 3\)\. Hint: mask\.T"),
    (lambda: mw.loss(F.mse_loss, X[:1], X[:1], FULL), ShapeError, r"must not be larger than the loss"),
    (lambda: mw.loss(F.cross_entropy, LOGITS, LABELS, FULL.T), ShapeError, r"whose shape is \(3, 4\), got \(4, 3\)"),
    (lambda: mw.loss(lambda a, b, reduction: a, X, X, FULL.T), ShapeError, r"whose shape is \(3, 4\), got \(4, 3\)"),
    (lambda: mw.loss(F.mse_loss, X, torch.ones(2, 4), FULL), ShapeError, r"`target` must have the shape of `input`"),
    (lambda: mw.loss(F.mse_loss, X, X, FULL.float()), DtypeError, r"Mask\.from_attention_mask\(mask\)"),
    (lambda: mw.loss(F.mse_loss, X, X, None), DtypeError, r"Mask\.full\(target\.shape\)"),
    (lambda: mw.loss(F.mse_loss, X, X, [True]), DtypeError, r"torch\.as_tensor\(mask\)"),
    (lambda: mw.loss(F.mse_loss, 1.0, X, FULL), DtypeError, r"`input` must be a tensor, or several, got float"),
    (lambda: mw.loss(F.mse_loss, X, 1.0, FULL), DtypeError, r"torch\.as_tensor\(target\)"),
    (lambda: mw.loss(F.mse_loss, X, X, FULL.to("meta")), DeviceError, r"mask\.to\(input\.device\)"),
    (
        lambda: mw.loss(F.mse_loss, X, X, FULL, "batchmean"),
        ArgumentError,
        r"'none', 'sum', 'mean', 'sequence', got 'batchmean'",
    ),
    (lambda: mw.loss(F.mse_loss, X, X, FULL, size_average=True), ArgumentError, r"`size_average` must not be given"),
    (lambda: mw.loss(F.ctc_loss, X, X, FULL), ArgumentError, r"log_probs\[:, keep\]"),
    (lambda: mw.loss(torch.nn.MSELoss(), X, X, FULL), DtypeError, r"got MSELoss\. Hint: F\.cross_entropy instead"),
    (lambda: mw.loss(lambda a, b: a - b, X, X, FULL), DtypeError, r"takes reduction=\"none\""),
    (lambda: mw.loss(lambda a, b, reduction: 1.0, X, X, FULL), DtypeError, r"return a tensor, got float"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_get_an_error_that_teaches(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith("loss: ")


def test_an_error_of_the_loss_itself_comes_through():
    def fails(input, target, reduction):
        raise TypeError("no such thing")

    with pytest.raises(TypeError, match="no such thing"):
        mw.loss(fails, X, X, FULL)


@pytest.mark.filterwarnings("ignore:loss")
@pytest.mark.parametrize("route", ROUTES)
def test_targets_and_variances_broadcast_as_in_torch(route):
    x, mask = torch.randn(3, 4), torch.rand(3, 4) < 0.5
    mask[0, 0] = True
    target = torch.randn(3, 1, requires_grad=True)
    with force(route):
        out = mw.loss(F.smooth_l1_loss, x, target, mask)
    expected = F.smooth_l1_loss(x, target.expand(3, 4), reduction="none")[mask].mean()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*[torch.autograd.grad(o, target)[0] for o in (out, expected)])
    for var in (torch.rand(3), torch.rand(3, 1), 0.5):
        theirs = F.gaussian_nll_loss(x, x + 1, var, reduction="none")[mask].mean()
        with force(route):
            torch.testing.assert_close(mw.loss(F.gaussian_nll_loss, x, x + 1, mask, var=var), theirs)


def test_operands_that_broadcast_get_a_warning_and_those_that_torch_refuses_are_refused():
    with pytest.warns(UserWarning, match=r"different shapes, \(3, 4\) and \(4,\)"):
        mw.loss(F.mse_loss, X, X[0], FULL)
    with pytest.raises(ValueError, match="different to the input size"):
        mw.loss(F.binary_cross_entropy, X, X[:, :1], FULL)
    with pytest.raises(RuntimeError, match="Expected target size"):
        mw.loss(F.cross_entropy, LOGITS, LABELS[:, :1], FULL)
    with pytest.raises(ValueError, match="incorrect size"):
        mw.loss(F.gaussian_nll_loss, X, X, FULL, var=torch.ones(2))


def test_a_partial_is_the_loss_that_it_holds():
    mask = torch.tensor([[True, False, True, False]])
    x = X.clone() * 3
    x[:, 1] = float("nan")
    held = functools.partial(F.huber_loss, delta=0.5)
    assert mw.loss(held, x, X, mask) == F.huber_loss(X * 3, X, delta=0.5)
    assert mw.loss(held, x, X, mask, delta=5.0) == F.huber_loss(X * 3, X, delta=5.0)


def test_a_single_sample_of_classes_has_a_loss_of_no_dims():
    logits = torch.randn(5)
    out = mw.loss(F.cross_entropy, logits, torch.tensor(2), torch.tensor(True))
    torch.testing.assert_close(out, F.cross_entropy(logits, torch.tensor(2)))
    assert mw.loss(F.cross_entropy, logits, torch.tensor(77), torch.tensor(False)) == 0


def test_what_is_ignored_may_hold_anything_and_rows_of_it_do_not_count():
    logits = torch.randn(2, 5, 3, requires_grad=True)
    target = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    dirty = torch.where((target == -100)[:, None], torch.nan, logits)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    out = mw.loss(F.cross_entropy, dirty, target, mask, reduction="sequence")
    torch.testing.assert_close(out, F.cross_entropy(logits[:1, :, 0], target[:1, 0]))
    assert torch.autograd.grad(out, logits)[0].isfinite().all()


def test_weights_that_add_up_to_nothing_give_nothing():
    target, mask = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    out = mw.loss(F.cross_entropy, torch.randn(3, 2), target, mask, weight=torch.tensor([0.0, 1.0]))
    assert out == 0


def test_a_parameter_inside_a_users_loss_gets_a_gradient_of_what_is_kept_only():
    scale = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor([1.0, 4.0, float("nan")])
    mask = torch.tensor([True, True, False])
    out = mw.loss(lambda a, b, reduction: (a - b).sqrt() / scale, x, torch.zeros(3), mask, reduction="sum")
    assert out == 1.5
    assert torch.autograd.grad(out, scale)[0] == -0.75


def test_a_users_loss_without_a_target_or_with_a_table_keeps_its_table():
    table = torch.randn(4, 3)
    ids = torch.tensor([0, 99, 3])

    def lookup(input, ids, table, reduction):
        return (input - table[ids]).pow(2).sum(-1)

    out = mw.loss(lookup, (torch.zeros(3, 3), ids), table, torch.tensor([True, False, True]), reduction="sum")
    torch.testing.assert_close(out, table[[0, 3]].pow(2).sum())


# -- batchmean, and losses of several inputs ---------------------------------------------------------------------------
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_batchmean_divides_by_the_rows_that_keep_something(route, dtype):
    x = torch.randn(5, 3, 4, dtype=torch.float64).log_softmax(-1).to(dtype).requires_grad_()
    target = torch.randn(5, 3, 4, dtype=torch.float64).softmax(-1).to(dtype)
    keep = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]]).bool()[..., None]
    poisoned = torch.where(keep, x, torch.nan)
    with force(route):
        out = mw.loss(F.kl_div, poisoned, target, keep, reduction="batchmean")
    (mine,) = torch.autograd.grad(out, x)
    wide = x.double()
    whole = torch.where(keep, F.kl_div(wide, target.double(), reduction="none"), 0.0).sum() / 3
    (theirs,) = torch.autograd.grad(whole, x)
    torch.testing.assert_close(out, whole.to(dtype))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 1), (1, 4), (4,)])
def test_batchmean_of_everything_and_of_whole_rows_is_that_of_torch(shape):
    x, target = torch.randn(6, 4).log_softmax(-1), torch.randn(6, 4).softmax(-1)
    full = torch.ones(shape if shape != (6,) else (6, 1), dtype=torch.bool)
    expected = F.kl_div(x, target, reduction="batchmean")
    torch.testing.assert_close(mw.loss(F.kl_div, x, target, full, reduction="batchmean"), expected)
    rows = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    expected = F.kl_div(x[rows], target[rows], reduction="batchmean")
    for fn in (F.kl_div, functools.partial(F.kl_div)):
        torch.testing.assert_close(mw.loss(fn, x, target, rows[:, None], reduction="batchmean"), expected)


def test_batchmean_of_nothing_is_a_zero_in_the_graph():
    x = torch.randn(2, 3, requires_grad=True)
    out = mw.loss(F.kl_div, x, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), reduction="batchmean")
    out.backward()
    assert out == 0
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_batchmean_compiles_into_one_graph():
    x, target, keep = torch.randn(4, 3), torch.rand(4, 3), torch.rand(4, 3) < 0.5
    compiled = torch.compile(
        lambda x: mw.loss(F.kl_div, x, target, keep, reduction="batchmean"), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), mw.loss(F.kl_div, x, target, keep, reduction="batchmean"))


def test_every_loss_of_torch_is_in_the_table_of_what_is_known():
    others = {"ctc_loss"}  # refused, with what to write instead
    named = {
        name for name in dir(F) if name.endswith(("_loss", "cross_entropy", "with_logits", "kl_div")) and name[0] != "_"
    }
    assert named - others == {fn.__name__ for fn in FUNCTIONAL}
    assert {loss.fn for loss in TABLE} >= {*FUNCTIONAL}


def test_a_loss_of_three_tensors_that_is_given_two_says_how_it_is_called():
    for fn, takes in REQUIRED.items():
        if len(takes) == 3:
            with pytest.raises(ArgumentError, match=rf"takes {', '.join(takes)}, got 2 in all") as error:
                mw.loss(fn, X, X, FULL)
            assert f"mw.loss(F.{fn.__name__}, ({takes[0]}, {takes[1]}), {takes[2]}, mask)" in str(error.value)


# -- dispatch ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ["kept", "pieces", "filled", "plain"])
def test_a_forced_route_is_taken_also_where_the_loss_has_a_kernel(route):
    x, target, keep = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 4) < 0.5
    expected = F.mse_loss(x[keep], target[keep])
    with force(route), mw.explain() as log:
        torch.testing.assert_close(mw.loss(F.mse_loss, x, target, keep), expected)
    assert [call.route for call in log] == [route]
    assert mw.plan(mw.loss, F.mse_loss, x, target, keep).route != route


def test_calls_of_one_shape_and_other_strides_do_not_share_a_decision():
    x, target, keep = torch.rand(300, 200), torch.rand(300, 200), (torch.rand(300) < 0.5)[:, None]
    expected = F.binary_cross_entropy(x, target, reduction="none")[keep.squeeze(1)].mean()
    for operand in (x, x.T.contiguous().T, torch.stack((x, x), -1)[..., 0], x):
        for mask in (keep, keep.expand(300, 200), keep.expand(300, 200).contiguous()):
            torch.testing.assert_close(mw.loss(F.binary_cross_entropy, operand, target, mask), expected)


def test_no_function_of_a_user_outlives_its_call():
    def own(input, target, reduction):
        return (input - target).abs()

    def distance(a, b):
        return (a - b).abs().sum(-1)

    mw.loss(own, X, X, FULL)
    mw.loss(F.triplet_margin_with_distance_loss, (X, X + 1), X + 2, FULL[:, 0], distance_function=distance)
    held = [weakref.ref(own), weakref.ref(distance)]
    del own, distance
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_keyword_arguments_that_torch_does_not_take_are_refused_whatever_the_route():
    for fn, name in ((F.cross_entropy, "beta"), (F.nll_loss, "label_smoothing")):
        for _ in range(2):
            with pytest.raises(TypeError, match=name):
                mw.loss(fn, LOGITS, LABELS, FULL, **{name: 0.1})
