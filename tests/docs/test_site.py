"""The site works from disk, fetches nothing, and shows plots that are beside the runs."""

import re
from pathlib import Path

import pytest

from tools import site

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_search_works_from_disk_with_a_worker_of_our_own():
    assert re.search(r"^  - offline$", CONFIG, flags=re.M)
    (worker,) = re.findall(r"polyfills: \[(\S*iframe-worker\S*)\]", CONFIG)
    assert (ROOT / "docs" / worker).exists()


def test_nothing_is_fetched_from_the_network():
    assert "font: false" in CONFIG
    for path in (ROOT / "docs" / "assets").iterdir():
        # Pictures fetch nothing.
        text = "" if path.suffix == ".png" else path.read_text(encoding="utf-8")
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), path.name
    assert not re.findall(r"https?://", CONFIG)


class Page:
    edit_url = "edit/main/docs/page.md"


@pytest.mark.parametrize("name", ["functions.md", "gpu.md", "figures.md", "supported-models.md", "changelog.md"])
def test_generated_pages_have_no_edit_link(name):
    page = Page()
    site.on_page_markdown((ROOT / "docs" / name).read_text(encoding="utf-8"), page)
    assert page.edit_url is None


@pytest.mark.parametrize("name", ["index.md", "concepts.md", "alternatives.md", "benchmarks.md"])
def test_written_pages_keep_it(name):
    page = Page()
    site.on_page_markdown((ROOT / "docs" / name).read_text(encoding="utf-8"), page)
    assert page.edit_url == Page.edit_url


def test_the_title_has_the_version():
    class Config:
        site_name, repo_url, edit_uri = "Maskwise", "", "edit/main/docs/"

    config = site.on_config(Config())
    assert config.site_name == f"Maskwise {site.version()}"
    assert config.edit_uri is None
