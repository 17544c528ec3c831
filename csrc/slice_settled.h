// The walk of functions that settle the largest value of a slice before they take exponentials, where a slice (or a block
// of slices side by side) stays in the second-level cache: it is read three times, but each exponential is taken once,
// and stands in the result until the sum is known. Included after slice_columns.h, once a SIMD level.
//
// Such an Op has, beside what slice_walk.h tells,
//   kSettles              true
//   kHolds                whether the result can hold what weigh() gives until map_held() has the sum
//   top(s, group, n)      sees the largest of n vectors, lane by lane
//   share_top(s)          gives every lane the largest of all
//   base(s)               what is subtracted before exponentials are taken
//   weigh(base, x)        the exponential
//   add(s, sum)           adds up exponentials, lane by lane
//   release(s, e)         the result for a kept element, of which e was held

// Bytes of x that are settled at once, and columns side by side at least: whole cache lines.
constexpr int64_t kSettledBytes = int64_t{1} << 17;
constexpr int64_t kFewColumns = 32;

// Adds up one vector of exponentials, and holds it.
template <class Op, bool kMasked>
inline void weigh_one(const Op& op, Vec<typename Op::A> base, Vec<typename Op::A>& sum, const typename Op::T* x,
                      const uint8_t* m, typename Op::T* held) {
  using A = typename Op::A;
  Vec<A> e;
  if constexpr (kMasked) {
    // What is dropped is gone before its exponential is taken: what it is cannot cost any time either.
    const LaneMask<A> kept = load_mask<A>(m);
    e = keep<A>(op.weigh(base, keep<A>(load<A>(x), kept)), kept);
  } else {
    e = op.weigh(base, load<A>(x));
  }
  sum += e;
  if constexpr (Op::kHolds) store<false>(held, e);
}

// The result of one vector, of x or of what is held in its place.
template <class Op, bool kMasked, bool kStream>
inline void release_one(const Op& op, const State<Op>& s, const typename Op::T* x, const uint8_t* m,
                        const typename Op::T* held, typename Op::T* out) {
  using A = typename Op::A;
  Vec<A> v;
  if constexpr (Op::kHolds)
    v = op.release(s, load<A>(held));
  else
    v = op.map(s, load<A>(x), Vec<A>{});
  if constexpr (kMasked) v = drop<A>(v, load_mask<A>(m), Op::kDropped);
  store<kStream>(out, v);
}

// A contiguous slice. `held` is where exponentials stand: the result itself, or memory of its own where the result is
// written past the caches.
template <class Op, bool kMasked, bool kStream>
void settle_row(const Op& op, const typename Op::T* x, const uint8_t* m, typename Op::T* held, typename Op::T* out,
                int64_t n) {
  using T = typename Op::T;
  using A = typename Op::A;
  constexpr int L = kLanes<A>;
  constexpr int kWide = kGroup * L;
  const int64_t whole = n / L * L;
  T last[L] = {};
  uint8_t bits[L] = {};
  if (whole < n) {
    std::memcpy(last, x + whole, (n - whole) * sizeof(T));
    for (int64_t k = whole; k < n; ++k) bits[k - whole] = kMasked ? m[k] : 1;
  }
  State<Op> s = op.start();
  int64_t i = 0;
  for (; i + kWide <= whole; i += kWide) {
    if (kMasked && none_of<kWide>(m + i)) continue;
    op.top(s, Group<Op, kMasked>{x + i, x + i, m + i, L, L, L}, kGroup);
  }
  op.top(s, Group<Op, kMasked>{x + i, x + i, m + i, L, L, L}, static_cast<int>((whole - i) / L));
  if (whole < n) op.top(s, Group<Op, true>{last, last, bits, 0, 0, 0}, 1);
  op.share_top(s);
  const Vec<A> base = op.base(s);
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
      weigh_one<Op, kMasked>(op, base, sum, x + i + k * L, m + i + k * L, held + i + k * L);
    total += sum;
  }
  for (; i < whole; i += L) weigh_one<Op, kMasked>(op, base, total, x + i, m + i, held + i);
  T kept[L];
  if (whole < n) weigh_one<Op, true>(op, base, total, last, bits, kept);
  op.add(s, splat<A>(add_lanes<A>(total)));
  op.finish(s);
  for (i = 0; i < whole; i += L) release_one<Op, kMasked, kStream>(op, s, x + i, m + i, held + i, out + i);
  if (whole == n) return;
  T results[L];
  release_one<Op, true, false>(op, s, last, bits, kept, results);
  std::memcpy(out + whole, results, (n - whole) * sizeof(T));
}

template <class Op>
bool settles_rows(const SliceLayout& layout) {
  if (layout.within.size() != 1 || layout.length * static_cast<int64_t>(sizeof(typename Op::T)) > kSettledBytes) return false;
  const SliceLoop& loop = layout.within[0];
  return loop.touches() && (loop.mask == 0 || loop.mask == 1);
}

template <class Op>
void walk_settled_rows(const Op& op, const SliceLayout& layout, const Operands<Op>& all) {
  using T = typename Op::T;
  const bool masked = layout.within[0].mask != 0;
  parallel(layout.slices, layout.length, [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> room;
    if (Op::kHolds && all.stream) room.reset(new T[layout.length]);
    for (int64_t r = begin; r < end; ++r) {
      const Operands<Op> o = all.at(offset_of(layout.over, r));
      T* held = room ? room.get() : o.out;
      if (!masked && *o.mask == 0)
        fill_row<Op>(o.out, layout.length);
      else if (o.stream && can_stream(o.out))
        (masked ? settle_row<Op, true, true> : settle_row<Op, false, true>)(op, o.x, o.mask, held, o.out, layout.length);
      else
        (masked ? settle_row<Op, true, false> : settle_row<Op, false, false>)(op, o.x, o.mask, held, o.out, layout.length);
    }
    if (all.stream) stream_fence();
  });
}

