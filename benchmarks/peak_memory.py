"""How much memory a pass takes at its peak: MiniLM padded and unpadded, and loss heads; a process of its own for each.

``python -m benchmarks.peak_memory`` prints that of MiniLM, and with a file's name writes it as JSON for the README;
``python -m benchmarks.peak_memory head`` prints that of the loss heads, forward and backward.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.cases import head
from benchmarks.cases.models import MINILM, Texts

__all__ = ["growth", "growth_of_head"]

SIDES = ("padded", "unpadded")
TRAINING = ("padded training", "unpadded training")


def growth(side: str) -> int:
    """By how many bytes this process grows at the peak of its first call."""
    texts: Texts = MINILM.setup(MINILM)
    model = getattr(texts, side.split(maxsplit=1)[0])
    # What the first call imports and allocates for good is no part of it.
    model(**{name: value[:1, :8] for name, value in texts.batch.items()})
    before = _peak()
    if side in TRAINING:
        model.train()
        model(**texts.batch).last_hidden_state.square().sum().backward()
    else:
        with torch.no_grad():
            model(**texts.batch)
    return _peak() - before


def growth_of_head(size: int, side: str) -> int:
    """By how many bytes this process grows at the peak of its first step of a loss head."""
    loss = head.SIDES[side]
    # What the first call imports and allocates for good is no part of it.
    loss(head.head((64, 64, 1024), 0.5)).backward()
    inputs = head.head(*head.SIZES[size])
    before = _peak()
    loss(inputs).backward()
    return _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(path: Path | None = None) -> None:
    """Measure the sides, each in a new process, and print or write them."""
    found: dict[str, object] = {"case": MINILM.name, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    for side in (*SIDES, *TRAINING):
        child = [sys.executable, "-m", "benchmarks.peak_memory", "--side", side]
        found[side] = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        print(f"{side}: {int(str(found[side])) / 1e6:.0f} MB more at the peak")
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main_of_heads() -> None:
    """Measure every side of every loss head, each in a new process, and print them."""
    for size, (shape, kept) in enumerate(head.SIZES):
        print(f"{' x '.join(map(str, shape))}, {round(100 * kept)} % kept")
        plain = 0
        for side in (head.PLAIN, *(side for side in head.SIDES if side != head.PLAIN)):
            child = [sys.executable, "-m", "benchmarks.peak_memory", "--head", str(size), side]
            found = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
            plain = plain or found
            print(f"  {side}: {found / 2**20:.0f} MiB more at the peak, {found / plain:.3f} of {head.PLAIN}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        print(growth(sys.argv[2]))
    elif sys.argv[1:2] == ["--head"]:
        print(growth_of_head(int(sys.argv[2]), sys.argv[3]))
    elif sys.argv[1:] == ["head"]:
        main_of_heads()
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else None)
