// Filling as a registered op. Arguments were checked in Python: the mask is bool, the value has x's dtype, and both
// broadcast to x.
#include "scan_layout.h"

#define MASKWISE_KERNELS "fill_kernels.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

Tensor fill(const Tensor& x, const Tensor& mask, const Tensor& value) {
  Tensor out = new_like(x, x.scalar_type());
  const int bytes = static_cast<int>(x.element_size());
  const int sizes[] = {bytes, 1, bytes, bytes};
  // No dim is scanned: all are lines.
  ScanLayout layout = make_scan_layout({&x, &mask, &value, &out}, sizes, -1);
  if (layout.count == 0) return out;
  ScanLoop inner;
  if (!layout.lines.empty()) {
    inner = layout.lines.back();
    layout.lines.pop_back();
  }
  const auto run = MASKWISE_AT_ISA(fill_of(bytes));
  constexpr int64_t kBlock = 16384;
  const int64_t blocks = ceil_div(inner.size, kBlock);
  parallel(layout.count / inner.size * blocks, std::min(kBlock, inner.size), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      char* at[kOperands];
      locate(layout, layout.lines, 4, task / blocks, at);
      const int64_t first = task % blocks * kBlock;
      for (int o = 0; o < 4; ++o) at[o] += first * inner.stride[o];
      run(at, inner.stride, std::min(kBlock, inner.size - first));
    }
  });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("fill_fused", TORCH_BOX(&maskwise::fill));
  m.impl("fill_fused_forward", TORCH_BOX(&maskwise::fill));
}
