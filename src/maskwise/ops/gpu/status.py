"""Whether the Triton kernels can run, and on which tensors.

They serve CUDA and ROCm. With ``MASKWISE_INTERPRET=1`` they run on CPU tensors by Triton's interpreter, in the place of
the C++ kernels: that is how they are tested where there is no GPU. It is slow, and for nothing else.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from maskwise.plan.capability import register_probe

__all__ = ["DEVICE", "INTERPRETED", "KEY", "why_not"]

INTERPRETED = os.environ.get("MASKWISE_INTERPRET", "0") == "1"
if INTERPRETED:
    # Triton looks at it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
#: The device whose tensors the kernels take, and the dispatch key under which they are registered.
DEVICE, KEY = ("cpu", "CPU") if INTERPRETED else ("cuda", "CUDA")
FIX = "pip install triton"
#: Whether there is a Triton. Looked for, not imported: that takes as long as importing torch does.
FOUND = find_spec("triton") is not None


def why_not() -> str | None:
    """Why no Triton kernel can run, or None.

    >>> why_not() is None or "Triton" in why_not()
    True
    """
    return None if FOUND else f"Triton is not installed, so plain torch serves: {FIX}"


register_probe(DEVICE, why_not)
