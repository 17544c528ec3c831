"""Every kernel compiles ahead of time for the GPUs there are, and keeps its registers; no GPU is needed for that.

The default run has a sample of all of them.
MASKWISE_COMPILE=all, which is `make test-gpu-compile`, has every configuration that a launcher can choose, for every
dtype and every target.
"""

import os
import random
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")

from maskwise.ops.backends import INTEGRAL
from maskwise.ops.gpu.launch import recording
from maskwise.ops.loss import gpu as loss
from maskwise.ops.reduce import gpu as reduce
from maskwise.ops.softmax import gpu as softmax
from tests.gpu import aot, calls

EVERYTHING = os.environ.get("MASKWISE_COMPILE") == "all"
#: Of all configurations every so many-th, another one for each op: thousands take an hour.
SHARE = int(os.environ.get("MASKWISE_COMPILE_SHARE", "1"))
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
    pairs = [(layout, torch.float32) for layout in call.layouts] + [(DEFAULT, dtype) for dtype in call.dtypes[1:]]
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
    for layout, dtype, target in [*configurations(call)][calls.CALLS.index(call) % SHARE :: SHARE]:
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


def tile(launch):
    """A kernel, and what its launcher chooses of its tile."""
    names = ("ROWS", "ELEMENTS", "GROUP", "SIDE")
    return launch.kernel.__name__, *(launch.arguments.get(name) for name in names), launch.warps


def choices(launch):
    """What else a launcher chooses, each by itself: all of their combinations would be thousands of kernels more."""
    names = ("ALIGN", "MASK", "BITS", "WIDE", "SPLITS", "PARTS", "PASS", "IN_REGISTERS")
    return {(launch.kernel.__name__, name, launch.arguments.get(name)) for name in names}


@cache
def compiled_launches():
    """The launches that are compiled."""
    return [each for call in calls.CALLS for where in call.layouts for each in call.launches(where, torch.float32)]


@pytest.mark.parametrize("name", KERNELS)
def test_whatever_the_shape_its_kernel_is_compiled_in_its_tile_and_with_each_choice(name):
    tiles = {tile(each) for each in compiled_launches()}
    chosen = set().union(*map(choices, compiled_launches()))
    (call,) = [call for call in calls.CALLS if call.name == name]
    for layout in map(any_layout, range(200)):
        for launch in call.launches(layout, torch.float32):
            assert tile(launch) in tiles, layout
            assert choices(launch) <= chosen, layout


def test_there_is_a_launch_for_each_kind_of_tile():
    (call,) = [call for call in calls.CALLS if call.name == "softmax"]
    launches = [launch for layout in calls.LAYOUTS for launch in call.launches(layout, torch.float32)]
    passes = {launch.arguments["PASS"] for launch in launches if "PASS" in launch.arguments}
    assert passes == {"registers", "loop", "write"}
    for name, kinds in {
        "ALIGN": {"aligned", "shifted", "even", ""},
        "MASK": {"bits", "rows"},
        "SIDE": {"rows", "columns"},
        "GROUP": {1, 4},
    }.items():
        assert {launch.arguments[name] for launch in launches} == kinds


def layout(name):
    return next(each for each in calls.LAYOUTS if each.name == name)


# -- gates on the machine code -----------------------------------------------------------------------------------------
#: Reductions, and where their rows lie.
GATED = [
    ("sum", "rows", torch.float32),
    ("sum of intervals", "wider rows", torch.float32),
    ("sum", "vocabulary rows", torch.bfloat16),
    ("sum", "few long rows", torch.float32),
    ("sum", "columns", torch.float32),
    ("sum", "many short rows", torch.float32),
    ("sum", "long rows", torch.bfloat16),
    ("sum of intervals", "columns", torch.bfloat16),
    ("sum", "row masks", torch.float16),
    ("sum", "unaligned rows", torch.float32),
    ("sum", "rows of 8", torch.float32),
    ("sum", "transposed", torch.float32),
    ("sum", "channels last", torch.float32),
    ("sum", "every other", torch.float32),
    *(("sum", "rows", dtype) for dtype in (*INTEGRAL, torch.bool)),
    ("sum", "long rows", torch.int32),
    ("sum", "long rows", torch.int8),
]
OTHERS = [
    (name, where, torch.float32)
    for name in (
        "mean",
        "var",
        "amax",
        "argmax",
        "logsumexp",
        "norm",
        "logsumexp of intervals",
        "softmax",
        "cross_entropy",
    )
    for where in ("long rows", "few long rows", "columns", "transposed", "channels last", "every other")
    # Registers hold softmax's rows of 8,192 strided elements: they have no loop.
    if (name, where) != ("softmax", "every other")
]
NVIDIA = ("sm_80", "sm_90", "sm_100")


