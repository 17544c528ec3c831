"""The loss head on kept rows: its values and gradients, by every route, against all logits in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw
from maskwise.errors import OutOfRangeError
from maskwise.ops.loss import kept_rows

CLASSES, FEATURES = 53, 16
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
SETTINGS = [
    {},
    {"ignore_index": 1},
    {"label_smoothing": 0.2},
    {"class_weight": WEIGHTS},
    {"class_weight": WEIGHTS, "label_smoothing": 0.2},
    {"z_loss": 0.1},
    {"softcap": 2.0},
    {"class_weight": WEIGHTS, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0},
]
REDUCTIONS = ("mean", "sum", "sequence", "none")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["few rows", "many rows"])
def small_chunks(monkeypatch, request):
    """Chunks of 4 rows, blocks of 2, and a product for every 8 classes, by their transposes or not."""
    monkeypatch.setattr(kept_rows, "_FEW_ROWS", 128 if request.param == "few rows" else 0)
    monkeypatch.setattr(kept_rows, "_CHUNK", 4 * CLASSES)
    monkeypatch.setattr(kept_rows, "_BLOCK", 2 * CLASSES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(kept_rows, "_PRODUCT", 2 * CLASSES)
    monkeypatch.setattr(kept_rows, "_CLASSES", 8)


def head(*lead, dtype=torch.float64, ignored=-100):
    """Hidden states, weight and bias; classes; a mask. NaN and classes that do not exist are under the mask."""
    hidden = torch.randn(*lead, FEATURES, dtype=torch.float64).to(dtype)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64).mul(0.3).to(dtype)
    bias = torch.randn(CLASSES, dtype=torch.float64).to(dtype)
    target, mask = torch.randint(CLASSES, lead), torch.rand(lead) < 0.6
    mask[1:2] = False
    target = torch.where(torch.rand(lead) < 0.2, ignored, target)
    return (hidden.masked_fill(~mask[..., None], math.nan), weight, bias), torch.where(mask, target, 10**9), mask


def differentiate(tensors, target, mask, route, **options):
    """The loss and the gradients of hidden, weight and bias, under weights that tell every element from the others."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with mw.force(route), mw.explain() as log:
        out = mw.linear_cross_entropy(leaves[0], leaves[1], target, mask, leaves[2], **options)
    assert [call.route for call in log] == [route]
    above = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * above).sum(), leaves)]