// A block of w slices side by side, at least a vector of them; `row` steps along the slices. The bits of step r are at
// bits + r * bit_step, and its exponentials are held at held + r * held_step.
template <class Op, bool kStream>
void settle_columns(const Op& op, const Operands<Op>& o, const SliceLoop& row, const uint8_t* bits, int64_t bit_step,
                    typename Op::T* held, int64_t held_step, int64_t w, State<Op>* states) {
  using T = typename Op::T;
  using A = typename Op::A;
  constexpr int L = kLanes<A>;
  const int64_t vectors = ceil_div(w, L);
  // The last vector reaches back over the one before it rather than past the end.
  const auto column = [&](int64_t v) { return std::min(v * L, w - L); };
  std::fill_n(states, vectors, op.start());
  for (int64_t r = 0; r < row.size; r += kGroup) {
    const int n = static_cast<int>(std::min<int64_t>(kGroup, row.size - r));
    for (int64_t v = 0; v < vectors; ++v) {
      const T* x = o.x + r * row.x + column(v);
      op.top(states[v], Group<Op, true>{x, x, bits + r * bit_step + column(v), row.x, row.x, bit_step}, n);
    }
  }
  for (int64_t r = 0; r < row.size; r += kGroup) {
    const int n = static_cast<int>(std::min<int64_t>(kGroup, row.size - r));
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t j = column(v);
      const Vec<A> base = op.base(states[v]);
      Vec<A> sum = {};
      for (int k = 0; k < n; ++k)
        weigh_one<Op, true>(op, base, sum, o.x + (r + k) * row.x + j, bits + (r + k) * bit_step + j,
                            held + (r + k) * held_step + j);
      op.add(states[v], sum);
    }
  }
  for (int64_t v = 0; v < vectors; ++v) op.finish(states[v]);
  for (int64_t r = 0; r < row.size; ++r) {
    const T* x = o.x + r * row.x;
    const T* e = held + r * held_step;
    const uint8_t* m = bits + r * bit_step;
    T* out = o.out + r * row.out;
    // What the last vector reaches back to may be held in the result, and is read before that is written.
    T last[L];
    if (w % L != 0) release_one<Op, true, false>(op, states[vectors - 1], x + w - L, m + w - L, e + w - L, last);
    for (int64_t j = 0; j + L <= w; j += L)
      release_one<Op, true, kStream>(op, states[j / L], x + j, m + j, e + j, out + j);
    if (w % L != 0) std::memcpy(out + w - L, last, sizeof(last));
  }
}

// How many columns are settled at once; 0 where they would not stay in the cache.
template <class Op>
int64_t settled_columns(const SliceLayout& layout) {
  const int64_t fit = kSettledBytes / (layout.length * static_cast<int64_t>(sizeof(typename Op::T)));
  if (layout.within.size() != 1 || layout.over.back().mask == 0) return 0;
  return std::min(columns_at_once(layout), fit / kFewColumns * kFewColumns);
}

template <class Op>
void walk_settled_columns(const Op& op, const SliceLayout& layout, const Operands<Op>& all, int64_t width) {
  using T = typename Op::T;
  constexpr int L = kLanes<typename Op::A>;
  const SliceLoop column_loop = layout.over.back(), row = layout.within[0];
  const std::vector<SliceLoop> outer(layout.over.begin(), layout.over.end() - 1);
  // Every block is at least a vector wide: fewer columns than that stay with the block before them.
  const int64_t blocks = std::max<int64_t>(1, ceil_div(column_loop.size - (L - 1), width));
  const int64_t widest = std::min(column_loop.size, width + L - 1);
  parallel(layout.slices / column_loop.size * blocks, layout.length * width, [&](int64_t begin, int64_t end) {
    Parts<Op> states(ceil_div(widest, L));
    std::unique_ptr<T[]> room;
    if (Op::kHolds && all.stream) room.reset(new T[layout.length * widest]);
    std::unique_ptr<uint8_t[]> turned;
    if (column_loop.mask != 1) turned.reset(new uint8_t[layout.length * widest]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % blocks * width;
      const int64_t w = task % blocks == blocks - 1 ? column_loop.size - first : width;
      SliceOffset to = offset_of(outer, task / blocks);
      to.move(column_loop, first);
      const Operands<Op> o = all.at(to);
      const uint8_t* bits = o.mask;
      int64_t step = row.mask;
      if (turned) {
        bits = turned.get();
        step = w;
        const auto* from = reinterpret_cast<const char*>(o.mask);
        auto* rows = reinterpret_cast<char*>(turned.get());
        if (row.mask == 1)
          transpose_tile<uint8_t>(from, column_loop.mask, layout.length, w, rows, w);
        else
          for (int64_t r = 0; r < layout.length; ++r)
            copy_strided<uint8_t>(rows + r * w, 1, from + r * row.mask, column_loop.mask, w);
      }
      T* held = room ? room.get() : o.out;
      const int64_t held_step = room ? w : row.out;
      const bool stream = all.stream && can_stream(o.out) && can_stream(o.out + row.out);
      (stream ? settle_columns<Op, true> : settle_columns<Op, false>)(op, o, row, bits, step, held, held_step, w,
                                                                      states.at(0));
    }
    if (all.stream) stream_fence();
  });
}
