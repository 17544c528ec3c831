// Quantile and median as registered ops, and where in x their values come from, which is what their gradients need.
// Arguments were checked in Python: dims are sorted, unique and not negative, the mask broadcasts to x, q is
// a contiguous float32 or float64 tensor of one dim, or of none for a single quantile.
#include "quantile_call.h"

#define MASKWISE_KERNELS "quantile_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

QuantileCall quantiles_of(const Tensor& x, const Tensor& mask, const Dims& dim, const Tensor& q, int64_t interpolation,
                          int64_t along) {
  QuantileCall call = make_quantile_call(x, mask, dim, along);
  call.quantiles = q.numel();
  call.q = q.const_data_ptr();
  call.single = q.scalar_type() == ScalarType::Float;
  call.interpolation = static_cast<Interpolation>(interpolation);
  return call;
}

constexpr double kHalf = 0.5;

QuantileCall median_of(const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along) {
  QuantileCall call = make_quantile_call(x, mask, dim, along);
  call.q = &kHalf;
  return call;
}

Tensor values_of(const QuantileCall& call, const Tensor& x, const std::vector<int64_t>& sizes) {
  Tensor out = empty_cpu(sizes, x.scalar_type());
  MASKWISE_AT_ISA(quantile_values(x.scalar_type(), call, x.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> places_of(const QuantileCall& call, const Tensor& x, const std::vector<int64_t>& sizes) {
  Tensor lower = empty_cpu(sizes, ScalarType::Long);
  Tensor upper = empty_cpu(sizes, ScalarType::Long);
  Tensor weights = empty_cpu(sizes, ScalarType::Double);
  auto* below = static_cast<int64_t*>(lower.mutable_data_ptr());
  auto* above = static_cast<int64_t*>(upper.mutable_data_ptr());
  auto* w = static_cast<double*>(weights.mutable_data_ptr());
  MASKWISE_AT_ISA(quantile_places(x.scalar_type(), call, x.const_data_ptr(), below, above, w));
  return {lower, upper, weights};
}

std::vector<int64_t> sizes_of(const Tensor& x, const Dims& dim, const Tensor& q, bool keepdim) {
  std::vector<int64_t> sizes = reduced_sizes(x, dim, keepdim);
  if (q.dim() > 0) sizes.insert(sizes.begin(), q.numel());
  return sizes;
}

Tensor quantile(const Tensor& x, const Tensor& mask, Dims dim, const Tensor& q, bool keepdim, int64_t interpolation,
                int64_t along) {
  return values_of(quantiles_of(x, mask, dim, q, interpolation, along), x, sizes_of(x, dim, q, keepdim));
}

std::tuple<Tensor, Tensor, Tensor> quantile_places(const Tensor& x, const Tensor& mask, Dims dim, const Tensor& q,
                                                   bool keepdim, int64_t interpolation, int64_t along) {
  return places_of(quantiles_of(x, mask, dim, q, interpolation, along), x, sizes_of(x, dim, q, keepdim));
}

Tensor median(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return values_of(median_of(x, mask, dim, along), x, reduced_sizes(x, dim, keepdim));
}

Tensor median_places(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return std::get<0>(places_of(median_of(x, mask, dim, along), x, reduced_sizes(x, dim, keepdim)));
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("quantile_fused", TORCH_BOX(&maskwise::quantile));
  m.impl("quantile_places", TORCH_BOX(&maskwise::quantile_places));
  m.impl("median_fused", TORCH_BOX(&maskwise::median));
  m.impl("median_places", TORCH_BOX(&maskwise::median_places));
}
