// Masked reductions. Included once a SIMD level, inside its namespace, by foreach_isa.h (through reduce.cpp).
//
// A reduction is a struct with a State (what one output has seen so far) and four functions: row (see a contiguous
// stretch), cols (see one row of many outputs side by side), merge (join two states) and finish. The walk below it
// is shared: rows when the reduced stretch is contiguous, columns when the kept one is, and a staged copy of small
// pieces for any other stride.

// Elements that a State takes in one arithmetic type before it widens: bounds the rounding error of long sums.
constexpr int64_t kChunk = 2048;
// Columns done side by side; their accumulators stay in the first-level cache.
constexpr int64_t kColumns = 1024;
// One output with more elements than this is split among threads. Fixed, so that the bits of a result never depend on
// the number of threads.
constexpr int64_t kSplit = 262144;

template <class T>
struct Sum {
  using In = T;
  using A = Acc<T>;
  using Wide = std::conditional_t<std::is_floating_point_v<A>, double, int64_t>;
  using Out = std::conditional_t<std::is_integral_v<T>, int64_t, T>;

  struct State {
    Wide total = 0;
  };

  // The sum of at most kChunk elements; m is null where all are kept.
  static A chunk(const T* x, const uint8_t* m, int64_t n) {
    constexpr int L = kLanes<A>;
    Vec<A> sums[4] = {};
    int64_t i = 0;
    if (m != nullptr) {
      for (; i + 4 * L <= n; i += 4 * L)
        for (int k = 0; k < 4; ++k)
          sums[k] += keep<A>(load<A>(x + i + k * L), load_mask<A>(m + i + k * L));
    } else {
      for (; i + 4 * L <= n; i += 4 * L)
        for (int k = 0; k < 4; ++k) sums[k] += load<A>(x + i + k * L);
    }
    A total = add_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i)
      if (m == nullptr || m[i]) total += static_cast<A>(x[i]);
    return total;
  }

  static void row(State& s, const T* x, const uint8_t* m, int64_t n) {
    for (int64_t i = 0; i < n; i += kChunk)
      s.total += static_cast<Wide>(chunk(x + i, m == nullptr ? nullptr : m + i, std::min(kChunk, n - i)));
  }

  struct Columns {
    A sums[kColumns];
    Wide totals[kColumns];
    int64_t pending = 0;
  };
  static void start(Columns& c, int64_t w) {
    std::fill_n(c.sums, w, A{0});
    std::fill_n(c.totals, w, Wide{0});
    c.pending = 0;
  }
  static void flush(Columns& c, int64_t w) {
    for (int64_t j = 0; j < w; ++j) c.totals[j] += static_cast<Wide>(c.sums[j]);
    std::fill_n(c.sums, w, A{0});
    c.pending = 0;
  }
  static void cols(Columns& c, const T* x, const uint8_t* m, int64_t w) {
    constexpr int L = kLanes<A>;
    if (c.pending++ == 256) flush(c, w);
    int64_t j = 0;
    for (; j + L <= w; j += L) {
      Vec<A> v = load<A>(x + j);
      if (m != nullptr) v = keep<A>(v, load_mask<A>(m + j));
      v += load_raw<Vec<A>>(c.sums + j);
      std::memcpy(c.sums + j, &v, sizeof(v));
    }
    for (; j < w; ++j)
      if (m == nullptr || m[j]) c.sums[j] += static_cast<A>(x[j]);
  }
  static State column(Columns& c, int64_t j) { return {c.totals[j] + static_cast<Wide>(c.sums[j])}; }

  static void merge(State& s, const State& other) { s.total += other.total; }
  static Out finish(const State& s) { return static_cast<Out>(s.total); }
};

// Shows `count` elements that lie apart in memory to Op::row, through small contiguous copies.
template <class Op>
void staged_row(typename Op::State& s, const typename Op::In* x, int64_t xs, const uint8_t* m, int64_t ms, int64_t count) {
  constexpr int64_t kStage = 512;
  typename Op::In values[kStage];
  uint8_t kept[kStage];
  for (int64_t i = 0; i < count; i += kStage) {
    const int64_t n = std::min(kStage, count - i);
    for (int64_t k = 0; k < n; ++k) values[k] = x[(i + k) * xs];
    if (ms != 0)
      for (int64_t k = 0; k < n; ++k) kept[k] = m[(i + k) * ms];
    Op::row(s, values, ms == 0 ? nullptr : kept, n);
  }
}

// Elements [begin, end) behind one output whose data starts at (x, m).
template <class Op>
void reduce_range(typename Op::State& s, const Layout& layout, const typename Op::In* x, const uint8_t* m,
                  int64_t begin, int64_t end) {
  const Loop inner = layout.reduced.empty() ? Loop{1, 1, 1} : layout.reduced.back();
  for_each_run(layout.reduced, begin, end, [&](Offset at, int64_t count) {
    const uint8_t* kept = m + at.mask;
    if (inner.mask == 0) {
      if (*kept == 0) return;
      kept = nullptr;
    }
    if (inner.x == 1 && (inner.mask == 1 || inner.mask == 0))
      Op::row(s, x + at.x, kept, count);
    else
      staged_row<Op>(s, x + at.x, inner.x, kept, inner.mask, count);
  });
}

