// The scans as registered ops. Arguments were checked in Python: dim holds one dim, not negative, the mask broadcasts to x
// and is bool, or holds the bounds of intervals along the dim `along`; the capability table knows that the dtype is served.
#include "scan_columns.h"
#include "scan_rows.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "scan_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

// The gradients are zeros before the first kept step.
void run_scan(const Scan& scan, const ScanLoops& loops, const Tensor& out) {
  if (loops.count == 0 || loops.steps.size == 0) return;
  const int result = scan.operands - 1;
  const FreshPages pages(out, scan.reverse);
  if (over_columns(loops, result, scan.bytes[result]))
    scan_columns(scan, loops, pages);
  else
    scan_rows(scan, loops, pages);
}

Tensor scan(const Scan& kernel, const Tensor& x, const Tensor& mask, ScalarType dtype, const Dims& dim, int64_t along) {
  Tensor out = new_like(x, dtype);
  run_scan(kernel, ScanLoops({&x, &mask, &out}, kernel.bytes, dim, kernel.mask, along), out);
  return out;
}

Tensor cumsum(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(cumsum(dtype)), x, mask, is_floating(dtype) ? dtype : ScalarType::Long, dim, along);
}

Tensor cumprod(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(cumprod(dtype)), x, mask, is_floating(dtype) ? dtype : ScalarType::Long, dim, along);
}

Tensor logcumsumexp(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = x.scalar_type();
  return scan(MASKWISE_AT_ISA(logcumsumexp(dtype)), x, mask, dtype, dim, along);
}

std::tuple<Tensor, Tensor> extreme(const Scan& kernel, const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along) {
  Tensor places = new_like(x, ScalarType::Long);
  Tensor values = new_like(x, x.scalar_type());
  run_scan(kernel, ScanLoops({&x, &mask, &places, &values}, kernel.bytes, dim, kernel.mask, along), values);
  return {values, places};
}

std::tuple<Tensor, Tensor> cummax(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  return extreme(MASKWISE_AT_ISA(cummax(x.scalar_type())), x, mask, dim, along);
}

std::tuple<Tensor, Tensor> cummin(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  return extreme(MASKWISE_AT_ISA(cummin(x.scalar_type())), x, mask, dim, along);
}

Tensor cumsum_backward(const Tensor& grad, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = grad.scalar_type();
  return scan(MASKWISE_AT_ISA(cumsum_backward(dtype)), grad, mask, dtype, dim, along);
}

Tensor fold_backward(const Scan& kernel, const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out,
                     const Dims& dim, int64_t along) {
  Tensor result = new_like(x, x.scalar_type());
  run_scan(kernel, ScanLoops({&grad, &x, &mask, &out, &result}, kernel.bytes, dim, kernel.mask, along), result);
  return result;
}

Tensor cumprod_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out, Dims dim, int64_t along) {
  return fold_backward(MASKWISE_AT_ISA(cumprod_backward(x.scalar_type())), grad, x, mask, out, dim, along);
}

Tensor logcumsumexp_backward(const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& out, Dims dim, int64_t along) {
  return fold_backward(MASKWISE_AT_ISA(logcumsumexp_backward(x.scalar_type())), grad, x, mask, out, dim, along);
}

Tensor cumextreme_backward(const Tensor& grad, const Tensor& places, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = grad.scalar_type();
  Tensor result = new_like(grad, dtype);
  const int size = static_cast<int>(grad.element_size());
  const int bytes[] = {size, sizeof(int64_t), 1, size};
  const ScanLoops loops({&grad, &places, &mask, &result}, bytes, dim, 2, along);
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
