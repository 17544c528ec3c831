"""Which kernels exist and can run: the C++ extension, the Triton kernels, and the table of what they support.

The ops exist without either (their schemas are in Python), so a missing extension costs only speed. The first call that
would have used a kernel warns once, with the command that fixes it. The Triton kernels run on CUDA and ROCm. With
``MASKWISE_INTERPRET=1`` they run on CPU tensors under Triton's interpreter, instead of the C++ kernels: slow, and for
tests without a GPU only.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from maskwise.errors import caller_level
from maskwise.ops.torch_private import is_tracing
from maskwise.plan.dispatch import forced

__all__ = [
    "DEVICE",
    "FLOATING",
    "INTEGRAL",
    "INTERPRETED",
    "INTERVALS_ON",
    "KEY",
    "ExtensionStatus",
    "is_kernel_allowed",
    "provide",
    "served",
    "status",
    "why_no_triton",
    "why_not_served",
]

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# -- Triton ------------------------------------------------------------------------------------------------------------
INTERPRETED = os.environ.get("MASKWISE_INTERPRET", "0") == "1"
if INTERPRETED:
    # Triton reads it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
#: The device type of the Triton kernels, and the dispatch key under which they are registered.
DEVICE, KEY = ("cpu", "CPU") if INTERPRETED else ("cuda", "CUDA")
#: The devices whose kernels take masks as intervals.
INTERVALS_ON = frozenset({"cpu", DEVICE})
#: Whether Triton is installed. Not imported here: that takes as long as importing torch.
_HAS_TRITON = find_spec("triton") is not None


def why_no_triton() -> str | None:
    """Why no Triton kernel can run, or None.

    >>> why_no_triton() is None or "Triton" in why_no_triton()
    True
    """
    return None if _HAS_TRITON else "Triton is not installed, so plain torch is used: pip install triton"


# -- the C++ extension -------------------------------------------------------------------------------------------------
_CLONE = "https://github.com/maskwise/maskwise"
_LEVELS = {0: "baseline", 1: "avx2", 2: "avx512", 3: "neon"}
_IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}


@dataclass(frozen=True)
class ExtensionStatus:
    """The state of the C++ extension: the file, whether it is loaded, why not, its SIMD level, what fixes it."""

    path: str | None
    loaded: bool
    error: str | None
    simd: str
    fix: str


def find() -> Path | None:
    """The extension's file: MASKWISE_EXTENSION if set, else the one installed with the package."""
    named = os.environ.get("MASKWISE_EXTENSION")
    if named:
        return Path(named)
    found = sorted(Path(__file__).parent.parent.glob("_C.*"))
    return found[0] if found else None


def why_no_simd() -> str | None:
    """Why this CPU can run none of the kernels, or None: on x86 they are compiled for AVX2 and AVX-512.

    ``MASKWISE_SIMD=baseline`` gives what an x86 CPU without AVX2 has: plain torch.

    >>> why_no_simd() is None or "AVX2" in why_no_simd()
    True
    """
    if not _IS_X86 or os.environ.get("MASKWISE_PORTABLE") == "1":
        return None
    if os.environ.get("MASKWISE_SIMD") == "baseline":
        return "MASKWISE_SIMD=baseline: on x86 the kernels need AVX2"
    if torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "NO AVX"}:
        return "this CPU has no AVX2, which the kernels need on x86"
    return None


