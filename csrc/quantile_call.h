// What a call of quantile asks for; knows nothing of types.
#pragma once

#include "order_entry.h"

namespace maskwise {

enum class Interpolation : int64_t { linear = 0, lower = 1, higher = 2, midpoint = 3, nearest = 4 };

// Between which two ranks a quantile lies, and how far along.
struct Rank {
  bool valid;
  int64_t below;
  int64_t above;
  double weight;
};

struct QuantileCall {
  OrderNest nest;
  int64_t quantiles;
  const void* q;
  bool single;  // q is float32, else float64
  Interpolation interpolation;
  // The loops of x as if it were contiguous.
  Loops<1> kept;
  Loops<1> reduced;

  bool interpolates() const {
    return interpolation == Interpolation::linear || interpolation == Interpolation::midpoint;
  }

  Rank rank(int64_t i, int64_t n) const {
    const double last = static_cast<double>(n - 1);
    double at;
    if (single) {
      // In float32, as torch does: 0.1f * 10 is 1 there, and a little more than 1 in float64. Beyond 2^24 float32 does
      // not have every rank.
      const float f = static_cast<const float*>(q)[i];
      at = n <= int64_t{1} << 24 ? static_cast<double>(f * static_cast<float>(last)) : static_cast<double>(f) * last;
    } else {
      at = static_cast<const double*>(q)[i] * last;
    }
    // Also false for NaN.
    if (!(at >= 0 && at <= last)) return {false, 0, 0, 0};
    if (interpolation == Interpolation::nearest) at = std::nearbyint(at);
    const auto below = static_cast<int64_t>(std::floor(at));
    const auto above = static_cast<int64_t>(std::ceil(at));
    switch (interpolation) {
      case Interpolation::linear: return {true, below, above, at - static_cast<double>(below)};
      case Interpolation::midpoint: return {true, below, above, 0.5};
      case Interpolation::higher: return {true, above, above, 0};
      default: return {true, below, below, 0};
    }
  }

  // Where an element of a slice is in x, counted as if x were contiguous.
  int64_t flat(int64_t slice, int64_t place) const { return offset_of(kept, slice)[0] + offset_of(reduced, place)[0]; }
};

inline QuantileCall make_quantile_call(const Tensor& x, const Tensor& mask, const Dims& dims, int64_t along) {
  QuantileCall call{OrderNest(x, mask, along, dims), 1, nullptr, false, Interpolation::lower, {}, {}};
  Loops<1> loops;
  int64_t stride = 1;
  for (int64_t d = x.dim(); d-- > 0; stride *= x.size(d)) loops.insert(loops.begin(), Loop<1>{x.size(d), {stride}});
  size_t next = 0;  // dims are sorted
  for (size_t d = 0; d < loops.size(); ++d) {
    const bool reduced = next < dims.size() && dims[next] == static_cast<int64_t>(d);
    next += reduced;
    (reduced ? call.reduced : call.kept).push_back(loops[d]);
  }
  return call;
}

}  // namespace maskwise
