"""Two versions of maskwise, interleaved: ``python -m benchmarks.compare ../before --filter sweep``.

Each version runs the `ours` side of every case in a process of its own, on the same inputs; the two take turns, sample
by sample, so a busy machine slows both. A version is a checkout with a built extension. A case is slower where its best
time is more than 5 % and 5 µs above that of the version before, also when it is timed six times as long.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Compared", "Version", "compare", "main"]

RATIO, SECONDS = 1.05, 5e-6
SAMPLE = 1e-3
LONGER, TRIES = 6, 3
#: Calls below this time are what a user pays for Python, and are counted apart.
TINY = 50e-6


@dataclass(frozen=True)
class Compared:
    """The best times of one case, in seconds.

    >>> Compared("sum 4x8", 10e-6, 11e-6).is_slower, Compared("sum 4096x4096", 1e-3, 2e-3).is_slower
    (False, True)
    """

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Below 1, the version after is the faster one."""
        return self.after / self.before

    @property
    def is_slower(self) -> bool:
        """Whether the case is slower by more than 5 % and 5 µs."""
        return self.ratio > RATIO and self.after - self.before > SECONDS


class Version:
    """One version of maskwise, in a process that times calls on request."""

    def __init__(self, root: Path, filter: str) -> None:
        path = os.pathsep.join([str(root / "src"), str(root)])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", filter],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.names: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with exit code {self._process.wait()}, see its traceback above")
        return json.loads(line)

    def send(self, request: list[Any]) -> Any:
        """Send a request, and wait for the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        # Its loop over requests ends with them.
        self._process.communicate()


def compare(before: Version, after: Version, name: str, budget: float) -> Compared | str:
    """Time one case in both versions; returns the reason where one of them cannot run it."""
    opened = [version.send(["open", name]) for version in (before, after)]
    if reasons := [reply for reply in opened if isinstance(reply, str)]:
        return reasons[0]
    calls = max(opened)
    best = [math.inf, math.inf]

    def rounds(seconds: float) -> Compared:
        end = time.perf_counter() + seconds
        done = 0
        while done < 5 or time.perf_counter() < end:
            for i, version in enumerate((before, after)):
                best[i] = min(best[i], version.send(["time", calls]))
            done += 1
        return Compared(name, *best)

    found = rounds(budget)
    for _ in range(TRIES):
        if not found.is_slower:
            break
        found = rounds(LONGER * budget)
    return found


def summary(found: Sequence[Compared]) -> str:
    """The comparison in one line.

    >>> summary([Compared("a", 2e-5, 1e-5), Compared("b", 1e-3, 2e-3)])
    '2 cases, 1 slower; geometric mean of after / before 1.000; of 1 below 50 µs: 0.500'
    """
    tiny = [each for each in found if each.before < TINY]
    slower = sum(each.is_slower for each in found)
    text = f"{len(found)} cases, {slower} slower; geometric mean of after / before {_mean(found):.3f}"
    return f"{text}; of {len(tiny)} below 50 µs: {_mean(tiny):.3f}" if tiny else text


def _mean(found: Sequence[Compared]) -> float:
    return math.exp(sum(math.log(each.ratio) for each in found) / max(1, len(found)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what is slower, and return the exit code: 1 where a case is slower or fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Compare two checkouts.")
    parser.add_argument("before", type=Path, help="the checkout of the version before, with a built extension")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1], help="the other one; this by default")
    parser.add_argument("--filter", default="", help="the cases, as for python -m benchmarks")
    parser.add_argument("--budget", type=float, default=0.2, help="about how many seconds to time a case")
    parser.add_argument("--csv", type=Path, help="a file for all times")
    options = parser.parse_args(arguments)
    before, after = Version(options.before.resolve(), options.filter), Version(options.after.resolve(), options.filter)
    common = set(after.names)
    names = [name for name in before.names if name in common]
    print(f"{len(names)} cases of both versions", flush=True)
    found, failed = [], 0
    for name in names:
        each = compare(before, after, name, options.budget)
        if isinstance(each, str):
            failed += each.startswith("error")
            print(f"not compared: {name}: {each}", flush=True)
            continue
        found.append(each)
        if each.is_slower:
            times = f"{each.before * 1e6:.1f} -> {each.after * 1e6:.1f} µs"
            print(f"slower: {name}: {times}, {each.ratio:.2f} x", flush=True)
    before.close(), after.close()
    print(summary(found))
    if options.csv is not None:
        rows = ["case,before,after,ratio", *(f"{e.name},{e.before:.3e},{e.after:.3e},{e.ratio:.4f}" for e in found)]
        options.csv.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return int(failed > 0 or any(each.is_slower for each in found))


# -- in the process of one version -------------------------------------------------------------------------------------
def serve(filter: str, out: TextIO) -> None:
    """Reply to requests: ``["open", case]`` with how many calls make a sample, ``["time", calls]`` with seconds."""
    try:
        registry = importlib.import_module("benchmarks.registry")
    except ModuleNotFoundError:
        # Before 0.2, the benchmarks were a part of the package.
        registry = importlib.import_module("maskwise.benchmarks.registry")
    cases = {case.name: case for case in registry.select(filter)}
    print(json.dumps(list(cases)), file=out, flush=True)
    call: Callable[[], object] = gc.collect
    for line in sys.stdin:
        kind, argument = json.loads(line)
        if kind == "time":
            reply: Any = _seconds(call, argument) / argument
        else:
            call = gc.collect
            call()
            try:
                call = _opened(cases[argument])
                reply = _calls(call)
            except LookupError as reason:
                reply = str(reason)
            except Exception as error:
                reply = f"error: {type(error).__name__}: {error}"
        print(json.dumps(reply), file=out, flush=True)


def _opened(case: Any) -> Callable[[], object]:
    reason = case.unavailable() or case.ours.unavailable()
    if reason is not None:
        raise LookupError(reason)
    call: Callable[[], object] = case.ours.prepare(case.setup(case))
    for _ in range(3):
        call()
    return call


def _calls(call: Callable[[], object]) -> int:
    calls = 1
    while _seconds(call, calls) < SAMPLE:
        calls *= 2
    return calls


def _seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        # The replies have a descriptor of their own: a case may print.
        replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        # The folder of this file is no place to import from.
        sys.path.pop(0)
        serve(sys.argv[2], replies)
    else:
        sys.exit(main())
