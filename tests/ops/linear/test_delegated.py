"""Torch's own products with a sparse weight: their values on the CPU, and where they are chosen on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import maskwise as mw
from maskwise.nn import sparse_linear
from maskwise.ops.linear import Product, SparseLayout, delegated, is_two_of_four, multiply
from maskwise.ops.linear.layouts import BLOCKS
from maskwise.plan import dispatch
from maskwise.plan.dispatch import Facts
from tests.gpu.guard import cuda_without_cuda

HALF = torch.bfloat16


def blocks_of(outputs, inputs, block, density):
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(outputs // block[0], inputs // block[1], generator=generator) < density
    kept[0] = False
    return kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


# On the CPU torch's product has float32; the kernels of a GPU have halves, too (tests/gpu/interpreted/test_linear.py).
@pytest.mark.parametrize("block", [(1, 1), (16, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_product_and_its_gradients_are_those_of_the_dense_weight(block, has_bias):
    # Rows of 304 columns are cut into ranges.
    layout = SparseLayout.from_mask(blocks_of(48, 304, block, 0.3), block)
    results = []
    for is_delegated in (True, False):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 5, 304, generator=generator).requires_grad_()
        values = layout.gather(torch.randn(48, 304, generator=generator)).requires_grad_()
        bias = torch.randn(48, generator=generator).requires_grad_() if has_bias else None
        if is_delegated:
            out = multiply(x, values, bias, layout, is_delegated=True)
        else:
            out = torch.nn.functional.linear(x, layout.dense(values), bias)
        leaves = [x, values, *([bias] if has_bias else [])]
        results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)))
    # Sums of up to 304 float32.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_dropped_weights_do_not_reach_the_product_of_csr():
    layout = SparseLayout.from_mask(torch.tensor([[True, False], [False, False]]))
    out = multiply(torch.tensor([[2.0, float("nan")]]), torch.tensor([3.0]), None, layout, is_delegated=True)
    assert out.tolist() == [[6.0, 0.0]]


def test_a_mask_of_two_of_four_is_recognised():
    bits = torch.tensor([[True, False, True, False, False, True, True, False]])
    assert is_two_of_four(bits)
    assert is_two_of_four(bits & (torch.arange(8) > 0))
    assert not is_two_of_four(bits.roll(1, 1) | bits)
    assert not is_two_of_four(torch.tensor([[True, True, True, False, False, True, False, False]]))
    assert not is_two_of_four(bits[:, :6])


# -- the choice --------------------------------------------------------------------------------------------------------
def planned(batch, outputs, inputs, density, block=(1, 1), dtype=HALF, **more):
    """The plan of a SparseLinear on a GPU."""
    kept = round(density * outputs * inputs)
    grad, contiguous = more.pop("grad", False), more.pop("contiguous", True)
    detail = Product(batch, inputs, outputs, block, **more)
    facts = Facts(
        "SparseLinear", (outputs, inputs), dtype, "cuda", grad=grad, kept=kept, contiguous=contiguous, detail=detail
    )
    return dispatch.decide(facts, sparse_linear._ROUTES).plan


@pytest.fixture
def a100(monkeypatch):
    """What torch knows of an A100, which is not here."""
    monkeypatch.setattr("maskwise.ops.torch_private._device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(delegated, "_backend", lambda: "CUSPARSELT")


@pytest.mark.parametrize(
    ("route", "arguments"),
    [
        ("plain", {"density": 0.1}),
        ("plain", {"density": 0.06}),
        ("csr", {"density": 0.001}),
        ("csr", {"density": 0.01, "dtype": torch.float32}),
        ("plain", {"density": 0.06, "dtype": torch.float32}),
        ("plain", {"density": 0.5}),
        ("semi_structured", {"density": 0.5, "is_two_of_four": True}),
        ("plain", {"density": 0.5, "is_two_of_four": True, "grad": True}),
        ("plain", {"density": 0.5, "is_two_of_four": True, "dtype": torch.float32}),
        ("bsr", {"density": 0.2, "block": (16, 16)}),
        ("plain", {"density": 0.9, "block": (16, 16)}),
        ("sparse", {"density": 0.1, "block": (16, 16), "dtype": torch.float32}),
    ],
)
def test_a_large_product_takes_the_route_that_its_pattern_allows(a100, route, arguments):
    plan = planned(8192, 4096, 4096, **arguments)
    assert plan.route == route, plan
    assert {each.route for each in plan.refused} <= {"sparse", "bsr", "csr", "semi_structured", "plain"}


def test_a_shape_that_torch_has_not_tuned_takes_our_kernel(a100):
    assert planned(8192, 4096, 4096, 0.1, (16, 16)).route == "bsr"
    plan = planned(8192, 4096, 4112, 0.1, (16, 16))
    assert plan.route == "sparse"
    assert ("bsr", "torch has tuned its kernel for other devices or shapes") in {
        (each.route, each.reason) for each in plan.refused
    }


def test_a_small_product_is_dense_since_calls_of_torch_take_longer(a100):
    assert planned(16, 256, 256, 0.5, is_two_of_four=True).route == "plain"
    assert planned(16, 256, 256, 0.2, (16, 16)).route == "plain"


def test_strides_and_shapes_are_in_the_prediction(a100):
    dense, strided = (planned(8192, 4096, 4096, 0.2, (16, 16), contiguous=c).microseconds for c in (True, False))
    # x is copied: 2 x 64 MiB at the rate of memory.
    assert strided - dense > 2 * 2 * 8192 * 4096 / 1_500_000
    times = [planned(batch, 4096, 4096, 0.5, is_two_of_four=True).microseconds for batch in (4096, 8192, 16384)]
    assert times == sorted(times)


def test_without_sparse_tensor_cores_the_reason_is_reported(a100, monkeypatch):
    monkeypatch.setattr(delegated, "_backend", lambda: None)
    plan = planned(8192, 4096, 4096, 0.5, is_two_of_four=True)
    assert plan.route == "plain"
    assert "this device has neither cuSPARSELt nor the CUTLASS kernels of sm_8x" in {e.reason for e in plan.refused}


@pytest.mark.parametrize("block", BLOCKS)
def test_on_the_cpu_nothing_is_delegated(block):
    layer = mw.nn.SparseLinear(64, 64, density=0.05, block=block)
    plan = mw.plan(layer, torch.randn(32, 64))
    assert {plan.route, *(each.route for each in plan.refused)} <= {"sparse", "plain"}


# -- on tensors without data -------------------------------------------------------------------------------------------
def as_fake(module):
    """A module with fake CUDA tensors in the place of its own."""
    for each in module.modules():
        for name, tensor in [*each.__dict__["_parameters"].items()]:
            if tensor is not None:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                each.__dict__["_parameters"][name] = torch.nn.Parameter(fake, requires_grad=False)
        for name, tensor in [*each.__dict__["_buffers"].items()]:
            if tensor is not None:
                each.__dict__["_buffers"][name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    return module


@pytest.mark.parametrize(("block", "density", "route"), [((1, 1), 0.001, "csr"), ((16, 16), 0.1, "bsr")])
def test_a_layer_reads_no_data_on_a_device(a100, block, density, route):
    layer = mw.nn.SparseLinear(4096, 4096, density=density, block=block, dtype=HALF)
    with cuda_without_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        layer = as_fake(layer)
        with mw.force(route), torch.no_grad():
            out = layer(torch.empty(3, 16, 4096, dtype=HALF, device="cuda"))
    assert (out.shape, out.device.type) == ((3, 16, 4096), "cuda")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_layer_of_two_of_four_is_compressed_once_and_multiplied(a100, monkeypatch):
    monkeypatch.setattr(delegated, "_backend", lambda: "CUTLASS")
    linear = torch.nn.Linear(64, 64, dtype=HALF)
    layer = mw.nn.SparseLinear.from_linear(linear, mw.nn.gates.NM(2, 4).mask(linear.weight))
    assert layer._is_two_of_four
    with cuda_without_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        layer = as_fake(layer)
        with mw.force("semi_structured"), torch.no_grad():
            out = layer(torch.empty(5, 64, dtype=HALF, device="cuda"))
            (_, first), _ = layer._cached, layer(torch.empty(5, 64, dtype=HALF, device="cuda"))
        assert layer._cached[1] is first
    assert isinstance(first, torch.sparse.SparseSemiStructuredTensor)
    assert (out.shape, out.device.type, out.dtype) == ((5, 64), "cuda", HALF)


def test_what_a_gate_of_two_of_four_keeps_is_compressed_without_loss():
    from torch.sparse import _semi_structured_conversions as conversions

    weight = torch.randn(64, 64, dtype=HALF)
    kept = mw.nn.gates.NM(2, 4)(weight).detach()
    assert torch.equal(
        conversions.sparse_semi_structured_to_dense_cutlass(
            *conversions.sparse_semi_structured_from_dense_cutlass(kept)
        ),
        kept,
    )
