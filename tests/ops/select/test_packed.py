"""Packed: arithmetic, sequences, other formats."""

import contextlib
import copy
import operator
import pickle

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import maskwise as mw
from maskwise.errors import ArgumentError, ShapeError

LENGTHS = [3, 0, 5, 2]


@pytest.fixture
def mask():
    return mw.Mask.from_lengths(LENGTHS, max_len=5)


@pytest.fixture
def x():
    return torch.randn(4, 5, 3)


def each(x, fn, empty=None):
    """The function of each sequence's kept rows, or ``empty`` where there are none."""
    return torch.stack([fn(row[:n]) if n else torch.full((3,), empty) for row, n in zip(x, LENGTHS, strict=True)])


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
@pytest.mark.parametrize("other", [2, 0.5, torch.tensor(3.0), "row", "table", "column", "layout", "packed"], ids=str)
def test_arithmetic_is_that_of_the_original_layout(x, mask, op, other):
    tensors = {"row": torch.rand(3) + 1, "table": torch.rand(5, 3) + 1, "column": torch.rand(4, 5, 1) + 1}
    tensors["layout"] = tensors["packed"] = torch.rand(4, 5, 3) + 1
    dense = tensors[other] if isinstance(other, str) else other
    right = mw.pack(dense, mask) if isinstance(other, str) and other == "packed" else dense
    packed = mw.pack(x, mask)
    torch.testing.assert_close(op(packed, right).unpack(), torch.where(mask.to_bool()[..., None], op(x, dense), 0.0))
    reflected = torch.where(mask.to_bool()[..., None], op(dense, x), 0.0)
    torch.testing.assert_close(op(right, packed).unpack(), reflected)


def test_another_mask_is_an_error_that_shows_both(x, mask):
    other = mw.Mask.from_lengths([1, 1, 1, 1], max_len=5)
    with pytest.raises(ArgumentError, match="same mask") as caught:
        mw.pack(x, mask) + mw.pack(x, other)
    assert str(mask) in str(caught.value)
    assert str(other) in str(caught.value)


def test_an_equal_mask_is_the_same_mask(x, mask):
    again = mw.Mask(mask.to_bool().clone())
    assert torch.equal((mw.pack(x, mask) + mw.pack(x, again)).values, 2 * x[mask.to_bool()])


def test_a_tensor_that_does_not_fit_the_layout_is_an_error(x, mask):
    with pytest.raises(ShapeError, match=r"broadcast against the padded layout \(4, 5, 3\), got \(7,\)"):
        mw.pack(x, mask) + torch.ones(7)


def test_map_must_keep_the_rows(x, mask):
    with pytest.raises(ShapeError, match=r"`fn` must return 10 rows, got \(3,\)"):
        mw.pack(x, mask).map(lambda rows: rows.sum(0))


@pytest.mark.parametrize(
    ("name", "fn", "empty"),
    [
        ("sum", lambda rows: rows.sum(0), 0.0),
        ("mean", lambda rows: rows.mean(0), torch.nan),
        ("amax", lambda rows: rows.amax(0), -torch.inf),
        ("amin", lambda rows: rows.amin(0), torch.inf),
        ("logsumexp", lambda rows: rows.logsumexp(0), -torch.inf),
        ("first", lambda rows: rows[0], 0.0),
        ("last", lambda rows: rows[-1], 0.0),
    ],
)
def test_reductions_are_those_of_each_sequence_with_finite_gradients(x, mask, name, fn, empty):
    leaf = x.clone().requires_grad_()
    out = getattr(mw.pack(leaf, mask), name)()
    torch.testing.assert_close(out, each(x, fn, empty), equal_nan=True)
    (gradient,) = torch.autograd.grad(torch.where(out.isfinite(), out, 0.0).sum(), leaf)
    reference = x.clone().requires_grad_()
    torch.stack([fn(row[:n]) for row, n in zip(reference, LENGTHS, strict=True) if n]).sum().backward()
    torch.testing.assert_close(gradient, reference.grad)


