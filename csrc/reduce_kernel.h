// The inner loops of a reduction: contiguous runs, and columns side by side. Compiled once a target.
//
// A reduction is a struct Op, derived from ReduceOp, with
//   In, A, Out                    the element types of x, of the arithmetic and of the result
//   Lanes                         what each lane of a vector accumulates in A; init() is the start
//   State                         what one output accumulates; default-constructed it has accumulated nothing
//   accumulate(lanes, x, kept, p) R vectors of values and of masks; p is the position of the first, of columns only
//   collect(s, lanes)             combines all lanes into the state of one output
//   lane(lanes, i, base)          one lane as a state of its own, whose positions start at `base`
//   combine(s, other)             joins the state of a later range
//   finalize(s)                   the result
#include "reduce_loops.h"
#include "simd.h"
#if defined(MASKWISE_REDUCE_KERNEL_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_KERNEL_H
#else
#define MASKWISE_REDUCE_KERNEL_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Vectors of a row that are accumulated in one step.
constexpr int kRowVectors = 8;
// Elements of a row that are accumulated in the arithmetic type before it widens: bounds the rounding error of long rows.
constexpr int64_t kChunk = 2048;
static_assert(kChunk <= kConstantMask);
// How far ahead of a row's loop its memory is prefetched, in elements.
constexpr int64_t kAhead = 512;
// The same where intervals are kept, from row to row.
constexpr int64_t kAheadRuns = 1024;
// Elements of a step up to which their vectors are accumulated one by one.
constexpr int kFewKept = 3;

// Joins v[0], ..., v[R - 1] in pairs: short chains, and rounding errors that grow with the logarithm.
template <int R, class V, class Join>
inline V tree(const V (&v)[R], const Join& join) {
  static_assert(R == 1 || R == 2 || R == 4 || R == 8);
  if constexpr (R == 1) return v[0];
  else if constexpr (R == 2) return join(v[0], v[1]);
  else if constexpr (R == 4) return join(join(v[0], v[1]), join(v[2], v[3]));
  else return join(join(join(v[0], v[1]), join(v[2], v[3])), join(join(v[4], v[5]), join(v[6], v[7])));
}

// Prefetches a step of x if something is kept of each of its cache lines. Values and mask are two streams of different
// pace, more than the hardware follows by itself; where lines are dropped, it finds the others sooner alone.
template <int kStep, class T>
inline void prefetch_step(const T* x, const uint8_t* m) {
  constexpr int kLine = std::min<int>(64 / sizeof(T), kStep);
  const uint64_t set = set_bytes<kStep>(m);
  bool every_line = true;
  for (int k = 0; k < kStep; k += kLine) every_line &= (set >> k & ~uint64_t{0} >> (64 - kLine)) != 0;
  if (every_line)
    for (int k = 0; k < kStep; k += kLine) __builtin_prefetch(x + k);
}

// Accumulates one vector.
template <class Op, class T>
inline __attribute__((always_inline)) void accumulate_vector(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                             LaneMask<typename Op::A> kept) {
  Vec<typename Op::A> values[1] = {load<typename Op::A>(x)};
  const LaneMask<typename Op::A> masks[1] = {kept};
  op.template accumulate<1>(lanes, values, masks, 0);
}

// Vectors of a row that are accumulated in one step, and elements of it; of a mask at most a word's.
template <class A>
constexpr int kRowStep = kRowVectors * kLanes<A>;
template <class A>
constexpr int kMaskStep = std::min(64, kRowStep<A>);

// What is accumulated behind a run: `rest` more elements of it, and then n of another one, if there is one to prefetch.
template <class T>
struct Behind {
  int64_t rest = 0;
  const T* next = nullptr;
  int64_t n = 0;

  // The same, `more` elements earlier.
  Behind before(int64_t more) const { return {rest + more, next, n}; }
};

