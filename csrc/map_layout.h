// How a gradient walks through memory: over all of x in the order of a contiguous result, with the output that each
// element went into. Computed once a call; knows nothing of types.
#pragma once

#include "layout.h"

namespace maskwise {

// One loop: how often, and how far x, the mask and the output move each time; 0 along what is broadcast or reduced.
struct MapLoop {
  int64_t size;
  int64_t x;
  int64_t mask;
  int64_t param;
};

struct MapOffset {
  int64_t x = 0;
  int64_t mask = 0;
  int64_t param = 0;
};

struct MapLayout {
  std::vector<MapLoop> outer;
  MapLoop inner{1, 1, 1, 1};
  int64_t stretches = 1;  // product of the outer sizes

  MapOffset offset_of(int64_t index) const {
    MapOffset at;
    for (auto loop = outer.rbegin(); loop != outer.rend(); ++loop) {
      const int64_t i = index % loop->size;
      index /= loop->size;
      at.x += i * loop->x;
      at.mask += i * loop->mask;
      at.param += i * loop->param;
    }
    return at;
  }
};

// As make_layout: `mask` lines up with x from the right, `dims` are the reduced ones, sorted.
template <class Ref>
MapLayout make_map_layout(const Tensor& x, const Tensor& mask, const Ref& dims) {
  MapLayout map;
  const int64_t ndim = x.dim();
  const int64_t shift = ndim - mask.dim();
  std::vector<MapLoop> loops;
  int64_t param = 1;
  for (int64_t d = ndim; d-- > 0;) {
    const int64_t size = x.sizes()[d];
    const bool broadcast = d < shift || mask.sizes()[d - shift] != size || size == 1;
    const bool reduced = std::find(dims.begin(), dims.end(), d) != dims.end();
    const MapLoop loop{size, x.strides()[d], broadcast ? 0 : mask.strides()[d - shift], reduced ? 0 : param};
    if (!reduced) param *= size;
    if (size == 1) continue;
    if (!loops.empty()) {
      MapLoop& last = loops.back();
      if (loop.x == last.x * last.size && loop.mask == last.mask * last.size && loop.param == last.param * last.size) {
        last.size *= size;
        continue;
      }
    }
    loops.push_back(loop);
  }
  if (!loops.empty()) {
    map.inner = loops.front();
    map.outer.assign(loops.rbegin(), loops.rend() - 1);
  }
  for (const MapLoop& loop : map.outer) map.stretches *= loop.size;
  return map;
}

}  // namespace maskwise
