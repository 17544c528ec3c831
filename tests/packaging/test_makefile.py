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
    return subprocess.run(["make", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


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
