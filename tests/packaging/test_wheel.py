"""What a built wheel holds: the package, and nothing that only a checkout needs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel without the extension, which takes minutes to compile."""
    pytest.importorskip("setuptools")
    place = tmp_path_factory.mktemp("wheel")
    command = [
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", place, "build", "--build-base", place),
        *("bdist_wheel", "--bdist-dir", place / "bdist", "--dist-dir", place),
    ]
    environment = {**os.environ, "MASKWISE_BUILD_EXTENSION": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = place.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {PurePosixPath(name): archive.read(name) for name in archive.namelist()}


def test_it_holds_the_package_and_its_metadata_alone(wheel):
    assert {path.parts[0].split("-")[0] for path in wheel} == {"maskwise"}
    modules = {path for path in wheel if path.suffix == ".py"}
    source = {PurePosixPath(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "maskwise").rglob("*.py")}
    assert modules == source
    assert PurePosixPath("maskwise/py.typed") in wheel


def test_it_holds_no_benchmarks_no_recipes_and_no_generators_of_documents(wheel):
    packages = {path.parts[1] for path in wheel if len(path.parts) > 2 and path.parts[0] == "maskwise"}
    assert packages == {"cli", "data", "distributed", "mask", "models", "nn", "ops", "plan"}
    assert not [path for path in wheel if {"benchmarks", "digits", "tools", "tests", "examples"} & set(path.parts)]
    # A generator is a module that is run as a script; of the package that is the command line alone.
    scripts = [str(path) for path, text in wheel.items() if path.suffix == ".py" and b'__name__ == "__main__"' in text]
    assert scripts == ["maskwise/__main__.py"]