// Accumulates the first elements of a run, all of them kept, in whole steps; returns how many. Where another run follows,
// what is accumulated kAheadRuns elements later is prefetched.
template <class Op, class T>
inline __attribute__((always_inline)) int64_t accumulate_all(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                             int64_t n, const Behind<T>& behind = {}) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, R = kRowVectors;
  int64_t i = 0;
  for (; i + R * L <= n; i += R * L) {
    if (behind.next != nullptr) {
      const int64_t beyond = i + kAheadRuns - n - behind.rest;
      const T* p = beyond < 0 ? x + i + kAheadRuns : beyond < behind.n ? behind.next + beyond : x + i;
      for (int k = 0; k < R * L; k += 64 / sizeof(T)) __builtin_prefetch(p + k);
    }
    Vec<A> values[R];
    LaneMask<A> kept[R];
    for (int k = 0; k < R; ++k) values[k] = load<A>(x + i + k * L);
    for (int k = 0; k < R; ++k) kept[k] = ~LaneMask<A>{};
    op.template accumulate<R>(lanes, values, kept, 0);
  }
  return i;
}

// The same by a mask, which is looked at before x is touched: of a step nothing is kept, few vectors, all, or more. Behind
// the n elements there are `beyond` more.
template <class Op, class T>
inline __attribute__((always_inline)) int64_t accumulate_kept(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                              const uint8_t* m, int64_t n, int64_t beyond) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, kStep = kMaskStep<A>, R = kStep / L;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    uint64_t set = set_bytes<kStep>(m + i);
    if (set == 0) continue;
    if (__builtin_popcountll(set) <= kFewKept) {
      do {
        const int k = __builtin_ctzll(set) / L;
        accumulate_vector(op, lanes, x + i + k * L, load_mask<A>(m + i + k * L));
        set &= ~uint64_t{0} << (k * L) << (L - 1) << 1;
      } while (set != 0);
      continue;
    }
    if (i + kAhead + kStep <= n + beyond) prefetch_step<kStep>(x + i + kAhead, m + i + kAhead);
    Vec<A> values[R];
    LaneMask<A> kept[R];
    if (set == ~uint64_t{0} >> (64 - kStep)) {
      for (int k = 0; k < R; ++k) values[k] = load<A>(x + i + k * L);
      for (int k = 0; k < R; ++k) kept[k] = ~LaneMask<A>{};
      op.template accumulate<R>(lanes, values, kept, 0);
    } else {
      for (int k = 0; k < R; ++k) {
        values[k] = load<A>(x + i + k * L);
        kept[k] = load_mask<A>(m + i + k * L);
      }
      op.template accumulate<R>(lanes, values, kept, 0);
    }
  }
  return i;
}

// Elements [i, count) of a chunk, fewer than a step has, in one step. Before the chunk there are `before` more.
template <bool kBits, class Op, class T>
inline __attribute__((always_inline)) void accumulate_rest(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                           const uint8_t* m, int64_t i, int64_t count, int64_t before) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, R = kRowVectors;
  if (i == count) return;
  Vec<A> values[R];
  LaneMask<A> kept[R];
  for (int k = 0; k < R; ++k, i += L) {
    const int64_t rest = count - i;
    if (rest >= L) {
      values[k] = load<A>(x + i);
      kept[k] = kBits ? load_mask<A>(m + i) : ~LaneMask<A>{};
    } else if (rest <= 0) {
      values[k] = Vec<A>{};
      kept[k] = LaneMask<A>{};
    } else if (before + i >= L - rest) {
      // A whole vector that ends where the row does; its first lanes were accumulated before.
      values[k] = load<A>(x + count - L);
      kept[k] = last_lanes<A>(static_cast<int>(rest));
      if constexpr (kBits) kept[k] &= load_mask<A>(m + count - L);
    } else {
      T staged[L] = {};
      uint8_t bytes[L] = {};
      for (int64_t j = 0; j < rest; ++j) staged[j] = x[i + j];
      for (int64_t j = 0; j < rest; ++j) bytes[j] = kBits ? m[i + j] : 1;
      values[k] = load<A>(staged);
      kept[k] = load_mask<A>(bytes);
    }
  }
  op.template accumulate<R>(lanes, values, kept, 0);
}

