// The inner loops of functions that map slices to slices. Compiled once a target.
//
// Such a function is a struct Op, derived from SliceOp, with
//   T, A                      the element type, and the type of the arithmetic
//   State                     kFields vectors; each lane accumulates elements of its own; init() is the start
//   accumulate(s, group, n)   n vectors of elements
//   combine(s, other)         joins two states, lane by lane
//   finalize(s)               makes sums the coefficients that map needs, lane by lane
//   map(s, x, grad)           the result for kept elements
// and, where the maximum of a slice must be known before exponentials are taken (kThreePass),
//   kHolds                    whether the result can hold what exponential() gives until scale() has the sum
//   accumulate_max(s, g, n)   the largest of n vectors, lane by lane
//   combine_max(s)            gives every lane the largest of all
//   shift(s)                  what is subtracted before exponentials are taken
//   exponential(shift, x)     the exponential
//   add(s, sum)               adds up exponentials, lane by lane
//   scale(s, e)               the result for a kept element, of which e was held
#include "simd.h"
#include "slice_loops.h"
#if defined(MASKWISE_SLICE_KERNEL_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SLICE_KERNEL_H
#else
#define MASKWISE_SLICE_KERNEL_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Defaults of what every function of slices has.
struct SliceOp {
  static constexpr bool kReadsGrad = false;  // whether it reads a second operand, the gradient of the result
  static constexpr int kDropped = 0;         // what stands where an element is dropped
  static constexpr bool kThreePass = false;
  static constexpr bool kHolds = false;
};

// Whether all of N mask bytes are set; N is that of whole vectors.
template <int N>
inline bool all_of(const uint8_t* m) {
  auto least = load_raw<Vec<uint8_t>>(m);
  for (int i = MASKWISE_VECTOR_BYTES; i < N; i += MASKWISE_VECTOR_BYTES)
    least = load_raw<Vec<uint8_t>>(m + i) < least ? load_raw<Vec<uint8_t>>(m + i) : least;
  return !any_lane(least == 0);
}

// Some vectors of x, of the gradient and of the mask, each a step from the one before.
template <class Op, bool kMasked>
struct Group {
  using A = typename Op::A;
  using T = typename Op::T;
  const T* values;
  const T* gradients;
  const uint8_t* bits;
  int64_t value_step, gradient_step, bit_step;

  LaneMask<A> kept(int k) const {
    if constexpr (kMasked) return load_mask<A>(bits + k * bit_step);
    return ~LaneMask<A>{};
  }
  // What is dropped comes as +0, so that nothing of it can leak.
  Vec<A> x(int k) const { return only(load<A>(values + k * value_step), k); }
  Vec<A> grad(int k) const { return only(load<A>(gradients + k * gradient_step), k); }
  Vec<A> only(Vec<A> v, int k) const {
    if constexpr (kMasked) return keep<A>(v, kept(k));
    return v;
  }
  // x with another value where it is dropped.
  Vec<A> x_or(int k, Vec<A> other) const {
    const Vec<A> v = load<A>(values + k * value_step);
    if constexpr (kMasked) return kept(k) ? v : other;
    return v;
  }
};

// The elements of a run that fill no vector, next to zeros that are dropped.
template <class Op>
struct Tail {
  using T = typename Op::T;
  static constexpr int L = kLanes<typename Op::A>;
  T x[L] = {}, grad[L] = {};
  uint8_t bits[L] = {};

  Tail(const T* values, const T* gradients, const uint8_t* m, int64_t n) {
    std::memcpy(x, values, n * sizeof(T));
    if (Op::kReadsGrad) std::memcpy(grad, gradients, n * sizeof(T));
    for (int64_t k = 0; k < n; ++k) bits[k] = m == nullptr ? 1 : m[k];
  }
  Group<Op, true> group() const { return {x, grad, bits, 0, 0, 0}; }
};

// The functions of a SliceKernel.
template <class Op>
struct SliceKernels {
  using T = typename Op::T;
  using A = typename Op::A;
  using State = typename Op::State;
  static constexpr int L = kLanes<A>;
  static constexpr int kWide = kGroup * L;
  // Only wide elements are written past the caches: see can_stream.
  static constexpr bool kStreams = sizeof(T) >= 4;
  // Cache lines from which on it pays.
  static constexpr int64_t kLeastLines = 4;

