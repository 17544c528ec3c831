// normalize, standardize and their gradients as registered ops. Arguments were checked in Python: dims are sorted,
// unique and not negative, the mask is bool and broadcasts to x, and the capability table knows the dtype.
#include "slices.h"

#define MASKWISE_KERNELS "normalize_kernels.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

using Dims = std::vector<int64_t>;

Tensor normalize(const Tensor& x, const Tensor& mask, Dims dim, double p, double eps) {
  Tensor out = empty_as(x);
  const SliceLayout layout = make_slices(x, x, out, mask, dim);
  MASKWISE_AT_ISA(
      normalize(x.scalar_type(), p, eps, layout, x.const_data_ptr(), mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

Tensor standardize(const Tensor& x, const Tensor& mask, Dims dim, double correction, double eps) {
  Tensor out = empty_as(x);
  const SliceLayout layout = make_slices(x, x, out, mask, dim);
  MASKWISE_AT_ISA(standardize(x.scalar_type(), correction, eps, layout, x.const_data_ptr(), mask.const_data_ptr(),
                              out.mutable_data_ptr()));
  return out;
}

Tensor normalize_backward(const Tensor& grad, const Tensor& known, const Tensor& mask, Dims dim, double p, double eps) {
  Tensor out = empty_as(known);
  const SliceLayout layout = make_slices(known, grad, out, mask, dim);
  MASKWISE_AT_ISA(normalize_backward(known.scalar_type(), p, eps, layout, known.const_data_ptr(),
                                     grad.const_data_ptr(), mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

Tensor standardize_backward(const Tensor& grad, const Tensor& known, const Tensor& mask, Dims dim, double correction,
                            double eps) {
  Tensor out = empty_as(known);
  const SliceLayout layout = make_slices(known, grad, out, mask, dim);
  MASKWISE_AT_ISA(standardize_backward(known.scalar_type(), correction, eps, layout, known.const_data_ptr(),
                                       grad.const_data_ptr(), mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
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
