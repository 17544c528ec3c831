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
// How far ahead of a row's loop its memory is prefetched, in elements. Two streams of different pace, values and mask, are
// more than the hardware follows by itself: this saves a fifth of the time where memory is the limit.
constexpr int64_t kAhead = 512;

// Joins v[0], ..., v[R - 1] in pairs: short chains, and rounding errors that grow with the logarithm.
template <int R, class V, class Join>
inline V tree(const V (&v)[R], const Join& join) {
  static_assert(R == 1 || R == 4 || R == 8);
  if constexpr (R == 1) return v[0];
  else if constexpr (R == 4) return join(join(v[0], v[1]), join(v[2], v[3]));
  else return join(join(join(v[0], v[1]), join(v[2], v[3])), join(join(v[4], v[5]), join(v[6], v[7])));
}

// Accumulates at most kChunk elements. `before` elements before x may be read too.
template <class Op, class T>
inline __attribute__((always_inline)) void accumulate_chunk(const Op& op, typename Op::Lanes& lanes, const T* x,
                                                            const uint8_t* m, int64_t n, int64_t before) {
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
    op.template accumulate<R>(lanes, values, kept, 0);
  }
  for (; i < n; i += L) {
    Vec<A> values[1];
    LaneMask<A> kept[1];
    const int rest = static_cast<int>(n - i);
    if (rest >= L) {
      values[0] = load<A>(x + i);
      kept[0] = load_mask<A>(m + i);
    } else if (before + i >= L - rest) {
      // A whole vector that ends where the row does; its first lanes were accumulated before.
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
    op.template accumulate<1>(lanes, values, kept, 0);
  }
}

// A contiguous run; m is null where all is kept. Not inlined: it is called from several places, and compiles slowly.
template <class Op, class T>
__attribute__((noinline)) void accumulate_run(const Op& op, typename Op::State& s, const T* x, const uint8_t* m,
                                              int64_t n) {
  for (int64_t i = 0; i < n && !op.done(s); i += kChunk) {
    typename Op::Lanes lanes = op.init();
    const int64_t count = std::min(kChunk, n - i);
    // Of the mask that stands for "all kept" nothing lies before the first byte.
    accumulate_chunk(op, lanes, x + i, m == nullptr ? kAllKept.bytes : m + i, count, m == nullptr ? 0 : i);
    op.collect(s, lanes);
  }
}

