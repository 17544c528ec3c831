"""Benchmark cases on fake CUDA tensors: ``python -m tests.gpu.fake_bench FIRST EVERY [DEVICE]`` prints what is wrong.

A process of its own, because torch must meet the stand-in for CUDA when it is imported: then gradients run, too. Fake
tensors know their device, so whatever mixes devices raises; they have no data, so whatever needs some is seen here.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import math
import sys
from unittest import mock

from tests.gpu import guard

guard.pretend()

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import cuda, registry
from benchmarks.run import Forced
from maskwise import Packed

aten = torch.ops.aten
#: What fake tensors cannot do, by the error that they raise: sparse and nested layouts, copies of parametrized modules.
UNSHOWN = ("Torch not compiled with CUDA enabled", "Can't call metadata mutating ops on non-Fake Tensor inputs")

#: Cases that measure, read texts, or look for the tiles of a region on the host, before there is anything to show.
UNSHOWN_CASES = ("compress BERT-base", "SentenceTransformer.encode", "Regions ", "Incremental ")


def tensors(tree):
    """The tensors among some arguments."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Watch(TorchDispatchMode):
    """Notes operations that wait for the device, and those that work on the host; what waits gets an answer."""

    def __init__(self, rows=0):
        super().__init__()
        self.rows, self.syncs, self.on_host = rows, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        on_device = any(t.is_cuda for t in tensors((args, kwargs)))
        if packet in ANSWERS:
            self.syncs += [str(packet)] * on_device
            return ANSWERS[packet](*args)
        if packet in (aten.index, aten.index_put, aten.index_put_):
            args = (args[0], self.positions(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if on_device and packet is aten._to_copy and not out.is_cuda:
            self.syncs.append(str(packet))
        # What Python hands over, such as a list, starts on the host.
        if not on_device and not func.is_view and packet not in (aten.lift_fresh, aten.detach, aten.detach_):
            self.on_host += [str(packet) for t in tensors(out) if not t.is_cuda and t.numel() > self.rows]
        return out

    def positions(self, indices):
        """Masks among the indices as positions, which the host must count."""
        found = []
        for index in indices:
            if index is not None and index.dtype is torch.bool:
                self.syncs.append("aten.nonzero")
                found += ANSWERS[aten.nonzero](index).unbind(1)
            else:
                found.append(index)
        return found


#: What an operation gives whose answer depends on data: everything is kept, numbers are 1 and differences 0.
ANSWERS = {
    aten._local_scalar_dense: lambda x: True if x.dtype is torch.bool else 0.0 if x.is_floating_point() else 1,
    aten.equal: lambda x, y: True,
    aten.nonzero: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    aten.bincount: lambda x, weights=None, minlength=0: x.new_empty(max(minlength, 1), dtype=torch.int64),
    torch.ops.maskwise.pack_rows_forward: lambda x, mask: x.new_empty((mask.numel(), *x.shape[mask.dim() :])),
}


def problems(case, device="cuda"):
    """(side, what, why) of whatever is wrong with a case on a device: sides that raise, wait, or work on the host."""
    case = case.shrunk()
    inputs = case.setup(case)
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = cuda.moved(inputs, device)
        for side in case.sides:
            if side.unavailable() is not None:
                continue
            try:
                with Watch():
                    call = side.prepare(moved)
                    call = call if side.force is None else Forced(call, side.force)
                    # What is made once, such as a layout, is not made in what is timed.
                    call()
                # Lengths stay on the host, and the bounds of rows are no work to speak of.
                with Watch(2 * math.prod(case.shape[:-1])) as watch:
                    out = call()
            except Exception as error:
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                yield side, "cannot be shown" if any(text in first for text in UNSHOWN) else "raises", first
                continue
            if watch.on_host:
                yield side, "works on the host", ", ".join(sorted(set(watch.on_host)))
            if watch.syncs and side.kind not in ("peer", "leaky", "floor"):
                yield side, "waits", ", ".join(sorted(set(watch.syncs)))
            if any(not t.is_cuda for t in tensors(out.values if isinstance(out, Packed) else out)):
                yield side, "returns", "a tensor on the host"


def cases(first, every):
    """Every so-manieth case from the first on; ``every`` 0 means one of each function with the same sides and dims."""
    found = [*registry.all_cases(), *(case for family in registry.NAMED for case in registry.named_cases(family))]
    found = [case for case in found if case.unavailable() is None and case.family not in cuda.ON_HOST]
    found = [case for case in found if not any(text in case.name for text in UNSHOWN_CASES)]
    if every:
        return found[first::every]
    alike = {(case.family, case.function, len(case.shape), tuple(s.name for s in case.sides)): case for case in found}
    return list(alike.values())[first:]


def main(first, every, device="cuda"):
    """Print a line a problem, and last how many cases there were."""
    # What is compiled is the idiom, which is shown as it is; and there is nothing to wait for.
    as_it_is = mock.patch.object(torch, "compile", lambda call, **_: call)
    # flex_attention is compiled for the device it runs on.
    flex = mock.patch("maskwise.ops.attention.delegated._flex", return_value=lambda q, k, v, **_: torch.empty_like(q))
    with as_it_is, flex, mock.patch("torch.cuda.synchronize"):
        chosen = cases(first, every)
        for case in chosen:
            for side, what, why in problems(case, device):
                print(json.dumps([f"{case.family}: {case.name}", side.name, what, why]), flush=True)
    print(json.dumps(len(chosen)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
