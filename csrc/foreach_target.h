// Compiles one kernel header for every SIMD target, in a namespace each: avx2 and avx512 on x86, baseline elsewhere.
//
//   #define MASKWISE_KERNELS "order_kernels.h"
//   #include "foreach_target.h"
//
// AVX-512 is for kernels that wait for arithmetic (exponentials, mostly): those define MASKWISE_COMPUTE_BOUND before they
// include this. All others wait for memory, which wider vectors do not hasten, and run their AVX2 code there too. An x86
// CPU without AVX2 runs no kernels: see why_no_simd in ops/backends.py. MASKWISE_PORTABLE builds the baseline target on
// x86 too, to test what other CPUs run.
//
// The target is set by pragma rather than by build flags, so that one object file holds every target and the build
// needs no list of per-file flags. Everything a kernel header includes must be included before the pragmas (common.h):
// an inline function of the standard library that was compiled for AVX2 could otherwise be the copy that the linker
// keeps, and the library would die on an old CPU. There is no include guard: each family includes this once.
#include "common.h"

#if defined(__clang__)
#define MASKWISE_PRAGMA(x) _Pragma(#x)
#define MASKWISE_TARGET_PUSH(T) \
  MASKWISE_PRAGMA(clang attribute push(__attribute__((target(T))), apply_to = function))
#define MASKWISE_TARGET_POP _Pragma("clang attribute pop")
#else
#define MASKWISE_PRAGMA(x) _Pragma(#x)
#define MASKWISE_TARGET_PUSH(T) _Pragma("GCC push_options") MASKWISE_PRAGMA(GCC target(T))
#define MASKWISE_TARGET_POP _Pragma("GCC pop_options")
#endif

#if !defined(__x86_64__) || defined(MASKWISE_PORTABLE)
#define MASKWISE_TARGET baseline
#define MASKWISE_VECTOR_BYTES 16
#include MASKWISE_KERNELS
#undef MASKWISE_VECTOR_BYTES
#undef MASKWISE_TARGET
#else
#define MASKWISE_F16C 1

#define MASKWISE_TARGET avx2
#define MASKWISE_VECTOR_BYTES 32
MASKWISE_TARGET_PUSH("avx2,fma,f16c,bmi,bmi2")
#include MASKWISE_KERNELS
MASKWISE_TARGET_POP
#undef MASKWISE_VECTOR_BYTES
#undef MASKWISE_TARGET

#if defined(MASKWISE_COMPUTE_BOUND)
// The second pass through the headers: their guards let them in while they are defined.
#define MASKWISE_TARGET_TOGGLE
#define MASKWISE_TARGET avx512
#define MASKWISE_VECTOR_BYTES 64
MASKWISE_TARGET_PUSH("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#include MASKWISE_KERNELS
MASKWISE_TARGET_POP
#undef MASKWISE_VECTOR_BYTES
#undef MASKWISE_TARGET
#undef MASKWISE_TARGET_TOGGLE
#else
namespace maskwise {
namespace avx512 = avx2;
}
#endif
#undef MASKWISE_F16C
#endif
