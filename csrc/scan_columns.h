// Scans over columns side by side, as many as there are states, a few steps at a time. Groups of columns of which nothing
// is kept in these steps are passed over: their results are written without x.
#pragma once

#include "scan_loops.h"

namespace maskwise {

// Columns that are passed over together: a cache line of floats, and a multiple of the lanes of any vector.
constexpr int64_t kColumnGroup = 16;
static_assert(kScanColumns <= kConstantMask && kScanColumns <= kStage);
// Steps for which the bounds of columns are held as small numbers: a multiple of kTransposedRows.
constexpr int64_t kBoundSteps = 256;

class ColumnScan {
 public:
  ColumnScan(const Scan& kernel, const ScanLoops& nest, bool zeros)
      : scan(kernel),
        loops(nest),
        zeros(zeros),
        n(nest.steps.size),
        stride(nest.steps.stride),
        inner(nest.lines.back()),
        outer(nest.lines.begin(), nest.lines.end() - 1),
        staging(kernel, nest.mask, inner, 2),
        // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
        state(new ScanState) {}

  // Scans the columns [column, column + width) of one of the outer lines.
  void run(int64_t line, int64_t column, int64_t width) {
    w = width;
    position = loops.locate(outer, scan.operands, line, home) + column * inner.stride[kScanPosition];
    for (int o = 0; o < scan.operands; ++o) home[o] += column * inner.stride[o];
    rows.begin = rows.end = 0;
    bounds_from = -1;
    const int64_t groups = ceil_div(w, kColumnGroup);
    scan.init(state->bytes, 0, groups * kColumnGroup);
    find_first_kept(groups);
    for (int64_t i = 0, count; i < n; i += count) {
      const int64_t step = scan.reverse ? n - 1 - i : i;
      count = locate(step);
      bool staged = false;
      for (int64_t g = 0, to; g < groups; g = to) {
        const Group kind = kind_of(g, step, count);
        for (to = is_whole() ? groups : g + 1; to < groups && kind_of(to, step, count) == kind;) ++to;
        const int64_t begin = g * kColumnGroup, end = std::min(to * kColumnGroup, w);
        if (kind == Group::kept && !staged) {
          stage_x(step);
          staged = true;
        }
        if (kind == Group::kept)
          scan.columns(state->bytes, at, next, begin, end, step, count);
        else if (kind == Group::dropped)
          scan.drop_columns(state->bytes, at, next, begin, end, count);
        else
          clear(begin, end, count);
      }
      for (int o = scan.results(); o < scan.operands; ++o)
        if (!staging.direct[o]) scatter(scan.bytes[o], home[o] + step * stride[o], inner.stride[o], at[o], w);
    }
  }

 private:
  // What is kept of a group in some steps; `unused` is a gradient that no kept step before adds to.
  enum class Group { kept, dropped, unused };

  // The bytes of the steps [begin, end), `next` apart; those of `begin` are at `bytes`. Where all are the same, they are
  // those of a constant.
  struct MaskRows {
    char* bytes;
    int64_t next, begin, end;
  };
  bool is_whole() const {
    return !scan.reverse && (rows.bytes == constant_bytes(kAllKept) || rows.bytes == constant_bytes(kNoneKept));
  }

  const Scan& scan;
  const ScanLoops& loops;
  const bool zeros;  // whether the results are zeros already
  const int64_t n;
  const int64_t* stride;
  const ScanLoop inner;
  const Loops<kOperands + 1> outer;
  const Staging staging;
  const std::unique_ptr<ScanState> state;
  char* home[kOperands];
  char* at[kOperands + 1];
  int64_t next[kOperands];
  int64_t w, position;
  MaskRows rows;
  int64_t bounds_from;  // the step that `starts` and `ends` count from
  int16_t starts[kScanColumns], ends[kScanColumns];
  int64_t first_kept[kScanColumns / kColumnGroup];

  // Before the first kept step of a group, gradients are not read. Of bytes that would have to be looked for.
  void find_first_kept(int64_t groups) {
    if (!scan.reverse) return;
    std::fill_n(first_kept, groups, loops.mask.has_intervals() ? n : 0);
    if (!loops.mask.has_intervals()) return;
    int64_t missing = groups;
    for (int64_t step = 0; step < n && missing > 0; step = rows.end) {
      rows = mask_rows(step);
      for (int64_t s = rows.begin; s < (rows.next == 0 ? rows.begin + 1 : rows.end); ++s)
        for (int64_t g = 0; g < groups; ++g)
          if (first_kept[g] == n && any_kept(rows.bytes + (s - rows.begin) * rows.next, g)) {
            first_kept[g] = s;
            --missing;
          }
    }
    rows.begin = rows.end = 0;
  }

