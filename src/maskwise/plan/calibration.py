"""The rates in use: those that ``maskwise calibrate`` measured on this machine, or the defaults.

The file is read when the first plan is made, never at import. A cache directory may be shared, so the file may have
entries for several machines, thread counts and versions; entries of others are left alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from maskwise.plan.cost import BUILT_IN, Rates

__all__ = ["Calibration", "cpu_model", "forget", "identity", "key", "path", "rates_for", "read", "state"]

FILE = "calibration.json"
#: The rates by device type; None until the first plan.
_loaded: dict[str, Rates] | None = None


@dataclass(frozen=True)
class Calibration:
    """The entry of this machine in the file.

    Attributes:
        rates: by device type, "cpu" or "cuda"; empty where nothing was measured.
        date: when they were measured, or None.
        fault: why the file cannot be read, or None.
    """

    rates: dict[str, Rates]
    date: str | None = None
    fault: str | None = None


@cache
def cpu_model() -> str:
    """The model name of the CPU, as the operating system reports it."""
    try:
        if platform.system() == "Linux":
            with Path("/proc/cpuinfo").open() as lines:
                for line in lines:
                    if line.startswith("model name"):
                        return line.split(":", 1)[1].strip()
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine()


def identity() -> dict[str, str | int]:
    """What rates depend on: the CPU, its cores, the thread count, and the versions of torch and maskwise."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # Looked up, not imported: this layer is below the package's root.
        "maskwise": sys.modules["maskwise"].__version__,
    }


def path() -> Path:
    """The file of measured rates, in ``MASKWISE_CACHE_DIR`` or the user's cache directory."""
    directory = os.environ.get("MASKWISE_CACHE_DIR")
    if directory:
        return Path(directory) / FILE
    # Imported here, to keep the import of maskwise lean.
    from platformdirs import user_cache_path

    return user_cache_path("maskwise") / FILE


def key() -> str:
    """The key of this machine and these versions in the file."""
    return " | ".join(f"{name} {value}" for name, value in identity().items())


def read() -> dict[str, Any]:
    """All entries of the file, by `key`; empty where there is no file.

    Raises:
        ValueError: it is not what `maskwise calibrate` writes.
        OSError: it cannot be opened.
    """
    try:
        text = path().read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    entries = json.loads(text)
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("it has no entries by machine")
    return entries


def state() -> Calibration:
    """The entry of this machine, read without a warning."""
    try:
        entry = read().get(key())
        if entry is None:
            return Calibration({})
        rates = {str(device): Rates(**numbers) for device, numbers in entry["rates"].items() if _is_here(device, entry)}
        return Calibration(rates, str(entry["date"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Calibration({}, fault=f"{type(error).__name__}: {error}")


def rates_for(device: str) -> Rates:
    """The rates of a device type: measured, or else the defaults."""
    global _loaded
    if _loaded is None:
        found = state()
        # Set before the warning, which may be raised as an error, so that it is given once.
        _loaded = {**BUILT_IN, **found.rates}
        if found.fault is not None:
            warnings.warn(
                f"maskwise: the measured rates in {path()} cannot be read ({found.fault}), so built-in rates are used. "
                "Hint: `maskwise calibrate` measures again, `maskwise calibrate --reset` removes them.",
                stacklevel=2,
            )
    return _loaded.get(device) or _loaded["cpu"]


def forget() -> None:
    """Read the file again when the next plan is made."""
    global _loaded
    _loaded = None


def _is_here(device: str, entry: dict[str, Any]) -> bool:
    """Whether measured rates are of the present device; a GPU that is not initialized yet is not queried."""
    named = entry.get("gpu")
    if device != "cuda" or named is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return bool(torch.cuda.get_device_name() == named)