def test_softmax_sums_to_one_over_each_sequence(x, mask):
    out = mw.pack(x, mask).softmax()
    torch.testing.assert_close(out.sum(), each(x, lambda rows: torch.ones(3), 0.0))
    torch.testing.assert_close(out.unpack()[2], x[2].softmax(0))


def test_the_gradient_of_softmax_is_that_of_each_sequence(x, mask):
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.linspace(0.5, 2.0, x.numel()).reshape(x.shape)
    (mw.pack(leaf, mask).softmax().unpack() * weights).sum().backward()
    sum((row[:n].softmax(0) * w[:n]).sum() for row, w, n in zip(reference, weights, LENGTHS, strict=True)).backward()
    torch.testing.assert_close(leaf.grad, reference.grad)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "softmax", "logsumexp", "first", "last"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_poison_under_the_mask_changes_no_bit_of_a_reduction_or_its_gradient(x, mask, name, poison):
    found = []
    for value in (0.0, poison):
        leaf = torch.where(mask.to_bool()[..., None], x, value).requires_grad_()
        out = getattr(mw.pack(leaf, mask), name)()
        out = out.values if isinstance(out, mw.Packed) else out
        weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)
        (gradient,) = torch.autograd.grad((torch.where(out.isfinite(), out, 0.0) * weights).sum(), leaf)
        found.append((out.detach(), gradient))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean.view(torch.int32), dirty.view(torch.int32))


REDUCTIONS = ["sum", "mean", "amax", "amin", "logsumexp", "softmax"]


def by_both(name, values, lengths):
    """A per-sequence operation and its gradient, by the kernel and by plain torch, in double precision."""
    mask = mw.Mask.from_lengths(lengths, max_len=max(lengths))
    found = []
    for route in (None, "plain"):
        leaf = (values.double() if route else values.clone(memory_format=torch.preserve_format)).requires_grad_()
        with mw.force(route) if route else contextlib.nullcontext():
            out = getattr(mw.Packed(leaf, mask), name)()
        out = out.values if isinstance(out, mw.Packed) else out
        weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape).to(values.dtype)
        (gradient,) = torch.autograd.grad(out, leaf, weights.to(out.dtype))
        found.append((out.detach(), gradient))
    return found


