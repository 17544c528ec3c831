// The inner loops of a reduction over columns side by side. Compiled once a target.
#include "reduce_rows.h"
#if defined(MASKWISE_REDUCE_COLUMNS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_COLUMNS_H
#else
#define MASKWISE_REDUCE_COLUMNS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Reads a byte of each cache line of n bytes, in order. Short rows lie several to a page, and when they are read
// alternately, the CPU finds no order that it could read ahead in.
inline void touch(const void* p, int64_t n) {
  const char* bytes = static_cast<const char*>(p);
  char any = 0;
  for (int64_t i = 0; i < n; i += 64) any ^= bytes[i];
  asm volatile("" : : "r"(any));
}

// The functions of a Reduction, for columns.
template <class Op>
struct ReduceColumns : ReduceRows<Op> {
  using A = typename Op::A;
  using In = typename Op::In;
  using State = typename Op::State;
  using Lanes = typename Op::Lanes;
  using ReduceRows<Op>::self, ReduceRows<Op>::init, ReduceRows<Op>::L;
  static constexpr int R = kColumnRows;

  static void init_columns(const void* op, Columns& columns) {
    std::fill_n(reinterpret_cast<Lanes*>(columns.lanes), ceil_div(columns.w, L), self(op).init());
    init(columns.states, columns.w);
  }

  // Rows [begin, end) of a block of columns of which some, and of which all columns are kept.
  struct BlockRanges {
    int32_t some_begin, some_end, all_begin, all_end;
  };

