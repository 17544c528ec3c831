// What every registered reduction does before and after its kernel. Arguments were checked in Python: dims are sorted,
// unique and not negative, the mask is bool and broadcasts to x, and the capability table knows that the dtype is served.
#pragma once

#include "map_layout.h"

namespace maskwise {

using Dims = std::vector<int64_t>;

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

// A reduction that is about to run: how to walk, from where, and to where.
struct ReduceCall {
  Layout layout;
  Tensor out;
  const void* x;
  const void* mask;
  void* result;

  ReduceCall(const Tensor& values, const Tensor& kept, const Dims& dim, bool keepdim, ScalarType dtype)
      : layout(make_layout(values, kept, dim)),
        out(empty_cpu(reduced_sizes(values, dim, keepdim), dtype)),
        x(values.const_data_ptr()),
        mask(kept.const_data_ptr()),
        result(out.mutable_data_ptr()) {}
};

// A gradient that is about to run. It is written contiguously; grad has the shape of the reduction's result.
struct GradientCall {
  Layout layout;
  MapLayout map;
  Tensor grad;
  Tensor out;

  GradientCall(const Tensor& of_result, const Tensor& x, const Tensor& mask, const Dims& dim)
      : layout(make_layout(x, mask, dim)),
        map(make_map_layout(x, mask, dim)),
        grad(torch::stable::contiguous(of_result)),
        out(empty_cpu(std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), x.scalar_type())) {}
};

}  // namespace maskwise

// Both ops of a reduction: with autograd around it, and without.
#define MASKWISE_IMPL_REDUCTION(LIBRARY, NAME)                       \
  LIBRARY.impl(#NAME "_fused", TORCH_BOX(&maskwise::NAME));          \
  LIBRARY.impl(#NAME "_fused_forward", TORCH_BOX(&maskwise::NAME))
