"""Products with kept 16 x 16 blocks: the Triton kernels against the dense product in float64."""

import pytest
import torch

from maskwise.ops.linear import SparseLayout, delegated, gpu, multiply, sparse_linear


def sparse(outputs, inputs, dtype, density=0.5):
    """A dense weight of kept blocks, its values, starts and columns; blocks at the edges are filled up with zeros."""
    down, along = -(-outputs // 16), -(-inputs // 16)
    kept = torch.rand(down, along) < density
    kept[0] = False
    rows, columns = kept.nonzero(as_tuple=True)
    dense = torch.zeros(down * 16, along * 16, dtype=dtype)
    dense[:outputs, :inputs] = torch.randn(outputs, inputs).to(dtype)
    blocks = dense.reshape(down, 16, along, 16).transpose(1, 2)
    dense = (blocks * kept[..., None, None]).transpose(1, 2).reshape(down * 16, along * 16)[:outputs, :inputs]
    starts = torch.nn.functional.pad(torch.bincount(rows, minlength=down).cumsum(0), (1, 0)).int()
    return dense, blocks[rows, columns].reshape(-1), starts, columns.int()


SHAPES = [(1, 16, 16), (7, 40, 33), (129, 48, 127)]


# The interpreter multiplies the bits of bfloat16, not its values; float16 is rounded in the same places.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "outputs", "inputs"), SHAPES)
def test_the_product_is_the_dense_one(batch, outputs, inputs, dtype):
    dense, values, starts, columns = sparse(outputs, inputs, dtype)
    x, bias = torch.randn(batch, inputs).to(dtype), torch.randn(outputs).to(dtype)
    out = gpu.product(x, values, starts, columns, bias, outputs, 16, 16)
    torch.testing.assert_close(out, torch.nn.functional.linear(x.double(), dense.double(), bias.double()).to(dtype))


# The interpreter multiplies the bits of bfloat16, not its values; float16 is rounded in the same places.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "outputs", "inputs"), SHAPES)
def test_the_gradient_of_the_weight_is_that_of_kept_blocks(batch, outputs, inputs, dtype):
    _, values, starts, columns = sparse(outputs, inputs, dtype)
    x, grad = torch.randn(batch, inputs).to(dtype), torch.randn(batch, outputs).to(dtype)
    of_weight = torch.nn.functional.pad(grad.double().mT @ x.double(), (0, -inputs % 16, 0, -outputs % 16))
    blocks = of_weight.reshape(-(-outputs // 16), 16, -(-inputs // 16), 16).transpose(1, 2)
    rows = torch.repeat_interleave(torch.arange(starts.shape[0] - 1), starts.diff().long())
    mine = gpu.sampled(grad, x, starts, columns, 16, 16)
    assert mine.shape == values.shape
    # 129 terms of either sign are added up in float32, and near zero nothing is left but their rounding.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(mine, blocks[rows, columns.long()].reshape(-1).to(dtype), **tolerance)


def test_a_sparse_linear_layer_of_blocks_agrees_with_the_dense_one_in_all_its_gradients():
    bits = (torch.rand(3, 4) < 0.5).repeat_interleave(16, 0).repeat_interleave(16, 1)
    layout = SparseLayout.from_mask(bits, (16, 16))
    weight, bias = torch.randn(48, 64), torch.randn(48)
    results = []
    for sparse_one in (True, False):
        x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64).requires_grad_()
        values = layout.gather(weight).requires_grad_()
        b = bias.clone().requires_grad_()
        out = (
            sparse_linear(x, values, layout, b)
            if sparse_one
            else torch.nn.functional.linear(x, layout.dense(values), b)
        )
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (x, values, b))))
    # Sums of up to 64 float32 of size 10.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_places_of_64_bits_give_the_same(monkeypatch):
    dense, values, starts, columns = sparse(40, 33, torch.float32)
    x, grad = torch.randn(7, 33), torch.randn(7, 40)
    narrow = gpu.product(x, values, starts, columns, None, 40, 16, 16), gpu.sampled(grad, x, starts, columns, 16, 16)
    monkeypatch.setattr(gpu, "MANY", 1)
    wide = gpu.product(x, values, starts, columns, None, 40, 16, 16), gpu.sampled(grad, x, starts, columns, 16, 16)
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(wide[0], x @ dense.mT)


@pytest.mark.parametrize(("blocks", "wide"), [(2**23 - 1, False), (2**23, True)])
def test_so_many_values_that_their_places_need_64_bits_are_told_by_their_number(blocks, wide, monkeypatch):
    # 2**23 blocks of 256 values: neither the input nor the output, nor the blocks themselves, are that many.
    x, grad = torch.empty(64, 32, device="meta"), torch.empty(64, 48, device="meta")
    starts, columns = (torch.empty(size, dtype=torch.int32, device="meta") for size in (4, blocks))
    values = torch.empty(blocks * 256, device="meta")
    told = []
    monkeypatch.setattr(gpu, "launch", lambda kernel, programs, arguments, **options: told.append(arguments["WIDE"]))
    gpu.product(x, values, starts, columns, None, 48, 16, 16)
    gpu.sampled(grad, x, starts, columns, 16, 16)
    assert told == [wide, wide]


# -- torch's own kernel of blocks --------------------------------------------------------------------------------------
@pytest.fixture
def torchs_kernel(monkeypatch):
    """Torch's kernel under the interpreter: it is there where torch finds a device, whose grid is a list."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    from torch.sparse import _triton_ops

    own = _triton_ops.launch_kernel
    monkeypatch.setattr(
        _triton_ops,
        "launch_kernel",
        lambda kernel, *rest: own(lambda grid, *operands: kernel(tuple(grid), *operands), *rest),
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("batch", [1, 37, 64])
def test_torchs_kernel_of_blocks_gives_the_dense_product(batch, has_bias, torchs_kernel):
    dense, values, starts, columns = sparse(48, 80, torch.float16)
    x = torch.randn(batch, 80).half()
    bias = torch.randn(48).half() if has_bias else None
    out = delegated.product(x, values, starts, columns, bias, 48, 16, 16)
    assert out.shape == (batch, 48)
    assert out.is_contiguous()
    expected = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out, expected.half())


def test_the_gradients_around_torchs_kernel_are_those_of_the_dense_product(torchs_kernel):
    bits = (torch.rand(3, 4) < 0.5).repeat_interleave(16, 0).repeat_interleave(16, 1)
    layout = SparseLayout.from_mask(bits, (16, 16))
    weight = torch.randn(48, 64).half()
    results = []
    for is_delegated in (True, False):
        x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64).half().requires_grad_()
        values = layout.gather(weight).requires_grad_()
        if is_delegated:
            out = multiply(x, values, None, layout, is_delegated=True)
        else:
            out = torch.nn.functional.linear(x, layout.dense(values))
        results.append((out.detach(), *torch.autograd.grad(out.sum(), (x, values))))
    # Sums of up to 64 halves, added up in another order.
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