template <class Op>
void reduce_rows(const Layout& layout, const typename Op::In* x, const uint8_t* m, typename Op::Out* out) {
  const int64_t splits = ceil_div(layout.length, kSplit);
  if (splits <= 1 || layout.outputs >= 64) {
    parallel(layout.outputs, layout.length, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Offset at = offset_of(layout.kept, r);
        typename Op::State s;
        reduce_range<Op>(s, layout, x + at.x, m + at.mask, 0, layout.length);
        out[r] = Op::finish(s);
      }
    });
    return;
  }
  std::vector<typename Op::State> parts(layout.outputs * splits);
  parallel(layout.outputs * splits, kSplit, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Offset at = offset_of(layout.kept, p / splits);
      const int64_t from = p % splits * kSplit;
      reduce_range<Op>(parts[p], layout, x + at.x, m + at.mask, from, std::min(from + kSplit, layout.length));
    }
  });
  for (int64_t r = 0; r < layout.outputs; ++r) {
    for (int64_t p = 1; p < splits; ++p) Op::merge(parts[r * splits], parts[r * splits + p]);
    out[r] = Op::finish(parts[r * splits]);
  }
}

// The innermost kept loop is contiguous in x: its outputs are reduced side by side.
template <class Op>
void reduce_columns(const Layout& layout, const typename Op::In* x, const uint8_t* m, typename Op::Out* out) {
  using In = typename Op::In;
  const Loop inner = layout.kept.back();
  const std::vector<Loop> outer(layout.kept.begin(), layout.kept.end() - 1);
  const int64_t width = std::min<int64_t>(inner.size, kColumns);
  const int64_t blocks = ceil_div(inner.size, width);
  const int64_t groups = layout.outputs / inner.size * blocks;
  // Few groups and much to reduce: the reduced range is split too. As in rows, by sizes alone.
  const int64_t rows_each = std::max<int64_t>(1, kSplit / width);
  const int64_t splits = groups >= 64 ? 1 : ceil_div(layout.length, rows_each);
  const int64_t step = splits == 1 ? layout.length : rows_each;
  std::vector<typename Op::State> parts(splits == 1 ? 0 : groups * splits * width);

  parallel(groups * splits, step * width, [&](int64_t begin, int64_t end) {
    typename Op::Columns columns;
    uint8_t staged[kColumns];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / splits;
      const int64_t first = group % blocks * width;
      const int64_t w = std::min(width, inner.size - first);
      const Offset at = offset_of(outer, group / blocks);
      const In* xs = x + at.x + first;
      const uint8_t* ms = m + at.mask + first * inner.mask;
      Op::start(columns, w);
      const Loop loop = layout.reduced.empty() ? Loop{1, 0, 0} : layout.reduced.back();
      const int64_t from = task % splits * step;
      for_each_run(layout.reduced, from, std::min(from + step, layout.length), [&](Offset run, int64_t count) {
        for (int64_t r = 0; r < count; ++r) {
          const uint8_t* kept = ms + run.mask + r * loop.mask;
          if (inner.mask == 0) {
            if (*kept == 0) continue;
            kept = nullptr;
          } else if (inner.mask != 1) {
            for (int64_t j = 0; j < w; ++j) staged[j] = kept[j * inner.mask];
            kept = staged;
          }
          Op::cols(columns, xs + run.x + r * loop.x, kept, w);
        }
      });
      for (int64_t j = 0; j < w; ++j) {
        if (splits == 1)
          out[group / blocks * inner.size + first + j] = Op::finish(Op::column(columns, j));
        else
          parts[(task % splits * groups + group) * width + j] = Op::column(columns, j);
      }
    }
  });
  if (splits == 1) return;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group % blocks * width;
    const int64_t w = std::min(width, inner.size - first);
    for (int64_t j = 0; j < w; ++j) {
      auto s = parts[group * width + j];
      for (int64_t p = 1; p < splits; ++p) Op::merge(s, parts[(p * groups + group) * width + j]);
      out[group / blocks * inner.size + first + j] = Op::finish(s);
    }
  }
}

template <class Op>
void reduce(const Layout& layout, const void* x, const void* m, void* out) {
  const auto* xs = static_cast<const typename Op::In*>(x);
  const auto* ms = static_cast<const uint8_t*>(m);
  auto* results = static_cast<typename Op::Out*>(out);
  const bool rows_touch = !layout.reduced.empty() && layout.reduced.back().x == 1;
  const bool columns_touch = !layout.kept.empty() && layout.kept.back().x == 1 && layout.kept.back().size >= 4;
  if (!rows_touch && columns_touch && layout.length > 0)
    reduce_columns<Op>(layout, xs, ms, results);
  else
    reduce_rows<Op>(layout, xs, ms, results);
}

// Picks Op<T> for the dtype of x, among the types that sums serve.
template <template <class> class Op>
void reduce_any(ScalarType dtype, const Layout& layout, const void* x, const void* m, void* out) {
  switch (dtype) {
    case ScalarType::Float: return reduce<Op<float>>(layout, x, m, out);
    case ScalarType::Double: return reduce<Op<double>>(layout, x, m, out);
    case ScalarType::Half: return reduce<Op<Half>>(layout, x, m, out);
    case ScalarType::BFloat16: return reduce<Op<BFloat16>>(layout, x, m, out);
    case ScalarType::Long: return reduce<Op<int64_t>>(layout, x, m, out);
    case ScalarType::Int: return reduce<Op<int32_t>>(layout, x, m, out);
    case ScalarType::Short: return reduce<Op<int16_t>>(layout, x, m, out);
    case ScalarType::Char: return reduce<Op<int8_t>>(layout, x, m, out);
    case ScalarType::Byte:
    case ScalarType::Bool: return reduce<Op<uint8_t>>(layout, x, m, out);
    default: STD_TORCH_CHECK(false, "maskwise: a reduction was called with a dtype that has no kernel");
  }
}

inline void sum(ScalarType dtype, const Layout& layout, const void* x, const void* m, void* out) {
  reduce_any<Sum>(dtype, layout, x, m, out);
}
