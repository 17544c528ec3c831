"""The ways to make a mask: values, and the structure that each one has."""

import numpy as np
import pytest
import torch

from maskwise.mask import Mask


def kept(mask):
    return mask.to_bool().int().tolist()


@pytest.mark.parametrize(
    "lengths", [[2, 0, 3], (2, 0, 3), torch.tensor([2, 0, 3]), torch.tensor([2, 0, 3], dtype=torch.uint8)]
)
def test_lengths_come_as_lists_tuples_or_tensors_of_any_int_dtype(lengths):
    mask = Mask.from_lengths(lengths, max_len=4)
    assert kept(mask) == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert mask.facts.count == 5
    assert mask.facts.is_prefix is True


def test_lengths_pad_on_the_left():
    mask = Mask.from_lengths([2, 0, 3], side="left")
    assert kept(mask) == [[0, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert mask.facts.kind == "intervals"
    assert not mask.is_prefix


def test_lengths_have_any_batch_shape():
    assert Mask.from_lengths(3, max_len=4).shape == (4,)
    assert Mask.from_lengths([[1, 2], [3, 0]]).shape == (2, 2, 3)
    assert Mask.from_lengths([]).shape == (0, 0)
    assert Mask.from_lengths(torch.ones(2, 3, 4, dtype=torch.int32), 7).shape == (2, 3, 4, 7)


def test_a_mask_does_not_change_when_the_lengths_it_was_made_of_do():
    lengths = torch.tensor([1, 2])
    mask = Mask.from_lengths(lengths, 3)
    lengths.fill_(3)
    assert kept(mask) == [[1, 0, 0], [1, 1, 0]]


def test_indices_may_be_negative_repeated_unsorted_or_none_at_all():
    assert kept(Mask.from_indices([5, -1, 2, 2], size=7)) == [0, 0, 1, 0, 0, 1, 1]
    assert kept(Mask.from_indices([], size=3)) == [0, 0, 0]
    assert kept(Mask.from_indices([], size=(1, 2))) == [[0, 0]]
    assert Mask.from_indices([5, -1, 2, 2], size=7).facts.count == 3


def test_indices_of_many_dims_have_one_column_a_dim():
    mask = Mask.from_indices(torch.tensor([[0, 1], [-1, -1]]), size=(2, 3))
    assert kept(mask) == [[0, 1, 0], [0, 0, 1]]
    assert mask.lengths.tolist() == [1, 1]
    assert mask.indices().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    "rows", [[[0, -1], [1], []], [torch.tensor([0, 2]), torch.tensor([1, 1]), []], [(0, 2), (1,), ()]]
)
def test_a_list_of_lists_holds_the_positions_of_each_row(rows):
    mask = Mask.from_indices(rows, size=3)
    assert kept(mask) == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert mask.facts.count == 3


def test_lists_of_one_length_are_rows_with_an_int_and_points_with_a_shape():
    assert kept(Mask.from_indices([[0, 2], [1, 0]], size=3)) == [[1, 0, 1], [1, 1, 0]]
    assert kept(Mask.from_indices([[0, 2], [1, 0]], size=(2, 3))) == [[0, 0, 1], [1, 0, 0]]
    assert kept(Mask.from_indices([[0], [1]], size=3)) == [[1, 0, 0], [0, 1, 0]]
    assert kept(Mask.from_indices([[], []], size=2)) == [[0, 0], [0, 0]]


def test_a_tuple_of_a_tensor_for_each_dim_is_what_nonzero_returns():
    bits = torch.tensor([[[True, False], [False, True]], [[False, False], [True, True]]])
    assert Mask.from_indices(bits.nonzero(as_tuple=True), bits.shape).equal(bits)
    assert Mask.from_indices(np.nonzero(bits.numpy()), bits.shape).equal(bits)
    assert kept(Mask.from_indices(torch.tensor([0, 5, 0, 7]).nonzero(as_tuple=True), 4)) == [0, 1, 0, 1]


def test_a_random_mask_follows_its_density_and_its_generator():
    first, again = (Mask.random((200, 50), 0.3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.equal(again)
    # 10,000 draws with a deviation of 46.
    assert abs(first.count() - 3000) < 250
    assert Mask.random((4, 5), 0.0).is_empty
    assert Mask.random((4, 5), 1).is_full
    assert Mask.random(7, 0.5, device="meta").device.type == "meta"


@pytest.mark.parametrize("values", [[0, 101], (0, 101), torch.tensor([0, 101])])
def test_values_keep_the_tokens_that_are_among_them(values):
    assert kept(Mask.from_values(torch.tensor([[101, 7, 0]]), values)) == [[1, 0, 1]]


def test_one_value_or_none_at_all_will_do():
    assert kept(Mask.from_values(torch.tensor([1, 2]), 2)) == [0, 1]
    assert Mask.from_values(torch.tensor([1, 2]), []).is_empty


def test_segments_are_a_block_diagonal_and_padding_sees_nothing():
    assert kept(Mask.from_segments([0, 0, 1, -1])) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert kept(Mask.from_segments([7, 0], padding=0)) == [[1, 0], [0, 0]]
    assert Mask.from_segments(torch.zeros(2, 3, 4, dtype=torch.int64)).shape == (2, 3, 4, 4)


def test_causal_attention_within_packed_segments_is_one_interval_a_row():
    mask = Mask.from_segments([0, 0, 1, 1, -1]) & Mask.causal(5)
    assert mask.facts.kind == "intervals"
    assert kept(mask) == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    scattered = Mask.from_segments([0, 1, 0]) & Mask.causal(3)
    assert scattered.facts.kind == "combination"
    assert kept(scattered) == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]


def test_a_function_is_called_once_to_check_it_and_then_only_when_it_is_needed():
    calls = []

    def lower(q, k):
        calls.append(torch.broadcast_shapes(q.shape, k.shape))
        return k <= q

    mask = Mask.from_function(lower, (1000, 1000))[:2, :3]
    assert calls == [(1, 1)]
    assert kept(mask) == [[1, 0, 0], [1, 1, 0]]
    assert calls == [(1, 1), (2, 3)]


def test_a_function_may_use_only_some_of_its_indices():
    assert kept(Mask.from_function(lambda q, k: k < 1, (2, 2))) == [[1, 0], [1, 0]]


def test_causal_is_aligned_at_the_top_left_as_sdpa_is():
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    k, v = torch.randn(2, 1, 1, 6, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = sdpa(q, k, v, attn_mask=Mask.causal(4, 6).to_bool())
    torch.testing.assert_close(ours, sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize("offset", range(-5, 8))
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_the_count_of_causal_and_window_is_known_in_closed_form(offset, k):
    causal = Mask.causal(4, k, offset=offset)
    assert causal.facts.count == int(causal.to_bool().sum())
    if offset >= 0:
        window = Mask.window(4, left=offset, right=1, k=k)
        assert window.facts.count == int(window.to_bool().sum())


def test_a_window_sees_left_itself_and_right():
    assert kept(Mask.window(3, left=1, right=1)) == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert kept(Mask.window(2, left=0, k=3)) == [[1, 0, 0], [0, 1, 0]]


def test_constructors_use_the_default_device():
    with torch.device("meta"):
        for mask in (Mask.causal(3), Mask.full(3), Mask.from_lengths([1, 2]), Mask.from_indices([1], 3)):
            assert mask.device.type == "meta"
            assert mask.facts.count is not None


def test_a_mask_made_from_a_mask_keeps_its_structure():
    assert Mask(Mask.causal(3)).facts.kind == "intervals"


def test_the_union_and_complement_of_lengths_are_lengths():
    a, b = Mask.from_lengths([1, 3], 4), Mask.from_lengths([2, 2], 4)
    assert (a | b).facts.kind == (a & b).facts.kind == (~a).facts.kind == "intervals"
    assert (a | b).lengths.tolist() == [2, 3]
    assert (a & b).lengths.tolist() == [1, 2]
    assert (~a).lengths.tolist() == [3, 1]
    assert (a & b).facts.is_prefix
    assert (~a | ~b).facts.kind == "intervals"


def test_joined_length_masks_are_length_masks():
    a, b = Mask.from_lengths([1, 3], 4), Mask.full((1, 4))
    joined = Mask.cat([a, b, Mask.from_lengths([2], 4, side="left")])
    assert joined.facts.kind == "intervals"
    assert joined.facts.count == 1 + 3 + 4 + 2
    assert joined.lengths.tolist() == [1, 3, 4, 2]
    assert Mask.stack([a, a], 1).facts.kind == "intervals"
    assert Mask.stack([Mask.full(3), Mask.full(3)]).facts.kind == "constant"
    segments = Mask.from_segments([[0, 1]])
    assert Mask.cat([segments, segments]).facts.kind == "segments"
    assert Mask.stack([Mask.full(3), Mask.none(3)]).lengths.tolist() == [3, 0]


def test_views_that_leave_rows_whole_keep_lengths():
    mask = Mask.from_lengths([1, 3], 4)
    for view in (mask[:, None], mask[1], mask[:, 1:3], mask.unsqueeze(0).expand(5, -1, -1), mask[None].transpose(0, 1)):
        assert view.facts.kind == "intervals"
    assert mask[:, 1:3].lengths.tolist() == [0, 2]
    assert mask[:, None].expand(-1, 7, -1).facts.count == 28
