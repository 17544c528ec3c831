// How a reduction walks: rows when the reduced stretch is contiguous, columns when the kept one is, and a staged copy of
// small pieces for any other stride. Included once a SIMD level, inside its namespace, by the kernel headers.
//
// A reduction is a struct Op with
//   In, A, Out             the element types of x, of the arithmetic and of the result
//   Lanes                  what each lane of a vector has seen lately; nothing() is the start
//   State                  what one output has seen so far; default-constructed it has seen nothing
//   see(lanes, x, kept, p) R vectors of values and of masks; p is the position of the first, of columns only
//   row(s, x, m, n, at)    n contiguous elements at position `at`; m is null where all are kept. Mostly see_row below
//   collect(s, lanes)      joins all lanes to one output
//   lane(lanes, i, base)   one lane as a state of its own, whose positions start at `base`
//   merge(s, other)        joins the state of a later stretch
//   done(s)                whether nothing more can change the result
//   kPeriod                rows of a column that the lanes can hold before they are collected
//   finish(s)              the result
#include "reduce_lanes.h"

// Vectors of a row that are seen at once, and rows of a column. More rows would share too few sets of the cache.
constexpr int kRowVectors = 8;
constexpr int kColumnRows = 4;
// Elements of a row that are seen in the arithmetic type before it widens: bounds the rounding error of long rows.
constexpr int64_t kChunk = 2048;
// How far ahead of a row's loop its memory is asked for, in elements. Two streams of different pace, values and mask, are
// more than the hardware follows by itself: asking saves a fifth of the time where memory is the limit.
constexpr int64_t kAhead = 512;
// Columns done side by side: wide enough to read long stretches of memory, while their lanes stay in a near cache.
constexpr int64_t kColumns = 4096;
// One output with more elements than this is split among threads. Fixed, so that the bits of a result never depend on
// the number of threads.
constexpr int64_t kSplit = 262144;

// Mask bytes for where all is kept, and for where nothing is: so each reduction is compiled once, for masks.
struct Bytes {
  uint8_t bytes[kColumns];
  constexpr explicit Bytes(uint8_t value) : bytes() {
    for (auto& byte : bytes) byte = value;
  }
};
constexpr Bytes kAllKept(1), kNoneKept(0);

// Sees at most kChunk elements. `room` elements before x may be read too.
template <class Op, class T>
inline __attribute__((always_inline)) void see_chunk(const Op& op, typename Op::Lanes& lanes, const T* x, const uint8_t* m, int64_t n, int64_t room) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, R = kRowVectors;
  int64_t i = 0;
  for (; i + R * L <= n; i += R * L) {
    for (int k = 0; k < R * L; k += 64 / sizeof(T)) __builtin_prefetch(x + i + k + kAhead);
    for (int k = 0; k < R * L; k += 64) __builtin_prefetch(m + i + k + kAhead);
    if (none_of<R * L>(m + i)) continue;
    Vec<A> values[R];
    LaneMask<A> kept[R];
    for (int k = 0; k < R; ++k) {
      values[k] = load<A>(x + i + k * L);
      kept[k] = load_mask<A>(m + i + k * L);
    }
    op.template see<R>(lanes, values, kept, 0);
  }
  for (; i < n; i += L) {
    Vec<A> values[1];
    LaneMask<A> kept[1];
    const int rest = static_cast<int>(n - i);
    if (rest >= L) {
      values[0] = load<A>(x + i);
      kept[0] = load_mask<A>(m + i);
    } else if (room + i >= L - rest) {
      // A whole vector that ends where the row does; its first lanes were seen before.
      values[0] = load<A>(x + n - L);
      kept[0] = last_lanes<A>(rest) & load_mask<A>(m + n - L);
    } else {
      T staged[L] = {};
      uint8_t bytes[L] = {};
      for (int k = 0; k < rest; ++k) staged[k] = x[i + k];
      for (int k = 0; k < rest; ++k) bytes[k] = m[i + k];
      values[0] = load<A>(staged);
      kept[0] = load_mask<A>(bytes);
    }
    op.template see<1>(lanes, values, kept, 0);
  }
}

