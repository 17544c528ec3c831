"""The strides of x, the mask and the other operands make no difference to the result."""

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw

pytestmark = pytest.mark.kernel

#: The same values of one shape, in other strides. 37 and 70 leave something over of every tile and vector.
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "across": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "with gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "with gaps between rows": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "across with gaps": lambda x: x.transpose(-1, -2).repeat_interleave(2, -1)[..., ::2].transpose(-1, -2),
}
SHAPE = (2, 2, 37, 70)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int64]
DTYPES += [torch.bool, torch.complex64, torch.complex128]


def values(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, SHAPE, generator=generator).to(dtype)


def masks():
    keep = torch.rand(SHAPE, generator=torch.Generator().manual_seed(7)) < 0.5
    yield from (lie(keep) for lie in LAYOUTS.values())
    yield from (keep[..., :1], keep[:, :, :1], keep[0, 0], keep.transpose(-1, -2).contiguous().transpose(-1, -2)[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_filling(layout, dtype):
    x, fills = values(dtype, 0), values(dtype, 1)
    for keep in masks():
        for value in (fills[0, 0, 0, 0], LAYOUTS["across"](fills), fills[..., :1], fills[0, 0, :1]):
            with mw.force("kernel"):
                got = mw.fill(LAYOUTS[layout](x), keep, value)
            assert torch.equal(got, torch.where(keep, x, value))


def test_filling_an_expanded_value():
    x = torch.tensor([[3.0], [4.0]]).expand(2, 70)
    keep = torch.rand(70, 2, generator=torch.Generator().manual_seed(0)).T < 0.5
    with mw.force("kernel"):
        assert torch.equal(mw.fill(x, keep, -1.0), torch.where(keep, x, -1.0))


@pytest.mark.parametrize(
    ("layout", "target_layout", "dtype"),
    [
        *((layout, target_layout, torch.float32) for layout in LAYOUTS for target_layout in LAYOUTS),
        *(("across", "contiguous", dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_losses_and_their_gradients(layout, target_layout, dtype):
    x, target = values(dtype, 0) / 64, values(dtype, 1) / 64
    for keep in masks():
        full = keep.expand(SHAPE)
        for reduction in ("none", "mean"):
            found = []
            for lie_x, lie_target, bits in (
                (LAYOUTS[layout], LAYOUTS[target_layout], keep),
                (torch.clone, torch.clone, full.contiguous()),
            ):
                # What is dropped is NaN in one operand or the other.
                leaf = lie_x(x.masked_fill(~full, torch.nan)).requires_grad_()
                out = mw.loss(F.mse_loss, leaf, lie_target(target), bits, reduction)
                above = torch.ones_like(out) if reduction == "mean" else LAYOUTS["across"](target)
                found.append((out, torch.autograd.grad(out, leaf, above)[0]))
            (got, slope), (expected, expected_slope) = found
            # The elements are the same to the bit; sums of them are made in another order.
            if reduction == "none":
                assert torch.equal(got, expected)
            torch.testing.assert_close(got, expected)
            assert torch.equal(slope, expected_slope)


@pytest.mark.parametrize("name", ["softmax", "softmin", "log_softmax"])
@pytest.mark.parametrize("across", [False, True])
def test_softmax_of_a_result_that_is_written_past_the_caches(name, across):
    # 4.5 MB; the last columns and the end of a row are no whole vector.
    x = torch.randn(1101, 1027, generator=torch.Generator().manual_seed(0))
    keep = torch.rand(1101, 1027, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[3], keep[5] = False, True
    x[5] = -torch.inf if name != "softmin" else torch.inf
    full = x.double().masked_fill(~keep, torch.inf if name == "softmin" else -torch.inf)
    expected = getattr(F, name)(full, dim=-1)
    # Where nothing is kept there is a rule of our own; where only -inf is, torch's NaN.
    expected[3] = -torch.inf if name == "log_softmax" else 0.0
    x = x.masked_fill(~keep, torch.nan)
    with mw.force("kernel"):
        got = getattr(mw, name)(LAYOUTS["across"](x) if across else x, keep, -1)
    assert got[5].isnan().all()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax"])
@pytest.mark.parametrize("dim", [0, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scans_and_their_gradients(layout, dim, name):
    x = 1 + values(torch.float64, 0) / 1000
    for keep in masks():
        found = []
        for lie, bits in ((LAYOUTS[layout], keep), (torch.clone, keep.expand(SHAPE).contiguous())):
            leaf = lie(x).requires_grad_()
            with mw.force("kernel"):
                out = getattr(mw, name)(leaf, bits, dim)
                out = out if isinstance(out, torch.Tensor) else out.values
            finite = torch.where(out.isfinite(), out, 0.0)
            found.append((out, torch.autograd.grad(finite.square().sum(), leaf)[0]))
        # float64, whose sums may be made in another order.
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin", "normalize", "standardize"])
@pytest.mark.parametrize("columns", [3, 11, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_long_strided_slices_match_contiguous_ones(name, columns, dtype):
    generator = torch.Generator().manual_seed(columns)
    x = torch.rand(2, 5000, columns, generator=generator).to(dtype).mT
    keep = torch.rand(2, columns, 5000, generator=generator) < 0.5
    x = torch.where(keep, x, torch.nan).mT.contiguous().mT
    keep[0, 0] = False
    function = getattr(mw, name)
    with mw.force("kernel"):
        across, rows = function(x, keep, dim=-1), function(x.contiguous(), keep, dim=-1)
    torch.testing.assert_close(across, rows)
    torch.testing.assert_close(across, function(x.contiguous().double(), keep, dim=-1).to(dtype))
