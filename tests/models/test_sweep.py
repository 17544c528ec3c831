"""A sample of the sweep on every run, and what the committed table must hold; `make test-models` runs all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")


from .sweep import page, table

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


def test_no_class_is_wrong_crashes_or_runs_padded_without_a_word():
    assert [line for line in table.read().values() if line["verdict"] in table.BAD] == []


@pytest.mark.parametrize("mapping", table.FLOOR)
def test_as_many_classes_are_exact_as_ever(mapping):
    assert table.exact_on_the_right(table.read().values())[mapping] >= table.FLOOR[mapping]


def test_the_page_is_fresh():
    found = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert found == page.page(), "run `make models-page`"
