"""What a measurement or a bug report must say about the machine it comes from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from maskwise.plan.calibration import cpu_model

__all__ = ["cpu_model", "describe", "version_of"]


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None.

    >>> version_of("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe(device: str = "cpu") -> dict[str, str | int]:
    """Return the machine and the versions that a figure depends on."""
    import torch

    from maskwise.ops import backends

    gpu: dict[str, str | int] = {}
    if device != "cpu":
        gpu = {"gpu": torch.cuda.get_device_name(device), "triton": version_of("triton") or "none"}
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "simd": backends.status().simd,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "maskwise": version_of("maskwise") or "not installed",
        **gpu,
    }
