"""mw.apply of torch's own functions of rows, which ours compute where the rows lie."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import maskwise as mw

WIDTH = 8
CALLS = {
    "layer_norm": (F.layer_norm, ((WIDTH,),)),
    "layer_norm with eps": (partial(F.layer_norm, normalized_shape=(WIDTH,), eps=0.1), ()),
    "layer_norm over two dims": (F.layer_norm, ((2, WIDTH),)),
    "LayerNorm": (nn.LayerNorm(WIDTH, elementwise_affine=False), ()),
    "softmax": (torch.softmax, (-1,)),
    "softmax of the first dim of a row": (F.softmax, (1,)),
    "softmin": (F.softmin, (2,)),
    "Softmax": (nn.Softmax(-1), ()),
    "normalize": (F.normalize, ()),
    "normalize by its largest": (partial(F.normalize, p=float("inf"), dim=-1), ()),
}
MASKS = {
    "lengths": mw.Mask.from_lengths([3, 0, 6, 1], max_len=6),
    "left": mw.Mask.from_lengths([3, 0, 6, 1], max_len=6, side="left"),
    "window": mw.Mask.window(6, left=1)[:4],
    "bits": torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5,
}


def _bits(mask):
    return mask.to_bool() if isinstance(mask, mw.Mask) else mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_gives_what_the_function_gives_for_the_kept_rows(call, mask, dtype):
    (fn, more), bits = call, _bits(mask)
    x = torch.randn(4, 6, 2, WIDTH).to(dtype)
    expected = torch.zeros_like(x)
    expected[bits] = fn(x[bits], *more)
    x[~bits] = torch.nan
    assert mw.plan(mw.apply, fn, x, *more, mask=mask).route == "fused"
    # Rounded once, from sums in another order.
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(mw.apply(fn, x, *more, mask=mask), expected, **tolerance)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_its_gradient_is_that_of_gathered_rows_and_nothing_dropped_reaches_it(call):
    (fn, more), mask = call, MASKS["lengths"]
    grads = []
    for route, dropped in (("kept", 0.0), ("fused", 0.0), ("fused", float("nan"))):
        x = torch.randn(4, 6, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weight = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x[~mask.to_bool()] = dropped
        x.requires_grad_()
        with mw.force(route):
            (mw.apply(fn, x, *more, mask=mask) * weight).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert torch.equal(grads[2], grads[1])


class _Doubled(nn.LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


def _hooked():
    module = nn.LayerNorm(WIDTH, elementwise_affine=False)
    module.register_forward_hook(lambda module, inputs, out: 2 * out)
    return module


GATHERED = {
    "a function around it": (lambda rows: F.layer_norm(rows, (WIDTH,)), ()),
    "weights": (nn.LayerNorm(WIDTH), ()),
    "a subclass": (_Doubled(WIDTH, elementwise_affine=False), ()),
    "a hook": (_hooked(), ()),
    "a logarithm, which is not 0 where it is dropped": (torch.log_softmax, (-1,)),
    "another dtype": (torch.softmax, (-1, torch.float64)),
}


@pytest.mark.parametrize("call", GATHERED.values(), ids=GATHERED)
def test_any_other_function_gets_the_rows(call):
    (fn, more), mask = call, MASKS["lengths"]
    x, bits = torch.randn(4, 6, WIDTH), MASKS["lengths"].to_bool()
    assert mw.plan(mw.apply, fn, x, *more, mask=mask).route == "kept"
    rows = fn(x[bits], *more)
    expected = rows.new_zeros(x.shape)
    expected[bits] = rows
    torch.testing.assert_close(mw.apply(fn, x, *more, mask=mask), expected)


@pytest.mark.parametrize("given", [{"fill": -1.0}, {"other": torch.ones(())}], ids=["fill", "other"])
def test_another_value_at_dropped_rows_is_scattered_around(given):
    x, mask = torch.randn(4, 6, WIDTH), MASKS["lengths"]
    out, bits = mw.apply(torch.softmax, x, -1, mask=mask, **given), mask.to_bool()
    torch.testing.assert_close(out[bits], x[bits].softmax(-1))
    assert (out[~bits] == next(iter(given.values()))).all()


def test_everything_kept_is_torchs_own_to_the_last_bit():
    x, mask = torch.randn(4, 6, WIDTH), mw.Mask.from_lengths([6] * 4, max_len=6)
    assert torch.equal(mw.apply(F.layer_norm, x, (WIDTH,), mask=mask), F.layer_norm(x, (WIDTH,)))


def test_a_wrong_argument_is_reported_as_torch_does():
    with pytest.raises((RuntimeError, mw.MaskwiseError), match="normalized_shape"):
        mw.apply(F.layer_norm, torch.randn(4, 6, WIDTH), (3,), mask=MASKS["lengths"])