def rebuild() -> str:
    """The command that builds the extension, by where this package comes from.

    A clone has a make target for it, which builds in place. Any other install is repeated from the directory or the
    repository that pip has noted, and from a clone where pip installed a wheel, which holds no sources.

    >>> rebuild().startswith(("make -C ", sys.executable, "git clone "))
    True
    """
    # Rarely needed, and slow to import.
    import json
    import shlex
    from importlib.metadata import Distribution, PackageNotFoundError
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    root = Path(__file__).parents[3]
    if (root / "csrc").is_dir() and (root / "Makefile").is_file():
        return f"make -C {shlex.quote(str(root))} install"
    source, first = f"./{_CLONE.rpartition('/')[2]}", f"git clone {_CLONE} && "
    try:
        origin = json.loads(Distribution.from_name("maskwise").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, json.JSONDecodeError):
        origin = {}
    if "vcs_info" in origin:
        source, first = f"{origin['vcs_info']['vcs']}+{origin['url']}", ""
    elif "dir_info" in origin and (folder := Path(url2pathname(urlparse(origin["url"]).path))).is_dir():
        source, first = str(folder), ""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    # Without isolation the build takes its tools from here, and so torch as well.
    return (
        f"{first}{pip} 'setuptools>=77' ninja && "
        f"{pip} --no-build-isolation --no-deps --force-reinstall {shlex.quote(source)}"
    )


def load() -> tuple[Path | None, str | None, str]:
    """Load the extension; returns its path, the error if any, and the command that fixes it, if one does."""
    torch.library.define("maskwise::simd_level", "(int wish) -> int", tags=torch.Tag.pt2_compliant_tag)
    if INTERPRETED:
        return None, "MASKWISE_INTERPRET=1: the GPU kernels run under Triton's interpreter", ""
    # A CPU is not fixed by an installation.
    if (reason := why_no_simd()) is not None:
        return None, reason, ""
    path = find()
    if path is None:
        return None, "the C++ extension is not built: torch was not importable during the build", rebuild()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return path, f"the C++ extension does not load: {error}", rebuild()
    return path, None, ""


_path, _error, _fix = load()
_warned = False


def status() -> ExtensionStatus:
    """The state of the extension.

    >>> status().simd in {"avx2", "avx512", "neon", "baseline", "none"}
    True
    """
    loaded = _error is None
    simd = _LEVELS[torch.ops.maskwise.simd_level(-1)] if loaded else "none"
    return ExtensionStatus(str(_path) if _path else None, loaded, _error, simd, _fix)


def why_no_extension() -> str | None:
    """Why no CPU kernel can run, or None. Warns the first time."""
    global _warned
    # A traced graph cannot warn; the first eager call will.
    if _error is not None and not _warned and not is_tracing():
        _warned = True
        message = f"maskwise runs without its kernels, and slower: {_error}." + (f" To fix it: {_fix}" if _fix else "")
        warnings.warn(message, stacklevel=caller_level())
    return _error


# -- what they serve ---------------------------------------------------------------------------------------------------
# A CPU kernel raises for a dtype that it does not support; it does not fall back to the reference by itself. This table
# keeps such calls away from it.
_kernels: dict[tuple[str, str], frozenset[torch.dtype]] = {}
_probes: dict[str, Callable[[], str | None]] = {DEVICE: why_no_triton}
if not INTERPRETED:
    _probes["cpu"] = why_no_extension


def provide(op: str, device: str, dtypes: Iterable[torch.dtype]) -> None:
    """Register that ``op`` has a kernel on ``device`` for these dtypes."""
    _kernels[op, device] = frozenset(dtypes)


def why_not_served(op: str, device: str, dtype: torch.dtype) -> str | None:
    """Why no kernel supports such a call, or None where one does.

    >>> why_not_served("no_such_op", "cpu", torch.float32)
    'no_such_op has no kernel on cpu'
    """
    dtypes = _kernels.get((op, device))
    if dtypes is None:
        return f"{op} has no kernel on {device}"
    if dtype not in dtypes:
        return f"the {device} kernel of {op} does not support {dtype}"
    return _probes[device]() if device in _probes else None


def is_kernel_allowed(op: str, device: str, dtype: torch.dtype) -> bool:
    """Whether a step of another function may run on a kernel: one supports it, and `mw.force` does not require torch.

    >>> is_kernel_allowed("no_such_op", "cpu", torch.float32)
    False
    """
    return forced() != "plain" and why_not_served(op, device, dtype) is None


def served(op: str, device: str) -> frozenset[torch.dtype]:
    """The dtypes that the kernel of ``op`` on ``device`` supports; empty without a kernel."""
    return _kernels.get((op, device), frozenset())
