// New tensors that lie in memory as another does.
#pragma once

#include "common.h"

namespace maskwise {

// Whether a tensor's elements fill its memory, each place once, in any order of its dims.
inline bool without_gaps(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) dims.emplace_back(strides[d], sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// A new tensor of x's shape: in x's order of dims if x has no gaps and no overlaps, else contiguous.
inline Tensor new_like(const Tensor& x, ScalarType dtype) {
  const auto sizes = x.sizes(), strides = x.strides();
  const std::vector<int64_t> shape(sizes.begin(), sizes.end());
  if (x.is_contiguous() || !without_gaps(x)) return empty_cpu(shape, dtype);
  return empty_cpu(shape, std::vector<int64_t>(strides.begin(), strides.end()), dtype);
}

// A result with the memory layout of `like`, as torch::empty_like gives it; that is called by name, and so slower.
inline Tensor empty_as(const Tensor& like) {
  const auto sizes = like.sizes(), strides = like.strides();
  const std::vector<int64_t> shape(sizes.begin(), sizes.end());
  if (like.is_contiguous()) return empty_cpu(shape, like.scalar_type());
  if (without_gaps(like)) return empty_cpu(shape, {strides.begin(), strides.end()}, like.scalar_type());
  Tensor out = torch::stable::empty_like(like);
  if (out.numel() > 0) advise_huge(out.mutable_data_ptr(), static_cast<size_t>(out.numel()) * out.element_size());
  return out;
}

}  // namespace maskwise