# Sequences of no row, one, several chunks; columns of one, less than a vector, vectors and a rest, more than a block;
# and a sequence so long that threads share it.
@pytest.mark.kernel
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("lengths", [[1, 0, 7, 300, 0], [0, 0], [300]], ids=str)
@pytest.mark.parametrize("rest", [(), (1,), (3,), (5, 7), (4099,), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_of_sequences_gives_what_plain_torch_does(name, lengths, rest, dtype):
    # Positive, so that nothing cancels in a sum.
    values = torch.rand(sum(lengths), *rest).to(dtype)
    (ours, gradient), (plain, expected) = by_both(name, values, lengths)
    torch.testing.assert_close(ours, plain.to(dtype), equal_nan=True)
    close = {}
    if dtype.itemsize == 2:
        # The gradient is that of the rounded result: of a logsumexp below 8 it is off by 8 times as much.
        eps = torch.finfo(dtype).eps
        close = {"rtol": 8 * eps, "atol": 8 * eps * float(expected.abs().max()) if expected.numel() else 0.0}
    torch.testing.assert_close(gradient, expected.to(dtype), **close)


@pytest.mark.kernel
@pytest.mark.parametrize("name", REDUCTIONS)
def test_sequences_of_strided_values_are_reduced_as_contiguous_ones(name):
    values = torch.randn(3, 30).T
    for ours, plain in zip(*by_both(name, values, [10, 20]), strict=True):
        torch.testing.assert_close(ours, plain.float())


@pytest.mark.kernel
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(name, value):
    values = torch.randn(30, 5)
    values[12] = value
    for ours, plain in zip(*by_both(name, values, [10, 5, 15]), strict=True):
        ends = (slice(0, 1), slice(2, 3)) if ours.shape[0] == 3 else (slice(0, 10), slice(15, 30))
        for end in ends:
            torch.testing.assert_close(ours[end], plain[end].float())
            assert ours[end].isfinite().all()
    (ours, _), (plain, _) = by_both(name, values, [10, 5, 15])
    torch.testing.assert_close(ours, plain.float(), equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("name", REDUCTIONS)
def test_sequences_are_differentiable_twice(name):
    mask = mw.Mask.from_lengths([3, 0, 4], max_len=4)

    def fn(values):
        out = getattr(mw.Packed(values, mask), name)()
        return out.values if isinstance(out, mw.Packed) else torch.where(out.isfinite(), out, 0.0)

    values = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fn, values)
    assert torch.autograd.gradgradcheck(fn, values)


@pytest.mark.kernel
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_bits_of_sequences_do_not_depend_on_threads(name):
    lengths = torch.randint(1, 60, (200,)).tolist()
    values, before, found = torch.randn(sum(lengths), 33), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(by_both(name, values, lengths)[0])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.kernel
@pytest.mark.parametrize("bounds", [[0, 4], [0, 9, 5], [1, 5], [0, -2, 5]], ids=str)
def test_sequences_outside_of_the_rows_are_refused(bounds):
    with pytest.raises(RuntimeError, match="another number of rows"):
        torch.ops.maskwise.segments(torch.randn(5, 2), torch.tensor(bounds, dtype=torch.int32), "sum")


def test_long_sums_of_half_precision_are_rounded_once():
    x = torch.full((2, 4096), 0.1, dtype=torch.bfloat16)
    packed = mw.pack(x, mw.Mask.from_lengths([4096, 10], max_len=4096))
    expected = torch.tensor([4096, 10]) * x[0, 0].double()
    torch.testing.assert_close(packed.sum(), expected.to(torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(packed.mean(), x[:, 0], rtol=0, atol=0)


def test_integers_and_bools_are_reduced_too():
    packed = mw.pack(torch.tensor([[3, 1, 9], [7, 8, 9]]), mw.Mask.from_lengths([2, 0], max_len=3))
    least, greatest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    assert packed.sum().tolist() == [4, 0]
    assert packed.amax().tolist() == [3, least]
    assert packed.amin().tolist() == [1, greatest]
    assert packed.mean()[0] == 2.0
    assert packed.map(lambda rows: rows > 2).sum().tolist() == [1, 0]


def test_powers_and_reflected_powers_work(x, mask):
    kept = x[mask.to_bool()]
    torch.testing.assert_close((mw.pack(x, mask) ** 2).values, kept**2)
    torch.testing.assert_close((2 ** mw.pack(x, mask)).values, 2**kept)


def test_two_capacities_do_not_mix(x, mask):
    with pytest.raises(ArgumentError, match=r"Packed \+: `other` must have the capacity 12, got None"):
        mw.pack(x, mask, capacity=12) + mw.pack(x, mask)


def test_ends_of_a_capacity_are_those_of_its_sequences(x, mask):
    packed, wide = mw.pack(x, mask), mw.pack(x, mask, capacity=17)
    assert torch.equal(wide.last(), packed.last())
    assert torch.equal(wide.first(), packed.first())
    assert torch.equal(wide.position_ids[:10], packed.position_ids)


def test_sequences_have_ids_positions_and_offsets(x):
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    packed = mw.pack(torch.randn(3, 3), mask)
    assert packed.sequence_ids.tolist() == [0, 0, 2, 2]
    assert packed.position_ids.tolist() == [0, 2, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 4]
    assert packed.lengths.tolist() == [2, 0, 2]


def test_nothing_kept_is_no_special_case(x):
    packed = mw.pack(x, mw.Mask.none((4, 5)))
    assert torch.equal(packed.sum(), torch.zeros(4, 3))
    assert torch.equal(packed.last(fill=-1.0), torch.full((4, 3), -1.0))
    assert torch.equal(packed.unpack(2.0), torch.full((4, 5, 3), 2.0))


def test_reducing_a_capacity_is_rejected(x, mask):
    with pytest.raises(ArgumentError, match=r"Packed\.sum: `capacity` must be None, got 20"):
        mw.pack(x, mask, capacity=20).sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_there_and_back(x, mask):
    packed = mw.pack(x, mask)
    dense = packed.unpack()
    assert torch.equal(packed.to_sparse_coo().to_dense(), dense)
    assert torch.equal(packed.to_sparse_csr().to_dense(), dense)
    for sparse in (packed.to_sparse_coo(), mw.pack(x[..., 0], mask).to_sparse_csr()):
        back = mw.Packed.from_sparse(sparse)
        assert torch.equal(back.unpack(), sparse.to_dense())
        assert back.mask.equal(mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_there_and_back(x, mask):
    nested = mw.pack(x, mask).to_nested()
    assert [len(part) for part in nested.unbind()] == LENGTHS
    back = mw.Packed.from_nested(nested, max_len=5)
    assert torch.equal(back.unpack(), mw.pack(x, mask).unpack())


def test_packed_sequences_are_those_of_torch_there_and_back(x):
    lengths = [3, 1, 5, 2]
    mask = mw.Mask.from_lengths(lengths, max_len=5)
    ours = mw.pack(x, mask).to_packed_sequence()
    theirs = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    assert torch.equal(ours.data, theirs.data)
    assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
    gru = torch.nn.GRU(3, 4)
    out = mw.Packed.from_packed_sequence(gru(ours)[0])
    expected = torch.nn.utils.rnn.pad_packed_sequence(gru(theirs)[0], batch_first=True)[0]
    torch.testing.assert_close(out.unpack(), expected)


def test_an_empty_sequence_is_rejected_by_to_packed_sequence(x, mask):
    with pytest.raises(ArgumentError, match="keep at least one row of every sequence, got none of sequence 1"):
        mw.pack(x, mask).to_packed_sequence()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_the_unused_rows_of_a_capacity_are_in_no_other_format(x):
    mask = mw.Mask.from_lengths([3, 1, 5, 2], max_len=5)
    packed, wide = mw.pack(x, mask), mw.pack(x, mask, capacity=15)
    assert torch.equal(wide.to_sparse_coo().to_dense(), packed.unpack())
    assert torch.equal(wide.to_sparse_csr().to_dense(), packed.unpack())
    assert torch.equal(wide.to_nested().values(), packed.values)
    assert torch.equal(wide.to_packed_sequence().data, packed.to_packed_sequence().data)


def test_it_supports_pytree_pickle_and_deepcopy(x, mask):
    packed = mw.pack(x, mask)
    doubled = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t * 2 if t.is_floating_point() else t, packed)
    assert torch.equal(doubled.values, packed.values * 2)
    for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert torch.equal(other.unpack(), packed.unpack())


def test_its_repr_shows_shape_dtype_and_mask(x, mask):
    assert repr(mw.pack(x, mask)) == "Packed(values=(10, 3) torch.float32, mask=(4, 5))"


def test_a_list_of_sequences_is_packed_as_it_is():
    parts = [torch.randn(length, 3, requires_grad=True) for length in (2, 0, 4)]
    packed = mw.Packed.from_list(parts)
    assert packed.lengths.tolist() == [2, 0, 4]
    assert packed.mask.facts.kind == "intervals"
    assert torch.equal(packed.values, torch.cat(parts))
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    assert torch.equal(packed.unpack(), padded)
    assert packed.unpack().shape == (3, 4, 3)
    assert mw.Packed.from_list(parts, max_len=6).unpack().shape == (3, 6, 3)
    packed.sum().square().sum().backward()
    assert torch.equal(parts[0].grad, (2 * parts[0].sum(0)).expand(2, 3))
