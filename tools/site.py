"""Hooks of mkdocs: the version in the title, plots of benchmark runs, and no edit link on generated pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLOTS = "benchmarks/results"


def version() -> str:
    """The version of the package, without importing it."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.M)
    assert found is not None
    return found[1]


def on_config(config: Any) -> Any:
    """Show the version beside the name; without a repository there is nothing to edit."""
    config.site_name = f"{config.site_name} {version()}"
    config.edit_uri = config.edit_uri if config.repo_url else None
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the plots, which are beside the runs that they show, outside of docs/."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / PLOTS).glob("*.png")):
        files.append(File.generated(config, f"{PLOTS}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    r"""Link the plots where the site has them, and drop the edit link of a page that is generated or included.

    >>> class Page: edit_url = "edit/main/docs/figures.md"
    >>> on_page_markdown("*Made from runs.*\n\n![a](../benchmarks/results/a.png)", Page).splitlines()[-1]
    '![a](benchmarks/results/a.png)'
    >>> print(Page.edit_url)
    None
    """
    if re.search(r"^(\*Made (by|from) |--8<--)", markdown, flags=re.M):
        page.edit_url = None
    return markdown.replace(f"](../{PLOTS}/", f"]({PLOTS}/")
