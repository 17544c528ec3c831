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
// How far ahead of a loop what is kept is prefetched, in bytes: of runs in the order in which they are accumulated, and by a
// mask in that of x, so that it is enough where little is kept.
constexpr int64_t kAheadRuns = 12288, kAheadBits = 32768;
// Vectors that are looked at through their mask together.
constexpr int kMaskVectors = 64;

// Joins v[0], ..., v[R - 1] in pairs: short chains, and rounding errors that grow with the logarithm.
template <int R, class V, class Join>
inline V tree(const V (&v)[R], const Join& join) {
  static_assert(R == 1 || R == 2 || R == 4 || R == 8);
  if constexpr (R == 1) return v[0];
  else if constexpr (R == 2) return join(v[0], v[1]);
  else if constexpr (R == 4) return join(join(v[0], v[1]), join(v[2], v[3]));
  else return join(join(join(v[0], v[1]), join(v[2], v[3])), join(join(v[4], v[5]), join(v[6], v[7])));
}

// Vectors of a row that are accumulated in one step, and elements of it; of a mask at most a word's.
template <class A>
constexpr int kRowStep = kRowVectors * kLanes<A>;
template <class A>
constexpr int kMaskStep = std::min(64, kRowStep<A>);

// The N bits of a mask whose groups of E are looked at: one bit for each group, set where one of its bits is.
template <int E, int N>
inline uint64_t any_of_groups(uint64_t set) {
  constexpr int kGroups = N / E;
  static_assert(E * kGroups == N && N <= 64);
  if constexpr (E == 1) return set;
  if constexpr (kGroups == 1) return set != 0;
  for (int s = E / 2; s > 0; s /= 2) set |= set >> s;
  uint64_t firsts = 0;
  for (int k = 0; k < kGroups; ++k) firsts |= uint64_t{1} << (k * E);
#if defined(MASKWISE_F16C)
  return _pext_u64(set, firsts);
#else
  set &= firsts;
  uint64_t groups = 0;
  for (int k = 0; k < kGroups; ++k) groups |= set >> (k * E - k) & uint64_t{1} << k;
  return groups;
#endif
}

// Of n mask bytes, whole steps, which groups of E have one that is set.
template <int E, class A>
inline uint64_t kept_groups(const uint8_t* m, int64_t n) {
  constexpr int kStep = kMaskStep<A>;
  uint64_t groups = 0;
  for (int64_t i = 0, at = 0; i < n; i += kStep, at += kStep / E) {
    if constexpr (E % 8 == 0 && kStep == 64)
      groups |= any_of_groups<E / 8, 8>(set_words<64>(m + i)) << at;
    else
      groups |= any_of_groups<E, kStep>(set_bytes<kStep>(m + i)) << at;
  }
  return groups;
}

// The lowest n bits.
inline uint64_t low_bits(int64_t n) { return ~uint64_t{0} >> (64 - n); }

// Into the second cache: as many lines as are on their way there, the first one could not wait for, and what it is told to
// fetch sends the CPU reading ahead into what is dropped. Always inlined: GCC takes a function that only prefetches for one
// without effects, and drops its calls.
template <bool kNearest = false>
inline __attribute__((always_inline)) void prefetch_line(const void* p) {
  __builtin_prefetch(p, 0, kNearest ? 3 : 2);
}

inline __attribute__((always_inline)) void prefetch_lines(const void* p, int64_t n) {
  const char* bytes = static_cast<const char*>(p);
  for (int64_t i = 0; i < n; i += 64) prefetch_line(bytes + i);
}

// How far what is accumulated later is prefetched, in its order: over the ends of runs, where the CPU stops reading ahead.
struct Ahead {
  const char* line = nullptr;  // the next one of a run, and its end
  const char* end = nullptr;
  int64_t lines = 0;  // that were prefetched
  // Makes the next run the one to prefetch, by `set`. False if there is none.
  bool (*next)(Ahead&);

