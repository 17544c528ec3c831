// The loops of reductions, compiled once: rows where the reduced run is contiguous, columns side by side where the outer
// one is, and small gathers for any other stride.
#include "segments.h"
#include "select_mask.h"

namespace maskwise {
namespace {

// One output with more elements than this is split among threads. Fixed, so that the bits of a result never depend on
// the number of threads.
constexpr int64_t kSplit = 262144;
// The same for columns: larger, since each part holds a state for each column.
constexpr int64_t kColumnSplit = 1 << 20;
// Elements that are gathered at a time, and the bytes that hold them and any state.
constexpr int64_t kStage = 512;
constexpr int kStateBytes = 64;

// Accumulates `count` elements that lie apart in memory; m is null where all are kept.
void accumulate_strided(const Reduction& kernel, void* state, const char* x, int64_t stride, const uint8_t* m,
                        int64_t count, int64_t at) {
  alignas(16) char values[kStage * 8];
  for (int64_t i = 0; i < count; i += kStage) {
    const int64_t n = std::min(kStage, count - i);
    gather(kernel.in_bytes, values, x + i * stride, stride, n);
    kernel.accumulate(kernel.op, state, values, m == nullptr ? nullptr : m + i, n, at + i);
  }
}

// Contiguous runs of which all is kept, and which are accumulated a little later, in order: runs that touch are joined to
// one. The CPU does not read ahead from where one ends to where the next one begins: that is prefetched meanwhile, or, where
// few are dropped, those are prefetched as well.
class HeldRuns {
 public:
  struct Run {
    const char* x;
    int64_t n, at;
  };

  HeldRuns(const Reduction& kernel, void* state, bool few_dropped)
      : kernel_(kernel), state_(state), few_dropped_(few_dropped) {}

  void add(const Run& run) {
    if (size_ > 0) {
      Run& last = runs_[(first_ + size_ - 1) % kHeld];
      if (run.x == last.x + last.n * kernel_.in_bytes && run.at == last.at + last.n) {
        last.n += run.n;
        if (!few_dropped_) prefetch<2>(run);
        return;
      }
      if (!few_dropped_) prefetch<2>(run);
    }
    if (size_ == (few_dropped_ ? 1 : kHeld)) accumulate_first();
    runs_[(first_ + size_++) % kHeld] = run;
  }

  void drop(const Run& run) {
    if (!few_dropped_) return;
    flush();
    prefetch<3>(run);
  }

  void flush() {
    while (size_ > 0) accumulate_first();
  }

 private:
  static constexpr int kHeld = 8;
  static constexpr int64_t kAheadBytes = 2048;

  template <int kHint>
  __attribute__((always_inline)) void prefetch(const Run& run) const {
    const int64_t bytes = std::min(run.n * kernel_.in_bytes, kAheadBytes);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(run.x + i, 0, kHint);
  }

  void accumulate_first() {
    const Run& run = runs_[first_];
    kernel_.accumulate(kernel_.op, state_, run.x, nullptr, run.n, run.at);
    first_ = (first_ + 1) % kHeld;
    --size_;
  }

