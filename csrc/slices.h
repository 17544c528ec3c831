// How a function that maps slices to slices (softmax, normalize) walks through memory. Computed once a call from sizes,
// strides and dims; knows nothing of types.
#pragma once

#include "fresh.h"
#include "transpose.h"

namespace maskwise {

// One loop: how often, and how far each operand moves each time, in elements. A mask step of 0 is broadcasting.
struct SliceLoop {
  int64_t size;
  int64_t x, grad, out, mask;

  bool touches() const { return x == 1 && grad == 1 && out == 1; }
};

struct SliceOffset {
  int64_t x = 0, grad = 0, out = 0, mask = 0;

  void move(const SliceLoop& loop, int64_t steps) {
    x += steps * loop.x;
    grad += steps * loop.grad;
    out += steps * loop.out;
    mask += steps * loop.mask;
  }
};

// The loops over the slices, and within one; outer to inner.
struct SliceLayout {
  std::vector<SliceLoop> over, within;
  int64_t slices = 1;
  int64_t length = 1;
};

inline bool one_loop(const SliceLoop& outer, const SliceLoop& inner) {
  return outer.x == inner.x * inner.size && outer.grad == inner.grad * inner.size &&
         outer.out == inner.out * inner.size && outer.mask == inner.mask * inner.size;
}

// Drops loops of size 1, puts those that move far in memory outside, and merges those that step as one loop would. Which
// slice comes first is of no matter, nor which element of it.
inline void coalesce(std::vector<SliceLoop>& loops) {
  std::vector<SliceLoop> merged;
  loops.erase(std::remove_if(loops.begin(), loops.end(), [](const SliceLoop& loop) { return loop.size == 1; }),
              loops.end());
  std::stable_sort(loops.begin(), loops.end(),
                   [](const SliceLoop& a, const SliceLoop& b) { return a.out > b.out; });
  for (const SliceLoop& loop : loops) {
    if (!merged.empty() && one_loop(merged.back(), loop))
      merged.back() = {merged.back().size * loop.size, loop.x, loop.grad, loop.out, loop.mask};
    else
      merged.push_back(loop);
  }
  loops = std::move(merged);
}

// `grad` is x itself where there is none. `mask` has at most x's dims and lines up from the right, as torch broadcasts;
// `dims` are sorted.
inline SliceLayout make_slices(const Tensor& x, const Tensor& grad, const Tensor& out, const Tensor& mask,
                               const std::vector<int64_t>& dims) {
  SliceLayout layout;
  const int64_t ndim = x.dim();
  const int64_t shift = ndim - mask.dim();
  const auto sizes = x.sizes(), mask_sizes = mask.sizes();
  const auto xs = x.strides(), gs = grad.strides(), os = out.strides(), ms = mask.strides();
  size_t next = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    const int64_t size = sizes[d];
    const bool broadcast = d < shift || mask_sizes[d - shift] != size || size == 1;
    const SliceLoop loop{size, xs[d], gs[d], os[d], broadcast ? 0 : ms[d - shift]};
    const bool inside = next < dims.size() && dims[next] == d;
    next += inside;
    (inside ? layout.within : layout.over).push_back(loop);
    (inside ? layout.length : layout.slices) *= size;
  }
  coalesce(layout.over);
  coalesce(layout.within);
  return layout;
}

// Where the loops stand after `index` steps of the innermost one.
inline SliceOffset offset_of(const std::vector<SliceLoop>& loops, int64_t index) {
  SliceOffset at;
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    at.move(*loop, index % loop->size);
    index /= loop->size;
  }
  return at;
}

// Calls run(offset, count) for the steps [begin, end) of the loops, one call for each stretch of the innermost loop.
template <class Run>
inline void for_each_run(const std::vector<SliceLoop>& loops, int64_t begin, int64_t end, const Run& run) {
  if (loops.empty()) {
    if (begin < end) run(SliceOffset{}, int64_t{1});
    return;
  }
  const int64_t inner = loops.back().size;
  while (begin < end) {
    const int64_t count = std::min(inner - begin % inner, end - begin);
    run(offset_of(loops, begin), count);
    begin += count;
  }
}

}  // namespace maskwise
