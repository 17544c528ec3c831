// The one entry of the order family that is not an integer. Outside of the SIMD levels, so that the standard algorithms
// on it are compiled for every CPU.
#pragma once

#include "common.h"

#include <cstdlib>
#include <memory>

namespace maskwise {

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