  static const Op& self(const void* op) { return *static_cast<const Op*>(op); }
  static State& state_of(void* state) { return *static_cast<State*>(state); }
  static const State& state_of(const void* state) { return *static_cast<const State*>(state); }
  static const T* elements(const char* p) { return reinterpret_cast<const T*>(p); }
  static T* elements(char* p) { return reinterpret_cast<T*>(p); }

  static void init(const void* op, void* states, int64_t n) {
    std::fill_n(static_cast<State*>(states), n, self(op).init());
  }

  template <bool kMasked>
  MASKWISE_FLATTEN static inline int64_t accumulate_whole(const Op& op, State& s, const T* x, const T* g, const uint8_t* m, int64_t n) {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
      if (kMasked && none_of<kWide>(m + i)) continue;
      if (kMasked && all_of<kWide>(m + i))
        op.accumulate(s, Group<Op, false>{x + i, g + i, m + i, L, L, L}, kGroup);
      else
        op.accumulate(s, Group<Op, kMasked>{x + i, g + i, m + i, L, L, L}, kGroup);
    }
    if (n - i >= L) {
      const int count = static_cast<int>((n - i) / L);
      op.accumulate(s, Group<Op, kMasked>{x + i, g + i, m + i, L, L, L}, count);
      i += count * L;
    }
    return i;
  }

  static void accumulate(const void* self_op, void* state, const SliceRun& run, int64_t n) {
    const Op& op = self(self_op);
    const T *x = elements(run.x), *g = elements(run.grad);
    const int64_t i = run.bits == nullptr ? accumulate_whole<false>(op, state_of(state), x, g, run.bits, n)
                                          : accumulate_whole<true>(op, state_of(state), x, g, run.bits, n);
    if (i == n) return;
    const Tail<Op> tail(x + i, g + i, run.bits == nullptr ? nullptr : run.bits + i, n - i);
    op.accumulate(state_of(state), tail.group(), 1);
  }

  static void combine(const void* op, void* state, const void* other) {
    self(op).combine(state_of(state), state_of(other));
  }

  // Joins the lanes of a state: every lane then holds the whole.
  static void join_lanes(const Op& op, State& s) {
    for (int shift = L / 2; shift > 0; shift /= 2) {
      State other = s;
      for (int f = 0; f < Op::kFields; ++f) {
        A lanes[L], rotated[L];
        std::memcpy(lanes, &s.field[f], sizeof(lanes));
        for (int i = 0; i < L; ++i) rotated[i] = lanes[(i + shift) % L];
        std::memcpy(&other.field[f], rotated, sizeof(rotated));
      }
      op.combine(s, other);
    }
  }

  static void finalize(const void* op, void* states, int64_t n, bool one_slice) {
    for (int64_t i = 0; i < n; ++i) {
      State& s = static_cast<State*>(states)[i];
      if (one_slice) join_lanes(self(op), s);
      self(op).finalize(s);
    }
  }

  // Calls part(streams, begin, end) for n results at `out`: past the caches whole cache lines, where there are some.
  template <class Part>
  static void in_lines(const T* out, int64_t n, bool stream, const Part& part) {
    constexpr int64_t kLine = 64 / sizeof(T);
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % 64 / sizeof(T));
    const int64_t begin = past == 0 ? 0 : kLine - past;
    if (!kStreams || !stream || n < begin + kLeastLines * kLine || !can_stream(out + begin))
      return part(std::false_type{}, int64_t{0}, n);
    const int64_t end = begin + (n - begin) / kLine * kLine;
    if (begin > 0) part(std::false_type{}, int64_t{0}, begin);
    part(std::bool_constant<kStreams>{}, begin, end);
    if (end < n) part(std::false_type{}, end, n);
  }

  template <bool kMasked, bool kStream>
  static inline void map_one(const Op& op, const State& s, const T* x, const T* g, const uint8_t* m, T* out) {
    Vec<A> grad = {};
    if constexpr (Op::kReadsGrad) grad = load<A>(g);
    Vec<A> v = op.map(s, load<A>(x), grad);
    if constexpr (kMasked) v = drop<A>(v, load_mask<A>(m), A(Op::kDropped));
    store<kStream && kStreams>(out, v);
  }

  template <bool kStream>
  static inline void fill_one(T* out) {
    store<kStream && kStreams>(out, splat<A>(A(Op::kDropped)));
  }

  // Whole vectors of a run. The state is a copy, so that it stays in registers.
  template <bool kMasked, bool kStream>
  MASKWISE_FLATTEN static void map_whole(const Op& op, const State s, const T* x, const T* g, const uint8_t* m, T* out, int64_t n) {
    int64_t i = 0;
    if constexpr (kMasked) {
      for (; i + kWide <= n; i += kWide) {
        const bool none = none_of<kWide>(m + i);
        for (int64_t k = i; k < i + kWide; k += L)
          none ? fill_one<kStream>(out + k) : map_one<true, kStream>(op, s, x + k, g + k, m + k, out + k);
      }
    }
    for (; i + L <= n; i += L) map_one<kMasked, kStream>(op, s, x + i, g + i, m + i, out + i);
  }

  template <bool kMasked>
  static void map_run(const Op& op, const State& s, const T* x, const T* g, const uint8_t* m, T* out, int64_t n, bool stream) {
    in_lines(out, n, stream, [&](auto streams, int64_t begin, int64_t end) {
      const auto* bits = kMasked ? m + begin : nullptr;
      map_whole<kMasked, streams>(op, s, x + begin, g + begin, bits, out + begin, end - begin);
      const int64_t rest = (end - begin) % L, whole = end - rest;
      if (rest == 0) return;
      const Tail<Op> tail(x + whole, g + whole, kMasked ? m + whole : nullptr, rest);
      T results[L];
      map_one<true, false>(op, s, tail.x, tail.grad, tail.bits, results);
      std::memcpy(out + whole, results, rest * sizeof(T));
    });
  }

  static void map(const void* self_op, const void* state, const SliceRun& run, int64_t n, bool stream) {
    (run.bits == nullptr ? map_run<false> : map_run<true>)(self(self_op), state_of(state), elements(run.x),
                                                           elements(run.grad), run.bits, elements(run.out), n, stream);
  }

  static void fill(char* results, int64_t n, bool stream) {
    T* out = elements(results);
    in_lines(out, n, stream, [&](auto streams, int64_t begin, int64_t end) {
      if constexpr (streams)
        for (int64_t i = begin; i < end; i += L) fill_one<true>(out + i);
      else
        std::fill_n(out + begin, end - begin, static_cast<T>(A(Op::kDropped)));
    });
  }

  static void rows(const void* op, const SliceRows& rows, bool stream) {
    constexpr int64_t kSize = sizeof(T);
    const SliceLoop& loop = rows.loop;
    SliceRun at = rows.first;
    for (int64_t r = 0; r < rows.count; ++r) {
      const KeptRun kept = kept_of_run(rows.mask, at.bits, at.position, rows.inner.stride[kBits],
                                       rows.inner.stride[kLinePosition], rows.n);
      const auto drop = [&](int64_t begin, int64_t end) {
        if (begin < end && !rows.zeros) fill(at.out + begin * kSize, end - begin, stream);
      };
      if (kept.kept == Kept::none) {
        drop(0, rows.n);
      } else {
        SliceRun run = at;
        run.bits = kept.kept == Kept::all ? nullptr : at.bits;
        run.x += kept.begin * kSize;
        run.grad += kept.begin * kSize;
        run.out += kept.begin * kSize;
        State s = self(op).init();
        accumulate(op, &s, run, kept.end - kept.begin);
        join_lanes(self(op), s);
        self(op).finalize(s);
        drop(0, kept.begin);
        map(op, &s, run, kept.end - kept.begin, stream);
        drop(kept.end, rows.n);
      }
      at.x += loop.stride[kValues];
      at.grad += loop.stride[kGrad];
      at.bits += loop.stride[kBits];
      at.out += loop.stride[kOut];
      at.position += loop.stride[kLinePosition];
    }
  }

  // The first column of a vector: the last of a row reaches back over the one before it rather than past the end.
  static int64_t column(int64_t v, int64_t w) { return std::min(v * L, w - L); }

  // Calls body(kept) with what a group of rows keeps, as a constant, so that its loops are as simple as can be.
  template <class Body>
  static inline void with_kept(GroupKept kept, const Body& body) {
    if (kept == GroupKept::all)
      body(std::integral_constant<GroupKept, GroupKept::all>{});
    else if (kept == GroupKept::bits)
      body(std::integral_constant<GroupKept, GroupKept::bits>{});
    else if (kept == GroupKept::by_vector)
      body(std::integral_constant<GroupKept, GroupKept::by_vector>{});
  }

  // What is kept of vector v of a group of rows.
  template <GroupKept kGroupKept>
  static inline Kept kept_of(const Kept* kept, int64_t v) {
    if constexpr (kGroupKept == GroupKept::by_vector) return kept[v];
    return kGroupKept == GroupKept::all ? Kept::all : Kept::bits;
  }

  static void accumulate_columns(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count) {
    block.start(run, count);
    for (int64_t r = 0; r < count;) {
      const RowGroup group = block.group(r);
      with_kept(group.kept, [&](auto kept) { accumulate_group<kept>(self(op), block, run, group, r); });
      r += group.rows;
    }
  }

  template <GroupKept kGroupKept>
  MASKWISE_FLATTEN static void accumulate_group(const Op& op, ColumnBlock& block, const SliceRun& run, const RowGroup& group,
                               int64_t r) {
    constexpr int64_t kSize = sizeof(T);
    const int64_t x_step = block.row.stride[kValues] / kSize, g_step = block.row.stride[kGrad] / kSize;
    const T *x = elements(run.x) + r * x_step, *g = elements(run.grad) + r * g_step;
    auto* states = reinterpret_cast<State*>(block.states);
    const int rows = static_cast<int>(group.rows);
    const int64_t w = block.w, bit_step = group.bit_step;
    const uint8_t* m = group.bits;
    for (int64_t v = 0; v < ceil_div(w, L); ++v) {
      const int64_t j = column(v, w);
      const Kept kept = kept_of<kGroupKept>(block.kept, v);
      if (kept == Kept::all)
        op.accumulate(states[v], Group<Op, false>{x + j, g + j, m, x_step, g_step, 0}, rows);
      else if (kept == Kept::bits)
        op.accumulate(states[v], Group<Op, true>{x + j, g + j, m + j, x_step, g_step, bit_step}, rows);
    }
  }

  // One row of a group.
  template <GroupKept kGroupKept, bool kStream>
  MASKWISE_FLATTEN static void map_column_row(const Op& op, const State* s, const Kept* kept, const T* x, const T* g,
                             const uint8_t* m, T* out, int64_t w) {
    const auto map_vector = [&](auto streams, int64_t v, int64_t j) {
      const Kept of_vector = kept_of<kGroupKept>(kept, v);
      if (of_vector == Kept::all)
        map_one<false, streams>(op, s[v], x + j, g + j, m, out + j);
      else if (of_vector == Kept::none)
        fill_one<streams>(out + j);
      else
        map_one<true, streams>(op, s[v], x + j, g + j, m + j, out + j);
    };
    for (int64_t v = 0; v < w / L; ++v) map_vector(std::bool_constant<kStream>{}, v, v * L);
    if (w % L != 0) map_vector(std::false_type{}, w / L, w - L);
  }

  static void map_columns(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count, bool stream) {
    const SliceLoop& row = block.row;
    const auto* s = reinterpret_cast<const State*>(block.states);
    block.start(run, count);
    for (int64_t r = 0; r < count;) {
      const RowGroup group = block.group(r);
      if (group.kept == GroupKept::none && !block.zeros)
        for (int64_t k = r; k < r + group.rows; ++k) fill(run.out + k * row.stride[kOut], block.w, false);
      with_kept(group.kept, [&](auto kept) {
        for (int64_t k = r; k < r + group.rows; ++k) {
          T* const out = elements(run.out + k * row.stride[kOut]);
          const bool streams = kStreams && stream && can_stream(out);
          (streams ? map_column_row<kept, kStreams> : map_column_row<kept, false>)(
              self(op), s, block.kept, elements(run.x + k * row.stride[kValues]),
              elements(run.grad + k * row.stride[kGrad]), group.bits + (k - r) * group.bit_step, out, block.w);
        }
      });
      r += group.rows;
    }
  }
};

