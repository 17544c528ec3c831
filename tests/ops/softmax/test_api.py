"""Softmax and normalization beyond the laws: torch's functions, empty slices, gradients, ops, errors."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.plan.dispatch import force
from tests.ops.softmax.functions import CALLS, NAMES

ROUTES = ("plain", "kernel")
KEPT = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_with_everything_kept_each_is_torchs_own_function(dim, route):
    x = torch.randn(6, 50, 4)
    with force(route):
        torch.testing.assert_close(mw.softmax(x, KEPT, dim), F.softmax(x, dim))
        torch.testing.assert_close(mw.softmin(x, KEPT, dim), F.softmin(x, dim))
        torch.testing.assert_close(mw.log_softmax(x, KEPT, dim), F.log_softmax(x, dim))
        for p in (2.0, 1.0, 0.5, 0.0, 3, math.inf, -math.inf):
            torch.testing.assert_close(mw.normalize(x, KEPT, p, dim), F.normalize(x, p, dim))
        torch.testing.assert_close(mw.standardize(x, KEPT, (1, 2)), F.layer_norm(x, (50, 4)))
    torch.testing.assert_close(mw.normalize(x, KEPT), F.normalize(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin", "normalize"])
def test_agrees_with_torch_masked_on_torchs_own_samples_and_gradients_stay_finite(name):
    from torch.testing._internal.opinfo.definitions._masked import op_db

    (op,) = [op for op in op_db if op.name == f"masked.{name}"]
    seen = 0
    for sample in op.sample_inputs("cpu", torch.float64):
        kwargs = dict(sample.kwargs)
        bits = kwargs.pop("mask", None)
        x = sample.input
        mask = torch.ones_like(x, dtype=torch.bool) if bits is None else bits
        if x.is_sparse or x.layout is not torch.strided or mask.dim() > x.dim():
            continue
        theirs = op.op(x, *sample.args, **kwargs, mask=bits)
        poisoned = torch.where(mask, x, math.nan).requires_grad_()
        mine = (
            CALLS[name](poisoned, mask, *sample.args, **kwargs)
            if name != "normalize"
            else mw.normalize(poisoned, mask, *sample.args, **kwargs)
        )
        kept = mask.expand(x.shape)
        torch.testing.assert_close(mine[kept], theirs[kept])
        (gradient,) = torch.autograd.grad(mine[kept].sum(), poisoned)
        assert gradient.isfinite().all()
        seen += 1
    assert seen > 10


def test_standardize_agrees_with_numpy_ma():
    x, mask = torch.randn(7, 60, dtype=torch.float64), torch.rand(7, 60) < 0.5
    mask[:2] = mask[:, :2] = True
    array = np.ma.masked_array(x.numpy(), ~mask.numpy())
    for dim in (0, 1):
        for correction in (0, 1):
            spread = array.std(axis=dim, ddof=correction, keepdims=True)
            expected = ((array - array.mean(axis=dim, keepdims=True)) / spread).filled(0.0)
            out = mw.standardize(x, mask, dim, correction=correction, eps=0)
            torch.testing.assert_close(out, torch.from_numpy(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_slice_gives_the_empty_value_and_a_gradient_of_zero(name, dim, route):
    from tests.laws.functions import FUNCTIONS

    x = torch.full((24, 24), math.nan)
    mask = torch.zeros(24, 24, dtype=torch.bool)
    mask[3, 4:9] = mask[4, 4:9] = True
    x[mask] = torch.arange(10.0)
    x.requires_grad_()
    with force(route):
        out = CALLS[name](x, mask, dim)
        # The incoming gradients of dropped elements are NaN: they must not be read.
        above = torch.where(mask, 1.0, math.nan)
        (gradient,) = torch.autograd.grad(out, x, above)
    assert (out[~mask] == FUNCTIONS[name].empty).all()
    assert out[mask].isfinite().all()
    assert not gradient[~mask].any()
    assert gradient.isfinite().all()


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_elements_keep_their_shape(name, shape, route):
    with force(route):
        for dim in range(len(shape)):
            assert CALLS[name](torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), dim).shape == shape


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_x_of_no_dims_is_one_slice(name, route):
    x = torch.tensor(3.0)
    expected = {"softmax": 1.0, "softmin": 1.0, "log_softmax": 0.0, "normalize": 1.0, "standardize": 0.0}[name]
    with force(route):
        for dim in (0, -1):
            assert CALLS[name](x, torch.tensor(True), dim) == expected
            assert CALLS[name](x, torch.tensor(False), dim) == (-math.inf if name == "log_softmax" else 0.0)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_finite_differences(name, route):
    x, mask = torch.randn(5, 11, dtype=torch.float64, requires_grad=True), torch.rand(5, 11) < 0.6
    mask[:, :2] = True

    def call(x):
        out = CALLS[name](x, mask, 1)
        return torch.where(out.isfinite(), out, 0.0)

    with force(route):
        assert torch.autograd.gradcheck(call, (x,))
        assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("route", ROUTES)
def test_several_dims_are_one_slice(route):
    x, mask = torch.randn(4, 5, 6), torch.rand(4, 5, 6) < 0.5
    flat, bits = x.permute(1, 0, 2).reshape(5, 24), mask.permute(1, 0, 2).reshape(5, 24)
    with force(route):
        for call in (lambda x, m, dim: mw.normalize(x, m, dim=dim), mw.standardize):
            out = call(x, mask, (0, -1))
            torch.testing.assert_close(out.permute(1, 0, 2).reshape(5, 24), call(flat, bits, 1))
            torch.testing.assert_close(call(x, mask, None), call(x.reshape(-1), mask.reshape(-1), 0).reshape(x.shape))


def test_log_softmax_is_the_logarithm_of_softmax_everywhere():
    x, mask = torch.randn(9, 30), torch.rand(9, 30) < 0.3
    mask[4] = False
    torch.testing.assert_close(mw.log_softmax(x, mask, 1).exp(), mw.softmax(x, mask, 1))


def test_log_softmax_behind_an_exponential_trains_without_nan():
    x, mask = torch.randn(3, 5, requires_grad=True), torch.rand(3, 5) < 0.5
    entropy = mw.log_softmax(x, mask, 1)
    (entropy.exp() * entropy).nansum().backward()
    assert x.grad.isfinite().all()


def test_standardize_is_nan_where_too_few_are_kept_for_the_correction_and_zero_where_none_is():
    x = torch.randn(3, 4)
    mask = torch.tensor([[True, False, False, False], [False] * 4, [True] * 4])
    out = mw.standardize(x, mask, correction=1)
    assert out[0, 0].isnan()
    assert not out[0, 1:].any()
    assert not out[1].any()
    assert out[2].isfinite().all()


def test_dtype_casts_first_as_in_torch():
    x = torch.arange(4)
    out = mw.softmax(x, torch.tensor([True, True, False, True]), 0, dtype=torch.float64)
    torch.testing.assert_close(out[[0, 1, 3]], torch.tensor([0, 1, 3]).softmax(0, dtype=torch.float64))
    assert out.dtype == torch.float64


FORWARD = {
    "softmax": (),
    "softmin": (),
    "log_softmax": (),
    "normalize": (3.0, 1e-12),
    "standardize": (1.0, 1e-5),
}
BACKWARD = {"softmax": (True,), "log_softmax": (), "normalize": (2.0, 1e-12), "standardize": (0.0, 1e-5)}


@pytest.mark.kernel
@pytest.mark.parametrize("suffix", ["fused", "fused_forward"])
@pytest.mark.parametrize("name", FORWARD)
def test_the_registered_op_passes_opcheck(name, suffix):
    op = getattr(torch.ops.maskwise, f"{name}_{suffix}")
    mask = torch.rand(4, 1) < 0.5
    for x in (torch.randn(3, 4, 5), torch.randn(5, 4, 3).transpose(0, 2), torch.randn(3, 4, 10)[..., ::2]):
        for dim in ([0], [1], [2]):
            torch.library.opcheck(op, (x.detach().requires_grad_(suffix == "fused"), mask, dim, *FORWARD[name]))


@pytest.mark.kernel
@pytest.mark.parametrize("name", BACKWARD)
def test_the_registered_gradient_passes_opcheck(name):
    op = getattr(torch.ops.maskwise, f"{name}_fused_backward")
    mask = torch.rand(4, 1) < 0.5
    for known in (torch.rand(3, 4, 5), torch.rand(5, 4, 3).transpose(0, 2)):
        for grad in (torch.randn(3, 4, 5), torch.randn(()).expand(3, 4, 5)):
            torch.library.opcheck(op, (grad, known, mask, [1], *BACKWARD[name]))


@pytest.mark.kernel
def test_the_registered_ops_without_their_kernels_keep_the_layout_that_their_fakes_promise():
    x = torch.randn(5, 4, 3).transpose(0, 2)
    from maskwise.ops.softmax import reference
    from maskwise.ops.softmax.softmax import as_laid_out, like_first

    out = as_laid_out(reference.softmax, like_first)(x, x > 0, [1])
    assert out.stride() == torch.empty_like(x).stride()


BOOLS = {"dtype": torch.bool}
ERRORS = [
    (lambda f, x: f(x, torch.ones(8, 12, **BOOLS), 1), ShapeError, r"mask\[\.\.\., None\]"),
    (lambda f, x: f(x, torch.ones(8, 12, 64), 1), DtypeError, r"Mask\.from_attention_mask\(mask\)"),
    (lambda f, x: f(x, None, 1), DtypeError, r"Mask\.full\(x\.shape\)"),
    (lambda f, x: f([1.0], torch.tensor([True]), 0), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda f, x: f(x, KEPT, 3), OutOfRangeError, r"\[-3, 2\] for x of 3 dims, got 3"),
    (lambda f, x: f(x, KEPT, 1.5), DtypeError, r"got float"),
    (lambda f, x: f(x, torch.ones(1, **BOOLS, device="meta"), 1), DeviceError, r"mask\.to\(x\.device\)"),
    (lambda f, x: f(x.int(), KEPT, 1), DtypeError, r"`x` must be floating, got torch\.int32\. Hint: (x\.float|dtype=)"),
]
OWN_ERRORS = [
    (lambda x: mw.softmax(x, KEPT, None), DtypeError, r"softmax: `dim` must be an int, got NoneType. Hint: dim=-1"),
    (lambda x: mw.log_softmax(x, KEPT, (0, 1)), DtypeError, r"`dim` must be an int, got tuple. Hint: dim=-1"),
    (lambda x: mw.softmin(x, KEPT, True), DtypeError, r"`dim` must be an int, got bool"),
    (lambda x: mw.softmax([1.0], KEPT, 0, dtype=torch.float32), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda x: mw.normalize(x, KEPT, dim=(1, 1)), ArgumentError, r"not repeat a dim"),
    (lambda x: mw.normalize(x, KEPT, "fro"), DtypeError, r"normalize: `p` must be a number, got str"),
    (lambda x: mw.normalize(x, KEPT, eps=None), DtypeError, r"`eps` must be a number, got NoneType"),
    (lambda x: mw.standardize(x, KEPT, eps=-1), ArgumentError, r"`eps` must be at least 0, got -1. Hint: eps=1e-5"),
    (lambda x: mw.standardize(x, KEPT, correction=True), DtypeError, r"`correction` must be a number, got bool"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_raise_an_error_with_a_hint(name, call, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            call(CALLS[name], torch.ones(8, 12, 64))
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(("call", "error", "message"), OWN_ERRORS)
def test_bad_arguments_of_one_function_raise_an_error_with_a_hint(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(8, 12, 64))
