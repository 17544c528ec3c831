"""Random sparse weights, and what their products are in dense float64."""

from __future__ import annotations

import torch

from maskwise.ops.linear import SparseLayout, sparse_linear

#: Sums of some hundred products, each rounded once: about sqrt(n) roundings, relative to the largest result.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}


def block_mask(outputs, inputs, block, density, seed=0):
    """A mask that keeps whole blocks, each with this probability."""
    generator = torch.Generator().manual_seed(seed)
    height, width = -(-outputs // block[0]), -(-inputs // block[1])
    bits = torch.rand(height, width, generator=generator) < density
    return bits.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:outputs, :inputs]


def step(x, weight, mask, bias, above, block):
    """The output and the gradients of x, values and bias."""
    layout = SparseLayout.from_mask(mask, block)
    x = x.detach().requires_grad_()
    values = layout.gather(weight).detach().requires_grad_()
    leaves = [x, values] if bias is None else [x, values, bias.detach().requires_grad_()]
    out = sparse_linear(x, values, layout, leaves[2] if bias is not None else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, above)]


def truth(x, weight, mask, bias, above, block):
    """The same in dense float64."""
    layout = SparseLayout.from_mask(mask, block)
    x, above = x.double(), above.double()
    kept = torch.where(mask, weight.double(), 0.0)
    rows, columns = above.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
    found = [x @ kept.T, above @ kept, layout.gather(rows.T @ columns)]
    if bias is not None:
        found[0] = found[0] + bias.double()
        found.append(rows.sum(0))
    return found


def assert_true(found, expected, dtype):
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype is dtype
        assert mine.shape == exact.shape
        if exact.numel():
            scale = float(exact.abs().max())
            torch.testing.assert_close(mine.double(), exact, rtol=0.0, atol=TOLERANCE[dtype] * scale + 1e-30)


def inputs(batch, inputs, outputs, dtype, seed=0):
    """X, weight, bias and the gradient from above."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, inputs), (outputs, inputs), (outputs,), (batch, outputs))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