  const Reduction& kernel_;
  void* state_;
  bool few_dropped_;
  Run runs_[kHeld];
  int first_ = 0, size_ = 0;
};

// Elements [begin, end) of one output, in rows of `size` that follow each other in memory, with a mask byte each: runs of
// rows are found by their bytes alone.
void accumulate_whole_rows(const Reduction& kernel, HeldRuns& held, const char* x, const uint8_t* m, int64_t size,
                           int64_t begin, int64_t end) {
  for_each_segment(m, begin / size, ceil_div(end, size), [&](bool keeps, int64_t row, int64_t rows) {
    const int64_t first = std::max(begin, row * size), last = std::min(end, (row + rows) * size);
    const HeldRuns::Run run{x + first * kernel.in_bytes, last - first, first};
    keeps ? held.add(run) : held.drop(run);
  });
}

void reduce_rows(const Reduction& kernel, const ReduceNest& nest, const char* x, char* out) {
  const int64_t splits = ceil_div(nest.length, kSplit);
  const Mask& mask = nest.mask;
  if (splits <= 1 || nest.slices >= 64) {
    const ReduceLoop loop = innermost(nest.outer, mask, kMask), inner = innermost(nest.inner, mask, kMask);
    const bool one_run = nest.inner.size() <= 1 && nest.length > 0 && inner.stride[kX] == kernel.in_bytes &&
                         (inner.stride[kMask] == 0 || (inner.stride[kMask] == 1 && !mask.has_intervals()));
    parallel_uneven(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
      char* result = out + begin * kernel.out_bytes;
      for_each_run(nest.outer, begin, end, [&](Offset<3> at, int64_t count) {
        if (one_run) {
          const RowRuns rows{x + at[kX], mask, mask.data + at[kMask], at[kPosition],
                             loop,       inner.stride[kMask], inner.stride[kPosition]};
          kernel.reduce_rows(kernel.op, rows, nest.length, count, result);
          result += count * kernel.out_bytes;
          return;
        }
        for (int64_t k = 0; k < count; ++k, at.step(loop, 1), result += kernel.out_bytes) {
          alignas(16) char state[kStateBytes];
          kernel.init(state, 1);
          accumulate_range(kernel, state, nest, x, at, 0, nest.length);
          kernel.finalize(kernel.op, state, 1, result);
        }
      });
    });
    return;
  }
  const Buffer parts(nest.slices * splits * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * kernel.state_bytes; };
  parallel_uneven(nest.slices * splits, kSplit, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t from = p % splits * kSplit;
      kernel.init(part(p), 1);
      accumulate_range(kernel, part(p), nest, x, offset_of(nest.outer, p / splits), from,
                       std::min(from + kSplit, nest.length));
    }
  });
  for (int64_t r = 0; r < nest.slices; ++r) {
    for (int64_t p = 1; p < splits; ++p) kernel.combine(kernel.op, part(r * splits), part(r * splits + p));
    kernel.finalize(kernel.op, part(r * splits), 1, out + r * kernel.out_bytes);
  }
}

// The innermost outer loop is contiguous in x: its outputs are reduced side by side.
void reduce_columns(const Reduction& kernel, const ReduceNest& nest, const char* x, char* out) {
  const Mask& mask = nest.mask;
  const ReduceLoop column = nest.outer.back(), row = innermost(nest.inner, mask, kMask);
  const Loops<3> outer(nest.outer.begin(), nest.outer.end() - 1);
  const int64_t width = std::min<int64_t>(column.size, kColumns);
  const int64_t blocks = ceil_div(column.size, width);
  const int64_t groups = nest.slices / column.size * blocks;
  // Few groups and much to reduce: the reduced range is split too. As in rows, by sizes alone.
  const int64_t rows_each = std::max<int64_t>(1, kColumnSplit / width);
  const int64_t splits = groups >= 64 ? 1 : ceil_div(nest.length, rows_each);
  const int64_t step = splits == 1 ? nest.length : rows_each;
  const Buffer parts(splits == 1 ? 0 : groups * splits * width * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * kernel.state_bytes; };
  const auto result = [&](int64_t group) {
    return out + (group / blocks * column.size + group % blocks * width) * kernel.out_bytes;
  };
  const auto columns_of = [&](int64_t group) { return std::min(width, column.size - group % blocks * width); };

  parallel_uneven(groups * splits, step * width, [&](int64_t begin, int64_t end) {
    const Buffer lanes(ceil_div(width, kernel.lanes) * kernel.lanes_bytes), states(width * kernel.state_bytes);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / splits, w = columns_of(group);
      Offset<3> at = offset_of(outer, group / blocks);
      at.step(column, group % blocks * width);
      Columns columns{lanes.data, states.data, w};
      kernel.init_columns(kernel.op, columns);
      int64_t from = task % splits * step;
      for_each_run(nest.inner, from, std::min(from + step, nest.length), [&](const Offset<3>& to, int64_t count) {
        const ColumnRun run{x + at[kX] + to[kX], mask, mask.data + at[kMask] + to[kMask], at[kPosition] + to[kPosition],
                            row, column, nest.few_dropped};
        kernel.accumulate_columns(kernel.op, columns, run, count, from);
        from += count;
      });
      kernel.collect_columns(kernel.op, columns);
      if (splits == 1)
        kernel.finalize(kernel.op, columns.states, w, result(group));
      else
        std::memcpy(part((task % splits * groups + group) * width), columns.states, w * kernel.state_bytes);
    }
  });
  if (splits == 1) return;
  parallel(groups, splits * width, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t w = columns_of(group);
      for (int64_t j = 0; j < w; ++j)
        for (int64_t p = 1; p < splits; ++p)
          kernel.combine(kernel.op, part(group * width + j), part((p * groups + group) * width + j));
      kernel.finalize(kernel.op, part(group * width), w, result(group));
    }
  });
}

}  // namespace

