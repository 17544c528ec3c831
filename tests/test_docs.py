"""Every Python block in the documents runs, and prints what the block after it says.

Blocks of one document share their names, as a reader would type them one after the other. A ```text block right after a
```python block is its output.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n?```text\n(?P<output>.*?)^```$)?", flags=re.M | re.S)


def strip_trailing(text):
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run_and_print_what_is_shown(document):
    text = document.read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 2
        # The padding puts the document's own line number into a traceback.
        code = compile("\n" * (line - 1) + block["code"], str(document), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert strip_trailing(printed.getvalue()) == strip_trailing(block["output"] or ""), f"{document.name}:{line}"


def test_the_readme_shows_code_with_its_output():
    assert any(block["output"] for block in BLOCK.finditer((ROOT / "README.md").read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
