"""Builds the C++ extension, and nothing else: everything static is in pyproject.toml.

Without torch at build time there is no extension, and the package is pure Python: every op then runs on its plain
torch reference, and says so once. Environment variables:

    MASKWISE_BUILD_EXTENSION=0   that build, though torch is there
    MASKWISE_SANITIZE=1          kernels with AddressSanitizer and UndefinedBehaviorSanitizer
    MASKWISE_WERROR=1            compiler warnings are errors: for CI, not for users and their compilers
    MASKWISE_PORTABLE=1          on x86, the baseline kernels that other CPUs run; set it when they run too
"""

import os
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# LibTorch's stable ABI of 2.10: one binary for every later torch and every Python from 3.10 on.
TORCH_TARGET_VERSION = "0x020a000000000000"
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined", "-g"]


def extension() -> dict:
    """The keyword arguments of setup() that build the extension; none when there is nothing to build it with."""
    if os.environ.get("MASKWISE_BUILD_EXTENSION", "1") == "0":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print("maskwise: no torch at build time, so this is a pure-Python build (pip install --no-build-isolation)")
        return {}
    sanitize = os.environ.get("MASKWISE_SANITIZE", "0") == "1"
    # GCC 12 takes the AVX-512 intrinsics of its own headers for reads of uninitialized values.
    quiet = ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
    compile_args = ["-std=c++17", "-fvisibility=hidden", "-Wall", *quiet]
    compile_args += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    # Tight loops lose up to a quarter of their speed where they straddle cache lines of code; the linker decides where.
    aligned = ["-falign-functions=64", "-falign-loops=32"]
    compile_args += ["-O1", *SANITIZE] if sanitize else ["-O3", "-g0", *aligned]
    compile_args += ["-Werror"] if os.environ.get("MASKWISE_WERROR") == "1" and not sanitize else []
    compile_args += ["-DMASKWISE_PORTABLE"] if os.environ.get("MASKWISE_PORTABLE") == "1" else []
    module = CppExtension(
        "maskwise._C",
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp")),
        include_dirs=[str(ROOT / "csrc")],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h")),
        extra_compile_args=compile_args,
        extra_link_args=SANITIZE[:1] if sanitize else [],
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