// Not inlined: it is called from three places, and compiles slowly.
template <class Op, class T>
__attribute__((noinline)) void see_row(const Op& op, typename Op::State& s, const T* x, const uint8_t* m, int64_t n) {
  for (int64_t i = 0; i < n && !op.done(s); i += kChunk) {
    typename Op::Lanes lanes = op.nothing();
    const int64_t count = std::min(kChunk, n - i);
    // Of the mask that stands for "all kept" nothing lies before the first byte.
    see_chunk(op, lanes, x + i, m == nullptr ? kAllKept.bytes : m + i, count, m == nullptr ? 0 : i);
    op.collect(s, lanes);
  }
}

// Shows `count` elements that lie apart in memory to Op::row, through small contiguous copies.
template <class Op>
void staged_row(const Op& op, typename Op::State& s, const typename Op::In* x, int64_t xs, const uint8_t* m, int64_t ms,
                int64_t count, int64_t at) {
  constexpr int64_t kStage = 512;
  typename Op::In values[kStage];
  uint8_t kept[kStage];
  for (int64_t i = 0; i < count; i += kStage) {
    const int64_t n = std::min(kStage, count - i);
    for (int64_t k = 0; k < n; ++k) values[k] = x[(i + k) * xs];
    if (m != nullptr)
      for (int64_t k = 0; k < n; ++k) kept[k] = m[(i + k) * ms];
    op.row(s, values, m == nullptr ? nullptr : kept, n, at + i);
  }
}

// Elements [begin, end) behind one output whose data starts at (x, m).
template <class Op>
void reduce_range(const Op& op, typename Op::State& s, const Layout& layout, const typename Op::In* x, const uint8_t* m,
                  int64_t begin, int64_t end) {
  const Loop inner = layout.reduced.empty() ? Loop{1, 1, 1} : layout.reduced.back();
  int64_t at = begin;
  for_each_run(layout.reduced, begin, end, [&](Offset run, int64_t count) {
    const uint8_t* kept = m + run.mask;
    const int64_t here = at;
    at += count;
    if (inner.mask == 0) {
      if (*kept == 0) return;
      kept = nullptr;
    }
    if (inner.x == 1 && (inner.mask == 1 || inner.mask == 0))
      op.row(s, x + run.x, kept, count, here);
    else
      staged_row(op, s, x + run.x, inner.x, kept, inner.mask, count, here);
  });
}

template <class Op>
void reduce_rows(const Op& op, const Layout& layout, const typename Op::In* x, const uint8_t* m,
                 typename Op::Out* out) {
  const int64_t splits = ceil_div(layout.length, kSplit);
  if (splits <= 1 || layout.outputs >= 64) {
    parallel(layout.outputs, layout.length, [&](int64_t begin, int64_t end) {
      int64_t r = begin;
      for_each_run(layout.kept, begin, end, [&](Offset at, int64_t count) {
        const Loop loop = layout.kept.empty() ? Loop{1, 0, 0} : layout.kept.back();
        for (int64_t k = 0; k < count; ++k) {
          typename Op::State s;
          reduce_range(op, s, layout, x + at.x + k * loop.x, m + at.mask + k * loop.mask, 0, layout.length);
          out[r++] = op.finish(s);
        }
      });
    });
    return;
  }
  std::vector<typename Op::State> parts(layout.outputs * splits);
  parallel(layout.outputs * splits, kSplit, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Offset at = offset_of(layout.kept, p / splits);
      const int64_t from = p % splits * kSplit;
      reduce_range(op, parts[p], layout, x + at.x, m + at.mask, from, std::min(from + kSplit, layout.length));
    }
  });
  for (int64_t r = 0; r < layout.outputs; ++r) {
    for (int64_t p = 1; p < splits; ++p) op.merge(parts[r * splits], parts[r * splits + p]);
    out[r] = op.finish(parts[r * splits]);
  }
}

#include "reduce_columns.h"

template <class Op>
void reduce(const Op& op, const Layout& layout, const void* x, const void* m, void* out) {
  const auto* xs = static_cast<const typename Op::In*>(x);
  const auto* ms = static_cast<const uint8_t*>(m);
  auto* results = static_cast<typename Op::Out*>(out);
  const bool rows_touch = !layout.reduced.empty() && layout.reduced.back().x == 1;
  const bool columns_touch = !layout.kept.empty() && layout.kept.back().x == 1 && layout.kept.back().size >= 4;
  // For a handful of elements, small copies are made sooner than the room for columns.
  const bool handful = layout.outputs * layout.length <= 1024;
  if (!rows_touch && columns_touch && layout.length > 0 && !handful)
    reduce_columns(op, layout, xs, ms, results);
  else
    reduce_rows(op, layout, xs, ms, results);
}
