"""The Triton kernels run on the CPU, by Triton's interpreter, in a process of their own.

`make test-gpu` runs the suites of laws and of ops that way too, in full.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels for GPUs are written in Triton")
HERE = Path(__file__).parent


def test_the_kernels_hold_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # A seventh of what `make test-gpu` has, and that without its largest shapes.
    environment = {**os.environ, "MASKWISE_INTERPRET": "1", "MASKWISE_SHARE": "7"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    told = subprocess.run(
        [*command, str(HERE / "interpreted")],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-4000:] + told.stderr[-2000:]
    assert " passed" in told.stdout
