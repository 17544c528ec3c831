"""pack, unpack and reductions by sequence: the Triton kernels against plain torch operations, to the bit or nearly."""

import pytest
import torch

import maskwise as mw
from maskwise.ops.gpu import launch
from maskwise.ops.select import gpu, reference, sequences
from tests.gpu.interpreter import permuted
from tests.laws.odd_bytes import odd

LAYOUTS = [
    pytest.param((5, 7), (3,), id="rows of 3"),
    pytest.param((4099,), (), id="single elements"),
    pytest.param((3, 21), (129,), id="wide rows"),
    pytest.param((4,), (0,), id="rows of nothing"),
    pytest.param((0,), (3,), id="no rows"),
]


@pytest.mark.parametrize("short", [gpu.SHORT, 0], ids=["counted by everyone", "counted first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
@pytest.mark.parametrize(("lead", "rest"), LAYOUTS)
def test_pack_and_unpack_move_every_bit(lead, rest, dtype, short, monkeypatch):
    monkeypatch.setattr(gpu, "SHORT", short)
    x, mask = torch.randn(*lead, *rest).mul(3).to(dtype), torch.rand(lead) < 0.4
    kept = int(mask.sum())
    other = torch.ones((), dtype=dtype)
    assert torch.equal(gpu.pack_rows(x, mask), x[mask])
    for capacity in (kept, kept + 3, mask.numel() + 5):
        packed = gpu.pack_capacity(x, mask, capacity)
        assert torch.equal(packed, reference.pack_static(x, mask, capacity))
        assert torch.equal(gpu.unpack_capacity(packed, mask, other), reference.unpack_static(packed, mask, other))


@pytest.mark.parametrize("short", [gpu.SHORT, 0], ids=["counted by everyone", "counted first"])
def test_any_byte_but_zero_keeps(short, monkeypatch):
    monkeypatch.setattr(gpu, "SHORT", short)
    x, mask = torch.randn(130, 5), torch.rand(130) < 0.5
    packed = gpu.pack_rows(x, odd(mask))
    assert torch.equal(packed, x[mask])
    assert torch.equal(gpu.unpack_capacity(packed, odd(mask), torch.zeros(())), torch.where(mask[:, None], x, 0.0))


@pytest.mark.parametrize("short", [gpu.SHORT, 0], ids=["counted by everyone", "counted first"])
def test_a_mask_that_broadcasts_is_read_by_its_strides(short, monkeypatch):
    monkeypatch.setattr(gpu, "SHORT", short)
    x, mask = torch.randn(5, 6, 3), (torch.rand(1, 6) < 0.5).expand(5, 6)
    packed = gpu.pack_rows(x, mask)
    assert torch.equal(packed, x[mask])
    restored = gpu.unpack_capacity(packed, mask, torch.zeros(()))
    assert torch.equal(restored, torch.where(mask[..., None], x, 0.0))


def test_a_permuted_x_is_packed_where_it_lies():
    x, mask = torch.randn(6, 5, 4).permute(1, 0, 2), torch.rand(5, 6) < 0.5
    assert torch.equal(gpu.pack_rows(x, mask), x[mask])


def test_gradients_go_to_kept_rows_alone():
    x, mask = torch.randn(5, 6, 4, requires_grad=True), torch.rand(5, 6) < 0.5
    kept = int(mask.sum())
    weights = torch.arange(20.0)[:, None].expand(20, 4)
    (gradient,) = torch.autograd.grad((mw.pack(x, mask, capacity=20).values * weights).sum(), x)
    expected = torch.zeros(5, 6, 4)
    expected[mask] = weights[:kept]
    assert torch.equal(gradient, expected)
    (gradient,) = torch.autograd.grad((mw.pack(x, mask, capacity=20).unpack() * x.detach()).sum(), x)
    assert torch.equal(gradient, torch.where(mask[..., None], x.detach(), 0.0))


@pytest.mark.parametrize("op", list(gpu.STATS))
@pytest.mark.parametrize("shape", [(4, 9), (4, 9, 3), (3, 40, 70)])
def test_segments_agree_with_plain_torch_forward_and_backward(op, shape):
    mask = torch.rand(shape[:2]) < 0.5
    mask[1] = False
    x = torch.randn(shape)
    values, bounds = mw.pack(x, mask).values, mw.Mask(mask).cu_seqlens
    results = []
    for run in (sequences.run_segments, sequences.reduce_plain):
        leaf = values.clone().requires_grad_()
        out = run(leaf, bounds, op)
        weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)
        (gradient,) = torch.autograd.grad((torch.where(out.isfinite(), out, 0.0) * weights).sum(), leaf)
        results.append((out.detach(), gradient))
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", list(gpu.STATS))
def test_long_segments_split_between_programs_in_any_order_are_one_segment_each(op, seed, monkeypatch):
    for name, value in {"LONGEST": 32, "SHORT": 16, "WARP": 1, "FEWEST": 1}.items():
        monkeypatch.setattr(launch, name, value)
    values, bounds = torch.randn(600), torch.tensor([0, 290, 290, 600], dtype=torch.int32)
    before = sequences.run_segments(values, bounds, op)
    with permuted(seed) as orders:
        after = sequences.run_segments(values, bounds, op)
    assert any(programs > 3 and order != sorted(order) for programs, order in orders.items())
    assert torch.equal(before.nan_to_num(), after.nan_to_num())
    torch.testing.assert_close(after, sequences.reduce_plain(values, bounds, op), equal_nan=True)


def test_a_packed_reduces_by_the_kernel():
    x, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), mw.Mask.from_lengths([2, 0], 3)
    assert mw.pack(x, mask).sum().tolist() == [3.0, 0.0]
    assert mw.pack(x, mask).amax().tolist() == [2.0, -torch.inf]
    assert mw.pack(x, mask).mean()[1].isnan()
