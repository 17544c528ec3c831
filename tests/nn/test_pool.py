"""Pools: the mean, the largest and the learned average of kept positions."""

import pytest
import torch

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError, ShapeError

MEAN, LARGEST = mw.nn.MaskedMeanPool, mw.nn.MaskedMaxPool


@pytest.mark.parametrize(
    ("pool", "fn"), [(MEAN, lambda rows: rows.mean(0)), (LARGEST, lambda rows: rows.amax(0))], ids=["mean", "max"]
)
def test_each_entry_is_pooled_over_its_kept_positions(pool, fn):
    x, lengths = torch.randn(4, 6, 3), [1, 6, 4, 2]
    expected = torch.stack([fn(row[:n]) for row, n in zip(x, lengths, strict=True)])
    mask = mw.Mask.from_lengths(lengths, max_len=6)
    torch.testing.assert_close(pool()(x, mask), expected)
    torch.testing.assert_close(pool(-1)(x.mT, mask), expected)
    torch.testing.assert_close(pool(keepdim=True)(x, mask), expected[:, None])
    torch.testing.assert_close(pool()(x, mask.to_bool()[..., None]), expected)


def test_a_feature_map_is_pooled_over_its_kept_places():
    x, bits = torch.randn(2, 3, 4, 5), torch.rand(2, 4, 5) < 0.5
    expected = torch.stack([x[n][:, bits[n]].mean(-1) for n in range(2)])
    torch.testing.assert_close(MEAN((2, 3))(x, bits), expected)


def test_leading_dims_beyond_the_batch_are_the_masks_too():
    x, bits = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4) < 0.5
    torch.testing.assert_close(MEAN(2, empty=0.0)(x, bits), mw.mean(x, bits[..., None], 2, empty=0.0))


def test_one_sequence_without_a_batch_is_pooled():
    x, bits = torch.randn(6, 3), torch.tensor([True, False, True, True, False, False])
    torch.testing.assert_close(MEAN(0)(x, bits), x[bits].mean(0))


@pytest.mark.parametrize(("pool", "theirs"), [(MEAN, torch.mean), (LARGEST, torch.amax)], ids=["mean", "max"])
@pytest.mark.parametrize("mask", [None, torch.ones(4, 6, dtype=torch.bool), mw.Mask.full((4, 6))], ids=str)
def test_all_kept_is_the_pool_of_torch_exactly(pool, theirs, mask):
    x = torch.randn(4, 6, 3)
    assert torch.equal(pool()(x, mask), theirs(x, 1))


@pytest.mark.parametrize("hidden", [None, 5])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_averages_kept_positions_by_the_softmax_of_their_scores(heads, hidden):
    pool = mw.nn.MaskedAttentionPool(4, heads, hidden_dim=hidden)
    x, lengths = torch.randn(3, 6, 4), [2, 0, 6]
    expected = torch.zeros(3, 4)
    for n, length in enumerate(lengths):
        rows = x[n, :length]
        weights = pool.score(rows).softmax(0)
        for h, share in enumerate(rows.chunk(heads, -1)):
            expected[n, h * (4 // heads) : (h + 1) * (4 // heads)] = (weights[:, h, None] * share).sum(0)
    torch.testing.assert_close(pool(x, mw.Mask.from_lengths(lengths, max_len=6)), expected)


def test_attention_without_a_mask_and_with_a_full_one_is_the_same_to_the_last_bit():
    pool, x = mw.nn.MaskedAttentionPool(4), torch.randn(3, 6, 4)
    assert torch.equal(pool(x), pool(x, torch.ones(3, 6, dtype=torch.bool)))


def test_attention_takes_one_sequence_and_many_leading_dims():
    pool, x, bits = mw.nn.MaskedAttentionPool(4), torch.randn(2, 3, 6, 4), torch.rand(2, 3, 6) < 0.5
    out = pool(x, bits)
    assert out.shape == (2, 3, 4)
    torch.testing.assert_close(pool(x[1, 2], bits[1, 2]), out[1, 2])


def test_its_keys_are_those_of_linear_layers():
    assert list(mw.nn.MaskedAttentionPool(4).state_dict()) == ["score.weight"]
    keys = ["score.0.weight", "score.0.bias", "score.2.weight"]
    assert list(mw.nn.MaskedAttentionPool(4, hidden_dim=3).state_dict()) == keys


def test_they_say_what_they_are():
    assert repr(MEAN()) == "MaskedMeanPool(dim=1, keepdim=False, empty=0.0)"
    assert "4, num_heads=2" in repr(mw.nn.MaskedAttentionPool(4, 2))


BITS = torch.ones(2, 6, dtype=torch.bool)
ERRORS = [
    (lambda: MEAN()(torch.ones(2, 3, 6), BITS), ShapeError, r"batch and the pooled dims, \(2, 3\).*pool along dim=2"),
    (lambda: MEAN()(torch.ones(2, 6, 3), BITS.int()), DtypeError, r"Mask\.from_attention_mask"),
    (lambda: mw.nn.MaskedAttentionPool(4, 3), ArgumentError, r"divide embed_dim 4, got 3"),
    (lambda: mw.nn.MaskedAttentionPool(4)(torch.ones(2, 6, 3), BITS), ShapeError, r"be \(\*, L, 4\)"),
    (lambda: mw.nn.MaskedAttentionPool(3)(torch.ones(2, 6, 3), BITS[..., None].expand(2, 6, 3)), ShapeError, "whole"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_get_an_error_that_teaches(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith("Masked")


@pytest.mark.parametrize("pool", [MEAN, LARGEST])
def test_one_mask_of_intervals_pools_inputs_of_several_shapes_call_after_call(pool):
    mask = mw.Mask.from_lengths([2, 0, 3], max_len=4)
    bits = mask.to_bool().clone()
    inputs = [torch.randn(3, 4), torch.randn(3, 4, 2), torch.randn(3, 4, 5), torch.randn(3, 4, 4)]
    for _ in range(2):
        for x in inputs:
            assert torch.equal(pool()(x, mask), pool()(x, bits))
    last = pool(dim=-1)
    for _ in range(2):
        assert torch.equal(last(inputs[3], mask), last(inputs[3], bits))
        assert torch.equal(pool()(inputs[3], mask), pool()(inputs[3], bits))


def test_a_pool_of_a_mask_that_it_has_met_does_not_prepare_the_call_again(monkeypatch):
    layer, x, mask = mw.nn.MaskedMeanPool(), torch.randn(3, 4, 2), mw.Mask.from_lengths([2, 1, 3], max_len=4)
    expected = layer(x, mask)

    def refuse(*arguments):
        raise AssertionError("prepared again")

    monkeypatch.setattr(mw.nn.MaskedMeanPool, "_prepare", refuse)
    assert torch.equal(layer(x, mask), expected)
