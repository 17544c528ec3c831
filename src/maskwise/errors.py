"""The exceptions of Maskwise: one base class, and a subclass for each kind of mistake.

Every subclass also derives from the built-in exception that torch or Python would raise, so existing
``except ValueError`` clauses keep working. A message always has the same five parts:

    softmax: `mask` must broadcast to x's shape (8, 128, 64), got (8, 128). Hint: mask[..., None].
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = [
    "ArgumentError",
    "DeviceError",
    "DtypeError",
    "MaskwiseError",
    "OutOfRangeError",
    "ShapeError",
    "StaleMaskError",
    "say",
]


class MaskwiseError(Exception):
    """The base class of every exception that Maskwise raises on purpose."""


class ArgumentError(MaskwiseError, ValueError):
    """An argument has the right type and an invalid value."""


class ShapeError(MaskwiseError, ValueError):
    """Shapes are incompatible."""


class DtypeError(MaskwiseError, TypeError):
    """An argument has the wrong type or dtype."""


class DeviceError(MaskwiseError, RuntimeError):
    """Two tensors that are used together are on different devices."""


class OutOfRangeError(MaskwiseError, IndexError):
    """An index or a dim is out of range."""


class StaleMaskError(MaskwiseError, RuntimeError):
    """Data under a Mask, or the indices of a SparseLinear, were modified in place, so what was derived is stale."""


def say(op: str, argument: str, *, must: str, got: object, hint: str) -> str:
    """Build an error message: the function, the argument, what is expected, what was passed, and a hint.

    >>> say("sum", "mask", must="be a bool tensor", got="torch.int64", hint="Mask.from_attention_mask(mask)")
    'sum: `mask` must be a bool tensor, got torch.int64. Hint: Mask.from_attention_mask(mask).'
    """
    return f"{op}: `{argument}` must {must}, got {got}. Hint: {hint}."


_HOME = str(Path(__file__).parent)


def caller_level() -> int:
    """The ``stacklevel`` of the first frame in user code: not in this package, torch or transformers."""
    found = (sys.modules.get(name) for name in ("torch", "transformers"))
    packages = (_HOME, *(str(Path(each.__file__).parent) for each in found if each is not None and each.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(packages):
        frame, level = frame.f_back, level + 1
    return level
