"""Attention on a GPU, by torch's kernels: what they are given, that nothing leaks, and that nothing is waited for.

There is no GPU here. torch's varlen kernel is replaced by loops over its sequences, flex_attention runs as it is, and
fake CUDA tensors have no data to wait for.
"""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import maskwise as mw
from maskwise import Mask
from maskwise.ops.attention import delegated, packed, sdpa
from tests.gpu.guard import cuda_without_cuda
from tests.ops.attention import masks, truth

#: The module, whose function has its name.
home = sys.modules["maskwise.ops.attention.attention"]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
SIZES = 3, 4, 5, 7  # batch, heads, queries, keys


def loops(q, k, v, ends, key_ends, longest, longest_key, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """torch's varlen attention, sequence by sequence; rows of no sequence are left as they are: uninitialised."""
    out = torch.full_like(q, torch.nan)
    for i in range(len(ends) - 1):
        rows, keys = slice(*ends[i : i + 2].tolist()), slice(*key_ends[i : i + 2].tolist())
        n, m = rows.stop - rows.start, keys.stop - keys.start
        assert n <= longest
        assert m <= longest_key
        if not n or not m:
            out[rows] = 0.0
            continue
        kept = torch.ones(n, m, dtype=torch.bool)
        # Counted from the last key, as FlashAttention does.
        kept = kept.tril(m - n) if window_size == (-1, 0) else kept
        part = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        found = torch.nn.functional.scaled_dot_product_attention(*part, kept, scale=scale, enable_gqa=enable_gqa)
        out = out.index_copy(0, torch.arange(rows.start, rows.stop), found[0].transpose(0, 1))
    return out


@pytest.fixture
def _loops(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loops)


@pytest.fixture
def _eager_flex(monkeypatch):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(delegated, "_flex", lambda: flex_attention.flex_attention)


def inputs(kv_heads=2, features=16):
    batch, heads, queries, keys = SIZES
    return (
        truth.tokens(batch, heads, queries, features, seed=1),
        truth.tokens(batch, kv_heads, keys, features, seed=2),
        truth.tokens(batch, kv_heads, keys, features, seed=3),
    )


def called(run, q, k, v, mask, *, is_causal=False, scale=None):
    key = ("attention", None, is_causal, False, False, False, None)
    call = home._check(key, q, k, v, mask, None)
    return run(q, k, v, mask, call, 0.0, scale)


RUNS = {
    "right": Mask.from_lengths([3, 7, 1], max_len=7),
    "left": Mask.from_lengths([3, 7, 1], max_len=7, side="left"),
    "nothing kept": Mask.from_lengths([3, 0, 7], max_len=7),
    "one for all": Mask.from_lengths([4], max_len=7),
}


def poisoned(k, v, mask):
    """The same with NaN in the keys and values that are dropped."""
    kept = mask.to_bool().expand(SIZES[0], SIZES[3])[:, None, :, None]
    return torch.where(kept, k, torch.nan), torch.where(kept, v, torch.nan)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_runs_of_keys_go_to_varlen_without_packing(name, kv_heads):
    mask = RUNS[name]
    q, k, v = inputs(kv_heads)
    k, v = poisoned(k, v, mask)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = called(delegated.run_varlen, q, k, v, mask, scale=0.3)
    kept = masks.bits(mask.expand(SIZES[0], -1)[:, None, None], *SIZES)
    expected = truth.attention(q, k, v, kept, scale=0.3)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    above = truth.tokens(*out.shape, seed=4)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), above),
        torch.autograd.grad(expected, (q, k, v), above.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.usefixtures("_loops")
def test_a_query_that_is_nan_reaches_no_gradient_but_its_own():
    mask = RUNS["right"]
    q, k, v = (x.requires_grad_() for x in inputs())
    spoiled = q.detach().clone()
    spoiled[:, :, -1] = torch.nan
    spoiled.requires_grad_()
    above = truth.tokens(*q.shape, seed=4)
    above[:, :, -1] = 0.0
    want = torch.autograd.grad(called(delegated.run_varlen, q, k, v, mask), (k, v), above)
    out = called(delegated.run_varlen, spoiled, k, v, mask)
    assert out[:, :, -1].isnan().all()
    assert not out[:, :, :-1].isnan().any()
    for ours, theirs in zip(torch.autograd.grad(out, (k, v), above), want, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


PAIRS = {
    "lengths": (Mask.from_lengths([3, 0, 7], max_len=7), True),
    "causal": (Mask.causal(5, 7), False),
    "window": (Mask.window(5, 1, k=7)[None, None], False),
    "random pairs": (Mask(masks.random_bits(3, 1, 5, 7, seed=5)), False),
    "of heads": (Mask(masks.random_bits(1, 4, 5, 7, seed=6)), True),
}


@pytest.mark.usefixtures("_eager_flex")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_other_masks_go_to_flex_with_their_blocks(name, kv_heads):
    mask, is_causal = PAIRS[name]
    q, k, v = inputs(kv_heads)
    kept = masks.bits(mask[:, None, None] if name == "lengths" else mask, *SIZES)
    if is_causal:
        kept = kept & torch.ones(5, 7, dtype=torch.bool).tril()
    # What no query of a head keeps is NaN, and so is a query that keeps nothing.
    some = kept.any(-2).reshape(SIZES[0], kv_heads, -1, SIZES[3]).any(2)[..., None]
    q = torch.where(kept.any(-1)[..., None], q, torch.nan)
    k, v = torch.where(some, k, torch.nan), torch.where(some, v, torch.nan)
    out = called(delegated.run_flex, q, k, v, mask, is_causal=is_causal)
    torch.testing.assert_close(out.double(), truth.attention(q, k, v, kept), **CLOSE)


def test_a_mask_caches_its_blocks():
    mask = Mask.causal(5, 7)
    q, k, v = inputs()
    key = ("attention", None, False, False, False, False, None)
    call = home._check(key, q, k, v, mask, None)
    assert delegated._blocks(mask, call, q.device).blocks is delegated._blocks(mask, call, q.device).blocks


PACKINGS = {
    "lengths": (Mask.from_lengths([3, 0, 7], max_len=7), None),
    "gaps": (Mask(masks.random_bits(3, 7, seed=1)), None),
    "capacity": (Mask.from_lengths([3, 0, 7], max_len=7), 16),
}


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_tokens_go_to_varlen_in_one_call(name, is_causal):
    mask, capacity = PACKINGS[name]
    q, k, v = (truth.tokens(3, 7, heads, 16, seed=i) for i, heads in enumerate((4, 2, 2)))
    given = [mw.pack(x, mask, capacity=capacity) for x in (q, k, v)]
    options = {"is_causal": is_causal, "dropout_p": 0.0, "scale": None}
    out = packed._by_varlen(*given, None, mw.attention, options)
    assert out.values.isfinite().all()
    expected = mw.attention(*given, is_causal=is_causal)
    torch.testing.assert_close(out.unpack(), expected.unpack(), **CLOSE)


@pytest.mark.usefixtures("_loops")
def test_a_packed_query_without_keys_gives_zeros():
    q_mask, k_mask = Mask.from_lengths([3, 2], max_len=4), Mask.from_lengths([0, 4], max_len=4)
    q, k, v = (truth.tokens(2, 4, 2, 16, seed=i) for i in range(3))
    given = mw.pack(q, q_mask), mw.pack(k, k_mask), mw.pack(v, k_mask)
    options = {"is_causal": False, "dropout_p": 0.0, "scale": None}
    out = packed._by_varlen(*given, None, mw.attention, options)
    assert (out.values[:3] == 0).all()
    torch.testing.assert_close(out.values, mw.attention(*given).values, **CLOSE)


# -- which route, and no sync ------------------------------------------------------------------------------------------
def lengths_on_device():
    return Mask.from_lengths(torch.empty(2, dtype=torch.int64, device="cuda"), max_len=512)


CALLS = {
    "lengths of the host": (lambda: Mask.from_lengths([3, 512], max_len=512, device="cuda"), {}, "varlen"),
    "lengths of the device": (lengths_on_device, {}, "varlen"),
    "left padding": (lambda: Mask.from_lengths([3, 512], 512, side="left", device="cuda"), {}, "varlen"),
    "left padding and causal": (
        lambda: Mask.from_lengths([3, 512], 512, side="left", device="cuda"),
        {"is_causal": True},
        "flex",
    ),
    "causal alone": (lambda: None, {"is_causal": True}, "sdpa"),
    "lengths and causal": (lengths_on_device, {"is_causal": True}, "flex"),
    "a window": (lambda: Mask.window(512, 64, device="cuda")[None, None], {}, "flex"),
    "a bool tensor": (lambda: torch.empty(2, 512, dtype=torch.bool, device="cuda"), {}, "sdpa"),
    "dropout": (lengths_on_device, {"dropout_p": 0.1}, "sdpa"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_device_takes_its_route_and_waits_for_nothing(name, monkeypatch):
    build, options, route = CALLS[name]
    monkeypatch.setattr(delegated, "_flex", lambda: lambda q, k, v, **_: torch.empty_like(q))
    with cuda_without_cuda(), FakeTensorMode(), mw.explain() as log:
        q, k, v = (torch.empty(2, h, 512, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
        out = mw.attention(q, k, v, build(), **options)
    assert out.shape == q.shape
    assert out.device.type == "cuda"
    assert [call.route for call in log] == [route]


@pytest.mark.parametrize("capacity", [None, 700])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_attention_on_a_device_waits_for_nothing(capacity, is_causal, dtype, monkeypatch):
    monkeypatch.setattr(delegated, "_flex", lambda: lambda q, k, v, **_: torch.empty_like(q))
    on_host = Mask.from_lengths([3, 512], max_len=512, device="cuda")
    # Lengths of the host are read there; inside of the mode even those would be fake.
    assert packed._lengths(mw.Packed(torch.empty(515, 1, 1), on_host)) == [3, 512]
    monkeypatch.setattr(packed, "_lengths", lambda x: [3, 512])
    with cuda_without_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        mask = lengths_on_device() if capacity else on_host
        rows = [torch.empty(capacity or 515, h, 64, device="cuda", dtype=dtype) for h in (8, 2, 2)]
        out = mw.attention(*(mw.Packed(values, mask, capacity) for values in rows), is_causal=is_causal)
        assert out.values.shape == rows[0].shape
        assert out.capacity == capacity


def test_masks_of_one_kind_share_a_compiled_flex_attention(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    compiled = []

    def backend(module, _):
        compiled.append(module)
        return module.forward

    monkeypatch.setattr(delegated, "_flex", lambda: torch.compile(flex_attention, backend=backend))
    q, k, v = inputs()
    for lengths in ([3, 0, 7], [1, 2, 3], [7, 7, 7]):
        called(delegated.run_flex, q, k, v, Mask.from_lengths(lengths, max_len=7))
    assert len(compiled) == 1


def test_causal_alone_makes_no_mask_of_pairs_and_repeats_no_head():
    q, k, v = inputs()
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                seen.append((args[3], kwargs["is_causal"], kwargs["enable_gqa"], args[1].shape))
            return func(*args, **(kwargs or {}))

    # Keys after the last query are dropped by all.
    k[:, :, 5:], v[:, :, 5:] = torch.nan, torch.nan
    with Seen():
        out = sdpa.attend_without_sync(q, k, v, None, is_causal=True, dropout_p=0.0, scale=None)
    assert seen == [(None, True, True, (3, 2, 5, 16))]
    kept = torch.ones(5, 7, dtype=torch.bool).tril().expand(SIZES)
    torch.testing.assert_close(out.double(), truth.attention(q, k, v, kept), **CLOSE)
