// Logsumexp and the vector norms as registered ops.
#include "segments.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "reduce_exponentials.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor logsumexp(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, int64_t along) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(logsumexp(x.scalar_type(), call.nest, call.x, call.result));
  return call.out;
}

Tensor norm(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, double ord, int64_t along) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(norm(x.scalar_type(), call.nest, call.x, call.result, ord));
  return call.out;
}

Tensor logsumexp_backward(const Tensor& grad, const Tensor& of, const Tensor& x, const Tensor& mask, Dims dim, bool,
                          int64_t along) {
  GradientCall call(grad, x, mask, dim, along);
  const Tensor results = torch::stable::contiguous(of);
  MASKWISE_AT_ISA(logsumexp_backward(call, results.const_data_ptr()));
  return call.out;
}

Tensor norm_backward(const Tensor& grad, const Tensor& of, const Tensor& x, const Tensor& mask, Dims dim, bool,
                     double ord, int64_t along) {
  GradientCall call(grad, x, mask, dim, along);
  const Tensor results = torch::stable::contiguous(of);
  MASKWISE_AT_ISA(norm_backward(call, results.const_data_ptr(), ord));
  return call.out;
}

}  // namespace

void logsumexp_into(ScalarType dtype, const ReduceNest& nest, const void* x, void* out) {
  MASKWISE_AT_ISA(logsumexp(dtype, nest, x, out));
}
void logsumexp_gradient(const GradientCall& call, const void* of) { MASKWISE_AT_ISA(logsumexp_backward(call, of)); }

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  MASKWISE_IMPL_REDUCTION(m, logsumexp);
  MASKWISE_IMPL_REDUCTION(m, norm);
  m.impl("logsumexp_backward", TORCH_BOX(&maskwise::logsumexp_backward));
  m.impl("norm_backward", TORCH_BOX(&maskwise::norm_backward));
}
