// What the order family has outside of the SIMD levels: its loop nest, and the one entry that is not an integer, so
// that the standard algorithms on it are compiled for every CPU.
#pragma once

#include "loops.h"

#include <cstdlib>
#include <memory>

namespace maskwise {

// The loops over slices and within one. Operands are x in elements, its mask, and the position along its intervals.
struct OrderNest : Nest<3> {
  enum : int { kX, kMask, kPosition };
  Mask mask;

  OrderNest(const Tensor& x, const Tensor& kept, int64_t along, const Dims& dims) : mask(kept, along, x) {
    static_cast<Nest<3>&>(*this) = make_nest<3>(x, {{&x}, mask.operand, mask.position}, dims, -1, &mask, kMask);
  }
};

// A 64-bit key and the place that it came from.
struct WideEntry {
  uint64_t key;
  int64_t place;
};
inline bool operator<(const WideEntry& a, const WideEntry& b) {
  return a.key < b.key || (a.key == b.key && a.place < b.place);
}
inline bool operator==(const WideEntry& a, const WideEntry& b) { return a.key == b.key && a.place == b.place; }

// What stands behind the last value of a slice: zero, or for topk the value that loses against every other.
enum class Padding { zero, least, greatest };

// What to write for each slice: its n least entries, n = size; values may be null.
struct Ordered {
  void* values;
  int64_t* indices;
  int64_t size;   // results a slice
  int64_t inner;  // how far apart the results of a slice are: the product of the sizes behind the dim
  bool descending;

  int64_t start(int64_t slice) const { return slice / inner * size * inner + slice % inner; }
};

// For each of the 256 choices among eight lanes: the lanes that are chosen, in order.
struct LaneTable {
  uint8_t lanes[256][8];
};
constexpr LaneTable make_lane_table() {
  LaneTable table{};
  for (int bits = 0; bits < 256; ++bits) {
    int n = 0;
    for (int lane = 0; lane < 8; ++lane)
      if (bits >> lane & 1) table.lanes[bits][n++] = static_cast<uint8_t>(lane);
  }
  return table;
}
alignas(64) inline constexpr LaneTable kLaneTable = make_lane_table();

}  // namespace maskwise
