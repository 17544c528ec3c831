"""The page docs/functions.md, made from the registry and the capability table.

``python -m tools.functions_page docs/functions.md`` writes it; the tests fail when it is stale.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import torch

from maskwise.ops.backends import FLOATING, INTEGRAL, served
from maskwise.ops.loss.element_losses import KERNEL_LOSSES
from tests.laws.functions import FUNCTIONS, Function

__all__ = ["page"]

HEAD = """# Functions

*Made from the registry by `make functions-page`; the tests fail when it is stale.*

Each function takes torch's arguments under torch's names, and `mask`: a `Mask` or a bool tensor, True meaning keep,
that broadcasts to `x`. The [guarantees](laws.md) hold for all of them: `tests/laws/` tests every function in this
table, and `make bench` compares it with the idiom. `mw.count(mask, dim=None, keepdim=False)` counts kept positions.
Torch's other names run the same ops: `mw.where(mask, x, other)` and `mw.mul(x, mask)` that of `fill`,
`mw.max(x, mask, dim=None, keepdim=False)` and `mw.min` those of `amax`, `argmax`, `amin` and `argmin`.

- **nothing kept**: the result of an empty slice. In reductions, `empty=` replaces it.
- **CPU kernel**, **GPU kernel**: the dtypes that the fused kernel supports, in C++ or in [Triton](gpu.md); any other
  dtype that torch has for the function, and any other device, runs on plain torch operations with the same guarantees.
- **gradient**: how often it can be differentiated.
"""

GROUPS = {"floats": FLOATING, "ints": INTEGRAL, "bool": (torch.bool,), "complex": (torch.complex64, torch.complex128)}
ORDERS = {0: "none", 1: "once", 2: "twice"}


def dtypes(function: Function, device: str) -> str:
    """The dtypes of the kernel on a device, by group where a group is whole."""
    found = served(function.name, device)
    names = []
    for group, members in GROUPS.items():
        present = [dtype for dtype in members if dtype in found]
        if len(present) == len(members):
            names.append(group)
        else:
            names += [str(dtype).removeprefix("torch.") for dtype in present]
    return ", ".join(names) or "none"


def signature(function: Function) -> str:
    """The call as one writes it, without types."""
    parameters = inspect.signature(function.call).parameters.values()
    return f"mw.{function.name}{inspect.Signature([p.replace(annotation=p.empty) for p in parameters])}"


def losses() -> str:
    """Which losses the kernel of ``loss`` means: for a loss, dtypes alone say too little."""
    named = ", ".join(f"`{name}`" for name in dict.fromkeys(each.fn.__name__ for each in KERNEL_LOSSES))
    return f"""A loss has a kernel if it is one of these:

- {named},
  where input and target have one shape and one dtype, and no target needs a gradient;
- `cross_entropy` with classes as target, also with `ignore_index`, and with `weight` or `label_smoothing`.

Every other loss, and these with other arguments, is torch's own function, with dropped inputs replaced first
by the kernels of `fill` and `sum`, which takes a few calls more than an idiom that leaks, and shows on small inputs."""


def page() -> str:
    """The page as markdown."""
    lines = [HEAD]
    for family in dict.fromkeys(function.family for function in FUNCTIONS.values()):
        head = "| call | nothing kept | CPU kernel | GPU kernel | gradient |"
        lines += [f"## {family}", "", head, "|---|---|---|---|---|"]
        for function in FUNCTIONS.values():
            if function.family == family:
                # A | inside of a cell would end it, also in code.
                call = signature(function).replace("|", "\\|")
                # fill gives what it was told to give.
                nothing = "`value`" if function.name == "fill" else f"{function.empty:g}"
                kernels = (dtypes(function, "cpu"), dtypes(function, "cuda"))
                row = (f"`{call}`", nothing, *kernels, ORDERS[function.gradient])
                lines.append(f"| {' | '.join(row)} |")
        lines.append("")
        if family == "loss":
            lines += [losses(), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
