// Compiles one kernel header for every SIMD level, in a namespace each: baseline, avx2, avx512.
//
//   #define MASKWISE_KERNELS "reduce_kernels.h"
//   #include "foreach_isa.h"
//
// AVX-512 is for kernels that wait for arithmetic (exponentials, mostly): those define MASKWISE_COMPUTE_BOUND before they
// include this. All others wait for memory, which wider vectors do not hasten, and run their AVX2 code there too.
//
// The target is set by pragma rather than by build flags, so that one object file holds every level and the build
// needs no list of per-file flags. Everything a kernel header includes must be included before the pragmas (common.h):
// an inline function of the standard library that was compiled for AVX2 could otherwise be the copy that the linker
// keeps, and the baseline path would die on an old CPU. There is no include guard: each family includes this once.
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

#define MASKWISE_VECTOR_BYTES 16
namespace maskwise::baseline {
#include "simd.h"
#include MASKWISE_KERNELS
}  // namespace maskwise::baseline
#undef MASKWISE_VECTOR_BYTES

#if defined(__x86_64__)
MASKWISE_TARGET_PUSH("avx2,fma,f16c,bmi,bmi2")
#define MASKWISE_VECTOR_BYTES 32
#define MASKWISE_F16C 1
namespace maskwise::avx2 {
#include "simd.h"
#include MASKWISE_KERNELS
}  // namespace maskwise::avx2
#undef MASKWISE_VECTOR_BYTES
MASKWISE_TARGET_POP

#if defined(MASKWISE_COMPUTE_BOUND)
MASKWISE_TARGET_PUSH("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define MASKWISE_VECTOR_BYTES 64
namespace maskwise::avx512 {
#include "simd.h"
#include MASKWISE_KERNELS
}  // namespace maskwise::avx512
#undef MASKWISE_VECTOR_BYTES
MASKWISE_TARGET_POP
#else
namespace maskwise {
namespace avx512 = avx2;
}
#endif
#undef MASKWISE_F16C
#endif