def by_hand(
    tensors, target, mask, reduction, ignore_index=-100, z_loss=0.0, softcap=None, class_weight=None, **options
):
    """The same on the rows that are kept, by torch, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    rows = (mask & (target != ignore_index)).nonzero(as_tuple=True)
    logits = F.linear(leaves[0][rows], leaves[1], leaves[2])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    each = F.cross_entropy(logits, target[rows], class_weight, reduction="none", **options)
    counts = torch.ones_like(each) if class_weight is None else class_weight[target[rows]]
    each = each + z_loss * counts * logits.logsumexp(-1) ** 2
    if reduction == "sequence":
        sums, by = (each.new_zeros(len(mask)).index_add(0, rows[0], x) for x in (each, counts))
        out = (sums[by != 0] / by[by != 0]).mean()
    elif reduction == "none":
        out = each.new_zeros(mask.shape).index_put(rows, each)
    else:
        out = each.sum() / (counts.sum() if reduction == "mean" else 1)
    above = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape)
    gradients = torch.autograd.grad((out * above).sum(), leaves)
    return [out.detach(), *gradients]


def assert_all_close(found, expected, **tolerances):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerances)


@pytest.mark.parametrize("route", ["pieces", "plain"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_loss_and_gradients_are_those_of_the_rows_that_are_kept(options, reduction, route, small_chunks):
    tensors, target, mask = head(5, 7, ignored=options.get("ignore_index", -100))
    found = differentiate(tensors, target, mask, route, reduction=reduction, **options)
    assert_all_close(found, by_hand(tensors, target, mask, reduction, **options), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("route", ["pieces", "plain"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    # Logits are rounded to the dtype, here at about 2; gradients as well.
    ("dtype", "loss", "gradient"),
    [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 4e-2), (torch.float16, 2e-3, 6e-3)],
)
def test_half_precision_gives_a_loss_in_float32_and_gradients_of_its_own_dtype(
    dtype, loss, gradient, reduction, route, small_chunks
):
    tensors, target, mask = head(5, 7, dtype=dtype)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "reduction": reduction}
    found = differentiate(tensors, target, mask, route, **options)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype, dtype]
    expected = by_hand(tensors, target, mask, **options)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=loss, atol=loss)
    assert_all_close(found[1:], expected[1:], rtol=gradient, atol=gradient * expected[2].abs().max().item())


def test_the_weight_gradient_of_bfloat16_is_summed_in_float32(small_chunks):
    # 1,000 equal contributions in 250 chunks: a bfloat16 sum would stop growing at 256 of them.
    hidden = torch.ones(1000, 4, dtype=torch.bfloat16)
    weight = torch.zeros(CLASSES, 4, dtype=torch.bfloat16, requires_grad=True)
    with mw.force("pieces"):
        mw.linear_cross_entropy(hidden, weight, torch.zeros(1000).long(), None, reduction="sum").backward()
    assert weight.grad[0, 0].item() == pytest.approx(1000 * (1 / CLASSES - 1), rel=0.01)


def test_without_a_mask_what_is_not_ignored_is_kept():
    (hidden, weight, _), target, mask = head(5, 7)
    target = torch.where(mask, target, -100)
    expected = F.cross_entropy(F.linear(hidden[target >= 0], weight), target[target >= 0])
    torch.testing.assert_close(mw.linear_cross_entropy(hidden, weight, target, None), expected)


@pytest.mark.parametrize(
    "mask", [mw.Mask.from_lengths([0, 7, 3], max_len=7), mw.Mask.causal(3, 7), mw.Mask.full((3, 1))]
)
def test_masks_of_any_structure_broadcast_to_the_target(mask):
    (hidden, weight, _), _, _ = head(3, 7)
    hidden, target = torch.randn(3, 7, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (3, 7))
    rows = mask.to_bool().expand(3, 7)
    expected = F.cross_entropy(F.linear(hidden[rows], weight), target[rows])
    torch.testing.assert_close(mw.linear_cross_entropy(hidden, weight, target, mask), expected)


@pytest.mark.parametrize("route", ["pieces", "plain"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_nothing_is_kept_the_loss_is_0_and_connected_to_the_graph(reduction, route):
    tensors, target, mask = head(5, 7)
    found = differentiate(tensors, target, mask & False, route, reduction=reduction)
    for each in found:
        assert torch.equal(each, torch.zeros_like(each))


@pytest.mark.parametrize("route", ["pieces", "plain"])
def test_a_kept_class_that_does_not_exist_raises(route):
    tensors, target, mask = head(5, 7)
    with mw.force(route), pytest.raises(OutOfRangeError, match=r"name a class in \[0, 52\].*got 1000000000"):
        mw.linear_cross_entropy(*tensors[:2], target, mask | True)


def test_a_single_row_has_no_leading_dims():
    weight = torch.randn(CLASSES, FEATURES)
    hidden, target = torch.randn(FEATURES), torch.tensor(3)
    expected = F.cross_entropy(F.linear(hidden, weight), target)
    torch.testing.assert_close(mw.linear_cross_entropy(hidden, weight, target, torch.tensor(True)), expected)


# -- gradients ---------------------------------------------------------------------------------------------------------
def test_only_gradients_that_are_required_are_computed(small_chunks):
    tensors, target, mask = head(5, 7)
    expected = differentiate(tensors, target, mask, "pieces")
    for index in range(3):
        leaves = [x.clone().requires_grad_(at == index) for at, x in enumerate(tensors)]
        with mw.force("pieces"):
            mw.linear_cross_entropy(leaves[0], leaves[1], target, mask, leaves[2]).mul(0.5).backward()
        assert [x.grad is not None for x in leaves] == [at == index for at in range(3)]
        # Above, the loss is multiplied by the first of the weights, 0.5, too.
        torch.testing.assert_close(leaves[index].grad, expected[1 + index])


def test_a_graph_can_be_walked_twice(small_chunks):
    tensors, target, mask = head(5, 7)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with mw.force("pieces"):
        out = mw.linear_cross_entropy(leaves[0], leaves[1], target, mask, leaves[2])
    first = torch.autograd.grad(out * 2, leaves, retain_graph=True)
    second = torch.autograd.grad(out * 2, leaves)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_right(reduction):
    tensors, target, mask = head(2, 3)
    mask[1] = True
    target = torch.where(mask, torch.randint(CLASSES, (2, 3)), -100)
    hidden = torch.where(mask[..., None], torch.randn(2, 3, FEATURES, dtype=torch.float64), 0.0)
    inputs = [hidden.requires_grad_(), tensors[1].requires_grad_(), tensors[2].requires_grad_()]

    def call(hidden, weight, bias):
        with mw.force("pieces"):
            return mw.linear_cross_entropy(hidden, weight, target, mask, bias, reduction=reduction, softcap=3.0)

    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_a_gradient_above_that_is_not_finite_stays_where_its_row_is_kept(small_chunks):
    tensors, target, mask = head(5, 7)
    keep = mask & (target >= 0) & (target < CLASSES)
    grads = []
    for value in (0.0, math.nan):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with mw.force("pieces"):
            out = mw.linear_cross_entropy(leaves[0], leaves[1], target, mask, reduction="none")
        grads.append(torch.autograd.grad(out, leaves[:2], torch.where(keep, 1.0, value).double()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# -- denominators ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ["pieces", "plain"])
@pytest.mark.parametrize("denominator", [40, 40.0, torch.tensor(40)])
def test_a_denominator_divides_the_sum(denominator, route):
    tensors, target, mask = head(5, 7)
    found = differentiate(tensors, target, mask, route, denominator=denominator)
    expected = differentiate(tensors, target, mask, route, reduction="sum")
    assert_all_close(found, [x / 40 for x in expected])


@pytest.mark.parametrize("route", ["pieces", "plain"])
def test_a_denominator_divides_the_sum_of_means_of_sequences(route):
    tensors, target, mask = head(5, 7)
    keep = mask & (target != -100)
    found = differentiate(tensors, target, mask, route, reduction="sequence", denominator=keep.any(1).sum())
    assert_all_close(found, differentiate(tensors, target, mask, route, reduction="sequence"))


def test_micro_batches_of_a_window_have_the_gradients_of_the_whole_batch(small_chunks):
    tensors, target, mask = head(6, 7)
    expected = differentiate(tensors, target, mask, "pieces")
    leaves = [x.clone().requires_grad_() for x in tensors]
    keep = mask & (target != -100)
    parts = [slice(0, 1), slice(1, 2), slice(2, 6)]
    total = 0.0
    with mw.force("pieces"), mw.accumulate([keep[part] for part in parts]) as window:
        for part in parts:
            loss = mw.linear_cross_entropy(
                leaves[0][part], leaves[1], target[part], mask[part], leaves[2], denominator=window
            )
            # The first of the weights above.
            (0.5 * loss).backward()
            total += loss.detach()
    assert_all_close([total, *(x.grad for x in leaves)], expected, rtol=1e-12, atol=1e-12)


# -- autocast, graphs, transforms --------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ["pieces", "plain"])
def test_autocast_multiplies_in_bfloat16_and_gives_float32(route, small_chunks):
    tensors, target, mask = head(5, 7, dtype=torch.float32)
    expected = differentiate([x.bfloat16() for x in tensors], target, mask, route)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiate(tensors, target, mask, route)
    assert [x.dtype for x in found] == [torch.float32] * 4
    torch.testing.assert_close(found[0], expected[0])
    # Of bfloat16: what is returned in it was rounded once more.
    assert_all_close(found[1:], [x.double() for x in expected[1:]], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_graph_holds_the_op_and_gives_what_the_eager_call_gives(reduction, autocast):
    tensors, target, mask = head(5, 7, dtype=torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def call(hidden, weight, bias, target, mask):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return mw.linear_cross_entropy(hidden, weight, target, mask, bias, reduction=reduction, z_loss=0.1)

    results = []
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    inspected = torch.compile(call, backend=backend, fullgraph=True)
    inspected(*tensors, target, mask)
    for run in (compiled, call):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with mw.force("pieces"):
            out = run(*leaves, target, mask)
        results.append([out.detach(), *torch.autograd.grad(out.sum() * 2, leaves)])
    assert "linear_cross_entropy" in str(graphs[0].graph)
    assert_all_close(results[0], [x.double() for x in results[1]])


def test_transforms_of_torch_func_take_the_plain_route():
    tensors, target, mask = head(5, 7)
    expected = differentiate(tensors, target, mask, "pieces")
    with mw.force("pieces"):
        of_hidden = torch.func.grad(
            lambda hidden: mw.linear_cross_entropy(hidden, tensors[1], target, mask, tensors[2])
        )(tensors[0])
        each = torch.vmap(lambda *row: mw.linear_cross_entropy(row[0], tensors[1], *row[1:], tensors[2]))(
            tensors[0], target, mask
        )
    torch.testing.assert_close(of_hidden * 0.5, expected[1])
    rows = zip(tensors[0], target, mask, strict=True)
    alone = [mw.linear_cross_entropy(hidden, tensors[1], *rest, tensors[2]) for hidden, *rest in rows]
    torch.testing.assert_close(each, torch.stack(alone))


def test_the_log_reports_rows_that_were_not_multiplied():
    hidden, weight = torch.randn(4, 100, 8), torch.randn(500, 8)
    mask = mw.Mask.from_lengths([10, 20, 30, 40], max_len=100)
    target = torch.zeros(4, 100).long()
    target[3, :20] = -100
    with mw.explain() as log:
        mw.linear_cross_entropy(hidden, weight, target, mask)
    (call,) = log
    assert (call.op, call.route, call.skipped) == ("linear_cross_entropy", "pieces", (400 - 80) * 8)
    assert call.skipped_flops == (400 - 80) * 8 * 2 * 500
    assert mw.plan(mw.linear_cross_entropy, hidden, weight, target, mask).route == "pieces"


# -- memory ------------------------------------------------------------------------------------------------------------
class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The size of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return out


def test_logits_are_never_held_whole(monkeypatch):
    monkeypatch.setattr(kept_rows, "_CHUNK", 8 * 4000)
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(4000, 8, requires_grad=True)
    target = torch.randint(4000, (256,))
    with Largest() as largest:
        out = kept_rows.run(hidden, weight, target, target >= 0, torch.ones(()), None, None, kept_rows.Settings())
        out.backward()
    # The weight's gradient and a chunk are as large; the logits are 32 times that.
    assert largest.numel == 8 * 4000


def test_a_head_trains_to_the_same_weights_as_with_all_logits():
    torch.manual_seed(1)
    data, target = torch.randn(64, 5, FEATURES), torch.randint(CLASSES, (64, 5))
    mask = torch.rand(64, 5) < 0.5
    heads = []
    for _ in range(2):
        torch.manual_seed(2)
        heads.append(nn.Linear(FEATURES, CLASSES))
    losses = []
    for own, layer in enumerate(heads):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for _ in range(20):
            if own:
                with mw.force("pieces"):
                    loss = mw.linear_cross_entropy(data, layer.weight, target, mask, layer.bias)
            else:
                loss = F.cross_entropy(layer(data)[mask], target[mask])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=1e-4, atol=1e-5)
