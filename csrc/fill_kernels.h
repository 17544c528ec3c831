// Selecting by a mask, for any element by its size alone. Compiled once a target, through fill.cpp.
#include "elementwise.h"
#include "simd.h"
#if defined(MASKWISE_FILL_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_FILL_KERNELS_H
#else
#define MASKWISE_FILL_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// One run of n elements. Strides are in bytes, of one element or 0; operands: x, mask, value, result.
template <class T>
void fill_run(Kept kept, char* const* at, const int64_t* stride, int64_t n) {
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const auto* m = reinterpret_cast<const uint8_t*>(at[1]);
  auto* out = reinterpret_cast<T*>(at[3]);
  const bool one_value = stride[2] == 0;
  T value;
  std::memcpy(&value, at[2], sizeof(T));
  if (kept != Kept::bits) {
    // All of it comes from one operand, which may be one element for all.
    const int from = kept == Kept::all ? 0 : 2;
    T same;
    std::memcpy(&same, at[from], sizeof(T));
    if (stride[from] == 0)
      std::fill_n(out, n, same);
    else
      std::memcpy(out, at[from], n * sizeof(T));
    return;
  }
  int64_t i = 0;
  if constexpr (sizeof(T) <= 8) {
    constexpr int L = kLanes<T>;
    // A stride of 0 is a gradient that is expanded over the dim that its op had reduced.
    const bool one_x = stride[0] == 0;
    if ((stride[0] == sizeof(T) || one_x) && stride[1] == 1 && one_value) {
      const Vec<T> values = splat<T>(value), same = splat<T>(*x);
      constexpr int64_t kStep = L < 32 ? 32 : L;
      for (; i + kStep <= n; i += kStep) {
        for (int k = 0; k < kStep; k += L) {
          const Vec<T> v = load_mask<T>(m + i + k) ? (one_x ? same : load_raw<Vec<T>>(x + i + k)) : values;
          std::memcpy(out + i + k, &v, sizeof(v));
        }
      }
    }
  }
  for (; i < n; ++i) {
    const char* from = m[i * stride[1]] ? at[0] + i * stride[0] : at[2] + i * stride[2];
    std::memcpy(out + i, from, sizeof(T));
  }
}

using FillRun = void (*)(Kept, char* const*, const int64_t*, int64_t);
inline FillRun fill_of(int64_t bytes) {
  FillRun run;
  dispatch_bytes(bytes, [&](auto t) { run = &fill_run<decltype(t)>; });
  return run;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
