"""pack and unpack: boolean indexing there and back, by runs, with gradients, in a static shape on request."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from tests.laws.samples import as_bool
from tests.ops.arrays import interval_masks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


@st.composite
def selections(draw):
    """(x, mask): x has the mask's dims and perhaps more; either may be transposed, stepped or expanded."""
    lead = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    rest = draw(st.lists(st.integers(0, 5), max_size=2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    mask = torch.rand(lead, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    if draw(st.booleans()):
        mask = mask.transpose(0, -1).contiguous().transpose(0, -1)
    if draw(st.booleans()):
        mask = draw(interval_masks(tuple(lead))).expand(lead)
    x = torch.randn(*lead, *rest, generator=generator)
    how = draw(st.sampled_from(["contiguous", "transposed", "stepped", "expanded"]))
    if how == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "stepped":
        x = torch.randn(*x.shape[:-1], x.shape[-1] * 2, generator=generator)[..., ::2]
    if how == "expanded" and rest:
        x = x[..., :1].expand(x.shape)
    return x, mask


@pytest.fixture(autouse=True)
def _by_the_kernel():
    """Small inputs would be moved by torch."""
    with mw.force("kernel"):
        yield


@pytest.mark.kernel
@given(selections())
def test_packing_is_boolean_indexing_and_unpacking_undoes_it(case):
    x, mask = case
    packed = mw.pack(x, mask)
    mask = as_bool(mask)
    assert torch.equal(packed.values, x[mask])
    assert packed.values.is_contiguous()
    kept = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    assert torch.equal(packed.unpack(), torch.where(kept, x, 0.0))
    assert torch.equal(
        packed.unpack(torch.arange(x.shape[-1])), torch.where(kept, x, torch.arange(x.shape[-1]).float())
    )
    assert torch.equal(packed.unpack(-x), torch.where(kept, x, -x))


LENGTHS = torch.tensor([3, 0, 37, 20, 11, 36])
INTERVALS = {
    "lengths": mw.Mask.from_lengths(LENGTHS, 37),
    "left lengths": mw.Mask.from_lengths(LENGTHS, 37, side="left"),
    "bounds outside of the row": mw.Mask.from_lengths(LENGTHS + 2, 40)[:, 3:],
    "causal": mw.Mask.causal(37).expand(5, 37, 37),
    "causal and lengths": mw.Mask.causal(37) & mw.Mask.from_lengths(LENGTHS, 37)[:, None],
    "a window": mw.Mask.window(37, left=3),
    "segments": mw.Mask.from_segments(torch.arange(37) // 5),
    "full": mw.Mask.full((6, 37)),
    "none": mw.Mask.none((6, 37)),
    "no rows": mw.Mask.from_lengths(torch.zeros(0, dtype=torch.int64), 37),
    "rows of nothing": mw.Mask.from_lengths([0, 0], 0),
    "one row": mw.Mask.from_lengths([7], 37)[0],
    "rows of several blocks": mw.Mask.from_lengths([5000, 1, 4097], 5000),
    "along another dim": mw.Mask.causal(37).T,
}


@pytest.mark.kernel
@pytest.mark.parametrize("rest", [(), (1,), (5,), (3, 2), (0,)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "expanded"])
@pytest.mark.parametrize("mask", INTERVALS.values(), ids=INTERVALS)
def test_intervals_move_what_their_bits_move_with_the_same_gradients(mask, layout, rest):
    bits = mask.to_bool()
    x = torch.randn(*mask.shape, *rest)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "stepped":
        x = torch.stack([x, x], -1)[..., 0]
    elif layout == "expanded":
        x = x[:1].expand(x.shape)
    kept = bits[(..., *[None] * len(rest))]
    x = torch.where(kept, x, torch.nan).requires_grad_()
    packed = mw.pack(x, mask)
    assert torch.equal(packed.values, x[bits])
    other = torch.randn(rest, requires_grad=True)
    out = packed.unpack(other)
    assert torch.equal(out, torch.where(kept, x, other))
    grad = torch.randn_like(out)
    of_x, of_other = torch.autograd.grad(out, (x, other), grad)
    assert torch.equal(of_x, torch.where(kept, grad, 0.0))
    torch.testing.assert_close(of_other, torch.where(kept, 0.0, grad).sum_to_size(rest))
    buffer = torch.empty_like(packed.values.detach())
    with torch.no_grad():
        assert torch.equal(mw.pack(x, mask, out=buffer).values, packed.values)
        assert torch.equal(packed.unpack(2.0, out=torch.empty(out.shape)), torch.where(kept, x, 2.0))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_by_its_bytes(dtype):
    x = torch.randn(9, 5, 3).mul(9).to(dtype)
    mask = torch.rand(9, 5) < 0.5
    assert torch.equal(mw.pack(x, mask).values, x[mask])
    assert torch.equal(mw.pack(x, mask).unpack(1), torch.where(mask[..., None], x, torch.ones((), dtype=dtype)))


@pytest.mark.kernel
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("density", [0.01, 0.5, 0.99])
def test_many_blocks_meet_without_gaps_for_any_number_of_threads(density, threads):
    torch.set_num_threads(threads)
    x, mask = torch.randn(70_001, 3), torch.rand(70_001) < density
    assert torch.equal(mw.pack(x, mask).values, x[mask])
    assert torch.equal(mw.pack(x[:, 0].contiguous(), mask).values, x[:, 0][mask])
    assert torch.equal(mw.pack(x, mask).unpack(2.0), torch.where(mask[:, None], x, 2.0))


def test_a_mask_with_as_many_dims_as_x_broadcasts_and_selects_elements():
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True], [False]])
    packed = mw.pack(x, mask)
    assert packed.values.tolist() == [0, 1, 2]
    assert packed.unpack(9).tolist() == [[0, 1, 2], [9, 9, 9]]


@pytest.mark.kernel
def test_gradients_reach_what_was_kept_and_nothing_else_twice():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def call(x, other):
        return mw.pack(x, mask).map(torch.exp).unpack(other).sin()

    assert torch.autograd.gradcheck(call, (x, other))
    assert torch.autograd.gradgradcheck(call, (x, other))
    (gradient,) = torch.autograd.grad(call(x, other).sum(), x)
    assert torch.equal(gradient[~mask], torch.zeros(3, 2, dtype=torch.float64))


def test_what_was_dropped_never_leaks():
    mask = torch.tensor([True, False, True])
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    out = mw.pack(x, mask).map(torch.log).unpack()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0, 1 / 3]))


