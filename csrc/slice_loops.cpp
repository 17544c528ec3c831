// The loops of functions that map slices to slices, compiled once: rows where a slice is contiguous, columns side by side
// where the slices are, and small gathers for any other stride.
#include "segments.h"
#include "zero_pages.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace maskwise {
namespace {

// What is worth a task of its own, in elements. Fixed, so that the bits of a result never depend on the threads.
constexpr int64_t kTask = 262144;
// Elements that are gathered at a time.
constexpr int64_t kStage = 512;
// Results beyond this size, in bytes, go past the caches: they would push out what is still to be read.
constexpr int64_t kStreamFrom = int64_t{1} << 22;
// Bytes of x that three passes read while they stay in the second-level cache, and columns side by side at least: whole
// cache lines.
constexpr int64_t kThreePassBytes = int64_t{1} << 17;
constexpr int64_t kFewColumns = 32;

// The mask bytes of n elements that are `step` apart, next to each other.
void stage_row(const Mask& mask, const uint8_t* m, int64_t position, int64_t step, int64_t n, uint8_t* bytes) {
  if (mask.has_intervals())
    stage_bits(mask, m, position, step, n, bytes);
  else
    gather<uint8_t>(reinterpret_cast<char*>(bytes), reinterpret_cast<const char*>(m), step, n);
}

// Streamed stores are visible to other threads only after this.
void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

SliceRun at(const SliceRun& run, const SliceOffset& to) {
  return {run.x + to[kValues], run.grad + to[kGrad], run.bits + to[kBits], run.out + to[kOut],
          run.position + to[kLinePosition]};
}

SliceRun at(const SliceRun& run, const SliceLoop& loop, int64_t steps) {
  SliceOffset to;
  to.step(loop, steps);
  return at(run, to);
}

struct Walk {
  const SliceKernel& kernel;
  const SliceNest& nest;
  const Mask& mask;
  const SliceRun& all;
  bool stream;
  const FreshPages* pages = nullptr;  // of the result, where that is a tensor of its own

  bool zeros() const { return pages != nullptr && pages->are_zeros(); }

  // parallel_uneven over n items, for each of which `each` bytes of the result are written; see FreshPages.
  template <class Body>
  void parallel_results(int64_t n, int64_t elements_each, int64_t each, const Body& body) const {
    if (pages == nullptr) return parallel_uneven(n, elements_each, body);
    pages->parallel(n, elements_each, each, body);
  }
  // The bytes of a slice that is contiguous, else 0.
  int64_t slice_bytes() const {
    return nest.inner.size() == 1 && nest.inner[0].stride[kOut] == kernel.bytes ? nest.length * kernel.bytes : 0;
  }

  // n results of which nothing is kept.
  void drop(char* out, int64_t n) const {
    if (n > 0 && !zeros()) kernel.fill(out, n, stream);
  }

  bool touches(const SliceLoop& loop) const {
    const int bytes = kernel.bytes;
    return loop.stride[kValues] == bytes && loop.stride[kGrad] == bytes && loop.stride[kOut] == bytes;
  }
  bool touches(const SliceLoops& loops) const { return !loops.empty() && touches(loops.back()); }

  // Whether kernels can take the mask along a loop as it lies in memory.
  bool mask_touches(const SliceLoop& loop) const {
    return loop.stride[kBits] == 0 || (loop.stride[kBits] == 1 && !mask.has_intervals());
  }

