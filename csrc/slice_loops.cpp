// The loops of functions that map slices to slices, compiled once: rows where a slice is contiguous, columns side by side
// where the slices are, and small gathers for any other stride.
#include "segments.h"

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

// Streamed stores are visible to other threads only after this.
void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

SliceRun at(const SliceRun& run, const Offset<4>& to) {
  return {run.x + to[kValues], run.grad + to[kGrad], run.bits + to[kBits], run.out + to[kOut]};
}

SliceRun at(const SliceRun& run, const SliceLoop& loop, int64_t steps) {
  Offset<4> to;
  to.step(loop, steps);
  return at(run, to);
}

struct Walk {
  const SliceKernel& kernel;
  const SliceNest& nest;
  const SliceRun& all;
  bool stream;

  bool touches(const SliceLoop& loop) const {
    const int bytes = kernel.bytes;
    return loop.stride[kValues] == bytes && loop.stride[kGrad] == bytes && loop.stride[kOut] == bytes;
  }
  bool touches(const Loops<4>& loops) const { return !loops.empty() && touches(loops.back()); }

  // Calls run(run, n, kept) for the contiguous runs of elements [begin, end) of one slice, in place or gathered. Without
  // kWrites, runs of which nothing is kept are left out, and no results are scattered.
  template <bool kWrites, class Run>
  void for_each_run_of(const SliceRun& slice, int64_t begin, int64_t end, const Run& run) const {
    const SliceLoop loop = innermost(nest.inner);
    const int64_t bit_step = loop.stride[kBits];
    const bool direct = nest.inner.empty() || (touches(loop) && (bit_step == 0 || bit_step == 1));
    for_each_masked_run(nest.inner, kBits, slice.bits, begin, end, [&](const Offset<4>& to, int64_t count, Kept kept) {
      if (kept == Kept::none && !kWrites) return;
      SliceRun here = at(slice, to);
      if (direct) {
        if (kept == Kept::all) here.bits = nullptr;
        run(here, count, kept);
        return;
      }
      // Operands that are contiguous along the run stay where they are.
      alignas(64) char x[kStage * 8], grad[kStage * 8], out[kStage * 8];
      uint8_t bits[kStage];
      const int bytes = kernel.bytes;
      const auto gathered = [&](char* to, const char* from, SliceOperand operand, int64_t n) -> const char* {
        if (loop.stride[operand] == bytes) return from;
        gather(bytes, to, from, loop.stride[operand], n);
        return to;
      };
      const bool scatters = loop.stride[kOut] != bytes;
      for (int64_t i = 0; i < count; i += kStage) {
        const int64_t n = std::min(count - i, kStage);
        SliceRun from = at(here, loop, i);
        char* const result = from.out;
        if (kept != Kept::none) {
          from.x = gathered(x, from.x, kValues, n);
          if (kernel.reads_grad) from.grad = gathered(grad, from.grad, kGrad, n);
        }
        if (kept == Kept::bits && bit_step != 1) {
          gather<uint8_t>(reinterpret_cast<char*>(bits), reinterpret_cast<const char*>(from.bits), bit_step, n);
          from.bits = bits;
        }
        if (kept != Kept::bits) from.bits = nullptr;
        if (scatters) from.out = out;
        run(from, n, kept);
        if (kWrites && scatters) scatter(bytes, result, loop.stride[kOut], out, n);
      }
    });
  }

  void accumulate(const SliceRun& slice, void* state, int64_t begin, int64_t end) const {
    for_each_run_of<false>(slice, begin, end, [&](const SliceRun& run, int64_t n, Kept) {
      kernel.accumulate(kernel.op, state, run, n);
    });
  }

  void map(const SliceRun& slice, const void* state, int64_t begin, int64_t end) const {
    for_each_run_of<true>(slice, begin, end, [&](const SliceRun& run, int64_t n, Kept kept) {
      if (kept == Kept::none)
        kernel.fill(run.out, n);
      else
        kernel.map(kernel.op, state, run, n, stream);
    });
  }