// Three passes over slices that stay in the second-level cache: the maximum, the sum of exponentials, the results. Each
// exponential is taken once, and stored until the sum is known.
template <class Op>
struct ThreePass {
  using T = typename Op::T;
  using A = typename Op::A;
  using State = typename Op::State;
  using K = SliceKernels<Op>;
  static constexpr int L = kLanes<A>;
  static constexpr int kWide = K::kWide;
  static constexpr bool kStreams = K::kStreams;

  // Adds up one vector of exponentials, and holds it.
  template <bool kMasked>
  static inline void exponential_one(const Op& op, Vec<A> shift, Vec<A>& sum, const T* x, const uint8_t* m, T* held) {
    Vec<A> e;
    if constexpr (kMasked) {
      // What is dropped is gone before its exponential is taken: what it is cannot cost any time either.
      const LaneMask<A> kept = load_mask<A>(m);
      e = keep<A>(op.exponential(shift, keep<A>(load<A>(x), kept)), kept);
    } else {
      e = op.exponential(shift, load<A>(x));
    }
    sum += e;
    if constexpr (Op::kHolds) store<false>(held, e);
  }

  // The result of one vector, of x or of what is held in its place.
  template <bool kMasked, bool kStream>
  static inline void scale_one(const Op& op, const State& s, const T* x, const uint8_t* m, const T* held, T* out) {
    Vec<A> v;
    if constexpr (Op::kHolds)
      v = op.scale(s, load<A>(held));
    else
      v = op.map(s, load<A>(x), Vec<A>{});
    if constexpr (kMasked) v = drop<A>(v, load_mask<A>(m), A(Op::kDropped));
    store<kStream && kStreams>(out, v);
  }

