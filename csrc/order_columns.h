// Slices that lie side by side: tiles of them are transposed, and then collected as rows are. Compiled once a target,
// for the order family.
#include "order_slices.h"
#if defined(MASKWISE_ORDER_COLUMNS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_COLUMNS_H
#else
#define MASKWISE_ORDER_COLUMNS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Rows of a tile.
constexpr int64_t kOrderTile = 64;

// What is kept of a tile: nothing outside of the columns [begin, end), nor in a row whose byte is zero. Inside, what
// the bytes of each column say, which are `pitch` apart; without any, a run of rows of each column.
struct KeptTile {
  int64_t begin, end;
  uint8_t rows[kOrderTile];
  const uint8_t* bytes;
  int64_t pitch;
  uint8_t staged[kWidest * kOrderTile];
};

// The mask of `count` rows of w columns, which stands at `m` and `position`. Where it is the same for every row, each
// column keeps a run of rows.
struct ColumnMask {
  const Mask& mask;
  const uint8_t* m;
  int64_t position;
  int64_t down, across;            // how far the mask moves from a row to the next, and from a column to the next
  int64_t step_down, step_across;  // how far the position does
  int64_t w;
  int64_t begin, end;  // the rows outside of which nothing is kept
  int64_t starts[kWidest], ends[kWidest];

  ColumnMask(const OrderNest& nest, const Offset<3>& at, int64_t w, int64_t count)
      : mask(nest.mask), m(mask.data + at[nest.kMask]), position(at[nest.kPosition]), w(w), begin(count), end(0) {
    const Loop<3> row = innermost(nest.inner, mask, nest.kMask), column = nest.outer.back();
    down = row.stride[nest.kMask], across = column.stride[nest.kMask];
    step_down = row.stride[nest.kPosition], step_across = column.stride[nest.kPosition];
    for (int64_t j = 0; j < w; ++j) {
      KeptRun run{Kept::all, 0, count};
      if (down == 0) run = kept_of_run(mask, m + j * across, position + j * step_across, 0, step_down, count);
      starts[j] = run.begin;
      ends[j] = run.kept == Kept::none ? run.begin : run.end;
      if (starts[j] == ends[j]) continue;
      begin = std::min(begin, starts[j]);
      end = std::max(end, ends[j]);
    }
  }

  // Looks at the rows [first, first + n).
  void look(int64_t first, int64_t n, KeptTile& tile) const {
    tile.bytes = nullptr;
    tile.begin = w, tile.end = 0;
    std::memset(tile.rows, 1, n);
    if (down == 0) {
      for (int64_t j = 0; j < w; ++j) {
        if (std::max(starts[j], first) >= std::min(ends[j], first + n)) continue;
        tile.begin = std::min(tile.begin, j);
        tile.end = j + 1;
      }
    } else if (across == 0) {
      look_at_rows(first, n, tile);
    } else {
      look_at_bytes(first, n, tile);
    }
  }

 private:
  // A run of columns for each row.
  void look_at_rows(int64_t first, int64_t n, KeptTile& tile) const {
    uint8_t rows[kOrderTile][kWidest];
    bool all = true;
    for (int64_t r = 0; r < n; ++r) {
      const int64_t line = position + (first + r) * step_down;
      const KeptRun run = kept_of_run(mask, m + (first + r) * down, line, 0, step_across, w);
      const int64_t kept = run.kept == Kept::none ? 0 : run.end - run.begin;
      tile.rows[r] = kept > 0;
      all = all && kept == w;
      if (kept > 0) tile.begin = std::min(tile.begin, run.begin), tile.end = std::max(tile.end, run.end);
      if (step_across == 0) continue;
      std::memset(rows[r], 0, w);
      std::memset(rows[r] + run.begin, 1, kept);
    }
    if (all || tile.end == 0) return;
    tile.bytes = step_across == 0 ? tile.rows : transpose(rows[0], kWidest, n, tile);
    tile.pitch = step_across == 0 ? 0 : kOrderTile;
  }

