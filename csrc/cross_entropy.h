// What the kernels of cross entropy share at every SIMD level.
#pragma once

#include "common.h"

namespace maskwise {

// Positions that are done side by side, where a class of each lies next to that of the other.
constexpr int64_t kPositions = 128;

// The gradient at a position: factor * (softmax - smooth), and at the target less by factor * sharp.
struct Slope {
  double log_sum;
  double factor;
  double smooth;
  double sharp;
};

// Cross entropy, compiled for one SIMD level and one dtype.
struct CrossEntropyKernel {
  double (*element)(const void* x, int64_t i);
  void (*row)(const void* x, int64_t n, double* log_sum, double* total);
  void (*columns)(const void* x, int64_t n, int64_t step, int64_t width, const uint8_t* counts, double* log_sums,
                  double* totals);
  void (*row_slopes)(const void* x, int64_t n, int64_t target, const Slope& slope, void* out);
  void (*column_slopes)(const void* x, int64_t n, int64_t step, int64_t width, const uint8_t* counts,
                        const int64_t* target, const Slope* slopes, void* out, int64_t out_step, bool zeroed);
};

}  // namespace maskwise
