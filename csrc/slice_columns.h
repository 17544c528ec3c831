// The walk over slices that lie side by side: neighbours in memory are elements of different slices, each lane of a
// vector has a slice of its own. Included after slice_walk.h.

// A block of columns: kBlock, and fewer than a vector more. The last vector reaches back over the one before it rather
// than past the end.
template <class Op>
struct Columns {
  using T = typename Op::T;
  static constexpr int L = kLanes<typename Op::A>;
  State<Op> states[kBlock / L + 1];
  uint8_t staged[kGroup * (kBlock + L)];

  static int64_t vectors(int64_t w) { return ceil_div(w, L); }
  static int64_t column(int64_t v, int64_t w) { return std::min(v * L, w - L); }

  // The mask bytes of `count` rows as the vector loops want them: their address and the step from row to row.
  const uint8_t* bits_of(const uint8_t* m, int64_t row_step, int64_t column_step, int64_t count, int64_t w,
                         int64_t& step) {
    step = row_step;
    if (column_step == 1) return m;
    if (row_step == 1 && count == kTurned) {
      static_assert(kGroup == kTurned, "a group is turned at once");
      turn(m, column_step, w, staged, w);
      step = w;
      return staged;
    }
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < w; ++j) staged[r * w + j] = m[r * row_step + j * column_step];
    step = w;
    return staged;
  }

  // Rows [0, count) of one stretch, of which `row` is the loop and `column` the loop over columns.
  void see(const Op& op, const Operands<Op>& o, const SliceLoop& row, const SliceLoop& column_loop, int64_t count,
           int64_t w) {
    for (int64_t r = 0; r < count;) {
      SliceOffset to;
      to.move(row, r);
      const Operands<Op> here = o.at(to);
      int64_t n = std::min<int64_t>(kGroup, count - r);
      if (column_loop.mask == 0) {
        // Whole rows are kept or dropped: a group ends where a dropped row is met.
        int64_t kept = 0;
        while (kept < n && here.mask[kept * row.mask] != 0) ++kept;
        r += std::max<int64_t>(kept, 1);
        if (kept == 0) continue;
        for (int64_t v = 0; v < vectors(w); ++v) {
          const int64_t j = column(v, w);
          op.see(states[v], Group<Op, false>{here.x + j, here.grad + j, nullptr, row.x, row.grad, 0},
                 static_cast<int>(kept));
        }
        continue;
      }
      int64_t step;
      const uint8_t* bits = bits_of(here.mask, row.mask, column_loop.mask, n, w, step);
      for (int64_t v = 0; v < vectors(w); ++v) {
        const int64_t j = column(v, w);
        op.see(states[v], Group<Op, true>{here.x + j, here.grad + j, bits + j, row.x, row.grad, step},
               static_cast<int>(n));
      }
      r += n;
    }
  }

  template <bool kMasked, bool kStream>
  void map_one_row(const Op& op, const Operands<Op>& o, const uint8_t* bits, int64_t w) const {
    for (int64_t v = 0; v < w / L; ++v)
      map_one<Op, kMasked, kStream>(op, states[v], o.x + v * L, o.grad + v * L, bits + v * L, o.out + v * L);
    if (w % L == 0) return;
    const int64_t j = w - L;
    map_one<Op, kMasked, false>(op, states[w / L], o.x + j, o.grad + j, bits + j, o.out + j);
  }

  void map(const Op& op, const Operands<Op>& o, const SliceLoop& row, const SliceLoop& column_loop, int64_t count,
           int64_t w) {
    for (int64_t r = 0; r < count; ++r) {
      SliceOffset to;
      to.move(row, r);
      const Operands<Op> here = o.at(to);
      const bool stream = here.stream && can_stream(here.out);
      if (column_loop.mask == 0) {
        if (*here.mask == 0)
          fill_row<Op>(here.out, w);
        else if (stream)
          map_one_row<false, true>(op, here, here.mask, w);
        else
          map_one_row<false, false>(op, here, here.mask, w);
        continue;
      }
      const uint8_t* bits = here.mask;
      if (column_loop.mask != 1) {
        // As many rows as are staged at once; the others of the group find theirs there.
        int64_t step;
        if (r % kGroup == 0)
          bits_of(here.mask, row.mask, column_loop.mask, std::min<int64_t>(kGroup, count - r), w, step);
        bits = staged + r % kGroup * w;
      }
      if (stream)
        map_one_row<true, true>(op, here, bits, w);
      else
        map_one_row<true, false>(op, here, bits, w);
    }
  }
};

