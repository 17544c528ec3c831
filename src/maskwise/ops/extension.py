"""Finds and loads the C++ kernels, and tells what became of that.

The ops exist without the binary (their schemas are in Python), so a missing extension costs speed and nothing else.
That is said once, at the first call that would have used a kernel, with the command that mends it.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from maskwise.errors import caller_level
from maskwise.ops.gpu.status import INTERPRETED
from maskwise.plan.capability import register_probe
from maskwise.tracing import is_tracing

__all__ = ["ExtensionStatus", "status"]

FIX = "pip install --no-build-isolation --force-reinstall --no-deps maskwise"
_LEVELS = {0: "baseline", 1: "avx2", 2: "avx512", 3: "neon"}


@dataclass(frozen=True)
class ExtensionStatus:
    """What is known of the C++ extension: the file, whether it is loaded, why not, its SIMD level, how to mend it."""

    path: str | None
    loaded: bool
    error: str | None
    simd: str
    fix: str


def find() -> Path | None:
    """The extension's file: MASKWISE_EXTENSION if set, else the one that was installed beside the package."""
    named = os.environ.get("MASKWISE_EXTENSION")
    if named:
        return Path(named)
    found = sorted(Path(__file__).parent.parent.glob("_C.*"))
    return found[0] if found else None


def load() -> tuple[Path | None, str | None]:
    """Load the extension; returns its path and what went wrong, if anything did."""
    torch.library.define("maskwise::simd_level", "(int wish) -> int", tags=torch.Tag.pt2_compliant_tag)
    if INTERPRETED:
        return None, "MASKWISE_INTERPRET=1: Triton's interpreter runs the kernels for GPUs"
    path = find()
    if path is None:
        return None, "the C++ extension is not built: the build saw no torch"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return path, f"the C++ extension does not load: {error}"
    return path, None


_path, _error = load()
_warned = False


def status() -> ExtensionStatus:
    """What is known of the extension.

    >>> status().simd in {"avx2", "avx512", "neon", "baseline", "none"}
    True
    """
    loaded = _error is None
    simd = _LEVELS[torch.ops.maskwise.simd_level(-1)] if loaded else "none"
    return ExtensionStatus(str(_path) if _path else None, loaded, _error, simd, FIX)


def why_not() -> str | None:
    """Why no CPU kernel can run, or None. Warns the first time that it has to say so."""
    global _warned
    # A graph that is being traced cannot warn; the first eager call will.
    if _error is not None and not _warned and not is_tracing():
        _warned = True
        message = f"maskwise runs without its kernels, and slower: {_error}. To mend it: {FIX}"
        warnings.warn(message, stacklevel=caller_level())
    return _error


if not INTERPRETED:
    register_probe("cpu", why_not)
