"""examples/train_digits.py on a few steps, with every recipe."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

# The folder of examples is on the path of the tests, as it is on that of a script in it.
pytest.importorskip("sklearn", reason="the digits are scikit-learn's")

import train_digits
from digits import training
from digits.recipes import RECIPES, weights
from digits.training import Run


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
    digits = training.load()
    parts = {len(y): x for x, y in ((digits.train_x, digits.train_y), (digits.test_x, digits.test_y))}
    parts[len(digits.validation_y)] = digits.validation_x
    assert {count: tuple(x.shape) for count, x in parts.items()} == {n: (n, 64) for n in (987, 450, 360)}
    everything = torch.cat(list(parts.values()))
    # As many different images as there are in all: what one part has, no other has.
    assert len(torch.unique(everything, dim=0)) == len(everything) == 1797


def test_it_trains_prints_json_and_draws(tmp_path, capsys):
    picture = tmp_path / "runs.png"
    assert train_digits.main(["--quick", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [recipe.name for recipe in RECIPES]
    for name, each in found.items():
        assert each["density"] == 1.0 if name == "dense" else each["density"] < 0.08, name
        assert 0.0 <= each["accuracy"] <= 1.0
        assert 0.0 <= each["validation"] <= 1.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_how_much_was_lost(monkeypatch, tmp_path, capsys):
    accuracies = iter([0.98, 0.97, 0.9, *[0.98] * 20])
    monkeypatch.setattr(train_digits, "train", lambda recipe, *_: Run(recipe.name, ((1, 0.05, 0.5),), next(accuracies)))
    assert train_digits.main(["--quick", "--plot", str(tmp_path / "runs.svg")]) == 0
    table = capsys.readouterr().out
    assert "-1.0 points" in table
    assert "-8.0 points" in table


def test_without_scikit_learn_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert training.missing() == "Training on digits needs scikit-learn. Hint: pip install 'maskwise[examples]'."
    assert train_digits.main(["--quick"]) == 2
    assert "pip install 'maskwise[examples]'" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(capsys):
    with pytest.raises(SystemExit) as ended:
        train_digits.main(["--plot", "runs.gif"])
    assert ended.value.code == 2
    assert "--plot writes .png or .svg" in capsys.readouterr().err


def test_the_example_script_runs():
    script = Path(__file__).parents[1] / "examples" / "train_digits.py"
    done = subprocess.run([sys.executable, str(script), "--help"], check=True, capture_output=True, text=True)
    assert "to 95 % sparsity, with every gate" in " ".join(done.stdout.split())
