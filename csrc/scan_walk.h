// Runs a scan kernel over a layout: along rows when the scanned dim is the innermost one in memory, else over columns
// side by side. Operands that do not lie as the kernel wants them are shown through small copies.
#pragma once

#include <memory>

#include "scan_layout.h"
#include "transpose.h"

namespace maskwise {

// A mask that keeps all, and one that keeps nothing, for masks that broadcast along the direction of the walk.
inline char* constant_mask(bool kept) {
  static_assert(kStage >= kScanColumns);
  alignas(64) static uint8_t ones[kStage], zeros[kStage];
  static const bool filled = (std::fill_n(ones, kStage, uint8_t{1}), true);
  (void)filled;
  return reinterpret_cast<char*>(kept ? ones : zeros);
}

// An operand within a walk: it is read (or written) where it lies, or through a copy.
struct Staging {
  bool direct[kOperands];
  bool all = true;
  std::unique_ptr<char[]> buffer;

  // `loop` is the direction of the walk; `copies` how many copies of kStage elements an operand may need at once.
  Staging(const Scan& scan, const ScanLoop& loop, int copies) {
    for (int o = 0; o < scan.operands; ++o) {
      direct[o] = loop.stride[o] == scan.bytes[o];
      all = all && direct[o];
    }
    if (!all) buffer.reset(new char[static_cast<size_t>(copies) * kOperands * kPlace]);
  }
  // Room for kStage elements of 8 bytes, after one more that stands before them.
  static constexpr int64_t kPlace = (kStage + 1) * 8;
  char* place(int copy, int o) const { return buffer.get() + (static_cast<int64_t>(copy) * kOperands + o) * kPlace + 8; }
};

inline void scan_rows(const Scan& scan, const ScanLayout& layout) {
  const int64_t n = layout.steps.size;
  const int64_t* stride = layout.steps.stride;
  const int64_t groups = ceil_div(layout.count, scan.rows);
  parallel(groups, n * scan.rows, [&](int64_t begin, int64_t end) {
    const Staging staging(scan, layout.steps, scan.rows);
    const int64_t piece = std::min(n, staging.all ? kPiece : kStage);
    const int64_t pieces = ceil_div(n, piece);
    // A group at the end may have fewer rows: the last one is then done several times over, into memory of no use.
    std::unique_ptr<char[]> waste;
    if (layout.count % scan.rows != 0 && end == groups) waste.reset(new char[piece * 8]);
    // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
    const std::unique_ptr<ScanState> state(new ScanState);
    for (int64_t group = begin; group < end; ++group) {
      char* home[kRows][kOperands];
      const int rows = static_cast<int>(std::min<int64_t>(scan.rows, layout.count - group * scan.rows));
      for (int r = 0; r < scan.rows; ++r)
        locate(layout, layout.lines, scan.operands, group * scan.rows + std::min(r, rows - 1), home[r]);
      scan.start(state->bytes, 1);
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
              here = waste.get();
            } else if (staging.direct[o]) {
              continue;
            } else if (o == scan.mask && stride[o] == 0) {
              here = constant_mask(*here != 0);
            } else if (r >= rows) {
              here = at[o * kRows + rows - 1];
            } else {
              char* place = staging.place(r, o);
              const int64_t before = o == scan.previous && first > 0 ? 1 : 0;
              const int size = scan.bytes[o];
              if (!result) copy_strided(size, place - before * size, size, here - before * stride[o], stride[o], count + before);
              here = place;
            }
          }
        }
        scan.row(state->bytes, at, count, first);
        for (int o = scan.operands - scan.written; o < scan.operands; ++o)
          for (int r = 0; r < rows && !staging.direct[o]; ++r)
            copy_strided(scan.bytes[o], home[r][o] + first * stride[o], stride[o], at[o * kRows + r], scan.bytes[o], count);
      }
    }
  });
}

