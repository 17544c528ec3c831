"""Every structure under the conformance suite."""

import math
import operator

import pytest
import torch
from hypothesis import strategies as st

from maskwise.mask import Mask
from maskwise.mask.structures import Intervals
from tests.mask.conformance import Case, StructureConformance, bits, shapes


class TestDense(StructureConformance):
    kind = "dense"

    @staticmethod
    def cases():
        return shapes().flatmap(bits).map(lambda t: (Mask(t), t.clone()))


class TestConstant(StructureConformance):
    kind = "constant"

    @staticmethod
    def cases():
        def build(shape, value):
            mask = Mask.full(shape) if value else Mask.none(shape)
            return mask, torch.full(shape, value, dtype=torch.bool)

        return st.builds(build, shapes(), st.booleans())


@st.composite
def intervals(draw: st.DrawFn) -> Case:
    """Lengths on either side, causal, windows, and intersections of two of them."""
    kind = draw(st.sampled_from(["right", "left", "causal", "window", "and", "raw"]))
    if kind in ("causal", "window"):
        q, k = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        row, column = torch.arange(q)[:, None], torch.arange(k)
        if kind == "causal":
            offset = draw(st.integers(-3, 6))
            return Mask.causal(q, k, offset=offset), column <= row + offset
        left, right = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        return Mask.window(q, left, right, k=k), (column >= row - left) & (column <= row + right)
    shape = draw(shapes(min_dims=1))
    size, rows = shape[-1], math.prod(shape[:-1])
    bounds = [
        torch.tensor(draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows)), dtype=torch.int64).view(
            shape[:-1]
        )
        for _ in range(2)
    ]
    position = torch.arange(size)
    right, left = position < bounds[0][..., None], position >= size - bounds[1][..., None]
    if kind == "right":
        return Mask.from_lengths(bounds[0], size), right
    if kind == "left":
        return Mask.from_lengths(bounds[1], size, side="left"), left
    if kind == "raw":
        # Device bounds are never read, so they may lie anywhere.
        low, high = bounds[0] - 3, bounds[1] + 2
        mask = Mask._wrap(Intervals(low, high, shape, torch.device("cpu")))
        return mask, (position >= low[..., None]) & (position < high[..., None])
    return Mask.from_lengths(bounds[0], size) & Mask.from_lengths(bounds[1], size, side="left"), right & left


class TestIntervals(StructureConformance):
    kind = "intervals"
    cases = staticmethod(intervals)


class TestIndices(StructureConformance):
    kind = "indices"

    @staticmethod
    def cases():
        return shapes(min_dims=1).flatmap(bits).map(lambda t: (Mask.from_indices(t.nonzero(), tuple(t.shape)), t))


@st.composite
def segments(draw: st.DrawFn) -> Case:
    shape = draw(shapes(min_dims=1, max_dims=2))
    size = math.prod(shape)
    ids = torch.tensor(draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)), dtype=torch.int64).view(shape)
    if draw(st.booleans()):
        ids = ids.sort(-1).values
    return Mask.from_segments(ids), (ids[..., :, None] == ids[..., None, :]) & (ids != -1)[..., None]


class TestSegments(StructureConformance):
    kind = "segments"
    cases = staticmethod(segments)


class TestFunction(StructureConformance):
    kind = "function"
    picklable = False

    @staticmethod
    def cases():
        def build(shape, n):
            def kept(*index):
                return (sum(i * (d + 2) for d, i in enumerate(index)) + n) % 3 == 0

            grid = torch.meshgrid(*(torch.arange(s) for s in shape), indexing="ij")
            return Mask.from_function(kept, shape), kept(*grid)

        return st.builds(build, shapes(min_dims=1), st.integers(0, 2))


class TestCombination(StructureConformance):
    kind = "combination"

    @staticmethod
    def cases():
        def build(t, dim, op):
            lengths = torch.arange(t.shape[:-1].numel()).view(t.shape[:-1]) % (t.shape[-1] + 1)
            right = torch.arange(t.shape[-1]) < lengths[..., None]
            return op(Mask(t), Mask.from_lengths(lengths, t.shape[-1])), op(t, right)

        ops = st.sampled_from([operator.and_, operator.or_, operator.xor])
        return st.builds(build, shapes(min_dims=1).flatmap(bits), st.integers(), ops)


class TestNot(StructureConformance):
    kind = "not"

    @staticmethod
    def cases():
        return shapes(min_dims=1).flatmap(bits).map(lambda t: (~Mask.from_indices(t.nonzero(), tuple(t.shape)), ~t))


class TestView(StructureConformance):
    kind = "view"

    @staticmethod
    def cases():
        def transposed(case):
            mask, expected = case
            return mask.mT[..., ::2], expected.mT[..., ::2]

        return segments().map(transposed)


def test_a_structure_without_a_predicate_cannot_be_made():
    from maskwise.mask.structures import Structure

    with pytest.raises(TypeError, match="predicate"):
        Structure()
