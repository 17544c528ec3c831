// How a scan walks through memory: along one dim, line by line or many lines side by side. Computed once a call from
// sizes and strides; knows nothing of types, since it counts in bytes.
#pragma once

#include "fresh.h"

namespace maskwise {

constexpr int kOperands = 5;
// Rows that a kernel may do side by side: as many as the widest vector has lanes of the narrowest accumulator.
constexpr int kRows = 16;
// Columns done side by side; what they have seen so far stays in the first-level cache.
constexpr int64_t kScanColumns = 512;
// Elements of a row that are shown at once: where every operand is read in place, and where one must be staged.
constexpr int64_t kPiece = 16384;
constexpr int64_t kStage = 512;

// A scan, compiled for one SIMD level and one dtype. Operands are given as byte pointers in the kernel's own order.
struct Scan {
  int operands;
  int written;             // the last ones are results
  int bytes[kOperands];    // of an element
  int mask;                // which operand is the mask; -1 if none
  int previous;            // which operand is also wanted one step earlier; -1 if none
  bool reverse;            // from the last step to the first
  int rows;                // how many rows `row` does side by side
  void (*start)(void* state, int64_t columns);
  // n contiguous steps of `rows` rows; at[operand * kRows + row]. `first` is the index of the first of these steps; if
  // it is not 0, the element before at[previous] can be read.
  void (*row)(void* state, char* const* at, int64_t n, int64_t first);
  // Some steps of w columns side by side, in the order of the scan: at[operand] is the first of them, `step` its index,
  // and next[operand] how far the next one is. Where an operand is wanted one step earlier, there is one step, and
  // at[kOperands] that earlier one (null at step 0).
  void (*columns)(void* state, char* const* at, const int64_t* next, int64_t w, int64_t step, int64_t count);
};

// What a kernel has seen so far: of kRows rows, or of kScanColumns columns.
struct alignas(64) ScanState {
  char bytes[kScanColumns * 32];
};

// One loop: how often, and how far each operand moves each time, in bytes. 0 is broadcasting.
struct ScanLoop {
  int64_t size = 1;
  int64_t stride[kOperands] = {};
};

struct ScanLayout {
  ScanLoop steps;               // the dim that is scanned
  std::vector<ScanLoop> lines;  // all other dims, outer to inner in the memory of the result
  int64_t count = 1;            // how many lines
  char* data[kOperands];
};

// `tensors` are the operands; the last one is a result and has the shape of the walk. Others line up with it from the
// right, as torch broadcasts.
inline ScanLayout make_scan_layout(std::initializer_list<const Tensor*> tensors, const int* bytes, int64_t dim) {
  ScanLayout layout;
  const int operands = static_cast<int>(tensors.size());
  const Tensor& result = **(tensors.end() - 1);
  const auto sizes = result.sizes();
  const int64_t ndim = result.dim();
  std::vector<ScanLoop> loops(ndim);
  int o = 0;
  for (const Tensor* tensor : tensors) {
    const auto own_sizes = tensor->sizes();
    const auto own_strides = tensor->strides();
    const int64_t shift = ndim - tensor->dim();
    for (int64_t d = 0; d < ndim; ++d) {
      loops[d].size = sizes[d];
      const bool broadcast = d < shift || own_sizes[d - shift] != sizes[d] || sizes[d] == 1;
      loops[d].stride[o] = broadcast ? 0 : own_strides[d - shift] * bytes[o];
    }
    // Results are the operands that were made for this call.
    layout.data[o] = static_cast<char*>(const_cast<void*>(tensor->const_data_ptr()));
    ++o;
  }
  for (int64_t d = 0; d < ndim; ++d) {
    if (d == dim) {
      layout.steps = loops[d];
    } else if (loops[d].size != 1) {
      layout.lines.push_back(loops[d]);
      layout.count *= loops[d].size;
    }
  }
  const int last = operands - 1;
  std::stable_sort(layout.lines.begin(), layout.lines.end(),
                   [&](const ScanLoop& a, const ScanLoop& b) { return a.stride[last] > b.stride[last]; });
  // Neighbours that step through every operand as one loop would become one.
  std::vector<ScanLoop> merged;
  for (const ScanLoop& loop : layout.lines) {
    bool joins = !merged.empty();
    for (o = 0; joins && o < operands; ++o) joins = merged.back().stride[o] == loop.stride[o] * loop.size;
    if (!joins) {
      merged.push_back(loop);
      continue;
    }
    const int64_t size = merged.back().size * loop.size;
    merged.back() = loop;
    merged.back().size = size;
  }
  layout.lines = std::move(merged);
  return layout;
}

// Where the operands of line `index` start.
inline void locate(const ScanLayout& layout, const std::vector<ScanLoop>& loops, int operands, int64_t index,
                   char** at) {
  for (int o = 0; o < operands; ++o) at[o] = layout.data[o];
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    const int64_t i = index % loop->size;
    index /= loop->size;
    for (int o = 0; o < operands; ++o) at[o] += i * loop->stride[o];
  }
}

}  // namespace maskwise
