"""What holds for every structure: a new one writes a factory of cases and inherits all of these tests."""

import copy
import math
import operator
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from maskwise.mask import Mask, facts

Case = tuple[Mask, Tensor]

OPERATORS = {
    "&": (operator.and_, operator.and_),
    "|": (operator.or_, operator.or_),
    "^": (operator.xor, operator.xor),
    "-": (operator.sub, lambda a, b: a & ~b),
    "==": (operator.eq, operator.eq),
    "!=": (operator.ne, operator.ne),
}

quick = settings(
    max_examples=15,
    deadline=None,
    # The tests are inherited, so the same test does run from several classes.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


def shapes(min_dims: int = 0, max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def bits(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    size = math.prod(shape)
    return st.lists(st.booleans(), min_size=size, max_size=size).map(
        lambda values: torch.tensor(values, dtype=torch.bool).view(shape)
    )


@st.composite
def partners(draw: st.DrawFn, shape: tuple[int, ...]) -> Case:
    """A mask of any kind whose shape broadcasts with ``shape``, both ways."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    sizes = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)
    sizes = (draw(st.integers(1, 3)),) * draw(st.integers(0, 1)) + sizes if len(sizes) == len(shape) else sizes
    kind = draw(st.sampled_from(["dense", "full", "none", "prefix", "suffix", "run", "function", "indices"]))
    if kind in ("full", "none"):
        mask = Mask.full(sizes) if kind == "full" else Mask.none(sizes)
    elif kind == "function":
        mask = Mask.from_function(lambda *index: sum(index, torch.zeros(())) % 2 == 0, sizes)
    elif kind == "indices":
        mask = Mask.from_indices(draw(bits(sizes)).nonzero(), sizes)
    elif kind == "dense" or not sizes:
        mask = Mask(draw(bits(sizes)))
    else:
        rows = torch.zeros(sizes[:-1], dtype=torch.int64)
        lengths = (draw(st.integers(0, sizes[-1])) + rows).clamp(max=sizes[-1])
        if kind == "run":
            other = torch.full_like(rows, draw(st.integers(0, sizes[-1])))
            mask = Mask.from_lengths(lengths, sizes[-1]) & Mask.from_lengths(other, sizes[-1], side="left")
        else:
            mask = Mask.from_lengths(lengths, sizes[-1], side="right" if kind == "prefix" else "left")
    return mask, mask.to_bool().clone()


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    """A basic index into ``shape``: ints, slices, None and one Ellipsis."""
    key: list[object] = []
    used = draw(st.integers(0, len(shape)))
    tail = draw(st.integers(0, used)) if used < len(shape) or draw(st.booleans()) else None
    dims = list(range(used)) if tail is None else [*range(tail), *range(len(shape) - used + tail, len(shape))]
    for position, dim in enumerate(dims):
        if tail == position:
            key.append(...)
        if draw(st.integers(0, 4)) == 0:
            key.append(None)
        size = shape[dim]
        if size and draw(st.booleans()):
            key.append(draw(st.integers(-size, size - 1)))
        else:
            bound = st.none() | st.integers(-size - 1, size + 1)
            key.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
    if tail == len(dims):
        key.append(...)
    return tuple(key)


class StructureConformance:
    """Inherit, and write `cases`: a strategy of (mask, the bool tensor that it must equal)."""

    kind: str

    @staticmethod
    def cases() -> st.SearchStrategy[Case]:
        raise NotImplementedError("a structure says here what it can be made of")

    # -- what it is ----------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_it_materialises_to_what_it_says(self, data):
        mask, expected = data.draw(self.cases())
        assert mask.facts.kind == self.kind
        assert mask.to_bool().dtype == mask.dtype == torch.bool
        assert mask.shape == expected.shape == mask.to_bool().shape == mask.size()
        assert mask.ndim == mask.dim() == expected.ndim
        assert mask.numel() == expected.numel()
        assert torch.equal(mask.to_bool(), expected)
        assert mask.to_bool() is mask.to_bool()

    @quick
    @given(st.data())
    def test_the_predicate_agrees_with_the_materialised_form_at_any_positions(self, data):
        mask, expected = data.draw(self.cases())
        if not expected.numel():
            return
        index = tuple(
            torch.tensor(data.draw(st.lists(st.integers(0, s - 1), min_size=3, max_size=3))) for s in mask.shape
        )
        answer = mask._structure.predicate(*index)
        assert torch.equal(answer.expand(3) if index else answer, expected[index])

    def test_it_cannot_be_changed(self):
        @quick
        @given(self.cases())
        def check(case):
            with pytest.raises(AttributeError, match="immutable"):
                case[0].shape = (1,)
            with pytest.raises(AttributeError, match="immutable"):
                del case[0]._bits

        check()

    # -- algebra -------------------------------------------------------------------------------------------------------
    @quick
    @given(st.data(), st.sampled_from(sorted(OPERATORS)))
    def test_algebra_agrees_with_plain_bool_tensors(self, data, symbol):
        mask, expected = data.draw(self.cases())
        other, plain = data.draw(partners(tuple(expected.shape)))
        ours, theirs = OPERATORS[symbol]
        for got, want in (
            (ours(mask, other), theirs(expected, plain)),
            (ours(other, mask), theirs(plain, expected)),
            (ours(mask, plain), theirs(expected, plain)),
            (ours(plain, mask), theirs(plain, expected)),
        ):
            assert isinstance(got, Mask)
            assert got.shape == want.shape
            assert got.count() == int(want.sum())
            assert torch.equal(got.to_bool(), want)

    @quick
    @given(st.data())
    def test_the_complement_keeps_what_was_dropped(self, data):
        mask, expected = data.draw(self.cases())
        assert torch.equal((~mask).to_bool(), ~expected)
        assert torch.equal((~~mask).to_bool(), expected)
        assert (~mask).count() == expected.numel() - int(expected.sum())
        assert (mask & ~mask).is_empty
        assert (mask | ~mask).is_full

    @quick
    @given(st.data())
    def test_two_of_a_kind_combine(self, data):
        mask, expected = data.draw(self.cases())
        for symbol, (ours, theirs) in OPERATORS.items():
            assert torch.equal(ours(mask, mask).to_bool(), theirs(expected, expected)), symbol

    # -- facts ---------------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_facts_agree_with_the_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        known = mask.facts
        assert known.count in (None, int(expected.sum()))
        count = mask.count()
        assert type(count) is int
        assert count == int(expected.sum()) == mask.facts.count
        assert mask.is_full == bool(expected.all())
        assert mask.is_empty == (not bool(expected.any()))
        if expected.numel():
            assert mask.density == count / expected.numel() == mask.facts.density
        else:
            assert math.isnan(mask.density)
            assert mask.facts.density is None
        assert torch.equal(mask.indices(), expected.nonzero().squeeze(-1) if mask.ndim == 1 else expected.nonzero())

    @quick
    @given(st.data())
    def test_facts_of_rows_agree_with_the_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        if not mask.ndim:
            return
        lengths = expected.sum(-1)
        prefix = torch.arange(expected.shape[-1]) < lengths[..., None]
        assert mask.facts.is_prefix in (None, torch.equal(prefix, expected))
        assert mask.is_prefix == torch.equal(prefix, expected) == mask.facts.is_prefix
        assert torch.equal(mask.lengths, lengths)
        assert mask.lengths.is_contiguous()
        assert mask.lengths is mask.lengths
        cumulative = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0)).int()
        assert torch.equal(mask.cu_seqlens, cumulative)
        packed, longest = mask.to_cu_seqlens()
        assert packed.dtype == torch.int32
        assert longest == (int(lengths.max()) if lengths.numel() else 0)

    @quick
    @given(st.data())
    def test_counts_along_dims_agree_with_sum(self, data):
        mask, expected = data.draw(self.cases())
        if not mask.ndim:
            return
        dims = data.draw(st.lists(st.integers(0, mask.ndim - 1), min_size=1, unique=True))
        keepdim = data.draw(st.booleans())
        got = mask.count(dims, keepdim=keepdim)
        assert got.dtype == torch.int64
        assert torch.equal(got, expected.sum(dims, keepdim=keepdim))
        assert torch.equal(mask.count(dims[0] - mask.ndim), expected.sum(dims[0]))
        assert torch.equal(mask.sum(dims, keepdim), expected.sum(dims, keepdim=keepdim))
        assert torch.equal(mask.any(dims, keepdim), expected.any(dims, keepdim=keepdim))
        assert torch.equal(mask.all(dims, keepdim), expected.all(dims, keepdim=keepdim))

    @quick
    @given(st.data())
    def test_sum_any_all_float_and_tolist_are_those_of_the_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        for got, want in (
            (mask.sum(), expected.sum()),
            (mask.any(), expected.any()),
            (mask.all(), expected.all()),
            (mask.float(), expected.float()),
        ):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        assert mask.sum(keepdim=True).shape == (1,) * mask.ndim
        assert mask.any(keepdim=True).shape == mask.all(keepdim=True).shape == (1,) * mask.ndim
        assert mask.tolist() == expected.tolist()

    @quick
    @given(st.data())
    def test_masks_are_found_in_dicts_and_sets_by_identity(self, data):
        mask, _ = data.draw(self.cases())
        twin = mask.clone()
        found = {mask: "mask", twin: "twin"}
        assert (found[mask], found[twin]) == ("mask", "twin")
        assert len({mask, twin, mask}) == 2
        assert mask.equals(twin)

    @quick
    @given(st.data())
    def test_counting_piece_by_piece_gives_the_same(self, data):
        mask, expected = data.draw(self.cases())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(facts, "_PIECE", 2)
            assert mask.count() == int(expected.sum())

    # -- views ---------------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_basic_indexing_agrees_with_the_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        for _ in range(2):
            key = data.draw(keys(tuple(expected.shape)))
            mask, expected = mask[key], expected[key]
            assert mask.shape == expected.shape
            assert mask.count() == int(expected.sum())
            assert torch.equal(mask.to_bool(), expected)
            assert torch.equal((~mask).to_bool(), ~expected)

    @quick
    @given(st.data())
    def test_gathering_with_tensors_and_lists_agrees_with_the_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        if not mask.ndim or not mask.shape[0]:
            return
        rows = data.draw(st.lists(st.integers(0, mask.shape[0] - 1), min_size=1, max_size=3))
        assert torch.equal(mask[rows].to_bool(), expected[rows])
        assert torch.equal(mask[torch.tensor(rows)].to_bool(), expected[rows])
        assert torch.equal(mask[mask].to_bool(), expected[expected])

    @quick
    @given(st.data())
    def test_views_agree_with_torch(self, data):
        mask, expected = data.draw(self.cases())
        ndim = mask.ndim
        order = data.draw(st.permutations(range(ndim)))
        dim = data.draw(st.integers(-ndim - 1, ndim))
        lead = data.draw(st.integers(1, 3))
        for got, want in (
            (mask.unsqueeze(dim), expected.unsqueeze(dim)),
            (mask.unsqueeze(dim).squeeze(dim), expected),
            (mask.squeeze(), expected.squeeze()),
            (mask.permute(order), expected.permute(order)),
            (mask.permute(*order).permute(*order), expected.permute(order).permute(order)),
            (mask.expand(lead, *mask.shape), expected.expand(lead, *expected.shape)),
            (mask.unsqueeze(dim).expand_as(torch.zeros(expected.unsqueeze(dim).shape)), expected.unsqueeze(dim)),
            (mask.reshape(expected.numel()), expected.reshape(-1)),
            (mask.view(1, *expected.shape, 1), expected.view(1, *expected.shape, 1)),
            (mask.flatten(), expected.flatten()),
            (mask.T, expected.permute(list(reversed(range(ndim))))),
            (mask.contiguous(), expected),
            (mask.clone(), expected),
        ):
            assert isinstance(got, Mask)
            assert got.shape == want.shape
            assert got.count() == int(want.sum())
            assert torch.equal(got.to_bool(), want)
        if ndim >= 2:
            rows = mask.expand(lead, *mask.shape).flatten(0, -2)
            assert torch.equal(rows.to_bool(), expected.expand(lead, *expected.shape).flatten(0, -2))
            assert rows.operand == "intervals" or mask._structure.along != -1 or mask.shape[-1] <= 1
            assert torch.equal(rows.reshape(lead, *mask.shape).to_bool(), expected.expand(lead, *expected.shape))
            assert torch.equal(mask.mT.to_bool(), expected.mT)
            assert torch.equal(mask.transpose(0, -1).to_bool(), expected.transpose(0, -1))
            assert torch.equal(mask.movedim(0, -1).to_bool(), expected.movedim(0, -1))
            assert torch.equal(mask.mT.lengths, expected.mT.sum(-1))

    @quick
    @given(st.data())
    def test_joins_agree_with_torch(self, data):
        mask, expected = data.draw(self.cases())
        other = data.draw(bits(tuple(expected.shape)))
        for parts, plain in (([mask, mask], [expected] * 2), ([mask, Mask(other)], [expected, other])):
            dim = data.draw(st.integers(-mask.ndim - 1, mask.ndim))
            assert torch.equal(Mask.stack(parts, dim).to_bool(), torch.stack(plain, dim))
            assert torch.equal(torch.stack(parts, dim).to_bool(), torch.stack(plain, dim))
            if mask.ndim:
                dim = data.draw(st.integers(-mask.ndim, mask.ndim - 1))
                assert torch.equal(Mask.cat(parts, dim).to_bool(), torch.cat(plain, dim))
                assert torch.equal(torch.cat(parts, dim=dim).to_bool(), torch.cat(plain, dim))
                assert Mask.cat(parts, dim).count() == sum(int(p.sum()) for p in plain)

    @quick
    @given(st.data())
    def test_iteration_gives_the_rows(self, data):
        mask, expected = data.draw(self.cases())
        if mask.ndim:
            rows = list(mask)
            assert len(rows) == len(expected)
            assert all(torch.equal(row.to_bool(), want) for row, want in zip(rows, expected, strict=True))

    # -- conversions ---------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_conversions_go_both_ways(self, data):
        mask, expected = data.draw(self.cases())
        assert torch.equal(mask.to_key_padding(), ~expected)
        assert torch.equal(mask.to_attention_mask(torch.int32), expected.int())
        assert np_equal(mask.to_numpy(), expected)
        for back in (
            Mask.from_key_padding(mask.to_key_padding()),
            Mask.from_attention_mask(mask.to_attention_mask()),
            Mask.from_additive(mask.to_additive()),
            Mask.from_additive(mask.to_additive(torch.bfloat16, value=torch.finfo(torch.bfloat16).min)),
            Mask.from_numpy(mask.to_numpy().copy()),
            Mask.from_numpy(mask.to_masked_array(torch.zeros(expected.shape))),
            Mask.from_indices(mask.indices(), tuple(mask.shape)),
            Mask(mask.to_bool()),
            Mask(mask),
        ):
            assert mask.equal(back)
            assert back.equal(expected)

    @settings(quick, max_examples=8)
    @given(st.data())
    def test_a_block_mask_goes_both_ways(self, data):
        mask, expected = data.draw(self.cases())
        if 2 <= mask.ndim <= 4 and expected.numel():
            back = Mask.from_block_mask(mask.to_block_mask(block_size=2))
            assert torch.equal(back.to_bool().squeeze(), expected.squeeze())

    # -- drawing -------------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_printing_draws_each_position_of_a_small_mask(self, data):
        mask, expected = data.draw(self.cases())
        headline, *lines = str(mask).split("\n")
        assert headline.startswith(f"Mask {tuple(expected.shape)}  {self.kind}")
        assert f"{int(expected.sum())} of {expected.numel()} kept" in headline
        if 1 <= mask.ndim <= 2 and expected.numel():
            rows = expected.view(-1, expected.shape[-1]).tolist()
            drawn = ["".join("█" if keep else "·" for keep in row) for row in rows]
            assert [line.split(" ")[-1] for line in lines[:-1]] == drawn
            assert lines[-1] == "█ kept  · dropped"
        assert mask._repr_html_().count("<div") == mask._repr_html_().count("</div>")

    # -- carrying it around --------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_copies_and_pickles_keep_the_same_positions(self, data):
        mask, expected = data.draw(self.cases())
        mask.count(), mask.to_bool()
        copies = [copy.copy(mask), copy.deepcopy(mask), _pytree.tree_map(lambda t: t.clone(), mask)]
        if self.picklable:
            copies.append(pickle.loads(pickle.dumps(mask)))
        for other in copies:
            assert other is not mask
            assert not other._cache
            assert other.facts.kind == mask.facts.kind
            assert torch.equal(other.to_bool(), expected)

    picklable = True

    @quick
    @given(st.data())
    def test_a_pytree_of_masks_has_their_tensors_as_leaves(self, data):
        mask, expected = data.draw(self.cases())
        leaves, spec = _pytree.tree_flatten({"mask": mask})
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        assert spec == _pytree.tree_structure({"mask": mask})
        assert torch.equal(_pytree.tree_unflatten(leaves, spec)["mask"].to_bool(), expected)
        assert len(_pytree.tree_flatten_with_path(mask)[0]) == len(leaves)

    # -- torch ---------------------------------------------------------------------------------------------------------
    @quick
    @given(st.data())
    def test_torch_takes_it_for_a_bool_tensor(self, data):
        mask, expected = data.draw(self.cases())
        x = torch.arange(float(expected.numel())).view(expected.shape) + 1
        assert torch.equal(x[mask], x[expected])
        assert torch.equal(x[..., None][mask], x[..., None][expected])
        assert torch.equal(torch.where(mask, x, -x), torch.where(expected, x, -x))
        assert torch.equal(x.masked_fill(mask, 0.0), x.masked_fill(expected, 0.0))
        assert torch.equal(x.clone().masked_fill_(mask, 0.0), x.masked_fill(expected, 0.0))
        assert torch.equal(x.masked_select(mask), x[expected])
        assert torch.equal(torch.masked_select(x, mask), x[expected])
        assert torch.equal(torch.stack([x, x])[:, mask], torch.stack([x, x])[:, expected])
        assert torch.equal(torch.logical_not(mask), ~expected)
        assert torch.equal(torch.any(mask), expected.any())
        written = x.clone()
        written[mask] = 0.0
        assert torch.equal(written, x.masked_fill(expected, 0.0))


def np_equal(array: object, expected: Tensor) -> bool:
    return torch.equal(torch.from_numpy(array.copy()), expected)
