"""Sort, topk, median and quantile of masks that reach the kernel as intervals: the same as with their bits."""

import pytest
import torch

import maskwise as mw
from maskwise import Mask
from maskwise.plan.dispatch import force
from tests.ops.order.inputs import same_bits, tricky

L = 150
LENGTHS = torch.tensor([3, 0, L, 77, 64, L - 1])
SEQUENCES, COLUMNS = Mask.from_lengths(LENGTHS, L), Mask.from_lengths(torch.arange(L) * 37 % (L + 1), L)
#: Bounds on both sides of the row, and ends before starts.
OUTSIDE = torch.tensor([[[-5], [20], [-9], [200], [9]], [[60], [900], [-2], [300], [3]]])
#: The shape of x, and a mask that broadcasts to it. Tiles have 64 rows, and blocks up to 64 columns.
MASKS = {
    "lengths": ((6, L), SEQUENCES),
    "left lengths": ((6, L), Mask.from_lengths(LENGTHS, L, side="left")),
    "rows": ((6, L, 19), SEQUENCES[..., None]),
    "heads": ((6, 19, L), SEQUENCES[:, None]),
    "causal": ((2, L, L), Mask.causal(L)),
    "columns of a causal mask": ((L, L), Mask.causal(L).T),
    "window": ((L, L), Mask.window(L, left=3)),
    "columns of different lengths": ((L, L), COLUMNS.T),
    "columns of left lengths": ((L, 70), Mask.from_lengths(torch.arange(70) * 2, L, side="left").T),
    "pairs": ((6, L, L), SEQUENCES[..., None] & SEQUENCES[:, None]),
    "causal pairs": ((6, L, L), Mask.causal(L) & SEQUENCES[:, None]),
    "full": ((6, L), Mask.full((6, L))),
    "none": ((6, L), Mask.none((6, L))),
    "bounds outside": ((5, L), Mask._from_bounds(OUTSIDE, -1, (5, L))),
    "bounds outside, across": ((L, 5), Mask._from_bounds(OUTSIDE.transpose(1, 2), -2, (L, 5))),
    "long": ((2, 70_000), Mask.from_lengths([69_000, 5], 70_000)),
    "long columns": ((70_000, 5), Mask.from_lengths([69_000, 5, 0, 70_000, 300], 70_000).T),
}
SMALL = {name: case for name, case in MASKS.items() if "long" not in name}


def calls_on(x, dim):
    """The functions of a mask, over one dim and over all."""
    size = x.shape[dim]
    yield lambda mask: mw.sort(x, mask, dim)
    yield lambda mask: mw.sort(x, mask, dim, descending=True)
    yield lambda mask: (mw.argsort(x, mask, dim),)
    for k in {0, 1, min(size, 4), size // 3, size}:
        yield lambda mask, k=k: mw.topk(x, mask, k, dim)
    for dims in (dim, None, (0, x.dim() - 1)):
        yield lambda mask, dims=dims: (mw.median(x, mask, dims),)
        if x.is_floating_point():
            for q in (0.3, [0.1, 0.5, 0.6, 0.9]):
                yield lambda mask, dims=dims, q=q: (mw.quantile(x, mask, q, dims),)


def layouts(x):
    """x as it is, with its last dim outside, and with gaps."""
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield torch.stack([x, x], -1)[..., 1]


def assert_as_with_bits(x, mask):
    assert mask.operand == "intervals"
    bits = mask.to_bool()
    with force("kernel"):
        for dim in range(x.dim()):
            for call in calls_on(x, dim):
                for out, expected in zip(call(mask), call(bits), strict=True):
                    assert same_bits(out, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_intervals_give_what_their_bits_give_in_every_layout(name, dtype):
    shape, mask = MASKS[name]
    x = tricky(shape, dtype)
    # Were a dropped one used, it would come first, or be the result.
    x = torch.where(mask.to_bool(), x, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)
    for laid_out in layouts(x) if name in SMALL else [x]:
        assert_as_with_bits(laid_out, mask)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["causal", "columns of different lengths", "bounds outside"])
def test_elements_of_every_size_are_read_as_intervals(name, dtype):
    shape, mask = MASKS[name]
    assert_as_with_bits(tricky(shape, dtype), mask)


@pytest.mark.kernel
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_the_reference_and_zero_where_dropped(name):
    shape, mask = SMALL[name]
    bits = mask.to_bool().expand(shape)
    x = torch.where(bits, torch.randn(shape, dtype=torch.float64), torch.nan)
    for dim in range(len(shape)):
        for call in (
            lambda x, mask, dim=dim: mw.sort(x, mask, dim).values,
            lambda x, mask, dim=dim: mw.topk(x, mask, 2, dim).values,
            lambda x, mask, dim=dim: mw.median(x, mask, dim),
            lambda x, mask, dim=dim: mw.quantile(x, mask, [0.2, 0.9], dim),
        ):
            gradients = []
            for route, kept in (("kernel", mask), ("plain", bits)):
                leaf = x.clone().requires_grad_()
                with force(route):
                    out = call(leaf, kept)
                weights = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).reshape(out.shape)
                gradients.append(torch.autograd.grad(out, leaf, torch.where(out.isfinite(), weights, 0))[0])
            # Two quantiles may share an element, and their sum depends on the order.
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
            assert (gradients[0][~bits] == 0).all()


