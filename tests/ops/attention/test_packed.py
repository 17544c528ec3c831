import pytest
import torch

import maskwise as mw
from maskwise import Mask
from tests.ops.attention import masks, truth

CLOSE = {"atol": 2e-5, "rtol": 1e-4}

PACKINGS = {
    "lengths": Mask.from_lengths([3, 0, 7, 7], max_len=7),
    "left": Mask.from_lengths([3, 1, 7, 7], max_len=7, side="left"),
    "gaps": Mask(masks.random_bits(4, 7, seed=1)),
    "bits": Mask(Mask.from_lengths([3, 0, 7, 7], max_len=7).to_bool().clone()),
}


def layouts(heads=4, kv_heads=2, keys=7):
    """(B, L, heads, D) with NaN to be packed away."""
    return (
        truth.tokens(4, 7, heads, 4, seed=1),
        truth.tokens(4, keys, kv_heads, 4, seed=2),
        truth.tokens(4, keys, kv_heads, 4, seed=3),
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("capacity", [None, 28])
def test_packed_is_dense(packing, is_causal, capacity):
    mask = PACKINGS[packing]
    leaves = [x.requires_grad_() for x in layouts()]
    packed = [mw.pack(x, mask, capacity=capacity) for x in leaves]
    out = mw.attention(*packed, is_causal=is_causal)
    assert out.mask is mask
    assert out.capacity == capacity
    kept = masks.bits(mask[:, None, None], 4, 4, 7, 7)
    expected = truth.attention(*(x.transpose(1, 2) for x in leaves), kept, is_causal=is_causal).transpose(1, 2)
    expected = torch.where(mask.to_bool()[..., None, None], expected, 0.0)
    torch.testing.assert_close(out.unpack().double(), expected, **CLOSE)
    above = truth.tokens(4, 7, 4, 4, seed=4)
    ours = torch.autograd.grad(out.unpack(), leaves, above)
    theirs = torch.autograd.grad(expected, leaves, above.double())
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_keys_may_be_packed_by_another_mask():
    for is_causal in (False, True):
        for keys in (Mask.from_lengths([0, 5, 2, 4], max_len=5), Mask(masks.random_bits(4, 5, seed=7))):
            q, k, v = layouts(keys=5)
            packed = mw.pack(q, PACKINGS["lengths"]), mw.pack(k, keys), mw.pack(v, keys)
            out = mw.attention(*packed, is_causal=is_causal).unpack()
            kept = masks.bits(keys[:, None, None], 4, 4, 7, 5)
            expected = truth.attention(*(x.transpose(1, 2) for x in (q, k, v)), kept, is_causal=is_causal)
            expected = torch.where(PACKINGS["lengths"].to_bool()[..., None, None], expected.transpose(1, 2), 0.0)
            torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_a_mask_besides_the_packing_counts_in_the_original_layout():
    mask, window = PACKINGS["gaps"], Mask.window(7, 2)
    q, k, v = layouts()
    out = mw.attention(*(mw.pack(x, mask) for x in (q, k, v)), window)
    kept = masks.bits(mask[:, None, None] & window, 4, 4, 7, 7)
    expected = truth.attention(*(x.transpose(1, 2) for x in (q, k, v)), kept).transpose(1, 2)
    expected = torch.where(mask.to_bool()[..., None, None], expected, 0.0)
    torch.testing.assert_close(out.unpack().double(), expected, **CLOSE)


def test_sequences_are_the_route_and_nothing_packed_away_is_read():
    mask = PACKINGS["lengths"]
    q, k, v = layouts()
    with mw.explain() as log:
        clean = mw.attention(*(mw.pack(x, mask) for x in (q, k, v)), is_causal=True)
    calls = [call for call in log if call.op == "attention"]
    assert [(call.route, call.reason) for call in calls] == [("sequences", "4 sequences, each attends to its own")]
    for x in (q, k, v):
        x[~mask.to_bool()] = torch.nan
    assert torch.equal(clean.values, mw.attention(*(mw.pack(x, mask) for x in (q, k, v)), is_causal=True).values)


def test_a_kept_nan_reaches_only_later_queries_of_its_sequence():
    mask = PACKINGS["lengths"]
    q, k, v = layouts()
    v[2, 4] = torch.nan
    out = mw.attention(*(mw.pack(x, mask) for x in (q, k, v)), is_causal=True).unpack()
    assert out[2, 4:].isnan().all()
    assert out[2, :4].isfinite().all()
    assert out[[0, 1, 3]].isfinite().all()
