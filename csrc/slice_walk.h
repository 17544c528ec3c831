// How a function that maps slices to slices walks: rows where a slice is contiguous, columns side by side where the
// slices are, and staged copies of small pieces for any other stride. Included once a SIMD level, inside its namespace.
//
// Such a function is a struct Op with
//   T, A                  the element type, and the type of the arithmetic
//   kGrad                 whether it reads a second operand, the gradient of the result
//   kDropped              what stands where an element is dropped
//   State                 kFields vectors; each lane has seen elements of its own; start() has seen nothing
//   see(s, group, n)      sees n vectors of elements
//   merge(s, other)       joins two states, lane by lane
//   finish(s)             turns sums into the coefficients that map needs, lane by lane
//   map(s, x, grad)       the result for kept elements

// Vectors that see() is shown at once: enough to pay for what it does once a group.
constexpr int kGroup = 8;
// Columns done side by side; their states stay in the first-level cache.
constexpr int64_t kBlock = 512;
// What is worth a task of its own, in elements. Fixed, so that the bits of a result never depend on the threads.
constexpr int64_t kTask = 262144;
// Elements that are copied together where strides are odd.
constexpr int64_t kStage = 512;
// Results beyond this size, in bytes, go past the caches: they would push out what is still to be read.
constexpr int64_t kStreamFrom = int64_t{1} << 22;

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
  // What is dropped comes as +0, so that nothing of it can spread.
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

template <class Op>
using State = typename Op::State;

// Several states in memory of their own. A std::vector would not align them as vectors must be.
template <class Op>
struct Parts {
  explicit Parts(int64_t n) : bytes(n * sizeof(State<Op>) + MASKWISE_VECTOR_BYTES) {}
  State<Op>* at(int64_t i) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(bytes.data()) + MASKWISE_VECTOR_BYTES - 1;
    return reinterpret_cast<State<Op>*>(start - start % MASKWISE_VECTOR_BYTES) + i;
  }
  std::vector<uint8_t> bytes;
};

// Joins the lanes of a state: every lane then holds the whole.
template <class Op>
inline void join_lanes(const Op& op, State<Op>& s) {
  using A = typename Op::A;
  for (int shift = kLanes<A> / 2; shift > 0; shift /= 2) {
    State<Op> other = s;
    for (int f = 0; f < Op::kFields; ++f) {
      A lanes[kLanes<A>], turned[kLanes<A>];
      std::memcpy(lanes, &s.field[f], sizeof(lanes));
      for (int i = 0; i < kLanes<A>; ++i) turned[i] = lanes[(i + shift) % kLanes<A>];
      std::memcpy(&other.field[f], turned, sizeof(turned));
    }
    op.merge(s, other);
  }
}

// n contiguous elements; m is null where all are kept.
template <class Op>
void see_row(const Op& op, State<Op>& s, const typename Op::T* x, const typename Op::T* g, const uint8_t* m, int64_t n) {
  using T = typename Op::T;
  constexpr int L = kLanes<typename Op::A>;
  constexpr int kWide = kGroup * L;
  int64_t i = 0;
  if (m == nullptr) {
    for (; i + kWide <= n; i += kWide) op.see(s, Group<Op, false>{x + i, g + i, nullptr, L, L, L}, kGroup);
    if (n - i >= L) {
      const int count = static_cast<int>((n - i) / L);
      op.see(s, Group<Op, false>{x + i, g + i, nullptr, L, L, L}, count);
      i += count * L;
    }
  } else {
    for (; i + kWide <= n; i += kWide) {
      if (none_of<kWide>(m + i)) continue;
      op.see(s, Group<Op, true>{x + i, g + i, m + i, L, L, L}, kGroup);
    }
    if (n - i >= L) {
      const int count = static_cast<int>((n - i) / L);
      op.see(s, Group<Op, true>{x + i, g + i, m + i, L, L, L}, count);
      i += count * L;
    }
  }
  if (i == n) return;
  T values[L] = {}, gradients[L] = {};
  uint8_t bits[L] = {};
  std::memcpy(values, x + i, (n - i) * sizeof(T));
  if (Op::kGrad) std::memcpy(gradients, g + i, (n - i) * sizeof(T));
  for (int64_t k = i; k < n; ++k) bits[k - i] = m == nullptr ? 1 : m[k];
  op.see(s, Group<Op, true>{values, gradients, bits, 0, 0, 0}, 1);
}