  static const char* line_of(const void* p) {
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{63});
  }
  void set(const void* first, const void* last) {
    line = line_of(first);
    end = static_cast<const char*>(last);
  }
  template <int kLines, bool kNearest>
  __attribute__((always_inline)) void advance() {
    if (end - line < kLines * 64) return advance(kLines);
    for (int k = 0; k < kLines; ++k) prefetch_line<kNearest>(line + k * 64);
    line += kLines * 64;
    lines += kLines;
  }
  __attribute__((noinline)) void advance(int64_t more) {
    for (; more > 0; --more, ++lines, line += 64) {
      if (line >= end && !next(*this)) return;
      prefetch_line(line);
    }
  }
};

// Accumulates the first elements of a run, all of them kept, in whole steps; returns how many.
template <class Op, class T>
inline __attribute__((always_inline)) int64_t accumulate_all(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                             int64_t n, Ahead* ahead) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, R = kRowVectors, kLines = R * L * static_cast<int>(sizeof(T)) / 64;
  const auto step = [&](int64_t i) {
    Vec<A> values[R];
    LaneMask<A> kept[R];
    for (int k = 0; k < R; ++k) values[k] = load<A>(x + i + k * L);
    for (int k = 0; k < R; ++k) kept[k] = ~LaneMask<A>{};
    op.template accumulate<R>(lanes, values, kept, 0);
  };
  int64_t i = 0;
  if (ahead != nullptr)
    for (; i + R * L <= n; i += R * L) {
      ahead->advance<std::max(1, kLines), Op::kComputeBound>();
      step(i);
    }
  for (; i + R * L <= n; i += R * L) step(i);
  return i;
}

// The vectors of a block that have something kept, R at a time wherever they are.
template <class Op, class T>
inline __attribute__((always_inline)) void accumulate_sparse(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                             const uint8_t* m, uint64_t vectors) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, R = kRowVectors;
  int count = __builtin_popcountll(vectors);
  for (; count >= R; count -= R) {
    Vec<A> values[R];
    LaneMask<A> kept[R];
    for (int k = 0; k < R; ++k, vectors &= vectors - 1) {
      const int64_t at = __builtin_ctzll(vectors) * L;
      values[k] = load<A>(x + at);
      kept[k] = load_mask<A>(m + at);
    }
    op.template accumulate<R>(lanes, values, kept, 0);
  }
  if (count == 0) return;
  // The first of the rest stands in for those that are missing, with nothing kept.
  const int64_t first = __builtin_ctzll(vectors) * L;
  Vec<A> values[R];
  LaneMask<A> kept[R];
  for (int k = 0; k < R; ++k) {
    const int64_t at = k < count ? __builtin_ctzll(vectors) * L : first;
    vectors &= vectors - 1;
    values[k] = load<A>(x + at);
    kept[k] = load_mask<A>(k < count ? m + at : kNoneKept.bytes);
  }
  op.template accumulate<R>(lanes, values, kept, 0);
}

// A step of which some is kept, by its mask.
template <class Op, class T>
inline __attribute__((always_inline)) void accumulate_step(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                           const uint8_t* m, uint64_t set) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, kStep = kMaskStep<A>, R = kStep / L;
  Vec<A> values[R];
  LaneMask<A> kept[R];
  if (set == low_bits(kStep)) {
    for (int k = 0; k < R; ++k) values[k] = load<A>(x + k * L);
    for (int k = 0; k < R; ++k) kept[k] = ~LaneMask<A>{};
    op.template accumulate<R>(lanes, values, kept, 0);
  } else {
    for (int k = 0; k < R; ++k) {
      values[k] = load<A>(x + k * L);
      kept[k] = load_mask<A>(m + k * L);
    }
    op.template accumulate<R>(lanes, values, kept, 0);
  }
}

