"""Which machine this is: what measured rates are good for, and what a bug report names first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ["cpu_model", "identity"]


@cache
def cpu_model() -> str:
    """Return the processor's name as the operating system reports it."""
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
    """What rates depend on: the processor, its cores, the threads in use, and the versions that do the work."""
    import torch  # Here, because `maskwise doctor` names the processor where torch cannot be imported.

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # Looked up, not imported: the imports of these layers go one way.
        "maskwise": sys.modules["maskwise"].__version__,
    }
