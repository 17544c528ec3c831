"""docs/functions.md says what the registry says."""

from pathlib import Path

from maskwise.ops.backends import served
from tests.laws.functions import FUNCTIONS
from tools.functions_page import page

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"


def test_the_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make functions-page`"


def test_a_function_has_a_kernel_if_its_law_says_so():
    assert {name: bool(served(name, "cpu") or served(name, "cuda")) for name in FUNCTIONS} == {
        name: function.kernel for name, function in FUNCTIONS.items()
    }


def test_every_function_has_its_row():
    text = page()
    for name in FUNCTIONS:
        assert f"| `mw.{name}(" in text