template <class Op, bool kMasked, bool kStream>
inline void map_one(const Op& op, const State<Op>& s, const typename Op::T* x, const typename Op::T* g,
                    const uint8_t* m, typename Op::T* out) {
  using A = typename Op::A;
  Vec<A> grad = {};
  if constexpr (Op::kGrad) grad = load<A>(g);
  Vec<A> v = op.map(s, load<A>(x), grad);
  if constexpr (kMasked) v = drop<A>(v, load_mask<A>(m), Op::kDropped);
  store<kStream>(out, v);
}

template <class Op, bool kMasked, bool kStream>
void map_row_as(const Op& op, const State<Op>& s, const typename Op::T* x, const typename Op::T* g, const uint8_t* m,
                typename Op::T* out, int64_t n) {
  constexpr int L = kLanes<typename Op::A>;
  for (int64_t i = 0; i + L <= n; i += L) map_one<Op, kMasked, kStream>(op, s, x + i, g + i, m + i, out + i);
}

template <class Op>
void fill_row(typename Op::T* out, int64_t n) {
  std::fill_n(out, n, static_cast<typename Op::T>(Op::kDropped));
}

// The results of n contiguous elements.
template <class Op>
void map_row(const Op& op, const State<Op>& s, const typename Op::T* x, const typename Op::T* g, const uint8_t* m,
             typename Op::T* out, int64_t n, bool stream) {
  using T = typename Op::T;
  constexpr int L = kLanes<typename Op::A>;
  const int64_t whole = n / L * L;
  stream = stream && can_stream(out);
  if (m == nullptr) {
    if (stream)
      map_row_as<Op, false, true>(op, s, x, g, m, out, n);
    else
      map_row_as<Op, false, false>(op, s, x, g, m, out, n);
  } else if (stream) {
    map_row_as<Op, true, true>(op, s, x, g, m, out, n);
  } else {
    map_row_as<Op, true, false>(op, s, x, g, m, out, n);
  }
  if (whole == n) return;
  T values[L] = {}, gradients[L] = {}, results[L];
  uint8_t bits[L] = {};
  std::memcpy(values, x + whole, (n - whole) * sizeof(T));
  if (Op::kGrad) std::memcpy(gradients, g + whole, (n - whole) * sizeof(T));
  for (int64_t k = whole; k < n; ++k) bits[k - whole] = m == nullptr ? 1 : m[k];
  map_one<Op, true, false>(op, s, values, gradients, bits, results);
  std::memcpy(out + whole, results, (n - whole) * sizeof(T));
}

// The operands of a call.
template <class Op>
struct Operands {
  const typename Op::T* x;
  const typename Op::T* grad;
  const uint8_t* mask;
  typename Op::T* out;
  bool stream;

  Operands at(SliceOffset to) const { return {x + to.x, grad + to.grad, mask + to.mask, out + to.out, stream}; }
};

// Copies of a few elements that lie apart in memory.
template <class Op>
struct Stage {
  typename Op::T x[kStage], grad[kStage], out[kStage];
  uint8_t mask[kStage];

  void fetch(const Operands<Op>& o, const SliceLoop& loop, int64_t n) {
    for (int64_t k = 0; k < n; ++k) x[k] = o.x[k * loop.x];
    if (Op::kGrad)
      for (int64_t k = 0; k < n; ++k) grad[k] = o.grad[k * loop.grad];
    if (loop.mask != 0)
      for (int64_t k = 0; k < n; ++k) mask[k] = o.mask[k * loop.mask];
  }
};

