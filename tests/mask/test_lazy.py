"""What is large stays small: no operation on a structured mask allocates more than its structure needs."""

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maskwise.mask import Mask, facts

L = 100_000


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def test_causal_and_lengths_of_a_hundred_thousand_cost_a_few_ints_a_row():
    lengths = [5, L, 70_000]
    with Largest() as largest:
        mask = Mask.causal(L) & Mask.from_lengths(lengths, L)[:, None, :]
        assert mask.facts.kind == "intervals"
        assert mask.shape == (3, L, L)
        # A row of length n sees 1 + 2 + ... + n positions, and then n in every row.
        counts = [n * (n + 1) // 2 + (L - n) * n for n in lengths]
        assert mask.count() == sum(counts)
        assert mask.density == sum(counts) / (3 * L * L)
        assert mask.count((1, 2)).tolist() == counts
        assert mask.lengths[1, 9].item() == 10
        assert mask.is_prefix
        assert not mask.is_full
        assert not mask.is_empty
        assert mask[0, 7, :8].to_bool().tolist() == [True] * 5 + [False] * 3
        assert mask[1, -1, -1].to_bool().item() is True
        assert mask.mT.count() == sum(counts)
        assert (~mask).count() == 3 * L * L - sum(counts)
        assert str(mask).startswith("Mask (3, 100000, 100000)  intervals  9,550,584,990 of 30,000,000,000 kept")
        assert str(mask.mT).count("\n") > 64
        assert mask._repr_html_().count("<svg") == 2
        assert Mask.stack([mask, mask]).count() == 2 * sum(counts)
    # Two bounds of 3 x L int64 is all there is to hold; the stack doubles them.
    assert largest.bytes <= 2 * 3 * L * 8


def test_segments_of_a_hundred_thousand_are_counted_and_made_causal_without_a_square():
    ids = torch.arange(L) // 1000
    with Largest() as largest:
        mask = Mask.from_segments(ids)
        assert mask.count() == 100 * 1000**2
        causal = mask & Mask.causal(L)
        assert causal.facts.kind == "intervals"
        assert causal.count() == 100 * (1000 * 1001 // 2)
        assert causal[1500, 995:1005].to_bool().tolist() == [False] * 5 + [True] * 5
    assert largest.bytes <= 4 * L * 8


def test_constants_take_one_byte():
    with Largest() as largest:
        mask = Mask.full((L, L))
        assert (mask & Mask.none((L, L))).is_empty
        assert (mask | Mask.none(L)).is_full
        assert mask.to_bool().shape == (L, L)
    assert largest.bytes <= 8


def test_a_view_of_a_huge_function_asks_only_for_what_is_seen():
    with Largest() as largest:
        mask = Mask.from_function(lambda q, k: (q + k) % 2 == 0, (L, L)) | ~Mask.causal(L)
        assert mask.facts.kind == "combination"
        assert mask[500:502, 500:503].to_bool().tolist() == [[True, True, True], [False, True, True]]
    assert largest.bytes <= L * 8


def test_a_large_mask_is_counted_piece_by_piece(monkeypatch):
    monkeypatch.setattr(facts, "_PIECE", 1 << 12)
    mask = Mask.from_function(lambda q, k: (k < 10) & (q < 10), (1000, 1000))
    with Largest() as largest:
        assert mask.count() == 100
        assert mask.sum() == 100
        assert mask.any()
        assert not mask.all()
    # A piece of bools, or the int64 indices and counts of the rows.
    assert largest.bytes <= max(1 << 12, 1000 * 8)


def test_block_masks_are_made_one_row_of_blocks_at_a_time():
    with Largest() as largest:
        block_mask = Mask.causal(4096).to_block_mask()
    assert block_mask.sparsity() > 48
    # One row of blocks is 128 x 4096 bools; its column sums are int64.
    assert largest.bytes <= 128 * 4096


def test_columns_of_intervals_are_counted_without_a_number_for_each_pair():
    mask = Mask.causal(4096)
    with Largest() as largest:
        assert torch.equal(mask.sum(0), torch.arange(4096, 0, -1))
        assert mask.any(0).all()
    assert largest.bytes <= 2 * 4097 * 8


def test_counts_along_a_dim_are_the_callers_own_call_after_call():
    mask = Mask.from_lengths([3, 0, 6, 1], max_len=6)
    for _ in range(2):
        found = mask.count(1)
        assert found.tolist() == [3, 0, 6, 1]
        found.add_(1)
