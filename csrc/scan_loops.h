// The loops of scans: along rows when the scanned dim is the innermost one in memory, else over columns side by side.
// Operands that do not lie as the kernel wants them are gathered into small buffers. Counts in bytes, knows nothing of
// types.
#pragma once

#include "loops.h"

namespace maskwise {

constexpr int kOperands = 5;
// Rows that a kernel may do side by side: as many as the widest vector has lanes of the narrowest accumulator.
constexpr int kRows = 16;
// Columns done side by side; their states stay in the first-level cache.
constexpr int64_t kScanColumns = 512;
// Elements of a row that the kernel gets in one call: where every operand is read in place, and where one is gathered.
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
  void (*init)(void* state, int64_t columns);
  // n contiguous steps of `rows` rows; at[operand * kRows + row]. `first` is the index of the first of these steps; if
  // it is not 0, the element before at[previous] can be read.
  void (*row)(void* state, char* const* at, int64_t n, int64_t first);
  // Some steps of w columns side by side, in the order of the scan: at[operand] is the first of them, `step` its index,
  // and next[operand] how far the next one is. Where an operand is wanted one step earlier, there is one step, and
  // at[kOperands] that earlier one (null at step 0).
  void (*columns)(void* state, char* const* at, const int64_t* next, int64_t w, int64_t step, int64_t count);
};

// What a kernel has accumulated: of kRows rows, or of kScanColumns columns.
struct alignas(64) ScanState {
  char bytes[kScanColumns * 32];
};

// The loops of a scan. The last operand is a result: it has the shape of the loops, which follow its memory.
struct ScanLoops {
  Loop<kOperands> steps;   // the dim that is scanned
  Loops<kOperands> lines;  // all other dims
  int64_t count;           // how many lines
  char* data[kOperands];

  ScanLoops(std::initializer_list<const Tensor*> tensors, const int* bytes, const Dims& dim) {
    Operand operands[kOperands] = {};
    int o = 0;
    for (const Tensor* tensor : tensors) {
      operands[o] = {tensor, bytes[o]};
      // Results are the operands that were made for this call.
      data[o++] = static_cast<char*>(const_cast<void*>(tensor->const_data_ptr()));
    }
    auto nest = make_nest(**(tensors.end() - 1), operands, dim, o - 1);
    if (!nest.inner.empty()) steps = nest.inner.back();
    lines = std::move(nest.outer);
    count = nest.slices;
  }

  // Where the operands of line `index` start, of all lines or of some outer loops.
  void locate(const Loops<kOperands>& loops, int operands, int64_t index, char** at) const {
    const auto offset = offset_of(loops, index);
    for (int o = 0; o < operands; ++o) at[o] = data[o] + offset[o];
  }
};

// The mask bytes that stand for one byte, which is broadcast along a run.
inline char* constant_mask(const char* mask) {
  static_assert(kStage <= kConstantMask && kScanColumns <= kConstantMask);
  return const_cast<char*>(
      reinterpret_cast<const char*>(kept_of_run(mask, 0) == Kept::all ? kAllKept.bytes : kNoneKept.bytes));
}

// How operands are read and written: in place, or through a buffer.
struct Staging {
  bool direct[kOperands];
  bool all = true;
  std::unique_ptr<char[]> buffer;

  // `loop` is the one that the kernel runs along; `copies` is how many buffers of kStage elements an operand may need.
  Staging(const Scan& scan, const Loop<kOperands>& loop, int copies) {
    for (int o = 0; o < scan.operands; ++o) {
      direct[o] = loop.stride[o] == scan.bytes[o];
      all = all && direct[o];
    }
    if (!all) buffer.reset(new char[static_cast<size_t>(copies) * kOperands * kPlace]);
  }
  // kStage elements of 8 bytes, after one more that stands before them.
  static constexpr int64_t kPlace = (kStage + 1) * 8;
  char* place(int copy, int o) const { return buffer.get() + (static_cast<int64_t>(copy) * kOperands + o) * kPlace + 8; }
};

inline void scan_rows(const Scan& scan, const ScanLoops& loops) {
  const int64_t n = loops.steps.size;
  const int64_t* stride = loops.steps.stride;
  const int64_t groups = ceil_div(loops.count, scan.rows);
  parallel(groups, n * scan.rows, [&](int64_t begin, int64_t end) {
    const Staging staging(scan, loops.steps, scan.rows);
    const int64_t piece = std::min(n, staging.all ? kPiece : kStage);
    const int64_t pieces = ceil_div(n, piece);
    // A group at the end may have fewer rows: the last one is then done several times over, into scratch memory.
    std::unique_ptr<char[]> scratch;
    if (loops.count % scan.rows != 0 && end == groups) scratch.reset(new char[piece * 8]);
    // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
    const std::unique_ptr<ScanState> state(new ScanState);
    for (int64_t group = begin; group < end; ++group) {
      char* home[kRows][kOperands];
      const int rows = static_cast<int>(std::min<int64_t>(scan.rows, loops.count - group * scan.rows));
      for (int r = 0; r < scan.rows; ++r)
        loops.locate(loops.lines, scan.operands, group * scan.rows + std::min(r, rows - 1), home[r]);
      scan.init(state->bytes, 1);
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t first = (scan.reverse ? pieces - 1 - p : p) * piece;
        const int64_t count = std::min(piece, n - first);
        char* at[kOperands * kRows];
        for (int o = 0; o < scan.operands; ++o) {
          const bool result = o >= scan.operands - scan.written;
          for (int r = 0; r < scan.rows; ++r) {
            char*& here = at[o * kRows + r];
            here = home[r][o] + first * stride[o];
            if (result && r >= rows) {
              here = scratch.get();
            } else if (staging.direct[o]) {
              continue;
            } else if (o == scan.mask && stride[o] == 0) {
              here = constant_mask(here);
            } else if (r >= rows) {
              here = at[o * kRows + rows - 1];
            } else {
              char* place = staging.place(r, o);
              const int64_t before = o == scan.previous && first > 0 ? 1 : 0;
              const int size = scan.bytes[o];
              if (!result) gather(size, place - before * size, here - before * stride[o], stride[o], count + before);
              here = place;
            }
          }
        }
        scan.row(state->bytes, at, count, first);
        for (int o = scan.operands - scan.written; o < scan.operands; ++o)
          for (int r = 0; r < rows && !staging.direct[o]; ++r)
            scatter(scan.bytes[o], home[r][o] + first * stride[o], stride[o], at[o * kRows + r], count);
      }
    }
  });
}

