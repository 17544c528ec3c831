"""The benchmarks run on a GPU the first time: every side of every case, gradients included, on fake CUDA tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERYTHING = os.environ.get("MASKWISE_INTERPRET_ALL") == "1"
#: Without a capacity the rows that `pack` keeps are counted; the README and docs/gpu-quick-start.md say so.
COUNTS = ("mw.pack", "mw.pack(x, mask) * y", "mw.unpad")
#: Layouts that fake tensors do not have.
UNSHOWN = {
    "F.linear, CSR weight", "sparse_coo_tensor @ x", "sparse_csr_tensor @ x", "its nested-tensor fast path", "mw.unpad",
}  # fmt: skip


def report(first, every):
    """What is wrong, and how many cases there were."""
    # Without what the suite sets for kernels on the CPU; a device needs neither.
    unset = ("MASKWISE_INTERPRET", "TRITON_INTERPRET", "MASKWISE_POISON")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.fake_bench", str(first), str(every)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *problems, count = map(json.loads, done.stdout.splitlines())
    return problems, count


# One process a part, so that the parts run on all cores.
@pytest.mark.parametrize("part", range(2))
def test_every_side_of_every_case_runs_on_a_device_without_waiting(part):
    if EVERYTHING:
        problems, count = report(part, 2)
        assert count > 1000
    elif part:
        pytest.skip("one case of each function with the same sides is enough here; make test-gpu runs all")
    else:
        problems, count = report(0, 0)
        assert count > 250
    unshown = {side for _, side, what, _ in problems if what == "cannot be shown"}
    assert unshown <= UNSHOWN
    waits = {side for _, side, what, _ in problems if what == "waits"}
    assert waits <= set(COUNTS)
    assert [each for each in problems if each[2] not in ("cannot be shown", "waits")] == []
