// Scans along rows. A kernel does several rows side by side, one in each lane; each runs from the first to the last element
// that its mask keeps, rounded to whole blocks so that lanes stay in step, and a lane that is done takes the next row. Before
// and behind, the result is written without x.
#pragma once

#include "scan_loops.h"

namespace maskwise {

// Steps in one call where every operand is read in place.
constexpr int64_t kSteps = 4096;
static_assert(kSteps <= kConstantMask && kSteps <= kStage * 8);
// Bytes are searched for the first and the last kept step to a multiple of this, so that lanes stay in step.
constexpr int64_t kSearched = 64;
static_assert(kSearched % kRows == 0);

inline bool none_kept(const uint8_t* bytes, int64_t n) {
  uint64_t any = 0, word;
  int64_t i = 0;
  for (; i + 8 <= n && any == 0; i += 8) {
    std::memcpy(&word, bytes + i, sizeof(word));
    any |= word;
  }
  for (; i < n; ++i) any |= bytes[i];
  return any == 0;
}

// The steps outside of which n bytes keep nothing.
inline KeptRun kept_bytes(const uint8_t* bytes, int64_t n) {
  int64_t begin = 0, end = n;
  const auto last = [&] { return (end - 1) / kSearched * kSearched; };
  while (begin < end && none_kept(bytes + begin, std::min(kSearched, end - begin))) begin += kSearched;
  while (begin < end && none_kept(bytes + last(), end - last())) end = last();
  return {begin < end ? Kept::bits : Kept::none, begin, end};
}

class RowScan {
 public:
  RowScan(const Scan& kernel, const ScanLoops& nest, bool zeros)
      : scan(kernel),
        loops(nest),
        zeros(zeros),
        n(nest.steps.size),
        stride(nest.steps.stride),
        staging(kernel, nest.mask, nest.steps, kernel.rows),
        // Not zeroed, as make_unique would have it: that takes as long as a small scan does.
        state(new ScanState) {}

  // Scans the lines [begin, end).
  void run(int64_t begin, int64_t end) {
    next = begin;
    last = end;
    scan.init(state->bytes, 0, scan.rows);
    int active = 0;
    for (int r = 0; r < scan.rows; ++r) active += take(r);
    while (active > 0) {
      int64_t shortest = n;
      for (int r = 0; r < scan.rows; ++r)
        if (lanes[r].active) shortest = std::min(shortest, lanes[r].end - lanes[r].begin);
      if (shortest >= scan.rows)
        advance(shortest / scan.rows * scan.rows);
      else
        finish();
      int done = 0;
      for (int r = 0; r < scan.rows; ++r) {
        const Lane& lane = lanes[r];
        if (!lane.active || lane.begin < lane.end) continue;
        ++done;
        if (scan.reverse)
          clear(r, 0, lane.begin);
        else
          drop(r, lane.end, n);
      }
      // Rows of one length end together.
      const bool all = done == active;
      if (all) scan.init(state->bytes, 0, scan.rows);
      for (int r = 0; r < scan.rows && done > 0; ++r) {
        if (!lanes[r].active || lanes[r].begin < lanes[r].end) continue;
        if (!all) scan.init(state->bytes, r, r + 1);
        --done;
        active += take(r) - 1;
      }
    }
  }

 private:
  // The row that is in a lane, and the steps of it that are still to be done.
  struct Lane {
    bool active = false;
    char* home[kOperands];
    int64_t position, begin, end;
    // What is kept, where one byte or an interval says it of all steps.
    int64_t first, last;
  };

  const Scan& scan;
  const ScanLoops& loops;
  const bool zeros;  // whether the results are zeros already
  const int64_t n;
  const int64_t* stride;
  const Staging staging;
  const std::unique_ptr<ScanState> state;
  std::unique_ptr<char[]> scratch;
  Lane lanes[kRows];
  int64_t next, last;

  // Whether lane r, whose state is new, has got a row. Rows of which nothing is kept are written at once.
  bool take(int r) {
    Lane& lane = lanes[r];
    while (next < last) {
      lane.position = loops.locate(loops.lines, scan.operands, next++, lane.home);
      const auto* m = reinterpret_cast<const uint8_t*>(lane.home[scan.mask]);
      KeptRun run = kept_of_run(loops.mask, m, lane.position, stride[scan.mask], stride[kScanPosition], n);
      if (run.kept == Kept::bits && staging.direct[scan.mask] && n > kSearched) run = kept_bytes(m, n);
      if (run.kept == Kept::none) {
        if (scan.reverse)
          clear(r, 0, n);
        else
          drop(r, 0, n);
        continue;
      }
      lane.first = run.begin;
      lane.last = run.end;
      lane.begin = run.begin / scan.rows * scan.rows;
      lane.end = std::min(n, ceil_div(run.end, scan.rows) * scan.rows);
      if (scan.reverse)
        drop(r, lane.end, n);
      else
        drop(r, 0, lane.begin);
      return lane.active = true;
    }
    return lane.active = false;
  }

  // Steps of which nothing is kept, with kept ones before them; for a scan, also after them alone.
  void drop(int r, int64_t begin, int64_t end) {
    if (begin == end) return;
    const Lane& lane = lanes[r];
    const int64_t most = staging.all ? n : kStage;
    while (begin < end) {
      const int64_t count = std::min(most, end - begin);
      const int64_t first = scan.reverse ? end - count : begin;
      char* at[kOperands];
      for (int o = 0; o < scan.operands; ++o) {
        at[o] = lane.home[o] + first * stride[o];
        if (o == scan.mask || o == scan.x || staging.direct[o]) continue;
        if (o < scan.results()) gather(scan.bytes[o], staging.place(r, o), at[o], stride[o], count);
        at[o] = staging.place(r, o);
      }
      scan.drop(state->bytes, r, at, count);
      write_back(r, at, 1, first, count);
      (scan.reverse ? end : begin) += scan.reverse ? -count : count;
    }
  }

