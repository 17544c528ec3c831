// Softmax, softmin, log_softmax and their gradients as registered ops.
#include "segments.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "softmax_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor softmax(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const SliceCall call(x, x, mask, dim, along);
  MASKWISE_AT_ISA(softmax(call, false));
  return call.out;
}

Tensor softmin(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const SliceCall call(x, x, mask, dim, along);
  MASKWISE_AT_ISA(softmax(call, true));
  return call.out;
}

Tensor log_softmax(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const SliceCall call(x, x, mask, dim, along);
  MASKWISE_AT_ISA(log_softmax(call));
  return call.out;
}

// The gradients read the result of the forward pass.
Tensor softmax_backward(const Tensor& grad, const Tensor& result, const Tensor& mask, Dims dim, bool negate,
                        int64_t along) {
  const SliceCall call(result, grad, mask, dim, along);
  MASKWISE_AT_ISA(softmax_backward(call, negate));
  return call.out;
}

Tensor log_softmax_backward(const Tensor& grad, const Tensor& result, const Tensor& mask, Dims dim, int64_t along) {
  const SliceCall call(result, grad, mask, dim, along);
  MASKWISE_AT_ISA(log_softmax_backward(call));
  return call.out;
}

}  // namespace

void softmax_slices(const SliceCall& call) { MASKWISE_AT_ISA(softmax(call, false)); }
void softmax_gradient(const SliceCall& call) { MASKWISE_AT_ISA(softmax_backward(call, false)); }

}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("softmax_fused", TORCH_BOX(&maskwise::softmax));
  m.impl("softmax_fused_forward", TORCH_BOX(&maskwise::softmax));
  m.impl("softmin_fused", TORCH_BOX(&maskwise::softmin));
  m.impl("softmin_fused_forward", TORCH_BOX(&maskwise::softmin));
  m.impl("log_softmax_fused", TORCH_BOX(&maskwise::log_softmax));
  m.impl("log_softmax_fused_forward", TORCH_BOX(&maskwise::log_softmax));
  m.impl("softmax_fused_backward", TORCH_BOX(&maskwise::softmax_backward));
  m.impl("log_softmax_fused_backward", TORCH_BOX(&maskwise::log_softmax_backward));
}
