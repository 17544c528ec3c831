"""Our own CPU kernel, against the plain reference in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import maskwise as mw
from maskwise import Mask
from maskwise.ops.attention import reference
from maskwise.ops.attention.kernel import attend_fused
from tests.ops.attention import masks, truth
from tests.simd import SIMD_LEVELS

pytestmark = pytest.mark.kernel

#: Scores of up to 64 products and sums of up to 300 weighted values, in another order than the reference's.
CLOSE = {torch.float32: {"atol": 5e-6, "rtol": 1e-5}, torch.float64: {"atol": 1e-13, "rtol": 1e-12}}
#: (batch, heads, heads of keys, queries, keys, features, features of values): odd sizes, more keys than a block holds,
#: more queries than a task takes, one of everything.
SHAPES = (
    (2, 4, 2, 7, 9, 5, 3),
    (1, 2, 1, 31, 300, 33, 17),
    (2, 1, 1, 530, 140, 16, 64),
    (1, 1, 1, 1, 1, 1, 1),
    (3, 2, 2, 25, 129, 64, 32),
)


def inputs(shape, dtype=torch.float32):
    batch, heads, shared, queries, keys, size, out_size = shape
    return (
        truth.tokens(batch, heads, queries, size, seed=1, dtype=dtype),
        truth.tokens(batch, shared, keys, size, seed=2, dtype=dtype),
        truth.tokens(batch, shared, keys, out_size, seed=3, dtype=dtype),
    )


def kinds(shape):
    batch, heads, _, queries, keys, _, _ = shape
    return {
        "none": None,
        "keys": masks.random_bits(batch, 1, 1, keys, seed=1),
        "keys of heads": masks.random_bits(heads, 1, keys, seed=2),
        "pairs": masks.random_bits(batch, heads, queries, keys, density=0.3, seed=3),
        "pairs that lie across": masks.random_bits(keys, queries, seed=4).T,
        "rows": masks.random_bits(batch, 1, queries, 1, seed=5),
        "expanded": masks.random_bits(1, 1, 1, keys, seed=6).expand(batch, 1, queries, keys),
        "far apart": torch.arange(keys)[None, :] // 200 == torch.arange(queries)[:, None] % 2,
        "nothing": torch.zeros(batch, 1, 1, keys, dtype=torch.bool),
        "one for all": torch.tensor(True),
    }


def agrees(arguments, is_of_keys=False, is_causal=False, scale=0.5):
    q, k, v, mask = arguments
    out, is_sound = attend_fused(q, k, v, mask, is_of_keys, is_causal, scale)
    kept = mask[:, None, None] if is_of_keys else mask
    expected = reference.attention(q.double(), k.double(), v.double(), kept, is_causal, scale=scale)
    torch.testing.assert_close(out.double(), expected, **CLOSE[q.dtype])
    assert is_sound


@pytest.mark.parametrize("kind", kinds(SHAPES[0]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_reference(kind, dtype):
    for shape in SHAPES:
        for is_causal in (False, True):
            agrees((*inputs(shape, dtype), kinds(shape)[kind]), is_causal=is_causal)


@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_every_simd_level_that_this_cpu_has_agrees(level):
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for kind in ("keys", "pairs"):
            for dtype in (torch.float32, torch.float64):
                agrees((*inputs(SHAPES[1], dtype), kinds(SHAPES[1])[kind]), is_causal=kind == "pairs")
    finally:
        torch.ops.maskwise.simd_level(before)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale_serves(scale):
    for kind in ("keys", "pairs"):
        agrees((*inputs(SHAPES[1]), kinds(SHAPES[1])[kind]), scale=scale)


def test_a_mask_of_two_dims_may_be_of_keys():
    q, k, v = inputs((3, 2, 2, 4, 20, 8, 8))
    agrees((q, k, v, masks.random_bits(3, 20, seed=1)), is_of_keys=True)
    agrees((q, k, v, masks.random_bits(4, 20, seed=1)))


def test_strides_do_not_matter():
    q, k, v = inputs(SHAPES[4])
    mask = kinds(SHAPES[4])["pairs"]
    for turned in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        agrees((turned(q), turned(k), turned(v), mask))
    agrees((q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), mask))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["keys", "pairs", "rows", "nothing", "far apart"])
def test_what_no_query_keeps_is_never_read(kind, is_causal):
    shape = (2, 2, 2, 30, 300, 16, 16)
    mask = kinds(shape)[kind]
    kept = mask.expand(2, 2, 30, 300)
    if is_causal:
        kept = kept & reference.causal(30, 300, mask.device)
    keys, rows = ~kept.any(-2), ~kept.any(-1)
    clean = None
    for value in (0.0, torch.nan, torch.inf, -torch.inf, 3e38):
        q, k, v = (x.clone() for x in inputs(shape))
        q[rows], k[keys], v[keys] = value, value, value
        out, is_sound = attend_fused(q, k, v, mask, False, is_causal, 0.25)
        assert is_sound
        assert (out[rows] == 0).all()
        clean = out if clean is None else clean
        assert torch.equal(out, clean), value


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_kept_and_not_finite_is_told(which):
    arguments = inputs((1, 2, 2, 8, 8, 8, 8))
    arguments[which][:, :, 5] = torch.nan
    out, is_sound = attend_fused(*arguments, None, False, True, 0.5)
    assert not is_sound
    assert not out[:, :, 5].isfinite().any()
    # The call as a whole gives NaN to the queries that keep it, and to no others.
    out = mw.attention(*arguments, is_causal=True)
    assert out[:, :, :5].isfinite().all()
    assert out[:, :, 5].isnan().all()
    assert out[:, :, 6:].isnan().all() == (which > 0)


def test_scores_that_overflow_have_no_softmax():
    q, k, v = torch.full((1, 1, 1, 4), 3e38), torch.full((1, 1, 2, 4), -3e38), torch.ones(1, 1, 2, 4)
    out, is_sound = attend_fused(q, k, v, torch.ones(2, dtype=torch.bool), False, False, 1.0)
    assert out.isnan().all()
    assert not is_sound


def test_a_bool_tensor_and_a_mask_go_by_it_without_a_gradient():
    q, k, v = inputs((2, 2, 2, 200, 200, 16, 16))
    lengths, window = Mask.from_lengths([150, 200]), masks.random_bits(200, 200, seed=1)
    with mw.explain() as log:
        for mask in (lengths, lengths.to_bool(), window, window[None, None], Mask(window[:64, :64])):
            size = mask.shape[-1]
            mw.attention(q[:, :, :size], k[:, :, :size], v[:, :, :size], mask)
        mw.attention(q, k, v, is_causal=True)
        mw.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), window)
        mw.attention(q.clone().requires_grad_(), k, v, window)
        # A query that reads many keys once is better off without packing them.
        long = k.repeat(1, 1, 10, 4)
        mw.attention(q[:, :, :1].repeat(1, 1, 1, 4), long, long, torch.ones(2000, dtype=torch.bool))
    assert [call.route for call in log][:6] == ["bare"] * 6
    assert "bare" not in [call.route for call in log][6:]


def test_the_result_lies_in_memory_as_that_of_sdpa_does():
    q, k, v = inputs((2, 3, 3, 5, 6, 8, 8))
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2), q.mT.contiguous().mT):
        theirs = torch.nn.functional.scaled_dot_product_attention(x, k, v, mask)
        assert mw.attention(x, k, v, mask).stride() == theirs.stride()


@pytest.mark.parametrize("kind", ["none", "keys", "pairs"])
def test_the_op_passes_opcheck(kind):
    arguments = (*inputs(SHAPES[0]), kinds(SHAPES[0])[kind], False, True, 0.5)
    torch.library.opcheck(torch.ops.maskwise.attention_fused_forward.default, arguments)


def test_fake_tensors_go_through_it():
    with FakeTensorMode():
        q, mask = torch.empty(2, 3, 20, 8), torch.ones(2, 20, dtype=torch.bool)
        out = mw.attention(q, q, q, mask)
    assert out.shape == (2, 3, 20, 8)
    assert out.dtype == torch.float32
