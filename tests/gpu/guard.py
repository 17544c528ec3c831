"""A stand-in for the CUDA part of torch, so that a build of torch without it can index and move fake CUDA tensors.

Before torch indexes, moves or inverts a tensor it asks the guard of the tensor's device to make that device current; a
build without CUDA has no such guard, and raises, even for tensors that have no data. This one does nothing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;

extern "C" void put(bool there) {
  const auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(there ? &guard : nullptr);
}
"""


@lru_cache
def built():
    """The compiled guard."""
    torch_at = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(SOURCE, encoding="utf-8")
        links = ["-shared", "-fPIC", f"-I{torch_at / 'include'}", f"-L{torch_at / 'lib'}", "-lc10"]
        command = [os.environ.get("CXX", "c++"), "-std=c++20", str(source), *links, "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(library))


@contextmanager
def cuda_without_cuda():
    """Inside the block, fake CUDA tensors can be indexed and moved whatever torch was built with."""
    if torch.backends.cuda.is_built():
        yield
        return
    built().put(True)
    try:
        yield
    finally:
        built().put(False)
