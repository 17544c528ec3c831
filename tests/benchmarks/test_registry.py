from dataclasses import replace

import pytest

from benchmarks.cases import sweep
from benchmarks.registry import all_cases, named_cases, select
from benchmarks.run import run_case
from maskwise.errors import ArgumentError
from tests.laws.functions import FUNCTIONS


def without_compiled(case):
    """The case without its compiled side: a compiler run takes seconds, and one case shows that it works."""
    if case.name == "sum 4096x4096 dim=-1 keep=10%":
        return case
    return replace(case, sides=tuple(side for side in case.sides if not side.name.startswith("compile(")))


SWEEP = named_cases("sweep")
CASES = [without_compiled(case) for case in all_cases() if case.family != "startup"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_runs_in_its_shrunken_form_and_its_sides_agree(case):
    if (reason := case.unavailable()) is not None:
        pytest.skip(reason)
    result = run_case(case, quick=True)
    measured = {side.name for side in result.sides if side.kind != "memory"}
    assert measured | set(result.skipped) == {side.name for side in case.sides}
    assert result.verdicts == ()


def test_names_are_distinct():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)


def test_a_target_never_hangs_on_a_side_that_leaks():
    for case in all_cases():
        leaky = {side.name for side in case.sides if side.kind == "leaky"}
        assert leaky.isdisjoint(target.side for target in case.targets), case.name


def test_the_promises_for_sum_are_in_the_registry():
    for density in (10, 50, 90):
        (case,) = [case for case in all_cases() if case.name == f"sum 4096x4096 dim=-1 keep={density}%"]
        assert [target.text for target in case.targets] == [
            "at least 15 x faster than best peer",
            "at most 2 x the time of x.sum",
        ]
        peers = {side.name for side in case.sides if side.kind == "peer"}
        assert peers >= {"where+sum", "torch.masked.sum", "compile(where+sum)"}


def test_every_word_of_a_filter_must_match():
    assert {case.family for case in select("startup")} == {"startup"}
    assert [case.name for case in select("4x8 BOOL")] == ["sum 4x8 from a bool tensor"]


def test_a_filter_that_matches_nothing_says_how_to_list():
    with pytest.raises(ArgumentError, match=r"got 'nothing'. Hint: python -m benchmarks --list"):
        select("nothing")


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("sofmax 4x8", "--filter 'softmax 4x8' or --filter 'softmax 4x8 forward+backward'"),
        ("softmax 4x9", "--filter 'softmax 4x8'"),
        ("atention", "--filter 'attention lengths 1..512'"),
        ("keept sum", "--filter 'kept sum lengths 4096x4096 dim=-1 keep=5%'"),
        ("nothing, startup improt", "--filter 'import maskwise after torch'"),
    ],
)
def test_a_filter_that_matches_nothing_lists_near_names(pattern, near):
    with pytest.raises(ArgumentError) as raised:
        select(pattern)
    assert near in str(raised.value)


# -- the sweep ---------------------------------------------------------------------------------------------------------
def test_the_sweep_runs_only_when_it_is_named():
    assert "sweep" not in {case.family for case in select("softmax")}
    assert {case.family for case in select("sweep softmax")} == {"sweep"}
    assert len(select("sweep")) == len(SWEEP)


def test_the_sweep_covers_every_public_function_size_density_and_layout():
    functions = {case.function for case in SWEEP}
    assert functions >= {*FUNCTIONS, "count", "apply", "pack", "attention", "linear"}
    of_sum = {(case.shape, case.density, case.name.split()[-1]) for case in SWEEP if case.function == "sum"}
    assert of_sum == {
        (shape, density, layout)
        for shape in sweep.SIZES
        for density in (0.02, 0.5, 0.98)
        for layout in ("contiguous", "strided", "lengths")
    } | {(shape, 0.5, origin) for shape in sweep.SIZES for origin in ("left", "causal", "window", "segments")}
    assert {(8, 16), (16, 100_000), (32, 128, 256)} <= set(sweep.SIZES)
    assert {target.text for case in SWEEP for target in case.targets} == {"never slower than idiom"}


@pytest.mark.parametrize("layout", ["strided", "lengths", *sweep.ORIGINS])
@pytest.mark.parametrize("swept", sweep.SWEPT, ids=lambda swept: swept.name)
def test_every_function_of_the_sweep_runs_and_agrees_by_every_route(swept, layout):
    case = next(case for case in SWEEP if case.function == swept.name and case.name.endswith(f"50% {layout}"))
    result = run_case(case, quick=True)
    routes = {side.name for side in result.sides if side.kind == "route"}
    assert routes == {f"route {route}" for route in swept.routes}
    assert result.route in routes if routes else result.route is None


@pytest.mark.parametrize("case", [case for case in SWEEP if case.name.startswith("linear sweep 32x128x256 keep=50%")])
def test_the_mask_of_a_weight_has_its_shape_and_keeps_its_kind(case):
    _, weight, mask = case.setup(case)
    assert mask.shape == weight.shape == (256, 256)
    assert mask.operand == ("bits" if case.name.endswith(("contiguous", "strided")) else "intervals")


def test_strided_inputs_are_strided_and_equal_to_contiguous_ones():
    cases = [case for case in SWEEP if case.name.startswith("sum sweep 64x128 keep=50%")]
    contiguous, strided, lengths, *others = (case.setup(case) for case in cases)
    assert contiguous.x.is_contiguous()
    assert strided.x.stride() == (1, 64)
    assert contiguous.x.equal(strided.x)
    assert contiguous.keep.equal(strided.keep)
    assert contiguous.x.equal(lengths.x)
    assert (contiguous.mask.operand, lengths.mask.operand) == ("bits", "intervals")
    assert lengths.mask.equal(lengths.keep)
    assert lengths.mask.density == pytest.approx(0.5, abs=0.1)
    for other in others:
        assert other.mask.operand == "intervals"
        assert other.keep.shape == other.x.shape
        assert other.keep.sum(-1).min() >= 2
        assert other.mask.equal(other.keep)
