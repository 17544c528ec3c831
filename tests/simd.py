"""The SIMD levels that kernels are compiled for here; one that this CPU lacks runs as the best that it has."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: As maskwise::simd_level counts: AVX2 and AVX-512 on x86, the baseline elsewhere.
SIMD_LEVELS = [1, 2] if platform.machine().lower() in {"x86_64", "amd64"} else [0]


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Run kernels at this level."""
    from maskwise.ops import backends  # defines the op

    assert backends.status().loaded
    before = torch.ops.maskwise.simd_level(-1)
    torch.ops.maskwise.simd_level(level)
    try:
        yield
    finally:
        torch.ops.maskwise.simd_level(before)
