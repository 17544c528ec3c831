"""The script that the type checkers read also runs, and misses no public name."""

import ast
import contextlib
import io
from pathlib import Path

import pytest

import maskwise as mw
from maskwise import Mask, Packed
from maskwise.nn import gates, schedule
from tests.typed import user_script

SOURCE = Path(user_script.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def attributes():
    return {node.attr for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Attribute)}


def test_it_runs_and_says_what_it_found():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        user_script.main()
    assert "Hint" in printed.getvalue()
    assert mw.__version__ in printed.getvalue()


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("mw", {*mw.__all__} - {"Mask", "MaskwiseError", "Packed"}),
        ("mw.nn", {*mw.nn.__all__} - {"gates", "schedule"}),
        # What derives from these is written by those who add gates.
        ("gates", {*gates.__all__} - {"Selecting"}),
        ("schedule", {*schedule.__all__}),
        ("mw.models", {*mw.models.__all__}),
        # Pinned memory, and anything on a GPU, needs one.
        ("Mask", {name for name in vars(Mask) if not name.startswith("_")} - {"cuda", "pin_memory"}),
        # Sparse CSR tensors warn that they are in beta.
        ("Packed", {name for name in vars(Packed) if not name.startswith("_")} - {"to_sparse_csr", "capacity"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_has_every_public_name(where, names, attributes):
    assert sorted(names - attributes) == []
