"""What mw.explain() reports as skipped is neither read nor computed."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.ops.attention import blocks
from tests.laws.functions import FUNCTIONS
from tests.laws.samples import needed
from tests.plan import guarded

X = torch.rand(64, 256) + 0.5
#: A quarter of each row, and a quarter of the rows.
IN_ROWS, OF_ROWS = mw.Mask.from_lengths([64] * 64, max_len=256), mw.Mask(torch.arange(64)[:, None] % 4 == 1)
IN_ROWS.count(), OF_ROWS.count()
THREE_QUARTERS = 64 * 256 * 3 // 4


def report(call):
    with mw.explain() as log:
        call()
    found = log.calls[0]
    return found.skipped, found.skipped_bytes, found.skipped_flops


def call_of(function, mask, x=X):
    if function.name == "loss":
        return lambda: mw.loss(F.mse_loss, x, x, mask)
    options = {} if function.kind == "elementwise" else {"dim": -1}
    return lambda: function.call(x, mask, **options, **needed(function))


#: The families whose CPU kernels take masks as intervals.
TAKE_INTERVALS = {"reduce", "fill", "loss", "scan", "order", "softmax"}


#: The families whose CPU kernels look at 64 bits before they read as many elements of a row.
LOOK_AT_BLOCKS = {"reduce", "fill", "loss"}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_an_interval_of_rows_is_all_that_is_read_by_kernels_that_take_it(function):
    expected = THREE_QUARTERS if function.family in TAKE_INTERVALS and function.kernel else 0
    for dtype in (torch.float32, torch.float64):
        mask = mw.Mask.from_lengths([64] * 64, max_len=256)
        assert report(call_of(function, mask, X.to(dtype)))[:2] == (expected, expected * dtype.itemsize)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_of_bits_along_rows_whole_blocks_are_skipped_by_the_kernels_that_look_at_them(function):
    looks = function.family in LOOK_AT_BLOCKS and function.kernel
    whole, half = torch.arange(256) < 64, torch.arange(256) < 96
    for keep, empty in ((whole, 3), (half, 2), (half.expand(64, 256).contiguous(), 2), (torch.arange(256) % 2 > 0, 0)):
        skipped = 64 * 64 * empty if looks else 0
        assert report(call_of(function, keep))[:2] == (skipped, 4 * skipped)
    # Rows that are not whole blocks begin anywhere in a block of memory.
    assert report(call_of(function, torch.arange(250) < 64, X[:, :250].contiguous())) == (0, 0, 0)


def test_bytes_read_and_elements_computed_are_what_is_not_skipped():
    with mw.explain() as log:
        mw.sum(X, IN_ROWS, dim=-1)
        mw.sum(X, IN_ROWS.to_bool(), dim=-1)
        mw.softmax(X, IN_ROWS.to_bool(), dim=-1)
    assert [(call.computed, call.read_bytes) for call in log] == [(4096, 16384), (4096, 16384), (16384, 65536)]


@pytest.mark.parametrize("fn", [mw.sum, mw.softmax, mw.cumsum, mw.median], ids=lambda fn: fn.__name__)
def test_the_predicted_time_follows_what_an_interval_mask_keeps(fn):
    x, times = torch.rand(2048, 2048), []
    for length in (2048, 1024, 100):
        with mw.explain() as log:
            fn(x, mw.Mask.from_lengths([length] * 2048, max_len=2048), dim=-1)
        times.append(log.calls[0].microseconds)
        assert mw.plan(fn, x, mw.Mask.from_lengths([length] * 2048, max_len=2048), dim=-1).microseconds == times[-1]
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0]


def test_a_predicted_sum_is_in_proportion_to_what_is_kept():
    x = torch.rand(2048, 2048)
    work = [mw.plan(mw.sum, x, mw.Mask.from_lengths([n] * 2048, max_len=2048), dim=-1).work for n in (2048, 512)]
    assert work[1].streamed * 4 == work[0].streamed
    assert work[1].flops * 4 == work[0].flops


#: The families whose CPU kernels pass over a row that one bool drops; tests/plan/guarded.py shows that they do.
PASS_OVER_ROWS = {"reduce", "scan", "loss", "order", "fill"}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_dropped_rows_are_skipped_by_the_kernels_that_pass_over_them_and_by_no_others(function):
    skipped, of_bytes, flops = report(call_of(function, OF_ROWS))
    expected = THREE_QUARTERS if function.family in PASS_OVER_ROWS and function.kernel else 0
    assert (skipped, of_bytes) == (expected, 4 * expected)
    assert flops == (expected if function.family != "loss" else None)
    # The same rows, of which the kernel sees block by block that they are dropped; and rows that do not lie in a row.
    bits = OF_ROWS.expand(64, 256).to_bool().contiguous()
    in_blocks = expected if function.family in LOOK_AT_BLOCKS else 0
    assert report(call_of(function, bits))[:2] == (in_blocks, 4 * in_blocks)
    assert report(call_of(function, OF_ROWS, X.T.contiguous().T)) == (0, 0, 0)


def test_where_few_rows_are_dropped_reductions_may_read_them_and_compute_none_of_them():
    few, many = (mw.Mask(torch.arange(64)[:, None] % n != 1) for n in (8, 2))
    few.count(), many.count()
    assert report(lambda: mw.sum(X, few, dim=0))[:2] == (8 * 256, 0)
    assert report(lambda: mw.sum(X, many, dim=0))[:2] == (32 * 256, 4 * 32 * 256)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_the_dense_route_skips_nothing(function):
    with mw.force("dense"):
        assert report(call_of(function, OF_ROWS)) == (0, 0, 0)


@pytest.fixture(scope="module")
def ended():
    """By case, the signal that ended the process, if any did, and the bytes that were reported as skipped."""
    done = subprocess.run([sys.executable, "-m", "tests.plan.guarded"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", guarded.CASES)
def test_bytes_that_are_reported_as_not_read_can_be_protected(case, ended):
    if case in ("torch", "dense"):
        assert ended[case]["signal"] != 0  # What reads dropped rows does die, so the others do not read them.
    else:
        # Of attention, that of keys and of values; of blocks, every second page.
        expected = guarded.UNREAD * (2 if case == "attention" else 1)
        if "blocks" in case:
            expected = guarded.ROWS * guarded.PAGE // 2
        if "ragged" in case:
            # Lengths keep 7 of 16 pages.
            expected = guarded.ROWS * guarded.PAGE * 9 // 16
        assert ended[case] == {"signal": 0, "skipped_bytes": str(expected)}


def test_apply_skips_the_rows_that_fn_does_not_get():
    seen = []

    def fn(rows):
        seen.append(rows.numel())
        return rows

    rows = OF_ROWS.squeeze(1)
    rows.count()
    for mask in (rows, IN_ROWS):
        # At its first use a function is called once more.
        mw.apply(fn, X, mask=mask)
        for route in ("kept", "dense"):
            with mw.force(route):
                skipped, of_bytes, flops = report(lambda mask=mask: mw.apply(fn, X, mask=mask))
            assert skipped == X.numel() - seen[-1]
            # Elements share lines of memory with dropped ones; what fn computes nobody knows.
            assert of_bytes == (4 * skipped if mask is not IN_ROWS else 0)
            assert flops == (None if route == "kept" else 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_by_blocks_skips_the_pairs_that_no_call_of_sdpa_is_given(is_causal, monkeypatch):
    scored, real = [], blocks._forward

    def forward(q, k, *rest, **options):
        scored.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return real(q, k, *rest, **options)

    monkeypatch.setattr(blocks, "_forward", forward)
    q = torch.rand(2, 2, 400, 16)
    with mw.force("blocks"):
        skipped, of_bytes, flops = report(
            lambda: mw.attention(q, q, q, mw.Mask.from_lengths([30, 400]), is_causal=is_causal)
        )
    assert skipped == 4 * 400 * 400 - sum(scored) > 0
    assert (of_bytes, flops) == (0, 4 * 16 * skipped)


def test_attention_by_the_kernel_skips_the_keys_that_no_query_keeps():
    q = torch.rand(2, 2, 400, 16)
    with mw.force("kernel"):
        # A key that no query keeps is neither packed nor scored: 370 of 400, for two heads of one entry.
        found = report(lambda: mw.attention(q, q, q, mw.Mask.from_lengths([30, 400])))
        assert found == (2 * 400 * 370, 2 * 370 * 2 * 16 * 4, 4 * 16 * 2 * 400 * 370)
        # One query in a block keeps a key: all of the block is scored, so what single queries drop is not skipped.
        band = torch.ones(400, 400).tril(3).triu(-3) > 0
        assert report(lambda: mw.attention(q, q, q, band[None, None])) == (0, 0, 0)
        # Up to 23 keys beyond a query's own are scored with the last query of its block.
        causal = report(lambda: mw.attention(q, q, q, is_causal=True))
        assert causal[0] == 4 * sum(max(0, 400 - 24 - i) for i in range(400))
    for route in ("plain", "whole"):
        with mw.force(route):
            assert report(lambda: mw.attention(q, q, q, mw.Mask.from_lengths([30, 400]))) == (0, 0, 0)


def test_packed_attention_skips_the_pairs_of_the_padded_layout_that_are_not_there():
    mask = mw.Mask.from_lengths([3, 5], max_len=6)
    q = mw.pack(torch.rand(2, 6, 2, 4), mask)
    with mw.explain() as log:
        mw.attention(q, q, q)
    (call,) = log
    assert (call.elements, call.skipped) == (2 * 2 * 36, 2 * 2 * 36 - 2 * (9 + 25))
    assert (call.skipped_bytes, call.skipped_flops) == (0, 16 * call.skipped)


def test_a_sparse_product_skips_the_weights_that_it_does_not_multiply():
    mask = mw.Mask(torch.rand(64, 64) < 0.1)
    x, weight, dropped = torch.rand(32, 64), torch.rand(64, 64), 64 * 64 - mask.count()
    for route, expected in (("kernel", (dropped, 0, 2 * 32 * dropped)), ("dense", (0, 0, 0))):
        with mw.force(route):
            assert report(lambda: mw.linear(x, weight, mask)) == expected
    layer = mw.nn.SparseLinear(64, 64, density=0.1)
    for route, share in (("kernel", 1), ("dense", 0)):
        with mw.force(route):
            gone = (64 * 64 - layer.values.numel()) * share
            assert report(lambda: layer(x)) == (gone, 4 * gone, 2 * 32 * gone)


def test_a_masked_layer_reports_its_product():
    mask = torch.rand(64, 64) < 0.1
    x, dropped = torch.rand(32, 64), int((~mask).sum())
    layer = mw.nn.MaskedLinear(64, 64, gate=mask).eval().requires_grad_(False)
    # The first product is dense, and a sparse one is made when its layout has paid for itself.
    assert report(lambda: layer(x)) == (0, 0, 0)
    with mw.force("kernel"):
        assert report(lambda: layer(x)) == (dropped, 4 * dropped, 2 * 32 * dropped)
    units = torch.zeros(1024, 1024, dtype=torch.bool)
    units[:100, :200] = True
    layer, x = mw.nn.MaskedLinear(1024, 1024, gate=units).eval().requires_grad_(False), torch.rand(512, 1024)
    with mw.explain() as log:
        for _ in range(30):
            layer(x)
    gone = 1024 * 1024 - 100 * 200
    calls = [call for call in log if call.op == "MaskedLinear"]
    assert calls[-1].route in ("units", "sparse")
    for call in calls:
        assert (call.skipped, call.skipped_bytes) == ((0, 0) if call.route == "plain" else (gone, 4 * gone))


def test_the_table_says_what_is_skipped_in_percent():
    with mw.explain() as log:
        mw.sum(X, OF_ROWS, dim=-1)
        mw.softmax(X, IN_ROWS.to_bool(), dim=-1)
    assert "75 % (12,288 of" in " ".join(str(log).split())
    assert "16.4 kB" in str(log)
    assert "nothing" in str(log)
