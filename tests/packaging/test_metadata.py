import re
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser for pyproject.toml")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def support():
    """The README's table of what is supported: for each row what is tested, built and expected."""
    section = (ROOT / "README.md").read_text().split("\n## Support\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def numbers(text, major):
    return {int(minor) for minor in re.findall(rf"\b{major}\.(\d+)", text)}


def test_the_package_asks_for_a_range_of_torch_and_the_constraints_pin_one_inside_it():
    required = {r.name: r for r in map(Requirement, requires("maskwise")) if r.marker is None}
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    assert str(required["torch"].specifier) == ">=2.10"
    assert required["torch"].specifier.contains(pinned["torch"])


def test_the_version_is_the_newest_one_in_the_changelog():
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M).group(1)
    assert metadata("maskwise")["Version"] == newest


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {metadata('maskwise')['Version']}\n" in text
    assert f"\nlicense: {metadata('maskwise')['License-Expression']}\n" in text


def test_setup_builds_only_the_extension_and_stays_short():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 80


def test_the_support_table_lists_the_pythons_that_the_package_declares():
    row = support()["Python"]
    declared = numbers(" ".join(project()["classifiers"]), 3)
    assert numbers(row["tested"] + " " + row["expected"], 3) == declared
    assert numbers(project()["requires-python"], 3) == numbers(row["built"], 3) == {min(declared)}
    assert '"py_limited_api": "cp310"' in (ROOT / "setup.py").read_text()


def test_the_support_table_lists_every_torch_from_the_oldest_that_the_package_takes():
    row = support()["torch"]
    tested, expected = (numbers(re.sub("`.*?`", "", row[column]), 2) for column in ("tested", "expected"))
    (required,) = [name for name in project()["dependencies"] if name.startswith("torch")]
    oldest, newest = min(tested), max(tested)
    assert required == f"torch>=2.{oldest}"
    assert numbers(row["built"], 2) == {oldest}
    assert tested | expected == set(range(oldest, newest + 1))
    assert not tested & expected
    assert numbers(re.search("^torch==.*$", (ROOT / "constraints.txt").read_text(), flags=re.M)[0], 2) <= tested
    assert f'TORCH_TARGET_VERSION = "0x02{oldest:02x}' in (ROOT / "setup.py").read_text()


def test_the_support_table_lists_the_targets_that_the_kernels_are_compiled_for():
    table = support()
    assert set(re.findall(r"AVX[\w-]*", table["Linux x86-64"]["tested"].split(";")[0])) == {"AVX2", "AVX-512"}
    header = (ROOT / "csrc" / "foreach_target.h").read_text()
    assert set(re.findall("^#define MASKWISE_TARGET (.*)$", header, flags=re.M)) == {"baseline", "avx2", "avx512"}
    compiled = set(re.findall('^    "(.*)": GPUTarget', (ROOT / "tests" / "gpu" / "aot.py").read_text(), flags=re.M))
    assert compiled == set(re.findall(r"sm_\d+|gfx\d+", " ".join(row["built"] for row in table.values())))
    systems = {name.rpartition(" ")[2] for name in project()["classifiers"] if name.startswith("Operating System")}
    assert (
        systems
        == {"Linux", "MacOS"}
        == {what.split()[0].replace("mac", "Mac") for what in table if "OS" in what or "Linux" in what}
    )


def test_the_support_table_names_targets_of_make_and_the_system_that_the_wheel_is_tagged_for():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([\w-]+)", str(support())))
    assert named == {"test-torch", "wheel", "test-arm", "test-gpu", "test-gpu-compile"}
    assert named <= set(re.findall(r"^\.PHONY: (\S+)$", makefile, flags=re.M))
    tagged = re.search(r"^MANYLINUX \?= manylinux_(\d+)_(\d+)", makefile, flags=re.M)
    assert f"glibc {tagged[1]}.{tagged[2]} and newer" in support()["Linux x86-64"]["built"]
