// The kernels of normalization, as norm_kernels.h compiles them for one dtype.
#pragma once

#include "reduce_loops.h"

namespace maskwise {

// One run: see Elementwise::for_each.
using NormRun = void (*)(Kept keeps, char* const* at, const int64_t* stride, int64_t n);

struct NormRuns {
  NormRun scale_shift, product, widen, gradient;
};

// A contiguous stretch of a slice: where it begins, counted in bytes from the first element of the slice, and its mask
// bytes; null where all of it is kept.
struct MomentRun {
  int64_t x;
  const uint8_t* mask;
  int64_t n;
};

// What is known of a slice: the mean of what is kept, and the mean of squared distances from it.
struct SliceMoments {
  double mean = 0, var = 0;
};

// The moments of `kept` elements in some runs, which it reads twice.
using MomentsOf = SliceMoments (*)(const char* x, const std::vector<MomentRun>& runs, int64_t kept);

}  // namespace maskwise
