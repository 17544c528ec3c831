// Slices that lie side by side, collected a row of them at a time; and the one function that collects a block of slices.
// Compiled once a target, for the order family.
#include "order_slices.h"
#if defined(MASKWISE_ORDER_COLUMNS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_COLUMNS_H
#else
#define MASKWISE_ORDER_COLUMNS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What is kept of a row of columns: nothing outside of [begin, end); inside, what the bytes say, all where they are null.
struct KeptRow {
  const uint8_t* bytes;
  int64_t begin, end;
};

// Rows whose mask is looked at together, while the rows before them are collected.
constexpr int64_t kRowsAhead = kTransposedRows;

// The mask of a run of rows of w columns; it stands at `m` and `position`.
struct ColumnMask {
  const Mask& mask;
  const uint8_t* m;
  int64_t position;
  const Loop<3>& row;
  const Loop<3>& column;
  int64_t w;
  int64_t begin, end;             // rows outside of which nothing is kept
  int64_t bits_row, bits_column;  // how far the mask moves
  bool ragged;                    // whether each column has one interval of rows
  int64_t starts[kWidest], ends[kWidest];
  uint8_t staged[2][kRowsAhead][kWidest];

  ColumnMask(const OrderNest& nest, const Offset<3>& at, const Loop<3>& row, const Loop<3>& column, int64_t w,
             int64_t count)
      : mask(nest.mask), m(mask.data + at[nest.kMask]), position(at[nest.kPosition]), row(row), column(column), w(w),
        begin(0), end(count), bits_row(row.stride[nest.kMask]), bits_column(column.stride[nest.kMask]),
        ragged(mask.has_intervals() && bits_column != 0 && bits_row == 0) {
    const auto rows_of = [&](const uint8_t* bounds) {
      return kept_of_run(mask, bounds, position, 0, row.stride[nest.kPosition], count);
    };
    if (ragged) {
      std::swap(begin, end);
      for (int64_t j = 0; j < w; ++j) {
        const KeptRun run = rows_of(m + j * bits_column);
        starts[j] = run.begin;
        ends[j] = run.kept == Kept::none ? run.begin : run.end;
        if (run.kept == Kept::none) continue;
        begin = std::min(begin, starts[j]);
        end = std::max(end, ends[j]);
      }
    } else if (bits_row == 0 && bits_column == 0 && column.stride[nest.kPosition] == 0) {
      const KeptRun run = rows_of(m);
      begin = run.begin;
      end = run.kept == Kept::none ? run.begin : run.end;
    }
  }

  // Looks at the rows [first, first + n), n <= kRowsAhead.
  void look(int64_t first, int64_t n, KeptRow* rows) {
    uint8_t(*bytes)[kWidest] = staged[first / kRowsAhead % 2];
    const uint8_t* at = m + first * bits_row;
    const bool contiguous = bits_column == 1 && !mask.has_intervals();
    const bool transposes = !mask.has_intervals() && bits_row == 1 && n == kRowsAhead;
    if (transposes && bits_column > 1) transpose_rows(at, bits_column, w, bytes[0], kWidest);
    for (int64_t k = 0; k < n; ++k, at += bits_row) {
      const int64_t line = position + (first + k) * row.stride[OrderNest::kPosition];
      if (bits_column == 0) {
        const KeptRun run = kept_of_run(mask, at, line, 0, column.stride[OrderNest::kPosition], w);
        rows[k] = {nullptr, run.begin, run.kept == Kept::none ? run.begin : run.end};
        continue;
      }
      // Rows lie pages apart, where no hardware prefetcher looks. One that is beyond the end does no harm.
      if (contiguous) __builtin_prefetch(at + kRowsAhead * bits_row);
      if (ragged)
        for (int64_t j = 0; j < w; ++j) bytes[k][j] = (starts[j] <= first + k) & (first + k < ends[j]);
      else if (!contiguous && !transposes)
        stage_kept(mask, at, line, bits_column, w, bytes[k]);
      rows[k] = {contiguous ? at : bytes[k], 0, w};
      if (none_of(rows[k].bytes, w)) rows[k].end = 0;
    }
  }
};

