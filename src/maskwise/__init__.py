"""Maskwise: mask-aware computing for PyTorch. You pay for what you keep, and nothing else leaks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from maskwise.errors import MaskwiseError as MaskwiseError

if TYPE_CHECKING:
    # For type checkers alone, and so without the names, which are in `_HOMES`; a test compares both.
    from maskwise import distributed as distributed
    from maskwise import models as models
    from maskwise import nn as nn
    from maskwise import testing as testing
    from maskwise.data import TokenBudgetSampler as TokenBudgetSampler
    from maskwise.distributed import accumulate as accumulate
    from maskwise.mask import Mask as Mask
    from maskwise.models import unpad as unpad
    from maskwise.models.audit import audit as audit
    from maskwise.models.audit import optimize as optimize
    from maskwise.models.compress import compress as compress
    from maskwise.ops.attention import AlibiBias as AlibiBias
    from maskwise.ops.attention import RelativeBias as RelativeBias
    from maskwise.ops.attention import attention as attention
    from maskwise.ops.conv import *
    from maskwise.ops.fill import *
    from maskwise.ops.flops import FlopCounter as FlopCounter
    from maskwise.ops.linear import linear as linear
    from maskwise.ops.loss import *
    from maskwise.ops.order import *
    from maskwise.ops.reduce import *
    from maskwise.ops.scan import *
    from maskwise.ops.select import *
    from maskwise.ops.softmax import *
    from maskwise.plan.dispatch import force as force
    from maskwise.plan.dispatch import plan as plan
    from maskwise.plan.explain import explain as explain
else:
    # The first import of a subpackage binds it to its name here, which for `plan` is the function's.
    from maskwise import plan

    del plan

__version__ = "0.2.0"

# The public names, by home. All are imported lazily: torch takes a second, which the help of the command line does not
# need, and registering the ops takes longer than everything else here. Masks and plans come without the ops.
_CORE = {
    "maskwise.mask": "Mask",
    "maskwise.plan.dispatch": "force plan",
    "maskwise.plan.explain": "explain",
}
# The first use of a function imports all of them, because it may happen while a graph is traced, and the op registry
# must not change during the trace. The documentation lists them in this order.
_HOMES = {
    "maskwise.ops.reduce": "sum prod mean var std norm amax amin max min argmax argmin logsumexp any all count",
    "maskwise.ops.softmax": "softmax log_softmax softmin normalize standardize",
    "maskwise.ops.scan": "cumsum cumprod cummax cummin logcumsumexp",
    "maskwise.ops.order": "median quantile sort argsort topk",
    "maskwise.ops.fill": "fill where mul",
    "maskwise.ops.loss": "loss linear_cross_entropy",
    "maskwise.ops.select": "apply apply_ pack Packed",
    "maskwise.ops.attention": "attention AlibiBias RelativeBias",
    "maskwise.ops.linear": "linear",
    "maskwise.ops.conv": "conv1d conv2d conv_transpose1d conv_transpose2d",
    "maskwise.models": "unpad",
    "maskwise.models.compress": "compress",
    "maskwise.models.audit": "audit optimize",
    "maskwise.ops.flops": "FlopCounter",
    "maskwise.data": "TokenBudgetSampler",
    "maskwise.distributed": "accumulate",
}
_CORE_NAMES = {name for names in _CORE.values() for name in names.split()}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Public subpackages and modules.
_PACKAGES = ("distributed", "models", "nn", "testing")

__all__ = sorted(["MaskwiseError", "__version__", *_CORE_NAMES, *_HOME_OF, *_PACKAGES])


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in __all__:
        from maskwise.guesses import instead_of

        raise AttributeError(f"module 'maskwise' has no attribute {name!r}. Hint: {instead_of(name, __all__)}.")
    core = name in _CORE_NAMES
    for home, names in (_CORE if core else _CORE | _HOMES).items():
        module = import_module(home)
        globals().update({each: getattr(module, each) for each in names.split()})
    if not core:
        globals().update({each: import_module(f"maskwise.{each}") for each in _PACKAGES})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