inline void scan_columns(const Scan& scan, const ScanLayout& layout) {
  const int64_t n = layout.steps.size;
  const int64_t* stride = layout.steps.stride;
  const ScanLoop inner = layout.lines.back();
  const std::vector<ScanLoop> outer(layout.lines.begin(), layout.lines.end() - 1);
  int64_t blocks = ceil_div(inner.size, kScanColumns);
  // Columns do not depend on each other, so equal blocks are as good as full ones; a multiple of 64 keeps lines whole.
  int64_t width = ceil_div(ceil_div(inner.size, blocks), 64) * 64;
  if (layout.count / inner.size * blocks == 1 && inner.size >= 16 && n >= 4096) {
    // One block of many steps: threads share lines rather than that one does it all.
    width = ceil_div(ceil_div(inner.size, 4), 8) * 8;
    blocks = ceil_div(inner.size, width);
  }
  parallel(layout.count / inner.size * blocks, n * std::min(width, inner.size), [&](int64_t begin, int64_t end) {
    const Staging staging(scan, inner, 2);
    // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
    const std::unique_ptr<ScanState> state(new ScanState);
    for (int64_t task = begin; task < end; ++task) {
      char* home[kOperands];
      locate(layout, outer, scan.operands, task / blocks, home);
      const int64_t column = task % blocks * width;
      const int64_t w = std::min(width, inner.size - column);
      if (w <= 0) continue;
      for (int o = 0; o < scan.operands; ++o) home[o] += column * inner.stride[o];
      scan.start(state->bytes, w);
      int64_t turned = -1;  // the first of the steps whose mask lies turned in its place
      const auto show = [&](int o, int64_t step, int copy) {
        char* here = home[o] + step * stride[o];
        if (staging.direct[o]) return here;
        if (o == scan.mask && inner.stride[o] == 0) return constant_mask(*here != 0);
        char* place = staging.place(copy, o);
        if (const int64_t first = step - step % kTurned; o == scan.mask && stride[o] == 1 && first + kTurned <= n) {
          // Eight rows of bytes take the room of one row of the widest elements.
          if (turned != first)
            turn(reinterpret_cast<const uint8_t*>(home[o]) + first, inner.stride[o], w, reinterpret_cast<uint8_t*>(place), w);
          turned = first;
          return place + (step - first) * w;
        }
        if (o < scan.operands - scan.written)
          copy_strided(scan.bytes[o], place, scan.bytes[o], here, inner.stride[o], w);
        return place;
      };
      // Steps whose operands lie one after the other are done at once, as many as are turned together.
      const auto follows = [&](int o, int64_t last) {
        if (staging.direct[o]) return true;
        if (o != scan.mask) return false;
        return inner.stride[o] == 0 ? stride[o] == 0 : stride[o] == 1 && last <= n;
      };
      for (int64_t i = 0, count; i < n; i += count) {
        const int64_t step = scan.reverse ? n - 1 - i : i;
        const int64_t first = step - step % kTurned;
        count = scan.reverse ? step - first + 1 : std::min(first + kTurned, n) - step;
        if (scan.previous >= 0) count = 1;
        char* at[kOperands + 1];
        int64_t next[kOperands];
        for (int o = 0; o < scan.operands; ++o) {
          if (!follows(o, first + kTurned)) count = 1;
          at[o] = show(o, step, 0);
          const int64_t rise = staging.direct[o] ? stride[o] : inner.stride[o] == 0 ? 0 : w;
          next[o] = scan.reverse ? -rise : rise;
        }
        at[kOperands] = scan.previous >= 0 && step > 0 ? show(scan.previous, step - 1, 1) : nullptr;
        scan.columns(state->bytes, at, next, w, step, count);
        for (int o = scan.operands - scan.written; o < scan.operands; ++o)
          if (!staging.direct[o])
            copy_strided(scan.bytes[o], home[o] + step * stride[o], inner.stride[o], at[o], scan.bytes[o], w);
      }
    }
  });
}

// Whether the result's innermost loop is not the scanned one, and long enough to fill vectors.
inline bool over_columns(const ScanLayout& layout, int result, int bytes) {
  if (layout.lines.empty() || layout.steps.stride[result] == bytes) return false;
  return layout.lines.back().stride[result] == bytes && layout.lines.back().size >= 4;
}

inline void run_scan(const Scan& scan, const ScanLayout& layout) {
  if (layout.count == 0 || layout.steps.size == 0) return;
  const int result = scan.operands - 1;
  if (over_columns(layout, result, scan.bytes[result]))
    scan_columns(scan, layout);
  else
    scan_rows(scan, layout);
}

}  // namespace maskwise
