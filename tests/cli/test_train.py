"""The training demo on a few steps, with every recipe."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from maskwise.cli.app import app
from maskwise.cli.digits import command, data
from maskwise.cli.digits.recipes import RECIPES, weights
from maskwise.cli.digits.training import Run

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")


def invoke(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def test_every_gate_ends_with_at_most_a_twentieth_of_the_weights_of_a_network_of_real_size():
    # The quick network is too small for shares to be exact, so the recipes are walked without training.
    for recipe in RECIPES[1:]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 10))
        plan = recipe(model, 50)
        plan.begin(torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(1, 51):
            plan.after(step)
        layers = weights(model)
        assert 0.03 < sum(int((w != 0).sum()) for w in layers) / sum(w.numel() for w in layers) <= 0.05, recipe.name


def test_no_image_is_in_two_parts_of_the_digits():
    digits = data.load()
    parts = {len(y): x for x, y in ((digits.train_x, digits.train_y), (digits.test_x, digits.test_y))}
    parts[len(digits.validation_y)] = digits.validation_x
    assert {count: tuple(x.shape) for count, x in parts.items()} == {n: (n, 64) for n in (987, 450, 360)}
    everything = torch.cat(list(parts.values()))
    # As many different images as there are in all: what one part has, no other has.
    assert len(torch.unique(everything, dim=0)) == len(everything) == 1797


def test_the_demo_trains_prints_json_and_draws(tmp_path):
    picture = tmp_path / "runs.png"
    result = invoke("--train", "--quick", "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == [recipe.name for recipe in RECIPES]
    for name, each in found.items():
        assert each["density"] == 1.0 if name == "dense" else each["density"] < 0.08, name
        assert 0.0 <= each["accuracy"] <= 1.0
        assert 0.0 <= each["validation"] <= 1.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_how_much_was_lost(monkeypatch):
    accuracies = iter([0.98, 0.97, 0.9, *[0.98] * 20])
    monkeypatch.setattr(command, "train", lambda recipe, *_: Run(recipe.name, ((1, 0.05, 0.5),), next(accuracies)))
    result = invoke("--train", "--quick")
    assert result.exit_code == 0, result.output
    assert "-1.0 points" in result.stdout
    assert "-8.0 points" in result.stdout


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert data.missing() == "Training on digits needs scikit-learn. Hint: pip install 'maskwise[examples]'."
    result = invoke("--train", "--quick")
    assert result.exit_code == 2
    assert "pip install 'maskwise[examples]'" in result.output


def test_options_of_training_alone_are_refused_without_it():
    assert invoke("--quick").exit_code == 2


def test_the_example_script_runs():
    script = Path(__file__).parents[2] / "examples" / "train_digits.py"
    done = subprocess.run([sys.executable, str(script), "--help"], check=True, capture_output=True, text=True)
    assert "to 95 % sparsity, with every gate" in " ".join(done.stdout.split())
