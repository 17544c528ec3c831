"""What a newcomer reads: every public function names each of its arguments, no others, and shows a call that runs."""

import inspect
import re

import pytest

import maskwise as mw
from maskwise import Mask, Packed
from maskwise.nn import schedule

#: What needs a GPU, and what torch warns of, since sparse CSR tensors are in beta.
NO_EXAMPLE = {"Mask.pin_memory", "Packed.to_sparse_csr"}


def functions():
    found = {f"mw.{name}": getattr(mw, name) for name in mw.__all__}
    for prefix, module in (
        ("mw.nn", mw.nn),
        ("mw.nn.schedule", schedule),
        ("mw.models", mw.models),
        ("mw.distributed", mw.distributed),
        ("mw.testing", mw.testing),
    ):
        found |= {f"{prefix}.{name}": getattr(module, name) for name in module.__all__}
    found = {name: value for name, value in found.items() if inspect.isfunction(value)}
    for kind in (Mask, Packed):
        for name, value in vars(kind).items():
            method = value.__func__ if isinstance(value, classmethod) else value
            if inspect.isfunction(method) and not name.startswith("_"):
                found[f"{kind.__name__}.{name}"] = method
    return found


FUNCTIONS = functions()


def taken(name):
    """The parameters that a caller passes."""
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    return parameters[1:] if name.startswith(("Mask.", "Packed.")) else parameters


def told(name):
    """The arguments of the docstring."""
    doc = inspect.cleandoc(FUNCTIONS[name].__doc__)
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+): ", section.group(1), re.MULTILINE) if section else []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_told_in_order_and_no_other(name):
    assert told(name) == taken(name)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - NO_EXAMPLE))
def test_there_is_an_example(name):
    assert ">>> " in FUNCTIONS[name].__doc__


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "mask" in taken(name) and name != "mw.apply_"])
def test_a_mask_is_told_with_the_one_convention(name):
    mask = re.search(r"^ +mask: (.*?)(?:^ +\w+: |\Z|^$)", FUNCTIONS[name].__doc__, re.MULTILINE | re.DOTALL)
    assert mask[1].startswith("a Mask or a bool tensor")
    assert "True means keep" in " ".join(mask[1].split())
