"""Every kernel compiles ahead of time for the GPUs there are, and keeps its registers; no GPU is needed for that.

The default run has a sample of all of them.
MASKWISE_COMPILE=all, which is `make test-gpu-compile`, has every configuration that a launcher can choose, for every
dtype and every target.
"""

import os
import random

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

from tests.gpu import aot, calls

EVERYTHING = os.environ.get("MASKWISE_COMPILE") == "all"
DEFAULT = calls.LAYOUTS[0]
#: In the default run every how many-th configuration is compiled. A prime, so that it is not always the same column.
STRIDE = 607


#: An op for each kernel, and for each way of choosing its tile.
KERNELS = (
    "sum", "mean backward", "logsumexp backward", "softmax", "normalize 3.0", "cumsum", "cummax backward",
    "cumprod backward", "fill", "loss", "loss unreduced", "loss backward", "cross_entropy", "cross_entropy backward",
    "pack", "unpack", "segment sum", "segment sum backward",
)  # fmt: skip


def configurations(call):
    """(layout, dtype, target) of everything that there is to compile for an op; each configuration once."""
    seen = set()
    pairs = [(layout, torch.float32) for layout in calls.LAYOUTS] + [(DEFAULT, dtype) for dtype in call.dtypes[1:]]
    for layout, dtype in pairs:
        new = {aot.configuration(launch) for launch in call.launches(layout, dtype)} - seen
        seen |= new
        if new:
            yield from ((layout, dtype, target) for target in aot.TARGETS)


@pytest.mark.parametrize("call", calls.CALLS[:: 1 if EVERYTHING else 9], ids=lambda call: call.name)
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


@pytest.mark.skipif(not EVERYTHING, reason="takes minutes: make test-gpu-compile")
@pytest.mark.parametrize("name", KERNELS if EVERYTHING else KERNELS[:1])
def test_sizes_that_16_does_not_divide_compile_for_every_target(name):
    (call,) = [call for call in calls.CALLS if call.name == name]
    for target in aot.TARGETS:
        for launch in call.launches(calls.ODD, torch.float32):
            assert aot.compiled(launch, target).metadata.num_warps == launch.warps


def any_layout(number):
    """A layout that nobody thought of: sizes on either side of every limit, in any order, perhaps strided."""
    pick = random.Random(number)
    sizes = [pick.choice((1, 2, 7, 16, 17, 33, 128, 129, 1000, 1025, 2049, 5000, 8193)) for _ in range(3)]
    if pick.random() < 0.5:
        # Not more of them than there is memory for anywhere.
        sizes = [pick.choice((1, 2, 17)), pick.choice((1 << 16, 1 << 20, (1 << 31) + 5))]
    pick.shuffle(sizes)
    mask = tuple(pick.choice((1, size)) for size in sizes) if pick.random() < 0.3 else None
    return calls.Layout(str(number), tuple(sizes), pick.randrange(len(sizes)), mask, step=pick.choice((1, 1, 3)))


@pytest.mark.parametrize("name", KERNELS)
def test_whatever_the_shape_its_configuration_is_one_that_is_compiled(name):
    (call,) = [call for call in calls.CALLS if call.name == name]
    known = {aot.configuration(launch) for layout in calls.LAYOUTS for launch in call.launches(layout, torch.float32)}
    for layout in map(any_layout, range(200)):
        for launch in call.launches(layout, torch.float32):
            assert aot.configuration(launch) in known, layout


def test_there_is_a_launch_for_each_kind_of_tile():
    (call,) = [call for call in calls.CALLS if call.name == "softmax"]
    tiles = {
        tuple(launch.arguments[name] for name in ("ROWS", "ELEMENTS", "GROUP", "WIDE", "IN_REGISTERS"))
        for layout in calls.LAYOUTS
        for launch in call.launches(layout, torch.float32)
    }
    assert tiles == {
        (128, 16, 4, False, True),
        (16, 128, 4, False, True),
        (1, 1024, 4, False, True),
        (1, 2048, 4, False, True),
        (1, 4096, 4, False, True),
        (1, 8192, 4, False, True),
        (1, 1024, 4, True, False),
        (64, 32, 1, True, True),
        (64, 32, 1, True, False),
        (16, 128, 1, True, False),
    }


COLUMNS = next(layout for layout in calls.LAYOUTS if layout.name == "columns")
WIDE = next(layout for layout in calls.LAYOUTS if layout.name == "64-bit rows")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("sum", DEFAULT), ("softmax", COLUMNS), ("cumsum", DEFAULT), ("pack", DEFAULT), ("sum", WIDE)],
    ids=lambda each: getattr(each, "name", each),
)
def test_x_is_read_sixteen_bytes_at_once_although_what_is_dropped_is_skipped(name, layout):
    (call,) = [call for call in calls.CALLS if call.name == name]
    (launch,) = call.launches(layout, torch.float32)
    assert "ld.global.v4.b32" in aot.compiled(launch, "sm_80").asm["ptx"]


def test_with_triton_debug_a_class_that_does_not_exist_is_an_assertion():
    (call,) = [call for call in calls.CALLS if call.name == "cross_entropy"]
    (launch,) = call.launches(DEFAULT, torch.float32)
    assert "__assertfail" not in aot.compiled(launch, "sm_80").asm["ptx"]
    options = {"num_warps": launch.warps, "debug": True}
    asserting = aot.triton.compile(aot.source(launch), target=aot.TARGETS["sm_80"], options=options)
    assert "__assertfail" in asserting.asm["ptx"]
    assert "a kept target is a class that does not exist" in asserting.asm["ttir"]
