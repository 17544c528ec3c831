"""Calls can be captured as CUDA graphs: nothing is copied from the host, and no memory depends on data.

Fake and meta tensors have no data, so an allocation whose size depended on some would raise. A graph replays addresses:
a tensor that the host makes inside of a call and copies to the device would be captured with values of that call.
"""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.guard import cuda_without_cuda

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

from maskwise.ops.gpu import launch
from tests.gpu import calls
from tests.gpu.test_no_sync import CALLS, fake_mask, fake_x

LAYOUTS = ("rows", "few long rows", "columns", "strided rows")


class Watch(TorchDispatchMode):
    """Notes operations that make tensors on the host, and those that move any between host and device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        # A number without dims is passed to kernels by value.
        on_host = [x for x in made if x.device.type == "cpu" and x.dim()]
        is_copy = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        crosses = is_copy and len(given | {x.device.type for x in made}) > 1
        if on_host or crosses:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_copies_nothing_from_the_host(name):
    with cuda_without_cuda(), FakeTensorMode():
        x, mask = fake_x(), fake_mask()
        # What is cached with a plan is made before a capture, as warm-up calls do.
        CALLS[name](x, mask)
        with Watch() as watch:
            CALLS[name](x, mask)
    assert watch.found == []


@pytest.mark.parametrize("call", calls.CALLS, ids=lambda call: call.name)
def test_a_launcher_makes_no_tensor_on_the_host(call):
    # Rows, rows that are split, columns, and rows with gaps.
    for layout in [each for each in call.layouts if each.name in LAYOUTS]:
        with Watch() as watch:
            assert call.launches(layout, call.dtypes[0])
        assert watch.found == []


def test_a_captured_launch_has_counters_of_its_own():
    with cuda_without_cuda(), FakeTensorMode(), mock.patch.object(launch, "_counters", {}) as cached:
        x = torch.empty(4, device="cuda:1")
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            first, second = launch.current_counters(x, 8), launch.current_counters(x, 8)
    assert first is not second
    assert (first.device, first.dtype, first.numel()) == (torch.device("cuda:1"), torch.int32, 8)
    assert cached == {}