// A contiguous run, without kBits of which all is kept. Behind it, x and mask go on for at least `beyond` elements. Not
// inlined: it is called from several places, and compiles slowly.
template <bool kBits, class Op, class T>
__attribute__((noinline)) void accumulate_chunks(const Op& op, typename Op::State& s, const T* x, const uint8_t* m,
                                                 int64_t n, int64_t beyond, const Behind<T>& behind) {
  for (int64_t start = 0; start < n && !op.done(s); start += kChunk, x += kChunk, m += kBits ? kChunk : 0) {
    typename Op::Lanes lanes = op.init();
    const int64_t count = std::min(kChunk, n - start);
    const int64_t i = kBits ? accumulate_kept(op, lanes, x, m, count, n + beyond - start - count)
                            : accumulate_all(op, lanes, x, count, behind.before(n - start - count));
    accumulate_rest<kBits>(op, lanes, x, m, i, count, start);
    op.collect(s, lanes);
  }
}

// A contiguous run; m is null where all is kept.
template <class Op, class T>
void accumulate_run(const Op& op, typename Op::State& s, const T* x, const uint8_t* m, int64_t n, int64_t beyond,
                    const Behind<T>& behind) {
  if (m == nullptr)
    accumulate_chunks<false>(op, s, x, m, n, beyond, behind);
  else
    accumulate_chunks<true>(op, s, x, m, n, beyond, behind);
}

// Defaults of what every reduction has.
template <class Op>
struct ReduceOp {
  // Rows of columns that the lanes hold before they are collected.
  static constexpr int64_t kPeriod = 256;
  // Whether the lanes of columns hold positions: their rows are then accumulated in order, dropped ones too.
  static constexpr bool kPositions = false;
  // Whether nothing more can change the result; and whether that can be so before the end of a row.
  static constexpr bool kEndsEarly = false;
  template <class State>
  static bool done(const State&) {
    return false;
  }
  // n contiguous elements at position `at`; m is null where all are kept. Behind them, x and m go on for `beyond` more.
  template <class State, class T>
  void run(State& s, const T* x, const uint8_t* m, int64_t n, int64_t, int64_t beyond, const Behind<T>& behind) const {
    accumulate_run(static_cast<const Op&>(*this), s, x, m, n, beyond, behind);
  }
};

inline void prefetch_lines(const void* p, int64_t n) {
  const char* bytes = static_cast<const char*>(p);
  for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(bytes + i);
}

// Reads a byte of each cache line of n bytes, in order. Short rows lie several to a page, and when they are read
// alternately, the CPU finds no order that it could read ahead in.
inline void touch(const void* p, int64_t n) {
  const char* bytes = static_cast<const char*>(p);
  char any = 0;
  for (int64_t i = 0; i < n; i += 64) any ^= bytes[i];
  asm volatile("" : : "r"(any));
}

// The functions of a Reduction.
template <class Op>
struct ReduceKernel {
  using A = typename Op::A;
  using In = typename Op::In;
  using Out = typename Op::Out;
  using State = typename Op::State;
  using Lanes = typename Op::Lanes;
  static constexpr int L = kLanes<A>, R = kColumnRows;

  static const Op& self(const void* op) { return *static_cast<const Op*>(op); }

  static void init(void* states, int64_t n) { std::fill_n(static_cast<State*>(states), n, State{}); }

  static void accumulate(const void* op, void* state, const void* x, const uint8_t* m, int64_t n, int64_t at) {
    self(op).run(*static_cast<State*>(state), static_cast<const In*>(x), m, n, at, 0, {});
  }