@pytest.mark.kernel
@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_poison_under_the_mask_changes_no_bit_there_and_back(poison, capacity):
    x, mask = torch.rand(3, 4, 2) + 0.5, torch.rand(3, 4) < 0.5
    weight = torch.tensor(1.5, requires_grad=True)
    found = []
    for value in (0.0, poison):
        leaf = torch.where(mask[..., None], x, value).requires_grad_()
        packed = mw.pack(leaf, mask, capacity=capacity)
        out = (packed.map(lambda rows: (weight * rows + 1).log()) * leaf.detach()).unpack(2.0)
        above = torch.where(mask[..., None], torch.linspace(0.5, 2.0, x.numel()).reshape(x.shape), value)
        found.append((packed.values.detach(), out.detach(), *torch.autograd.grad(out, (leaf, weight), above)))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean.view(torch.int32), dirty.view(torch.int32))


@pytest.mark.kernel
@pytest.mark.parametrize("density", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("rest", [(), (70_000,), (5,)])
def test_rows_of_every_size_are_found_in_their_blocks(density, rest):
    lead = (3, 2) if rest == (70_000,) else (9, 1001)
    x, mask = torch.randn(*lead, *rest), torch.rand(lead) < density
    packed = mw.pack(x, mask)
    assert torch.equal(packed.values, x[mask])
    kept = mask.reshape(*lead, *[1] * len(rest))
    assert torch.equal(packed.unpack(-3.0), torch.where(kept, x, -3.0))


@pytest.mark.parametrize("capacity", [3, 5, 40])
def test_capacity_gives_a_static_shape_whose_rest_is_zero_and_ignored(capacity):
    x, mask = torch.randn(2, 4, 3), torch.tensor([[True, False, True, False], [False, True, False, False]])
    packed = mw.pack(x, mask, capacity=capacity)
    assert packed.values.shape == (capacity, 3)
    assert torch.equal(packed.values[:3], x[mask])
    assert torch.equal(packed.values[3:], torch.zeros(capacity - 3, 3))
    assert torch.equal((packed + 1).unpack(7.0), torch.where(mask[..., None], x + 1, 7.0))


def test_capacity_compiles_into_one_graph_without_knowing_what_is_kept():
    torch._dynamo.reset()

    def call(x, mask):
        return mw.pack(x, mask, capacity=6).map(torch.sin).unpack()

    x, mask = torch.randn(2, 4), torch.rand(2, 4) < 0.5
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), torch.where(mask, x.sin(), 0.0))


