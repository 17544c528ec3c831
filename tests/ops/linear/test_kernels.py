"""The kernels of the sparse product against dense float64: shapes, patterns, dtypes, threads, SIMD levels."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from maskwise.ops.backends import status
from maskwise.ops.linear import BLOCKS, SparseLayout, reference, sparse_linear
from tests.ops.linear.truth import assert_true, block_mask, inputs, step, truth
from tests.simd import SIMD_LEVELS

pytestmark = pytest.mark.kernel

every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@both_dtypes
@every_block
@pytest.mark.parametrize(
    ("batch", "width", "height"),
    [(1, 300, 70), (2, 16, 16), (7, 37, 21), (16, 64, 48), (33, 1700, 50), (64, 96, 130), (130, 800, 33), (300, 17, 9)],
)
def test_output_and_gradients_are_those_of_the_dense_product(batch, width, height, block, dtype):
    x, weight, bias, above = inputs(batch, width, height, dtype)
    mask = block_mask(height, width, block, 0.3)
    found = step(x, weight, mask, bias, above, block)
    assert_true(found, truth(x, weight, mask, bias, above, block), dtype)


@every_block
@given(
    batch=st.integers(0, 70),
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
    empty=st.sampled_from(["nothing", "rows", "columns"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_and_pattern_agrees_with_the_dense_product(
    block, batch, width, height, density, empty, with_bias, seed
):
    x, weight, bias, above = inputs(batch, width, height, torch.float32, seed)
    mask = block_mask(height, width, block, density, seed)
    if empty == "rows":
        mask[: height // 2 // 16 * 16] = False
    elif empty == "columns":
        mask[:, : width // 2 // 16 * 16] = False
    given_bias = bias if with_bias else None
    found = step(x, weight, mask, given_bias, above, block)
    assert_true(found, truth(x, weight, mask, given_bias, above, block), torch.float32)


@every_block
@pytest.mark.parametrize("batch", [1, 65, 700])
def test_the_bits_do_not_depend_on_the_number_of_threads(batch, block):
    x, weight, bias, above = inputs(batch, 900, 300, torch.float32)
    mask = block_mask(300, 900, block, 0.2)
    runs = []
    for threads in (1, 7, 2):
        torch.set_num_threads(threads)
        runs.append(step(x, weight, mask, bias, above, block))
    for run in runs[1:]:
        # The gradient of the bias is torch's own sum.
        for mine, first in zip(run[:3], runs[0][:3], strict=True):
            assert torch.equal(mine, first)


@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@both_dtypes
@every_block
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("batch", [1, 5, 77])
def test_every_simd_level_that_this_cpu_has_agrees_with_the_dense_product(batch, level, block, dtype):
    x, weight, bias, above = inputs(batch, 83, 45, dtype)
    mask = block_mask(45, 83, block, 0.4)
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        found = step(x, weight, mask, bias, above, block)
    finally:
        torch.ops.maskwise.simd_level(before)
    assert_true(found, truth(x, weight, mask, bias, above, block), dtype)


@every_block
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_an_input_that_is_not_finite_reaches_only_outputs_that_keep_a_weight_for_it(batch, block):
    x, weight, _, _ = inputs(batch, 64, 48, torch.float32)
    mask = block_mask(48, 64, block, 0.3)
    layout = SparseLayout.from_mask(mask, block)
    x[:, 5] = torch.nan
    out = sparse_linear(x, layout.gather(weight), layout)
    assert torch.equal(out.isnan(), mask[:, 5].expand(batch, 48))


def test_a_batch_larger_than_the_scratch_memory_is_done_in_parts():
    # Strips of 64 rows of 4096 inputs: 16 of them fill the scratch memory.
    batch, width, height = 64 * 16 + 70, 4096, 8
    x, weight, bias, above = inputs(batch, width, height, torch.float32)
    mask = block_mask(height, width, (1, 1), 0.01)
    found = step(x, weight, mask, bias, above, (1, 1))
    assert_true(found, truth(x, weight, mask, bias, above, (1, 1)), torch.float32)


@every_block
def test_inputs_of_any_strides_and_leading_dims_give_the_same(block):
    x, weight, bias, _ = inputs(24, 32, 16, torch.float32)
    mask = block_mask(16, 32, block, 0.5)
    layout = SparseLayout.from_mask(mask, block)
    values = layout.gather(weight)
    expected = sparse_linear(x, values, layout, bias)
    forms = [x.T.contiguous().T, x.repeat(1, 2)[:, :32], torch.stack([x, x], -1)[..., 0]]
    for form in forms:
        assert not form.is_contiguous()
        assert torch.equal(sparse_linear(form, values, layout, bias), expected)
    assert torch.equal(sparse_linear(x.reshape(2, 3, 4, 32), values, layout, bias), expected.reshape(2, 3, 4, 16))
    assert torch.equal(sparse_linear(x.reshape(2, 12, 32)[:0], values, layout, bias), expected.new_empty(0, 12, 16))


def test_a_gradient_that_is_expanded_or_transposed_is_read_right():
    x, weight, bias, above = inputs(20, 30, 40, torch.float32)
    mask = block_mask(40, 30, (1, 1), 0.3)
    for form in (torch.ones(()).expand(20, 40), above.T.contiguous().T):
        found = step(x, weight, mask, bias, form, (1, 1))
        assert_true(found, truth(x, weight, mask, bias, form, (1, 1)), torch.float32)


@every_block
def test_the_registered_ops_pass_opcheck(block):
    x, weight, bias, above = inputs(6, 20, 18, torch.float32)
    layout = SparseLayout.from_mask(block_mask(18, 20, block, 0.5), block)
    values, back = layout.gather(weight), layout.transposed
    ops = torch.ops.maskwise
    torch.library.opcheck(ops.linear_product, (x, values, layout.starts, layout.columns, bias, 18, *block))
    torch.library.opcheck(ops.linear_sampled, (above, x, layout.starts, layout.columns, *block))
    leaves = [tensor.clone().requires_grad_() for tensor in (x, values, bias)]
    indices = (layout.starts, layout.columns, back.starts, back.columns, back.order)
    torch.library.opcheck(ops.linear_sparse, (*leaves, *indices, 18, *block))


@every_block
def test_gradients_of_the_reference_are_those_of_finite_differences_twice(block):
    x, weight, bias, _ = (tensor[:3] for tensor in inputs(3, 5, 18, torch.float64))
    _, weight, bias, _ = inputs(3, 5, 18, torch.float64)
    layout = SparseLayout.from_mask(block_mask(18, 5, block, 0.5), block)
    inside = layout.positions >= 0
    leaves = [tensor.requires_grad_() for tensor in (x, layout.gather(weight)[inside], bias)]

    def call(x, values, bias):
        return sparse_linear(x, values.new_zeros(layout.count).masked_scatter(inside, values), layout, bias)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_second_derivative_goes_through_the_kernel_route_too():
    x, weight, _, above = inputs(4, 9, 7, torch.float32)
    layout = SparseLayout.from_mask(block_mask(7, 9, (1, 1), 0.5))
    values = layout.gather(weight).requires_grad_()
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(sparse_linear(x, values, layout), x, above, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), values)
    dense = layout.dense(values.detach()).double().requires_grad_()
    (exact,) = torch.autograd.grad((above.double() @ dense).square().sum(), dense)
    torch.testing.assert_close(second.double(), layout.gather(exact), rtol=1e-5, atol=1e-5)


@every_block
def test_a_layout_gives_its_mask_back_and_scatters_what_it_gathers(block):
    for height, width, density in [(48, 64, 0.3), (17, 33, 0.5), (5, 3, 1.0), (20, 20, 0.0)]:
        mask = block_mask(height, width, block, density)
        layout = SparseLayout.from_mask(mask, block)
        assert torch.equal(layout.to_bool(), mask)
        weight = torch.randn(height, width)
        assert torch.equal(layout.dense(layout.gather(weight)), torch.where(mask, weight, 0.0))
        assert torch.equal(reference.layout_of(layout.starts, layout.columns, height, width, *block).to_bool(), mask)
