"""Ahead-of-time compilation of whatever a launcher would start, and what the compiled objects tell of themselves."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

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


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs; None where the target does not tell."""

    registers: int | None
    spilled: int | None
    shared: int


def source(launch):
    """The launch as Triton's launcher would specialise it: on integers that are 1, and on what 16 divides."""
    signature, constants, attributes = {}, {}, {}

    def enter(value, path):
        if isinstance(value, tuple):
            return tuple(enter(v, (*path, i)) for i, v in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        if value is None or value == 1:
            constants[path] = value
            return "constexpr"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(i,)] = value
            signature[parameter.name] = "constexpr"
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        else:
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


@lru_cache
def tool(name):
    """A program that comes with Triton."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


# -- loops of the machine code -----------------------------------------------------------------------------------------
#: Bytes of each load, by what its instruction ends with: those of NVIDIA, and of AMD.
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
WORDS = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short_d16": 2, "dword": 4, "dwordx2": 8, "dwordx4": 16}


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions."""

    body: tuple[str, ...]

    def count(self, *words):
        """How many instructions contain one of some words."""
        return sum(any(word in line for word in words) for line in self.body)

    @property
    def barriers(self):
        """Barriers, and exchanges between threads."""
        return self.count("BAR.", "SHFL", "s_barrier", "ds_bpermute", "ds_swizzle", "_dpp")

    @property
    def loads(self):
        """The bytes of each load from global memory."""
        found = []
        for line in self.body:
            if match := re.search(r"\bLDG\.E(?:\.EF|\.EL|\.LU|\.NA)*(?:\.(U8|S8|U16|S16|64|128))?", line):
                found.append(WIDTHS.get(match[1], 4))
            elif match := re.search(r"(?:global|buffer)_load_(\w+)", line):
                found.append(WORDS.get(match[1], 4))
        return found


def machine_code(launch, target):
    """The instructions in order, as pairs of an address and a text; an address is anything that branches name."""
    binary = compiled(launch, target)
    if "cubin" not in binary.asm:
        label, lines = "", []
        for line in binary.asm["amdgcn"].splitlines():
            if match := re.match(r"(\.LBB\w+):", line):
                label = match[1]
            elif re.match(r"\s+[a-z]\w+", line):
                lines.append((label, line.strip()))
                label = ""
        return lines
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        told = subprocess.run([tool("cuobjdump"), "-sass", file.name], check=True, capture_output=True, text=True)
    return re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", told.stdout, flags=re.M)


def loops(launch, target):
    """The innermost loops that load from global memory."""
    lines = machine_code(launch, target)
    at = {address: i for i, (address, _) in enumerate(lines) if address}
    spans = []
    for i, (_, line) in enumerate(lines):
        if match := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line):
            goal = at.get(match[1].zfill(4))
        elif match := re.search(r"s_c?branch\w*\s+(\.LBB\w+)", line):
            goal = at.get(match[1])
        else:
            continue
        if goal is not None and goal < i:
            spans.append((goal, i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    found = [Loop(tuple(line for _, line in lines[first : last + 1])) for first, last in sorted(set(inner))]
    return [loop for loop in found if loop.loads]


def spills(ptx):
    """Bytes of registers that are stored to and loaded from memory, as the assembler tells them."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, flags=re.M)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        assembler = get_ptxas(int(re.search(r"\d+", target)[0])).path
        command = [assembler, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", told.stdout + told.stderr)))


def resources(launch, target):
    """Registers, spilled bytes and shared memory."""
    binary = compiled(launch, target)
    if "cubin" in binary.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            told = subprocess.run(
                [tool("cuobjdump"), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
            ).stdout
        found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
        # A stack is not always one of spilled registers: the assembler knows.
        spilled = spills(binary.asm["ptx"]) if found["STACK"] + found["LOCAL"] else 0
        return Resources(found["REG"], spilled, binary.metadata.shared)
    assembly = binary.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1])
    spilled = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)[1])
    return Resources(registers, spilled, binary.metadata.shared)
