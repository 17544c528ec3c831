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
# What each step loads, one after the other: `import maskwise`, the help of the command line (in a process of its own,
# which starts from the same imports), torch, the first mask, the first function.
PROGRAM = """
import json, os, sys
loaded = [set(sys.modules)]
def report():
    loaded.append(set(sys.modules))
    return sorted(loaded[-1] - loaded[-2])
import maskwise
steps = [report()]
reading, writing = os.pipe()
if os.fork() == 0:
    from maskwise.cli.app import app
    sys.stdout = open(os.devnull, "w")
    for arguments in (["--help"], ["--version"], ["demo", "--help"]):
        app(arguments, standalone_mode=False)
    os.write(writing, json.dumps(report()).encode())
    os._exit(0)
os.close(writing)
steps.append(json.loads(os.fdopen(reading).read()))
assert os.wait()[1] == 0
import torch
report()
maskwise.Mask, maskwise.plan, maskwise.explain
steps.append(report())
maskwise.sum
steps.append(report())
print(json.dumps(steps))
"""


@pytest.fixture(scope="module")
def loaded():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return dict(zip(("imported", "helped", "masks", "used"), json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def imported(loaded):
    return loaded["imported"]


@pytest.fixture(scope="module")
def masks(loaded):
    """What the first mask or plan loads on top of torch."""
    return loaded["masks"]


@pytest.fixture(scope="module")
def used(loaded):
    """What the first use of a function loads on top of those."""
    return loaded["used"]


def foreign(names):
    return {name.split(".")[0] for name in names} - {"maskwise"}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_neither_import_nor_first_use_pulls_in(module, imported, masks, used):
    assert [name for name in (*imported, *masks, *used) if name == module or name.startswith(f"{module}.")] == []


def test_import_pulls_in_the_errors_only_and_no_torch(imported):
    assert {name for name in imported if name.startswith("maskwise")} == {
        "maskwise",
        "maskwise.errors",
        "maskwise.plan",
    }
    assert foreign(imported) & {"torch", "numpy"} == set()


def test_the_first_mask_pulls_in_masks_and_plans_only(masks):
    packages = {name.split(".")[1] for name in masks if name.startswith("maskwise.")}
    assert packages == {"mask", "ops", "plan"}
    assert {name for name in masks if name.startswith("maskwise.ops.")} == {"maskwise.ops.torch_private"}
    assert foreign(masks) == set()


def test_first_use_pulls_in_no_command_line(used):
    assert "maskwise.ops.reduce" in used
    assert [name for name in used if name.startswith("maskwise.cli")] == []


def test_first_use_pulls_in_little_else(used):
    assert foreign(used) == set()


def test_the_help_of_the_command_line_pulls_in_what_it_is_printed_with_alone_and_no_torch(loaded):
    helped = loaded["helped"]
    assert "typer" in helped
    ours = {name for name in helped if name.startswith("maskwise.")}
    assert ours == {"maskwise.cli", "maskwise.cli.app"}
    assert foreign(helped) & {"torch", "numpy", *FORBIDDEN} <= {"typer", "rich", "click"}


def test_gpu_kernels_wait_for_a_gpu(used):
    assert [name for name in used if name.endswith((".triton", ".gpu.launch"))] == []
