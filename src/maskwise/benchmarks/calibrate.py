"""Measuring what this machine does: the rates from which the planner predicts (`maskwise.plan.cost.Rates`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from maskwise.benchmarks import cuda
from maskwise.benchmarks.atomic import atomic_path
from maskwise.benchmarks.measure import Timer, measure
from maskwise.errors import MaskwiseError
from maskwise.ops.reduce.sums import _sum
from maskwise.plan import calibration, planner
from maskwise.plan.cost import BUILT_IN, Rates

__all__ = ["STEPS", "Bench", "Step", "devices", "measure_rates", "reset", "save"]

LARGE = 64 * 2**20
"""Bytes that no cache holds."""


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured. ``shrink`` divides all sizes: it shows that all runs, not how fast."""

    device: str = "cpu"
    seconds: float = 0.25
    shrink: int = 1

    @property
    def on_host(self) -> bool:
        """Whether a call is done when it returns."""
        return self.device == "cpu"

    def calls(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds that calls take from one to the next, when nothing waits for their results; interleaved."""
        return self._best(runs, None if self.on_host else self._until_done)

    def bulk(self, run: Callable[[], object]) -> float:
        """Microseconds that the device is busy with a large piece of work."""
        return self._best({"": run}, None if self.on_host else cuda.timer(self.device))[""]

    def rand(self, *shape: int) -> Tensor:
        """Values on the device."""
        return torch.rand(shape, device=self.device)

    def size(self, number: int) -> int:
        """A size, or a shrunken one."""
        return max(8, number // self.shrink)

    def _best(self, runs: dict[str, Callable[[], object]], timer: Timer | None) -> dict[str, float]:
        # What the machine can do: whatever disturbs a measurement makes it longer.
        samples = measure(runs, budget=len(runs) * self.seconds, rounds=(5, 50), timer=timer)
        return {name: max(1e6 * samples.best(name), 1e-3) for name in runs}

    def _until_done(self, run: Callable[[], object], times: int) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


@dataclass(frozen=True)
class Step:
    """One measurement: what it is called while it runs, and the rates that it gives."""

    name: str
    run: Callable[[Bench], dict[str, float]]


def _calls(b: Bench) -> dict[str, float]:
    x, keep = b.rand(4, 8), b.rand(4, 8) > 0.5
    traced = x.clone().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return torch.where(keep, x, 0.0).sum(-1)

    above = torch.ones_like(plain(x))
    # The ops themselves: what is done in Python before them, all routes have in common.
    bare, fused = _sum.route("bare"), _sum.route("fused")
    took = b.calls(
        {
            "plain": lambda: plain(x),
            "bare": lambda: bare(x, keep, [1], False),
            "fused": lambda: fused(traced, keep, [1], False),
            "plain back": lambda: torch.autograd.grad(plain(traced), traced, above),
            "fused back": lambda: torch.autograd.grad(fused(traced, keep, [1], False), traced, above),
        }
    )
    return {
        "plain_call": took["plain"] / 2,
        "bare_call": took["bare"],
        "fused_call": took["fused"],
        "plain_backward": max(took["plain back"] - took["plain"], 0.1),
        "fused_backward": max(took["fused back"] - took["fused"], 0.1),
    }


def _streamed(b: Bench) -> dict[str, float]:
    count = b.size(LARGE // 4)
    source, target = b.rand(count), b.rand(count)
    # A copy reads as much as it writes.
    return {"streamed": 2 * source.nbytes / b.bulk(lambda: target.copy_(source))}


def _new(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8).zero_()


def _fresh(b: Bench) -> dict[str, float]:
    """What new memory costs, and from which size on results get such: the allocator keeps smaller pieces."""
    if not b.on_host:
        # torch keeps all memory of a GPU that it once got, so nothing is ever new.
        return {"fresh": _streamed(b)["streamed"], "fresh_from": BUILT_IN["cuda"].fresh_from}
    rates: dict[int, float] = {}
    for power in range(18, 27):
        count = b.size(1 << power)
        rates[1 << power] = count / b.bulk(partial(_new, count))
    fresh, kept = rates[max(rates)], max(rates.values())
    threshold = (fresh * kept) ** 0.5
    # The first size from which on all are slow; where none is slower than what is kept, the largest.
    slow = (size for size in rates if all(rate < threshold for other, rate in rates.items() if other >= size))
    first = min(slow, default=max(rates))
    return {"fresh": fresh, "fresh_from": float(first)}


def _gathered(b: Bench) -> dict[str, float]:
    rows, features = b.size(16384), 256
    x, mask = b.rand(rows, features), mw.Mask(torch.arange(rows, device=b.device) % 2 == 0)
    moved, room = 2 * (x.nbytes // 2), x.new_empty(rows // 2 + rows % 2, features)
    mask.count()
    elements, keep = b.rand(64, 128), b.rand(64, 128) > 0.5
    return {
        "gathered": moved / b.bulk(lambda: mw.pack(x, mask, out=room)),
        "indexed": elements.nbytes / b.bulk(lambda: elements[keep]),
    }


def _flops(b: Bench) -> dict[str, float]:
    n = b.size(768 if b.on_host else 4096)
    x, weight = b.rand(n, n), b.rand(n, n)
    return {"flops": 2 * n**3 / b.bulk(lambda: F.linear(x, weight))}


def _attention(b: Bench) -> dict[str, float]:
    length = b.size(256 if b.on_host else 2048)
    q, k, v = (b.rand(4, 8, length, 64) for _ in range(3))
    keep = torch.ones(4, 1, 1, length, dtype=torch.bool, device=b.device)
    took = b.bulk(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep))
    return {"attention_flops": 4 * 4 * 8 * length * length * 64 / took}


STEPS = (
    Step("calls and gradients of tiny tensors", _calls),
    Step("streaming through memory", _streamed),
    Step("fresh memory", _fresh),
    Step("moving rows together", _gathered),
    Step("a matrix product", _flops),
    Step("attention", _attention),
)


def devices() -> tuple[str, ...]:
    """The kinds of devices that can be measured here."""
    return ("cpu", *(["cuda"] if torch.cuda.is_available() else []))


def measure_rates(bench: Bench, on_step: Callable[[str], None] = lambda name: None) -> Rates:
    """Measure one kind of device; ``on_step`` hears of each step before it runs."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for step in STEPS:
            on_step(step.name)
            with torch.enable_grad():
                found.update(step.run(bench))
    return Rates(**{name: float(f"{value:.5g}") for name, value in found.items()})


def save(measured: dict[str, Rates]) -> dict[str, Any]:
    """Write the rates for this machine, beside those of others, and let the next plan use them."""
    try:
        entries = calibration.read()
    except ValueError:
        # What nobody can read is not worth keeping.
        entries = {}
    entry: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rates": {device: asdict(rates) for device, rates in measured.items()},
    }
    if "cuda" in measured and torch.cuda.is_available():
        entry["gpu"] = torch.cuda.get_device_name()
    entries[calibration.key()] = entry
    with atomic_path(calibration.path()) as temporary:
        temporary.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    _use_anew()
    return entry


def reset() -> bool:
    """Remove what was measured, of all machines; whether there was anything."""
    path = calibration.path()
    there = path.exists()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise MaskwiseError(
            f"calibrate: {path} cannot be removed: {error}. Hint: rm {path}, with the rights to."
        ) from error
    _use_anew()
    return there


def _use_anew() -> None:
    calibration.forget()
    planner.forget()