inline void prefetch(const void* p, int64_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  for (uintptr_t line = at & ~uintptr_t{63}; line < at + bytes; line += 64) __builtin_prefetch((const void*)line);
}

// Calls visit(keys, row, place) for every row of a block of w columns of which anything is kept, with the keys of its w
// elements as far as the KeptRow goes.
template <class Kind, class Visit, class K = typename Kind::K>
void for_each_row(const OrderNest& nest, const Source<Kind>& x, int64_t first_slice, int64_t w, K flip,
                  const Visit& visit) {
  const Offset<3> block = offset_of(nest.outer, first_slice);
  const Loop<3> column = nest.outer.back(), loop = innermost(nest.inner, nest.mask, nest.kMask);
  alignas(64) K keys[kWidest];
  KeptRow ahead[2][kRowsAhead];
  int64_t place = 0;
  for_each_run(nest.inner, 0, nest.length, [&](Offset<3> at, int64_t count) {
    for (int o = 0; o < 3; ++o) at.of[o] += block[o];
    ColumnMask kept(nest, at, loop, column, w, count);
    const Source<Kind> xs = x.at(at[nest.kX]);
    const auto elements = [&](int64_t r, const KeptRow& row) {
      return xs.at(r * loop.stride[nest.kX] + row.begin).data;
    };
    const auto look = [&](int64_t first) {
      KeptRow* rows = ahead[first / kRowsAhead % 2];
      const int64_t n = std::min(kRowsAhead, kept.end - first);
      kept.look(first, n, rows);
      for (int64_t k = 0; k < n; ++k)
        if (rows[k].begin < rows[k].end)
          prefetch(elements(first + k, rows[k]), (rows[k].end - rows[k].begin) * x.type.bytes);
    };
    const int64_t begin = kept.begin / kRowsAhead * kRowsAhead;
    for (int64_t first = begin; first < kept.end; first += kRowsAhead) {
      if (first == begin) look(first);
      if (first + kRowsAhead < kept.end) look(first + kRowsAhead);
      for (int64_t r = std::max(first, kept.begin); r < std::min(first + kRowsAhead, kept.end); ++r) {
        const KeptRow row = ahead[first / kRowsAhead % 2][r - first];
        if (row.begin >= row.end) continue;
        x.type.load(elements(r, row), row.end - row.begin, flip, keys + row.begin);
        visit(static_cast<const K*>(keys), row, place + r);
      }
    }
    place += count;
  });
}

// The entries of w columns, the ones of column j from out + j * stride on.
template <class Kind, class K = typename Kind::K>
void collect_columns(typename Kind::E* out, int64_t stride, int64_t* counts, const OrderNest& nest,
                     const Source<Kind>& x, int64_t first, int64_t w, K flip) {
  std::fill_n(counts, w, 0);
  for_each_row(nest, x, first, w, flip, [&](const K* keys, const KeptRow& row, int64_t place) {
    for (int64_t j = row.begin; j < row.end; ++j) {
      out[j * stride + counts[j]] = Kind::make(keys[j], place);
      counts[j] += row.bytes == nullptr || row.bytes[j] != 0;
    }
  });
}

// Fills a block of slices, by rows or by columns.
template <class Kind, class K = typename Kind::K>
void collect_block(typename Kind::E* out, int64_t stride, int64_t* counts, const Blocks& blocks, const OrderNest& nest,
                   const Source<Kind>& x, int64_t first, int64_t w, K flip) {
  if (blocks.columns) return collect_columns<Kind>(out, stride, counts, nest, x, first, w, flip);
  for (int64_t j = 0; j < w; ++j) counts[j] = collect_row<Kind>(out + j * stride, nest, x, first + j, flip);
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
