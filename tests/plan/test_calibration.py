"""Measured rates: kept by machine and versions, read at the first plan, and ignored with one warning when broken."""

import dataclasses
import json
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

import maskwise as mw
from maskwise.cli import calibrate
from maskwise.cli.app import app
from maskwise.plan import calibration, dispatch
from maskwise.plan.cost import BUILT_IN, Rates


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, and rates that are read anew before and after."""
    monkeypatch.setenv("MASKWISE_CACHE_DIR", str(tmp_path))
    calibration.reload()
    dispatch.invalidate()
    yield tmp_path / "calibration.json"
    monkeypatch.undo()
    calibration.reload()
    dispatch.invalidate()


SLOW_CALLS = Rates(bare_call=1e6)


def test_without_a_file_the_built_in_rates_are_used(cache):
    assert calibration.rates_for("cpu") == BUILT_IN["cpu"]
    assert calibration.rates_for("cuda") == BUILT_IN["cuda"]
    assert calibration.rates_for("mps") == BUILT_IN["cpu"]
    assert not cache.exists()


def test_saved_rates_decide_on_plans_that_were_made_before(cache):
    x, keep = torch.ones(64, 64), torch.ones(64, 64) > 0
    assert mw.plan(mw.sum, x, keep).route == "bare"
    calibration.save({"cpu": SLOW_CALLS})
    assert mw.plan(mw.sum, x, keep).route == "plain"
    assert calibration.reset()
    assert mw.plan(mw.sum, x, keep).route == "bare"
    assert not calibration.reset()


@pytest.mark.parametrize("name", ["cpu", "cores", "threads", "torch", "maskwise"])
def test_rates_of_another_machine_or_version_are_left_alone(name, monkeypatch):
    calibration.save({"cpu": SLOW_CALLS})
    other = {**calibration.identity(), name: "another"}
    monkeypatch.setattr(calibration, "identity", lambda: other)
    calibration.reload()
    assert calibration.rates_for("cpu") == BUILT_IN["cpu"]
    # A second entry stands beside the first.
    calibration.save({"cpu": Rates(plain_call=7.0)})
    assert calibration.rates_for("cpu").plain_call == 7.0
    monkeypatch.undo()
    assert len(calibration.read()) == 2 if calibration.path().exists() else True


def entry(**rates):
    return {calibration.key(): {"date": "today", "rates": {"cpu": rates}}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"a": 3}',
        b"\xff\xfe\x00",
        lambda: {calibration.key(): {}},
        lambda: {calibration.key(): {"date": "today", "rates": []}},
        lambda: entry(plain_call="fast"),
        lambda: entry(plain_call=-1.0),
        lambda: entry(plain_call=float("nan")),
        lambda: entry(no_such_rate=1.0),
    ],
    ids=range(11),
)
def test_a_broken_file_is_ignored_with_one_clear_warning(cache, text):
    content = json.dumps(text()) if callable(text) else text
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"cannot be read .*built-in rates are used\. Hint: `maskwise calibrate`"):
        assert calibration.rates_for("cpu") == BUILT_IN["cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration.rates_for("cpu") == BUILT_IN["cpu"]
    # Measuring anew writes over it.
    calibration.save({"cpu": SLOW_CALLS})
    assert calibration.rates_for("cpu") == SLOW_CALLS


def test_a_gpu_that_is_not_the_one_measured_has_built_in_rates(monkeypatch):
    calibration.save({"cpu": Rates(plain_call=7.0), "cuda": Rates(plain_call=9.0)})
    entries = calibration.read()
    entries[calibration.key()]["gpu"] = "Tesla"
    calibration.path().write_text(json.dumps(entries))
    for name, expected in (("Tesla", 9.0), ("Volta", BUILT_IN["cuda"].plain_call)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        calibration.reload()
        assert (calibration.rates_for("cuda").plain_call, calibration.rates_for("cpu").plain_call) == (expected, 7.0)


def test_importing_reads_no_file_and_the_first_plan_does(cache):
    cache.write_text("broken")
    program = (
        "import warnings, torch; warnings.simplefilter('error'); import maskwise as mw; mw.sum\n"
        "try: mw.plan(mw.sum, torch.ones(2), torch.ones(2) > 0)\n"
        "except UserWarning as told: print('warned')"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "warned\n"


# -- measuring ---------------------------------------------------------------------------------------------------------
def test_every_rate_is_measured():
    steps = []
    rates = calibrate.measure_rates(calibrate.Bench(seconds=0.0, shrink=512), steps.append)
    assert steps == [step.name for step in calibrate.STEPS]
    found = dataclasses.asdict(rates)
    assert all(value > 0.0 for value in found.values())
    assert found["plain_call"] != BUILT_IN["cpu"].plain_call


def test_on_cuda_bulk_is_timed_by_events_and_calls_until_the_device_is_done(monkeypatch):
    waited, by_events = [], []

    def timer(device):
        by_events.append(device)
        return lambda call, times: (call(), times * 1e-3)[1]

    monkeypatch.setattr(calibrate, "event_timer", timer)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(calibrate.Bench, "rand", lambda self, *shape: torch.rand(shape))
    real = {name: getattr(torch, name) for name in ("arange", "ones")}
    for name, make in real.items():
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, **k))
    rates = calibrate.measure_rates(calibrate.Bench("cuda", seconds=0.0, shrink=512))
    assert set(by_events) == {"cuda"}
    assert set(waited) == {"cuda"}
    # A thousandth of a second each, for 2 x 32 KiB x 4 that are copied; nothing of a GPU's memory is fresh.
    assert rates.streamed == pytest.approx(2 * 4 * (calibrate.LARGE // 4 // 512) / 1e3, rel=1e-3)
    assert rates.fresh == rates.streamed


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def measured(monkeypatch):
    """Let measuring end at once."""
    monkeypatch.setattr(calibrate, "measure_rates", lambda bench, on_step: (on_step("x"), SLOW_CALLS)[1])


def test_calibrate_saves_and_show_and_doctor_report(measured, cache):
    assert "none for this machine" in json.loads(invoke("doctor", "--json").stdout)["calibration"]["state"]
    assert "built-in rates" in invoke("calibrate", "--show").stdout
    result = invoke("calibrate", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["calibrated"], found["rates"]["cpu"]["bare_call"]) == (["cpu"], 1e6)
    assert found["path"] == str(cache)
    assert "measured on" in invoke("calibrate", "--show").stdout
    assert json.loads(invoke("doctor", "--json").stdout)["calibration"]["calibrated"] == ["cpu"]
    assert [each.name for each in cache.parent.iterdir()] == [cache.name]
    assert invoke("calibrate", "--reset").stdout.startswith("removed")
    assert json.loads(invoke("calibrate", "--reset", "--json").stdout)["removed"] is False


def test_an_interrupt_leaves_what_was_measured_before(monkeypatch, measured, cache):
    invoke("calibrate")
    before = cache.read_text()

    def interrupted(bench, on_step):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure_rates", interrupted)
    assert invoke("calibrate").exit_code == 130
    assert cache.read_text() == before


def test_a_file_that_cannot_be_read_is_reported_with_exit_code_1(cache):
    cache.write_text("{")
    result = invoke("calibrate", "--show")
    assert result.exit_code == 1
    assert "cannot be read" in result.stdout


def test_show_and_reset_do_not_go_together():
    result = invoke("calibrate", "--show", "--reset")
    assert result.exit_code == 2
    assert "drop one of them" in " ".join(result.stderr.replace("│", " ").split())
