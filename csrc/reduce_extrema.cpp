// The extrema and where they are, as registered ops.
#include "segments.h"

#define MASKWISE_KERNELS "reduce_extrema.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor extremum(const Tensor& x, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along, bool greatest) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(extremum(x.scalar_type(), call.nest, call.x, call.result, greatest));
  return call.out;
}

Tensor position(const Tensor& x, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along, bool greatest) {
  ReduceCall call(x, mask, dim, keepdim, along, ScalarType::Long);
  MASKWISE_AT_ISA(position(x.scalar_type(), call.nest, call.x, call.result, greatest));
  return call.out;
}

Tensor amax(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return extremum(x, mask, dim, keepdim, along, true);
}
Tensor amin(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return extremum(x, mask, dim, keepdim, along, false);
}
Tensor argmax(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return position(x, mask, dim, keepdim, along, true);
}
Tensor argmin(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  return position(x, mask, dim, keepdim, along, false);
}

Tensor extremum_backward(const Tensor& grad, const Tensor& of, const Tensor& x, const Tensor& mask, Dims dim, bool,
                         bool greatest, int64_t along) {
  GradientCall call(grad, x, mask, dim, along);
  const Tensor extrema = torch::stable::contiguous(of);
  MASKWISE_AT_ISA(extremum_backward(call, extrema.const_data_ptr(), greatest));
  return call.out;
}

}  // namespace

void amax_into(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  MASKWISE_AT_ISA(extremum(dtype, nest, x, out, true));
}
void amin_into(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  MASKWISE_AT_ISA(extremum(dtype, nest, x, out, false));
}
void extremum_gradient(const GradientCall& call, const void* of, bool greatest) {
  MASKWISE_AT_ISA(extremum_backward(call, of, greatest));
}

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  MASKWISE_IMPL_REDUCTION(m, amax);
  MASKWISE_IMPL_REDUCTION(m, amin);
  MASKWISE_IMPL_REDUCTION(m, argmax);
  MASKWISE_IMPL_REDUCTION(m, argmin);
  m.impl("extremum_backward", TORCH_BOX(&maskwise::extremum_backward));
}
