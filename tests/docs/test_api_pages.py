"""The pages of the API, which `make docs` makes, have everything that is public."""

import re
from pathlib import Path

import pytest

import maskwise as mw
from tools.api_pages import pages, prose, quiet, rendered

ROOT = Path(__file__).parents[2]
MADE = pages()
HEADINGS = [name for text in MADE.values() for name in re.findall(r"^#{3,4} (.*)$", text, flags=re.M)]


def test_every_public_name_has_one_entry():
    names = {f"mw.{name}" for name in mw.__all__ if name not in ("__version__", "MaskwiseError", "models", "nn")}
    names |= {f"mw.nn.{name}" for name in mw.nn.__all__ if name not in ("gates", "schedule")}
    names |= {f"mw.models.{name}" for name in mw.models.__all__ if name != "unpad"}
    assert names <= set(HEADINGS)
    assert len(HEADINGS) == len(set(HEADINGS))


def test_every_entry_says_something():
    for file, text in MADE.items():
        for heading, after in re.findall(r"^#{3,4} (.*)\n\n```text\n.*\n```\n\n(.*)$", text, flags=re.M):
            assert len(after) > 5, f"{file}: {heading} has no docstring"
            assert not after.startswith("#"), f"{file}: {heading} has no docstring"


def test_the_navigation_has_every_page_and_links_of_the_index_lead_to_headings():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"api/{file}" in nav for file in MADE)
    anchors = {re.sub(r"[^\w-]", "", name).lower() for name in HEADINGS}
    linked = re.findall(r"\(\w+\.md#(\w+)\)", MADE["index.md"])
    assert len(linked) > 100
    assert set(linked) <= anchors


def test_a_docstring_becomes_markdown():
    text = """Add.

>>> 1 + 1
2

Args:
    x: the ``first``, which
        goes on.

Returns:
    (*, L).

More."""
    assert rendered(text) == [
        "Add.",
        "",
        "```pycon",
        ">>> 1 + 1",
        "2",
        "```",
        "",
        "**Arguments**",
        "",
        "- `x`: the `first`, which",
        "  goes on.",
        "",
        "**Returns**",
        "",
        "(\\*, L).",
        "",
        "More.",
    ]


@pytest.mark.parametrize(("given", "expected"), [("``a * b``", "`a * b`"), ("(*, L)", "(\\*, L)"), ("**x**", "**x**")])
def test_stars_are_emphasis_only_where_they_are_meant(given, expected):
    assert quiet(given) == expected


def test_an_example_at_the_end_is_closed():
    assert prose("Add.\n\n>>> 1\n1") == ["Add.", "", "```pycon", ">>> 1", "1", "```"]