  // Calls run(run, n, kept) for the contiguous runs of elements [begin, end) of one slice, in place or gathered. Without
  // kWrites, runs of which nothing is kept are left out, and no results are scattered.
  template <bool kWrites, class Run>
  void for_each_run_of(const SliceRun& slice, int64_t begin, int64_t end, const Run& run) const {
    const SliceLoop loop = innermost(nest.inner, mask, kBits);
    const bool direct = nest.inner.empty() || (touches(loop) && mask_touches(loop));
    const auto part = [&](const SliceRun& from, int64_t count, Kept kept) {
      if (count == 0 || (kept == Kept::none && !kWrites)) return;
      if (!direct) return gathered_runs<kWrites>(from, loop, count, kept, run);
      SliceRun here = from;
      if (kept == Kept::all) here.bits = nullptr;
      run(here, count, kept);
    };
    for_each_run(nest.inner, begin, end, [&](const SliceOffset& to, int64_t count) {
      const SliceRun here = at(slice, to);
      const KeptRun kept =
          kept_of_run(mask, here.bits, here.position, loop.stride[kBits], loop.stride[kLinePosition], count);
      if (kept.kept == Kept::none) return part(here, count, Kept::none);
      part(here, kept.begin, Kept::none);
      part(at(here, loop, kept.begin), kept.end - kept.begin, kept.kept);
      part(at(here, loop, kept.end), count - kept.end, Kept::none);
    });
  }

  // The same for a run along `loop`, of which all, nothing, or what the mask's bits say is kept. Operands that are
  // contiguous along it stay where they are.
  template <bool kWrites, class Run>
  void gathered_runs(const SliceRun& here, const SliceLoop& loop, int64_t count, Kept kept, const Run& run) const {
    alignas(64) char x[kStage * 8], grad[kStage * 8], out[kStage * 8];
    uint8_t bits[kStage];
    const int bytes = kernel.bytes;
    const auto gathered = [&](char* to, const char* from, SliceOperand operand, int64_t n) -> const char* {
      if (loop.stride[operand] == bytes) return from;
      gather(bytes, to, from, loop.stride[operand], n);
      return to;
    };
    const bool scatters = loop.stride[kOut] != bytes;
    const int64_t bit_step = loop.stride[kBits];
    for (int64_t i = 0; i < count; i += kStage) {
      const int64_t n = std::min(count - i, kStage);
      SliceRun from = at(here, loop, i);
      char* const result = from.out;
      if (kept != Kept::none) {
        from.x = gathered(x, from.x, kValues, n);
        if (kernel.reads_grad) from.grad = gathered(grad, from.grad, kGrad, n);
      }
      if (kept != Kept::bits) {
        from.bits = nullptr;
      } else if (!mask_touches(loop)) {
        stage_row(mask, from.bits, from.position, bit_step, n, bits);
        from.bits = bits;
      }
      if (scatters) from.out = out;
      run(from, n, kept);
      if (kWrites && scatters) scatter(bytes, result, loop.stride[kOut], out, n);
    }
  }

  void accumulate(const SliceRun& slice, void* state, int64_t begin, int64_t end) const {
    for_each_run_of<false>(slice, begin, end, [&](const SliceRun& run, int64_t n, Kept) {
      kernel.accumulate(kernel.op, state, run, n);
    });
  }

  void map(const SliceRun& slice, const void* state, int64_t begin, int64_t end) const {
    for_each_run_of<true>(slice, begin, end, [&](const SliceRun& run, int64_t n, Kept kept) {
      if (kept == Kept::none)
        kernel.fill(run.out, n, false);
      else
        kernel.map(kernel.op, state, run, n, stream);
    });
  }

