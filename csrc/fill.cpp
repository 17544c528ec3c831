// Filling, and the copy of a transposed tensor, as registered ops. Arguments were checked in Python: the mask is bool, the
// value has x's dtype, and both broadcast to x.
#include "elementwise.h"

#define MASKWISE_KERNELS "fill_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor fill(const Tensor& x, const Tensor& mask, const Tensor& value, int64_t along) {
  Tensor out = new_like(x, x.scalar_type());
  const int bytes = static_cast<int>(x.element_size());
  const ElementOperands operands{4, {bytes, 1, bytes, bytes}, {true, true, true, false}, 1, false};
  const auto kernel = MASKWISE_AT_ISA(fill_of(bytes));
  Elementwise({&x, &mask, &value, &out}, operands, along)
      .for_each(FreshPages(out, is_zero(value)),
                [&](int64_t, Kept kept, char* const* at, const int64_t* stride, int64_t n) { kernel(kept, at, stride, n); });
  return out;
}

// A contiguous copy of x, whatever its strides: transposed tile by tile.
Tensor copy_transposed(const Tensor& x) {
  const auto sizes = x.sizes();
  Tensor out = empty_cpu(std::vector<int64_t>(sizes.begin(), sizes.end()), x.scalar_type());
  const int bytes = static_cast<int>(x.element_size());
  const ElementOperands operands{3, {bytes, 1, bytes}, {false, true, false}, 1, false};
  ElementLoops loops = make_loops<kElementOperands>(x, {{&x, bytes}, {nullptr}, {&out, bytes}});
  const Mask all(kAllKept.bytes);
  char* const data[] = {static_cast<char*>(const_cast<void*>(x.const_data_ptr())),
                        reinterpret_cast<char*>(const_cast<uint8_t*>(all.data)),
                        static_cast<char*>(out.mutable_data_ptr())};
  Elementwise(std::move(loops), operands, all, data, 2)
      .for_each(FreshPages(out, false), [&](int64_t, Kept, char* const* at, const int64_t*, int64_t n) {
        std::memcpy(at[2], at[0], n * bytes);
      });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("fill_fused", TORCH_BOX(&maskwise::fill));
  m.impl("fill_fused_forward", TORCH_BOX(&maskwise::fill));
  m.impl("copy_transposed", TORCH_BOX(&maskwise::copy_transposed));
}
