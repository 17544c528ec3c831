"""What it costs to write into fresh memory, in huge and in small pages, right after a call and after a pause.

``python -m benchmarks.fresh_memory`` prints it. Results of x's size are fresh memory, so this is the floor of every
kernel that has one. After a pause, a virtual machine may have handed its free memory back to its host.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import torch

__all__ = ["seconds"]

SIZE, ROUNDS, PAUSES = 64 << 20, 5, (0.0, 3.0, 6.0)
#: Linux's MADV_NOHUGEPAGE, which Python does not name.
SMALL_PAGES = 15


def seconds(huge: bool, size: int = SIZE) -> float:
    """The time to write ``size`` bytes of fresh memory.

    >>> seconds(True, 1 << 22) > 0
    True
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else SMALL_PAGES)
    values = torch.frombuffer(memory, dtype=torch.float32)
    start = time.perf_counter()
    values.fill_(1.0)
    taken = time.perf_counter() - start
    del values
    memory.close()
    return taken


def main() -> None:
    """Print the times of all rounds, and whether free memory goes back to a host."""
    reporting = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    print("free memory goes back to a host:", "yes" if reporting.exists() else "not known")
    for pause in PAUSES:
        for huge in (True, False):
            taken = []
            for _ in range(ROUNDS):
                seconds(huge)
                time.sleep(pause)
                taken.append(seconds(huge))
            times = " ".join(f"{1e3 * each:.1f}" for each in sorted(taken))
            print(f"after {pause:g} s, {'huge' if huge else 'small'} pages: {times} ms for {SIZE >> 20} MB")


if __name__ == "__main__":
    main()
