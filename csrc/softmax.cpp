// Softmax, softmin, log_softmax and their gradients as registered ops. Arguments were checked in Python: the dim is not
// negative, the mask is bool and broadcasts to x, and the capability table knows that the dtype is served.
#include "slices.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "softmax_kernels.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

using Dims = std::vector<int64_t>;

Tensor softmax_of(const Tensor& x, const Tensor& mask, const Dims& dim, bool negate) {
  Tensor out = empty_as(x);
  const SliceLayout layout = make_slices(x, x, out, mask, dim);
  MASKWISE_AT_ISA(softmax(x.scalar_type(), negate, layout, x.const_data_ptr(), mask.const_data_ptr(),
                          out.mutable_data_ptr()));
  return out;
}

Tensor softmax(const Tensor& x, const Tensor& mask, Dims dim) { return softmax_of(x, mask, dim, false); }

Tensor softmin(const Tensor& x, const Tensor& mask, Dims dim) { return softmax_of(x, mask, dim, true); }

Tensor log_softmax(const Tensor& x, const Tensor& mask, Dims dim) {
  Tensor out = empty_as(x);
  const SliceLayout layout = make_slices(x, x, out, mask, dim);
  MASKWISE_AT_ISA(
      log_softmax(x.scalar_type(), layout, x.const_data_ptr(), mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& known, const Tensor& mask, Dims dim, bool negate) {
  Tensor out = empty_as(known);
  const SliceLayout layout = make_slices(known, grad, out, mask, dim);
  MASKWISE_AT_ISA(softmax_backward(known.scalar_type(), negate, layout, known.const_data_ptr(), grad.const_data_ptr(),
                                   mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

Tensor log_softmax_backward(const Tensor& grad, const Tensor& known, const Tensor& mask, Dims dim) {
  Tensor out = empty_as(known);
  const SliceLayout layout = make_slices(known, grad, out, mask, dim);
  MASKWISE_AT_ISA(log_softmax_backward(known.scalar_type(), layout, known.const_data_ptr(), grad.const_data_ptr(),
                                       mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

}  // namespace
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
