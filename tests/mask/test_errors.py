"""Every error says who complains, about what, what was expected, what came, and what to do."""

# One mistake a line reads as a table.
# ruff: noqa: E501

import numpy as np
import pytest
import torch

from maskwise import errors
from maskwise.mask import Mask

T = torch.tensor
META = torch.zeros(2, dtype=torch.int64, device="meta")

MISTAKES = [
    # what was done, the error, and the parts that its message must have
    (lambda: Mask(T([1, 0])), TypeError, "Mask: `bits` must be a bool tensor, got torch.int64. Hint: Mask.from_attention_mask(t)"),
    (lambda: Mask(T([0.0])), TypeError, "`bits` must be a bool tensor, got torch.float32. Hint: Mask.from_additive(t)"),
    (lambda: Mask([True]), TypeError, "`bits` must be a bool tensor, got list. Hint: Mask(torch.tensor(...))"),
    (lambda: Mask(np.ones(2, dtype=bool)), TypeError, "got ndarray. Hint: Mask.from_numpy(array)"),
    (lambda: Mask.from_lengths([2, 7], 5), IndexError, "Mask.from_lengths: `lengths` must hold only values from 0 to 5, got 7 at position 1. Hint: max_len=max(lengths)"),
    (lambda: Mask.from_lengths([[2, 1], [-3, 1]], 5), IndexError, "got -3 at position (1, 0). Hint: lengths.clamp(min=0)"),
    (lambda: Mask.from_lengths(9, 5), IndexError, "got 9. Hint"),
    (lambda: Mask.from_lengths([2.5], 5), TypeError, "`lengths` must be ints, got torch.float32 from [2.5]. Hint: lengths.long()"),
    (lambda: Mask.from_lengths(T([1.0]), 5), TypeError, "`lengths` must be ints, got torch.float32. Hint: lengths.long()"),
    (lambda: Mask.from_lengths(T([True]), 5), TypeError, "got torch.bool. Hint: Mask(t) takes a bool tensor"),
    (lambda: Mask.from_lengths([[1], [1, 2]], 5), TypeError, "`lengths` must be ints: a tensor, or lists of equal length"),
    (lambda: Mask.from_lengths("abc", 5), TypeError, "`lengths` must be ints"),
    (lambda: Mask.from_lengths([1], 5, side="middle"), ValueError, '`side` must be "right" or "left", got \'middle\'. Hint: side="right"'),
    (lambda: Mask.from_lengths(META), ValueError, "`max_len` must be given when lengths is a device tensor, got None. Hint: Mask.from_lengths(lengths, max_len=tokens.shape[1])"),
    (lambda: Mask.from_lengths([1], -1), ValueError, "`max_len` must be an int of 0 or more, got -1. Hint: max_len=x.shape[-1]"),
    (lambda: Mask.from_indices([3], 3), IndexError, "Mask.from_indices: `indices` must hold only values from -3 to 2, got 3 at position 0. Hint: indices[indices < size]"),
    (lambda: Mask.from_indices([0, -4], 3), IndexError, "got -4 at position 1. Hint: size=3 has positions 0 to 2"),
    (lambda: Mask.from_indices([[0, 1, 2], [1, 2, 0]], (3, 3)), ValueError, "`indices` must be (n, 2) for a mask of 2 dims, got (2, 3). Hint: indices.T"),
    (lambda: Mask.from_indices(T([[0, 1]]), 3), ValueError, "`indices` must be (n,) for one dim, got (1, 2)"),
    (lambda: Mask.from_indices([0.5], 3), TypeError, "`indices` must be ints"),
    (lambda: Mask.from_indices([0], "x"), TypeError, "`size` must be an int or a tuple of ints, got 'x'. Hint: size=x.shape"),
    (lambda: Mask.from_values([1, 2], [1]), TypeError, "Mask.from_values: `tokens` must be a tensor, got list. Hint: torch.tensor(tokens)"),
    (lambda: Mask.from_segments(T([0.0])), TypeError, "Mask.from_segments: `ids` must be ints"),
    (lambda: Mask.from_segments(T(1)), ValueError, "`ids` must have at least one dim, got (). Hint: ids[None]"),
    (lambda: Mask.from_function(3, 4), TypeError, "Mask.from_function: `fn` must be a function of the indices, got int"),
    (lambda: Mask.from_function(lambda q, k: q - k, (2, 2)), TypeError, "`fn` must return a bool tensor, got torch.int64. Hint: lambda q, k: k <= q"),
    (lambda: Mask.from_function(lambda q: True, 2), TypeError, "`fn` must return a bool tensor, got bool"),
    (lambda: Mask.full((2, -1)), ValueError, "Mask.full: `shape` must be an int of 0 or more, got -1"),
    (lambda: Mask.none(2.5), TypeError, "Mask.none: `shape` must be an int or a tuple of ints, got 2.5"),
    (lambda: Mask.causal(-1), ValueError, "Mask.causal: `q` must be an int of 0 or more, got -1"),
    (lambda: Mask.window(3, -1), ValueError, "Mask.window: `left` must be an int of 0 or more, got -1"),
    (lambda: Mask.from_key_padding(T([1])), TypeError, "Mask.from_key_padding: `padding` must be a bool tensor, True = ignore, got torch.int64. Hint: Mask.from_attention_mask(t)"),
    (lambda: Mask.from_key_padding(T([0.0])), TypeError, "Hint: Mask.from_additive(t)"),
    (lambda: Mask.from_attention_mask([1]), TypeError, "`attention_mask` must be a tensor, got list"),
    (lambda: Mask.from_attention_mask(T([[1, 0], [1, 2]])), ValueError, "`attention_mask` must hold only 0 (drop) and 1 (keep), got 2 at position (1, 1). Hint: Mask.from_additive(t)"),
    (lambda: Mask.from_additive(T([1])), TypeError, "Mask.from_additive: `additive` must be a float tensor, got torch.int64. Hint: Mask.from_attention_mask(t)"),
    (lambda: Mask.from_additive(T([0.0, -3.5])), ValueError, "must hold only 0 (keep) and -inf or very negative numbers (drop), got -3.5 at position 1. Hint: Mask.from_additive(t.masked_fill"),
    (lambda: Mask.from_additive(T([float("nan")])), ValueError, "got nan at position 0"),
    (lambda: Mask.full(2).to_additive(torch.int64), TypeError, "Mask.to_additive: `dtype` must be a float dtype, got torch.int64. Hint: mask.to_attention_mask(dtype)"),
    (lambda: Mask.from_cu_seqlens(T([[0]])), ValueError, "Mask.from_cu_seqlens: `cu_seqlens` must be of shape (batch + 1,), got (1, 1)"),
    (lambda: Mask.from_cu_seqlens(T([0, 3, 2])), ValueError, "`cu_seqlens` must start at 0 and never fall, got [0, 3, 2]. Hint"),
    (lambda: Mask.from_cu_seqlens(META), ValueError, "Mask.from_cu_seqlens: `max_len` must be given when cu_seqlens is a device tensor"),
    (lambda: Mask.from_numpy(np.ones(2)), TypeError, "Mask.from_numpy: `array` must be a bool or a masked array, got float64. Hint: array.astype(bool)"),
    (lambda: Mask.full((2, 3)).to_masked_array(np.ones(2)), ValueError, "Mask.to_masked_array: `data` must be of a shape that the mask (2, 3) broadcasts to, got (2,)"),
    (lambda: Mask.from_block_mask(T([True])), TypeError, "Mask.from_block_mask: `block_mask` must be a BlockMask, got Tensor. Hint: Mask(t)"),
    (lambda: Mask.full(3).to_block_mask(), ValueError, "Mask.to_block_mask: `mask` must be (Q, K), (B, Q, K) or (B, H, Q, K), got (3,). Hint: mask[:, None, None, :]"),
    (lambda: Mask.full((3, 3)).to_block_mask(0), ValueError, "`block_size` must be a positive int, got 0. Hint: block_size=128"),
    (lambda: Mask.full((2, 3)) & Mask.full((4, 3)), ValueError, "Mask &: `other` must broadcast with the mask's shape (2, 3), got (4, 3). Hint: mask[..., None]"),
    (lambda: Mask.full(2) | T([1, 0]), TypeError, "Mask |: `other` must be a Mask or a bool tensor, got torch.int64. Hint: Mask(other.bool())"),
    (lambda: T([1, 0]) & Mask.full(2), TypeError, "Mask &: `other` must be a Mask or a bool tensor, got torch.int64"),
    (lambda: Mask.full(2) - 1, TypeError, "Mask -: `other` must be a Mask or a bool tensor, got int"),
    (lambda: Mask.full(2) ^ Mask.full(2, device="meta"), RuntimeError, "Mask ^: `other` must be on the mask's device cpu, got meta. Hint: mask.to(other.device)"),
    (lambda: Mask.full(2)[2], IndexError, "Mask[...]: `index` must be between -2 and 1 in dim 0, got 2"),
    (lambda: Mask.full(2)[0, 0], IndexError, "`index` must have at most 1 entries for shape (2,), got 2"),
    (lambda: Mask.full(2)[..., ...], ValueError, "`index` must hold at most one Ellipsis"),
    (lambda: Mask.full(2)[::-1], ValueError, "`step` must be positive, as in torch, got -1. Hint: Mask(mask.to_bool().flip(0))"),
    (lambda: Mask.full(2).unsqueeze(3), IndexError, "Mask.unsqueeze: `dim` must be an int between -2 and 1 for 2 dims, got 3"),
    (lambda: Mask.full(2).count(1), IndexError, "Mask.count: `dim` must be an int between -1 and 0 for 1 dims, got 1"),
    (lambda: Mask.full(2).size(1), IndexError, "Mask.size: `dim`"),
    (lambda: Mask.full((2, 3)).expand(3), ValueError, "Mask.expand: `sizes` must have at least the mask's 2 dims, got (3,)"),
    (lambda: Mask.full((2, 3)).expand(4, 3), ValueError, "`sizes` must keep every size of (2, 3) that is not 1, got (4, 3)"),
    (lambda: Mask.full(3).expand(-1, 3), ValueError, "`sizes` must not be -1 for a new dim, got (-1, 3)"),
    (lambda: Mask.full((2, 3)).permute(0, 0), ValueError, "Mask.permute: `dims` must name each of the 2 dims once, got (0, 0)"),
    (lambda: Mask.full((2, 3)).reshape(5), ValueError, "Mask.reshape: `shape` must hold as many positions as (2, 3), 6, got (5,). Hint: mask.reshape(-1)"),
    (lambda: Mask.full((2, 3)).flatten(1, 0), ValueError, "Mask.flatten: `start_dim` must not come after end_dim=0, got 1"),
    (lambda: Mask.cat([]), ValueError, "Mask.cat: `masks` must hold at least one mask, got none. Hint: Mask.none(shape)"),
    (lambda: Mask.cat([Mask.full(2), T([True])]), TypeError, "Mask.cat: `masks` must hold masks only, got Tensor. Hint: Mask(t)"),
    (lambda: Mask.cat([Mask.full((1, 2)), Mask.full((1, 3))]), ValueError, "Mask.cat: `masks` must agree with (1, 2) in every dim but 0, got (1, 3)"),
    (lambda: Mask.stack([Mask.full(2), Mask.full(3)]), ValueError, "Mask.stack: `masks` must all be of shape (2,), got (3,). Hint: Mask.from_lengths(..., max_len=L)"),
    (lambda: Mask.stack([Mask.full(2), Mask.full(2, "meta")]), RuntimeError, 'Mask.stack: `masks` must all be on cpu, got meta. Hint: mask.to("cpu")'),
    (lambda: bool(Mask.full(2)), ValueError, "bool(mask): `mask` must have one position to be True or False, not (2,), got 2 positions. Hint: mask.is_full"),
    (lambda: len(Mask.full(2)), TypeError, "len(mask): a Mask has no len(). Hint: mask.shape[0]"),
    (lambda: iter(Mask.full(())), TypeError, "iter(mask): `mask` must have at least one dim, got ()"),
    (lambda: Mask.full(()).lengths, ValueError, "Mask.lengths: `mask` must have at least one dim, got (). Hint: mask[None]"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "builtin", "message"), MISTAKES, ids=[m[2][:60] for m in MISTAKES])
