// Reductions and the softmax of segments of rows, and their gradients, as registered ops.
#include "segments.h"

#include <string>

namespace maskwise {

Segments::Segments(const Tensor& values, const Tensor& of)
    : bounds(static_cast<const int32_t*>(of.const_data_ptr())),
      count(of.numel() - 1),
      rows(values.size(0)),
      columns(1) {
  for (size_t d = 1; d < values.sizes().size(); ++d) columns *= values.sizes()[d];
  // Not checked in Python, which does not read data: a mask may have changed since its rows were packed.
  bool valid = bounds[0] == 0 && bounds[count] == rows;
  for (int64_t s = 0; s < count; ++s) valid = valid && bounds[s] <= bounds[s + 1];
  STD_TORCH_CHECK(valid, "maskwise: the sequences of a mask have another number of rows than were packed by it");
}

void reduce_segments(const Reduction& kernel, const Segments& segments, const char* x, char* out) {
  const int64_t columns = segments.columns, row = columns * kernel.in_bytes;
  const auto x_of = [&](int64_t s) { return x + segments.bounds[s] * row; };
  const auto out_of = [&](int64_t s) { return out + s * columns * kernel.out_bytes; };
  const Mask all(kAllKept.bytes);
  ReduceLoop loop, column;
  loop.stride[kX] = row;
  column.stride[kX] = kernel.in_bytes;
  column.size = columns;
  if (segments.are_long()) {
    ReduceNest nest{{{column}, {loop}, columns}, all};
    for (int64_t s = 0; s < segments.count; ++s) {
      nest.inner[0].size = nest.length = segments.length(s);
      run_reduction(kernel, nest, x_of(s), out_of(s));
    }
    return;
  }
  const int64_t width = std::min(columns, kColumns);
  segments.for_each_range([&](int64_t first, int64_t last) {
    const Buffer lanes(ceil_div(width, kernel.lanes) * kernel.lanes_bytes), states(width * kernel.state_bytes);
    for (int64_t s = first; s < last; ++s) {
      if (columns == 1) {
        kernel.init(states.data, 1);
        kernel.accumulate(kernel.op, states.data, x_of(s), nullptr, segments.length(s), 0);
        kernel.finalize(kernel.op, states.data, 1, out_of(s));
        continue;
      }
      for (int64_t c = 0; c < columns; c += width) {
        Columns block{lanes.data, states.data, std::min(width, columns - c)};
        kernel.init_columns(kernel.op, block);
        const ColumnRun run{x_of(s) + c * kernel.in_bytes, all, all.data, 0, loop, column};
        kernel.accumulate_columns(kernel.op, block, run, segments.length(s), 0);
        kernel.collect_columns(kernel.op, block);
        kernel.finalize(kernel.op, block.states, block.w, out_of(s) + c * kernel.out_bytes);
      }
    }
  });
}

void segment_gradient(GradientCall::Run kernel, const void* op, const Segments& segments, int bytes,
                      const char* const (&params)[2], int param_bytes, const char* x, char* out) {
  const int64_t columns = segments.columns, row = columns * bytes;
  // Single columns are runs along the segment.
  const bool along = columns == 1;
  const int64_t step = along ? 0 : param_bytes;
  const int64_t stride[] = {bytes, 0, step, step, bytes};
  segments.for_each_range([&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t at = s * columns * param_bytes;
      for (int64_t r = segments.bounds[s]; r < segments.bounds[s + 1]; r += along ? segments.length(s) : 1) {
        char* const operands[] = {const_cast<char*>(x) + r * row, nullptr, const_cast<char*>(params[0]) + at,
                                  const_cast<char*>(params[1]) + at, out + r * row};
        kernel(op, Kept::all, operands, stride, along ? segments.length(s) : columns);
      }
    }
  });
}

namespace {

// Not torch::stable::contiguous alone: that is called by name, which costs a small call more than its kernel.
Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// The gradient of the sum: that of its segment for each row.
void expand_rows(const Segments& segments, const char* grad, int64_t bytes, char* out) {
  const int64_t row = segments.columns * bytes;
  segments.for_each_range([&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s)
      for (int64_t r = segments.bounds[s]; r < segments.bounds[s + 1]; ++r)
        std::memcpy(out + r * row, grad + s * row, row);
  });
}

// The gradient of a mean as that of a sum.
Tensor per_row(const Tensor& grad, const Segments& segments) {
  Tensor out = empty_cpu({grad.sizes().begin(), grad.sizes().end()}, grad.scalar_type());
  dispatch_floating(grad.scalar_type(), [&](auto t) {
    using T = decltype(t);
    const auto* from = static_cast<const T*>(grad.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < segments.count * segments.columns; ++i)
      to[i] = static_cast<T>(static_cast<double>(from[i]) / static_cast<double>(segments.length(i / segments.columns)));
  });
  return out;
}

ReduceNestInto* reduction_of(const std::string& op) {
  if (op == "sum") return sum_into;
  if (op == "mean") return mean_into;
  if (op == "amax") return amax_into;
  if (op == "amin") return amin_into;
  STD_TORCH_CHECK(op == "logsumexp", "segments: no such operation: ", op);
  return logsumexp_into;
}

Tensor segments(const Tensor& x, const Tensor& bounds, std::string op) {
  const Tensor values = as_contiguous(x), of = as_contiguous(bounds);
  const Segments segments(values, of);
  if (op == "softmax") {
    SliceCall call(values, values, values, {0}, 0);
    call.nest.segments = &segments;
    softmax_slices(call);
    return call.out;
  }
  std::vector<int64_t> sizes(values.sizes().begin(), values.sizes().end());
  sizes[0] = segments.count;
  Tensor out = empty_cpu(sizes, values.scalar_type());
  ReduceNest nest{{}, Mask(kAllKept.bytes)};
  nest.segments = &segments;
  reduction_of(op)(values.scalar_type(), nest, values.const_data_ptr(), out.mutable_data_ptr());
  return out;
}

Tensor segments_backward(const Tensor& of_result, const Tensor& result, const Tensor& x, const Tensor& bounds,
                         std::string op) {
  const Tensor values = as_contiguous(x), of = as_contiguous(bounds);
  const Tensor grad = as_contiguous(of_result), saved = as_contiguous(result);
  const Segments segments(values, of);
  if (op == "softmax") {
    SliceCall call(saved, grad, saved, {0}, 0);
    call.nest.segments = &segments;
    softmax_gradient(call);
    return call.out;
  }
  const Dims first{0};
  GradientCall call(grad, values, values, first, 0);
  call.nest.segments = &segments;
  call.nest.slices = segments.count * segments.columns;
  if (op == "logsumexp") {
    logsumexp_gradient(call, saved.const_data_ptr());
  } else if (op == "amax" || op == "amin") {
    extremum_gradient(call, saved.const_data_ptr(), op == "amax");
  } else {
    const Tensor each = op == "mean" ? per_row(grad, segments) : grad;
    expand_rows(segments, static_cast<const char*>(each.const_data_ptr()), values.element_size(),
                static_cast<char*>(call.out.mutable_data_ptr()));
  }
  return call.out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("segments", TORCH_BOX(&maskwise::segments));
  m.impl("segments_forward", TORCH_BOX(&maskwise::segments));
  m.impl("segments_backward", TORCH_BOX(&maskwise::segments_backward));
}
