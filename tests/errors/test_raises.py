"""What a docstring says of errors is true: each that a call raises is listed, and each that is listed is raised."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import pytest

import maskwise as mw
from maskwise import Mask, Packed
from maskwise.errors import MaskwiseError
from maskwise.nn import gates, schedule
from tests.errors.row import raised
from tests.errors.table import ROWS

ROOTS = {"mw": mw, "Mask": Mask, "Packed": Packed, "gates": gates, "schedule": schedule}
RAISED: dict[str, set[str]] = defaultdict(set)
for row in ROWS:
    first, *rest = row.called.split(".")
    dunder = any(name.startswith("__") for name in rest)
    if first in ROOTS and not dunder and isinstance(raised(row), MaskwiseError):
        RAISED[row.called].add(type(raised(row)).__name__)


#: Python's own errors are not in the table.
OURS = {kind.__name__ for kind in MaskwiseError.__subclasses__()}


def object_of(name: str) -> object:
    """The public object of a dotted name."""
    first, *rest = name.split(".")
    found = ROOTS[first]
    for each in rest:
        found = inspect.getattr_static(found, each) if inspect.isclass(found) else getattr(found, each)
        found = found.__func__ if isinstance(found, classmethod) else found
    return found


def listed(thing: object) -> set[str]:
    """The errors in the Raises section of a docstring."""
    doc = inspect.cleandoc((thing.fget if isinstance(thing, property) else thing).__doc__ or "")
    section = re.search(r"^Raises:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    heads = re.findall(r"^    (\w[\w, ]*):", section.group(1), re.MULTILINE) if section else []
    return {name for head in heads for name in head.split(", ")}


def public() -> list[str]:
    """Every public function, class and method with a docstring that lists errors."""
    names = [
        f"mw.{name}"
        for name in mw.__all__
        if name not in ("Mask", "Packed", "nn", "models", "distributed", "testing", "MaskwiseError")
    ]
    names += [f"mw.nn.{name}" for name in mw.nn.__all__] + [f"mw.models.{name}" for name in mw.models.__all__]
    names += [f"mw.distributed.{name}" for name in mw.distributed.__all__]
    names += [f"mw.testing.{name}" for name in mw.testing.__all__]
    names += [f"gates.{name}" for name in gates.__all__] + [f"schedule.{name}" for name in schedule.__all__] + ["Mask"]
    for name in [*names, "Packed"]:
        if inspect.isclass(object_of(name)):
            own = vars(object_of(name))
            names += [f"{name}.{each}" for each in own if not each.startswith("_") and not isinstance(own[each], type)]
    return [name for name in names if listed(object_of(name))]


@pytest.mark.parametrize("called", sorted(RAISED))
def test_an_error_that_is_raised_is_listed(called: str) -> None:
    assert sorted(RAISED[called] - listed(object_of(called))) == []


@pytest.mark.parametrize("called", public())
def test_an_error_that_is_listed_is_raised(called: str) -> None:
    assert sorted((listed(object_of(called)) & OURS) - RAISED[called]) == []
