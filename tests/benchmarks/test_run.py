import csv
import json

import pytest
import torch

from benchmarks.case import Case, Side, at_least, never_slower
from benchmarks.report import (
    HEADLINE,
    Provenance,
    geometric_means,
    large_ratios,
    rows,
    table,
    to_json,
    write_csv,
)
from benchmarks.run import BenchmarkError, _judge, run_case
from maskwise.plan.measure import Samples

MACHINE = {"cpu": "a cpu", "cores": 2, "threads": 2, "simd": "none", "torch": "2", "maskwise": "0"}
PROVENANCE = Provenance("python -m benchmarks", "2030-01-01T00:00:00+00:00", quick=False, machine=MACHINE)


def case_of(ours, **peers):
    sides = [Side("ours", lambda inputs: ours, "ours"), *(Side(n, lambda inputs, f=f: f) for n, f in peers.items())]
    return Case("family", "fn", "variant", lambda case: None, tuple(sides), shape=(8,))


def judged(seconds, targets, **kinds):
    sides = tuple(Side(name, lambda inputs: lambda: None, kinds.get(name, "peer")) for name in seconds)
    case = Case("family", "fn", "variant", lambda case: None, sides, targets=targets)
    return _judge(case, Samples(seconds), {side.name: side.kind for side in sides}, {}, copied=1)


@pytest.fixture
def result():
    return judged(
        {"mine": [1.0, 1.0], "slow": [20.0, 20.0], "fast": [16.0, 14.0], "leak": [0.5, 0.5]},
        (at_least(15, "best peer"), at_least(16, "fast"), never_slower("slow")),
        mine="ours",
        leak="leaky",
    )


def test_a_side_that_disagrees_fails_the_run_and_is_named():
    case = case_of(lambda: torch.ones(3), wrong=lambda: torch.tensor([1.0, 1.0, 2.0]))
    with pytest.raises(BenchmarkError, match="fn variant: wrong disagrees with ours"):
        run_case(case, quick=True)


def test_a_side_with_another_shape_disagrees():
    with pytest.raises(BenchmarkError, match="wrong disagrees"):
        run_case(case_of(lambda: torch.ones(3), wrong=lambda: torch.ones(3, 1)), quick=True)


def test_a_side_that_raises_fails_the_run_and_is_named():
    def broken():
        raise ValueError("no such thing")

    with pytest.raises(BenchmarkError, match="fn variant: broken raised ValueError: no such thing"):
        run_case(case_of(lambda: torch.ones(3), broken=broken), quick=True)


def test_a_floor_may_compute_something_else():
    floor = Side("less", lambda inputs: lambda: torch.zeros(7), "floor")
    case = case_of(lambda: torch.ones(3))
    result = run_case(Case(**{**vars(case), "sides": (*case.sides, floor)}), quick=True)
    assert result.floor.name == "less"


def test_a_side_that_cannot_run_here_is_left_out_with_its_reason():
    absent = Side("absent", lambda inputs: pytest.fail("prepared"), unavailable=lambda: "no compiler")
    case = case_of(lambda: torch.ones(3))
    result = run_case(Case(**{**vars(case), "sides": (*case.sides, absent)}), quick=True)
    assert result.skipped == {"absent": "no compiler"}
    assert [side.name for side in result.sides] == ["ours"]


def test_the_best_peer_is_the_fastest_that_does_not_leak(result):
    assert result.best_peer.name == "fast"
    assert [verdict.holds for verdict in result.verdicts] == [True, False, True]
    assert result.verdicts[0].side == "fast"


def test_bandwidth_counts_bytes_against_a_copy_in_the_same_rounds():
    sides = (Side("mine", lambda inputs: lambda: None, "ours"),)
    case = Case("family", "fn", "variant", lambda case: None, sides, moved_bytes=lambda case: 100)
    kinds = {"mine": "ours", "copy_": "memory"}
    # The copy moves 2 x 100 bytes in 4 s, ours 100 bytes in 4 s: half its bandwidth.
    found = _judge(case, Samples({"mine": [4.0], "copy_": [4.0]}), kinds, {}, copied=100)
    assert found.bandwidth == 0.5


def test_csv_has_a_row_a_side_and_says_where_it_comes_from(result, tmp_path):
    path = tmp_path / "new" / "figures.csv"
    write_csv(path, [result], PROVENANCE)
    read = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["side"] for row in read] == ["mine", "slow", "fast", "leak"]
    assert float(read[1]["ratio"]) == 20.0
    assert {row["command"] for row in read} == {"python -m benchmarks"}
    assert read[0]["targets"].startswith("pass: at least 15 x faster than best peer; MISS: at least 16 x")
    assert [path.name for path in path.parent.iterdir()] == ["figures.csv"]


def test_json_and_rows_tell_the_same(result):
    data = json.loads(json.dumps(to_json([result], PROVENANCE)))
    (case,) = data["cases"]
    assert [s["ratio"]["median"] for s in case["sides"]] == [row["ratio"] for row in rows([result], PROVENANCE)]
    assert [t["holds"] for t in case["targets"]] == [True, False, True]


def test_the_table_has_a_line_a_case(result):
    assert table([result, result]).row_count == 2


def faster_by(ratio, function):
    seconds = {"mine": [1.0], "peer": [ratio]}
    sides = (Side("mine", lambda inputs: lambda: None, "ours"), Side("peer", lambda inputs: lambda: None))
    case = Case("family", function, "variant", lambda case: None, sides, moved_bytes=lambda case: 1)
    copied = {**seconds, "copy_": [1.0]}
    return _judge(case, Samples(copied), {"mine": "ours", "peer": "peer", "copy_": "memory"}, {}, copied=1)


def test_one_number_sums_up_the_cases_of_a_function_and_of_the_headline(result):
    few = [faster_by(4.0, "sum"), faster_by(16.0, "sum")]
    assert geometric_means(large_ratios([*few, result])) == pytest.approx({"sum": 8.0})
    rest = [faster_by(2.0, function) for function in sorted(HEADLINE - {"sum"})]
    assert geometric_means(large_ratios([*few, *rest]))["all six"] == pytest.approx((4.0 * 16.0 * 2.0**5) ** (1 / 7))
