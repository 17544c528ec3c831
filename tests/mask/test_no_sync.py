"""No constructor waits for a device, and host data is known without touching it."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from maskwise.mask import Mask
from tests.gpu.guard import cuda_without_cuda

# On a machine without CUDA any use of a CUDA tensor raises, so what works here never touches the device.
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the proof needs a device that cannot be touched")


# Neither has values, so to read one raises.
valueless = pytest.mark.parametrize("device", ["meta", "cuda"], indirect=True)


@pytest.fixture
def device(request):
    with cuda_without_cuda(), FakeTensorMode() if request.param == "cuda" else nullcontext():
        yield request.param


def zeros(device, *shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype, device=device)


BUILDS = {
    "bool": lambda d: Mask(zeros(d, 3, 4, dtype=torch.bool)),
    "from_lengths": lambda d: Mask.from_lengths(zeros(d, 3), max_len=4),
    "from_lengths left": lambda d: Mask.from_lengths(zeros(d, 3), max_len=4, side="left"),
    "from_indices": lambda d: Mask.from_indices(zeros(d, 5, 2), size=(3, 4)),
    "from_values": lambda d: Mask.from_values(zeros(d, 3, 4), [0, 101]),
    "from_segments": lambda d: Mask.from_segments(zeros(d, 4))[:3],
    "packed": lambda d: (Mask.from_segments(zeros(d, 4)) & Mask.causal(4, device=d))[1:],
    "from_function": lambda d: Mask.from_function(lambda q, k: k <= q, (3, 4), device=d),
    "causal": lambda d: Mask.causal(3, 4, device=d),
    "window": lambda d: Mask.window(3, 1, k=4, device=d),
    "full": lambda d: Mask.full((3, 4), device=d),
    "none": lambda d: Mask.none((3, 4), device=d),
    "from_key_padding": lambda d: Mask.from_key_padding(zeros(d, 3, 4, dtype=torch.bool)),
    "from_attention_mask": lambda d: Mask.from_attention_mask(zeros(d, 3, 4)),
    "from_additive": lambda d: Mask.from_additive(zeros(d, 3, 4, dtype=torch.bfloat16)),
    "from_cu_seqlens": lambda d: Mask.from_cu_seqlens(zeros(d, 4, dtype=torch.int32), max_len=4),
    "causal & lengths": lambda d: Mask.causal(3, 4, device=d) & Mask.from_lengths(zeros(d, 3), max_len=4),
    "~ and views": lambda d: (~Mask.from_lengths(zeros(d, 4), max_len=3)).T.unsqueeze(0)[0],
    "cat": lambda d: Mask.cat([Mask.from_lengths(zeros(d, 2), 4), Mask.from_lengths(zeros(d, 1), 4)]),
    "host and device": lambda d: Mask.from_lengths([1, 2, 3], 4, device=d) & Mask.from_lengths(zeros(d, 3), max_len=4),
}


@valueless
@pytest.mark.parametrize("name", BUILDS)
def test_nothing_is_read_from_the_device_to_build_combine_view_or_materialise(device, name):
    mask = BUILDS[name](device)
    assert mask.shape == (3, 4)
    assert mask.device.type == device
    assert mask.facts.numel == 12
    assert mask.to_bool().device.type == device
    assert mask.to_bool().shape == (3, 4)
    assert mask.lengths.device.type == device
    assert mask.cu_seqlens.dtype == torch.int32


@valueless
def test_counting_a_device_mask_does_read_the_device(device):
    with pytest.raises((DataDependentOutputException, RuntimeError)):
        Mask(zeros(device, 3, dtype=torch.bool)).count()


def test_a_fake_materialisation_is_not_remembered():
    mask = Mask.from_lengths([1, 2], 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert mask.to_bool().shape == (2, 3)
    assert mask.to_bool().tolist() == [[True, False, False], [True, True, False]]


HOST = {
    "lengths list": (lambda d: Mask.from_lengths([2, 4, 3], 5, device=d), 9, True),
    "lengths left": (lambda d: Mask.from_lengths(torch.tensor([2, 4, 3]), 5, side="left", device=d), 9, False),
    "lengths moved": (lambda d: Mask.from_lengths([2, 4, 3], 5).to(d), 9, True),
    "indices": (lambda d: Mask.from_indices([[0, 1], [2, 4]], (3, 5), device=d), 2, False),
    "segments": (lambda d: Mask.from_segments([0, 0, 1], device=d), 5, False),
    "causal": (lambda d: Mask.causal(3, 5, device=d), 6, True),
    "window": (lambda d: Mask.window(3, 1, k=5, device=d), 5, False),
    "full": (lambda d: Mask.full((3, 5), device=d), 15, True),
    "none": (lambda d: Mask.none((3, 5), device=d), 0, True),
    "and": (lambda d: Mask.causal(3, 5, device=d) & Mask.from_lengths([1, 1, 5], device=d), 5, True),
    "or": (lambda d: Mask.causal(3, 5, device=d) | Mask.from_lengths([1, 1, 5], device=d), 8, True),
    "not": (lambda d: ~Mask.from_indices([[0, 1], [2, 4]], (3, 5), device=d), 13, False),
    "view": (lambda d: Mask.from_lengths([2, 4, 3], 5, device=d)[1:, None, :3].expand(-1, 2, -1), 12, True),
    "stack": (lambda d: Mask.stack([Mask.from_lengths(2, 3, device=d), Mask.from_lengths(1, 3, device=d)]), 3, True),
}


@needs_no_cuda
@pytest.mark.parametrize("name", HOST)
def test_masks_from_host_data_know_their_facts_without_touching_the_device(name):
    build, count, prefix = HOST[name]
    mask = build("cuda")
    assert mask.device.type == "cuda"
    assert mask.facts.on_host
    assert mask.count() == count
    assert mask.density == count / mask.numel()
    assert mask.is_full == (count == mask.numel())
    assert mask.is_empty == (count == 0)
    assert mask.is_prefix == prefix
    assert f"{count} of {mask.numel()} kept" in str(mask)
    assert mask._host_lengths().sum().item() == count


@needs_no_cuda
def test_reading_facts_computes_nothing():
    mask = Mask.from_function(lambda q, k: k <= q, (4, 4))
    assert mask.facts.count is None
    assert mask.facts.is_prefix is None
    assert set(mask._cache) == {"facts"}
    mask.count()
    assert mask.facts.count == 10


@needs_no_cuda
def test_a_device_without_an_index_is_any_of_its_kind():
    mask = Mask.from_lengths([1, 2], 3, device="cuda") & Mask.from_lengths([2, 1], 3, device="cuda:0")
    assert mask._host_lengths().tolist() == [1, 1]


def test_what_was_counted_before_a_mask_moves_is_not_counted_there():
    bits = torch.tensor([[True, False], [True, True]])
    counted = Mask(bits)
    assert (counted.count(), counted.is_prefix) == (3, True)
    with cuda_without_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        moved = counted.to("cuda")
        assert (moved.count(), moved.is_prefix, moved.device.type) == (3, True, "cuda")
        assert Mask(bits).to("cuda").facts.count is None
