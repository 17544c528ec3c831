"""The other conventions: values both ways, and the fills that are in use."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from maskwise.mask import Mask

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("filled", FLOATS)
@pytest.mark.parametrize("cast", FLOATS)
def test_finfo_min_drops_in_every_dtype_and_cast_to_every_other(filled, cast):
    additive = torch.tensor([0.0, torch.finfo(filled).min], dtype=filled).to(cast)
    assert Mask.from_additive(additive).to_bool().tolist() == [True, False]


@pytest.mark.parametrize("fill", [float("-inf"), -1e4, -1e9, -3e38])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_usual_fills_drop(fill, dtype):
    assert Mask.from_additive(torch.tensor([0.0, fill]).to(dtype)).to_bool().tolist() == [True, False]


def test_an_additive_mask_adds_minus_infinity_or_what_is_asked_for():
    mask = Mask.from_lengths([1], 2)
    assert mask.to_additive().tolist() == [[0.0, float("-inf")]]
    low = torch.finfo(torch.float16).min
    half = mask.to_additive(torch.float16, value=low)
    assert half.dtype == torch.float16
    assert half.tolist() == [[0.0, low]]


def test_attention_masks_come_in_any_dtype():
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16):
        assert Mask.from_attention_mask(torch.tensor([1, 0]).to(dtype)).to_bool().tolist() == [True, False]
    assert Mask.full(2).to_attention_mask(torch.float16).dtype == torch.float16


def test_multihead_attention_takes_the_key_padding():
    layer = torch.nn.MultiheadAttention(4, 1, batch_first=True)
    x = torch.randn(2, 3, 4)
    noise = x.clone()
    noise[0, 2:] += 100
    mask = Mask.from_lengths([2, 3])
    out = [layer(t, t, t, key_padding_mask=mask.to_key_padding())[0][0, :2] for t in (x, noise)]
    torch.testing.assert_close(out[0], out[1])


def test_cu_seqlens_go_both_ways():
    mask = Mask.from_lengths([2, 0, 4], 6)
    cu, longest = mask.to_cu_seqlens()
    assert cu.tolist() == [0, 2, 2, 6]
    assert longest == 4
    assert Mask.from_cu_seqlens(cu, 6).equal(mask)
    assert Mask.from_cu_seqlens(cu).shape == (3, 4)
    assert Mask.from_cu_seqlens(torch.tensor([0])).shape == (0, 0)


def test_numpy_arrays_are_shared_and_masked_arrays_are_inverted():
    array = np.array([True, False])
    assert Mask.from_numpy(array).to_bool().data_ptr() == array.ctypes.data
    assert Mask.from_numpy(array[::-1]).to_bool().tolist() == [False, True]
    frozen = np.broadcast_to(array, (2, 2))
    assert Mask.from_numpy(frozen).to_bool().tolist() == [[True, False]] * 2
    assert Mask.from_numpy(np.ma.masked_array([1, 2], mask=[True, False])).to_bool().tolist() == [False, True]
    assert Mask.from_numpy(np.ma.masked_array([1, 2])).is_full
    assert np.asarray(Mask.from_lengths(1, 2)).tolist() == [True, False]
    assert np.asarray(Mask.from_lengths(1, 2), dtype=np.int8).tolist() == [1, 0]


def test_a_masked_array_hides_what_is_dropped():
    array = Mask.from_lengths([1, 2]).to_masked_array(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    assert array.sum() == 6.0
    assert array.mask.tolist() == [[False, True], [False, False]]


def blocks(block_mask):
    parts = (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks, block_mask.to_dense())
    return [p.tolist() for p in parts]


def test_block_masks_equal_those_that_torch_creates():
    theirs = create_block_mask(lambda b, h, q, k: k <= q, None, None, 300, 300, device="cpu")
    assert blocks(Mask.causal(300).to_block_mask()) == blocks(theirs)
    lengths = torch.tensor([100, 300])
    theirs = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 256, 300, device="cpu")
    ours = Mask.from_lengths(lengths, 300)[:, None].expand(-1, 256, -1)
    assert blocks(ours.to_block_mask()) == blocks(theirs)
    assert Mask.from_block_mask(theirs).squeeze(1).equal(ours)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dims", [2, 3, 4])
def test_flex_attention_with_the_block_mask_equals_sdpa_with_the_bool_mask(dims):
    q, k, v = torch.randn(3, 2, 3, 40, 8)
    mask = Mask.causal(40)
    if dims == 3:
        mask = mask & Mask.from_lengths([17, 40])[:, None]
    elif dims == 4:
        mask = mask & ~Mask.from_indices([5, 7], 40).expand(1, 3, 1, -1)
    bits = mask.to_bool()[:, None] if dims == 3 else mask.to_bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bits)
    got = flex_attention(q, k, v, block_mask=mask.to_block_mask(block_size=16))
    torch.testing.assert_close(got, expected)