  void rows() const {
    const int64_t splits = nest.slices >= 64 ? 1 : ceil_div(nest.length, kTask);
    if (splits == 1) {
      const SliceLoop loop = innermost(nest.outer, mask, kBits), inner = innermost(nest.inner, mask, kBits);
      const bool one_run = nest.inner.size() == 1 && touches(inner) && mask_touches(inner);
      parallel_results(nest.slices, nest.length, slice_bytes(), [&](int64_t begin, int64_t end) {
        for_each_run(nest.outer, begin, end, [&](const SliceOffset& to, int64_t count) {
          const SliceRun first = at(all, to);
          if (one_run) return kernel.rows(kernel.op, {first, mask, loop, inner, count, nest.length, zeros()}, stream);
          for (int64_t r = 0; r < count; ++r) {
            const SliceRun slice = at(first, loop, r);
            alignas(64) char state[kSliceState];
            kernel.init(kernel.op, state, 1);
            accumulate(slice, state, 0, nest.length);
            kernel.finalize(kernel.op, state, 1, true);
            map(slice, state, 0, nest.length);
          }
        });
        if (stream) stream_fence();
      });
      return;
    }
    // Few and long slices: each is split, and combined before anything is written.
    const Buffer parts(nest.slices * splits * kernel.state_bytes);
    const auto part = [&](int64_t p) { return parts.data + p * kernel.state_bytes; };
    const auto slice_of = [&](int64_t p) { return at(all, offset_of(nest.outer, p / splits)); };
    const auto from = [&](int64_t p) { return p % splits * kTask; };
    parallel_uneven(nest.slices * splits, kTask, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        kernel.init(kernel.op, part(p), 1);
        accumulate(slice_of(p), part(p), from(p), std::min(from(p) + kTask, nest.length));
      }
    });
    for (int64_t r = 0; r < nest.slices; ++r) {
      for (int64_t p = 1; p < splits; ++p) kernel.combine(kernel.op, part(r * splits), part(r * splits + p));
      kernel.finalize(kernel.op, part(r * splits), 1, true);
    }
    parallel_uneven(nest.slices * splits, kTask, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        map(slice_of(p), part(p / splits * splits), from(p), std::min(from(p) + kTask, nest.length));
      if (stream) stream_fence();
    });
  }

  // How many columns a block has. Where there would be few blocks, they are narrower, for threads to share: columns do
  // not depend on each other, so that the bits of a result do not depend on it. Whole cache lines in any case.
  int64_t block_width() const {
    constexpr int64_t kBlocks = 8, kLeast = 64;
    const int64_t columns = nest.outer.back().size;
    const int64_t blocks = std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, nest.slices / columns));
    const int64_t shared = std::max(kLeast, ceil_div(ceil_div(columns, blocks), 16) * 16);
    return std::min(columns, std::min(kBlock, nest.slices * nest.length < 2 * kGrain ? kBlock : shared));
  }

  void columns() const;
  int64_t three_pass_width() const;
  bool three_pass_rows_fit() const;
  void three_pass_rows() const;
  void three_pass_columns(int64_t width) const;
};

// Blocks of columns. Each is at least a vector wide: fewer columns than that stay with the block before them.
struct Blocks {
  int64_t size, width, count;
  Blocks(int64_t columns, int64_t width, int lanes)
      : size(columns), width(width), count(std::max<int64_t>(1, ceil_div(columns - (lanes - 1), width))) {}
  int64_t first(int64_t block) const { return block * width; }
  int64_t columns(int64_t block) const { return block == count - 1 ? size - first(block) : width; }
};

