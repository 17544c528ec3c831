import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def phony_targets():
    return re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), flags=re.M)


def run_make(*arguments):
    # As from a shell: `make test` hands its own flags and level down.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_help_lists_every_phony_target_with_a_sentence():
    listed = dict(re.findall(r"^\s+(?:\x1b\[\d+m)?([a-z-]+)(?:\x1b\[0m)?\s+(\S.*)$", run_make("help"), flags=re.M))
    assert set(listed) == set(phony_targets())
    assert all(len(sentence) > 10 for sentence in listed.values())


def test_help_is_what_make_alone_shows():
    assert run_make() == run_make("help")


def test_ci_calls_the_targets_that_exist():
    called = re.search(r"for target in (.*); do", (ROOT / ".ci/run").read_text()).group(1).split()
    expected = ["test", "test-models", "test-gpu", "test-gpu-compile", "test-sanitize", "wheel", "test-pure", "docs"]
    assert called == expected
    assert set(called) <= set(phony_targets())


def test_ci_leaves_out_of_the_suite_only_samples_of_what_other_targets_run():
    (sampled,) = re.findall(r"^sampled=\((.*)\)$", (ROOT / ".ci/run").read_text(), flags=re.M)
    run = {Path(path).stem for path in re.findall(r"tests/gpu/\S+", (ROOT / "Makefile").read_text())}
    for path in map(Path, sampled.split()):
        assert (ROOT / path).is_file()
        assert path.stem in run or path.stem.removeprefix("test_") in run


def run_step(folder, *command):
    step = [ROOT / "tools" / "step", "trial", "trying it", *command]
    return subprocess.run(step, cwd=folder, check=False, capture_output=True, text=True)


def test_a_step_prints_one_line_and_keeps_the_output_in_its_log(tmp_path):
    done = run_step(tmp_path, "bash", "-c", "echo noise; echo warning >&2")
    assert done.returncode == 0
    assert re.fullmatch(r"→ trying it: \d+ s\n", done.stdout)
    assert done.stderr == ""
    assert (tmp_path / "build" / "logs" / "trial.log").read_text() == "noise\nwarning\n"


def test_a_step_that_fails_prints_the_end_of_its_log_with_its_name_and_fails(tmp_path):
    done = run_step(tmp_path, "bash", "-c", "seq 1000; exit 3")
    assert done.returncode == 3
    first, *lines, last = done.stdout.splitlines()
    assert re.fullmatch(r"→ trying it: FAILED after \d+ s", first)
    assert lines == [str(number) for number in range(941, 1001)]
    assert last == "→ trying it failed; all of its output: build/logs/trial.log"


@pytest.mark.parametrize(("target", "tools"), [("demo", 0), ("test", 1)])
def test_a_first_run_says_what_it_does_and_installs_torch_once_and_tools_for_tests_alone(target, tools):
    said = run_make("--dry-run", target, "VENV=build/no-such-environment")
    assert said.startswith(f"make {target}: installs torch and builds the C++ kernels")
    assert said.count("setuptools torch'") == said.count("setup.py build_ext --inplace") == 1
    assert said.count("'.[dev]'") == tools
