// Variance and standard deviation as registered ops.
#include "reduce_loops.h"

#define MASKWISE_KERNELS "reduce_moments.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor variance(const Tensor& x, const Tensor& mask, const Dims& dim, bool keepdim, double correction, int64_t along,
                bool root) {
  ReduceCall call(x, mask, dim, keepdim, along, x.scalar_type());
  MASKWISE_AT_ISA(var(x.scalar_type(), call.nest, call.x, call.result, correction, root));
  return call.out;
}

Tensor var(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, double correction, int64_t along) {
  return variance(x, mask, dim, keepdim, correction, along, false);
}

Tensor std(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim, double correction, int64_t along) {
  return variance(x, mask, dim, keepdim, correction, along, true);
}

Tensor var_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, Dims dim, bool, double correction,
                    bool root, int64_t along) {
  GradientCall call(grad, x, mask, dim, along);
  MASKWISE_AT_ISA(var_backward(call, correction, root));
  return call.out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> moments_kept(const Tensor& x, const Tensor& mask, const Dims& dim,
                                                int64_t along) {
  const ScalarType dtype = x.scalar_type(), wide = dtype == ScalarType::Double ? dtype : ScalarType::Float;
  ReduceCall call(x, mask, dim, true, along, ScalarType::Long);
  Tensor mean = empty_cpu(reduced_sizes(x, dim, true), wide), var = empty_cpu(reduced_sizes(x, dim, true), wide);
  MASKWISE_AT_ISA(moments(dtype, call.nest, call.x, static_cast<int64_t*>(call.result), mean.mutable_data_ptr(),
                          var.mutable_data_ptr()));
  return {call.out, mean, var};
}

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  MASKWISE_IMPL_REDUCTION(m, var);
  MASKWISE_IMPL_REDUCTION(m, std);
  m.impl("var_backward", TORCH_BOX(&maskwise::var_backward));
}
