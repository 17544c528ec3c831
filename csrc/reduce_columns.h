// The walk of a reduction whose kept dim is contiguous: many outputs side by side, several rows at a time. Part of
// reduce_walk.h.

// As kSplit, for columns: larger, since each part holds a state for each column.
constexpr int64_t kColumnSplit = 1 << 20;

// Up to kColumns outputs side by side.
template <class Op>
struct Columns {
  using A = typename Op::A;
  using In = typename Op::In;
  static constexpr int L = kLanes<A>, R = kColumnRows;
  typename Op::Lanes lanes[kColumns / L];
  typename Op::State totals[kColumns];
  int64_t base = 0;     // the position at which the lanes started
  int64_t pending = 0;  // rows in the lanes

  void start(const Op& op, int64_t w) {
    std::fill_n(lanes, ceil_div(w, L), op.nothing());
    std::fill_n(totals, w, typename Op::State{});
    pending = 0;
  }
  void flush(const Op& op, int64_t w) {
    if (pending == 0) return;
    for (int64_t j = 0; j < w; ++j) op.merge(totals[j], op.lane(lanes[j / L], j % L, base));
    std::fill_n(lanes, ceil_div(w, L), op.nothing());
    pending = 0;
  }

  // Sees R rows from position `at` on.
  void see(const Op& op, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w, int64_t at) {
    if (pending + R > Op::kPeriod || at + R - base > Op::kPeriod) flush(op, w);
    if (pending == 0) base = at;
    pending += R;
    const auto first = static_cast<BitsOf<A>>(at - base);
    const int64_t whole = w / L;
    see_whole(op, lanes, x, m, whole, first);
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
    see_whole(op, lanes + whole, xs, ms, 1, first);
  }

  // Not inlined: it is called from two places, and compiles slowly.
  __attribute__((noinline)) static void see_whole(const Op& op, typename Op::Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R],
                        int64_t vectors, BitsOf<A> first) {
    for (int64_t i = 0; i < vectors; ++i) {
      Vec<A> values[R];
      LaneMask<A> kept[R];
      for (int r = 0; r < R; ++r) {
        values[r] = load<A>(x[r] + i * L);
        kept[r] = load_mask<A>(m[r] + i * L);
      }
      op.template see<R>(lanes[i], values, kept, first);
    }
  }
};

// Reads a byte of each cache line of n elements, in order. Short rows lie several to a page, and when they are read in
// turns, the CPU sees no order that it could read ahead in.
template <class T>
inline void touch(const T* p, int64_t n) {
  const char* bytes = reinterpret_cast<const char*>(p);
  char seen = 0;
  for (int64_t i = 0; i < n * int64_t{sizeof(T)}; i += 64) seen ^= bytes[i];
  asm volatile("" : : "r"(seen));
}

// One stretch of `count` rows; `loop` says how far apart they are, `inner` how the mask runs along a row.
template <class Op>
__attribute__((noinline)) void see_rows(const Op& op, Columns<Op>& columns, const typename Op::In* x, const uint8_t* m, Loop loop, Loop inner,
              int64_t count, int64_t w, int64_t at) {
  constexpr int R = kColumnRows;
  static_assert(kTurned % R == 0, "turned rows are used in whole steps");
  uint8_t staged[kTurned][kColumns];
  for (int64_t r = 0; r < count; r += R) {
    // Which of the staged rows this step uses: those that were turned with the step before, or the first ones.
    const int64_t ahead = r % kTurned, turned = r - ahead;
    const bool across = inner.mask != 0 && inner.mask != 1 && loop.mask == 1 && turned + kTurned <= count;
    if (across && ahead == 0) turn(m + r, inner.mask, w, staged[0], kColumns);
    const typename Op::In* xs[R];
    const uint8_t* ms[R];
    const typename Op::In* some = nullptr;
    for (int k = 0; k < R; ++k) {
      const uint8_t* kept = m + (r + k) * loop.mask;
      ms[k] = kNoneKept.bytes;
      if (r + k >= count) continue;
      if (inner.mask == 0) {
        if (*kept) ms[k] = kAllKept.bytes;
      } else if (inner.mask == 1) {
        if (!none_kept(kept, w)) ms[k] = kept;
      } else if (across) {
        ms[k] = staged[ahead + k];
      } else {
        for (int64_t j = 0; j < w; ++j) staged[k][j] = kept[j * inner.mask];
        ms[k] = staged[k];
      }
      xs[k] = x + (r + k) * loop.x;
      if (ms[k] != kNoneKept.bytes) some = xs[k];
    }
    if (some == nullptr) continue;
    // A row of which nothing is kept is not read: another stands in for it.
    for (int k = 0; k < R; ++k)
      if (ms[k] == kNoneKept.bytes) xs[k] = some;
    if (loop.x == w && loop.mask == w && w * sizeof(typename Op::In) <= 2048 && r + R <= count) {
      touch(x + r * w, R * w);
      touch(m + r * w, R * w);
    }
    columns.see(op, xs, ms, w, at + r);
  }
}

// The innermost kept loop is contiguous in x: its outputs are reduced side by side.
template <class Op>
void reduce_columns(const Op& op, const Layout& layout, const typename Op::In* x, const uint8_t* m,
                    typename Op::Out* out) {
  const Loop inner = layout.kept.back();
  const std::vector<Loop> outer(layout.kept.begin(), layout.kept.end() - 1);
  const int64_t width = std::min<int64_t>(inner.size, kColumns);
  const int64_t blocks = ceil_div(inner.size, width);
  const int64_t groups = layout.outputs / inner.size * blocks;
  // Few groups and much to reduce: the reduced range is split too. As in rows, by sizes alone.
  const int64_t rows_each = std::max<int64_t>(1, kColumnSplit / width);
  const int64_t splits = groups >= 64 ? 1 : ceil_div(layout.length, rows_each);
  const int64_t step = splits == 1 ? layout.length : rows_each;
  const Loop loop = layout.reduced.empty() ? Loop{1, 0, 0} : layout.reduced.back();
  std::vector<typename Op::State> parts(splits == 1 ? 0 : groups * splits * width);

  parallel(groups * splits, step * width, [&](int64_t begin, int64_t end) {
    const auto held = std::make_unique<Columns<Op>>();
    Columns<Op>& columns = *held;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / splits;
      const int64_t first = group % blocks * width;
      const int64_t w = std::min(width, inner.size - first);
      const Offset at = offset_of(outer, group / blocks);
      const auto* xs = x + at.x + first;
      const uint8_t* ms = m + at.mask + first * inner.mask;
      columns.start(op, w);
      int64_t from = task % splits * step;
      for_each_run(layout.reduced, from, std::min(from + step, layout.length), [&](Offset run, int64_t count) {
        see_rows(op, columns, xs + run.x, ms + run.mask, loop, inner, count, w, from);
        from += count;
      });
      columns.flush(op, w);
      auto* result = out + group / blocks * inner.size + first;
      if (splits == 1)
        for (int64_t j = 0; j < w; ++j) result[j] = op.finish(columns.totals[j]);
      else
        std::copy_n(columns.totals, w, parts.begin() + (task % splits * groups + group) * width);
    }
  });
  if (splits == 1) return;
  parallel(groups, splits * width, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group % blocks * width;
      const int64_t w = std::min(width, inner.size - first);
      for (int64_t j = 0; j < w; ++j) {
        auto s = parts[group * width + j];
        for (int64_t p = 1; p < splits; ++p) op.merge(s, parts[(p * groups + group) * width + j]);
        out[group / blocks * inner.size + first + j] = op.finish(s);
      }
    }
  });
}