void Walk::columns() const {
  const SliceLoop column = nest.outer.back(), row = innermost(nest.inner, mask, kBits);
  const SliceLoops outer(nest.outer.begin(), nest.outer.end() - 1);
  const Blocks blocks(column.size, block_width(), kernel.lanes);
  const int64_t groups = nest.slices / column.size * blocks.count;
  const int64_t rows_each = std::max<int64_t>(1, kTask / blocks.width);
  const int64_t splits = groups >= 64 ? 1 : std::max<int64_t>(1, ceil_div(nest.length, rows_each));
  const int64_t step = splits == 1 ? nest.length : rows_each;
  const int64_t vectors = ceil_div(std::min(column.size, kBlock + kernel.lanes - 1), kernel.lanes);
  const Buffer parts = splits == 1 ? Buffer() : Buffer(groups * splits * vectors * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * vectors * kernel.state_bytes; };

  const int64_t group_bytes = nest.length * column.size * kernel.bytes;
  const bool in_order = splits == 1 && blocks.count == 1 && !outer.empty() && outer.back().stride[kOut] == group_bytes;

  // Runs body(block, its first element, task, first row, end of rows) for each task.
  const auto for_each_task = [&](const auto& body) {
    parallel_results(groups * splits, step * blocks.width, in_order ? group_bytes : 0, [&](int64_t begin, int64_t end) {
      ColumnBlock columns(mask, row, column, kernel.lanes, zeros());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task / splits, block = group % blocks.count;
        SliceOffset to = offset_of(outer, group / blocks.count);
        to.step(column, blocks.first(block));
        const int64_t from = task % splits * step;
        columns.w = blocks.columns(block);
        body(columns, at(all, to), task, from, std::min(from + step, nest.length));
      }
      if (stream) stream_fence();
    });
  };
  const auto accumulate = [&](ColumnBlock& block, const SliceRun& run, int64_t from, int64_t to) {
    kernel.init(kernel.op, block.states, block.vectors());
    for_each_run(nest.inner, from, to, [&](const SliceOffset& offset, int64_t count) {
      kernel.accumulate_columns(kernel.op, block, at(run, offset), count);
    });
  };
  const auto map = [&](ColumnBlock& block, const SliceRun& run, int64_t from, int64_t to) {
    for_each_run(nest.inner, from, to, [&](const SliceOffset& offset, int64_t count) {
      kernel.map_columns(kernel.op, block, at(run, offset), count, stream);
    });
  };

  if (splits == 1) {
    for_each_task([&](ColumnBlock& block, const SliceRun& run, int64_t, int64_t from, int64_t to) {
      accumulate(block, run, from, to);
      kernel.finalize(kernel.op, block.states, block.vectors(), false);
      map(block, run, from, to);
    });
    return;
  }
  for_each_task([&](ColumnBlock& block, const SliceRun& run, int64_t task, int64_t from, int64_t to) {
    accumulate(block, run, from, to);
    std::memcpy(part(task), block.states, block.vectors() * kernel.state_bytes);
  });
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t count = ceil_div(blocks.columns(group % blocks.count), kernel.lanes);
    for (int64_t p = 1; p < splits; ++p)
      for (int64_t v = 0; v < count; ++v)
        kernel.combine(kernel.op, part(group * splits) + v * kernel.state_bytes,
                       part(group * splits + p) + v * kernel.state_bytes);
    kernel.finalize(kernel.op, part(group * splits), count, false);
  }
  for_each_task([&](ColumnBlock& block, const SliceRun& run, int64_t task, int64_t from, int64_t to) {
    std::memcpy(block.states, part(task / splits * splits), block.vectors() * kernel.state_bytes);
    map(block, run, from, to);
  });
}

bool Walk::three_pass_rows_fit() const {
  if (nest.inner.size() != 1 || nest.length * kernel.bytes > kThreePassBytes) return false;
  return touches(nest.inner[0]) && mask_touches(nest.inner[0]);
}

void Walk::three_pass_rows() const {
  const SliceLoop loop = innermost(nest.outer, mask, kBits), inner = nest.inner[0];
  const auto kept_of = [&](const SliceRun& slice) {
    return kept_of_run(mask, slice.bits, slice.position, inner.stride[kBits], inner.stride[kLinePosition], nest.length);
  };
  // The CPU does not read ahead over what is dropped between two slices.
  const auto prefetch_kept = [&](const SliceRun& slice) {
    constexpr int64_t kAheadBytes = 2048;
    const KeptRun kept = kept_of(slice);
    if (kept.kept != Kept::all) return;
    const char* from = at(slice, inner, kept.begin).x;
    const int64_t bytes = std::min(kAheadBytes, (kept.end - kept.begin) * kernel.bytes);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  };
  parallel_results(nest.slices, nest.length, slice_bytes(), [&](int64_t begin, int64_t end) {
    // Exponentials are stored in the result, or in a buffer where the result is written past the caches.
    Buffer buffer;
    if (kernel.holds && stream) buffer = Buffer(nest.length * kernel.bytes);
    for_each_run(nest.outer, begin, end, [&](const SliceOffset& to, int64_t count) {
      const SliceRun first = at(all, to);
      for (int64_t r = 0; r < count; ++r) {
        const SliceRun slice = at(first, loop, r);
        const KeptRun kept = kept_of(slice);
        if (mask.has_intervals() && r + 1 < count) prefetch_kept(at(first, loop, r + 1));
        if (kept.kept == Kept::none) {
          drop(slice.out, nest.length);
          continue;
        }
        SliceRun run = at(slice, inner, kept.begin);
        if (kept.kept == Kept::all) run.bits = nullptr;
        drop(slice.out, kept.begin);
        kernel.three_pass_row(kernel.op, run, buffer.data != nullptr ? buffer.data : run.out, kept.end - kept.begin,
                              stream);
        drop(at(slice, inner, kept.end).out, nest.length - kept.end);
      }
    });
    if (stream) stream_fence();
  });
}

