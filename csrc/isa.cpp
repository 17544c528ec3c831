// Which SIMD level runs: found once, lowered on request, never raised above what the CPU has.
#include "common.h"

#include <atomic>
#include <cstdlib>

namespace maskwise {
namespace {

// The level that this CPU runs. On x86 the extension is loaded where there is AVX2 only.
Isa best() {
#if defined(__x86_64__) && !defined(MASKWISE_PORTABLE)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? Isa::avx512 : Isa::avx2;
#elif defined(__aarch64__)
  return Isa::neon;
#else
  return Isa::baseline;
#endif
}

// The level nearest to `wish` that this CPU runs: only AVX-512 can be lowered.
Isa nearest(int64_t wish) { return best() == Isa::avx512 && wish <= int64_t(Isa::avx2) ? Isa::avx2 : best(); }

Isa initial() {
  const char* wish = std::getenv("MASKWISE_SIMD");
  return wish != nullptr && std::strcmp(wish, "avx2") == 0 ? nearest(int64_t(Isa::avx2)) : best();
}

std::atomic<Isa> current{initial()};

// simd_level(-1) gives the level in force; simd_level(n) sets it to the nearest that the CPU has, and gives that.
int64_t simd_level(int64_t wish) {
  if (wish >= 0) current = nearest(wish);
  return static_cast<int64_t>(current.load());
}

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CompositeExplicitAutograd, m) {
  m.impl("simd_level", TORCH_BOX(&maskwise::simd_level));
}