def test_a_mistake_gets_an_error_that_says_what_to_do(mistake, builtin, message):
    with pytest.raises(builtin) as caught:
        mistake()
    assert isinstance(caught.value, errors.MaskwiseError)
    assert message in str(caught.value)


def test_a_tensor_changed_in_place_makes_its_mask_stale():
    bits = torch.tensor([True, False])
    mask, combined = Mask(bits), Mask(bits)[None] & Mask.from_lengths([1, 2])
    assert mask.count() == 1
    bits[1] = True
    for use in (mask.to_bool, mask.count, lambda: mask[0], lambda: ~mask, lambda: mask & mask, combined.to_bool):
        with pytest.raises(errors.StaleMaskError, match=r"Hint: Mask\(t.clone\(\)\)"):
            use()
    assert str(mask) == "Mask (2,)  stale: its bool tensor was changed in place"
    assert "stale" in mask._repr_html_()


def test_a_fact_that_was_written_into_is_computed_again():
    mask = Mask.from_lengths([1, 2])
    mask.lengths.fill_(7)
    mask.to_bool().clone().fill_(False)
    assert mask.lengths.tolist() == [1, 2]


def test_inference_tensors_have_no_version_and_are_taken_as_they_are():
    with torch.inference_mode():
        mask = Mask(torch.tensor([True, False]))
        assert mask.count() == 1
        assert mask.lengths.item() == 1
        assert mask.lengths.item() == 1
