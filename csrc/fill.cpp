// Filling as a registered op. Arguments were checked in Python: the mask is bool, the value has x's dtype, and both
// broadcast to x.
#include "elementwise.h"

#define MASKWISE_KERNELS "fill_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor fill(const Tensor& x, const Tensor& mask, const Tensor& value) {
  Tensor out = new_like(x, x.scalar_type());
  const int bytes = static_cast<int>(x.element_size());
  const ElementOperands operands{4, {bytes, 1, bytes, bytes}, {true, true, true, false}, 1, false};
  const auto kernel = MASKWISE_AT_ISA(fill_of(bytes));
  Elementwise({&x, &mask, &value, &out}, operands)
      .for_each([&](int64_t, Kept kept, char* const* at, const int64_t* stride, int64_t n) { kernel(kept, at, stride, n); });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("fill_fused", TORCH_BOX(&maskwise::fill));
  m.impl("fill_fused_forward", TORCH_BOX(&maskwise::fill));
}
