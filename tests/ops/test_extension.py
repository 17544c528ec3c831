"""A missing or broken extension warns once, at the first line that needs it, with the command that fixes it."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from maskwise.ops import backends

ROOT = Path(__file__).parents[2]

SCRIPT = """
import warnings
warnings.simplefilter("always")
import torch, maskwise as mw
from maskwise.ops.backends import status
x, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
first = mw.sum(x, mask)
second = mw.sum(x[:2], mask[:2])
compiled = torch.compile(lambda x, mask: mw.sum(x, mask), backend="eager", fullgraph=True)(x, mask)
print(first.item(), second.item(), compiled.item(), status().loaded, status().simd, status().error)
"""


def run(script, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    binary, script = folder / "_C.abi3.so", folder / "script.py"
    binary.write_bytes(b"not a library")
    script.write_text(SCRIPT)
    return run(script, MASKWISE_EXTENSION=str(binary)), script


def test_every_op_works_on_its_reference(broken):
    result, _ = broken
    assert result.stdout.startswith("3.0 3.0 3.0 False none the C++ extension does not load: ")


def test_it_warns_once_at_the_users_line_with_the_fix(broken):
    result, script = broken
    warnings = [line for line in result.stderr.splitlines() if "runs without its kernels" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{script}:7: UserWarning: maskwise runs without its kernels, and slower: ")
    assert warnings[0].endswith(f"To fix it: make -C {ROOT} install")


PIP = f"{sys.executable} -m pip install"
BUILD = f"{PIP} 'setuptools>=77' ninja && {PIP} --no-build-isolation --no-deps --force-reinstall "


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": f"file://{ROOT}", "dir_info": {}}, BUILD + str(ROOT)),
        (
            {"url": "https://example.org/maskwise.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            f"{BUILD}git+https://example.org/maskwise.git",
        ),
        # A wheel holds no sources, and neither does a directory that is gone.
        *(
            (origin, f"git clone https://github.com/maskwise/maskwise && {BUILD}./maskwise")
            for origin in (
                {"url": "file:///tmp/maskwise-0.2.0-py3-none-any.whl", "archive_info": {}},
                {"url": "file:///no/such/folder", "dir_info": {}},
                None,
            )
        ),
    ],
    ids=["a directory", "a repository", "a wheel", "a directory that is gone", "an index"],
)
def test_the_fix_builds_from_where_the_package_came(monkeypatch, origin, expected):
    class Installed(Distribution):
        def read_text(self, name):
            return origin and json.dumps(origin)

        def locate_file(self, path):
            raise NotImplementedError

    monkeypatch.setattr(backends, "__file__", "/somewhere/site-packages/maskwise/ops/backends.py")
    monkeypatch.setattr(Distribution, "from_name", lambda name: Installed())
    assert backends.rebuild() == expected


def test_a_clone_is_built_in_place_and_a_loaded_extension_needs_no_fix():
    assert backends.rebuild() == f"make -C {ROOT} install"
    assert backends.status().fix == ("" if backends.status().loaded else backends.rebuild())


@pytest.mark.kernel
@pytest.mark.skipif(platform.machine().lower() not in {"x86_64", "amd64"}, reason="other CPUs run the baseline kernels")
def test_x86_without_avx2_runs_plain_torch_and_names_the_reason(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT + "from maskwise.ops.backends import why_not_served\nprint(why_not_served('sum', 'cpu', torch.float32))"
    )
    result = run(script, MASKWISE_SIMD="baseline")
    reason = "MASKWISE_SIMD=baseline: on x86 the kernels need AVX2"
    assert result.stdout.splitlines() == [f"3.0 3.0 3.0 False none {reason}", reason]
    (warning,) = [line for line in result.stderr.splitlines() if "runs without its kernels" in line]
    assert warning.endswith(f"and slower: {reason}.")
