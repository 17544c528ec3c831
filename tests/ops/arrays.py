"""Random masked inputs for hypothesis: any shape, any stride, any broadcast, any dims."""

from __future__ import annotations

import hypothesis.strategies as st
import torch


@st.composite
def masked_inputs(draw, dtype=torch.float32, max_dims=4):
    """(x, mask, dim, keepdim): x may be transposed, stepped or expanded, the mask may broadcast."""
    shape = draw(st.lists(st.integers(0, 9) | st.sampled_from([1, 17, 40]), min_size=1, max_size=max_dims))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(shape, generator=generator).mul(4).to(dtype)
    order = draw(st.permutations(range(len(shape))))
    x = x.permute(*order)
    if draw(st.booleans()):
        x = x[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()) and x.dim() > 1:
        x = x[:1].expand(draw(st.integers(1, 5)), *x.shape[1:]) if x.shape[0] else x
    mask_shape = [1 if draw(st.booleans()) and draw(st.booleans()) else size for size in x.shape]
    mask_shape = mask_shape[draw(st.integers(0, x.dim() - 1)) if draw(st.booleans()) else 0 :]
    mask = torch.rand(mask_shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    if draw(st.booleans()) and mask.dim() > 1:
        mask = mask.transpose(0, -1).contiguous().transpose(0, -1)
    dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True, max_size=x.dim()))
    dim = draw(st.sampled_from([None, tuple(dims) or None, dims[0] if dims else -1]))
    return x, mask, dim, draw(st.booleans())
