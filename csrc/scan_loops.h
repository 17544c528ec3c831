// What the loops of scans share: the table of functions that a kernel is, the loop nest, and the buffers of operands that
// do not lie as the kernel wants them. Counts in bytes, knows nothing of types.
#pragma once

#include "loops.h"
#include "zero_pages.h"

namespace maskwise {

// At most so many, and the position along the intervals of the mask.
constexpr int kOperands = 5;
constexpr int kScanPosition = kOperands;
// Rows that a kernel may do side by side: as many as the widest vector has lanes of the narrowest accumulator.
constexpr int kRows = 16;
// Columns done side by side; their states stay in the first-level cache.
constexpr int64_t kScanColumns = 512;
// Elements that are gathered at a time.
constexpr int64_t kStage = 512;

using ScanLoop = Loop<kOperands + 1>;

// A scan, compiled for one SIMD level and one dtype. Operands are given as byte pointers in the kernel's own order. A state
// has room for kScanColumns columns, or for the lanes of `rows` rows.
struct Scan {
  int operands;
  int written;             // the last ones are results
  int bytes[kOperands];    // of an element
  int mask;                // which operand is the mask
  int x;                   // which operand counts only where it is kept; -1 if none
  int previous;            // which operand is also wanted one step earlier; -1 if none
  bool reverse;            // from the last step to the first, as gradients are; these are 0 where dropped
  int rows;                // how many rows `row` does side by side
  void (*init)(void* state, int64_t begin, int64_t end);
  // n contiguous steps of `rows` rows, a multiple of `rows`; at[operand * kRows + row]. first[row] is the index of the
  // first of these steps; if it is not 0, the element before at[previous] can be read.
  void (*row)(void* state, char* const* at, int64_t n, const int64_t* first);
  // The same for n[row] steps of each row, fewer than `rows`.
  void (*tail)(void* state, char* const* at, const int64_t* n, const int64_t* first);
  // n dropped steps of one row, at[operand]: a scan repeats its value, without reading x; a gradient is read, and is 0.
  void (*drop)(void* state, int row, char* const* at, int64_t n);
  // Some steps of the columns [begin, end), in the order of the scan: at[operand] is column 0 of the first of them, `step`
  // its index, and next[operand] how far the next one is. Where an operand is wanted one step earlier, there is one step,
  // and at[kOperands] that earlier one (null at step 0).
  void (*columns)(void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t step,
                  int64_t count);
  // The same for columns of which nothing is kept in these steps.
  void (*drop_columns)(void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t count);

  constexpr int results() const { return operands - written; }
};

// What a kernel has accumulated: of kRows rows, or of kScanColumns columns.
struct alignas(64) ScanState {
  char bytes[kScanColumns * 32];
};

// The loops of a scan. The last operand is a result: it has the shape of the loops, which follow its memory.
struct ScanLoops {
  Mask mask;
  ScanLoop steps;               // the dim that is scanned
  Loops<kOperands + 1> lines;   // all other dims
  int64_t count;                // how many lines
  char* data[kOperands];

  // `kept` is the operand that is the mask, and `along` the dim of its intervals.
  ScanLoops(std::initializer_list<const Tensor*> tensors, const int* bytes, const Dims& dim, int kept, int64_t along)
      : mask(*tensors.begin()[kept], along, **(tensors.end() - 1)) {
    Operand operands[kOperands + 1] = {};
    int o = 0;
    for (const Tensor* tensor : tensors) {
      operands[o] = {tensor, bytes[o]};
      // Results are the operands that were made for this call.
      data[o++] = static_cast<char*>(const_cast<void*>(tensor->const_data_ptr()));
    }
    operands[kept] = mask.operand;
    operands[kScanPosition] = mask.position;
    auto nest = make_nest(**(tensors.end() - 1), operands, dim, o - 1, &mask, kept);
    if (!nest.inner.empty()) steps = nest.inner.back();
    lines = std::move(nest.outer);
    count = nest.slices;
  }

  // Where the operands of line `index` start, of all lines or of some outer loops; returns its position.
  int64_t locate(const Loops<kOperands + 1>& loops, int operands, int64_t index, char** at) const {
    const auto offset = offset_of(loops, index);
    for (int o = 0; o < operands; ++o) at[o] = data[o] + offset[o];
    return offset[kScanPosition];
  }
};

// How operands are read and written: in place, or through a buffer.
struct Staging {
  bool direct[kOperands];
  bool all = true;
  std::unique_ptr<char[]> buffer;

  // `loop` is the one that the kernel runs along; `copies` is how many buffers of kStage elements an operand may need.
  Staging(const Scan& scan, const Mask& mask, const ScanLoop& loop, int copies) {
    for (int o = 0; o < scan.operands; ++o) {
      direct[o] = loop.stride[o] == scan.bytes[o] && !(o == scan.mask && mask.has_intervals());
      // What is the same along the run needs no buffer.
      all = all && (direct[o] || (o == scan.mask && loop.stride[o] == 0));
    }
    if (!all || mask.has_intervals()) buffer.reset(new char[static_cast<size_t>(copies) * kOperands * kPlace]);
  }
  // kStage elements of 8 bytes, after one more that stands before them.
  static constexpr int64_t kPlace = (kStage + 1) * 8;
  char* place(int copy, int o) const { return buffer.get() + (static_cast<int64_t>(copy) * kOperands + o) * kPlace + 8; }
};

inline char* constant_bytes(const ConstantMask& mask) {
  return const_cast<char*>(reinterpret_cast<const char*>(mask.bytes));
}

}  // namespace maskwise
