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
# docs/api/ is made from docstrings, whose examples are run as doctests; it is there only after `make docs`.
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *PAGES])
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_block_is_passed_over(document):
    text = document.read_text()
    fences = re.findall(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(.*)$", text, flags=re.M)
    # Indented fences, tildes and other spellings of python would be shown as code and not be run.
    assert {(indent, ticks) for indent, ticks, _ in fences} <= {("", "```")}
    opened, closed = fences[::2], fences[1::2]
    assert {language for _, _, language in opened} <= {"python", "text", "sh"}
    assert {language for _, _, language in closed} <= {""}
    assert len(opened) == len(closed)
    assert len(BLOCK.findall(text)) == sum(language == "python" for _, _, language in opened)


def test_every_page_is_in_the_navigation_of_the_site():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.md)$", nav, flags=re.M)
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES}
    assert {name for name in listed if not name.startswith("api/")} == pages
    assert len(listed) == len(set(listed))


def test_the_readme_shows_code_with_its_output():
    assert any(block["output"] for block in BLOCK.finditer((ROOT / "README.md").read_text()))


def test_the_first_block_of_the_gpu_quick_start_has_five_lines():
    first = BLOCK.search((ROOT / "docs" / "gpu-quick-start.md").read_text())
    assert len([line for line in first["code"].splitlines() if line.strip()]) == 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