// Calls run(x, grad, mask, out, n) for the stretches of elements [begin, end) of one slice, each contiguous in all
// operands; mask is null where all are kept, and x where none is.
template <class Op, bool kWrites, class Run>
void for_each_stretch(const SliceLayout& layout, const Operands<Op>& slice, int64_t begin, int64_t end, const Run& run) {
  using T = typename Op::T;
  const SliceLoop loop = layout.within.empty() ? SliceLoop{1, 1, 1, 1, 0} : layout.within.back();
  const bool direct = loop.touches() && (loop.mask == 0 || loop.mask == 1);
  for_each_run(layout.within, begin, end, [&](SliceOffset to, int64_t count) {
    Operands<Op> o = slice.at(to);
    const bool none = loop.mask == 0 && *o.mask == 0;
    if (none && !kWrites) return;
    if (direct) {
      run(none ? nullptr : o.x, o.grad, loop.mask == 0 ? nullptr : o.mask, o.out, count);
      return;
    }
    Stage<Op> stage;
    while (count > 0) {
      const int64_t n = std::min(count, kStage);
      if (!none) stage.fetch(o, loop, n);
      const T* x = none ? nullptr : stage.x;
      run(x, static_cast<const T*>(stage.grad), loop.mask == 0 ? nullptr : stage.mask, stage.out, n);
      if (kWrites)
        for (int64_t k = 0; k < n; ++k) o.out[k * loop.out] = stage.out[k];
      SliceOffset step;
      step.move(loop, n);
      o = o.at(step);
      count -= n;
    }
  });
}

template <class Op>
void see_slice(const Op& op, State<Op>& s, const SliceLayout& layout, const Operands<Op>& slice, int64_t begin,
               int64_t end) {
  using T = typename Op::T;
  for_each_stretch<Op, false>(layout, slice, begin, end,
                              [&](const T* x, const T* g, const uint8_t* m, T*, int64_t n) { see_row(op, s, x, g, m, n); });
}

template <class Op>
void map_slice(const Op& op, const State<Op>& s, const SliceLayout& layout, const Operands<Op>& slice, int64_t begin,
               int64_t end) {
  using T = typename Op::T;
  for_each_stretch<Op, true>(layout, slice, begin, end, [&](const T* x, const T* g, const uint8_t* m, T* out, int64_t n) {
    if (x == nullptr)
      fill_row<Op>(out, n);
    else
      map_row(op, s, x, g, m, out, n, slice.stream);
  });
}

template <class Op>
void walk_rows(const Op& op, const SliceLayout& layout, const Operands<Op>& all) {
  const int64_t splits = layout.slices >= 64 ? 1 : ceil_div(layout.length, kTask);
  if (splits == 1) {
    parallel(layout.slices, layout.length, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Operands<Op> slice = all.at(offset_of(layout.over, r));
        State<Op> s = op.start();
        see_slice(op, s, layout, slice, 0, layout.length);
        join_lanes(op, s);
        op.finish(s);
        map_slice(op, s, layout, slice, 0, layout.length);
      }
      if (all.stream) stream_fence();
    });
    return;
  }
  // Few and long slices: each is split, and joined before anything is written.
  Parts<Op> parts(layout.slices * splits);
  const auto part = [&](int64_t p, const auto& run) {
    const int64_t from = p % splits * kTask;
    run(all.at(offset_of(layout.over, p / splits)), from, std::min(from + kTask, layout.length));
  };
  parallel(layout.slices * splits, kTask, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      part(p, [&](const Operands<Op>& slice, int64_t from, int64_t to) {
        *parts.at(p) = op.start();
        see_slice(op, *parts.at(p), layout, slice, from, to);
      });
  });
  for (int64_t r = 0; r < layout.slices; ++r) {
    State<Op>& s = *parts.at(r * splits);
    for (int64_t p = 1; p < splits; ++p) op.merge(s, *parts.at(r * splits + p));
    join_lanes(op, s);
    op.finish(s);
  }
  parallel(layout.slices * splits, kTask, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      part(p, [&](const Operands<Op>& slice, int64_t from, int64_t to) {
        map_slice(op, *parts.at(p / splits * splits), layout, slice, from, to);
      });
    if (all.stream) stream_fence();
  });
}
