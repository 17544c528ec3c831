// The scans as registered ops. Arguments were checked in Python: dim holds one dim, not negative, the mask is bool and
// broadcasts to x, and the capability table knows that the dtype is served.
#include "scan_loops.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "scan_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor scan(const Scan& kernel, const Tensor& x, const Tensor& mask, ScalarType dtype, const Dims& dim) {
  Tensor out = new_like(x, dtype);
  run_scan(kernel, ScanLoops({&x, &mask, &out}, kernel.bytes, dim));
  return out;
}

Tensor cumsum(const Tensor& x, const Tensor& mask, Dims dim) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(cumsum(dtype)), x, mask, is_floating(dtype) ? dtype : ScalarType::Long, dim);
}

Tensor cumprod(const Tensor& x, const Tensor& mask, Dims dim) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(cumprod(dtype)), x, mask, is_floating(dtype) ? dtype : ScalarType::Long, dim);
}

Tensor logcumsumexp(const Tensor& x, const Tensor& mask, Dims dim) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(logcumsumexp(dtype)), x, mask, dtype, dim);
}

std::tuple<Tensor, Tensor> extreme(const Scan& kernel, const Tensor& x, const Tensor& mask, const Dims& dim) {
  Tensor places = new_like(x, ScalarType::Long);
  Tensor values = new_like(x, x.scalar_type());
  run_scan(kernel, ScanLoops({&x, &mask, &places, &values}, kernel.bytes, dim));
  return {values, places};
}

std::tuple<Tensor, Tensor> cummax(const Tensor& x, const Tensor& mask, Dims dim) {
  return extreme(MASKWISE_AT_ISA(cummax(x.scalar_type())), x, mask, dim);
}

std::tuple<Tensor, Tensor> cummin(const Tensor& x, const Tensor& mask, Dims dim) {
  return extreme(MASKWISE_AT_ISA(cummin(x.scalar_type())), x, mask, dim);
}

Tensor cumsum_backward(const Tensor& grad, const Tensor& mask, Dims dim) {
  const ScalarType dtype = grad.scalar_type();
  return scan(MASKWISE_AT_ISA(cumsum_backward(dtype)), grad, mask, dtype, dim);
}

Tensor fold_backward(const Scan& kernel, const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out,
                     const Dims& dim) {
  Tensor result = new_like(x, x.scalar_type());
  run_scan(kernel, ScanLoops({&grad, &x, &mask, &out, &result}, kernel.bytes, dim));
  return result;
}

Tensor cumprod_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out, Dims dim) {
  return fold_backward(MASKWISE_AT_ISA(cumprod_backward(x.scalar_type())), grad, x, mask, out, dim);
}

Tensor logcumsumexp_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out, Dims dim) {
  return fold_backward(MASKWISE_AT_ISA(logcumsumexp_backward(x.scalar_type())), grad, x, mask, out, dim);
}

Tensor cumextreme_backward(const Tensor& grad, const Tensor& places, Dims dim) {
  const ScalarType dtype = grad.scalar_type();
  Tensor result = new_like(grad, dtype);
  const int bytes[] = {static_cast<int>(grad.element_size()), 8, static_cast<int>(grad.element_size())};
  const ScanLoops loops({&grad, &places, &result}, bytes, dim);
  if (loops.count > 0 && loops.steps.size > 0) MASKWISE_AT_ISA(cumextreme_backward(dtype, loops));
  return result;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("cumsum_fused", TORCH_BOX(&maskwise::cumsum));
  m.impl("cumsum_fused_forward", TORCH_BOX(&maskwise::cumsum));
  m.impl("cumprod_fused", TORCH_BOX(&maskwise::cumprod));
  m.impl("cumprod_fused_forward", TORCH_BOX(&maskwise::cumprod));
  m.impl("cummax_fused", TORCH_BOX(&maskwise::cummax));
  m.impl("cummax_fused_forward", TORCH_BOX(&maskwise::cummax));
  m.impl("cummin_fused", TORCH_BOX(&maskwise::cummin));
  m.impl("cummin_fused_forward", TORCH_BOX(&maskwise::cummin));
  m.impl("logcumsumexp_fused", TORCH_BOX(&maskwise::logcumsumexp));
  m.impl("logcumsumexp_fused_forward", TORCH_BOX(&maskwise::logcumsumexp));
  m.impl("cumsum_backward", TORCH_BOX(&maskwise::cumsum_backward));
  m.impl("cumprod_backward", TORCH_BOX(&maskwise::cumprod_backward));
  m.impl("cumextreme_backward", TORCH_BOX(&maskwise::cumextreme_backward));
  m.impl("logcumsumexp_backward", TORCH_BOX(&maskwise::logcumsumexp_backward));
}
