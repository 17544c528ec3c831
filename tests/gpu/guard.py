"""A stand-in for the CUDA part of torch, so that a build of torch without it can work on fake CUDA tensors.

Before torch indexes, moves or inverts a tensor it asks the guard of the tensor's device to make that device current; a
build without CUDA has no such guard, and raises, even for tensors that have no data. This one does nothing.

Autograd needs more: a device that torch counts, so that its engine starts a thread for it. Torch counts devices once,
when it is imported, so `pretend` must come before that, in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
};
static Guard guard;

extern "C" void put(bool there) {
  const auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(there ? &guard : nullptr);
}

#ifdef COUNTED
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
#endif
"""


@lru_cache
def built(*, counted: bool = False):
    """The compiled stand-in; ``counted`` is a device that torch counts."""
    # Found without importing torch.
    torch_at = Path(find_spec("torch").origin).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(SOURCE, encoding="utf-8")
        at = torch_at / "lib"
        links = ["-shared", "-fPIC", f"-I{torch_at / 'include'}", f"-L{at}", "-lc10"]
        links += ["-DCOUNTED", "-ltorch_cpu", f"-Wl,-rpath,{at}"] if counted else []
        command = [os.environ.get("CXX", "c++"), "-std=c++20", str(source), *links, "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(library))


@contextmanager
def cuda_without_cuda():
    """Inside the block, fake CUDA tensors can be indexed and moved whatever torch was built with."""
    import torch

    if torch.backends.cuda.is_built():
        yield
        return
    built().put(True)
    try:
        yield
    finally:
        built().put(False)


def pretend():
    """Fake CUDA tensors can be indexed, moved and differentiated in this process. It comes before importing torch."""
    if not list(Path(find_spec("torch").origin).parent.glob("lib/*torch_cuda.*")):
        built(counted=True).put(True)
