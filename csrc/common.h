// What every file of the extension needs: the stable-ABI headers, the element types, and which SIMD level to run.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "dtype.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace maskwise {

using torch::stable::Tensor;

// The SIMD levels, in the order of what they can do. Numbers cross the op border (maskwise::simd_level). x86 has kernels
// for avx2 and avx512; other CPUs run the baseline, which on ARM is NEON.
enum class Isa : int64_t { baseline = 0, avx2 = 1, avx512 = 2, neon = 3 };

// The level in force: the best that this CPU has, unless lowered by MASKWISE_SIMD or by maskwise::simd_level.
Isa isa();

// The least work worth a thread of its own, in elements.
constexpr int64_t kGrain = 32768;

// Asks for huge pages behind fresh memory that a kernel is about to write in full. Linux hands memory out page by page,
// and with pages of 4 kB that costs a result of 64 MB five times more than writing it does.
inline void advise_huge(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  if (bytes < 2 * kHugePage) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  // Only a wish: where the system grants none, nothing changes.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Whether fresh memory is filled with ones, which read as NaN: the tests set MASKWISE_POISON, so that a kernel that
// leaves a place of its result unwritten cannot pass by luck.
inline bool poisoned() {
  static const bool wanted = std::getenv("MASKWISE_POISON") != nullptr;
  return wanted;
}

// A new CPU tensor with these strides, which must leave no gaps. torch::stable::new_empty would look the op up by its
// name on every call, which costs a tiny kernel more than its arithmetic; this asks the allocator directly.
inline Tensor empty_cpu(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), aoti_torch_device_type_cpu(), 0, &handle));
  Tensor out(handle);
  const size_t bytes = static_cast<size_t>(out.numel()) * out.element_size();
  if (bytes > 0) advise_huge(out.mutable_data_ptr(), bytes);
  if (bytes > 0 && poisoned()) std::memset(out.mutable_data_ptr(), 0xff, bytes);
  return out;
}

// A new contiguous CPU tensor.
inline Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(1, sizes[d])) strides[d] = stride;
  return empty_cpu(sizes, strides, dtype);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs body(begin, end) over [0, n) on torch's threads; each task gets about kGrain elements or more.
template <class Body>
void parallel(int64_t n, int64_t elements_each, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  // A range that one thread would run anyway skips the thread pool: it costs more than a tiny kernel does.
  if (n <= grain) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  torch::stable::parallel_for(0, n, grain, body);
}

// The same for tasks of uneven cost, as rows are of which more or less is kept: threads take the next few whenever they
// are done. Calls body more than once a thread.
template <class Body>
void parallel_uneven(int64_t n, int64_t elements_each, const Body& body) {
  constexpr int64_t kChunks = 16;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  if (n <= grain || threads == 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  const int64_t chunk = std::max(grain, ceil_div(n, kChunks * threads));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(threads, ceil_div(n, chunk)), 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(chunk)) < n;) body(begin, std::min(begin + chunk, n));
  });
}

}  // namespace maskwise

// Calls NAME of the namespace of the SIMD level in force: MASKWISE_AT_ISA(reduce_rows<float>(a, b)).
#if defined(__x86_64__) && !defined(MASKWISE_PORTABLE)
#define MASKWISE_AT_ISA(...) \
  (::maskwise::isa() == ::maskwise::Isa::avx512 ? avx512::__VA_ARGS__ : avx2::__VA_ARGS__)
#else
#define MASKWISE_AT_ISA(...) baseline::__VA_ARGS__
#endif
