import json

import pytest
from typer.testing import CliRunner

from maskwise.cli import demo
from maskwise.cli.app import app


@pytest.fixture
def invoke(monkeypatch):
    # The walk is the same on small inputs, and takes no seconds.
    monkeypatch.setattr(demo, "SQUARE", 32)
    monkeypatch.setattr(demo, "BERT_BASE", (32, 32, 32))
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    # No test needs the real weights: without them the demo takes an encoder with random ones.
    monkeypatch.setattr(demo, "no_minilm", lambda: "needs weights")
    return lambda *arguments: CliRunner().invoke(app, ["demo", *arguments])


def test_the_demo_draws_stops_a_leak_times_and_explains(invoke):
    result = invoke()
    assert result.exit_code == 0, result.output
    for heading in (
        "A mask says what is kept",
        "Nothing leaks",
        "costs nothing",
        "Every plan says why",
        "without their padding",
        "Pruned weights",
    ):
        assert heading in result.stdout


def test_the_leak_it_shows_is_real_and_ours_has_none(invoke):
    leak = json.loads(invoke("--json").stdout)["leak"]
    assert leak["(x * mask).sum(-1)"]["loss"] == "nan"
    assert leak["mw.sum(x, mask, -1)"]["loss"] == "29.0"
    assert leak["mw.sum(x, mask, -1)"]["gradient"][0] == ["4", "4", "0", "0", "0"]


def test_json_holds_the_measured_ratio_and_the_plans(invoke):
    data = json.loads(invoke("--json").stdout)
    assert data["timing"]["ratio"] > 0
    assert "explain" in data


def test_the_model_it_shows_agrees_and_says_what_a_real_one_needs(invoke):
    model = json.loads(invoke("--json").stdout)["model"]
    # Six layers in float32, of outputs near 1.
    assert model["largest_difference"] < 1e-4
    assert 0.3 < model["kept"] < 0.7
    assert set(model["seconds"]) >= {"padded", "mw.unpad"}
    assert "A real model on real text needs weights" in invoke().stdout


def test_the_pruned_block_it_shows_agrees(invoke):
    pruned = json.loads(invoke("--json").stdout)["pruned"]
    # Two layers in float32, of outputs near 1.
    assert pruned["largest_difference"] < 1e-4
    assert pruned["kept"] == 0.1
    assert set(pruned["seconds"]) == {"mw.compress", "dense, with zeros"}
    assert pruned["ratio"] > 0
