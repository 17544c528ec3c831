// The loops of reductions, compiled once: rows where the reduced run is contiguous, columns side by side where the outer
// one is, and small gathers for any other stride.
#include "segments.h"

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
void accumulate_strided(const Reduction& kernel, void* state, const char* x, int64_t x_stride, const uint8_t* m,
                        int64_t m_stride, int64_t count, int64_t at) {
  alignas(16) char values[kStage * 8];
  uint8_t kept[kStage];
  for (int64_t i = 0; i < count; i += kStage) {
    const int64_t n = std::min(kStage, count - i);
    gather(kernel.in_bytes, values, x + i * x_stride, x_stride, n);
    if (m != nullptr)
      for (int64_t k = 0; k < n; ++k) kept[k] = m[(i + k) * m_stride];
    kernel.accumulate(kernel.op, state, values, m == nullptr ? nullptr : kept, n, at + i);
  }
}

void reduce_rows(const Reduction& kernel, const ReduceNest& nest, const char* x, const uint8_t* m, char* out) {
  const int64_t splits = ceil_div(nest.length, kSplit);
  if (splits <= 1 || nest.slices >= 64) {
    const Loop<2> loop = innermost(nest.outer), inner = innermost(nest.inner);
    const bool one_run = nest.inner.size() <= 1 && nest.length > 0 && inner.stride[kX] == kernel.in_bytes &&
                         (inner.stride[kMask] == 0 || inner.stride[kMask] == 1);
    parallel(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
      char* result = out + begin * kernel.out_bytes;
      for_each_run(nest.outer, begin, end, [&](const Offset<2>& at, int64_t count) {
        if (one_run) {
          kernel.reduce_rows(kernel.op, x + at[kX], loop.stride[kX], m + at[kMask], loop.stride[kMask],
                             inner.stride[kMask] != 0, nest.length, count, result);
          result += count * kernel.out_bytes;
          return;
        }
        for (int64_t k = 0; k < count; ++k, result += kernel.out_bytes) {
          alignas(16) char state[kStateBytes];
          kernel.init(state, 1);
          accumulate_range(kernel, state, nest, x + at[kX] + k * loop.stride[kX], m + at[kMask] + k * loop.stride[kMask],
                           0, nest.length);
          kernel.finalize(kernel.op, state, 1, result);
        }
      });
    });
    return;
  }
  const Buffer parts(nest.slices * splits * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * kernel.state_bytes; };
  parallel(nest.slices * splits, kSplit, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Offset<2> at = offset_of(nest.outer, p / splits);
      const int64_t from = p % splits * kSplit;
      kernel.init(part(p), 1);
      accumulate_range(kernel, part(p), nest, x + at[kX], m + at[kMask], from, std::min(from + kSplit, nest.length));
    }
  });
  for (int64_t r = 0; r < nest.slices; ++r) {
    for (int64_t p = 1; p < splits; ++p) kernel.combine(kernel.op, part(r * splits), part(r * splits + p));
    kernel.finalize(kernel.op, part(r * splits), 1, out + r * kernel.out_bytes);
  }
}