  template <bool kMasked>
  MASKWISE_FLATTEN static void row_as(const Op& op, const T* x, const uint8_t* m, T* held, T* out, int64_t n, bool stream) {
    const int64_t whole = n / L * L;
    T last[L] = {};
    uint8_t bits[L] = {};
    if (whole < n) {
      std::memcpy(last, x + whole, (n - whole) * sizeof(T));
      for (int64_t k = whole; k < n; ++k) bits[k - whole] = kMasked ? m[k] : 1;
    }
    State s = op.init();
    int64_t i = 0;
    for (; i + kWide <= whole; i += kWide) {
      if (kMasked && none_of<kWide>(m + i)) continue;
      op.accumulate_max(s, Group<Op, kMasked>{x + i, x + i, m + i, L, L, L}, kGroup);
    }
    op.accumulate_max(s, Group<Op, kMasked>{x + i, x + i, m + i, L, L, L}, static_cast<int>((whole - i) / L));
    if (whole < n) op.accumulate_max(s, Group<Op, true>{last, last, bits, 0, 0, 0}, 1);
    op.combine_max(s);
    const Vec<A> shift = op.shift(s);
    Vec<A> total = {};
    for (i = 0; i + kWide <= whole; i += kWide) {
      if (kMasked && none_of<kWide>(m + i)) {
        if constexpr (Op::kHolds)
          for (int k = 0; k < kWide; k += L) store<false>(held + i + k, Vec<A>{});
        continue;
      }
      // A sum for each group: the total then has fewer roundings, and groups need not wait for each other.
      Vec<A> sum = {};
      if (kMasked && all_of<kWide>(m + i))
        for (int k = 0; k < kWide; k += L) exponential_one<false>(op, shift, sum, x + i + k, m, held + i + k);
      else
        for (int k = 0; k < kWide; k += L) exponential_one<kMasked>(op, shift, sum, x + i + k, m + i + k, held + i + k);
      total += sum;
    }
    for (; i < whole; i += L) exponential_one<kMasked>(op, shift, total, x + i, m + i, held + i);
    if (whole < n) {
      T last_held[L];
      exponential_one<true>(op, shift, total, last, bits, last_held);
      if constexpr (Op::kHolds) std::memcpy(held + whole, last_held, (n - whole) * sizeof(T));
    }
    op.add(s, splat<A>(add_lanes<A>(total)));
    op.finalize(s);
    K::in_lines(out, n, stream, [&](auto streams, int64_t begin, int64_t end) {
      int64_t j = begin;
      if constexpr (kMasked && !Op::kHolds)
        for (; j + kWide <= end; j += kWide) {
          const bool none = none_of<kWide>(m + j);
          for (int64_t k = j; k < j + kWide; k += L)
            none ? K::template fill_one<streams>(out + k) : scale_one<true, streams>(op, s, x + k, m + k, held + k, out + k);
        }
      for (; j + L <= end; j += L) scale_one<kMasked, streams>(op, s, x + j, m + j, held + j, out + j);
      if (j < end) scale_tail(op, s, x + j, kMasked ? m + j : nullptr, held + j, out + j, end - j);
    });
  }