def test_packing_compiles_into_one_graph_with_an_unbacked_size():
    torch._dynamo.reset()

    def call(x, mask):
        return mw.pack(x, mask).map(torch.sin).unpack()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for density in (0.3, 0.8):
        x, mask = torch.randn(6, 4), torch.rand(6, 4) < density
        torch.testing.assert_close(compiled(x, mask), torch.where(mask, x.sin(), 0.0))


def test_a_capacity_that_is_too_small_is_an_error_with_the_one_that_fits():
    with pytest.raises(ArgumentError, match=r"at least the number of kept rows, 3, got 2. Hint: capacity=3"):
        mw.pack(torch.ones(3), torch.ones(3, dtype=torch.bool), capacity=2)


@pytest.mark.kernel
def test_the_registered_ops_pass_opcheck():
    x, mask = torch.randn(4, 3, 2, requires_grad=True), torch.rand(4, 3) < 0.5
    torch.library.opcheck(torch.ops.maskwise.pack_rows, (x, mask))
    values = torch.randn(int(mask.sum()), 2, requires_grad=True)
    torch.library.opcheck(torch.ops.maskwise.unpack_rows, (values, mask, torch.randn(3, 2, requires_grad=True)))


ERRORS = [
    (lambda x: mw.pack(x, torch.ones(5, dtype=torch.bool)), ShapeError, r"x's leading dims.*as x\[mask\] does"),
    (lambda x: mw.pack(x, torch.ones(3, 4, dtype=torch.bool)), ShapeError, r"mask\[None, \.\.\.\] selects single"),
    (lambda x: mw.pack(x, torch.ones(3, 2, dtype=torch.bool)), ShapeError, r"Hint: mask\.T"),
    (lambda x: mw.pack(x, torch.ones(2, 3)), DtypeError, r"Mask\.from_attention_mask\(mask\)"),
    (lambda x: mw.pack(x, [True, False]), DtypeError, r"Mask\(torch\.as_tensor\(mask\)\)"),
    (lambda x: mw.pack([1.0], torch.ones(1, dtype=torch.bool)), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda x: mw.pack(x, torch.ones(2, dtype=torch.bool, device="meta")), DeviceError, r"mask\.to\(x\.device\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(torch.ones(2, 3, 4))
    assert str(caught.value).startswith("pack: ")


def test_few_rows_are_packed_by_torch_and_are_contiguous():
    x, mask = torch.rand(1, 2, 2).transpose(1, 2), torch.tensor([True])
    with mw.force(None):
        packed = mw.pack(x, mask)
        assert torch.equal(packed.values, x)
        assert packed.values.is_contiguous()
        assert torch.equal(packed.unpack(), x)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(1,), (7,), (8, 3), (5, 13), (3, 4, 33), (2100, 2)])
@pytest.mark.parametrize("lies", ["contiguous", "transposed", "apart", "broadcast"])
def test_single_elements_are_packed_and_unpacked_at_every_position(shape, density, lies):
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.rand(shape, generator=generator)
    if lies == "transposed":
        x = x.mT.contiguous().mT if x.dim() > 1 else x
    elif lies == "apart":
        x = torch.stack([x, x + 1], -1)[..., 0]
    elif lies == "broadcast":
        x = x[..., :1].expand(shape)
    mask = torch.rand(shape, generator=generator) < density
    packed = mw.pack(x, mw.Mask(mask))
    assert torch.equal(packed.values, x[mask])
    assert torch.equal(packed.unpack(-1.0), torch.where(mask, x, -1.0))


def test_a_mask_may_keep_by_any_byte_that_is_not_zero():
    raw = torch.tensor([0, 1, 2, 255, 128, 0, 127, 64, 0, 3], dtype=torch.uint8)
    x = torch.arange(10.0)
    packed = mw.pack(x, mw.Mask(raw.view(torch.bool)))
    assert packed.values.tolist() == [1, 2, 3, 4, 6, 7, 9]
    assert packed.unpack().tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 0, 9]
