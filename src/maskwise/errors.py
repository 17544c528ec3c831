"""The errors of Maskwise: one root, and a child for each kind of mistake.

Every child also derives from the built-in error that torch or Python would raise in its place, so existing
``except ValueError`` clauses go on working. A message always has the same five parts:

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
    """The root of every error that Maskwise raises on purpose."""


class ArgumentError(MaskwiseError, ValueError):
    """An argument has the right type and a value that cannot be meant."""


class ShapeError(MaskwiseError, ValueError):
    """Shapes do not fit each other."""


class DtypeError(MaskwiseError, TypeError):
    """A type or a dtype is not the one that is asked for."""


class DeviceError(MaskwiseError, RuntimeError):
    """Two tensors that must meet live on different devices."""


class OutOfRangeError(MaskwiseError, IndexError):
    """An index or a dim points outside of what it indexes."""


class StaleMaskError(MaskwiseError, RuntimeError):
    """What is kept was changed in place, behind a Mask or in a SparseLinear, so that what goes with it is not true."""


def say(op: str, argument: str, *, must: str, got: object, hint: str) -> str:
    """Build the message of an error: who complains, about what, what was expected, what came, what to do.

    >>> say("sum", "mask", must="be a bool tensor", got="torch.int64", hint="Mask.from_attention_mask(mask)")
    'sum: `mask` must be a bool tensor, got torch.int64. Hint: Mask.from_attention_mask(mask).'
    """
    return f"{op}: `{argument}` must {must}, got {got}. Hint: {hint}."


_HOME = str(Path(__file__).parent)


def caller_level() -> int:
    """The ``stacklevel`` of the first frame that is the user's own: not of this package, torch or transformers."""
    found = (sys.modules.get(name) for name in ("torch", "transformers"))
    packages = (_HOME, *(str(Path(each.__file__).parent) for each in found if each is not None and each.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(packages):
        frame, level = frame.f_back, level + 1
    return level