// How many columns three passes do side by side; 0 where they would not stay in the cache, and for masks without a byte for
// each element: blocks are narrow here, and each would look at the bounds anew.
int64_t Walk::three_pass_width() const {
  if (nest.inner.size() != 1 || nest.outer.back().stride[kBits] == 0 || mask.has_intervals()) return 0;
  const int64_t fit = kThreePassBytes / (nest.length * kernel.bytes);
  return std::min(block_width(), fit / kFewColumns * kFewColumns);
}

void Walk::three_pass_columns(int64_t width) const {
  const SliceLoop column = nest.outer.back(), row = nest.inner[0];
  const SliceLoops outer(nest.outer.begin(), nest.outer.end() - 1);
  const Blocks blocks(column.size, width, kernel.lanes);
  const int64_t widest = std::min(column.size, width + kernel.lanes - 1);
  parallel(nest.slices / column.size * blocks.count, nest.length * width, [&](int64_t begin, int64_t end) {
    const Buffer states(ceil_div(widest, kernel.lanes) * kernel.state_bytes);
    Buffer held;
    if (kernel.holds && stream) held = Buffer(nest.length * widest * kernel.bytes);
    std::unique_ptr<uint8_t[]> transposed;
    if (column.stride[kBits] != 1) transposed.reset(new uint8_t[nest.length * widest]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % blocks.count, w = blocks.columns(block);
      SliceOffset to = offset_of(outer, task / blocks.count);
      to.step(column, blocks.first(block));
      SliceRun run = at(all, to);
      int64_t bit_step = row.stride[kBits];
      if (transposed) {
        const auto* from = reinterpret_cast<const char*>(run.bits);
        auto* rows = reinterpret_cast<char*>(transposed.get());
        if (bit_step == 1)
          transpose_tile<uint8_t>(from, column.stride[kBits], nest.length, w, rows, w);
        else
          for (int64_t r = 0; r < nest.length; ++r)
            gather<uint8_t>(rows + r * w, from + r * bit_step, column.stride[kBits], w);
        run.bits = transposed.get();
        bit_step = w;
      }
      const bool own = held.data != nullptr;
      kernel.three_pass_columns(kernel.op, states.data, run, row, bit_step, own ? held.data : run.out,
                                own ? w * kernel.bytes : row.stride[kOut], w, stream);
    }
    if (stream) stream_fence();
  });
}

// Whether none of n bytes is set; stops early where one is.
bool none_set(const uint8_t* m, int64_t n) { return m[0] == 0 && std::memcmp(m, m + 1, n - 1) == 0; }

Interval join(Interval a, Interval b) { return {std::min(a.start, b.start), std::max(a.end, b.end)}; }
Interval meet(Interval a, Interval b) { return {std::max(a.start, b.start), std::min(a.end, b.end)}; }

// What of [begin, end) is kept, where `some` has all places of which anything is, and all of `all` is.
Kept kept_between(const Interval& some, const Interval& all, int64_t begin, int64_t end) {
  if (end <= some.start || some.end <= begin) return Kept::none;
  return all.start <= begin && end <= all.end ? Kept::all : Kept::bits;
}

}  // namespace