  // Columns with an interval of rows each: blocks of columns from the first row that one of them keeps to the last, without
  // mask bytes where all of them keep a row.
  static void accumulate_bounded(const Op& op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    constexpr int64_t B = std::max<int64_t>(kMaskBlock, L);
    Columns columns = held;
    const int64_t x_stride = run.row.stride[kX], p_stride = run.row.stride[kPosition], w = columns.w;
    const int64_t m_step = run.column.stride[kMask], blocks = ceil_div(w, B);
    int32_t starts[kColumns + B], ends[kColumns + B];
    BlockRanges ranges[kColumns / kMaskBlock + 1];
    const auto row_of = [&](int64_t position) {
      const int64_t row = position <= run.position ? 0 : ceil_div(position - run.position, p_stride);
      return static_cast<int32_t>(std::min(row, count));
    };
    int64_t first = count, last = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      BlockRanges& range = ranges[b] = {std::numeric_limits<int32_t>::max(), 0, 0, std::numeric_limits<int32_t>::max()};
      for (int64_t j = b * B; j < std::min(w, (b + 1) * B); ++j) {
        const Interval kept = run.mask.interval(run.m + j * m_step);
        starts[j] = row_of(kept.start);
        ends[j] = row_of(kept.end);
        if (starts[j] >= ends[j]) {
          // It keeps nothing: no row of the block is whole.
          starts[j] = std::numeric_limits<int32_t>::max();
          ends[j] = 0;
        }
        range = {std::min(range.some_begin, starts[j]), std::max(range.some_end, ends[j]),
                 std::max(range.all_begin, starts[j]), std::min(range.all_end, ends[j])};
      }
      first = std::min<int64_t>(first, range.some_begin);
      last = std::max<int64_t>(last, range.some_end);
    }
    for (int64_t r = first / R * R; r < last; r += R) {
      const int64_t rows = std::min<int64_t>(R, count - r);
      if (columns.pending + R > Op::kPeriod || at + r + R - columns.base > Op::kPeriod) collect_columns(&op, columns);
      if (columns.pending == 0) columns.base = at + r;
      columns.pending += R;
      const auto row = static_cast<BitsOf<A>>(at + r - columns.base);
      auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
      for (int64_t b = 0; b < blocks; ++b) {
        const BlockRanges& range = ranges[b];
        if (r + rows <= range.some_begin || r >= range.some_end) continue;
        const int64_t j = b * B, width = std::min(B, w - j);
        const In* xs[R];
        for (int k = 0; k < R; ++k)
          xs[k] = reinterpret_cast<const In*>(run.x + (r + (k < rows ? k : 0)) * x_stride) + j;
        if (rows == R && width == B && r >= range.all_begin && r + R <= range.all_end) {
          accumulate_vectors<R, false>(op, lanes + j / L, xs, nullptr, B / L, row);
          continue;
        }
        if constexpr (sizeof(A) == sizeof(int32_t)) {
          if (rows == R && width == B) {
            accumulate_between(op, lanes + j / L, xs, starts + j, ends + j, static_cast<int32_t>(r), row);
            continue;
          }
        }
        uint8_t bytes[R][B] = {};
        const uint8_t* ms[R];
        const In* some = nullptr;
        for (int k = 0; k < R; ++k) {
          ms[k] = bytes[k];
          const auto at_row = static_cast<int32_t>(r + k);
          for (int64_t i = 0; k < rows && i < width; ++i)
            bytes[k][i] = static_cast<uint8_t>((starts[j + i] <= at_row) & (at_row < ends[j + i]));
          if (!none_of(bytes[k], width))
            some = xs[k];
          else
            xs[k] = nullptr;
        }
        if (some == nullptr) continue;
        for (int k = 0; k < R; ++k)
          if (xs[k] == nullptr) xs[k] = some;
        accumulate_rows(op, lanes + j / L, xs, ms, width, row, false);
      }
    }
    held = columns;
  }

  // R rows of a block of columns, from row `r` on, each column from its start to its end. Vectors of a row of which nothing is
  // kept are not read.
  static void accumulate_between(const Op& op, Lanes* lanes, const In* const (&x)[R], const int32_t* starts,
                                 const int32_t* ends, int32_t r, BitsOf<A> first) {
    constexpr int64_t B = std::max<int64_t>(kMaskBlock, L);
    for (int64_t i = 0; i < B; i += L) {
      const auto start = load_raw<LaneMask<A>>(starts + i), end = load_raw<LaneMask<A>>(ends + i);
      LaneMask<A> kept[R], some{};
      for (int k = 0; k < R; ++k) {
        const auto at = splat<BitsOf<A>>(r + k);
        kept[k] = (start <= at) & (at < end);
        some |= kept[k];
      }
      if (!any_lane(some)) continue;
      Vec<A> values[R];
      for (int k = 0; k < R; ++k) values[k] = any_lane(kept[k]) ? load<A>(x[k] + i) : Vec<A>{};
      op.template accumulate<R>(lanes[i / L], values, kept, first);
    }
  }

  // Rows of which all columns are kept or none: the kept ones some at a time, wherever they are; one by one where lanes hold
  // positions. Where few are kept, they are prefetched some steps ahead; where few are dropped, the CPU reads ahead, if those
  // are prefetched as well.
  static void accumulate_whole_rows(const Op& op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    constexpr int64_t kNear = 2048, kSteps = 8;
    constexpr int kStep = Op::kPositions ? 1 : R;
    Columns columns = held;
    auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
    const int64_t x_stride = run.row.stride[kX], m_stride = run.row.stride[kMask], bytes = columns.w * sizeof(In);
    const bool narrow = x_stride == bytes && bytes <= kNear;
    const bool most = run.few_dropped;
    const uint8_t* ms[R];
    std::fill_n(ms, R, kAllKept.bytes);
    const auto accumulate = [&](const In* const (&x)[kStep], int64_t r, bool all) {
      if (columns.pending + kStep > Op::kPeriod) collect_columns(&op, columns);
      if constexpr (Op::kPositions) {
        if (at + r + 1 - columns.base > Op::kPeriod) collect_columns(&op, columns);
        if (columns.pending == 0) columns.base = at + r;
        accumulate_range(op, lanes, x[0], 0, columns.w, static_cast<BitsOf<A>>(at + r - columns.base));
      } else {
        accumulate_rows(op, lanes, x, ms, columns.w, 0, all);
      }
      columns.pending += kStep;
    };
    // Steps that wait for their memory: a ring.
    const In* rows[kSteps][kStep];
    int64_t places[kSteps] = {};  // of rows by themselves
    const int64_t wait = most ? 0 : std::clamp<int64_t>(kAheadRuns / (kStep * std::min(bytes, kNear)), 1, kSteps - 1);
    int64_t filled = 0, done = 0;
    const auto next = [&] { return done++ % kSteps; };
    for (int64_t r = 0; r < count; ++r) {
      const char* x = run.x + r * x_stride;
      if (run.m[r * m_stride] == 0) {
        if (most && narrow)
          for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + i);
        continue;
      }
      if (!most)
        prefetch_lines(x, std::min(bytes, kNear));
      else if (narrow)
        touch(x, bytes);
      rows[filled / kStep % kSteps][filled % kStep] = reinterpret_cast<const In*>(x);
      if constexpr (Op::kPositions) places[filled % kSteps] = r;
      if (++filled % kStep != 0 || filled / kStep <= done + wait) continue;
      const int64_t step = next();
      accumulate(rows[step], places[step], true);
    }
    while (done < filled / kStep) {
      const int64_t step = next();
      accumulate(rows[step], places[step], true);
    }
    if (filled % kStep != 0) {
      auto& rest = rows[done % kSteps];
      for (int k = static_cast<int>(filled % kStep); k < kStep; ++k) rest[k] = rest[0], ms[k] = kNoneKept.bytes;
      accumulate(rest, 0, false);
    }
    held = columns;
  }

  // Whether few blocks of `count` rows with a byte for each column keep something, by some of them.
  static bool few_blocks(const ColumnRun& run, int64_t count, int64_t w) {
    constexpr int64_t kSamples = 8;
    const int64_t down = ceil_div(count, kSamples), across = ceil_div(w / kMaskBlock, kSamples) * kMaskBlock;
    int64_t some = 0, all = 0;
    for (int64_t r = 0; r < count; r += down)
      for (int64_t j = 0; j + kMaskBlock <= w; j += across, ++all)
        some += set_bytes<kMaskBlock>(run.m + r * run.row.stride[kMask] + j) != 0;
    return some * 4 < all * 3;
  }

  // Rows with a byte for each column, of which few blocks are kept: they are looked at a step before they are accumulated, and
  // what they keep is prefetched meanwhile. Of a block only the rows that keep something are read.
  static void accumulate_blocks_kept(const Op& op, Columns& held, const ColumnRun& run, int64_t count) {
    constexpr int64_t B = std::max<int64_t>(kMaskBlock, L), kBlocks = kColumns / B;
    Columns columns = held;
    auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
    const int64_t x_stride = run.row.stride[kX], m_stride = run.row.stride[kMask], w = columns.w, blocks = w / B;
    const auto row_of = [&](int64_t r) { return reinterpret_cast<const In*>(run.x + r * x_stride); };
    uint64_t sets[2][kBlocks][R];
    const auto look = [&](int64_t r, uint64_t (&of)[kBlocks][R]) {
      for (int k = 0; k < R; ++k)
        for (int64_t b = 0; b < blocks; ++b) {
          of[b][k] = r + k < count ? set_bytes<kMaskBlock>(run.m + (r + k) * m_stride + b * B) : 0;
          if (of[b][k] != 0) prefetch_lines(row_of(r + k) + b * B, B * sizeof(In));
        }
    };
    look(0, sets[0]);
    for (int64_t r = 0; r < count; r += R) {
      const auto& now = sets[r / R % 2];
      if (r + R < count) look(r + R, sets[(r / R + 1) % 2]);
      if (columns.pending + R > Op::kPeriod) collect_columns(&op, columns);
      columns.pending += R;
      for (int64_t b = 0; b < blocks; ++b) {
        const In* xs[R];
        const uint8_t* ms[R];
        int n = 0;
        bool all = true;
        for (int k = 0; k < R; ++k) {
          if (now[b][k] == 0) continue;
          xs[n] = row_of(r + k) + b * B;
          ms[n++] = run.m + (r + k) * m_stride + b * B;
          all = all && now[b][k] == ~uint64_t{0};
        }
        accumulate_some(op, lanes + b * B / L, xs, ms, n, all, B / L);
      }
      if (const int64_t j = blocks * B; j < w) {
        const In* xs[R];
        const uint8_t* ms[R];
        for (int k = 0; k < R; ++k) {
          xs[k] = row_of(r + (r + k < count ? k : 0)) + j;
          ms[k] = r + k < count ? run.m + (r + k) * m_stride + j : kNoneKept.bytes;
        }
        accumulate_rows(op, lanes + j / L, xs, ms, w - j, 0, false);
      }
    }
    held = columns;
  }

  // The first n of R rows of whole vectors.
  static void accumulate_some(const Op& op, Lanes* lanes, const In* (&x)[R], const uint8_t* (&m)[R], int n, bool all,
                              int64_t vectors) {
    if (n == 0) return;
    const In* const first[1] = {x[0]};
    if (n == R && all) return accumulate_vectors<R, false>(op, lanes, x, nullptr, vectors, 0);
    if (n == 1 && all) return accumulate_vectors<1, false>(op, lanes, first, nullptr, vectors, 0);
    if (n == 1) return accumulate_vectors<1, true>(op, lanes, first, m, vectors, 0);
    for (int k = n; k < R; ++k) x[k] = x[0], m[k] = kNoneKept.bytes;
    accumulate_vectors<R, true>(op, lanes, x, m, vectors, 0);
  }

  // Not in the loops that are compiled once: narrow columns have few elements a step, and a call a step costs more.
  static void accumulate_columns(const void* op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    static_assert(kTransposedRows % R == 0, "transposed rows are used in whole steps");
    if (run.mask.has_intervals() && run.column.stride[kMask] != 0 && run.column.stride[kPosition] == 0 &&
        run.row.stride[kMask] == 0 && run.row.stride[kPosition] > 0 && count <= std::numeric_limits<int32_t>::max())
      return accumulate_bounded(self(op), held, run, count, at);
    if (!run.mask.has_intervals() && run.column.stride[kMask] == 0 && run.row.stride[kMask] != 0)
      if (!Op::kPositions || !run.few_dropped) return accumulate_whole_rows(self(op), held, run, count, at);
    // Where many blocks are kept, the CPU reads ahead by itself.
    constexpr int64_t kRows = 256;
    const bool in_blocks = !run.mask.has_intervals() && run.column.stride[kMask] == 1 && held.w >= 2 * kMaskBlock;
    if (Op::kPositions || !in_blocks) return accumulate_masked(op, held, run, count, at);
    if constexpr (!Op::kPositions)
      for (int64_t r = 0; r < count; r += kRows) {
        ColumnRun part = run;
        part.x += r * run.row.stride[kX];
        part.m += r * run.row.stride[kMask];
        const int64_t n = std::min(kRows, count - r);
        if (few_blocks(part, n, held.w))
          accumulate_blocks_kept(self(op), held, part, n);
        else
          accumulate_masked(op, held, part, n, at + r);
      }
  }

  // Rows by whatever mask they have, R at a time.
  static void accumulate_masked(const void* op, Columns& held, const ColumnRun& run, int64_t count, int64_t at) {
    // In registers: what is written through a pointer to char could be any of it.
    Columns columns = held;
    const Mask& mask = run.mask;
    const int64_t x_stride = run.row.stride[kX], m_stride = run.row.stride[kMask], p_stride = run.row.stride[kPosition];
    const int64_t m_step = run.column.stride[kMask], p_step = run.column.stride[kPosition];
    const int64_t w = columns.w, bytes = w * int64_t{sizeof(In)};
    int64_t begin = 0;
    if (p_stride != 0 && m_step == 0) {
      // An interval of whole rows.
      const KeptRun rows = kept_of_run(mask, run.m, run.position, 0, p_stride, count);
      begin = rows.begin;
      count = rows.end;
    }
    uint8_t staged[kTransposedRows][kColumns];
    for (int64_t r = begin; r < count; r += R) {
      const uint8_t* m = run.m + r * m_stride;
      const int64_t rows = std::min<int64_t>(R, count - r), position = run.position + r * p_stride;
      // Which of the staged rows this step uses: those that were transposed with the step before, or the first ones.
      const int64_t ahead = r % kTransposedRows, first = r - ahead;
      const bool across =
          m_step != 0 && m_step != 1 && m_stride == 1 && first + kTransposedRows <= count && !mask.has_intervals();
      if (across && ahead == 0) transpose_rows(m, m_step, w, staged[0], kColumns);
      const In* xs[R];
      const uint8_t* ms[R];
      KeptRun kept[R];
      const In* some = nullptr;
      bool bits = false;
      int whole = 0;
      for (int k = 0; k < R; ++k) {
        ms[k] = kNoneKept.bytes;
        if (k >= rows) continue;
        const uint8_t* row = m + k * m_stride;
        kept[k] = kept_of_run(mask, row, position + k * p_stride, m_step, p_step, w);
        if (across) {
          ms[k] = staged[ahead + k];
        } else if (kept[k].kept == Kept::all) {
          ms[k] = kAllKept.bytes;
          whole += kept[k].end - kept[k].begin == w;
        } else if (kept[k].kept == Kept::bits) {
          ms[k] = bits_of(mask, row, position + k * p_stride, m_step, w, staged[k]);
        }
        xs[k] = reinterpret_cast<const In*>(run.x + (r + k) * x_stride);
        if (ms[k] != kNoneKept.bytes) some = xs[k];
        bits = bits || (ms[k] != kNoneKept.bytes && ms[k] != kAllKept.bytes);
      }
      if (some == nullptr) continue;
      if (columns.pending + R > Op::kPeriod || at + r + R - columns.base > Op::kPeriod) collect_columns(op, columns);
      if (columns.pending == 0) columns.base = at + r;
      columns.pending += R;
      const auto row = static_cast<BitsOf<A>>(at + r - columns.base);
      auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
      if (whole < rows && p_step != 0) {
        accumulate_ranges(self(op), lanes, xs, kept, static_cast<int>(rows), w, row);
        continue;
      }
      // A row of which nothing is kept is not read: another stands in for it.
      for (int k = 0; k < R; ++k)
        if (ms[k] == kNoneKept.bytes) xs[k] = some;
      if (bits) {
        accumulate_blocks(self(op), lanes, xs, ms, w, row);
        continue;
      }
      if (x_stride == bytes && bytes <= 2048)
        for (int k = 0; k < R; ++k) touch(xs[k], bytes);
      accumulate_rows(self(op), lanes, xs, ms, w, row, whole == R);
    }
    held = columns;
  }

  // The mask bytes of a row, next to each other.
  static const uint8_t* bits_of(const Mask& mask, const uint8_t* m, int64_t position, int64_t step, int64_t w,
                                uint8_t* staged) {
    if (mask.has_intervals())
      stage_bits(mask, m, position, step, w, staged);
    else if (step != 1)
      for (int64_t j = 0; j < w; ++j) staged[j] = m[j * step];
    else
      return m;
    return staged;
  }

  // Up to R rows of which an interval of columns is kept: together what they all keep, and each the rest of its own.
  static void accumulate_ranges(const Op& op, Lanes* lanes, const In* const (&x)[R], const KeptRun (&kept)[R], int rows,
                                int64_t w, BitsOf<A> first) {
    int64_t begin = 0, end = rows == R ? w / L * L : 0;
    for (int k = 0; k < rows; ++k) {
      const bool some = kept[k].kept != Kept::none;
      begin = std::max(begin, some ? ceil_div(kept[k].begin, L) * L : w);
      end = std::min(end, some ? kept[k].end / L * L : 0);
    }
    if (begin < end) {
      const In* xs[R];
      for (int k = 0; k < R; ++k) xs[k] = x[k] + begin;
      accumulate_vectors<R, false>(op, lanes + begin / L, xs, nullptr, (end - begin) / L, first);
    }
    for (int k = 0; k < rows; ++k) {
      if (kept[k].kept == Kept::none) continue;
      const auto row = static_cast<BitsOf<A>>(first + k);
      if (begin < end) {
        accumulate_range(op, lanes, x[k], kept[k].begin, begin, row);
        accumulate_range(op, lanes, x[k], end, kept[k].end, row);
      } else {
        accumulate_range(op, lanes, x[k], kept[k].begin, kept[k].end, row);
      }
    }
  }

  // Columns [begin, end) of a row.
  static void accumulate_range(const Op& op, Lanes* lanes, const In* x, int64_t begin, int64_t end, BitsOf<A> first) {
    const auto accumulate_part = [&](int64_t from, int64_t to) {
      In values[L] = {};
      uint8_t bytes[L] = {};
      for (int64_t j = from; j < to; ++j) values[j % L] = x[j], bytes[j % L] = 1;
      const In* const xs[1] = {values};
      const uint8_t* const ms[1] = {bytes};
      accumulate_vectors<1, true>(op, lanes + from / L, xs, ms, 1, first);
    };
    if (begin % L != 0 && begin < end) {
      const int64_t to = std::min(end, begin / L * L + L);
      accumulate_part(begin, to);
      begin = to;
    }
    if (const int64_t vectors = (end - begin) / L; vectors > 0) {
      const In* const xs[1] = {x + begin};
      accumulate_vectors<1, false>(op, lanes + begin / L, xs, nullptr, vectors, first);
      begin += vectors * L;
    }
    if (begin < end) accumulate_part(begin, end);
  }

  // R rows of w columns by their bits, which are looked at block by block before x is read.
  static void accumulate_blocks(const Op& op, Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w,
                                BitsOf<A> first) {
    constexpr int64_t kColumnBlock = std::max<int64_t>(kMaskBlock, L);
    int64_t j = 0;
    for (; j + kColumnBlock <= w; j += kColumnBlock) {
      const In* xs[R];
      const uint8_t* ms[R];
      const In* some = nullptr;
      bool all = true;
      for (int r = 0; r < R; ++r) {
        uint64_t set = set_bytes<kMaskBlock>(m[r] + j);
        all = all && set == ~uint64_t{0};
        xs[r] = set == 0 ? nullptr : x[r] + j;
        ms[r] = m[r] + j;
        if (set != 0) some = xs[r];
      }
      if (some == nullptr) continue;
      for (int r = 0; r < R; ++r)
        if (xs[r] == nullptr) xs[r] = some;
      if (all)
        accumulate_vectors<R, false>(op, lanes + j / L, xs, nullptr, kColumnBlock / L, first);
      else
        accumulate_vectors<R, true>(op, lanes + j / L, xs, ms, kColumnBlock / L, first);
    }
    if (j == w) return;
    const In* xs[R];
    const uint8_t* ms[R];
    for (int r = 0; r < R; ++r) {
      xs[r] = x[r] + j;
      ms[r] = m[r] + j;
    }
    accumulate_rows(op, lanes + j / L, xs, ms, w - j, first, false);
  }

  // R rows of w columns, from row `first` of the lanes on.
  static void accumulate_rows(const Op& op, Lanes* lanes, const In* const (&x)[R], const uint8_t* const (&m)[R], int64_t w,
                              BitsOf<A> first, bool all_kept) {
    const int64_t whole = w / L;
    if (all_kept)
      accumulate_vectors<R, false>(op, lanes, x, nullptr, whole, first);
    else
      accumulate_vectors<R, true>(op, lanes, x, m, whole, first);
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
    accumulate_vectors<R, true>(op, lanes + whole, xs, ms, 1, first);
  }

  // N rows of whole vectors, without kBits all of them. Not inlined: it is called from several places, and compiles slowly.
  template <int N, bool kBits>
  __attribute__((noinline)) static void accumulate_vectors(const Op& op, Lanes* lanes, const In* const (&x)[N],
                                                           const uint8_t* const* m, int64_t vectors, BitsOf<A> first) {
    // A copy of the pointers would be made by vectors, which wait for the pointers that were just stored one by one.
    for (int64_t i = 0; i < vectors; ++i) {
      Vec<A> values[N];
      LaneMask<A> kept[N];
      for (int r = 0; r < N; ++r) {
        values[r] = load<A>(x[r] + i * L);
        kept[r] = kBits ? load_mask<A>(m[r] + i * L) : ~LaneMask<A>{};
      }
      op.template accumulate<N>(lanes[i], values, kept, first);
    }
  }

  static void collect_columns(const void* op, Columns& columns) {
    if (columns.pending == 0) return;
    auto* lanes = reinterpret_cast<Lanes*>(columns.lanes);
    auto* states = reinterpret_cast<State*>(columns.states);
    for (int64_t j = 0; j < columns.w; ++j)
      self(op).combine(states[j], self(op).lane(lanes[j / L], j % L, columns.base));
    std::fill_n(lanes, ceil_div(columns.w, L), self(op).init());
    columns.pending = 0;
  }
};

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
