// The inner loops of a reduction over contiguous runs: steps of vectors, and rows with their masks. Compiled once a target.
#include "reduce_loops.h"
#include "simd.h"
#if defined(MASKWISE_REDUCE_ROWS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_ROWS_H
#else
#define MASKWISE_REDUCE_ROWS_H
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

// The functions of a Reduction, for rows.
template <class Op>
struct ReduceRows {
  using A = typename Op::A;
  using In = typename Op::In;
  using Out = typename Op::Out;
  using State = typename Op::State;
  using Lanes = typename Op::Lanes;
  static constexpr int L = kLanes<A>;

  static const Op& self(const void* op) { return *static_cast<const Op*>(op); }

  static void init(void* states, int64_t n) { std::fill_n(static_cast<State*>(states), n, State{}); }

  static void accumulate(const void* op, void* state, const void* x, const uint8_t* m, int64_t n, int64_t at) {
    self(op).run(*static_cast<State*>(state), static_cast<const In*>(x), m, n, at, 0, {});
  }

  // Rows. Of intervals, what is accumulated kAheadRuns elements later is prefetched: the CPU reads ahead along a row, and
  // not from where one ends early to where the next one begins.
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
};

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