// Whether few cache lines of n elements, whole steps, have something kept, by some of the steps. Of what is there alone, and
// not of what was before it: the order in which a row is added up must not depend on how rows are handed to threads.
template <class A, int kLine>
inline bool few_lines(const uint8_t* m, int64_t n) {
  constexpr int kStep = kMaskStep<A>, kSamples = 8;
  const int64_t apart = std::max<int64_t>(n / kStep / kSamples, 1) * kStep;
  int64_t lines = 0, all = 0;
  for (int64_t i = 0; i < n; i += apart, all += kStep / kLine)
    lines += __builtin_popcountll(any_of_groups<kLine, kStep>(set_bytes<kStep>(m + i)));
  return lines * 8 < all * 3;
}

// The first elements of a run by a mask, which is looked at before x is touched, in whole steps; returns how many. Where few
// lines are kept, blocks of vectors are looked at, and what is kept kAheadBits later is prefetched. Where many are, the CPU
// reads ahead by itself. Behind the n elements there are `beyond` more.
template <class Op, class T>
inline __attribute__((always_inline)) int64_t accumulate_kept(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                              const uint8_t* m, int64_t n, int64_t beyond) {
  using A = typename Op::A;
  constexpr int L = kLanes<A>, kStep = kMaskStep<A>, kLine = std::min<int>(64 / sizeof(T), kStep);
  constexpr int64_t kBlock = kMaskVectors * L, kFar = kAheadBits / sizeof(T);
  const int64_t whole = n / kStep * kStep;
  if (Op::kEndsEarly || !few_lines<A, kLine>(m, whole)) {
    for (int64_t i = 0; i < whole; i += kStep)
      if (const uint64_t set = set_bytes<kStep>(m + i); set != 0) accumulate_step(op, lanes, x + i, m + i, set);
    return whole;
  }
  for (int64_t begin = 0; begin < whole; begin += kBlock) {
    const int64_t count = std::min(kBlock, whole - begin), later = begin + kFar;
    if (later + count <= n + beyond)
      for (uint64_t lines = kept_groups<kLine, A>(m + later, count); lines != 0; lines &= lines - 1)
        prefetch_line<Op::kComputeBound>(x + later + __builtin_ctzll(lines) * kLine);
    const uint64_t vectors = kept_groups<L, A>(m + begin, count);
    if (vectors != 0) accumulate_sparse(op, lanes, x + begin, m + begin, vectors);
  }
  return whole;
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
                                                 int64_t n, int64_t beyond, Ahead* ahead) {
  int64_t count = 0;
  for (int64_t start = 0; start < n && !op.done(s); start += count) {
    typename Op::Lanes lanes = op.init();
    // What can end early mostly does so at once.
    const int64_t most = Op::kEndsEarly && start == 0 ? kRowStep<typename Op::A> : kChunk;
    count = std::min(most, n - start);
    const uint8_t* bytes = kBits ? m + start : nullptr;
    const int64_t i = kBits ? accumulate_kept(op, lanes, x + start, bytes, count, n + beyond - start - count)
                            : accumulate_all(op, lanes, x + start, count, ahead);
    accumulate_rest<kBits>(op, lanes, x + start, bytes, i, count, start);
    op.collect(s, lanes);
  }
}

