"""mw.fill beyond the laws: the kernel against torch.where for every dtype and layout, and what it refuses."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from maskwise.ops.backends import FLOATING, INTEGRAL
from maskwise.ops.primitives import copy_transposed
from maskwise.plan.dispatch import force
from tests.laws.samples import as_bool
from tests.ops.arrays import interval_masks

DTYPES = (*FLOATING, *INTEGRAL, torch.bool, torch.complex64, torch.complex128)
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "every other": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "one row for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[:, :1].expand_as(x),
    "one element for all": lambda x: x[:1, :1].expand_as(x),
}


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_selects_the_same_bits_as_where(dtype, layout):
    x = LAYOUTS[layout](torch.randint(0, 100, (37, 131)).to(dtype))
    for mask in (torch.rand(37, 131) < 0.5, torch.rand(131) < 0.5, torch.rand(37, 1) < 0.5, torch.tensor(True)):
        with force("kernel"):
            out = mw.fill(x, mask, 1)
        assert torch.equal(out, torch.where(mask, x, torch.ones((), dtype=dtype)))


@pytest.mark.kernel
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 140),
    layout=st.sampled_from(sorted(LAYOUTS)),
    of_values=st.sampled_from([(), (1,), (None, 1), (1, None)]),
    data=st.data(),
)
def test_any_shape_and_value_gives_what_where_gives(rows, columns, layout, of_values, data):
    x = LAYOUTS[layout](torch.randn(rows, columns)) if rows and columns else torch.randn(rows, columns)
    mask = torch.rand(rows, columns) < 0.5
    shape = [size if one is None else 1 for one, size in zip(of_values, (rows, columns), strict=False)]
    value = torch.randn(shape if len(of_values) != 1 else [1])
    with force("kernel"):
        for given in (mask, data.draw(interval_masks((rows, columns)))):
            assert torch.equal(mw.fill(x, given, value), torch.where(as_bool(given), x, value))


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_expanded_gradients_are_exact(name, dim):
    x, mask = torch.randn(37, 131, requires_grad=True), torch.rand(37, 131) < 0.5
    found = []
    for route in ("kernel", "plain"):
        with force(route):
            out = getattr(mw, name)(x, mask, dim)
        found.append(torch.autograd.grad(out, x, torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape))[0])
    torch.testing.assert_close(*found)
    assert torch.equal(found[0][~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize(
    ("value", "mask", "error", "hint"),
    [
        ("no", torch.ones(3, dtype=torch.bool), DtypeError, "0.0"),
        (torch.zeros(2), torch.ones(3, dtype=torch.bool), ShapeError, "line up from the right"),
        (torch.zeros(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), DtypeError, "value.to"),
        (torch.zeros(3, device="meta"), torch.ones(3, dtype=torch.bool), DeviceError, "value.to"),
        (0.0, torch.ones(3), DtypeError, "Mask.from_attention_mask"),
        (0.0, torch.ones(4, dtype=torch.bool), ShapeError, "broadcast"),
    ],
)
def test_incompatible_arguments_are_rejected_with_a_hint(value, mask, error, hint):
    with pytest.raises(error, match=hint):
        mw.fill(torch.zeros(3), mask, value)


def test_a_number_out_of_range_of_the_dtype_is_rejected_with_a_hint():
    with pytest.raises(ArgumentError, match=r"a value in the range of torch.uint8"):
        mw.fill(torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.bool), 1000)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (100, 257), (4, 6, 70), (0, 3)])
def test_a_transposed_copy_is_contiguous_and_has_the_values(shape, dtype):
    x = (torch.randn(shape) * 50).to(dtype)
    for view in (x, x.transpose(-1, -2), x.transpose(0, -1), x[..., ::2]):
        copy = copy_transposed(view)
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr() or not copy.numel()
        torch.testing.assert_close(copy, view, rtol=0, atol=0)
        torch.library.opcheck(torch.ops.maskwise.copy_transposed.default, (view,))
