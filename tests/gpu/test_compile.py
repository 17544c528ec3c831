"""Every kernel compiles ahead of time for the GPUs there are, and keeps its registers; no GPU is needed for that.

The default run has the ops that docs/gpu.md tells of in their default configuration, and a sample of all others.
MASKWISE_COMPILE=all, which is `make test-gpu-compile`, has every configuration that a launcher can choose, for every
dtype and every target.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

from tests.gpu import aot, calls
from tests.gpu.page import ALONE, IDIOMS, NO_GRADIENT

EVERYTHING = os.environ.get("MASKWISE_COMPILE") == "all"
DEFAULT = calls.LAYOUTS[0]
#: What docs/gpu.md tells of, and so is compiled anyway.
TOLD = {*IDIOMS, *ALONE, *(f"{name} backward" for name in (*IDIOMS, *ALONE) if name not in NO_GRADIENT)}
#: In the default run every how many-th configuration is compiled. A prime, so that it is not always the same column.
STRIDE = 661


def configurations(call):
    """(layout, dtype, target) of everything that there is to compile for an op."""
    every = [(layout, torch.float32, target) for layout in calls.LAYOUTS for target in aot.TARGETS]
    return every + [(DEFAULT, dtype, target) for dtype in call.dtypes[1:] for target in aot.TARGETS]


@pytest.mark.parametrize("call", [c for c in calls.CALLS if EVERYTHING or c.name in TOLD], ids=lambda call: call.name)
def test_the_default_configuration_does_not_spill_on_sm_80(call):
    launches = call.launches(DEFAULT, torch.float32)
    assert 1 <= len(launches) <= 2
    for launch in launches:
        assert aot.resources(launch, "sm_80").spilled == 0


SAMPLE = [(call, *config) for call in calls.CALLS for config in configurations(call)]


@pytest.mark.parametrize(
    ("call", "layout", "dtype", "target"),
    [pytest.param(*each, id=f"{each[0].name}-{each[1].name}-{each[2]}-{each[3]}") for each in SAMPLE[::STRIDE]],
)
def test_a_sample_of_the_other_configurations_compiles(call, layout, dtype, target):
    for launch in call.launches(layout, dtype):
        assert aot.compiled(launch, target).metadata.num_warps == launch.warps


@pytest.mark.skipif(not EVERYTHING, reason="takes minutes: make test-gpu-compile")
@pytest.mark.parametrize("call", calls.CALLS if EVERYTHING else calls.CALLS[:1], ids=lambda call: call.name)
def test_every_configuration_compiles_for_every_target(call):
    for layout, dtype, target in configurations(call):
        for launch in call.launches(layout, dtype):
            assert aot.compiled(launch, target).metadata.num_warps == launch.warps
            if layout is DEFAULT and target != "gfx942":
                assert aot.resources(launch, target).spilled == 0, (call.name, dtype, target)


def test_there_is_a_launch_for_each_kind_of_tile():
    (call,) = [call for call in calls.CALLS if call.name == "softmax"]
    tiles = {
        (launch.arguments["ROWS"], launch.arguments["ELEMENTS"], launch.arguments["WHOLE"])
        for layout in calls.LAYOUTS
        for launch in call.launches(layout, torch.float32)
    }
    assert tiles == {
        (128, 16, True),
        (16, 128, True),
        (2, 1024, True),
        (1, 2048, True),
        (1, 4096, True),
        (1, 8192, True),
        (2, 1024, False),
        (64, 32, True),
        (64, 32, False),
    }


@pytest.mark.parametrize("layout", [DEFAULT, calls.LAYOUTS[8]], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", ["sum", "softmax", "softmax backward", "cumsum", "pack"])
def test_x_is_read_sixteen_bytes_at_once_although_what_is_dropped_is_skipped(name, layout):
    (call,) = [call for call in calls.CALLS if call.name == name]
    (launch,) = call.launches(layout, torch.float32)
    assert "ld.global.v4.b32" in aot.compiled(launch, "sm_80").asm["ptx"]
