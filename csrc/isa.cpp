// Which SIMD level runs: found once, lowered on request, never raised above what the CPU has.
#include "common.h"

#include <atomic>
#include <cstdlib>

namespace maskwise {
namespace {

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  // Every CPU with AVX2 that torch supports also has FMA, F16C and BMI2; FMA is checked because it is the newest name.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return Isa::avx2;
  return Isa::baseline;
#elif defined(__aarch64__)
  return Isa::neon;
#else
  return Isa::baseline;
#endif
}

Isa initial() {
  const Isa top = best();
  const char* wish = std::getenv("MASKWISE_SIMD");
  if (wish == nullptr || top == Isa::neon) return top;
  if (std::strcmp(wish, "baseline") == 0) return Isa::baseline;
  if (std::strcmp(wish, "avx2") == 0) return std::min(top, Isa::avx2);
  return top;
}

std::atomic<Isa> current{initial()};

// simd_level(-1) tells the level in force; simd_level(n) sets it, capped by the CPU, and tells what it became.
int64_t simd_level(int64_t wish) {
  const Isa top = best();
  if (wish >= 0 && top != Isa::neon) current = static_cast<Isa>(std::min<int64_t>(wish, static_cast<int64_t>(top)));
  return static_cast<int64_t>(current.load());
}

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CompositeExplicitAutograd, m) {
  m.impl("simd_level", TORCH_BOX(&maskwise::simd_level));
}