// How many columns a block has. Where there would be few blocks, they are narrower, for threads to share: columns do not
// depend on each other, so that the bits of a result do not depend on it. Whole cache lines in any case.
inline int64_t columns_at_once(const SliceLayout& layout) {
  constexpr int64_t kBlocks = 8, kLeast = 64;
  const int64_t columns = layout.over.back().size;
  const int64_t blocks = std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, layout.slices / columns));
  const int64_t shared = std::max(kLeast, ceil_div(ceil_div(columns, blocks), 16) * 16);
  return std::min(columns, std::min(kBlock, layout.slices * layout.length < 2 * kGrain ? kBlock : shared));
}

template <class Op>
void walk_columns(const Op& op, const SliceLayout& layout, const Operands<Op>& all) {
  constexpr int L = kLanes<typename Op::A>;
  const SliceLoop column_loop = layout.over.back();
  const std::vector<SliceLoop> outer(layout.over.begin(), layout.over.end() - 1);
  const SliceLoop row = layout.within.empty() ? SliceLoop{1, 0, 0, 0, 0} : layout.within.back();
  // Every block is at least a vector wide: fewer columns than that stay with the block before them.
  const int64_t width = columns_at_once(layout);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(column_loop.size - (L - 1), width));
  const int64_t groups = layout.slices / column_loop.size * blocks;
  const int64_t rows_each = std::max<int64_t>(1, kTask / width);
  const int64_t splits = groups >= 64 ? 1 : std::max<int64_t>(1, ceil_div(layout.length, rows_each));
  const int64_t step = splits == 1 ? layout.length : rows_each;
  const int64_t vectors = Columns<Op>::vectors(std::min(column_loop.size, kBlock + L - 1));
  Parts<Op> parts(splits == 1 ? 0 : groups * splits * vectors);

  // Runs body(columns, operands of the block, its width, first row, end of rows) for each task.
  const auto for_each_task = [&](const auto& body) {
    parallel(groups * splits, step * width, [&](int64_t begin, int64_t end) {
      Columns<Op> columns;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task / splits;
        const int64_t first = group % blocks * width;
        const int64_t w = group % blocks == blocks - 1 ? column_loop.size - first : width;
        SliceOffset to = offset_of(outer, group / blocks);
        to.move(column_loop, first);
        const int64_t from = task % splits * step;
        body(columns, task, all.at(to), w, from, std::min(from + step, layout.length));
      }
      if (all.stream) stream_fence();
    });
  };
  const auto see = [&](Columns<Op>& columns, const Operands<Op>& o, int64_t w, int64_t from, int64_t to) {
    std::fill_n(columns.states, Columns<Op>::vectors(w), op.start());
    for_each_run(layout.within, from, to,
                 [&](SliceOffset at, int64_t count) { columns.see(op, o.at(at), row, column_loop, count, w); });
  };
  const auto map = [&](Columns<Op>& columns, const Operands<Op>& o, int64_t w, int64_t from, int64_t to) {
    for_each_run(layout.within, from, to,
                 [&](SliceOffset at, int64_t count) { columns.map(op, o.at(at), row, column_loop, count, w); });
  };

  if (splits == 1) {
    for_each_task([&](Columns<Op>& columns, int64_t, const Operands<Op>& o, int64_t w, int64_t from, int64_t to) {
      see(columns, o, w, from, to);
      for (int64_t v = 0; v < Columns<Op>::vectors(w); ++v) op.finish(columns.states[v]);
      map(columns, o, w, from, to);
    });
    return;
  }
  for_each_task([&](Columns<Op>& columns, int64_t task, const Operands<Op>& o, int64_t w, int64_t from, int64_t to) {
    see(columns, o, w, from, to);
    std::copy_n(columns.states, Columns<Op>::vectors(w), parts.at(task * vectors));
  });
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t w = group % blocks == blocks - 1 ? column_loop.size - group % blocks * width : width;
    for (int64_t v = 0; v < Columns<Op>::vectors(w); ++v) {
      State<Op>& s = *parts.at(group * splits * vectors + v);
      for (int64_t p = 1; p < splits; ++p) op.merge(s, *parts.at((group * splits + p) * vectors + v));
      op.finish(s);
    }
  }
  for_each_task([&](Columns<Op>& columns, int64_t task, const Operands<Op>& o, int64_t w, int64_t from, int64_t to) {
    std::copy_n(parts.at(task / splits * splits * vectors), Columns<Op>::vectors(w), columns.states);
    map(columns, o, w, from, to);
  });
}