  bool any_kept(const char* bytes, int64_t group) const {
    const int64_t begin = group * kColumnGroup, count = std::min(kColumnGroup, w - begin);
    char any = 0;
    if (count == kColumnGroup) {
      uint64_t words[2];
      std::memcpy(words, bytes + begin, sizeof(words));
      return (words[0] | words[1]) != 0;
    }
    for (int64_t j = 0; j < count; ++j) any |= bytes[begin + j];
    return any != 0;
  }

  Group kind_of(int64_t group, int64_t step, int64_t count) const {
    if (scan.reverse && step < first_kept[group]) return Group::unused;
    const int64_t different = next[scan.mask] == 0 ? 1 : count;
    for (int64_t i = 0; i < different; ++i)
      if (any_kept(at[scan.mask] + i * next[scan.mask], group)) return Group::kept;
    return Group::dropped;
  }

  void clear(int64_t begin, int64_t end, int64_t count) const {
    for (int o = scan.results(); o < scan.operands; ++o)
      for (int64_t i = 0; i < count && !(zeros && staging.direct[o]); ++i)
        std::memset(at[o] + i * next[o] + begin * scan.bytes[o], 0, (end - begin) * scan.bytes[o]);
  }

  // The bytes of `step` and, where these are as easily had, of steps around it.
  MaskRows mask_rows(int64_t step) {
    const int o = scan.mask;
    if (loops.mask.has_intervals()) return interval_rows(step);
    if (staging.direct[o]) return {home[o], stride[o], 0, n};
    const char* here = home[o] + step * stride[o];
    if (inner.stride[o] == 0) {
      char* bytes = constant_bytes(kept_of_run(here, 0) == Kept::all ? kAllKept : kNoneKept);
      if (stride[o] == 0) return {bytes, 0, 0, n};
      const int64_t tile = step - step % kTransposedRows, limit = std::min(tile + kTransposedRows, n);
      const auto same = [&](int64_t s) { return (home[o][s * stride[o]] != 0) == (*here != 0); };
      MaskRows found{bytes, 0, step, step + 1};
      while (found.begin > tile && same(found.begin - 1)) --found.begin;
      while (found.end < limit && same(found.end)) ++found.end;
      return found;
    }
    char* place = staging.place(0, o);
    const int64_t first = step - step % kTransposedRows;
    if (stride[o] == 1 && first + kTransposedRows <= n) {
      // Eight rows of bytes take as much as one row of the widest elements.
      transpose_rows(reinterpret_cast<const uint8_t*>(home[o]) + first, inner.stride[o], w,
                     reinterpret_cast<uint8_t*>(place), w);
      return {place, w, first, first + kTransposedRows};
    }
    gather(1, place, here, inner.stride[o], w);
    return {place, 0, step, step + 1};
  }

  // The same of bounds. Where these do not change from step to step, neither do the bytes between two of them.
  MaskRows interval_rows(int64_t step) {
    const int o = scan.mask;
    const Mask& mask = loops.mask;
    const auto* bounds = reinterpret_cast<const uint8_t*>(home[o]);
    if (stride[o] != 0) {
      const int64_t first = step - step % kTransposedRows, last = std::min(first + kTransposedRows, n);
      for (int64_t s = first; s < last; ++s)
        write_bytes(bounds + s * stride[o], position + s * stride[kScanPosition], staging.place(0, o) + (s - first) * w);
      return {staging.place(0, o), w, first, last};
    }
    if (stride[kScanPosition] != 0 && inner.stride[o] != 0) return bounded_rows(step);
    MaskRows found{staging.place(0, o), 0, 0, n};
    write_bytes(bounds, position + step * stride[kScanPosition], found.bytes);
    if (inner.stride[kScanPosition] == 0 && inner.stride[o] == 0)
      found.bytes = constant_bytes(*found.bytes != 0 ? kAllKept : kNoneKept);
    if (stride[kScanPosition] == 0) return found;
    const Interval kept = mask.interval(bounds);
    for (const int64_t bound : {kept.start, kept.end}) {
      if (bound <= step)
        found.begin = std::max(found.begin, bound);
      else
        found.end = std::min(found.end, bound);
    }
    return found;
  }

