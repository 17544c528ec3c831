"""The processes: one short-lived child for each kind, forked from a parent that has imported everything.

A child that dies or hangs is a row of the table, and not the end. What is pickled is loaded in processes that have
never seen Maskwise: they are forked before it is imported.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections import deque
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path

import torch
import transformers.models.bert.modeling_bert
import transformers.models.llava.modeling_llava  # what every model imports, once for all children

from .batch import keep_of
from .cases import class_of
from .examine import Examination, call, compare, exact, finding, short, summary, where

PATIENCE = 90
"""Seconds for one class; the slowest takes ten."""
FORK = multiprocessing.get_context("fork")


def sweep(cases, jobs=2, report=None):
    """The rows of all cases, in their order."""
    torch.set_num_threads(1)
    rows = {}
    mine, theirs = FORK.Pipe()
    pristine = FORK.Process(target=_unpickle_all, args=(theirs,))
    pristine.start()
    import maskwise  # noqa: F401  in the parent, for all children but that one

    with tempfile.TemporaryDirectory() as folder:
        groups = [list(g) for _, g in groupby(sorted(cases, key=lambda c: (c.kind, c.auto)), key=lambda c: c.kind)]
        waiting, running = deque(groups), {}
        while waiting or running:
            while waiting and len(running) < jobs:
                group = waiting.popleft()
                pipe, child = _start(_examine, group, folder)
                running[pipe] = [group, child, time.monotonic(), 0]
            for pipe in wait(list(running), timeout=1):
                group, child, _, done = running[pipe]
                try:
                    row = pipe.recv()
                except EOFError:
                    child.join()
                    del running[pipe]
                    if done < len(group):
                        rows[group[done]] = _lost(group[done], f"the process ended with {child.exitcode}")
                        if group[done + 1 :]:
                            waiting.appendleft(group[done + 1 :])
                    continue
                if row is not None:
                    rows[group[done]] = row
                    if report:
                        report(row)
                running[pipe][2:] = [time.monotonic(), done + 1]
            for pipe, (group, child, since, done) in list(running.items()):
                if time.monotonic() - since > PATIENCE:
                    child.kill()
                    child.join()
                    del running[pipe]
                    rows[group[done]] = _lost(group[done], f"no answer in {PATIENCE} s")
                    if group[done + 1 :]:
                        waiting.appendleft(group[done + 1 :])
        pickled = [case for case, row in rows.items() if row["checks"].get("pickled", {}).get("pickle")]
        mine.send([rows[case]["checks"]["pickled"]["pickle"] for case in pickled])
        for case, found in zip(pickled, mine.recv(), strict=True):
            rows[case]["checks"]["pickled"] = found
            rows[case].update({"reason": None}, **summary(rows[case]["checks"]))
    pristine.join()
    return [rows[case] for case in cases if case in rows]


def _lost(case, reason):
    return {"auto": case.auto, "kind": case.kind, "name": case.name, "checks": {}, **finding("crash", reason)}


def _start(target, *args):
    mine, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_child, args=(target, theirs, *args), daemon=True)
    child.start()
    theirs.close()
    return mine, child


def _child(target, pipe, *args):
    transformers.logging.set_verbosity_error()
    if not os.environ.get("SWEEP_VERBOSE"):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    torch.set_num_threads(1)
    target(pipe, *args)
    pipe.close()
    os._exit(0)


def _examine(pipe, group, folder):
    for case in group:
        pipe.send(_row(case, folder))


def _row(case, folder):
    try:
        return None if class_of(case) is None else Examination(case, folder).run()
    except Exception as error:
        return _lost(case, f"the sweep itself: {short(error)} {where(error)}")


def _unpickle_all(pipe):
    """Load what was pickled, many models in a process; one that ends early takes the model with it that it held."""
    todo, found = deque(pipe.recv()), []
    while todo:
        answers, child = _start(_unpickle, list(todo))
        while todo:
            todo.popleft()
            try:
                found.append(answers.recv() if answers.poll(PATIENCE) else finding("crash", "no answer"))
            except EOFError:
                found.append(finding("crash", "the process ended"))
                break
        child.kill()
        child.join()
    pipe.send(found)


def _unpickle(pipe, paths):
    for path in paths:
        pipe.send(_unpickled(path))


def _unpickled(path):
    try:
        saved = pickle.loads(Path(path).read_bytes())
        model = pickle.loads(saved["model"])
        with torch.no_grad():
            found = call(model, saved["given"], **saved["options"])
    except Exception as error:
        return finding("crash", short(error), at=where(error))
    expected = {name: saved["expected"][name] for name in found}
    difference, _ = compare(expected, found, keep_of("right"))
    return finding("wrong", difference) if difference else exact()