void ColumnBlock::start(const SliceRun& run, int64_t n) {
  first = run.bits;
  position = run.position;
  count = n;
  if (row.stride[kLinePosition] == 0) return;
  if (column.stride[kBits] == 0) {
    rows_kept = kept_of_run(mask, first, position, 0, row.stride[kLinePosition], count);
    return;
  }
  some_rows = {count, 0};
  for (int64_t j = 0; j < w; ++j) {
    const KeptRun kept =
        kept_of_run(mask, first + j * column.stride[kBits], position, 0, row.stride[kLinePosition], count);
    intervals[j] = kept.kept == Kept::none ? Interval{count, 0} : Interval{kept.begin, kept.end};
    some_rows = join(some_rows, intervals[j]);
  }
  for (int64_t v = 0; v < vectors(); ++v) {
    Ranges of{{count, 0}, {0, count}};
    for (int64_t j = first_column(v); j < first_column(v) + lanes; ++j) {
      of.some = join(of.some, intervals[j]);
      of.all = meet(of.all, intervals[j]);
    }
    ranges[v] = of;
  }
}

RowGroup ColumnBlock::group(int64_t r) {
  if (column.stride[kLinePosition] != 0) return ranges_of_rows(r);
  if (column.stride[kBits] == 0) return whole_rows(r);
  return row.stride[kLinePosition] != 0 ? ranges_of_columns(r) : bytes(r);
}

// Rows that are kept or dropped as a whole.
RowGroup ColumnBlock::whole_rows(int64_t r) const {
  if (row.stride[kLinePosition] != 0) {
    if (r < rows_kept.begin) return {rows_kept.begin - r, GroupKept::none};
    if (r >= rows_kept.end) return {count - r, GroupKept::none};
    return {std::min<int64_t>(kGroup, rows_kept.end - r), GroupKept::all};
  }
  const auto kept_of = [&](int64_t at) {
    return kept_of_run(mask, first + at * row.stride[kBits], position, 0, 0, w).kept;
  };
  const Kept kept = kept_of(r);
  int64_t n = 1;
  while (n < kGroup && r + n < count && kept_of(r + n) == kept) ++n;
  return {n, kept == Kept::all ? GroupKept::all : GroupKept::none};
}

// Rows that each keep an interval of columns.
RowGroup ColumnBlock::ranges_of_rows(int64_t r) {
  const int64_t n = std::min<int64_t>(kGroup, count - r);
  Interval rows[kGroup], some{w, 0}, all{0, w};
  for (int64_t k = 0; k < n; ++k) {
    const KeptRun kept =
        kept_of_run(mask, first + (r + k) * row.stride[kBits], position, 0, column.stride[kLinePosition], w);
    rows[k] = kept.kept == Kept::none ? Interval{w, 0} : Interval{kept.begin, kept.end};
    some = join(some, rows[k]);
    all = meet(all, rows[k]);
  }
  for (int64_t v = 0; v < vectors(); ++v) {
    const int64_t j = first_column(v);
    kept[v] = kept_between(some, all, j, j + lanes);
    if (kept[v] == Kept::bits)
      stage(v, n, [&](int64_t k, int64_t at) { return rows[k].start <= at && at < rows[k].end; });
  }
  return staged_group(n);
}

// Columns that each keep an interval of rows.
RowGroup ColumnBlock::ranges_of_columns(int64_t r) {
  if (r < some_rows.start) return {some_rows.start - r, GroupKept::none};
  if (r >= some_rows.end) return {count - r, GroupKept::none};
  const int64_t n = std::min<int64_t>(kGroup, some_rows.end - r);
  for (int64_t v = 0; v < vectors(); ++v) {
    kept[v] = kept_between(ranges[v].some, ranges[v].all, r, r + n);
    if (kept[v] == Kept::bits)
      stage(v, n, [&](int64_t k, int64_t j) { return intervals[j].start <= r + k && r + k < intervals[j].end; });
  }
  return staged_group(n);
}

// Rows of bytes, or of bounds of which each column has its own.
RowGroup ColumnBlock::bytes(int64_t r) {
  const int64_t n = std::min<int64_t>(kGroup, count - r), step = row.stride[kBits], across = column.stride[kBits];
  const uint8_t* m = first + r * step;
  RowGroup group{n, GroupKept::bits, m, step};
  if (mask.has_intervals() || across != 1) {
    if (step == 1 && n == kTransposedRows && !mask.has_intervals())
      transpose_rows(m, across, w, staged, w);
    else
      for (int64_t k = 0; k < n; ++k) stage_row(mask, m + k * step, position, across, w, staged + k * w);
    group.bits = staged;
    group.bit_step = w;
  }
  int64_t k = 0;
  while (k < n && none_set(group.bits + k * group.bit_step, w)) ++k;
  if (k == n) group.kept = GroupKept::none;
  return group;
}