  // The same of intervals along the steps, one for each column: most are the same in all steps of a tile.
  MaskRows bounded_rows(int64_t step) {
    const int o = scan.mask;
    const int64_t base = step - step % kBoundSteps;
    if (base != bounds_from) {
      bounds_from = base;
      for (int64_t j = 0; j < w; ++j) {
        const Interval kept = loops.mask.interval(reinterpret_cast<const uint8_t*>(home[o]) + j * inner.stride[o]);
        starts[j] = static_cast<int16_t>(std::clamp<int64_t>(kept.start - base, 0, kBoundSteps));
        ends[j] = static_cast<int16_t>(std::clamp<int64_t>(kept.end - base, 0, kBoundSteps));
      }
    }
    char* __restrict bytes = staging.place(0, o);
    const int64_t first = step - step % kTransposedRows, last = std::min(first + kTransposedRows, n);
    const auto from = static_cast<int16_t>(first - base), to = static_cast<int16_t>(last - base);
    const auto changes = [from, to](int16_t bound) { return (from < bound) & (bound < to); };
    const int64_t columns = w;
    int any = 0;
    for (int64_t j = 0; j < columns; ++j) {
      bytes[j] = static_cast<char>((starts[j] <= from) & (from < ends[j]));
      any |= changes(starts[j]) | changes(ends[j]);
    }
    if (any == 0) return {bytes, 0, first, last};
    for (int s = 1; s < to - from; ++s) std::memcpy(bytes + s * columns, bytes, columns);
    for (int64_t j = 0; j < columns; ++j)
      for (int s = 1; (changes(starts[j]) | changes(ends[j])) && s < to - from; ++s)
        bytes[s * columns + j] = static_cast<char>((starts[j] <= from + s) & (from + s < ends[j]));
    return {bytes, columns, first, last};
  }

  void write_bytes(const uint8_t* bounds, int64_t line, char* bytes) const {
    const int64_t apart = inner.stride[scan.mask];
    const KeptRun run = kept_of_run(loops.mask, bounds, line, apart, inner.stride[kScanPosition], w);
    if (run.kept == Kept::bits) return stage_bits(loops.mask, bounds, line, apart, w, reinterpret_cast<uint8_t*>(bytes));
    std::memset(bytes, 0, w);
    if (run.kept == Kept::all) std::memset(bytes + run.begin, 1, run.end - run.begin);
  }

  // Finds the operands of `step`, all but x, and how many steps can be done together: those whose operands lie one after
  // the other, as many as are transposed together.
  int64_t locate(int64_t step) {
    if (step < rows.begin || step >= rows.end) rows = mask_rows(step);
    const int64_t tile = step - step % kTransposedRows;
    const int64_t begin = std::max(tile, rows.begin), end = std::min({tile + kTransposedRows, rows.end, n});
    int64_t count = scan.previous >= 0 ? 1 : scan.reverse ? step - begin + 1 : end - step;
    for (int o = 0; o < scan.operands; ++o) {
      int64_t rise = stride[o];
      if (o == scan.mask) {
        at[o] = rows.bytes + (step - rows.begin) * rows.next;
        rise = rows.next;
      } else if (staging.direct[o]) {
        at[o] = home[o] + step * rise;
      } else {
        at[o] = staging.place(0, o);
        if (o < scan.results() && o != scan.x) gather(scan.bytes[o], at[o], home[o] + step * rise, inner.stride[o], w);
        count = 1;
      }
      next[o] = scan.reverse ? -rise : rise;
    }
    at[kOperands] = nullptr;
    if (const int o = scan.previous; o >= 0 && step > 0) {
      at[kOperands] = staging.direct[o] ? home[o] + (step - 1) * stride[o] : staging.place(1, o);
      if (!staging.direct[o])
        gather(scan.bytes[o], at[kOperands], home[o] + (step - 1) * stride[o], inner.stride[o], w);
    }
    return count;
  }

  void stage_x(int64_t step) const {
    const int o = scan.x;
    if (o >= 0 && !staging.direct[o]) gather(scan.bytes[o], at[o], home[o] + step * stride[o], inner.stride[o], w);
  }
};

inline void scan_columns(const Scan& scan, const ScanLoops& loops, const FreshPages& result) {
  const int64_t n = loops.steps.size, columns = loops.lines.back().size, lines = loops.count / columns;
  int64_t blocks = ceil_div(columns, kScanColumns);
  // Columns do not depend on each other, so equal blocks are as good as full ones; a multiple of 64 keeps lines whole.
  int64_t width = ceil_div(ceil_div(columns, blocks), 64) * 64;
  if (lines * blocks == 1 && columns >= 16 && n >= 4096) {
    // One block of many steps: threads share lines rather than that one does it all.
    width = ceil_div(ceil_div(columns, 4), 8) * 8;
    blocks = ceil_div(columns, width);
  }
  const int64_t bytes = scan.bytes[scan.operands - 1], each = blocks == 1 ? n * columns * bytes : 0;
  result.parallel(lines * blocks, n * std::min(width, columns), each, [&](int64_t begin, int64_t end) {
    ColumnScan block(scan, loops, result.are_zeros());
    for (int64_t task = begin; task < end; ++task)
      if (const int64_t column = task % blocks * width; column < columns)
        block.run(task / blocks, column, std::min(width, columns - column));
  });
}

// Whether the result's innermost loop is not the scanned one, and long enough to fill vectors.
inline bool over_columns(const ScanLoops& loops, int result, int bytes) {
  if (loops.lines.empty() || loops.steps.stride[result] == bytes) return false;
  return loops.lines.back().stride[result] == bytes && loops.lines.back().size >= 4;
}

}  // namespace maskwise
