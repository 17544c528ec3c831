// normalize, standardize and their gradients as registered ops.
#include "slice_loops.h"

#define MASKWISE_KERNELS "normalize_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor normalize(const Tensor& x, const Tensor& mask, Dims dim, double p, double eps, int64_t along) {
  const SliceCall call(x, x, mask, dim, along);
  MASKWISE_AT_ISA(normalize(call, p, eps));
  return call.out;
}

Tensor standardize(const Tensor& x, const Tensor& mask, Dims dim, double correction, double eps, int64_t along) {
  const SliceCall call(x, x, mask, dim, along);
  MASKWISE_AT_ISA(standardize(call, correction, eps));
  return call.out;
}

Tensor normalize_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, Dims dim, double p, double eps,
                          int64_t along) {
  const SliceCall call(x, grad, mask, dim, along);
  MASKWISE_AT_ISA(normalize_backward(call, p, eps));
  return call.out;
}

Tensor standardize_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, Dims dim, double correction,
                            double eps, int64_t along) {
  const SliceCall call(x, grad, mask, dim, along);
  MASKWISE_AT_ISA(standardize_backward(call, correction, eps));
  return call.out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("normalize_fused", TORCH_BOX(&maskwise::normalize));
  m.impl("normalize_fused_forward", TORCH_BOX(&maskwise::normalize));
  m.impl("normalize_fused_backward", TORCH_BOX(&maskwise::normalize_backward));
  m.impl("standardize_fused", TORCH_BOX(&maskwise::standardize));
  m.impl("standardize_fused_forward", TORCH_BOX(&maskwise::standardize));
  m.impl("standardize_fused_backward", TORCH_BOX(&maskwise::standardize_backward));
}