// A contiguous run; m is null where all is kept.
template <class Op, class T>
void accumulate_run(const Op& op, typename Op::State& s, const T* x, const uint8_t* m, int64_t n, int64_t beyond,
                    Ahead* ahead) {
  if (m == nullptr)
    accumulate_chunks<false>(op, s, x, m, n, beyond, ahead);
  else
    accumulate_chunks<true>(op, s, x, m, n, beyond, ahead);
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
  // Whether the arithmetic takes longer than memory does: what is prefetched is then wanted in the first cache.
  static constexpr bool kComputeBound = false;
  template <class State>
  static bool done(const State&) {
    return false;
  }
  // n contiguous elements at position `at`; m is null where all are kept. Behind them, x and m go on for `beyond` more.
  template <class State, class T>
  void run(State& s, const T* x, const uint8_t* m, int64_t n, int64_t, int64_t beyond, Ahead* ahead) const {
    accumulate_run(static_cast<const Op&>(*this), s, x, m, n, beyond, ahead);
  }
};

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
    self(op).run(*static_cast<State*>(state), static_cast<const In*>(x), m, n, at, 0, nullptr);
  }

  // Where row r begins, and what is kept of it.
  static const In* values_of(const RowRuns& rows, int64_t r) {
    return reinterpret_cast<const In*>(rows.x + r * rows.loop.stride[kX]);
  }
  static KeptRun run_of(const RowRuns& rows, int64_t r, int64_t n) {
    return kept_of_run(rows.mask, rows.m + r * rows.loop.stride[kMask], rows.position + r * rows.loop.stride[kPosition],
                       rows.bits, rows.step, n);
  }

  // The runs of rows, one after the other.
  struct RowsAhead : Ahead {
    const RowRuns& rows;
    int64_t n, count, row = -1;
    RowsAhead(const RowRuns& of, int64_t length, int64_t number) : rows(of), n(length), count(number) { next = next_row; }
    static bool next_row(Ahead& ahead) {
      auto& self = static_cast<RowsAhead&>(ahead);
      while (++self.row < self.count) {
        const KeptRun run = run_of(self.rows, self.row, self.n);
        if (run.begin == run.end) continue;
        const In* x = values_of(self.rows, self.row);
        self.set(x + run.begin, x + run.end);
        return true;
      }
      self.row = self.count;
      return false;
    }
  };

  // Whether the intervals of rows leave something out between them.
  static bool have_gaps(const RowRuns& rows, int64_t n, int64_t count) {
    if (rows.step == 0) return false;
    if (rows.loop.stride[kX] != n * int64_t{sizeof(In)}) return true;
    for (int64_t r = 0; r < count; ++r) {
      const KeptRun run = run_of(rows, r, n);
      if (run.end - run.begin < n) return true;
    }
    return false;
  }

  // Rows. Of intervals with gaps between them, what is accumulated kAheadRuns later is prefetched: the CPU reads ahead along a
  // row, and not from where one ends early to where the next one begins.
  static void reduce_rows(const void* op, const RowRuns& rows, int64_t n, int64_t count, void* out) {
    constexpr int64_t kEarlyRows = 8, kEarlyBytes = 256;
    const bool go_on = rows.loop.stride[kX] == n * int64_t{sizeof(In)} && rows.loop.stride[kMask] == n;
    RowsAhead ahead(rows, n, count);
    const bool gaps = !Op::kEndsEarly && have_gaps(rows, n, count);
    int64_t lines = 0;
    for (int64_t r = 0; r < count; ++r) {
      State s;
      const KeptRun run = run_of(rows, r, n);
      if (run.kept != Kept::none) {
        const In* x = values_of(rows, r) + run.begin;
        const int64_t kept = run.end - run.begin;
        if (gaps) {
          ahead.advance(lines + kAheadRuns / 64 - ahead.lines);
          lines += (reinterpret_cast<const char*>(x + kept) - Ahead::line_of(x) + 63) / 64;
        }
        if (Op::kEndsEarly && rows.bits == 0 && r + kEarlyRows < count) {
          const KeptRun later = run_of(rows, r + kEarlyRows, n);
          prefetch_lines(values_of(rows, r + kEarlyRows) + later.begin,
                         std::min<int64_t>((later.end - later.begin) * sizeof(In), kEarlyBytes));
        }
        self(op).run(s, x, run.kept == Kept::bits ? rows.m + r * rows.loop.stride[kMask] : nullptr, kept, run.begin,
                     go_on ? (count - r - 1) * n : 0, gaps ? &ahead : nullptr);
      }
      static_cast<Out*>(out)[r] = self(op).finalize(s);
    }
  }
};

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
