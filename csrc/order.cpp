// Sort, argsort and topk as registered ops, and the gradient of all three. Arguments were checked in Python: dim holds
// one dim that is not negative, the mask broadcasts to x, k is not above the size of the dim.
#include "order_entry.h"

#define MASKWISE_KERNELS "order_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

// The sizes of a tensor, with another size at the dim.
std::vector<int64_t> resized(const Tensor& x, int64_t dim, int64_t size) {
  const auto sizes = x.sizes();
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  if (!out.empty()) out[dim] = size;
  return out;
}

int64_t inner_of(const Tensor& x, int64_t dim) {
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < x.dim(); ++d) inner *= x.size(d);
  return inner;
}

void run(const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along, bool best, int64_t size, bool descending,
         Tensor* values, Tensor& indices) {
  const OrderNest nest(x, mask, along, dim);
  if (nest.slices == 0) return;
  const ScalarType dtype = x.scalar_type();
  const void* xs = x.const_data_ptr();
  void* vs = values == nullptr ? nullptr : values->mutable_data_ptr();
  auto* is = static_cast<int64_t*>(indices.mutable_data_ptr());
  const int64_t inner = inner_of(x, dim[0]);
  MASKWISE_AT_ISA(order(dtype, best, nest, xs, {vs, is, size, inner, descending}));
}

int64_t size_of(const Tensor& x, int64_t dim) { return x.dim() == 0 ? 1 : x.size(dim); }

std::tuple<Tensor, Tensor> sort(const Tensor& x, const Tensor& mask, Dims dim, bool descending, int64_t along) {
  const int64_t size = size_of(x, dim[0]);
  const std::vector<int64_t> sizes = resized(x, dim[0], size);
  Tensor values = empty_cpu(sizes, x.scalar_type());
  Tensor indices = empty_cpu(sizes, ScalarType::Long);
  run(x, mask, dim, along, false, size, descending, &values, indices);
  return {values, indices};
}

Tensor argsort(const Tensor& x, const Tensor& mask, Dims dim, bool descending, int64_t along) {
  const int64_t size = size_of(x, dim[0]);
  Tensor indices = empty_cpu(resized(x, dim[0], size), ScalarType::Long);
  run(x, mask, dim, along, false, size, descending, nullptr, indices);
  return indices;
}

std::tuple<Tensor, Tensor> topk(const Tensor& x, const Tensor& mask, Dims dim, int64_t k, bool largest,
                                int64_t along) {
  const std::vector<int64_t> sizes = resized(x, dim[0], k);
  Tensor values = empty_cpu(sizes, x.scalar_type());
  Tensor indices = empty_cpu(sizes, ScalarType::Long);
  // x of no dims has one value, and torch gives it whether k is 0 or 1.
  run(x, mask, dim, along, true, x.dim() == 0 ? 1 : k, largest, &values, indices);
  return {values, indices};
}

// Puts each gradient back to where its value came from; zero elsewhere. Moves bits, so a type is its size.
template <class Bits>
void scatter(const Nest<2>& nest, const Bits* grad, const int64_t* indices, Bits* out, int64_t size, int64_t inner) {
  const Loop<2> along = innermost(nest.inner);
  const int64_t width = std::min<int64_t>(inner, 16);
  const int64_t each = ceil_div(inner, width);
  parallel_uneven(nest.slices / inner * each, (nest.length + size) * width, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t column = b % each * width;
      const int64_t w = std::min(width, inner - column);
      Bits* to = out + b / each * size * inner + column;
      for (int64_t r = 0; inner > 1 && r < size; ++r) std::memset(to + r * inner, 0, w * sizeof(Bits));
      if (inner == 1) std::memset(to, 0, size * sizeof(Bits));
      int64_t g[16], i[16];
      for (int64_t j = 0; j < w; ++j) {
        const Offset<2> at = offset_of(nest.outer, b / each * inner + column + j);
        g[j] = at[0];
        i[j] = at[1];
      }
      for (int64_t r = 0; r < nest.length; ++r) {
        int64_t none = 0;
        for (int64_t j = 0; j < w; ++j) {
          const int64_t place = indices[i[j] + r * along.stride[1]];
          if (place >= 0)
            to[place * inner + j] = grad[g[j] + r * along.stride[0]];
          else
            ++none;
        }
        // What is kept comes first, so behind a row of nothing there is nothing.
        if (none == w) break;
      }
    }
  });
}

Tensor order_scatter(const Tensor& grad, const Tensor& indices, Dims dim, int64_t size) {
  Tensor out = empty_cpu(resized(grad, dim[0], size), grad.scalar_type());
  const Nest<2> nest = make_nest<2>(grad, {{&grad}, {&indices}}, dim);
  const int64_t inner = inner_of(grad, dim[0]);
  if (nest.slices == 0 || size == 0) return out;
  const auto* is = static_cast<const int64_t*>(indices.const_data_ptr());
  dispatch_bytes(grad.element_size(), [&](auto bits) {
    using Bits = decltype(bits);
    scatter(nest, static_cast<const Bits*>(grad.const_data_ptr()), is, static_cast<Bits*>(out.mutable_data_ptr()), size,
            inner);
  });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("sort_fused", TORCH_BOX(&maskwise::sort));
  m.impl("sort_fused_forward", TORCH_BOX(&maskwise::sort));
  m.impl("argsort_fused", TORCH_BOX(&maskwise::argsort));
  m.impl("argsort_fused_forward", TORCH_BOX(&maskwise::argsort));
  m.impl("topk_fused", TORCH_BOX(&maskwise::topk));
  m.impl("topk_fused_forward", TORCH_BOX(&maskwise::topk));
  m.impl("order_scatter", TORCH_BOX(&maskwise::order_scatter));
}