  // The gradient of steps with no kept one before them.
  void clear(int r, int64_t begin, int64_t end) const {
    if (zeros) return;
    for (int o = scan.results(); o < scan.operands; ++o) {
      char* to = lanes[r].home[o] + begin * stride[o];
      if (staging.direct[o])
        std::memset(to, 0, (end - begin) * scan.bytes[o]);
      else
        for (int64_t i = begin; i < end; ++i, to += stride[o]) std::memset(to, 0, scan.bytes[o]);
    }
  }

  void write_back(int r, char* const* at, int pitch, int64_t first, int64_t count) const {
    for (int o = scan.results(); o < scan.operands; ++o)
      if (!staging.direct[o])
        scatter(scan.bytes[o], lanes[r].home[o] + first * stride[o], stride[o], at[o * pitch], count);
  }

  // The bytes of the mask for `count` steps of lane r from `first` on.
  char* locate_mask(int r, int64_t first, int64_t count) const {
    const int o = scan.mask;
    if (stride[o] == 0) {
      const Lane& lane = lanes[r];
      if (lane.first <= first && first + count <= lane.last) return constant_bytes(kAllKept);
      // Only an interval begins or ends within the row, and that has buffers.
      char* place = staging.place(r, o);
      const int64_t begin = std::clamp<int64_t>(lane.first - first, 0, count);
      const int64_t end = std::clamp<int64_t>(lane.last - first, begin, count);
      std::memset(place, 0, count);
      std::memset(place + begin, 1, end - begin);
      return place;
    }
    char* here = lanes[r].home[o] + first * stride[o];
    if (staging.direct[o]) return here;
    char* place = staging.place(r, o);
    if (loops.mask.has_intervals())
      stage_bits(loops.mask, reinterpret_cast<const uint8_t*>(here), lanes[r].position, stride[o], count,
                 reinterpret_cast<uint8_t*>(place));
    else
      gather(1, place, here, stride[o], count);
    return place;
  }

  // Where lane r has its operands of `count` steps from `first` on.
  void locate(int r, int64_t first, int64_t count, char** at) const {
    const char* m = at[scan.mask * kRows] = locate_mask(r, first, count);
    for (int o = 0; o < scan.operands; ++o) {
      if (o == scan.mask) continue;
      char*& here = at[o * kRows];
      here = lanes[r].home[o] + first * stride[o];
      if (staging.direct[o]) continue;
      char* place = staging.place(r, o);
      const int64_t before = o == scan.previous && first > 0 ? 1 : 0;
      const int size = scan.bytes[o];
      const bool is_read =
          o < scan.results() && !(o == scan.x && none_kept(reinterpret_cast<const uint8_t*>(m), count));
      if (is_read) gather(size, place - before * size, here - before * stride[o], stride[o], count + before);
      here = place;
    }
  }

  // Some steps of all lanes, at most `count`, which each of them has.
  void advance(int64_t count) {
    count = std::min(count, staging.all ? kSteps : kStage);
    char* at[kOperands * kRows];
    int64_t first[kRows];
    int some = 0;
    while (!lanes[some].active) ++some;
    for (int r = 0; r < scan.rows; ++r) {
      if (!lanes[r].active) continue;
      first[r] = scan.reverse ? lanes[r].end - count : lanes[r].begin;
      locate(r, first[r], count, at + r);
    }
    // A lane that has no row does that of another once more, into scratch memory.
    for (int r = 0; r < scan.rows; ++r) {
      if (lanes[r].active) continue;
      if (scratch == nullptr) scratch.reset(new char[kSteps * 8]);
      first[r] = first[some];
      for (int o = 0; o < scan.operands; ++o)
        at[o * kRows + r] = o < scan.results() ? at[o * kRows + some] : scratch.get();
    }
    scan.row(state->bytes, at, count, first);
    for (int r = 0; r < scan.rows; ++r) {
      if (!lanes[r].active) continue;
      write_back(r, at + r, kRows, first[r], count);
      (scan.reverse ? lanes[r].end : lanes[r].begin) += scan.reverse ? -count : count;
    }
  }

  // The last steps of the lanes that have too few for `advance`.
  void finish() {
    char* at[kOperands * kRows] = {};
    int64_t first[kRows] = {}, count[kRows] = {};
    for (int r = 0; r < scan.rows; ++r) {
      const int64_t left = lanes[r].end - lanes[r].begin;
      if (!lanes[r].active || left >= scan.rows) continue;
      first[r] = lanes[r].begin;
      count[r] = left;
      locate(r, first[r], left, at + r);
    }
    scan.tail(state->bytes, at, count, first);
    for (int r = 0; r < scan.rows; ++r) {
      if (count[r] == 0) continue;
      write_back(r, at + r, kRows, first[r], count[r]);
      lanes[r].begin = lanes[r].end = scan.reverse ? first[r] : first[r] + count[r];
    }
  }
};

inline void scan_rows(const Scan& scan, const ScanLoops& loops, const FreshPages& result) {
  const int64_t elements = loops.steps.size * scan.rows, bytes = scan.bytes[scan.operands - 1];
  const bool in_order = loops.steps.stride[scan.operands - 1] == bytes;
  result.parallel(ceil_div(loops.count, scan.rows), elements, in_order ? elements * bytes : 0,
                  [&](int64_t begin, int64_t end) {
                    RowScan(scan, loops, result.are_zeros()).run(begin * scan.rows, std::min(end * scan.rows, loops.count));
                  });
}

}  // namespace maskwise
