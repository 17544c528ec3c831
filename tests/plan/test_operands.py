"""What dispatch knows of a mask: whether it reaches kernels as intervals or as bits."""

import copy
import pickle
import tracemalloc

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import maskwise as mw
from maskwise.ops.attention import blocks
from maskwise.ops.attention.arguments import Sizes
from maskwise.plan import dispatch
from tests.laws.functions import FUNCTIONS
from tests.laws.samples import UNDER_LAW, differentiable, needed
from tests.laws.test_nothing_leaks import forward_and_gradient

LENGTHS = torch.tensor([3, 0, 5])
INTERVALS = {
    "lengths": mw.Mask.from_lengths(LENGTHS, 5),
    "left lengths": mw.Mask.from_lengths(LENGTHS, 5, side="left"),
    "causal": mw.Mask.causal(5),
    "window": mw.Mask.window(5, left=1),
    "full": mw.Mask.full((3, 5)),
    "an AND": mw.Mask.causal(5) & mw.Mask.window(5, left=2),
    "rows, by unsqueeze": mw.Mask.from_lengths(LENGTHS, 5)[..., None],
    "heads, by unsqueeze": mw.Mask.from_lengths(LENGTHS, 5)[:, None, None, :],
    "transposed": mw.Mask.causal(5).T,
    "expanded": mw.Mask.from_lengths(LENGTHS, 5)[:, None].expand(3, 2, 5),
    "none": mw.Mask.none((3, 5)),
    "segments in runs": mw.Mask.from_segments(torch.tensor([0, 0, 1, 1, 2])),
    "key padding": mw.Mask.from_key_padding(torch.arange(5) >= LENGTHS[:, None]),
    "an attention mask": mw.Mask.from_attention_mask((torch.arange(5) < LENGTHS[:, None]).long()),
    "an attention mask, padded left": mw.Mask.from_attention_mask((torch.arange(5) >= LENGTHS[:, None]).long()),
}
BITS = {
    "a bool tensor": mw.Mask(torch.rand(3, 5) < 0.5),
    "indices": mw.Mask.from_indices([1, 3], 5),
    "every second position": mw.Mask.from_lengths(LENGTHS, 5)[:, ::2],
    "key padding with holes": mw.Mask.from_key_padding(torch.tensor([[False, True, False]])),
    "one position of each row": mw.Mask.from_lengths(LENGTHS, 5)[:, 2],
    "an OR": mw.Mask.causal(5) | mw.Mask.from_indices([4], 5),
}


@pytest.mark.parametrize(
    ("mask", "operand"),
    [pytest.param(mask, "intervals", id=name) for name, mask in INTERVALS.items()]
    + [pytest.param(mask, "bits", id=name) for name, mask in BITS.items()],
)
def test_a_mask_knows_its_operand_and_an_interval_mask_keeps_one_run_along_a_dim(mask, operand):
    assert mask.operand == operand
    if operand == "intervals":
        bits = mask.to_bool().int()
        starts = [bits.diff(dim=dim, prepend=torch.zeros_like(bits.narrow(dim, 0, 1))).eq(1).sum(dim)
                  for dim in range(bits.dim())]  # fmt: skip
        assert any(bool((runs <= 1).all()) for runs in starts)


@pytest.mark.parametrize(
    "call",
    [lambda x, mask: mw.sum(x, mask, -1), lambda x, mask: mw.apply(torch.exp, x, mask=mask), mw.pack],
    ids=["sum", "apply", "pack"],
)
def test_the_facts_of_a_call_say_which_operand_its_mask_is(call):
    dispatch.invalidate()
    x = torch.ones(3, 5)
    for mask in (mw.Mask.from_lengths(LENGTHS, 5), mw.Mask(torch.ones(3, 5, dtype=torch.bool))):
        call(x, mask)
    assert {decision.facts.mask for decision in dispatch.cache.values()} == {"intervals", "bits"}


# -- wherever a mask goes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", INTERVALS)
def test_a_copy_of_an_interval_mask_has_the_same_bounds(name):
    mask = INTERVALS[name]
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.operand == "intervals"
        assert torch.equal(other._bounds(), mask._bounds())
        assert other.equal(mask)


