// Sum, product, mean, any, all as registered ops.
#include "segments.h"

#define MASKWISE_KERNELS "reduce_totals.h"
#include "foreach_target.h"

namespace maskwise {

Tensor sum_kept(const Tensor& x, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along) {
  ReduceCall call(x, mask, dim, keepdim, along, is_floating(x.scalar_type()) ? x.scalar_type() : ScalarType::Long);
  MASKWISE_AT_ISA(sum(x.scalar_type(), call.nest, call.x, call.result));
  return call.out;
}

namespace {

Tensor sum(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return sum_kept(x, mask, dim, keepdim, along);
}

Tensor prod(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(prod(x.scalar_type(), call.nest, call.x, call.result));
  return call.out;
}

Tensor mean(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(mean(x.scalar_type(), call.nest, call.x, call.result));
  return call.out;
}

// torch's any and all of uint8 are uint8.
template <bool kAll>
Tensor truth(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  const ScalarType dtype = x.scalar_type();
  ReduceCall call(x, mask, dim, keepdim, along, dtype == ScalarType::Byte ? dtype : ScalarType::Bool);
  MASKWISE_AT_ISA(truth(dtype, call.nest, call.x, call.result, kAll));
  return call.out;
}

Tensor any(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return truth<false>(x, mask, dim, keepdim, along);
}

Tensor all(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return truth<true>(x, mask, dim, keepdim, along);
}

}  // namespace

void sum_into(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  MASKWISE_AT_ISA(sum(dtype, nest, x, out));
}
void mean_into(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  MASKWISE_AT_ISA(mean(dtype, nest, x, out));
}

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  MASKWISE_IMPL_REDUCTION(m, sum);
  MASKWISE_IMPL_REDUCTION(m, prod);
  MASKWISE_IMPL_REDUCTION(m, mean);
  MASKWISE_IMPL_REDUCTION(m, any);
  MASKWISE_IMPL_REDUCTION(m, all);
}
