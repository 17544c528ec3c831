// How a function of single elements (fill, a loss) walks through memory: in the order of its result, in stretches of the
// innermost loop. Operands that lie across it (a contiguous mask of a transposed x) are turned tile by tile; what has any
// other stride is brought together in small copies. Computed once a call; knows nothing of types, and counts in bytes.
#pragma once

#include "scan_layout.h"
#include "transpose.h"

namespace maskwise {

// Elements that one task does, whatever the number of threads: a sum over tasks is then the same for any.
constexpr int64_t kElements = 16384;
// Elements that are brought next to each other where memory has gaps.
constexpr int64_t kGathered = 512;
// Elements of a tile, and how many rows it has at least where there are as many: a cache line of mask bytes.
constexpr int64_t kTile = 4096;
constexpr int64_t kTileRows = 64;

// What is known of the operands beside the tensors.
struct ElementOperands {
  int count;              // how many are shown
  int bytes[kOperands];   // of an element
  bool spread[kOperands]; // whether one element may stand for a stretch, with a stride of 0
  int mask;               // which is the mask; where it drops a stretch as a whole, nothing else is brought together
  bool skips;             // whether such a stretch is not read
};

struct ElementWalk {
  ScanLayout layout;  // lines: all loops but the innermost and that of the rows of a tile
  ScanLoop inner;
  ScanLoop rows;      // the loop along which an operand is contiguous that lies across
  ElementOperands of;
  int64_t elements;
  bool tiled = false;
  int64_t width = 0, height = 0;  // of a tile

  // The last of the tensors is the result, and decides the order; one more than there are operands stands in for it.
  ElementWalk(std::initializer_list<const Tensor*> tensors, const ElementOperands& operands) : of(operands) {
    elements = (*(tensors.end() - 1))->numel();
    layout = make_scan_layout(tensors, of.bytes, -1);
    if (layout.lines.empty()) return;
    inner = layout.lines.back();
    layout.lines.pop_back();
    const auto across = find_rows();
    if (across == layout.lines.end()) return;
    tiled = true;
    rows = *across;
    layout.lines.erase(across);
    width = std::min(inner.size, kTile / std::min(rows.size, kTileRows));
    height = std::min(rows.size, kTile / width);
  }

  int64_t tiles() const { return ceil_div(rows.size, height) * ceil_div(inner.size, width); }

  int64_t tasks() const {
    if (elements == 0) return 0;
    return tiled ? elements / (inner.size * rows.size) * tiles() : ceil_div(elements, kElements);
  }

  // Calls run(task, at, stride, n) for every stretch: operand o has its n elements at at[o], next to each other or, if it
  // may, with a stride of 0.
  template <class Run>
  void for_each(const Run& run) const {
    parallel(tasks(), tiled ? width * height : kElements, [&](int64_t begin, int64_t end) {
      std::unique_ptr<char[]> room;
      const int64_t most = tiled ? kTile : kGathered;
      char* places[kOperands];
      if (const int64_t needed = room_for(most); needed > 0) {
        room.reset(new char[needed]);
        char* next = room.get();
        for (int o = 0; o < of.count; ++o) {
          places[o] = next;
          if (gathered(o)) next += most * of.bytes[o];
        }
      }
      for (int64_t task = begin; task < end; ++task) {
        if (tiled)
          tile(task, places, run);
        else
          stretches(task, places, run);
      }
    });
  }

 private:
  // Whether an operand must be copied before it is shown.
  bool gathered(int o) const {
    return inner.stride[o] != of.bytes[o] && !(inner.stride[o] == 0 && of.spread[o]) && inner.size != 1;
  }

  int64_t room_for(int64_t most) const {
    int64_t bytes = 0;
    for (int o = 0; o < of.count; ++o) bytes += gathered(o) ? most * of.bytes[o] : 0;
    return bytes;
  }

  // The loop along which an operand that must be copied is contiguous; the widest operand decides, where there are more.
  std::vector<ScanLoop>::iterator find_rows() {
    auto found = layout.lines.end();
    int widest = 0;
    for (int o = 0; o < of.count; ++o) {
      if (!gathered(o) || of.bytes[o] <= widest) continue;
      for (auto loop = layout.lines.begin(); loop != layout.lines.end(); ++loop) {
        if (loop->stride[o] != of.bytes[o]) continue;
        found = loop;
        widest = of.bytes[o];
      }
    }
    return found;
  }

  template <class Run>
  void stretches(int64_t task, char* const* places, const Run& run) const {
    const int64_t end = std::min(elements, (task + 1) * kElements);
    for (int64_t index = task * kElements, n = 0; index < end; index += n) {
      const int64_t step = index % inner.size;
      n = std::min(inner.size - step, end - index);
      char* at[kOperands];
      int64_t stride[kOperands];
      locate(layout, layout.lines, of.count, index / inner.size, at);
      for (int o = 0; o < of.count; ++o) at[o] += step * inner.stride[o];
      const bool skipped = of.skips && inner.stride[of.mask] == 0 && *at[of.mask] == 0;
      if (!skipped)
        for (int o = 0; o < of.count; ++o)
          if (gathered(o)) n = std::min(n, kGathered);
      for (int o = 0; o < of.count; ++o) {
        stride[o] = inner.stride[o] == 0 && of.spread[o] ? 0 : of.bytes[o];
        if (!gathered(o) || skipped) continue;
        copy_strided(of.bytes[o], places[o], of.bytes[o], at[o], inner.stride[o], n);
        at[o] = places[o];
      }
      run(task, at, stride, n);
    }
  }

  template <class Run>
  void tile(int64_t task, char* const* places, const Run& run) const {
    const int64_t beside = ceil_div(inner.size, width);
    const int64_t column = task % tiles() % beside * width, row = task % tiles() / beside * height;
    const int64_t w = std::min(width, inner.size - column), h = std::min(height, rows.size - row);
    char* at[kOperands];
    int64_t stride[kOperands], down[kOperands];
    locate(layout, layout.lines, of.count, task / tiles(), at);
    // Rows that follow each other in every operand are one stretch.
    bool whole = true;
    for (int o = 0; o < of.count; ++o) {
      const int bytes = of.bytes[o];
      at[o] += row * rows.stride[o] + column * inner.stride[o];
      stride[o] = inner.stride[o] == 0 && of.spread[o] ? 0 : bytes;
      down[o] = rows.stride[o];
      if (gathered(o)) {
        down[o] = w * bytes;
        if (rows.stride[o] == bytes)
          transpose_tile(bytes, at[o], inner.stride[o], h, w, places[o], down[o]);
        else
          for (int64_t r = 0; r < h; ++r)
            copy_strided(bytes, places[o] + r * down[o], bytes, at[o] + r * rows.stride[o], inner.stride[o], w);
        at[o] = places[o];
      }
      whole = whole && down[o] == w * stride[o];
    }
    if (whole) return run(task, at, stride, h * w);
    for (int64_t r = 0; r < h; ++r) {
      run(task, at, stride, w);
      for (int o = 0; o < of.count; ++o) at[o] += down[o];
    }
  }
};

}  // namespace maskwise
