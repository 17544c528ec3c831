"""FLOPs of our ops for ``torch.utils.flop_counter``: what a call computes, which is what its mask keeps.

torch counts matrix products, convolutions and attention, and nothing else; so do the formulas beside our ops. A
multiply-add is two. They are registered when ``torch.utils.flop_counter`` is imported, by any code: it loads Triton,
which takes longer than everything else here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMULAS", "count_kept", "register_formula"]

COUNTER = "torch.utils.flop_counter"
#: By the name of the op.
FORMULAS: dict[str, Callable[..., int]] = {}


def register_formula(op: str, formula: Callable[..., int]) -> None:
    """Register the FLOPs of an op with torch's counter, now or when it is imported.

    Args:
        op: such as ``"maskwise::linear_product"``.
        formula: of the op's arguments, tensors included, and ``out_val``.
    """
    FORMULAS[op] = formula
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        library, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, library), op, None)
        # A later torch may know its own kernel.
        if packet is not None and packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    """Registers the formulas after torch's counter was imported; once."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the counter as Python does, and add the registration to its loading."""
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _register(module)

        loader.exec_module = exec_module
        return spec


def count_kept(mask: Tensor | None, shape: Sequence[int]) -> int:
    """How many elements of this shape a mask keeps, which broadcasts to it; all of them where it has no data.

    >>> count_kept(torch.tensor([[True, False]]), (3, 2)), count_kept(None, (3, 2))
    (3, 6)
    """
    if mask is None or mask.device.type == "meta" or type(mask) is not Tensor:
        return prod(shape)
    return int(mask.sum()) * (prod(shape) // max(mask.numel(), 1))


# -- torch's own CPU kernel of attention, which `mw.attention` calls and its counter does not know -------------------
def _flash_attention_for_cpu(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Torch's own CPU kernel, which its counter does not know; masks and the causal triangle count in full there."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (width + v.shape[-1])


def _flash_attention_for_cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Scores again, and four products of gradients."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (3 * width + 2 * v.shape[-1])


register_formula("aten::_scaled_dot_product_flash_attention_for_cpu", _flash_attention_for_cpu)
register_formula("aten::_scaled_dot_product_flash_attention_for_cpu_backward", _flash_attention_for_cpu_backward)