// The bytes of one vector of a group of rows: keeps(row, column).
template <class Keeps>
void ColumnBlock::stage(int64_t v, int64_t rows, const Keeps& keeps) {
  for (int64_t k = 0; k < rows; ++k)
    for (int64_t j = first_column(v); j < first_column(v) + lanes; ++j) staged[k * w + j] = keeps(k, j);
}

RowGroup ColumnBlock::staged_group(int64_t rows) {
  return {rows, GroupKept::by_vector, staged, w};
}

SliceCall::SliceCall(const Tensor& x, const Tensor& grad, const Tensor& kept, const Dims& dims, int64_t along)
    : out(empty_as(x)), mask(kept, along, x), dtype(x.scalar_type()) {
  const auto bytes = static_cast<int64_t>(x.element_size());
  nest = make_nest<kSliceOperands>(x, {{&x, bytes}, {&grad, bytes}, mask.operand, {&out, bytes}, mask.position}, dims,
                                   kOut, &mask, kBits);
  run = {static_cast<const char*>(x.const_data_ptr()), static_cast<const char*>(grad.const_data_ptr()), mask.data,
         static_cast<char*>(out.mutable_data_ptr()), 0};
}

static void run(const Walk& walk) {
  const SliceKernel& kernel = walk.kernel;
  const SliceNest& nest = walk.nest;
  if (nest.slices == 0 || nest.length == 0) return;
  if (!walk.touches(nest.inner) && walk.touches(nest.outer) && nest.outer.back().size >= kernel.lanes) {
    if (kernel.three_pass_columns != nullptr)
      if (const int64_t width = walk.three_pass_width(); width >= kernel.lanes) return walk.three_pass_columns(width);
    return walk.columns();
  }
  if (kernel.three_pass_row != nullptr && walk.three_pass_rows_fit()) return walk.three_pass_rows();
  walk.rows();
}

void run_slices(const SliceKernel& kernel, const SliceCall& call) {
  const SliceNest& nest = call.nest;
  if (nest.segments != nullptr) return map_segments(kernel, *nest.segments, call.run);
  const FreshPages pages(call.out, kernel.drops_to_zero);
  const bool stream = nest.slices * nest.length * kernel.bytes >= kStreamFrom && !pages.are_new();
  run({kernel, nest, call.mask, call.run, stream, &pages});
}

void map_segments(const SliceKernel& kernel, const Segments& segments, const SliceRun& all) {
  const int64_t row = segments.columns * kernel.bytes;
  const bool stream = segments.rows * row >= kStreamFrom;
  const Mask kept(kAllKept.bytes);
  const auto map = [&](int64_t first, int64_t last) {
    // Everything is kept; the columns side by side have mask bytes of their own, as many as there are.
    const int64_t width = std::min(segments.columns, kConstantMask);
    SliceNest nest{{{1, {kernel.bytes, kernel.bytes, 1, kernel.bytes}}}, {{1, {row, row, 0, row}}}};
    if (segments.columns == 1) nest.outer.clear();
    for (int64_t s = first; s < last; ++s) {
      nest.inner[0].size = nest.length = segments.length(s);
      for (int64_t c = 0; c < segments.columns; c += width) {
        nest.slices = std::min(width, segments.columns - c);
        if (!nest.outer.empty()) nest.outer[0].size = nest.slices;
        const int64_t at = segments.bounds[s] * row + c * kernel.bytes;
        run({kernel, nest, kept, {all.x + at, all.grad + at, kept.data, all.out + at, 0}, stream});
      }
    }
  };
  if (segments.are_long())
    map(0, segments.count);
  else
    segments.for_each_range(map);
}

}  // namespace maskwise
