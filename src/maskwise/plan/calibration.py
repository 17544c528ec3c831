"""The rates in use: those that ``maskwise calibrate`` measured on this machine, or the built-in ones.

The file is read when the first plan is made, never at import. It may hold rates of several machines, or of one with
several numbers of threads: a cache directory may be shared, and threads may be set. Entries of another machine, torch
or maskwise stay as they are.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from maskwise.errors import MaskwiseError
from maskwise.plan.cost import BUILT_IN, Rates
from maskwise.plan.machine import cpu_model, identity

__all__ = [
    "Calibration",
    "atomic_path",
    "cpu_model",
    "key",
    "path",
    "rates_for",
    "read",
    "reload",
    "reset",
    "save",
    "state",
]

FILE = "calibration.json"
#: The rates by kind of device; None until the first plan asks for them.
_loaded: dict[str, Rates] | None = None


@dataclass(frozen=True)
class Calibration:
    """What the file says of this machine.

    Attributes:
        rates: by kind of device, "cpu" or "cuda"; empty where nothing was measured.
        date: when they were measured, or None.
        fault: why the file cannot be read, or None.
    """

    rates: dict[str, Rates]
    date: str | None = None
    fault: str | None = None


def path() -> Path:
    """Where measured rates are kept: the user's cache directory, or where ``MASKWISE_CACHE_DIR`` points."""
    place = os.environ.get("MASKWISE_CACHE_DIR")
    if place:
        return Path(place) / FILE
    # Imported here, for the directory is asked for once and most machines have no file in it.
    from platformdirs import user_cache_path

    return user_cache_path("maskwise") / FILE


def key() -> str:
    """The machine, torch and maskwise in one line, as the file names them."""
    return " | ".join(f"{name} {value}" for name, value in identity().items())


def read() -> dict[str, Any]:
    """All entries of the file, by `key`; empty where there is none.

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
        raise ValueError("it holds no entries by machine")
    return entries


def state() -> Calibration:
    """What the file says of this machine, without a warning."""
    try:
        entry = read().get(key())
        if entry is None:
            return Calibration({})
        rates = {str(device): Rates(**numbers) for device, numbers in entry["rates"].items() if _is_here(device, entry)}
        return Calibration(rates, str(entry["date"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Calibration({}, fault=f"{type(error).__name__}: {error}")


def rates_for(device: str) -> Rates:
    """The rates of a kind of device: measured where they were, else built in."""
    global _loaded
    if _loaded is None:
        found = state()
        # Before the warning, which may be an error: it is given once.
        _loaded = {**BUILT_IN, **found.rates}
        if found.fault is not None:
            warnings.warn(
                f"maskwise: the measured rates in {path()} cannot be read ({found.fault}), so built-in rates are used. "
                "Hint: `maskwise calibrate` measures again, `maskwise calibrate --reset` removes them.",
                stacklevel=2,
            )
    return _loaded.get(device) or _loaded["cpu"]


def reload() -> None:
    """Read the file again when the next plan is made."""
    global _loaded
    _loaded = None


def save(measured: dict[str, Rates]) -> None:
    """Write the rates of this machine, beside those of others; the next call is planned with them."""
    try:
        entries = read()
    except ValueError:
        # A file that cannot be parsed is not worth keeping.
        entries = {}
    entry: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rates": {device: asdict(rates) for device, rates in measured.items()},
    }
    if "cuda" in measured and torch.cuda.is_available():
        entry["gpu"] = torch.cuda.get_device_name()
    entries[key()] = entry
    with atomic_path(path()) as temporary:
        temporary.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    _invalidate()


def reset() -> bool:
    """Remove the measured rates of all machines; whether there were any."""
    file = path()
    there = file.exists()
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        message = f"calibrate: {file} cannot be removed: {error}. Hint: rm {file}, with the rights to."
        raise MaskwiseError(message) from error
    _invalidate()
    return there


def _invalidate() -> None:
    # Imported here: dispatch reads rates, and so imports this module.
    from maskwise.plan import dispatch

    reload()
    dispatch.invalidate()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, moved there when the block ends: Ctrl-C leaves nothing half-written.

    >>> target = Path(tempfile.mkdtemp()) / "new" / "figures.csv"
    >>> with atomic_path(target) as temporary:
    ...     _ = temporary.write_text("a,b")
    >>> target.read_text()
    'a,b'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib chooses the format by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner may read; a result is an ordinary file.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_here(device: str, entry: dict[str, Any]) -> bool:
    """Whether rates of a device are of the one that is here now; a GPU that nothing has used yet is not asked."""
    named = entry.get("gpu")
    if device != "cuda" or named is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    return bool(torch.cuda.get_device_name() == named)
