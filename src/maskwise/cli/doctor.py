"""``maskwise doctor``: what a bug report needs."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from maskwise import __version__
from maskwise.ops import backends
from maskwise.plan import calibration
from maskwise.plan.calibration import cpu_model

__all__ = ["examine", "run", "version_of"]


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it; None where it is not installed.

    >>> version_of("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(*, json: bool = False) -> int:
    """Print the report. The exit code is 1 when an extension is there and cannot be loaded."""
    report = examine()
    if json:
        typer.echo(_as_json(report))
    else:
        _show(report)
    broken = report["extension"]["path"] is not None and not report["extension"]["loaded"]
    return 1 if broken else 0


def examine() -> dict[str, Any]:
    """Collect the facts, as plain data.

    >>> sorted(examine())[:4]
    ['calibration', 'compiler', 'cpu', 'devices']
    """
    return {
        "maskwise": __version__,
        "torch": torch.__version__,
        "numpy": version_of("numpy"),
        "triton": version_of("triton"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "os": platform.platform(),
        "cpu": cpu_model(),
        "compiler": _compiler(),
        "extension": dataclasses.asdict(backends.status()),
        "threads": {
            "cores": os.cpu_count(),
            "intraop": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
        },
        "devices": _devices(),
        "calibration": _calibration(),
    }


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            said = subprocess.run([name, "--version"], check=False, capture_output=True, text=True).stdout
            return said.splitlines()[0] if said else name
    return None


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    if torch.xpu.is_available():
        found += [f"xpu:{i} {torch.xpu.get_device_name(i)}" for i in range(torch.xpu.device_count())]
    return found


def _calibration() -> dict[str, Any]:
    found = calibration.state()
    if found.fault:
        state = f"cannot be read, so built-in rates are used: {found.fault}"
    elif found.rates:
        state = f"measured on {found.date}: {', '.join(sorted(found.rates))}"
    else:
        state = "none for this machine: built-in rates are used (`maskwise calibrate` measures)"
    return {"path": str(calibration.path()), "state": state, "date": found.date, "calibrated": sorted(found.rates)}


def _as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2)


def _show(report: dict[str, Any]) -> None:
    built = report["extension"]
    if built["loaded"]:
        state = f"[green]loaded[/], SIMD {built['simd']}\n{built['path']}"
    elif built["path"]:
        state = f"[red]built, but it does not load[/]\n{built['path']}\n{built['error']}\nfix: {built['fix']}"
    elif built["fix"]:
        state = f"[yellow]not built[/]: plain PyTorch does the work\nfix: {built['fix']}"
    else:
        state = f"[yellow]not loaded[/]: plain PyTorch does the work\n{built['error']}"
    threads = report["threads"]
    lines = {
        **{name: report[name] or "–" for name in ("maskwise", "torch", "numpy", "triton", "python", "os", "cpu")},
        "compiler": report["compiler"] or "none on the PATH",
        "extension": state,
        "threads": f"{threads['intraop']} within an op, {threads['interop']} between ops, {threads['cores']} cores",
        "devices": "\n".join(report["devices"]),
        "calibration": f"{report['calibration']['state']}\n{report['calibration']['path']}",
    }
    out = Table(show_header=False, box=None, padding=(0, 2))
    out.add_column(style="bold")
    out.add_column(overflow="fold")
    for name, value in lines.items():
        out.add_row(name, value)
    Console().print(out)
