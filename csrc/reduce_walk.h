// How a reduction walks: rows when the reduced stretch is contiguous, columns when the kept one is, and a staged copy of
// small pieces for any other stride. Included once a SIMD level, inside its namespace, by the kernel header of a family.
//
// A reduction is a struct Op with
//   In, Out            the element types of x and of the result
//   State              what one output has seen so far; default-constructed it has seen nothing
//   row(s, x, m, n)    sees n contiguous elements; m is null where all are kept
//   Columns            the same for up to kColumns outputs side by side: start(c, w), cols(c, x, m, w), column(c, j)
//   merge(s, other)    joins the state of a later stretch
//   finish(s)          the result

// Columns done side by side; their accumulators stay in the first-level cache.
constexpr int64_t kColumns = 1024;
// One output with more elements than this is split among threads. Fixed, so that the bits of a result never depend on
// the number of threads.
constexpr int64_t kSplit = 262144;

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
