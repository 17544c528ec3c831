"""The processes: one short-lived child for each kind, forked from a parent that has imported everything.

A child that dies or hangs is a row of the table, and not the end. What is pickled is loaded in processes that have
never seen Maskwise: they are forked before it is imported.
"""

import importlib
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
import transformers

from .batch import keep_of
from .cases import class_of
from .examine import Examination, call, compare, exact, finding, short, summary, where

PATIENCE = 600
"""Seconds for one class. The slowest takes ten, and sixty times as long where many processes share the cores."""
PRELOADED = ("transformers.models.bert.modeling_bert", "transformers.models.llava.modeling_llava")
"""They import what every model imports: once in the parent takes three seconds, and not three for each kind."""
FORK = multiprocessing.get_context("fork")


def sweep(cases, jobs=2, report=lambda row: None):
    """The rows of all cases, in their order; `report` is called with each as it comes."""
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    mine, theirs = FORK.Pipe()
    pristine = FORK.Process(target=_unpickle_all, args=(theirs,))
    pristine.start()
    try:
        import maskwise

        # In the parent, for all children but that one; and all of it, since a name is imported when it is first read.
        for name in maskwise.__all__:
            getattr(maskwise, name)
        with tempfile.TemporaryDirectory() as folder:
            rows = _Pool(cases, jobs, folder, report).run()
            pickled = [row for row in rows.values() if row["checks"].get("pickled", {}).get("pickle")]
            mine.send([row["checks"]["pickled"]["pickle"] for row in pickled])
            for row, found in zip(pickled, mine.recv(), strict=True):
                row["checks"]["pickled"] = found
                row.update({"reason": None}, **summary(row["checks"]))
    finally:
        pristine.kill()
    return [rows[case] for case in cases if case in rows]


class _Pool:
    """So many children at a time, each with the classes of one kind."""

    def __init__(self, cases, jobs, folder, report):
        ordered = sorted(cases, key=lambda case: (case.kind, case.auto))
        self.waiting = deque(list(group) for _, group in groupby(ordered, key=lambda case: case.kind))
        self.jobs, self.folder, self.report = jobs, folder, report
        self.running, self.rows = {}, {}

    def run(self):
        """The row of each case that reads text."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.jobs:
                group = self.waiting.popleft()
                pipe, child = _start(_examine, group, self.folder)
                self.running[pipe] = (child, deque(group), time.monotonic())
            for pipe in wait(list(self.running), timeout=1):
                self.take(pipe)
            for pipe, (_, _, since) in list(self.running.items()):
                if time.monotonic() - since > PATIENCE:
                    self.end(pipe, f"no answer in {PATIENCE} s")
        return self.rows

    def take(self, pipe):
        """One answer of a child, or its end."""
        child, todo, _ = self.running[pipe]
        try:
            row = pipe.recv()
        except EOFError:
            child.join()
            self.end(pipe, f"the process ended with {child.exitcode}")
            return
        self.running[pipe] = (child, todo, time.monotonic())
        self.keep(todo.popleft(), row)

    def end(self, pipe, reason):
        """A child is no more: the class that it held is lost, and others go on with the rest."""
        child, todo, _ = self.running.pop(pipe)
        child.kill()
        child.join()
        if todo:
            case = todo.popleft()
            self.keep(case, _lost(case, reason))
        if todo:
            self.waiting.appendleft(list(todo))

    def keep(self, case, row):
        """A class that does not read text has no row."""
        if row is not None:
            self.rows[case] = row
            self.report(row)


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
    difference, _ = compare(saved["expected"], found, keep_of("right"))
    return finding("wrong", difference) if difference else exact()
