"""The SIMD levels that kernels are compiled for here; one that this CPU lacks runs as the best that it has."""

import platform

#: As maskwise::simd_level counts: AVX2 and AVX-512 on x86, the baseline elsewhere.
SIMD_LEVELS = [1, 2] if platform.machine().lower() in {"x86_64", "amd64"} else [0]