def test_a_mask_that_inference_mode_has_seen_serves_in_training():
    with torch.inference_mode():
        made_there = mw.Mask.from_lengths(LENGTHS.clone(), 5)
    for mask in (made_there, mw.Mask.from_lengths(LENGTHS, 5), mw.Mask.from_lengths(LENGTHS, 5, side="left")):
        with torch.inference_mode():
            mw.sum(torch.ones(3, 5), mask, -1), mask.to_bool(), mask.lengths
        for given in (mask, mask.to_bool()):
            x = torch.ones(3, 5, requires_grad=True)
            mw.softmax(x, given, -1).square().sum().backward()
            assert x.grad.isfinite().all()


def test_an_interval_mask_on_the_meta_device_gives_shapes():
    x, mask = torch.empty(3, 5, device="meta", requires_grad=True), mw.Mask.from_lengths(LENGTHS, 5).to("meta")
    assert mw.sum(x, mask, -1).shape == (3,)
    (gradient,) = torch.autograd.grad(mw.softmax(x, mask, -1).sum(), x)
    assert gradient.shape == (3, 5)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_intervals_give_the_same_bits_on_any_number_of_threads(name, dim):
    function = next(each for each in UNDER_LAW if each.name == name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1500, generator=generator)
    mask = mw.Mask.from_lengths(torch.randint(1501, (40,), generator=generator), 1500)
    options = needed(function) | ({} if function.kind == "elementwise" else {"dim": dim})
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with mw.force("kernel"):
            found.append(forward_and_gradient(function, x, mask, options))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def test_a_huge_stride_and_an_expanded_x_are_read_by_their_strides():
    mask, x = mw.Mask.from_lengths(LENGTHS, 5), torch.randn(3, 5)
    far = torch.empty_strided((3, 5), (1 << 20, 1 << 10)).copy_(x)
    assert torch.equal(mw.softmax(far, mask, -1), mw.softmax(x, mask, -1))
    base = torch.randn(1, 5, requires_grad=True)
    gradients = [
        torch.autograd.grad((mw.softmax(base.expand(3, 5), given, -1) * x).sum(), base)
        for given in (mask, mask.to_bool())
    ]
    torch.testing.assert_close(*gradients)