def gated(cases, every, targets):
    """The cases that are compiled: all, or every so many-th for one target."""
    chosen = [(*case, target) for case in cases for target in targets]
    chosen = chosen if EVERYTHING else [(*case, targets[1]) for case in cases[::every]]
    return [pytest.param(*each, id="-".join(map(str, each))) for each in chosen]


def accumulating(name, where, dtype):
    """The launches of a call that accumulate rows in a loop."""
    (call,) = [call for call in calls.CALLS if call.name == name]
    for launch in call.launches(layout(where), dtype):
        if launch.kernel.__name__ in ("reduce_kernel", "class_kernel") or launch.arguments.get("PASS") == "loop":
            yield launch


@pytest.mark.parametrize(("name", "where", "dtype", "target"), gated(GATED + OTHERS, 5, tuple(aot.TARGETS)))
def test_no_loop_over_a_row_has_a_barrier_and_no_register_is_spilled(name, where, dtype, target):
    launches = list(accumulating(name, where, dtype))
    assert launches
    for launch in launches:
        # A loop that stores writes the result, and its threads may exchange what they write.
        loops = [loop for loop in aot.loops(launch, target) if not loop.count("STG", "_store_")]
        assert loops
        assert [loop.exchanges for loop in loops] == [0] * len(loops)
        assert aot.resources(launch, target).spilled == 0


SCANS = [f"{name}{side}" for name in ("cumsum", "cumprod", "cummax", "logcumsumexp") for side in ("", " backward")]


@pytest.mark.parametrize(
    ("name", "where", "dtype", "target"),
    gated([(name, "few long rows", torch.float32) for name in SCANS], 5, tuple(aot.TARGETS)),
)
def test_a_scan_of_split_rows_reduces_in_parallel_then_scans_and_spills_no_register(name, where, dtype, target):
    (call,) = [call for call in calls.CALLS if call.name == name]
    reduces, *scans = call.launches(layout(where), dtype)
    assert len(scans) == (2 if name == "cumprod backward" else 1)
    assert reduces.arguments["PASS"] == "totals"
    for launch in (reduces, *scans):
        assert launch.programs >= 132
        assert aot.resources(launch, target).spilled == 0
    assert not any(loop.exchanges for loop in aot.loops(reduces, target))


#: Elements with gaps between them are loaded one by one, by an address each.
VECTORS = [case for case in GATED if case[1] != "every other"]


@pytest.mark.parametrize(("name", "where", "dtype", "target"), gated(VECTORS, 3, NVIDIA))
def test_a_sum_takes_at_most_eight_instructions_an_element_and_has_two_16_byte_loads_in_flight(
    name, where, dtype, target
):
    (launch,) = accumulating(name, where, dtype)
    # Tiles that are in the range of their rows as a whole have a loop of their own, which is the one that counts.
    size = dtype.itemsize + (launch.arguments["MASK"] == "bits")
    loop = min(aot.loops(launch, target), key=lambda loop: len(loop.body) / sum(loop.loads))
    assert len(loop.body) / (sum(loop.loads) / size) <= 8
    assert loop.loads.count(16) >= 2


@pytest.mark.parametrize(
    ("name", "where", "target"),
    [
        pytest.param(name, where, target, id=f"{name}-{where}-{target}")
        for name in ("softmax", "softmax backward", "cumsum", "cumsum backward", "logsumexp backward")
        for where in ("columns", "transposed")
        # The gradient of a reduction is contiguous however x lies: over transposed columns it is a transposition.
        if (name, where) != ("logsumexp backward", "transposed")
        for target in (aot.TARGETS if EVERYTHING else ("sm_90",))
    ],
)
def test_what_is_written_over_columns_goes_through_no_shared_memory_and_takes_few_registers(name, where, target):
    for launch in of(name).launches(layout(where), torch.float32):
        # A launch without a loop is one loop over its jobs.
        loops = [loop for loop in aot.loops(launch, target) if loop.count("STG", "_store_")]
        assert all(loop.barriers == 0 for loop in loops)
        assert all(loop.count("STG.E.128", "store_dwordx4") == loop.count("STG", "_store_") for loop in loops)
        assert aot.resources(launch, target).registers <= 128


