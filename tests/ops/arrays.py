"""Random masked inputs for hypothesis: any shape, stride, broadcast and dims; masks of bits and of intervals."""

from __future__ import annotations

import hypothesis.strategies as st
import torch

from maskwise import Mask


def _lengths(draw, rows, n, side):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return Mask.from_lengths(torch.randint(0, n + 1, (rows,), generator=generator), n, side=side)


#: Masks of (rows, n) that are intervals, by origin.
ORIGINS = {
    "lengths": lambda draw, rows, n: _lengths(draw, rows, n, "right"),
    "left lengths": lambda draw, rows, n: _lengths(draw, rows, n, "left"),
    "causal": lambda draw, rows, n: Mask.causal(rows, n, offset=draw(st.integers(-3, 3))),
    "window": lambda draw, rows, n: Mask.window(rows, draw(st.integers(0, 3)), draw(st.integers(0, 3)), k=n),
    "segments": lambda draw, rows, n: Mask.from_segments(torch.arange(max(rows, n)) // 3 - 1)[:rows, :n],
    "full": lambda draw, rows, n: Mask.full((rows, n)),
    "none": lambda draw, rows, n: Mask.none((rows, n)),
}


@st.composite
def interval_masks(draw, shape, parts=2):
    """A mask of intervals that broadcasts to a shape: an origin, through any views, perhaps AND another.

    Slices of larger masks have bounds outside of the row, and ANDs starts after their ends.
    """
    if len(shape) == 1:
        return draw(interval_masks((1, *shape), parts)).expand(1, *shape)[0]
    i = draw(st.integers(0, len(shape) - 2))
    j = draw(st.integers(i + 1, len(shape) - 1))
    sizes = [shape[i], shape[j]]
    is_transposed = draw(st.booleans())
    cut = draw(st.sampled_from([(0, 0, 0), (0, 3, 0), (1, 2, 4)]))
    rows, n = sizes[::-1] if is_transposed else sizes
    mask = ORIGINS[draw(st.sampled_from(sorted(ORIGINS)))](draw, rows + cut[0], n + cut[1] + cut[2])
    mask = mask[cut[0] :, cut[1] : cut[1] + n]
    mask = mask.T if is_transposed else mask
    if sizes[0] and draw(st.integers(0, 3)) == 0:
        mask = mask[-1][None]
    for _ in range(i + 1, j):
        mask = mask.unsqueeze(-2)
    for _ in range(j + 1, len(shape)):
        mask = mask.unsqueeze(-1)
    if draw(st.integers(0, 3)) == 0:
        mask = mask.expand(shape)
    return mask & draw(interval_masks(shape, parts - 1)) if parts > 1 and draw(st.booleans()) else mask


@st.composite
def masked_inputs(draw, dtype=torch.float32, max_dims=4):
    """(x, mask, dim, keepdim): x may be transposed, stepped or expanded; the mask may broadcast, and be intervals."""
    shape = draw(st.lists(st.integers(0, 9) | st.sampled_from([1, 17, 40]), min_size=1, max_size=max_dims))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(shape, generator=generator).mul(4).to(dtype)
    order = draw(st.permutations(range(len(shape))))
    x = x.permute(*order)
    if draw(st.booleans()):
        x = x[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()) and x.dim() > 1:
        x = x[:1].expand(draw(st.integers(1, 5)), *x.shape[1:]) if x.shape[0] else x
    dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True, max_size=x.dim()))
    dim = draw(st.sampled_from([None, tuple(dims) or None, dims[0] if dims else -1]))
    keepdim = draw(st.booleans())
    if draw(st.booleans()):
        return x, draw(interval_masks(tuple(x.shape))), dim, keepdim
    mask_shape = [1 if draw(st.booleans()) and draw(st.booleans()) else size for size in x.shape]
    mask_shape = mask_shape[draw(st.integers(0, x.dim() - 1)) if draw(st.booleans()) else 0 :]
    mask = torch.rand(mask_shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    if draw(st.booleans()) and mask.dim() > 1:
        mask = mask.transpose(0, -1).contiguous().transpose(0, -1)
    return x, mask, dim, keepdim
