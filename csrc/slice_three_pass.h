// Three passes over slices that stay in the second-level cache: the maximum, the sum of exponentials, the results. Each
// exponential is taken once, and stored until the sum is known. Part of slice_kernel.h.

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
  static void row_as(const Op& op, const T* x, const uint8_t* m, T* held, T* out, int64_t n, bool stream) {
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
      for (int k = 0; k < kGroup; ++k)
        exponential_one<kMasked>(op, shift, sum, x + i + k * L, m + i + k * L, held + i + k * L);
      total += sum;
    }
    for (; i < whole; i += L) exponential_one<kMasked>(op, shift, total, x + i, m + i, held + i);
    T last_held[L];
    if (whole < n) exponential_one<true>(op, shift, total, last, bits, last_held);
    op.add(s, splat<A>(add_lanes<A>(total)));
    op.finalize(s);
    if (kStreams && stream && can_stream(out))
      for (i = 0; i < whole; i += L) scale_one<kMasked, true>(op, s, x + i, m + i, held + i, out + i);
    else
      for (i = 0; i < whole; i += L) scale_one<kMasked, false>(op, s, x + i, m + i, held + i, out + i);
    if (whole == n) return;
    T results[L];
    scale_one<true, false>(op, s, last, bits, last_held, results);
    std::memcpy(out + whole, results, (n - whole) * sizeof(T));
  }

  static void row(const void* op, const SliceRun& run, void* held, int64_t n, bool stream) {
    (run.bits == nullptr ? row_as<false> : row_as<true>)(K::self(op), K::elements(run.x), run.bits,
                                                         static_cast<T*>(held), K::elements(run.out), n, stream);
  }

  // At least a vector of slices side by side; `row` steps along the slices. The bits of step r are at bits + r * bit_step,
  // and its exponentials at held + r * held_step.
  static void columns(const void* self_op, void* memory, const SliceRun& run, const SliceLoop& row, int64_t bit_step,
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