@pytest.mark.parametrize(("name", "where", "dtype", "target"), gated(GATED[1:2], 1, NVIDIA))
def test_intervals_read_no_mask_in_their_loops(name, where, dtype, target):
    (launch,) = accumulating(name, where, dtype)
    assert {size for loop in aot.loops(launch, target) for size in loop.loads} == {16}


def test_few_long_rows_are_as_many_programs_as_a_device_runs_at_once():
    (call,) = [call for call in calls.CALLS if call.name == "sum"]
    one = calls.Layout("one row", (1, 1 << 26), -1)
    (launch,) = call.launches(one, torch.float32)
    assert launch.programs * launch.warps == 132 * 64
    for name in ("softmax", "cross_entropy", "segment sum", *SCANS):
        (call,) = [call for call in calls.CALLS if call.name == name]
        given = calls.Layout("one column", (1 << 26, 1), 0) if "segment" in name else one
        assert all(launch.programs >= 132 for launch in call.launches(given, torch.float32)), name


def of(name):
    (call,) = [call for call in calls.CALLS if call.name == name]
    return call


@pytest.mark.parametrize(
    "run",
    [
        lambda x, m, v: softmax.standardize(x, m, [1], v, v),
        lambda x, m, v: softmax.normalize(x, m, [1], 2.0, v),
        lambda x, m, v: softmax.normalize_backward(x, x, m, [1], 2.0 + v, v),
        lambda x, m, v: reduce.var(x, m, [1], False, v),
        lambda x, m, v: reduce.norm(x, m, [1], False, 2.0 + v),
        lambda x, m, v: loss.loss(x, x, m, 3, v, 2),
        lambda x, m, v: loss.cross_entropy(x, m[:, 0].long(), m[:, 0], None, -100, v, 2),
    ],
    ids=["standardize", "normalize", "normalize backward", "var", "norm", "loss", "cross_entropy"],
)
def test_no_number_is_a_constant_of_a_kernel(run):
    x, mask = DEFAULT.tensors(torch.float32)
    keys = set()
    for value in (0.1, 0.25, 1.0):
        with recording() as launches:
            run(x, mask, value)
        keys.add(tuple(map(aot.key, launches)))
    assert len(keys) == 1


def test_numbers_of_rows_tiles_and_splits_compile_nothing_anew():
    # 1, 3 and 48 tiles; split into 1, 3 or 16 parts: Triton alone would compile a kernel for each of them.
    many = {
        aot.key(launch)
        for rows in (1, 3, 16, 48, 4000, 4096)
        for length in (1 << 16, 1 << 20, 1 << 22)
        for launch in of("sum").launches(calls.Layout("", (rows, length), -1), torch.float32)
    }
    # Rows that are split or not; a stride between rows, or none because there is one row.
    assert len(many) <= 4


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.empty(4096, 4096, device="meta").t(),
        lambda: torch.empty(64, 32, 64, 64, device="meta").to(memory_format=torch.channels_last),
        lambda: torch.empty(4096, 4096, device="meta")[:, ::2],
    ],
    ids=["transposed", "channels_last", "every other"],
)
def test_a_sum_of_all_elements_is_many_programs_however_they_lie(view):
    x = view()
    mask = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool, device="meta")
    with recording() as launches:
        reduce.sum(x, mask, list(range(x.dim())), False)
    assert launches[0].programs >= 132
    assert len(launches[0].arguments["inner"]) == 1


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("sum", "rows"),
        ("softmax", "columns"),
        ("cumsum", "rows"),
        ("pack", "rows"),
        ("softmax", "vocabulary rows"),
        ("softmax backward", "vocabulary rows"),
        ("cross_entropy", "vocabulary rows"),
        ("cross_entropy backward", "vocabulary rows"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x_is_read_sixteen_bytes_at_once(name, where, dtype):
    (call,) = [call for call in calls.CALLS if call.name == name]
    (launch,) = call.launches(layout(where), dtype)
    assert "ld.global.v4.b32" in aot.compiled(launch, "sm_80").asm["ptx"]


def test_with_triton_debug_a_class_that_does_not_exist_is_an_assertion():
    (call,) = [call for call in calls.CALLS if call.name == "cross_entropy"]
    (launch,) = call.launches(DEFAULT, torch.float32)
    assert "__assertfail" not in aot.compiled(launch, "sm_80").asm["ptx"]
    options = {"num_warps": launch.warps, "debug": True}
    asserting = aot.triton.compile(aot.source(launch), target=aot.TARGETS["sm_80"], options=options)
    assert "__assertfail" in asserting.asm["ptx"]
    assert "a kept target is a class that does not exist" in asserting.asm["ttir"]
