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

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from maskwise import __version__
from maskwise.plan.machine import cpu_model

__all__ = ["examine", "run", "version_of"]

INSTALL_TORCH = "pip install torch, as https://pytorch.org/get-started/locally shows for this system"


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
    """Print the report. The exit code is 1 when torch, or an extension that is there, cannot be loaded."""
    report = examine()
    if json:
        typer.echo(_as_json(report))
    else:
        _show(report)
    extension = report["extension"]
    broken = extension is None or (extension["path"] is not None and not extension["loaded"])
    return 1 if broken else 0


def examine() -> dict[str, Any]:
    """Collect the facts, as plain data.

    >>> sorted(examine())[:4]
    ['calibration', 'compiler', 'cpu', 'devices']
    """
    report: dict[str, Any] = {
        "maskwise": __version__,
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "triton": version_of("triton"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "os": platform.platform(),
        "cpu": cpu_model(),
        "compiler": _compiler(),
    }
    return report | _of_torch()


def _of_torch() -> dict[str, Any]:
    """What only torch can say. A torch that is missing or broken is a finding, not a traceback."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": f"{error}", "extension": None, "threads": None, "devices": [], "calibration": None}
    from maskwise.ops import backends

    return {
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
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    if torch.xpu.is_available():
        found += [f"xpu:{i} {torch.xpu.get_device_name(i)}" for i in range(torch.xpu.device_count())]
    return found


def _calibration() -> dict[str, Any]:
    from maskwise.plan import calibration

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
    lines = {
        **{name: report[name] or "–" for name in ("maskwise", "torch", "numpy", "triton", "python", "os", "cpu")},
        "compiler": report["compiler"] or "none on the PATH",
    }
    if "error" in report:
        lines["torch"] += f"\n[red]it cannot be imported[/]: {escape(report['error'])}\nfix: {INSTALL_TORCH}"
    else:
        threads = report["threads"]
        lines |= {
            "extension": _extension(report["extension"]),
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


def _extension(built: dict[str, Any]) -> str:
    if built["loaded"]:
        return f"[green]loaded[/], SIMD {built['simd']}\n{built['path']}"
    if built["path"]:
        return f"[red]built, but it does not load[/]\n{built['path']}\n{escape(built['error'])}\nfix: {built['fix']}"
    if built["fix"]:
        return f"[yellow]not built[/]: plain PyTorch does the work\nfix: {built['fix']}"
    return f"[yellow]not loaded[/]: plain PyTorch does the work\n{built['error']}"