  // Rows. Of intervals, what is accumulated kAheadRuns elements later is prefetched: the CPU reads ahead along a row, and not
  // from where one ends early to where the next one begins.
  static void reduce_rows(const void* op, const RowRuns& rows, int64_t n, int64_t count, void* out) {
    const ReduceLoop& loop = rows.loop;
    const auto mask_of = [&](int64_t r) { return rows.m + r * loop.stride[kMask]; };
    const auto run_of = [&](int64_t r) {
      return kept_of_run(rows.mask, mask_of(r), rows.position + r * loop.stride[kPosition], rows.bits, rows.step, n);
    };
    const auto values_of = [&](int64_t r) { return reinterpret_cast<const In*>(rows.x + r * loop.stride[kX]); };
    const bool touch = loop.stride[kX] == n * int64_t{sizeof(In)}, go_on = touch && loop.stride[kMask] == n;
    // The row in which prefetched elements end, where in it, and how many of them lie behind the row in hand.
    int64_t row = 0, at = 0, ahead = 0;
    KeptRun run = run_of(0), next = run;
    for (int64_t r = 0; r < count; ++r, run = next) {
      State s;
      if (r + 1 < count) next = run_of(r + 1);
      const int64_t kept = run.end - run.begin, sure = Op::kEndsEarly ? 0 : kept;
      Behind<In> behind;
      if (rows.step != 0 && r + 1 < count) {
        ahead -= kept;
        if (row <= r) row = r + 1, at = ahead = 0;
        if (!(touch && run.end == n && next.begin == 0)) {
          if (!Op::kEndsEarly) behind = {0, values_of(r + 1) + next.begin, next.end - next.begin};
          while (ahead < kAheadRuns - sure && row < count) {
            const KeptRun later = row == r + 1 ? next : run_of(row);
            const int64_t more = std::min(later.end - later.begin - at, kAheadRuns - sure - ahead);
            prefetch_lines(values_of(row) + later.begin + at, more * int64_t{sizeof(In)});
            ahead += more;
            at += more;
            if (at == later.end - later.begin) ++row, at = 0;
          }
        }
      }
      if (run.kept != Kept::none)
        self(op).run(s, values_of(r) + run.begin, run.kept == Kept::bits ? mask_of(r) : nullptr, kept, run.begin,
                     go_on ? (count - r - 1) * n : 0, behind);
      static_cast<Out*>(out)[r] = self(op).finalize(s);
    }
  }

  static void init_columns(const void* op, Columns& columns) {
    std::fill_n(reinterpret_cast<Lanes*>(columns.lanes), ceil_div(columns.w, L), self(op).init());
    init(columns.states, columns.w);
  }

  // Rows [begin, end) of a block of columns of which some, and of which all columns are kept.
  struct BlockRanges {
    int32_t some_begin, some_end, all_begin, all_end;
  };

