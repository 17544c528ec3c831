"""Large results lie in fresh memory: what is dropped is zeros that nobody wrote, or is written.

Tests fill fresh memory with NaN, so that a place that is taken for zeros, and is not, shows.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw

pytestmark = pytest.mark.kernel

#: Five huge pages, and rows that end in none of them: 2100 x 1031 elements of 4 bytes.
ROWS, SIZE = 2100, 1031


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def values(dtype=torch.float32):
    return torch.randint(-9, 10, (ROWS, SIZE), generator=torch.Generator().manual_seed(0)).to(dtype) / 4


def masks():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, SIZE + 1, (ROWS,), generator=generator)
    # Empty slices, and whole huge pages of them.
    lengths[::7] = 0
    lengths[500:1600] = 0
    yield "right", mw.Mask.from_lengths(lengths, max_len=SIZE)
    yield "left", mw.Mask.from_lengths(lengths, max_len=SIZE, side="left")
    yield "rows", (lengths > 0)[:, None]
    yield "bits", torch.rand(ROWS, SIZE, generator=generator) < 0.3


MASKS = dict(masks())
FUNCTIONS = {
    "softmax": lambda x, keep: torch.where(keep, torch.where(keep, x, -torch.inf).softmax(-1), 0.0),
    "log_softmax": lambda x, keep: torch.where(keep, torch.where(keep, x, -torch.inf).log_softmax(-1), -torch.inf),
    "softmin": lambda x, keep: torch.where(keep, torch.where(keep, -x, -torch.inf).softmax(-1), 0.0),
    "normalize": lambda x, keep: F.normalize(torch.where(keep, x, 0.0), dim=-1),
    "cumsum": lambda x, keep: torch.where(keep, x, 0.0).cumsum(-1),
}


def bits(mask):
    return (mask.to_bool() if isinstance(mask, mw.Mask) else mask).expand(ROWS, SIZE)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_slices_and_its_gradient(name, mask, count):
    x, keep = values().requires_grad_(), bits(MASKS[mask])
    above = torch.rand(ROWS, SIZE, generator=torch.Generator().manual_seed(2))
    if name == "log_softmax":
        # -inf has no gradient.
        above = torch.where(keep, above, 0.0)
    with threads(count):
        out = getattr(mw, name)(x, MASKS[mask], dim=-1)
        (grad,) = torch.autograd.grad(out, x, above)
    reference = x.detach().double().requires_grad_()
    expected = FUNCTIONS[name](reference, keep)
    (expected_grad,) = torch.autograd.grad(expected, reference, above.double())
    # Sums of up to a thousand values, in float32.
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad.double(), torch.where(keep, expected_grad, 0.0), rtol=1e-4, atol=2e-4)
    assert not grad[~keep].any()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "logsumexp"])
def test_the_gradient_of_a_reduction(name, mask, count):
    x, keep = values().requires_grad_(), bits(MASKS[mask])
    some = keep.any(-1)
    above = torch.rand(ROWS, generator=torch.Generator().manual_seed(2))
    with threads(count):
        (grad,) = torch.autograd.grad(getattr(mw, name)(x, MASKS[mask], dim=-1), x, torch.where(some, above, 0.0))
    reference = x.detach().double().requires_grad_()
    of_reference = {
        "sum": lambda: torch.where(keep, reference, 0.0).sum(-1),
        "mean": lambda: torch.where(keep, reference, 0.0).sum(-1) / keep.sum(-1).clamp(min=1),
        "amax": lambda: torch.where(keep, reference, -torch.inf)[some].amax(-1),
        "logsumexp": lambda: torch.where(keep, reference, -torch.inf)[some].logsumexp(-1),
    }[name]()
    upstream = above.double() if of_reference.numel() == ROWS else above[some].double()
    (expected,) = torch.autograd.grad(of_reference, reference, upstream)
    torch.testing.assert_close(grad.double(), torch.where(keep, expected, 0.0), rtol=1e-5, atol=1e-6)
    assert not grad[~keep].any()


@pytest.mark.parametrize("value", [0.0, -0.0, torch.nan, 3.0])
@pytest.mark.parametrize("mask", MASKS)
def test_filling_writes_every_bit_of_the_value(mask, value):
    x, keep = values(), bits(MASKS[mask])
    expected = torch.where(keep, x, torch.tensor(value))
    for count in (1, 2, 3):
        with threads(count):
            out = mw.fill(x, MASKS[mask], value)
            turned = mw.fill(x.t().contiguous().t(), MASKS[mask], value)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(turned.contiguous().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_filling_of_any_dtype(dtype):
    x = torch.randint(0, 2, (4 * ROWS, SIZE), generator=torch.Generator().manual_seed(0)).to(dtype)
    keep = (torch.arange(4 * ROWS) % 3 == 0)[:, None]
    with threads(2):
        for value in (0, 1):
            assert torch.equal(mw.fill(x, keep, value), torch.where(keep, x, torch.tensor(value, dtype=dtype)))


def test_the_scans_of_extremes_write_both_results():
    x, mask = values(), MASKS["right"]
    keep = bits(mask)
    with threads(2):
        found, places = mw.cummax(x, mask, dim=-1)
    filled = torch.where(keep, x, -torch.inf)
    assert torch.equal(found, filled.cummax(-1).values)
    started = keep.cumsum(-1) > 0
    assert torch.equal(filled.gather(-1, places.clamp(min=0))[started], found[started])


def test_a_large_vocabulary_with_dropped_rows():
    x = torch.randn(160, 20_000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.arange(160)
    for keep in (torch.arange(160) % 11 == 0, torch.arange(160) % 3 > 0):
        with threads(2):
            (grad,) = torch.autograd.grad(mw.loss(F.cross_entropy, x, target, keep), x)
        (expected,) = torch.autograd.grad(F.cross_entropy(x[keep], target[keep]), x)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-9)
        assert not grad[~keep].any()


UNPOISONED = """
import ctypes, sys, torch
import maskwise as mw
if sys.argv[1] == "locked" and ctypes.CDLL(None, use_errno=True).mlockall(3) != 0:
    sys.exit(77)
torch.set_num_threads(2)
mask = mw.Mask.from_lengths(torch.arange(4096) * 3 % 2049, max_len=2304)
keep, x = mask.to_bool(), torch.randn(4096, 2304)
for _ in range(3):
    out = mw.fill(x, mask, 0.0)
    assert torch.equal(out, torch.where(keep, x, 0.0))
    # What malloc hands out again has been written.
    out.fill_(torch.nan)
    del out
    small = mw.fill(x[:512], mask[:512], 0.0)
    assert torch.equal(small, torch.where(keep[:512], x[:512], 0.0))
    small.fill_(torch.nan)
    del small
    soft = mw.softmax(x, mask, dim=-1)
    assert not soft[~keep].any() and torch.allclose(soft.sum(-1), keep.any(-1).float())
    soft.fill_(torch.nan)
    del soft
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's")
@pytest.mark.parametrize("memory", ["pageable", "locked"])
def test_memory_that_is_new_recycled_or_locked(memory):
    environment = {**os.environ}
    environment.pop("MASKWISE_POISON", None)
    command = [sys.executable, "-c", UNPOISONED, memory]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this process may not lock its memory")
    assert ran.returncode == 0, ran.stderr
