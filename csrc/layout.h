// How a reduction walks through memory. Computed once a call from sizes, strides and dims; knows nothing of types.
#pragma once

#include "common.h"
#include "transpose.h"

namespace maskwise {

// One loop: how often, and how far x and the mask move each time. Strides are in elements; a mask stride of 0 is
// broadcasting, so a broadcast mask is never materialised.
struct Loop {
  int64_t size;
  int64_t x;
  int64_t mask;
};

// The loops over what is kept (outer to inner, in the order of the output) and over what is reduced.
struct Layout {
  std::vector<Loop> kept;
  std::vector<Loop> reduced;
  int64_t outputs = 1;  // product of kept sizes
  int64_t length = 1;   // product of reduced sizes: elements behind one output
};

// Drops loops of size 1 and merges neighbours that step through memory as one loop would.
inline void coalesce(std::vector<Loop>& loops) {
  std::vector<Loop> merged;
  for (const Loop& loop : loops) {
    if (loop.size == 1) continue;
    if (!merged.empty()) {
      Loop& last = merged.back();
      if (last.x == loop.x * loop.size && last.mask == loop.mask * loop.size) {
        last = {last.size * loop.size, loop.x, loop.mask};
        continue;
      }
    }
    merged.push_back(loop);
  }
  loops = std::move(merged);
}

// `mask` has at most x's dims and lines up from the right, as torch broadcasts.
template <class Ref>
Layout make_layout(const Tensor& x, const Tensor& mask, const Ref& dims) {
  Layout layout;
  const int64_t ndim = x.dim();
  const int64_t shift = ndim - mask.dim();
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const auto mask_sizes = mask.sizes();
  const auto mask_strides = mask.strides();
  size_t next = 0;  // dims are sorted
  for (int64_t d = 0; d < ndim; ++d) {
    const int64_t size = sizes[d];
    const bool broadcast = d < shift || mask_sizes[d - shift] != size || size == 1;
    const Loop loop{size, strides[d], broadcast ? 0 : mask_strides[d - shift]};
    if (next < dims.size() && dims[next] == d) {
      ++next;
      layout.reduced.push_back(loop);
      layout.length *= size;
    } else {
      layout.kept.push_back(loop);
      layout.outputs *= size;
    }
  }
  coalesce(layout.kept);
  coalesce(layout.reduced);
  return layout;
}

// The sizes of the result.
template <class Ref>
std::vector<int64_t> reduced_sizes(const Tensor& x, const Ref& dims, bool keepdim) {
  std::vector<int64_t> sizes;
  const auto all = x.sizes();
  size_t next = 0;  // dims are sorted
  for (size_t d = 0; d < all.size(); ++d) {
    const bool reduced = next < dims.size() && dims[next] == static_cast<int64_t>(d);
    next += reduced;
    if (!reduced) sizes.push_back(all[d]);
    if (reduced && keepdim) sizes.push_back(1);
  }
  return sizes;
}

struct Offset {
  int64_t x = 0;
  int64_t mask = 0;
};

// Where the loops stand after `index` steps of the innermost one.
inline Offset offset_of(const std::vector<Loop>& loops, int64_t index) {
  Offset at;
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    const int64_t i = index % loop->size;
    index /= loop->size;
    at.x += i * loop->x;
    at.mask += i * loop->mask;
  }
  return at;
}

// Calls run(offset, count) for the steps [begin, end) of the loops, one call for each stretch of the innermost loop.
template <class Run>
inline void for_each_run(const std::vector<Loop>& loops, int64_t begin, int64_t end, const Run& run) {
  if (loops.empty()) {
    if (begin < end) run(Offset{}, int64_t{1});
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