@pytest.mark.kernel
def test_no_bool_tensor_is_made_of_intervals(monkeypatch):
    def no_bits(mask):
        raise AssertionError(f"{mask} was made a bool tensor")

    mask, x = Mask.causal(40), torch.randn(40, 40)
    expected = mw.median(x, mask.to_bool(), 0)
    monkeypatch.setattr(Mask, "to_bool", no_bits)
    for leaf in (x, x.clone().requires_grad_()):
        for dim in (0, 1):
            mw.sort(leaf, mask, dim).values.sum()
            mw.argsort(leaf, mask, dim)
            mw.topk(leaf, mask, 3, dim).values.sum()
            mw.quantile(leaf, mask, 0.3, dim)
        assert torch.equal(mw.median(leaf, mask, 0), expected)


@pytest.mark.kernel
def test_a_sort_of_intervals_passes_gradcheck_of_both_orders():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mask = Mask.from_lengths([6, 2, 0, 5], 6)
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda x, dim=dim: mw.sort(x, mask, dim).values, (x,))
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: mw.sort(x, mask, dim).values, (x,))


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
def test_the_bits_do_not_depend_on_the_number_of_threads(dim):
    x, mask = tricky((700, 700), torch.float32), Mask.causal(700)
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            outs.append((*mw.sort(x, mask, dim), *mw.topk(x, mask, 20, dim), mw.median(x, mask, dim)))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("op", "rest"),
    [
        ("sort_fused", (False,)),
        ("argsort_fused_forward", (True,)),
        ("topk_fused", (2, True)),
        ("median_fused", (False,)),
        ("median_places", (True,)),
        ("quantile_fused", (torch.tensor([0.1, 0.5]), False, 0)),
        ("quantile_places", (torch.tensor(0.3), False, 3)),
    ],
)
def test_the_registered_ops_take_intervals_and_pass_opcheck(op, rest):
    # No slice is empty: opcheck takes NaN for a difference.
    x, mask = torch.randn(3, 4, 5), Mask.from_lengths([1, 2, 4], 4)[..., None]
    for dim in ([0], [1]):
        run = getattr(torch.ops.maskwise, op)
        args = (x, mask._bounds(), dim, *rest, mask._along)
        torch.library.opcheck(run, args)
        outs = [out if isinstance(out, tuple) else (out,) for out in (run(*args), run(x, mask.to_bool(), dim, *rest))]
        assert all(same_bits(a, b) for a, b in zip(*outs, strict=True))
