"""What compiled kernels consist of: the loops of their machine code, registers, spilled bytes, shared memory.

The one parser of SASS and of AMD's assembly: for the gates of test_compile.py and for docs/gpu.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs; None where the target does not tell."""

    registers: int | None
    spilled: int | None
    shared: int


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
    """An innermost loop, or all code: its instructions."""

    body: tuple[str, ...]

    def count(self, *words):
        """How many instructions contain one of some words."""
        return sum(any(word in line for word in words) for line in self.body)

    @property
    def barriers(self):
        """Barriers of all threads of a program."""
        return self.count("BAR.", "s_barrier")

    @property
    def exchanges(self):
        """Barriers, and exchanges between the threads of a warp."""
        return self.barriers + self.count("SHFL", "ds_bpermute", "ds_swizzle", "_dpp")

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


def instructions(binary):
    """The instructions in order, as pairs of an address and a text; an address is anything that branches name."""
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


def loops(binary):
    """The innermost loops that load from global memory."""
    lines = instructions(binary)
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


def whole(binary):
    """All instructions, as those of one loop are."""
    return Loop(tuple(text for _, text in instructions(binary) if not text.startswith("NOP")))


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


def resources(binary):
    """Registers, spilled bytes and shared memory."""
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
