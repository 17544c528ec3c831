"""The script that the type checkers read also runs, and misses no public name."""

import ast
import contextlib
import functools
import inspect
import io
from pathlib import Path

import pytest

import maskwise as mw
from maskwise import Mask, Packed, data, errors
from maskwise.nn import gates, schedule
from tests.typed import user_script

SOURCE = Path(user_script.__file__).read_text(encoding="utf-8")


USED = {node.attr for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Attribute)}


def typed(name):
    """What a type checker knows of a function: the family that exports it, and its signature."""
    function = getattr(mw, name)
    return (mw._HOME_OF[name], str(inspect.signature(function))) if inspect.isfunction(function) else None


#: Functions that differ in nothing but their names from one that the script calls, such as amin from amax.
ALIKE = {name for name in mw._HOME_OF if typed(name) in {typed(other) for other in {*mw._HOME_OF} & USED} - {None}}


@pytest.fixture(scope="module")
def attributes():
    return USED


def test_it_runs_and_says_what_it_found():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        user_script.main()
    assert "Hint" in printed.getvalue()
    assert mw.__version__ in printed.getvalue()


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("mw", {*mw.__all__} - {"Mask", "MaskwiseError", "Packed"} - ALIKE),
        ("mw.nn", {*mw.nn.__all__} - {"gates", "schedule"}),
        ("gates", {*gates.__all__}),
        ("schedule", {*schedule.__all__}),
        ("mw.models", {*mw.models.__all__}),
        ("mw.distributed", {*mw.distributed.__all__}),
        ("data", {*data.__all__}),
        # These two are not for users to raise or to write.
        ("errors", {*errors.__all__} - {"MaskwiseError", "say"}),
        # Pinned memory, and anything on a GPU, needs one.
        ("Mask", {name for name in vars(Mask) if not name.startswith("_")} - {"cuda", "pin_memory"}),
        # Sparse CSR tensors warn that they are in beta.
        ("Packed", {name for name in vars(Packed) if not name.startswith("_")} - {"to_sparse_csr", "capacity"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_has_every_public_name(where, names, attributes):
    assert sorted(names - attributes) == []


# What torch calls, and what print shows.
BY_TORCH = {"forward", "extra_repr"}
CLASSES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (mw.nn, gates, schedule, mw.models, mw.distributed, data)
    for name in module.__all__
    if isinstance(getattr(module, name), type)
}


@pytest.mark.parametrize("kind", CLASSES)
def test_it_has_every_method_and_property_of_a_public_class(kind, attributes):
    own = vars(CLASSES[kind])
    methods = {name for name in own if not name.startswith("_") and (callable(own[name]) or is_property(own[name]))}
    assert sorted(methods - attributes - BY_TORCH - WRITTEN) == []


def is_property(value):
    return isinstance(value, (property, classmethod, staticmethod, functools.cached_property))


#: What the script writes itself, in a class of its own.
WRITTEN = {node.name for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)}
