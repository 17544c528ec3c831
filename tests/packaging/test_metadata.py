import re
from importlib.metadata import metadata, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


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
