"""A sample of the sweep on every run, and what the committed table must hold; `make test-models` runs all of it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")

from tools import models_page

from .sweep import run, table
from .sweep.cases import Case
from .sweep.examine import compare, distance, exact, summary

ROOT = Path(__file__).parents[2]
SHARE = 22
"""Of the classes of the table, how many make one of the sample."""


def test_a_sample_of_all_classes_comes_out_as_the_table_says(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.models.sweep", "--sample", str(SHARE), "--jobs", "1", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert len(rows) == len(table.sample(SHARE)) > 20
    assert table.differences(rows) == []


def test_no_class_is_wrong_crashes_or_runs_padded_without_a_warning():
    assert [line for line in table.read().values() if line["verdict"] in table.BAD] == []


@pytest.mark.parametrize("mapping", table.FLOOR)
def test_as_many_classes_are_exact_as_ever(mapping):
    assert table.exact_on_the_right(table.read().values())[mapping] >= table.FLOOR[mapping]


def test_the_page_is_fresh():
    found = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert found == models_page.page(), "run `make models-page`"


def test_a_class_that_is_gone_or_that_changed_is_a_difference_from_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "TABLE", tmp_path / "table.json")
    row = {"auto": "AutoModel", "kind": "bert", "name": "BertModel", "checks": {}, **exact()}
    table.write([row, {**row, "kind": "gpt2", "name": "GPT2Model"}])
    assert table.differences([row]) == []
    assert table.differences([row], whole=True) == ["AutoModel gpt2 GPT2Model: in the table, and not found"]
    (found,) = table.differences([{**row, "verdict": "refused", "reason": "its mask"}])
    assert '"verdict": "refused"' in found
    assert 'the table says {"verdict": "exact"}' in found
    (found,) = table.differences([{**row, "verdict": "crash", "reason": "KeyError"}])
    assert found == "AutoModel bert BertModel: crash, KeyError"


KEEP = torch.tensor([[True, True, False], [False, True, True]])


def test_a_difference_is_found_at_kept_positions_and_nowhere_else():
    padded = {"last_hidden_state": torch.ones(2, 3, 4), "router_logits": torch.ones(6, 2)}
    found = {name: value.clone() for name, value in padded.items()}
    found["last_hidden_state"][0, 2] = 5.0
    found["router_logits"][2] = 5.0
    assert compare(padded, found, KEEP)[0] is None
    found["router_logits"][1] = 5.0
    assert compare(padded, found, KEEP)[0].startswith("router_logits differs by 4.0e+00")


def test_an_output_of_another_shape_or_that_is_missing_is_found():
    padded = {"pooler_output": torch.ones(2, 4)}
    assert "has shape (1, 4)" in compare(padded, {"pooler_output": torch.ones(1, 4)}, KEEP)[0]
    assert "in one of both" in compare(padded, {}, KEEP)[0]


def test_a_nan_where_the_padded_model_has_none_is_a_difference():
    assert distance(torch.ones(2), torch.tensor([1.0, torch.nan])) == torch.inf


def test_the_worst_check_is_the_verdict_of_a_class():
    right = {"verdict": "exact"}
    padded = {"verdict": "padded", "reason": "a cache", "said": True}
    checks = {"right": right, "left": right, "holes": right, "plain": padded}
    assert summary(checks)["verdict"] == "exact"
    assert summary({**checks, "plain": {**padded, "said": False}})["verdict"] == "silent"
    assert summary({**checks, "left": {"verdict": "wrong", "reason": "loss"}}) == {
        "verdict": "wrong",
        "reason": "left: loss",
    }
    assert summary(dict.fromkeys(("right", "left", "holes"), padded))["verdict"] == "padded"
    refused = {"verdict": "refused", "reason": "mixes tokens"}
    assert summary({"unpad": refused, "meta": {"verdict": "wrong", "reason": "logits"}})["verdict"] == "wrong"
    assert summary({"unpad": refused, "meta": refused}) == refused


def test_a_class_whose_process_dies_or_hangs_is_a_row_and_the_others_go_on(monkeypatch):
    def examine(pipe, group, folder):
        for case in group:
            if case.name == "Dies":
                os._exit(3)
            if case.name == "Hangs":
                threading.Event().wait()
            pipe.send(None if case.name == "Image" else {"name": case.name, **exact()})

    monkeypatch.setattr(run, "_examine", examine)
    monkeypatch.setattr(run, "PATIENCE", 1)
    listed = [Case("AutoModel", "one", name) for name in ("First", "Dies", "Image", "Hangs", "Last")]
    rows = {case.name: row for case, row in run._Pool(listed, 2, None, lambda row: None).run().items()}
    assert rows.keys() == {"First", "Dies", "Hangs", "Last"}
    assert rows["Dies"]["reason"] == "the process ended with 3"
    assert rows["Hangs"]["reason"] == "no answer in 1 s"
    assert rows["Last"]["verdict"] == "exact"


def test_sizes_of_differences_and_lines_of_code_are_not_part_of_a_reason():
    assert table.steady("outputs change, by 8e-01 of the largest: a conv") == "outputs change: a conv"
    assert table.steady("ValueError: no bbox ['a.py:1 forward', 'b.py:2 f']") == "ValueError: no bbox"