  // Columns with an interval of rows each: blocks of columns from the first row that one of them keeps to the last, without
  // mask bytes where all of them keep a row.
  static void accumulate_bounded(const Op& op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    constexpr int64_t B = std::max<int64_t>(kMaskBlock, L);
    Columns columns = held;
    const int64_t x_stride = run.row.stride[kX], p_stride = run.row.stride[kPosition], w = columns.w;
    const int64_t m_step = run.column.stride[kMask], blocks = ceil_div(w, B);
    int32_t starts[kColumns + B], ends[kColumns + B];
    BlockRanges ranges[kColumns / kMaskBlock + 1];
    const auto row_of = [&](int64_t position) {
      const int64_t row = position <= run.position ? 0 : ceil_div(position - run.position, p_stride);
      return static_cast<int32_t>(std::min(row, count));
    };
    int64_t first = count, last = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      BlockRanges& range = ranges[b] = {std::numeric_limits<int32_t>::max(), 0, 0, std::numeric_limits<int32_t>::max()};
      for (int64_t j = b * B; j < std::min(w, (b + 1) * B); ++j) {
        const Interval kept = run.mask.interval(run.m + j * m_step);
        starts[j] = row_of(kept.start);
        ends[j] = row_of(kept.end);
        if (starts[j] >= ends[j]) {
          // It keeps nothing: no row of the block is whole.
          starts[j] = std::numeric_limits<int32_t>::max();
          ends[j] = 0;
        }
        range = {std::min(range.some_begin, starts[j]), std::max(range.some_end, ends[j]),
                 std::max(range.all_begin, starts[j]), std::min(range.all_end, ends[j])};
      }
      first = std::min<int64_t>(first, range.some_begin);
      last = std::max<int64_t>(last, range.some_end);
    }
    for (int64_t r = first / R * R; r < last; r += R) {
      const int64_t rows = std::min<int64_t>(R, count - r);
      if (columns.pending + R > Op::kPeriod || at + r + R - columns.base > Op::kPeriod) collect_columns(&op, columns);
      if (columns.pending == 0) columns.base = at + r;
      columns.pending += R;
      const auto row = static_cast<BitsOf<A>>(at + r - columns.base);
      auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
      for (int64_t b = 0; b < blocks; ++b) {
        const BlockRanges& range = ranges[b];
        if (r + rows <= range.some_begin || r >= range.some_end) continue;
        const int64_t j = b * B, width = std::min(B, w - j);
        const In* xs[R];
        for (int k = 0; k < R; ++k)
          xs[k] = reinterpret_cast<const In*>(run.x + (r + (k < rows ? k : 0)) * x_stride) + j;
        if (rows == R && width == B && r >= range.all_begin && r + R <= range.all_end) {
          accumulate_vectors<R, false>(op, lanes + j / L, xs, nullptr, B / L, row);
          continue;
        }
        uint8_t bytes[R][B] = {};
        const uint8_t* ms[R];
        const In* some = nullptr;
        for (int k = 0; k < R; ++k) {
          ms[k] = bytes[k];
          const auto at_row = static_cast<int32_t>(r + k);
          for (int64_t i = 0; k < rows && i < width; ++i)
            bytes[k][i] = static_cast<uint8_t>((starts[j + i] <= at_row) & (at_row < ends[j + i]));
          if (!none_of(bytes[k], width))
            some = xs[k];
          else
            xs[k] = nullptr;
        }
        if (some == nullptr) continue;
        for (int k = 0; k < R; ++k)
          if (xs[k] == nullptr) xs[k] = some;
        accumulate_rows(op, lanes + j / L, xs, ms, width, row, false);
      }
    }
    held = columns;
  }

  // R rows of columns that are kept whole.
  struct WholeRows {
    const In* x[R];
    bool adjacent = false;
  };

  // Rows of which all columns are kept or none: the kept ones R at a time, wherever they are. Where they lie apart, the CPU
  // finds no order to read ahead in, and they are prefetched a step ahead.
  static void accumulate_whole_rows(const Op& op, Columns& held, const ColumnRun& run, int64_t count) {
    constexpr int64_t kNear = 2048;
    Columns columns = held;
    auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
    const int64_t x_stride = run.row.stride[kX], m_stride = run.row.stride[kMask], bytes = columns.w * sizeof(In);
    const uint8_t* ms[R];
    std::fill_n(ms, R, kAllKept.bytes);
    const auto accumulate = [&](const WholeRows& rows, bool all) {
      if (columns.pending + R > Op::kPeriod) collect_columns(&op, columns);
      columns.pending += R;
      if (rows.adjacent && x_stride == bytes && bytes <= kNear) touch(rows.x[0], R * bytes);
      accumulate_rows(op, lanes, rows.x, ms, columns.w, 0, all);
    };
    WholeRows steps[2];
    int now = 0, filled = 0;
    bool ready = false;
    for (int64_t r = 0; r < count; ++r) {
      if (run.m[r * m_stride] == 0) continue;
      WholeRows& step = steps[now];
      step.x[filled++] = reinterpret_cast<const In*>(run.x + r * x_stride);
      if (filled < R) continue;
      step.adjacent = reinterpret_cast<const char*>(step.x[0]) == run.x + (r - (R - 1)) * x_stride;
      if (!step.adjacent)
        for (const In* x : step.x) prefetch_lines(x, std::min(bytes, kNear));
      now ^= 1;
      filled = 0;
      if (ready) accumulate(steps[now], true);
      ready = true;
    }
    if (ready) accumulate(steps[now ^ 1], true);
    if (filled > 0) {
      WholeRows& rest = steps[now];
      rest.adjacent = false;
      for (int k = filled; k < R; ++k) rest.x[k] = rest.x[0], ms[k] = kNoneKept.bytes;
      accumulate(rest, false);
    }
    held = columns;
  }

  // Not in the loops that are compiled once: narrow columns have few elements a step, and a call a step costs more.
  static void accumulate_columns(const void* op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    static_assert(kTransposedRows % R == 0, "transposed rows are used in whole steps");
    if (run.mask.has_intervals() && run.column.stride[kMask] != 0 && run.column.stride[kPosition] == 0 &&
        run.row.stride[kMask] == 0 && run.row.stride[kPosition] > 0 && count <= std::numeric_limits<int32_t>::max())
      return accumulate_bounded(self(op), held, run, count, at);
    if constexpr (!Op::kPositions)
      if (!run.mask.has_intervals() && run.column.stride[kMask] == 0 && run.row.stride[kMask] != 0)
        return accumulate_whole_rows(self(op), held, run, count);
    // In registers: what is written through a pointer to char could be any of it.
    Columns columns = held;
    const Mask& mask = run.mask;
    const int64_t x_stride = run.row.stride[kX], m_stride = run.row.stride[kMask], p_stride = run.row.stride[kPosition];
    const int64_t m_step = run.column.stride[kMask], p_step = run.column.stride[kPosition];
    const int64_t w = columns.w, bytes = w * int64_t{sizeof(In)};
    int64_t begin = 0;
    if (p_stride != 0 && m_step == 0) {
      // An interval of whole rows.
      const KeptRun rows = kept_of_run(mask, run.m, run.position, 0, p_stride, count);
      begin = rows.begin;
      count = rows.end;
    }
    uint8_t staged[kTransposedRows][kColumns];
    for (int64_t r = begin; r < count; r += R) {
      const uint8_t* m = run.m + r * m_stride;
      const int64_t rows = std::min<int64_t>(R, count - r), position = run.position + r * p_stride;
      // Which of the staged rows this step uses: those that were transposed with the step before, or the first ones.
      const int64_t ahead = r % kTransposedRows, first = r - ahead;
      const bool across =
          m_step != 0 && m_step != 1 && m_stride == 1 && first + kTransposedRows <= count && !mask.has_intervals();
      if (across && ahead == 0) transpose_rows(m, m_step, w, staged[0], kColumns);
      const In* xs[R];
      const uint8_t* ms[R];
      KeptRun kept[R];
      const In* some = nullptr;
      bool bits = false;
      int whole = 0;
      for (int k = 0; k < R; ++k) {
        ms[k] = kNoneKept.bytes;
        if (k >= rows) continue;
        const uint8_t* row = m + k * m_stride;
        kept[k] = kept_of_run(mask, row, position + k * p_stride, m_step, p_step, w);
        if (across) {
          ms[k] = staged[ahead + k];
        } else if (kept[k].kept == Kept::all) {
          ms[k] = kAllKept.bytes;
          whole += kept[k].end - kept[k].begin == w;
        } else if (kept[k].kept == Kept::bits) {
          ms[k] = bits_of(mask, row, position + k * p_stride, m_step, w, staged[k]);
        }
        xs[k] = reinterpret_cast<const In*>(run.x + (r + k) * x_stride);
        if (ms[k] != kNoneKept.bytes) some = xs[k];
        bits = bits || (ms[k] != kNoneKept.bytes && ms[k] != kAllKept.bytes);
      }
      if (some == nullptr) continue;
      if (columns.pending + R > Op::kPeriod || at + r + R - columns.base > Op::kPeriod) collect_columns(op, columns);
      if (columns.pending == 0) columns.base = at + r;
      columns.pending += R;
      const auto row = static_cast<BitsOf<A>>(at + r - columns.base);
      auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
      if (whole < rows && p_step != 0) {
        accumulate_ranges(self(op), lanes, xs, kept, static_cast<int>(rows), w, row);
        continue;
      }
      // A row of which nothing is kept is not read: another stands in for it.
      for (int k = 0; k < R; ++k)
        if (ms[k] == kNoneKept.bytes) xs[k] = some;
      if (bits) {
        accumulate_blocks(self(op), lanes, xs, ms, w, row);
        continue;
      }
      if (x_stride == bytes && bytes <= 2048)
        for (int k = 0; k < R; ++k) touch(xs[k], bytes);
      accumulate_rows(self(op), lanes, xs, ms, w, row, whole == R);
    }
    held = columns;
  }

  // The mask bytes of a row, next to each other.
  static const uint8_t* bits_of(const Mask& mask, const uint8_t* m, int64_t position, int64_t step, int64_t w,
                                uint8_t* staged) {
    if (mask.has_intervals())
      stage_bits(mask, m, position, step, w, staged);
    else if (step != 1)
      for (int64_t j = 0; j < w; ++j) staged[j] = m[j * step];
    else
      return m;
    return staged;
  }

  // Up to R rows of which an interval of columns is kept: together what they all keep, and each the rest of its own.
  static void accumulate_ranges(const Op& op, Lanes* lanes, const In* const (&x)[R], const KeptRun (&kept)[R], int rows,
                                int64_t w, BitsOf<A> first) {
    int64_t begin = 0, end = rows == R ? w / L * L : 0;
    for (int k = 0; k < rows; ++k) {
      const bool some = kept[k].kept != Kept::none;
      begin = std::max(begin, some ? ceil_div(kept[k].begin, L) * L : w);
      end = std::min(end, some ? kept[k].end / L * L : 0);
    }
    if (begin < end) {
      const In* xs[R];
      for (int k = 0; k < R; ++k) xs[k] = x[k] + begin;
      accumulate_vectors<R, false>(op, lanes + begin / L, xs, nullptr, (end - begin) / L, first);
    }
    for (int k = 0; k < rows; ++k) {
      if (kept[k].kept == Kept::none) continue;
      const auto row = static_cast<BitsOf<A>>(first + k);
      if (begin < end) {
        accumulate_range(op, lanes, x[k], kept[k].begin, begin, row);
        accumulate_range(op, lanes, x[k], end, kept[k].end, row);
      } else {
        accumulate_range(op, lanes, x[k], kept[k].begin, kept[k].end, row);
      }
    }
  }

  // Columns [begin, end) of a row.
  static void accumulate_range(const Op& op, Lanes* lanes, const In* x, int64_t begin, int64_t end, BitsOf<A> first) {
    const auto accumulate_part = [&](int64_t from, int64_t to) {
      In values[L] = {};
      uint8_t bytes[L] = {};
      for (int64_t j = from; j < to; ++j) values[j % L] = x[j], bytes[j % L] = 1;
      const In* const xs[1] = {values};
      const uint8_t* const ms[1] = {bytes};
      accumulate_vectors<1, true>(op, lanes + from / L, xs, ms, 1, first);
    };
    if (begin % L != 0 && begin < end) {
      const int64_t to = std::min(end, begin / L * L + L);
      accumulate_part(begin, to);
      begin = to;
    }
    if (const int64_t vectors = (end - begin) / L; vectors > 0) {
      const In* const xs[1] = {x + begin};
      accumulate_vectors<1, false>(op, lanes + begin / L, xs, nullptr, vectors, first);
      begin += vectors * L;
    }
    if (begin < end) accumulate_part(begin, end);
  }

  // R rows of w columns by their bits, which are looked at block by block before x is read.
  static void accumulate_blocks(const Op& op, Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w,
                                BitsOf<A> first) {
    constexpr int64_t kColumnBlock = std::max<int64_t>(kMaskBlock, L);
    int64_t j = 0;
    for (; j + kColumnBlock <= w; j += kColumnBlock) {
      const In* xs[R];
      const uint8_t* ms[R];
      const In* some = nullptr;
      bool all = true;
      for (int r = 0; r < R; ++r) {
        uint64_t set = set_bytes<kMaskBlock>(m[r] + j);
        all = all && set == ~uint64_t{0};
        xs[r] = set == 0 ? nullptr : x[r] + j;
        ms[r] = m[r] + j;
        if (set != 0) some = xs[r];
      }
      if (some == nullptr) continue;
      for (int r = 0; r < R; ++r)
        if (xs[r] == nullptr) xs[r] = some;
      if (all)
        accumulate_vectors<R, false>(op, lanes + j / L, xs, nullptr, kColumnBlock / L, first);
      else
        accumulate_vectors<R, true>(op, lanes + j / L, xs, ms, kColumnBlock / L, first);
    }
    if (j == w) return;
    const In* xs[R];
    const uint8_t* ms[R];
    for (int r = 0; r < R; ++r) {
      xs[r] = x[r] + j;
      ms[r] = m[r] + j;
    }
    accumulate_rows(op, lanes + j / L, xs, ms, w - j, first, false);
  }

  // R rows of w columns, from row `first` of the lanes on.
  static void accumulate_rows(const Op& op, Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w,
                              BitsOf<A> first, bool all_kept) {
    const int64_t whole = w / L;
    if (all_kept)
      accumulate_vectors<R, false>(op, lanes, x, nullptr, whole, first);
    else
      accumulate_vectors<R, true>(op, lanes, x, m, whole, first);
    if (whole * L == w) return;
    In values[R][L] = {};
    uint8_t bytes[R][L] = {};
    const In* xs[R];
    const uint8_t* ms[R];
    for (int r = 0; r < R; ++r) {
      for (int64_t j = whole * L; j < w; ++j) values[r][j - whole * L] = x[r][j];
      for (int64_t j = whole * L; j < w; ++j) bytes[r][j - whole * L] = m[r][j];
      xs[r] = values[r];
      ms[r] = bytes[r];
    }
    accumulate_vectors<R, true>(op, lanes + whole, xs, ms, 1, first);
  }

  // N rows of whole vectors, without kBits all of them. Not inlined: it is called from several places, and compiles slowly.
  template <int N, bool kBits>
  __attribute__((noinline)) static void accumulate_vectors(const Op& op, Lanes* lanes, const In* const (&x)[N],
                                                           const uint8_t* const* m, int64_t vectors, BitsOf<A> first) {
    // A copy of the pointers would be made by vectors, which wait for the pointers that were just stored one by one.
    for (int64_t i = 0; i < vectors; ++i) {
      Vec<A> values[N];
      LaneMask<A> kept[N];
      for (int r = 0; r < N; ++r) {
        values[r] = load<A>(x[r] + i * L);
        kept[r] = kBits ? load_mask<A>(m[r] + i * L) : ~LaneMask<A>{};
      }
      op.template accumulate<N>(lanes[i], values, kept, first);
    }
  }

  static void collect_columns(const void* op, Columns& columns) {
    if (columns.pending == 0) return;
    auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
    auto* states = reinterpret_cast<State*>(columns.states);
    for (int64_t j = 0; j < columns.w; ++j)
      self(op).combine(states[j], self(op).lane(lanes[j / L], j % L, columns.base));
    std::fill_n(lanes, ceil_div(columns.w, L), self(op).init());
    columns.pending = 0;
  }

  static void combine(const void* op, void* state, const void* other) {
    self(op).combine(*static_cast<State*>(state), *static_cast<const State*>(other));
  }

  static void finalize(const void* op, const void* states, int64_t n, void* out) {
    for (int64_t i = 0; i < n; ++i) static_cast<Out*>(out)[i] = self(op).finalize(static_cast<const State*>(states)[i]);
  }
};

template <class Op>
void reduce(const Op& op, const ReduceNest& nest, const void* x, void* out) {
  using K = ReduceKernel<Op>;
  static_assert(sizeof(typename Op::State) <= 64 && alignof(typename Op::State) <= 16);
  const Reduction kernel{&op,
                         sizeof(typename Op::In),
                         sizeof(typename Op::Out),
                         sizeof(typename Op::State),
                         sizeof(typename Op::Lanes),
                         K::L,
                         K::init,
                         K::accumulate,
                         K::reduce_rows,
                         K::init_columns,
                         K::accumulate_columns,
                         K::collect_columns,
                         K::combine,
                         K::finalize};
  run_reduction(kernel, nest, x, out);
}

// Calls call(T{}) with the signed integer that is as wide as the dtype.
template <class Call>
void with_width(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Long:
    case ScalarType::Double: return call(int64_t{});
    case ScalarType::Int:
    case ScalarType::Float: return call(int32_t{});
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16: return call(int16_t{});
    default: return call(int8_t{});
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