void accumulate_range(const Reduction& kernel, void* state, const ReduceNest& nest, const char* x, const Offset<3>& from,
                      int64_t begin, int64_t end) {
  const Mask& mask = nest.mask;
  const ReduceLoop inner = innermost(nest.inner, mask, kMask);
  const int64_t stride = inner.stride[kX], bits = inner.stride[kMask];
  // A nest without inner loops has one element for each output.
  const bool contiguous = nest.inner.empty() || stride == kernel.in_bytes;
  int64_t position = begin;
  HeldRuns held(kernel, state, nest.few_dropped);
  if (contiguous && bits == 0 && !mask.has_intervals() && nest.inner.size() == 2 && begin < end) {
    const ReduceLoop& rows = nest.inner[0];
    if (rows.stride[kMask] == 1 && rows.stride[kX] == inner.size * stride) {
      accumulate_whole_rows(kernel, held, x + from[kX], mask.data + from[kMask], inner.size, begin, end);
      return held.flush();
    }
  }
  for_each_run(nest.inner, begin, end, [&](const Offset<3>& to, int64_t count) {
    const uint8_t* m = mask.data + from[kMask] + to[kMask];
    const int64_t line = from[kPosition] + to[kPosition];
    const char* values = x + from[kX] + to[kX];
    const KeptRun run = kept_of_run(mask, m, line, bits, inner.stride[kPosition], count);
    const auto accumulate = [&](int64_t first, int64_t n, const uint8_t* bytes) {
      if (contiguous)
        kernel.accumulate(kernel.op, state, values + first * stride, bytes, n, position + first);
      else
        accumulate_strided(kernel, state, values + first * stride, stride, bytes, n, position + first);
    };
    if (run.kept == Kept::all && contiguous) {
      held.add({values + run.begin * kernel.in_bytes, run.end - run.begin, position + run.begin});
    } else if (run.kept == Kept::none) {
      // Of an interval that keeps nothing nothing is touched.
      if (!mask.has_intervals() && contiguous) held.drop({values, count, position});
    } else {
      held.flush();
      if (run.kept == Kept::all)
        accumulate(run.begin, run.end - run.begin, nullptr);
      else if (bits == 1 && !mask.has_intervals())
        accumulate(0, count, m);
      else
        for (int64_t i = 0; i < count; i += kStage) {
          uint8_t bytes[kStage];
          const int64_t n = std::min(kStage, count - i);
          if (mask.has_intervals())
            stage_bits(mask, m + i * bits, line, bits, n, bytes);
          else
            for (int64_t k = 0; k < n; ++k) bytes[k] = m[(i + k) * bits];
          accumulate(i, n, bytes);
        }
    }
    position += count;
  });
  held.flush();
}