// The innermost outer loop is contiguous in x: its outputs are reduced side by side.
void reduce_columns(const Reduction& kernel, const ReduceNest& nest, const char* x, const uint8_t* m, char* out) {
  const Loop<2> inner = nest.outer.back(), loop = innermost(nest.inner);
  const Loops<2> outer(nest.outer.begin(), nest.outer.end() - 1);
  const int64_t width = std::min<int64_t>(inner.size, kColumns);
  const int64_t blocks = ceil_div(inner.size, width);
  const int64_t groups = nest.slices / inner.size * blocks;
  // Few groups and much to reduce: the reduced range is split too. As in rows, by sizes alone.
  const int64_t rows_each = std::max<int64_t>(1, kColumnSplit / width);
  const int64_t splits = groups >= 64 ? 1 : ceil_div(nest.length, rows_each);
  const int64_t step = splits == 1 ? nest.length : rows_each;
  const Buffer parts(splits == 1 ? 0 : groups * splits * width * kernel.state_bytes);
  const auto part = [&](int64_t p) { return parts.data + p * kernel.state_bytes; };
  const auto result = [&](int64_t group) {
    return out + (group / blocks * inner.size + group % blocks * width) * kernel.out_bytes;
  };
  const auto columns_of = [&](int64_t group) { return std::min(width, inner.size - group % blocks * width); };

  parallel(groups * splits, step * width, [&](int64_t begin, int64_t end) {
    const Buffer lanes(ceil_div(width, kernel.lanes) * kernel.lanes_bytes), states(width * kernel.state_bytes);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / splits, w = columns_of(group);
      Offset<2> at = offset_of(outer, group / blocks);
      at.step(inner, group % blocks * width);
      Columns columns{lanes.data, states.data, w};
      kernel.init_columns(kernel.op, columns);
      int64_t from = task % splits * step;
      for_each_run(nest.inner, from, std::min(from + step, nest.length), [&](const Offset<2>& run, int64_t count) {
        kernel.accumulate_columns(kernel.op, columns, x + at[kX] + run[kX], m + at[kMask] + run[kMask], loop,
                                  inner.stride[kMask], count, from);
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

void accumulate_range(const Reduction& kernel, void* state, const ReduceNest& nest, const char* x, const uint8_t* mask,
                      int64_t begin, int64_t end) {
  const Loop<2> inner = innermost(nest.inner);
  // A nest without inner loops has one element for each output.
  const bool direct = nest.inner.empty() || (inner.stride[kX] == kernel.in_bytes &&
                                             (inner.stride[kMask] == 1 || inner.stride[kMask] == 0));
  int64_t position = begin;
  for_each_masked_run(nest.inner, kMask, mask, begin, end, [&](const Offset<2>& run, int64_t count, Kept kept) {
    const int64_t at = position;
    position += count;
    if (kept == Kept::none) return;
    const uint8_t* m = kept == Kept::all ? nullptr : mask + run[kMask];
    if (direct)
      kernel.accumulate(kernel.op, state, x + run[kX], m, count, at);
    else
      accumulate_strided(kernel, state, x + run[kX], inner.stride[kX], m, inner.stride[kMask], count, at);
  });
}

void run_reduction(const Reduction& kernel, const ReduceNest& nest, const void* x, const void* mask, void* out) {
  if (nest.segments != nullptr)
    return reduce_segments(kernel, *nest.segments, static_cast<const char*>(x), static_cast<char*>(out));
  const bool rows_touch = !nest.inner.empty() && nest.inner.back().stride[kX] == kernel.in_bytes;
  const bool columns_touch =
      !nest.outer.empty() && nest.outer.back().stride[kX] == kernel.in_bytes && nest.outer.back().size >= 4;
  // For a handful of elements, small gathers are faster than the buffers of columns.
  const bool handful = nest.slices * nest.length <= 1024;
  const bool columns = !rows_touch && columns_touch && nest.length > 0 && !handful;
  (columns ? reduce_columns : reduce_rows)(kernel, nest, static_cast<const char*>(x), static_cast<const uint8_t*>(mask),
                                           static_cast<char*>(out));
}

static ReduceNest reduce_nest(const Tensor& x, const Tensor& mask, const Dims& dim) {
  return make_nest<2>(x, {{&x, static_cast<int64_t>(x.element_size())}, {&mask}}, dim);
}

ReduceCall::ReduceCall(const Tensor& values, const Tensor& kept, const Dims& dim, bool keepdim, ScalarType dtype)
    : nest(reduce_nest(values, kept, dim)),
      out(empty_cpu(reduced_sizes(values, dim, keepdim), dtype)),
      x(values.const_data_ptr()),
      mask(kept.const_data_ptr()),
      result(out.mutable_data_ptr()) {}

GradientCall::GradientCall(const Tensor& of_result, const Tensor& x, const Tensor& mask, const Dims& dim)
    : nest(reduce_nest(x, mask, dim)),
      grad(torch::stable::contiguous(of_result)),
      out(empty_cpu(std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), x.scalar_type())),
      x(x),
      mask(mask),
      dim(dim) {}

void GradientCall::run(Run kernel, const void* op, const void* a, const void* b, int bytes) const {
  const int own = static_cast<int>(x.element_size());
  if (nest.segments != nullptr)
    return segment_gradient(kernel, op, *nest.segments, own, {static_cast<const char*>(a), static_cast<const char*>(b)}, bytes,
                            static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr()));
  ElementLoops loops = make_loops<kElementOperands>(x, {{&x, own}, {&mask}, {nullptr}, {nullptr}, {&out, own}});
  int64_t stride = bytes;
  for (int64_t d = x.dim(); d-- > 0;) {
    if (std::find(dim.begin(), dim.end(), d) != dim.end()) continue;
    if (loops[d].size != 1) loops[d].stride[2] = loops[d].stride[3] = stride;
    stride *= loops[d].size;
  }
  char* const data[] = {static_cast<char*>(const_cast<void*>(x.const_data_ptr())),
                        static_cast<char*>(const_cast<void*>(mask.const_data_ptr())),
                        static_cast<char*>(const_cast<void*>(a)), static_cast<char*>(const_cast<void*>(b)),
                        static_cast<char*>(out.mutable_data_ptr())};
  const ElementOperands operands{5, {own, 1, bytes, bytes, own}, {false, true, true, true, false}, 1, true};
  Elementwise(std::move(loops), operands, data, 4)
      .for_each([&](int64_t, Kept kept, char* const* at, const int64_t* strides, int64_t n) {
        if (kept == Kept::none)
          std::memset(at[4], 0, n * own);
        else
          kernel(op, kept, at, strides, n);
      });
}

}  // namespace maskwise