# -- no bool for each position -----------------------------------------------------------------------------------------
class BoolTensors(TorchDispatchMode):
    """Records the largest bool tensor that an operation makes, by the bytes that it takes in memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype is torch.bool:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return out


BATCH, LENGTH, CHANNELS = 8, 96, 24


def padded():
    return mw.Mask.from_lengths(torch.arange(BATCH) * 12, LENGTH)


LAYERS = {
    "BatchNorm1d": (lambda: mw.nn.MaskedBatchNorm1d(CHANNELS), (BATCH, CHANNELS, LENGTH)),
    "BatchNorm1d in evaluation": (lambda: mw.nn.MaskedBatchNorm1d(CHANNELS).eval(), (BATCH, CHANNELS, LENGTH)),
    "InstanceNorm1d": (lambda: mw.nn.MaskedInstanceNorm1d(CHANNELS, affine=True), (BATCH, CHANNELS, LENGTH)),
    "GroupNorm": (lambda: mw.nn.MaskedGroupNorm(4, CHANNELS), (BATCH, CHANNELS, LENGTH)),
    "LayerNorm": (lambda: mw.nn.MaskedLayerNorm(CHANNELS), (BATCH, LENGTH, CHANNELS)),
    "MeanPool": (lambda: mw.nn.MaskedMeanPool(), (BATCH, LENGTH, CHANNELS)),
    "MaxPool of the last dim": (lambda: mw.nn.MaskedMaxPool(-1), (BATCH, CHANNELS, LENGTH)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_makes_no_bools_of_intervals_forward_or_backward(name):
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    with BoolTensors() as made, mw.force("kernel"):
        layer(x, padded()).sum().backward()
    assert made.largest < BATCH * LENGTH


def test_pack_and_unpack_make_no_bools_of_intervals_forward_or_backward():
    x = torch.randn(BATCH, LENGTH, CHANNELS, requires_grad=True)
    with BoolTensors() as made, mw.force("kernel"):
        mw.pack(x, padded()).unpack().sum().backward()
        with torch.no_grad():
            mw.pack(x, padded()).unpack(torch.ones(CHANNELS))
    assert made.largest < BATCH * LENGTH


WITH_KERNELS = [function for function in UNDER_LAW if function.kernel]
REDUCTIONS = sorted(function.name for function in WITH_KERNELS if function.family == "reduce")


@pytest.mark.parametrize("function", WITH_KERNELS, ids=lambda function: function.name)
def test_a_function_makes_no_bools_of_intervals_forward_or_backward(function):
    x, options = torch.rand(BATCH, LENGTH, requires_grad=True), needed(function)
    if function.kind != "elementwise":
        options["dim"] = -1
    with BoolTensors() as made, mw.force("kernel"):
        out = function.call(x, padded(), **options)
        # The gradient of a product is plain torch.
        if function.gradient and function.name != "prod":
            next(iter(differentiable(out))).sum().backward()
    assert made.largest < BATCH * LENGTH


@pytest.mark.parametrize("call", [
    lambda x, mask: mw.loss(F.cross_entropy, x, torch.zeros(BATCH, LENGTH, dtype=torch.long), mask),
    lambda x, mask: mw.apply(lambda rows: rows + 1, x.mT, mask=mask).sum(),
    lambda x, mask: mw.apply(F.softmax, x.mT, -1, mask=mask).sum(),
    lambda x, mask: mw.pack(x.mT, mask).logsumexp().sum(),
    lambda x, mask: mw.pack(x.mT, mask).softmax().unpack().sum(),
], ids=["cross_entropy", "apply", "apply in place", "reduction of sequences", "softmax of sequences"])  # fmt: skip
def test_losses_and_functions_of_rows_make_no_bools_of_intervals_forward_or_backward(call):
    x = torch.rand(BATCH, CHANNELS, LENGTH, requires_grad=True)
    with BoolTensors() as made, mw.force("kernel"):
        call(x, padded()).backward()
    assert made.largest < BATCH * LENGTH


#: Bools of this many queries and keys take 10 GB.
LONG = 100_000


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_of_a_window_takes_no_bools_where_there_is_no_memory_for_them(name):
    reduce, row, width = getattr(mw, name), torch.rand(LONG), 4
    with BoolTensors() as made, mw.force("kernel"):
        out = reduce(row.expand(LONG, LONG), mw.Mask.window(LONG, left=width - 1), dim=-1)
    windows = row.unfold(0, width, 1)
    expected = reduce(windows, torch.ones(windows.shape, dtype=torch.bool), dim=-1)
    if name in ("argmax", "argmin"):
        expected += torch.arange(LONG - width + 1)
    torch.testing.assert_close(out[width - 1 :], expected)
    assert made.largest <= LONG


def test_a_causal_sum_of_ones_counts_up_without_bools():
    with BoolTensors() as made:
        out = mw.sum(torch.ones(1).expand(LONG, LONG), mw.Mask.causal(LONG), dim=-1)
    assert torch.equal(out, torch.arange(1.0, LONG + 1))
    assert made.largest < LONG


def test_intervals_are_counted_by_their_bounds():
    with BoolTensors() as made:
        kept = mw.count(mw.Mask.causal(LONG), dim=-1)
    assert torch.equal(kept, torch.arange(1, LONG + 1))
    assert made.largest < LONG


LONG_MASKS = {
    "causal": mw.Mask.causal(LONG)[None, None],
    "a window": mw.Mask.window(LONG, left=500)[None, None],
    "segments": mw.Mask.from_segments(torch.arange(LONG) // 1000)[None, None],
    "causal and lengths": mw.Mask.causal(LONG)[None, None] & mw.Mask.from_lengths([70_000], LONG)[:, None, None],
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_attention_plans_its_blocks_by_bounds_alone(name):
    mask, sizes = LONG_MASKS[name], Sizes(1, 2, LONG, LONG)
    tracemalloc.start()
    with BoolTensors() as made:
        found = blocks.split(mask, False, sizes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # numpy's arrays are traced, torch's bools are recorded.
    assert peak < LONG * 1000
    assert made.largest < LONG * 1000
    assert all(block.bits is None for block in found)
    rows = {row for block in found for row in range(*block.rows)}
    assert len(rows) == LONG
