"""A sweep is summed up in few numbers, on the terminal, as JSON and in the docs."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import command, sweeping
from benchmarks.case import never_slower
from benchmarks.command import app
from benchmarks.registry import select
from benchmarks.run import Forced, Result, SideResult, Verdict, forcing
from maskwise.plan import dispatch
from maskwise.plan.measure import Spread
from tools import figures


def result(case, *, holds=True, ratio=2.0, plain=3.0, kernel=1.0, route="route kernel"):
    # Ours is as fast as the route that it takes.
    ours = plain if route == "route plain" else kernel
    sides = [
        SideResult(case.ours.name, "ours", ours, ours, Spread(1, 1, 1)),
        SideResult("idiom", "peer", ratio, ratio, Spread(ratio, ratio, ratio)),
        SideResult("route plain", "route", plain, plain, Spread(plain, plain, plain)),
        SideResult("route kernel", "route", kernel, kernel, Spread(kernel, kernel, kernel)),
    ]
    return Result(case, tuple(sides), (Verdict(never_slower("idiom"), "idiom", holds),), {}, None, route)


@pytest.fixture
def found():
    first, second, third, fourth = select("sweep softmax 8x16")[:4]
    return [
        result(first),
        result(second, holds=False, ratio=0.8),
        result(third, plain=1.04, kernel=1.0, route="route plain"),
        result(fourth, plain=1.0, kernel=1.5),
    ]


def test_the_summary_counts_what_is_slower_and_how_often_dispatch_is_right(found):
    summary = sweeping.summarise(found)
    assert (summary.cases, summary.slower, summary.worst_ratio) == (4, 1, 0.8)
    # A route within 5 % of the fastest is as good as that.
    assert (summary.planned, summary.right, summary.worst_off) == (4, 3, 1.5)
    assert not summary.holds
    assert sweeping.summarise(found[:1]).holds


def test_a_route_whose_steps_are_slower_when_forced_is_as_fast_as_ours(found):
    (ours, *others) = found[0].sides
    quick = replace(found[0], sides=(replace(ours, median=0.5), *others))
    assert quick.off_best == 1.0
    assert replace(found[0], sides=(replace(ours, median=6.0), *others)).off_best == 2.0


def test_bench_ends_with_the_summary(found, monkeypatch, tmp_path):
    left = iter(found * 2)
    monkeypatch.setattr(command, "run_case", lambda case, **_: replace(next(left), case=case))
    cases = [each.case for each in found]
    monkeypatch.setattr(command.registry, "select", lambda pattern: tuple(cases))
    path = tmp_path / "sweep.csv"
    shown = CliRunner().invoke(app, ["--filter", "sweep", "--csv", str(path)])
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.stdout.split())
    assert "4 cases, 1 slower than the idiom; the predicted route was the best in 75.0 % of 4, and 1.50 x" in told
    assert "off: softmax sweep" in told
    data = json.loads(CliRunner().invoke(app, ["--filter", "sweep", "--json"]).stdout)
    assert data["sweep"]["slower"] == 1
    # The docs show the same of the file.
    section = "\n".join(figures.sweep_section(path))
    assert "4 cases, 1 slower than the idiom" in section
    assert "| softmax | 4 | 1 | 0.80 | 75 % | 1.50 |" in section


def test_a_route_is_forced_while_it_is_timed_and_not_around_it():
    seen = []
    timer = forcing(lambda call, times: (call(), 1.0)[1])
    assert timer(lambda: seen.append(dispatch.forced()), 1) == 1.0
    assert timer(Forced(lambda: seen.append(dispatch.forced()), "plain"), 1) == 1.0
    assert seen == [None, "plain", "plain"]
    Forced(lambda: seen.append(dispatch.forced()), "kernel")()
    assert seen[-1] == "kernel"
