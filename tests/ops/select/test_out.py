"""``out=`` of pack and unpack: the same result in a preallocated tensor, or an error that modifies nothing."""

import pytest
import torch

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from maskwise.ops.backends import status
from maskwise.ops.select import reference

kernel = [
    pytest.mark.kernel,
    pytest.mark.skipif(not status().loaded, reason="there is no kernel without the extension"),
]

MASK = torch.tensor([[True, False, True], [False, True, True]])


def rows(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
@pytest.mark.parametrize("rest", [(), (1,), (5,), (2, 3), (0,)])
def test_what_is_written_is_what_would_be_returned(rest, dtype):
    x = rows(2, 3, *rest, dtype=dtype)
    out = torch.empty(4, *rest, dtype=dtype)
    packed = mw.pack(x, MASK, out=out)
    assert packed.values is out
    assert torch.equal(out, x[MASK])
    room = torch.empty_like(x)
    assert packed.unpack(-1, out=room) is room
    assert torch.equal(room, packed.unpack(-1))


# 8 MB and more are written past the caches: rows of every alignment, and a stretch at the very end.
@pytest.mark.parametrize("features", [1, 3, 17, 64, 96, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("offset", [0, 1])
def test_large_results_agree_to_the_last_byte(features, dtype, offset):
    count = (3 << 23) // (features * dtype.itemsize) + 7
    x = torch.randint(-100, 100, (count * features + offset,), dtype=torch.int32).to(dtype)[offset:]
    x = x.view(count, features)
    mask = torch.rand(count // 50 + 1).gt(0.4).repeat_interleave(50)[:count]
    kept = int(mask.sum())
    room = torch.full((kept * features + offset,), 55, dtype=dtype)[offset:].view(kept, features)
    packed = mw.pack(x, mask, out=room)
    assert torch.equal(packed.values, x[mask])
    assert torch.equal(mw.pack(x, mask).values, x[mask])
    expected = torch.where(mask[:, None], x, torch.tensor(7, dtype=dtype))
    assert torch.equal(packed.unpack(7), expected)
    spread = torch.empty(count * features + offset, dtype=dtype)[offset:].view(count, features)
    assert torch.equal(packed.unpack(7, out=spread), expected)
    base = x.flip(1)
    assert torch.equal(packed.unpack(base, out=spread), torch.where(mask[:, None], x, base))


test_large_results_agree_to_the_last_byte.pytestmark += kernel


def test_a_capacity_goes_with_out():
    x = rows(2, 3, 2)
    out = torch.empty(5, 2)
    packed = mw.pack(x, MASK, capacity=5, out=out)
    assert packed.values is out
    assert torch.equal(out, torch.cat([x[MASK], torch.zeros(1, 2)]))
    room = torch.empty_like(x)
    assert torch.equal(packed.unpack(out=room), x * MASK[..., None])


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([0.0], DtypeError, r"pack: `out` must be a tensor, got list"),
        (torch.empty(4, 2, dtype=torch.float64), DtypeError, r"have the dtype torch.float32 .* Hint: torch.empty"),
        (torch.empty(3, 2), ShapeError, r"have the shape \(4, 2\) of the result, got \(3, 2\)"),
        (torch.empty(9, 2), ShapeError, r"Hint: buffer\[:4\]"),
        (torch.empty(2, 4).T, ShapeError, r"be contiguous, got strides \(1, 4\)"),
        (torch.empty(4, 2, device="meta"), DeviceError, r"be on the device cpu .*, got meta"),
        (torch.empty(4, 2, requires_grad=True), ArgumentError, r"gradient .* Hint: with torch.no_grad\(\):"),
    ],
)
def test_an_out_that_does_not_fit_is_rejected(out, error, message):
    with pytest.raises(error, match=message):
        mw.pack(rows(2, 3, 2), MASK, out=out)


def test_an_out_that_aliases_an_input_is_rejected_and_not_modified():
    x = rows(2, 3, 2)
    before = x.clone()
    with pytest.raises(ArgumentError, match=r"not share memory with an input"):
        mw.pack(x, MASK, out=x.view(6, 2)[:4])
    packed = mw.pack(x, MASK)
    with pytest.raises(ArgumentError, match=r"Packed.unpack: `out` must not share memory"):
        packed.unpack(x, out=x)
    assert torch.equal(x, before)


def test_a_gradient_cannot_go_through_out():
    x = rows(2, 3, 2).requires_grad_()
    with pytest.raises(ArgumentError, match=r"not be given where a gradient is required"):
        mw.pack(x, MASK, out=torch.empty(4, 2))
    with torch.no_grad():
        assert torch.equal(mw.pack(x, MASK, out=torch.empty(4, 2)).values, x[MASK])


@pytest.mark.parametrize("name", ["pack_rows_out", "unpack_rows_out"])
def test_the_ops_pass_opcheck(name):
    x = rows(2, 3, 2)
    arguments = (x, MASK, torch.empty(4, 2)) if name == "pack_rows_out" else None
    arguments = arguments or (x[MASK], MASK, torch.zeros(()), torch.empty(2, 3, 2))
    torch.library.opcheck(getattr(torch.ops.maskwise, name).default, arguments)
    expected = arguments[-1].clone()
    getattr(reference, name)(*arguments[:-1], expected)
    getattr(torch.ops.maskwise, name)(*arguments)
    assert torch.equal(arguments[-1], expected)