// Defaults of what every reduction has.
template <class Op>
struct ReduceOp {
  // Rows of columns that the lanes hold before they are collected.
  static constexpr int64_t kPeriod = 256;
  // Whether nothing more can change the result.
  template <class State>
  static bool done(const State&) {
    return false;
  }
  // n contiguous elements at position `at`; m is null where all are kept.
  template <class State, class T>
  void run(State& s, const T* x, const uint8_t* m, int64_t n, int64_t) const {
    accumulate_run(static_cast<const Op&>(*this), s, x, m, n);
  }
};

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
    self(op).run(*static_cast<State*>(state), static_cast<const In*>(x), m, n, at);
  }

  static void reduce_rows(const void* op, const char* x, int64_t x_stride, const uint8_t* m, int64_t m_stride, bool bits,
                          int64_t n, int64_t rows, void* out) {
    for (int64_t r = 0; r < rows; ++r, x += x_stride, m += m_stride) {
      State s;
      if (bits || kept_of_run(m, 0) == Kept::all)
        self(op).run(s, reinterpret_cast<const In*>(x), bits ? m : nullptr, n, 0);
      static_cast<Out*>(out)[r] = self(op).finalize(s);
    }
  }

  static void init_columns(const void* op, Columns& columns) {
    std::fill_n(reinterpret_cast<Lanes*>(columns.lanes), ceil_div(columns.w, L), self(op).init());
    init(columns.states, columns.w);
  }

  // Not in the loops that are compiled once: narrow columns have few elements a step, and a call a step costs more.
  static void accumulate_columns(const void* op, Columns& held, const char* x, const uint8_t* m, const Loop<2>& loop,
                                 int64_t m_step, int64_t count, int64_t at) {
    static_assert(kTransposedRows % R == 0, "transposed rows are used in whole steps");
    // In registers: what is written through a pointer to char could be any of it.
    Columns columns = held;
    const int64_t x_stride = loop.stride[kX], m_stride = loop.stride[kMask];
    const int64_t w = columns.w, bytes = w * int64_t{sizeof(In)};
    uint8_t staged[kTransposedRows][kColumns];
    for (int64_t r = 0; r < count; r += R) {
      // Which of the staged rows this step uses: those that were transposed with the step before, or the first ones.
      const int64_t ahead = r % kTransposedRows, first = r - ahead;
      const bool across = m_step != 0 && m_step != 1 && m_stride == 1 && first + kTransposedRows <= count;
      if (across && ahead == 0) transpose_rows(m + r, m_step, w, staged[0], kColumns);
      const In* xs[R];
      const uint8_t* ms[R];
      const In* some = nullptr;
      for (int k = 0; k < R; ++k) {
        ms[k] = kNoneKept.bytes;
        if (r + k >= count) continue;
        const uint8_t* row = m + (r + k) * m_stride;
        if (across) {
          ms[k] = staged[ahead + k];
        } else if (const Kept kept = kept_of_run(row, m_step); kept == Kept::all) {
          ms[k] = kAllKept.bytes;
        } else if (kept == Kept::bits && m_step == 1) {
          if (!none_of(row, w)) ms[k] = row;
        } else if (kept == Kept::bits) {
          for (int64_t j = 0; j < w; ++j) staged[k][j] = row[j * m_step];
          ms[k] = staged[k];
        }
        xs[k] = reinterpret_cast<const In*>(x + (r + k) * x_stride);
        if (ms[k] != kNoneKept.bytes) some = xs[k];
      }
      if (some == nullptr) continue;
      // A row of which nothing is kept is not read: another stands in for it.
      for (int k = 0; k < R; ++k)
        if (ms[k] == kNoneKept.bytes) xs[k] = some;
      if (x_stride == bytes && m_stride == w && bytes <= 2048 && r + R <= count) {
        touch(x + r * bytes, R * bytes);
        touch(m + r * w, R * w);
      }
      if (columns.pending + R > Op::kPeriod || at + r + R - columns.base > Op::kPeriod) collect_columns(op, columns);
      if (columns.pending == 0) columns.base = at + r;
      columns.pending += R;
      const auto first_row = static_cast<BitsOf<A>>(at + r - columns.base);
      accumulate_rows(self(op), reinterpret_cast<Lanes*>(columns.lanes), xs, ms, w, first_row);
    }
    held = columns;
  }

  // R rows of w columns, from row `first` of the lanes on.
  static void accumulate_rows(const Op& op, Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w,
                              BitsOf<A> first) {
    const int64_t whole = w / L;
    accumulate_vectors(op, lanes, x, m, whole, first);
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
    accumulate_vectors(op, lanes + whole, xs, ms, 1, first);
  }

  // Not inlined: it is called from two places, and compiles slowly.
  __attribute__((noinline)) static void accumulate_vectors(const Op& op, Lanes* lanes, const In* const (&x)[R],
                                                           const uint8_t* const (&m)[R], int64_t vectors,
                                                           BitsOf<A> first) {
    // A copy of the pointers would be made by vectors, which wait for the pointers that were just stored one by one.
    for (int64_t i = 0; i < vectors; ++i) {
      Vec<A> values[R];
      LaneMask<A> kept[R];
      for (int r = 0; r < R; ++r) {
        values[r] = load<A>(x[r] + i * L);
        kept[r] = load_mask<A>(m[r] + i * L);
      }
      op.template accumulate<R>(lanes[i], values, kept, first);
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
void reduce(const Op& op, const ReduceNest& nest, const void* x, const void* m, void* out) {
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
  run_reduction(kernel, nest, x, m, out);
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