  void rows() const {
    const int64_t splits = nest.slices >= 64 ? 1 : ceil_div(nest.length, kTask);
    if (splits == 1) {
      const SliceLoop loop = innermost(nest.outer), inner = innermost(nest.inner);
      const bool one_run = nest.inner.size() == 1 && touches(inner) && inner.stride[kBits] <= 1 && inner.stride[kBits] >= 0;
      parallel(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
        for_each_run(nest.outer, begin, end, [&](const Offset<4>& to, int64_t count) {
          const SliceRun first = at(all, to);
          if (one_run)
            return kernel.rows(kernel.op, first, loop, count, nest.length, inner.stride[kBits] == 0, stream);
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
    parallel(nest.slices * splits, kTask, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        kernel.init(kernel.op, part(p), 1);
        accumulate(slice_of(p), part(p), from(p), std::min(from(p) + kTask, nest.length));
      }
    });
    for (int64_t r = 0; r < nest.slices; ++r) {
      for (int64_t p = 1; p < splits; ++p) kernel.combine(kernel.op, part(r * splits), part(r * splits + p));
      kernel.finalize(kernel.op, part(r * splits), 1, true);
    }
    parallel(nest.slices * splits, kTask, [&](int64_t begin, int64_t end) {
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
  const SliceLoop column = nest.outer.back(), row = innermost(nest.inner);
  const Loops<4> outer(nest.outer.begin(), nest.outer.end() - 1);
  const Blocks blocks(column.size, block_width(), kernel.lanes);
  const int64_t groups = nest.slices / column.size * blocks.count;
  const int64_t rows_each = std::max<int64_t>(1, kTask / blocks.width);
  const int64_t splits = groups >= 64 ? 1 : std::max<int64_t>(1, ceil_div(nest.length, rows_each));
  const int64_t step = splits == 1 ? nest.length : rows_each;
  const int64_t vectors = ceil_div(std::min(column.size, kBlock + kernel.lanes - 1), kernel.lanes);
  const Buffer parts = splits == 1 ? Buffer() : Buffer(groups * splits * vectors * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * vectors * kernel.state_bytes; };

  // Runs body(block, its first element, task, first row, end of rows) for each task.
  const auto for_each_task = [&](const auto& body) {
    parallel(groups * splits, step * blocks.width, [&](int64_t begin, int64_t end) {
      ColumnBlock columns(row, column.stride[kBits]);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t group = task / splits, block = group % blocks.count;
        Offset<4> to = offset_of(outer, group / blocks.count);
        to.step(column, blocks.first(block));
        const int64_t from = task % splits * step;
        columns.w = blocks.columns(block);
        body(columns, at(all, to), task, from, std::min(from + step, nest.length));
      }
      if (stream) stream_fence();
    });
  };
  const auto vectors_of = [&](const ColumnBlock& block) { return ceil_div(block.w, kernel.lanes); };
  const auto accumulate = [&](ColumnBlock& block, const SliceRun& run, int64_t from, int64_t to) {
    kernel.init(kernel.op, block.states, vectors_of(block));
    for_each_run(nest.inner, from, to, [&](const Offset<4>& offset, int64_t count) {
      kernel.accumulate_columns(kernel.op, block, at(run, offset), count);
    });
  };
  const auto map = [&](ColumnBlock& block, const SliceRun& run, int64_t from, int64_t to) {
    for_each_run(nest.inner, from, to, [&](const Offset<4>& offset, int64_t count) {
      kernel.map_columns(kernel.op, block, at(run, offset), count, stream);
    });
  };

  if (splits == 1) {
    for_each_task([&](ColumnBlock& block, const SliceRun& run, int64_t, int64_t from, int64_t to) {
      accumulate(block, run, from, to);
      kernel.finalize(kernel.op, block.states, vectors_of(block), false);
      map(block, run, from, to);
    });
    return;
  }
  for_each_task([&](ColumnBlock& block, const SliceRun& run, int64_t task, int64_t from, int64_t to) {
    accumulate(block, run, from, to);
    std::memcpy(part(task), block.states, vectors_of(block) * kernel.state_bytes);
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
    std::memcpy(block.states, part(task / splits * splits), vectors_of(block) * kernel.state_bytes);
    map(block, run, from, to);
  });
}

bool Walk::three_pass_rows_fit() const {
  if (nest.inner.size() != 1 || nest.length * kernel.bytes > kThreePassBytes) return false;
  const int64_t bit_step = nest.inner[0].stride[kBits];
  return touches(nest.inner[0]) && (bit_step == 0 || bit_step == 1);
}

void Walk::three_pass_rows() const {
  const int64_t bit_step = nest.inner[0].stride[kBits];
  parallel(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
    // Exponentials are stored in the result, or in a buffer where the result is written past the caches.
    Buffer buffer;
    if (kernel.holds && stream) buffer = Buffer(nest.length * kernel.bytes);
    const SliceLoop loop = innermost(nest.outer);
    for_each_run(nest.outer, begin, end, [&](const Offset<4>& to, int64_t count) {
      for (int64_t r = 0; r < count; ++r) {
        SliceRun run = at(at(all, to), loop, r);
        const Kept kept = kept_of_run(run.bits, bit_step);
        if (kept == Kept::none) {
          kernel.fill(run.out, nest.length);
          continue;
        }
        if (kept == Kept::all) run.bits = nullptr;
        kernel.three_pass_row(kernel.op, run, buffer.data != nullptr ? buffer.data : run.out, nest.length, stream);
      }
    });
    if (stream) stream_fence();
  });
}

// How many columns three passes do side by side; 0 where they would not stay in the cache.
int64_t Walk::three_pass_width() const {
  if (nest.inner.size() != 1 || nest.outer.back().stride[kBits] == 0) return 0;
  const int64_t fit = kThreePassBytes / (nest.length * kernel.bytes);
  return std::min(block_width(), fit / kFewColumns * kFewColumns);
}

void Walk::three_pass_columns(int64_t width) const {
  const SliceLoop column = nest.outer.back(), row = nest.inner[0];
  const Loops<4> outer(nest.outer.begin(), nest.outer.end() - 1);
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
      Offset<4> to = offset_of(outer, task / blocks.count);
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

}  // namespace

const uint8_t* ColumnBlock::bits_of(const uint8_t* m, int64_t count, int64_t& step) {
  step = row.stride[kBits];
  if (column_step == 1) return m;
  if (step == 1 && count == kTransposedRows)
    transpose_rows(m, column_step, w, staged, w);
  else
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < w; ++j) staged[r * w + j] = m[r * step + j * column_step];
  step = w;
  return staged;
}

SliceCall::SliceCall(const Tensor& x, const Tensor& grad, const Tensor& mask, const Dims& dims)
    : out(empty_as(x)), dtype(x.scalar_type()) {
  const auto bytes = static_cast<int64_t>(x.element_size());
  nest = make_nest<4>(x, {{&x, bytes}, {&grad, bytes}, {&mask}, {&out, bytes}}, dims, kOut);
  run = {static_cast<const char*>(x.const_data_ptr()), static_cast<const char*>(grad.const_data_ptr()),
         static_cast<const uint8_t*>(mask.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr())};
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
  run({kernel, nest, call.run, nest.slices * nest.length * kernel.bytes >= kStreamFrom});
}

void map_segments(const SliceKernel& kernel, const Segments& segments, const SliceRun& all) {
  const int64_t row = segments.columns * kernel.bytes;
  const bool stream = segments.rows * row >= kStreamFrom;
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
        run({kernel, nest, {all.x + at, all.grad + at, kAllKept.bytes, all.out + at}, stream});
      }
    }
  };
  if (segments.are_long())
    map(0, segments.count);
  else
    segments.for_each_range(map);
}

}  // namespace maskwise
