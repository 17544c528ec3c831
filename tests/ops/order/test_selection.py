"""What sorts and selects on a GPU, by one radix pass over integers, run on the CPU: it gives what two sorts give."""

import pytest
import torch

from maskwise.ops.order import reference

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
SHAPE = (4, 6, 33)


def values(dtype, seed=0):
    """Values with ties, both zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4 if dtype is not torch.uint8 else 0, 5, SHAPE, generator=generator)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x[..., 0], x[..., 1] = info.min, info.max
        return x.to(dtype)
    x = x.to(dtype)
    x[0, 0, :4] = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf])
    x[1, 1, 3] = torch.nan
    x[2, 2, 5:9] = torch.tensor([-torch.nan, torch.nan, torch.inf, -torch.inf])
    return x


def bits(seed=1):
    mask = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[3, 0] = False
    return mask


@pytest.fixture
def both(monkeypatch):
    """(call) -> what it gives as on a GPU, and what it gives by two stable sorts."""

    def run(call):
        found = []
        for on_gpu in (True, False):
            monkeypatch.setattr(reference, "selects", lambda x, on_gpu=on_gpu: on_gpu)
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
            with torch.random.fork_rng():
                found.append(call())
        return found

    return run


def same(found):
    ours, theirs = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("descending", [False, True])
def test_one_sort_by_keys_gives_what_two_stable_sorts_give(both, dtype, dim, descending):
    x, mask = values(dtype), bits()
    same(both(lambda: reference.sort(x, mask, [dim], descending)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [1, 5, 32])
def test_topk_by_one_selection_breaks_ties_by_position(both, dtype, largest, k):
    x, mask = values(dtype), bits()
    same(both(lambda: reference.topk(x, mask, [2], k, largest)))


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("dim", [[2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_median_by_one_selection_is_the_lower_one_and_nan_where_one_is_kept(both, dtype, dim, keepdim):
    x, mask = values(dtype), bits()
    same(both(lambda: reference.median(x, mask, dim, keepdim)))
    for found in both(lambda: reference.median_indices(x, mask, dim, keepdim)):
        taken = torch.where(found < 0, torch.nan, x.double().reshape(-1)[found.clamp_min(0)])
        torch.testing.assert_close(taken, reference.median(x, mask, dim, keepdim).double(), equal_nan=True)


def test_the_gradient_of_a_selected_median_goes_to_one_kept_element(both):
    x, mask = torch.arange(10.0).flip(0).reshape(2, 5), torch.tensor([[True, False, True, True, False]] * 2)

    def gradient():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(reference.median(leaf, mask, [1], False).sum(), leaf)[0]

    same(both(gradient))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_dropped_reaches_no_selection(both, poison):
    x, mask = values(torch.float32), bits()
    spoiled = torch.where(mask, x, poison)
    for call in (
        lambda x: reference.topk(x, mask, [2], 3, True),
        lambda x: reference.median(x, mask, [2], False),
        lambda x: reference.quantile(x, mask, [2], torch.tensor(0.3), False, 0),
    ):
        for ours, theirs in zip(both(lambda call=call: call(spoiled)), both(lambda call=call: call(x)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
