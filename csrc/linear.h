// What the targets of the sparse product share: the signatures of inner loops, and sizes that fit the caches.
#pragma once

#include "common.h"

namespace maskwise {

// The inner loops, as each SIMD level gives them: see linear_kernels.h for the arguments.
using MultiplyRows = void (*)(const float*, const float*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                          int32_t, float*);
using MultiplyQuads = void (*)(const float*, const float*, const int32_t*, const int32_t*, int64_t, int64_t, float*);

// Sums of one chunk of outputs stay in the first cache: at most this many floats.
constexpr int64_t kSums = 4096;
// Inputs that stay in the second cache beside the weights that pass: so many floats.
constexpr int64_t kSecondCache = 49152;

// How unstructured rows are walked: the loop, the batch rows of a panel, the ranges of columns at a time, and the sums.
struct RowPlan {
  MultiplyRows run;
  int64_t panel, step, sums;
};

}  // namespace maskwise
