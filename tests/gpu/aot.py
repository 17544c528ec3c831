"""Ahead-of-time compilation of the launches of a launcher."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu import machine_code

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def source(launch):
    """The launch as Triton's launcher would specialise it: on integers that are 1, and on what 16 divides."""
    signature, constants, attributes = {}, {}, {}

    def enter(value, path):
        if isinstance(value, tuple):
            return tuple(enter(v, (*path, i)) for i, v in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return f"*{TYPES[value.dtype]}"
        if value is None:
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if specialised and value == 1:
            constants[path] = value
            return "constexpr"
        if specialised and value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(i,)] = value
            signature[parameter.name] = "constexpr"
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        else:
            specialised = not parameter.do_not_specialize
            signature[parameter.name] = enter(value, (i,))
    return ASTSource(launch.kernel, signature, constants, attributes)


def key(launch):
    """What tells two compiled kernels apart."""
    parts = source(launch)
    return (*configuration(launch), str(parts.signature), str(sorted(map(str, parts.attrs.items()))))


def configuration(launch):
    """What a launcher chooses: constants, dtypes, which operands there are, warps.

    Triton compiles anew, besides, for sizes and strides that are 1 or that 16 divides, and for each number of dims that
    could not be put together; no launcher has a say in that.
    """
    chosen = []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            value = str(value.dtype)
        elif isinstance(value, tuple):
            continue
        elif value is not None and not parameter.is_constexpr:
            value = type(value).__name__
        chosen.append((parameter.name, str(value)))
    return launch.kernel.__name__, str(chosen), launch.warps


_compiled: dict = {}


def compiled(launch, target):
    """The compiled kernel; Triton keeps it on disk too."""
    at = (key(launch), target)
    if at not in _compiled:
        _compiled[at] = triton.compile(source(launch), target=TARGETS[target], options={"num_warps": launch.warps})
    return _compiled[at]


def loops(launch, target):
    """The innermost loops of a launch that load from global memory."""
    return machine_code.loops(compiled(launch, target))


def resources(launch, target):
    """Registers, spilled bytes and shared memory of a launch."""
    return machine_code.resources(compiled(launch, target))
