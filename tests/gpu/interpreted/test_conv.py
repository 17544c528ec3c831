"""Tiles: the Triton kernels of gather and scatter against their references, to the bit."""

import pytest
import torch

import maskwise as mw
from maskwise.ops.conv import gpu, tiles
from tests.laws.odd_bytes import odd


def layouts(x):
    yield x.contiguous()
    yield x.contiguous(memory_format=torch.channels_last)
    yield torch.cat([x, x], 1)[:, ::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [1, 3, 70])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (3, 5)])
def test_tiles_are_gathered_and_scattered_to_the_bit(dtype, channels, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 13, 11, generator=generator).to(dtype)
    bits = torch.rand(2, 13, 11, generator=generator) < 0.3
    reads = [*size, -1, -2, size[0] + 2, size[1] + 3]
    found, _ = tiles._active(bits, None, [2, 13, 11], list(size), reads)
    for each in layouts(x):
        for kept, fill, edge in ((None, None, False), (bits, 7.0, False), (odd(bits), None, True)):
            value = None if fill is None else torch.tensor(fill, dtype=dtype)
            got = gpu.gather(each, kept, found, reads, value, edge)
            assert torch.equal(got, tiles._gather(each, bits if kept is not None else None, found, reads, value, edge))
            assert got.is_contiguous(memory_format=torch.channels_last)
    other = torch.tensor(-2.0, dtype=dtype)
    for wanted in (None, odd(bits)):
        for last in (False, True):
            args = (got, found, wanted, other, list(x.shape), list(size), [1, 2], last)
            out = gpu.scatter(*args)
            truth = tiles._scatter(got, found, None if wanted is None else bits, *args[3:])
            assert torch.equal(out, truth)
            assert out.stride() == truth.stride()


def test_nothing_is_moved_for_no_tiles():
    none, x = torch.empty(0, 3, dtype=torch.int32), torch.randn(1, 3, 4, 4)
    batch = gpu.gather(x, None, none, [2, 2, 0, 0, 2, 2])
    assert batch.shape == (0, 3, 2, 2)
    out = gpu.scatter(batch, none, None, torch.zeros(()), [1, 3, 4, 4], [2, 2], [0, 0], False)
    assert torch.equal(out, torch.zeros(1, 3, 4, 4))


# -- from end to end ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ["tiles", "pixels"])
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_and_its_gradients_by_tiles_are_the_dense_ones(route, last):
    layout = torch.channels_last if last else torch.contiguous_format
    mask = torch.zeros(2, 19, 17, dtype=torch.bool)
    mask[0, 2:6, 3:9] = mask[1, 18, 16] = True
    results = []
    for name in (route, "plain"):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, 19, 17, generator=generator, dtype=torch.float64).to(memory_format=layout)
        # What is dropped does not leak.
        x = torch.where(mask[:, None], x, torch.nan).requires_grad_()
        weight = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64).requires_grad_()
        with mw.force(name), mw.explain() as log:
            out = mw.conv2d(x, weight, padding=1, mask=mask, other=-1.0)
        assert [each.route for each in log] == [name]
        results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), (x, weight))))
    torch.testing.assert_close(*results)
