import pytest
import torch

import maskwise as mw
from maskwise import Mask
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError

Q = torch.zeros(2, 4, 3, 8)
K = torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Q[0], K, K), ShapeError, r"attention: `q` must be \(B, heads, L, D\), got \(4, 3, 8\). Hint: q\[None\]."),
        (([1.0], K, K), DtypeError, r"`q` must be a tensor, or all of q, k, v Packed, got list"),
        ((Q.long(), K, K), DtypeError, r"`q` must be floating, got torch.int64. Hint: q.float\(\)"),
        ((Q, K.double(), K), DtypeError, r"`k` must have q's dtype torch.float32, got torch.float64"),
        ((Q, K, K.to("meta")), DeviceError, r"`v` must be on q's device cpu, got meta"),
        ((Q, K[:1], K), ShapeError, r"`k` must have q's batch size 2, got 1. Hint: k.expand\(2, -1, -1, -1\)"),
        ((Q, K[..., :4], K), ShapeError, r"`k` must have q's last dim 8, got 4"),
        ((Q, K, K[:, :, :4]), ShapeError, r"`v` must have k's heads and length \(2, 5\), got \(2, 4\)"),
        ((Q[:, :3], K, K), ShapeError, r"`k` must have a number of heads that divides q's 3, got 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_what_was_expected(arguments, error, message):
    with pytest.raises(error, match=message):
        mw.attention(*arguments)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 5), DtypeError, r"must be a Mask or a bool tensor, got torch.float32. Hint: .*from_additive"),
        ([True], DtypeError, r"must be a Mask or a bool tensor, got list. Hint: Mask"),
        (
            Mask.full((2, 4)),
            ShapeError,
            r"must be \(B, keys\) = \(2, 5\) or broadcast to \(B, .*\) = \(2, 4, 3, 5\), got \(2, 4\)",
        ),
        (Mask.full((2, 3, 5)), ShapeError, r"Hint: mask\[:, None\] for \(B, queries, keys\)"),
        (Mask.full((2, 3)), ShapeError, r"the last dim of a mask is the keys; .* mask\[:, None, :, None\]"),
        (Mask.full((2, 5)).to("meta"), DeviceError, r"`mask` must be on q's device cpu, got meta"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_a_hint(mask, error, message):
    with pytest.raises(error, match=message):
        mw.attention(Q, K, K, mask)


def test_a_mask_that_could_mean_two_things_is_refused_with_both():
    square = torch.zeros(3, 2, 3, 8)
    with pytest.raises(ArgumentError, match=r"mask\[:, None, None, :\] for \(B, keys\), mask\[None, None\] for"):
        mw.attention(square, square, square, Mask.causal(3))
    # One batch entry and one query, or one batch entry: both readings are the same.
    one = torch.zeros(1, 2, 1, 8)
    assert mw.attention(one, K[:1], K[:1], Mask.full((1, 5))).shape == (1, 2, 1, 8)


def test_a_probability_beyond_one_is_refused():
    with pytest.raises(ArgumentError, match=r"`dropout_p` must be between 0 and 1, got 1.5"):
        mw.attention(Q, K, K, dropout_p=1.5)


def test_packed_and_dense_do_not_mix():
    mask = Mask.from_lengths([2, 3])
    packed = mw.pack(torch.zeros(2, 3, 4, 8), mask)
    with pytest.raises(DtypeError, match=r"`k` must be Packed, as the others are, got Tensor. Hint: mw.pack"):
        mw.attention(packed, K, K)
    with pytest.raises(ArgumentError, match=r"`v` must be packed by k's mask"):
        mw.attention(packed, packed, mw.pack(torch.zeros(2, 3, 4, 8), Mask.from_lengths([1, 3])))
    flat = mw.pack(torch.zeros(2, 3, 8), mask)
    with pytest.raises(ShapeError, match=r"packed from \(B, L, heads, D\)"):
        mw.attention(flat, flat, flat)
