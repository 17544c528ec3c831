"""No constructor waits for a device, and host data is known without touching it."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from maskwise.mask import Mask

# On a machine without CUDA any use of a CUDA tensor raises, so what works here never touches the device.
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the proof needs a device that cannot be touched")


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def cuda(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype, device="cuda")


BUILDS = {
    "bool": lambda: Mask(cuda(3, 4, dtype=torch.bool)),
    "from_lengths": lambda: Mask.from_lengths(cuda(3), max_len=4),
    "from_lengths left": lambda: Mask.from_lengths(cuda(3), max_len=4, side="left"),
    "from_indices": lambda: Mask.from_indices(cuda(5, 2), size=(3, 4)),
    "from_values": lambda: Mask.from_values(cuda(3, 4), [0, 101]),
    "from_segments": lambda: Mask.from_segments(cuda(4))[:3],
    "from_function": lambda: Mask.from_function(lambda q, k: k <= q, (3, 4), device="cuda"),
    "causal": lambda: Mask.causal(3, 4, device="cuda"),
    "window": lambda: Mask.window(3, 1, k=4, device="cuda"),
    "full": lambda: Mask.full((3, 4), device="cuda"),
    "none": lambda: Mask.none((3, 4), device="cuda"),
    "from_key_padding": lambda: Mask.from_key_padding(cuda(3, 4, dtype=torch.bool)),
    "from_attention_mask": lambda: Mask.from_attention_mask(cuda(3, 4)),
    "from_additive": lambda: Mask.from_additive(cuda(3, 4, dtype=torch.bfloat16)),
    "from_cu_seqlens": lambda: Mask.from_cu_seqlens(cuda(4, dtype=torch.int32), max_len=4),
    "causal & lengths": lambda: Mask.causal(3, 4, device="cuda") & Mask.from_lengths(cuda(3), max_len=4),
    "~ and views": lambda: (~Mask.from_lengths(cuda(4), max_len=3)).T.unsqueeze(0)[0],
    "cat": lambda: Mask.cat([Mask.from_lengths(cuda(2), 4), Mask.from_lengths(cuda(1), 4)]),
    "host and device": lambda: Mask.from_lengths([1, 2, 3], 4, device="cuda") & Mask.from_lengths(cuda(3), max_len=4),
}


@pytest.mark.parametrize("name", BUILDS)
def test_nothing_is_read_from_the_device_to_build_combine_view_or_materialise(fake, name):
    mask = BUILDS[name]()
    assert mask.shape == (3, 4)
    assert mask.device.type == "cuda"
    assert mask.facts.numel == 12
    assert mask.to_bool().device.type == "cuda"
    assert mask.to_bool().shape == (3, 4)
    assert mask.lengths.device.type == "cuda"
    assert mask.cu_seqlens.dtype == torch.int32


def test_counting_a_device_mask_does_read_the_device(fake):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        Mask(cuda(3, dtype=torch.bool)).count()


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
    assert not mask._cache
    mask.count()
    assert mask.facts.count == 10


def test_a_device_without_an_index_is_any_of_its_kind(fake):
    other = Mask(torch.ones(2, 3, dtype=torch.bool, device="cuda:0"))
    assert (Mask.from_lengths([1, 2], 3, device="cuda") & other).shape == (2, 3)
