// The kernels of normalization, as norm_kernels.h compiles them for one dtype.
#pragma once

#include "elementwise.h"

namespace maskwise {

// One run: see Elementwise::for_each.
using NormRun = void (*)(Kept keeps, char* const* at, const int64_t* stride, int64_t n);

struct NormRuns {
  NormRun scale_shift, product, widen, gradient;
};

}  // namespace maskwise