void run_reduction(const Reduction& kernel, const ReduceNest& nest, const void* x, void* out) {
  if (nest.segments != nullptr)
    return reduce_segments(kernel, *nest.segments, static_cast<const char*>(x), static_cast<char*>(out));
  const bool rows_touch = !nest.inner.empty() && nest.inner.back().stride[kX] == kernel.in_bytes;
  const bool columns_touch =
      !nest.outer.empty() && nest.outer.back().stride[kX] == kernel.in_bytes && nest.outer.back().size >= 4;
  // For a handful of elements, small gathers are faster than the buffers of columns.
  const bool handful = nest.slices * nest.length <= 1024;
  const bool columns = !rows_touch && columns_touch && nest.length > 0 && !handful;
  (columns ? reduce_columns : reduce_rows)(kernel, nest, static_cast<const char*>(x), static_cast<char*>(out));
}

// Whether a mask of bytes for whole rows of x keeps three quarters of them and more.
static bool drops_few(const Tensor& x, const Tensor& mask, int64_t along) {
  constexpr int64_t kRow = 16;
  const int64_t n = mask.numel();
  if (along != 0 || n * kRow > x.numel() || !mask.is_contiguous()) return false;
  const auto* bytes = static_cast<const uint8_t*>(mask.const_data_ptr());
  return count_kept(bytes, n) * 4 >= n * 3;
}

static ReduceNest reduce_nest(const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along) {
  ReduceNest nest{{}, Mask(mask, along, x), drops_few(x, mask, along)};
  const Operand values{&x, static_cast<int64_t>(x.element_size())};
  static_cast<Nest<3>&>(nest) =
      make_nest<3>(x, {values, nest.mask.operand, nest.mask.position}, dim, -1, &nest.mask, kMask);
  return nest;
}

ReduceCall::ReduceCall(const Tensor& values, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along,
                       ScalarType dtype)
    : nest(reduce_nest(values, mask, dim, along)),
      out(empty_cpu(reduced_sizes(values, dim, keepdim), dtype)),
      x(values.const_data_ptr()),
      result(out.mutable_data_ptr()) {}

GradientCall::GradientCall(const Tensor& of_result, const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along)
    : nest(reduce_nest(x, mask, dim, along)),
      grad(torch::stable::contiguous(of_result)),
      out(empty_cpu(std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), x.scalar_type())),
      x(x),
      mask(mask),
      dim(dim),
      along(along) {}

void GradientCall::run(Run kernel, const void* op, const void* a, const void* b, int bytes) const {
  const int own = static_cast<int>(x.element_size());
  if (nest.segments != nullptr)
    return segment_gradient(kernel, op, *nest.segments, own, {static_cast<const char*>(a), static_cast<const char*>(b)}, bytes,
                            static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr()));
  const Mask kept(mask, along, x);
  Operand all[kElementOperands] = {{&x, own}, kept.operand, {nullptr}, {nullptr}, {&out, own}};
  all[kElementPosition] = kept.position;
  ElementLoops loops = make_loops<kElementOperands>(x, all);
  int64_t stride = bytes;
  for (int64_t d = x.dim(); d-- > 0;) {
    if (std::find(dim.begin(), dim.end(), d) != dim.end()) continue;
    if (loops[d].size != 1) loops[d].stride[2] = loops[d].stride[3] = stride;
    stride *= loops[d].size;
  }
  char* const data[] = {static_cast<char*>(const_cast<void*>(x.const_data_ptr())),
                        reinterpret_cast<char*>(const_cast<uint8_t*>(kept.data)),
                        static_cast<char*>(const_cast<void*>(a)), static_cast<char*>(const_cast<void*>(b)),
                        static_cast<char*>(out.mutable_data_ptr())};
  const ElementOperands operands{5, {own, 1, bytes, bytes, own}, {false, true, true, true, false}, 1, true};
  Elementwise(std::move(loops), operands, kept, data, 4)
      .for_each(FreshPages(out, true), [&](int64_t, Kept keeps, char* const* at, const int64_t* strides, int64_t n) {
        if (keeps == Kept::none)
          std::memset(at[4], 0, n * own);
        else
          kernel(op, keeps, at, strides, n);
      });
}

}  // namespace maskwise
