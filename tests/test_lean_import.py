"""`import maskwise` must stay cheap: nothing that only the command line, a plot or a GPU needs."""

import json
import subprocess
import sys

import pytest

FORBIDDEN = (
    "typer",
    "rich",
    "click",
    "numpy.ma",
    "triton",
    "matplotlib",
    "transformers",
    "sklearn",
    "safetensors",
    "accelerate",
    "lightning",
)
# The help is asked for in a process of its own, which starts from the same imports.
PROGRAM = """
import json, os, sys, torch
before = set(sys.modules)
import maskwise
imported = set(sys.modules)
if os.fork() == 0:
    from maskwise.cli.app import app
    sys.stdout = open(os.devnull, "w")
    app(["--help"], standalone_mode=False)
    print(json.dumps(sorted(set(sys.modules) - imported)), file=sys.stderr)
    os._exit(0)
assert os.wait()[1] == 0
maskwise.sum
used = set(sys.modules)
print(json.dumps([sorted(imported - before), sorted(used - imported)]))
"""


@pytest.fixture(scope="module")
def loaded():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return [*json.loads(done.stdout), json.loads(done.stderr)]


@pytest.fixture(scope="module")
def imported(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def used(loaded):
    """What the first use of a function loads on top."""
    return loaded[1]


def foreign(names):
    return {name.split(".")[0] for name in names} - {"maskwise"}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_neither_import_nor_first_use_pulls_in(module, imported, used):
    assert [name for name in (*imported, *used) if name == module or name.startswith(f"{module}.")] == []


def test_import_pulls_in_nothing_that_torch_has_not_loaded_already(imported):
    assert "maskwise" in imported
    assert foreign(imported) == set()


def test_import_pulls_in_the_mask_the_plans_and_the_errors_only(imported):
    packages = {name.split(".")[1] for name in imported if "." in name}
    assert packages == {"errors", "mask", "ops", "plan"}
    assert {name for name in imported if name.startswith("maskwise.ops.")} == {"maskwise.ops.torch_private"}


def test_first_use_pulls_in_no_command_line(used):
    assert "maskwise.ops.reduce" in used
    assert [name for name in used if name.startswith("maskwise.cli")] == []


def test_first_use_pulls_in_little_else(used):
    assert foreign(used) == set()


def test_the_help_of_the_command_line_pulls_in_what_it_is_printed_with_alone(loaded):
    helped = loaded[2]
    assert "typer" in helped
    ours = {name for name in helped if name.startswith("maskwise.")}
    assert ours == {"maskwise.cli", "maskwise.cli.app"}
    assert foreign(helped) & {"torch", "numpy", *FORBIDDEN} <= {"typer", "rich", "click"}


def test_gpu_kernels_wait_for_a_gpu(used):
    assert [name for name in used if name.endswith((".triton", ".gpu.launch"))] == []