  // Fewer results than a vector has.
  static inline void scale_tail(const Op& op, const State& s, const T* x, const uint8_t* m, const T* held, T* out, int64_t n) {
    // What is held stands where x does, whichever of them is read.
    const Tail<Op> tail(Op::kHolds ? held : x, x, m, n);
    T results[L];
    scale_one<true, false>(op, s, tail.x, tail.bits, tail.x, results);
    std::memcpy(out, results, n * sizeof(T));
  }

  static void row(const void* op, const SliceRun& run, char* held, int64_t n, bool stream) {
    (run.bits == nullptr ? row_as<false> : row_as<true>)(K::self(op), K::elements(run.x), run.bits, K::elements(held),
                                                         K::elements(run.out), n, stream);
  }

  // At least a vector of slices side by side; `row` steps along the slices. The bits of step r are at bits + r * bit_step,
  // and its exponentials at held + r * held_step.
  MASKWISE_FLATTEN static void columns(const void* self_op, void* memory, const SliceRun& run, const SliceLoop& row, int64_t bit_step,
                      char* held_bytes, int64_t held_step, int64_t w, bool stream) {
    constexpr int64_t kSize = sizeof(T);
    const Op& op = K::self(self_op);
    auto* states = static_cast<State*>(memory);
    const T* x = K::elements(run.x);
    const uint8_t* bits = run.bits;
    T *held = K::elements(held_bytes), *out = K::elements(run.out);
    const int64_t x_step = row.stride[kValues] / kSize, out_step = row.stride[kOut] / kSize;
    held_step /= kSize;
    const int64_t vectors = ceil_div(w, L);
    std::fill_n(states, vectors, op.init());
    for (int64_t r = 0; r < row.size; r += kGroup) {
      const int n = static_cast<int>(std::min<int64_t>(kGroup, row.size - r));
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t j = K::column(v, w);
        const T* xs = x + r * x_step + j;
        op.accumulate_max(states[v], Group<Op, true>{xs, xs, bits + r * bit_step + j, x_step, x_step, bit_step}, n);
      }
    }
    for (int64_t r = 0; r < row.size; r += kGroup) {
      const int n = static_cast<int>(std::min<int64_t>(kGroup, row.size - r));
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t j = K::column(v, w);
        const Vec<A> shift = op.shift(states[v]);
        Vec<A> sum = {};
        for (int64_t k = r; k < r + n; ++k)
          exponential_one<true>(op, shift, sum, x + k * x_step + j, bits + k * bit_step + j, held + k * held_step + j);
        op.add(states[v], sum);
      }
    }
    for (int64_t v = 0; v < vectors; ++v) op.finalize(states[v]);
    stream = kStreams && stream && can_stream(out) && can_stream(out + out_step);
    for (int64_t r = 0; r < row.size; ++r) {
      const T *xs = x + r * x_step, *e = held + r * held_step;
      const uint8_t* m = bits + r * bit_step;
      T* results = out + r * out_step;
      // What the last vector reaches back to may be held in the result, and is read before that is written.
      T last[L];
      if (w % L != 0) scale_one<true, false>(op, states[vectors - 1], xs + w - L, m + w - L, e + w - L, last);
      if (stream)
        for (int64_t j = 0; j + L <= w; j += L)
          scale_one<true, true>(op, states[j / L], xs + j, m + j, e + j, results + j);
      else
        for (int64_t j = 0; j + L <= w; j += L)
          scale_one<true, false>(op, states[j / L], xs + j, m + j, e + j, results + j);
      if (w % L != 0) std::memcpy(results + w - L, last, sizeof(last));
    }
  }
};

template <class Op>
void map_slices(const Op& op, const SliceCall& call) {
  using K = SliceKernels<Op>;
  static_assert(sizeof(typename Op::State) <= kSliceState);
  static_assert((kBlock / K::L + 1) * sizeof(typename Op::State) <= kBlockStates);
  SliceKernel kernel{&op,
                     sizeof(typename Op::T),
                     K::L,
                     sizeof(typename Op::State),
                     Op::kReadsGrad,
                     typename Op::A(Op::kDropped) == 0,
                     K::init,
                     K::accumulate,
                     K::combine,
                     K::finalize,
                     K::map,
                     K::fill,
                     K::rows,
                     K::accumulate_columns,
                     K::map_columns,
                     nullptr,
                     nullptr,
                     Op::kHolds};
  if constexpr (Op::kThreePass) {
    kernel.three_pass_row = &ThreePass<Op>::row;
    kernel.three_pass_columns = &ThreePass<Op>::columns;
  }
  run_slices(kernel, call);
}

// Runs make(T{}) over the slices, with the element type of the call.
template <class Make>
void map_floating_slices(const SliceCall& call, const Make& make) {
  dispatch_floating(call.dtype, [&](auto t) { map_slices(make(t), call); });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
