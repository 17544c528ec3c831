"""`import maskwise` must stay cheap: nothing that only the command line, a plot or a GPU needs."""

import json
import subprocess
import sys

import pytest

FORBIDDEN = ("typer", "rich", "click", "numpy.ma", "triton", "matplotlib", "transformers")
PROGRAM = """
import json, sys, torch
before = set(sys.modules)
import maskwise
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_import_does_not_pull_in(module, imported):
    assert [name for name in imported if name == module or name.startswith(f"{module}.")] == []


def test_import_pulls_in_no_command_line_and_no_benchmarks(imported):
    assert "maskwise" in imported
    assert [name for name in imported if name.startswith(("maskwise.cli", "maskwise.benchmarks"))] == []
