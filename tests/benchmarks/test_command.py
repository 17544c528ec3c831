import csv
import io
import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import command
from benchmarks.case import at_least, never_slower
from benchmarks.command import app
from benchmarks.registry import all_cases, select
from benchmarks.report import legend
from benchmarks.run import BenchmarkError, Result, SideResult, Verdict, run_case
from maskwise.plan.measure import Spread


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture
def measured(monkeypatch):
    """Let every case end at once with a verdict that holds or not, so that nothing is timed here."""

    def pretend(*, holds):
        def run_case(case, **_):
            side = SideResult(case.ours.name, "ours", 1.0, 1.0, Spread(1, 1, 1))
            peer = SideResult("x[mask].sum()", "peer", 2.0, 2.0, Spread(2, 2, 2))
            return Result(case, (side, peer), (Verdict(at_least(15, "peer"), "x[mask].sum()", holds),), {}, None)

        monkeypatch.setattr(command, "run_case", run_case)

    return pretend


def test_quick_writes_csv_and_json_of_the_filtered_cases(invoke, tmp_path):
    path = tmp_path / "out.csv"
    result = invoke("--quick", "--filter", "4x8 bool", "--json", "--csv", str(path))
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert [case["case"] for case in data["cases"]] == ["sum 4x8 from a bool tensor"]
    assert data["quick"] is True
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {row["case"] for row in rows} == {"sum 4x8 from a bool tensor"}
    typed = ["--quick", "--filter", "4x8 bool", "--json", "--csv", str(path)]
    assert {row["command"] for row in rows} == {shlex.join(["python", "-m", "benchmarks", *typed])}


def test_quick_says_that_its_times_say_nothing(invoke):
    result = invoke("--quick", "--filter", "4x8")
    assert result.exit_code == 0
    assert "the times above say nothing" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("holds", "arguments", "code"), [(True, ["--check"], 0), (False, ["--check"], 1), (False, [], 0)]
)
def test_a_missed_target_fails_only_under_check(measured, invoke, holds, arguments, code):
    measured(holds=holds)
    result = invoke("--filter", "4x8", *arguments)
    assert result.exit_code == code
    assert ("missed:" in result.stdout) is not holds


def test_brackets_in_a_peers_name_are_shown(measured, invoke):
    measured(holds=False)
    told = invoke("--filter", "4x8").stdout
    table, missed = told.split("missed:", 1)
    assert "x[mask]" in table
    assert "(x[mask].sum())" in missed


def test_a_side_that_fails_ends_with_code_1_and_writes_nothing(monkeypatch, invoke, tmp_path):
    def broken(case, **_):
        raise BenchmarkError("sum: where+sum disagrees with mw.sum")

    monkeypatch.setattr(command, "run_case", broken)
    result = invoke("--csv", str(tmp_path / "out.csv"))
    assert result.exit_code == 1
    assert "where+sum disagrees" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_side_that_fails_does_not_cost_the_other_cases(monkeypatch, invoke, tmp_path):
    def broken_once(case, **options):
        if case.name == "softmax 4x8":
            raise BenchmarkError("softmax: idiom disagrees with mw.softmax")
        return run_case(case, **{**options, "quick": True})

    monkeypatch.setattr(command, "run_case", broken_once)
    path = tmp_path / "out.csv"
    result = invoke("--filter", "softmax 4x8", "--csv", str(path))
    assert result.exit_code == 1
    assert "idiom disagrees" in result.stderr
    cases = {line.split(",")[2] for line in path.read_text().splitlines()[1:]}
    assert "softmax 4x8" not in cases
    assert "log_softmax 4x8" in cases


def test_an_interrupt_writes_nothing(monkeypatch, invoke, tmp_path):
    def interrupted(case, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_case", interrupted)
    assert invoke("--csv", str(tmp_path / "out.csv")).exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_the_help_shows_flags_without_a_type(invoke):
    told = invoke("--help").stdout
    assert "<bool>" not in told
    assert "WORDS" in told


def test_a_run_starts_with_what_matches_and_how_long_it_takes(measured, invoke):
    measured(holds=True)
    assert "match '4x8': about" in invoke("--filter", "4x8", "--json").stderr
    whole = invoke("--json").stderr
    cases = len(all_cases())
    assert f"{cases} cases: about {cases * 8 / 60:.0f} min of timing" in whole
    assert "--quick" in whole
    assert invoke("--budget", "0.2", "--filter", "4x8 bool", "--json").stderr.startswith("1 case matches '4x8 bool'")
    assert "of timing" not in invoke("--quick", "--filter", "4x8", "--json").stderr


@pytest.mark.parametrize(("holds", "mark", "missed"), [(True, "✓1", 0), (False, "✗1", 1)])
def test_the_legend_names_the_target_of_each_tick(measured, invoke, monkeypatch, holds, mark, missed):
    measured(holds=holds)
    monkeypatch.setenv("COLUMNS", "140")
    table, legend = invoke("--filter", "4x8 bool").stdout.split("target", 1)
    assert mark in table
    assert f"1   at least 15 x faster than peer      1     {1 - missed}        {missed}" in legend


def test_the_legend_says_what_never_slower_allows():
    side = SideResult("mw.sum", "ours", 1.0, 1.0, Spread(1, 1, 1))
    (case,) = select("4x8 bool")
    result = Result(case, (side,), (Verdict(never_slower(), "mw.sum", holds=True),), {}, None)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(legend([result]))
    assert "never slower than best peer (within 5 % or 5 µs)" in console.export_text()
    assert legend([replace(result, verdicts=())]) is None


def test_list_names_every_case_and_its_targets(invoke):
    listed = json.loads(invoke("--list", "--json").stdout)
    assert [entry["case"] for entry in listed] == [case.name for case in all_cases()]
    assert listed[0]["targets"] == [target.text for target in select("keep=10%")[0].targets]
    assert "at least 15 x" in " ".join(invoke("--list").stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "nothing"], "got 'nothing'. Hint: python -m benchmarks --list"),
        (["--quick", "--check"], "drop --check"),
        (["--plot", "figure.gif"], "--plot writes .png or .svg"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