inline void scan_columns(const Scan& scan, const ScanLoops& loops) {
  const int64_t n = loops.steps.size;
  const int64_t* stride = loops.steps.stride;
  const Loop<kOperands> inner = loops.lines.back();
  const Loops<kOperands> outer(loops.lines.begin(), loops.lines.end() - 1);
  int64_t blocks = ceil_div(inner.size, kScanColumns);
  // Columns do not depend on each other, so equal blocks are as good as full ones; a multiple of 64 keeps lines whole.
  int64_t width = ceil_div(ceil_div(inner.size, blocks), 64) * 64;
  if (loops.count / inner.size * blocks == 1 && inner.size >= 16 && n >= 4096) {
    // One block of many steps: threads share lines rather than that one does it all.
    width = ceil_div(ceil_div(inner.size, 4), 8) * 8;
    blocks = ceil_div(inner.size, width);
  }
  parallel(loops.count / inner.size * blocks, n * std::min(width, inner.size), [&](int64_t begin, int64_t end) {
    const Staging staging(scan, inner, 2);
    // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
    const std::unique_ptr<ScanState> state(new ScanState);
    for (int64_t task = begin; task < end; ++task) {
      char* home[kOperands];
      loops.locate(outer, scan.operands, task / blocks, home);
      const int64_t column = task % blocks * width;
      const int64_t w = std::min(width, inner.size - column);
      if (w <= 0) continue;
      for (int o = 0; o < scan.operands; ++o) home[o] += column * inner.stride[o];
      scan.init(state->bytes, w);
      int64_t transposed = -1;  // the first of the steps whose mask lies transposed in its buffer
      const auto operand_at = [&](int o, int64_t step, int copy) {
        char* here = home[o] + step * stride[o];
        if (staging.direct[o]) return here;
        if (o == scan.mask && inner.stride[o] == 0) return constant_mask(here);
        char* place = staging.place(copy, o);
        if (const int64_t first = step - step % kTransposedRows; o == scan.mask && stride[o] == 1 && first + kTransposedRows <= n) {
          // Eight rows of bytes take as much as one row of the widest elements.
          if (transposed != first)
            transpose_rows(reinterpret_cast<const uint8_t*>(home[o]) + first, inner.stride[o], w, reinterpret_cast<uint8_t*>(place), w);
          transposed = first;
          return place + (step - first) * w;
        }
        if (o < scan.operands - scan.written)
          gather(scan.bytes[o], place, here, inner.stride[o], w);
        return place;
      };
      // Steps whose operands lie one after the other are done together, as many as are transposed together.
      const auto follows = [&](int o, int64_t last) {
        if (staging.direct[o]) return true;
        if (o != scan.mask) return false;
        return inner.stride[o] == 0 ? stride[o] == 0 : stride[o] == 1 && last <= n;
      };
      for (int64_t i = 0, count; i < n; i += count) {
        const int64_t step = scan.reverse ? n - 1 - i : i;
        const int64_t first = step - step % kTransposedRows;
        count = scan.reverse ? step - first + 1 : std::min(first + kTransposedRows, n) - step;
        if (scan.previous >= 0) count = 1;
        char* at[kOperands + 1];
        int64_t next[kOperands];
        for (int o = 0; o < scan.operands; ++o) {
          if (!follows(o, first + kTransposedRows)) count = 1;
          at[o] = operand_at(o, step, 0);
          const int64_t rise = staging.direct[o] ? stride[o] : inner.stride[o] == 0 ? 0 : w;
          next[o] = scan.reverse ? -rise : rise;
        }
        at[kOperands] = scan.previous >= 0 && step > 0 ? operand_at(scan.previous, step - 1, 1) : nullptr;
        scan.columns(state->bytes, at, next, w, step, count);
        for (int o = scan.operands - scan.written; o < scan.operands; ++o)
          if (!staging.direct[o])
            scatter(scan.bytes[o], home[o] + step * stride[o], inner.stride[o], at[o], w);
      }
    }
  });
}

// Whether the result's innermost loop is not the scanned one, and long enough to fill vectors.
inline bool over_columns(const ScanLoops& loops, int result, int bytes) {
  if (loops.lines.empty() || loops.steps.stride[result] == bytes) return false;
  return loops.lines.back().stride[result] == bytes && loops.lines.back().size >= 4;
}

inline void run_scan(const Scan& scan, const ScanLoops& loops) {
  if (loops.count == 0 || loops.steps.size == 0) return;
  const int result = scan.operands - 1;
  if (over_columns(loops, result, scan.bytes[result]))
    scan_columns(scan, loops);
  else
    scan_rows(scan, loops);
}

}  // namespace maskwise
