"""Graphs compiled for a GPU contain our kernels, which Inductor compiles into its own code, and no opaque call."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

from maskwise.ops.gpu.traced import flatten
from maskwise.ops.linear.triton import product_kernel
from maskwise.ops.select.rows import pack_capacity, unpack_capacity
from maskwise.ops.select.triton import pack_kernel
from tests.gpu.inductor import compiled_graph

ops = torch.ops.maskwise


def empty(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def blocks():
    """The operands of a product with six blocks of 16 x 16, (64, 64)."""
    indices = [empty(n, dtype=torch.int32) for n in (5, 6)]
    return empty(64, 64), empty(6 * 256), *indices


def linear(x, values, starts, columns):
    return ops.linear_sparse(x, values, None, starts, columns, starts, columns, columns, 64, 16, 16).relu()


def through_rows(x, mask):
    return unpack_capacity(pack_capacity(x * 2, mask, 100).relu(), mask, x.new_zeros(()))


CALLS = {
    "linear": (linear, blocks(), ["product_kernel"]),
    "pack": (through_rows, (empty(8, 16, 32), empty(8, 16, dtype=torch.bool)), ["pack_kernel", "unpack_kernel"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_inductor_compiles_our_kernels_into_its_code(name):
    call, operands, kernels = CALLS[name]
    graph, code = compiled_graph(call, *operands)
    assert graph.count("triton_kernel_wrapper_functional(") == len(kernels)
    assert "maskwise" not in graph
    for kernel in kernels:
        # Its source, as one of the program's own kernels, and its launch.
        assert re.search(rf"^def {kernel}", code, flags=re.M), kernel
        assert re.search(rf"^\s+{kernel}\w*\.run\(", code, flags=re.M), kernel
    assert "torch.ops.maskwise" not in code
    # What is read of a mask is no write to it: a graph that writes to its inputs is not captured as a CUDA graph.
    (returned,) = re.findall(r"return \((.*)\)", graph)[-1:] or re.findall(r"return (.*)", graph)[-1:]
    assert len([each for each in returned.strip("()[] ").split(",") if each.strip()]) == 1, graph


def test_a_kernel_with_tuples_takes_their_elements():
    arguments = {"x": 1, "outer": (2, 3), "mask_outer": (4,), "BLOCK": 8}
    flat, passed = flatten(pack_kernel, arguments | {"inner": (5,), "x_outer": (6, 7), "x_inner": (8,)})
    assert passed == {
        "x": 1, "outer_0": 2, "outer_1": 3, "mask_outer_0": 4, "BLOCK": 8, "inner_0": 5, "x_outer_0": 6,
        "x_outer_1": 7, "x_inner_0": 8,
    }  # fmt: skip
    assert flat.arg_names[:7] == ["x", "mask", "counts", "out", "outer_0", "outer_1", "inner_0"]
    assert flatten(product_kernel, {"x": 1}) == (product_kernel, {"x": 1})
