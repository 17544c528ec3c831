// The reductions as registered ops. Arguments were checked in Python: dims are sorted, unique and not negative, the
// mask is bool and broadcasts to x, and the capability table knows that the dtype is served.
#include "layout.h"

#define MASKWISE_KERNELS "reduce_kernels.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

using Dims = std::vector<int64_t>;

Tensor sum(const Tensor& x, const Tensor& mask, Dims dim, bool keepdim) {
  const ScalarType dtype = x.scalar_type();
  const bool floating = dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                        dtype == ScalarType::BFloat16;
  const Layout layout = make_layout(x, mask, dim);
  Tensor out = empty_cpu(reduced_sizes(x, dim, keepdim), floating ? dtype : ScalarType::Long);
  MASKWISE_AT_ISA(sum(dtype, layout, x.const_data_ptr(), mask.const_data_ptr(), out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("sum_fused", TORCH_BOX(&maskwise::sum));
  m.impl("sum_fused_forward", TORCH_BOX(&maskwise::sum));
}