  // A byte for each element.
  void look_at_bytes(int64_t first, int64_t n, KeptTile& tile) const {
    const uint8_t* at = m + first * down;
    uint8_t any = 0;
    bool zero = false;
    if (down == 1 && !mask.has_intervals()) {
      tile.bytes = at;
      tile.pitch = across;
      uint8_t kept[kOrderTile] = {};
      for (int64_t j = 0; j < w; ++j) {
        const uint8_t* column = at + j * across;
        for (int64_t r = 0; r < n; ++r) kept[r] |= column[r];
        zero = zero || std::memchr(column, 0, n) != nullptr;
      }
      for (int64_t r = 0; r < n; ++r) any |= tile.rows[r] = kept[r];
    } else {
      const bool in_place = across == 1 && !mask.has_intervals();
      uint8_t staged[kOrderTile][kWidest];
      const uint8_t* rows = in_place ? at : staged[0];
      const int64_t apart = in_place ? down : kWidest;
      for (int64_t r = 0; r < n; ++r) {
        // Rows lie pages apart, where no hardware prefetcher looks. One that is beyond the end does no harm.
        if (in_place)
          __builtin_prefetch(at + (r + kOrderTile) * down);
        else
          stage_kept(mask, at + r * down, position + (first + r) * step_down, across, w, staged[r]);
        any |= tile.rows[r] = !none_of(rows + r * apart, w);
        zero = zero || std::memchr(rows + r * apart, 0, w) != nullptr;
      }
      if (any != 0 && zero) tile.bytes = transpose(rows, apart, n, tile);
      tile.pitch = kOrderTile;
    }
    if (any != 0) tile.begin = 0, tile.end = w;
    if (!zero) tile.bytes = nullptr;
    // To pass over a few rows would cost more than to read them.
    if (std::count(tile.rows, tile.rows + n, 0) < n / 2) std::memset(tile.rows, 1, n);
  }

  const uint8_t* transpose(const uint8_t* rows, int64_t apart, int64_t n, KeptTile& tile) const {
    transpose_tile<uint8_t>(reinterpret_cast<const char*>(rows), apart, w, n, reinterpret_cast<char*>(tile.staged),
                            kOrderTile);
    return tile.staged;
  }
};

inline void prefetch(const void* p, int64_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  for (uintptr_t line = at & ~uintptr_t{63}; line < at + bytes; line += 64) __builtin_prefetch((const void*)line);
}

// Calls piece(j, x, m, n, place) for stretches of contiguous elements of w columns, j the column, the rest as in
// for_each_piece. The mask of a tile is looked at, and what is kept of it prefetched, while the one before is collected.
template <class Kind, class Piece>
void for_each_column_piece(const OrderNest& nest, const Source<Kind>& x, int64_t first, int64_t w, const Piece& piece) {
  const Offset<3> block = offset_of(nest.outer, first);
  const int bytes = static_cast<int>(x.type.bytes);
  const int64_t apart = innermost(nest.inner).stride[nest.kX] * bytes;
  alignas(64) char rows[kOrderTile * kWidest * 8], columns[kWidest * kOrderTile * 8];
  KeptTile tiles[2];
  int64_t place = 0;
  for_each_run(nest.inner, 0, nest.length, [&](Offset<3> at, int64_t count) {
    for (int o = 0; o < 3; ++o) at.of[o] += block[o];
    const ColumnMask mask(nest, at, w, count);
    const char* from = x.at(at[nest.kX]).data;
    const auto look = [&](int64_t t, KeptTile& tile) {
      const int64_t n = std::min(kOrderTile, mask.end - t);
      mask.look(t, n, tile);
      for (int64_t r = 0; r < n && tile.begin < tile.end; ++r)
        if (tile.rows[r] != 0) prefetch(from + (t + r) * apart + tile.begin * bytes, (tile.end - tile.begin) * bytes);
    };
    if (mask.begin < mask.end) look(mask.begin, tiles[0]);
    for (int64_t t = mask.begin, which = 0; t < mask.end; t += kOrderTile, which ^= 1) {
      if (t + kOrderTile < mask.end) look(t + kOrderTile, tiles[which ^ 1]);
      const KeptTile& tile = tiles[which];
      if (tile.begin >= tile.end) continue;
      const int64_t n = std::min(kOrderTile, mask.end - t), wide = tile.end - tile.begin;
      const char* source = from + t * apart + tile.begin * bytes;
      int64_t source_apart = apart;
      if (std::memchr(tile.rows, 0, n) != nullptr) {
        // Rows of which nothing is kept are not read: what is in their place is dropped by their bytes.
        for (int64_t r = 0; r < n; ++r)
          if (tile.rows[r] != 0) std::memcpy(rows + r * kWidest * bytes, source + r * apart, wide * bytes);
        source = rows;
        source_apart = kWidest * bytes;
      }
      transpose_tile(bytes, source, source_apart, wide, n, columns, kOrderTile * bytes);
      for (int64_t j = tile.begin; j < tile.end; ++j) {
        const int64_t begin = std::max(mask.starts[j] - t, int64_t{0}), end = std::min(mask.ends[j] - t, n);
        if (begin >= end) continue;
        const char* values = columns + ((j - tile.begin) * kOrderTile + begin) * bytes;
        const uint8_t* kept = tile.bytes == nullptr ? nullptr : tile.bytes + j * tile.pitch + begin;
        piece(j, Source<Kind>{x.type, values}, kept, end - begin, place + t + begin);
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
  for_each_column_piece(nest, x, first, w,
                        [&](int64_t j, const Source<Kind>& xs, const uint8_t* m, int64_t n, int64_t place) {
                          typename Kind::E* to = out + j * stride + counts[j];
                          counts[j] += xs.type.compact(to, xs.data, m, n, place, flip, K{0});
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
