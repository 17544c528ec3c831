"""The pages of the API, which `make docs` makes, have everything that is public."""

import re
from pathlib import Path

import pytest

import maskwise as mw
from tools.api_pages import ALIASES, pages, prose, quiet, rendered

ROOT = Path(__file__).parents[2]
MADE = pages()
HEADINGS = [name for text in MADE.values() for name in re.findall(r"^#{3,4} (.*)$", text, flags=re.M)]


def test_every_public_name_has_one_entry():
    names = {
        f"mw.{name}"
        for name in mw.__all__
        if name not in ("__version__", "MaskwiseError", "distributed", "models", "nn", "testing")
    }
    names |= {f"mw.nn.{name}" for name in mw.nn.__all__ if name not in ("gates", "schedule")}
    names |= {f"mw.models.{name}" for name in mw.models.__all__ if name != "unpad"}
    names |= {f"mw.distributed.{name}" for name in mw.distributed.__all__}
    names |= {f"mw.testing.{name}" for name in mw.testing.__all__}
    assert names <= set(HEADINGS)
    assert len(HEADINGS) == len(set(HEADINGS))


def test_every_entry_says_something():
    for file, text in MADE.items():
        for heading, after in re.findall(r"^#{3,4} (.*)\n\n```\w+\n(?:.*\n)*?```\n\n(.*)$", text, flags=re.M):
            assert len(after) > 5, f"{file}: {heading} has no docstring"
            assert not after.startswith("#"), f"{file}: {heading} has no docstring"


def test_the_navigation_has_every_page_and_links_of_the_index_lead_to_headings():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"api/{file}" in nav for file in MADE)
    anchors = {re.sub(r"[^\w-]", "", name.replace(" ", "-")).lower() for name in HEADINGS}
    linked = re.findall(r"\(\w+\.md#([\w-]+)\)", MADE["index.md"])
    assert len(linked) > 100
    assert set(linked) <= anchors


def test_signatures_have_types_and_break_where_they_are_long():
    assert (
        "Mask.count(dim: int | Sequence[int] | None = None, keepdim: bool = False) -> int | Tensor\n" in MADE["mask.md"]
    )
    assert "Mask.density: float" in MADE["mask.md"]
    assert "mw.sum(\n    x: Tensor,\n    mask: MaskLike,\n    dim: Dim = None,\n    *,\n" in MADE["functions.md"]
    assert ") -> Tensor\n" in MADE["functions.md"]
    used = set(re.findall(r": (\w*(?:Like|Dim|Device))\b", "".join(MADE.values())))
    assert used <= set(ALIASES)


def test_pages_are_in_the_order_of_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"api/(\w+\.md)", nav) == ["index.md", *(file for file in MADE if file != "index.md")]


def test_every_command_lists_its_options():
    for name in ("doctor", "demo", "bench", "draw", "calibrate"):
        section = MADE["cli.md"].split(f"### maskwise {name}\n")[1].split("\n### ")[0]
        assert "| `--json` | " in section
    assert "maskwise draw [OPTIONS] EXPRESSION" in MADE["cli.md"]


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
