// Products with a sparse weight: forward, and the gradient of the kept weights. The gradient of the input is the forward
// product with the transposed weight. Arguments were checked in Python: x is contiguous, (batch, inputs); values, starts
// and columns belong to one layout; all of x's dtype, which is float32 or bfloat16, or int32.
#include "common.h"

#include <optional>

namespace maskwise {
// The inner loops, as each SIMD level gives them: see linear_kernels.h for the arguments.
using WalkRows = void (*)(const float*, const float*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                          int32_t, float*);
using WalkFours = void (*)(const float*, const float*, const int32_t*, const int32_t*, int64_t, int64_t, float*);

// Sums of one chunk of outputs stay in the first cache: at most this many floats.
constexpr int64_t kSums = 4096;
// Inputs that stay in the second cache beside the weights that pass: so many floats.
constexpr int64_t kSecondCache = 49152;

// How unstructured rows are walked: the loop, the batch rows of a strip, the ranges of columns at a time, and the sums.
struct RowWalk {
  WalkRows run;
  int64_t strip, step, sums;
};
}  // namespace maskwise

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "linear_isa.h"
#include "foreach_isa.h"
#include "linear_strips.h"

namespace maskwise {
namespace {

const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); }

// A tensor's values as float: its own memory, or a copy.
struct Floats {
  Tensor copy;
  const float* data = nullptr;

  explicit Floats(const Tensor& t) : copy(t) {
    if (t.scalar_type() == ScalarType::Float) {
      data = static_cast<const float*>(t.const_data_ptr());
      return;
    }
    const int64_t n = t.numel();
    copy = empty_cpu({n}, ScalarType::Float);
    const auto* from = static_cast<const BFloat16*>(t.const_data_ptr());
    auto* to = static_cast<float*>(copy.mutable_data_ptr());
    parallel(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(from[i]);
    });
    data = to;
  }
};

struct OptionalFloats {
  std::optional<Floats> held;
  explicit OptionalFloats(const std::optional<Tensor>& t) {
    if (t.has_value()) held.emplace(*t);
  }
  const float* data() const { return held.has_value() ? held->data : nullptr; }
};

// Outputs of a batch of one row, in chunks of this many.
constexpr int64_t kVector = 64;

// y = sums + bias for one row of inputs: walk(begin, end, sums) makes the sums of outputs [begin, end).
template <class S, class Walk>
void vector_product(int64_t outputs, int64_t weights, const float* bias, S* y, const Walk& walk) {
  const int64_t tasks = ceil_div(outputs, kVector);
  parallel(tasks, share(weights, tasks, 4), [&](int64_t first, int64_t last) {
    float sums[kVector];
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task * kVector, end = std::min(begin + kVector, outputs);
      walk(begin, end, sums);
      for (int64_t n = begin; n < end; ++n)
        y[n] = static_cast<S>(sums[n - begin] + (bias == nullptr ? 0.0f : bias[n]));
    }
  });
}

template <class S>
void rows_product(const Tensor& x, const float* values, const Tensor& starts, const Tensor& columns, const float* bias,
                  int64_t outputs, S* y) {
  // Asking a tensor for its memory is a call across the library's border: once, not in a loop.
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), weights = columns.numel();
  const int64_t pieces = (starts.numel() - 1) / outputs;
  if (batch == 1) {
    const Floats in(x);
    vector_product(outputs, weights, bias, y, [&](int64_t begin, int64_t end, float* sums) {
      MASKWISE_AT_ISA(vector_rows(in.data, values, at_columns, at_starts, pieces, begin, end, sums));
    });
    return;
  }
  const RowWalk walk = MASKWISE_AT_ISA(row_walk(batch, inputs, outputs, pieces, weights));
  // A column of zeros behind the inputs, for the weights that fill up a row's last four.
  const Strips strips{batch, walk.strip, inputs + 1};
  turned_product(static_cast<const S*>(x.const_data_ptr()), inputs, strips, outputs, walk.sums / walk.strip, weights, bias,
                 y, [&](const float* tile, int64_t begin, int64_t end, float* sums) {
                   walk.run(tile, values, at_columns, at_starts, pieces, walk.step, begin, end,
                            static_cast<int32_t>(inputs), sums);
                 });
}

template <class S>
void fours_product(const Tensor& x, const float* values, const Tensor& starts, const Tensor& columns, const float* bias,
                   int64_t outputs, S* y) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), weights = columns.numel() * 4;
  if (batch == 1) {
    const Floats in(x);
    vector_product(outputs, weights, bias, y, [&](int64_t begin, int64_t end, float* sums) {
      MASKWISE_AT_ISA(vector_fours(in.data, values, at_columns, at_starts, begin / 4, ceil_div(end, 4), sums));
    });
    return;
  }
  WalkFours run;
  int64_t strip;
  MASKWISE_AT_ISA(four_walk(batch, inputs, &run, &strip));
  const Strips strips{batch, strip, inputs};
  turned_product(static_cast<const S*>(x.const_data_ptr()), inputs, strips, outputs, kSums / (strip * 4) * 4, weights, bias, y,
                 [&](const float* tile, int64_t begin, int64_t end, float* sums) {
                   run(tile, values, at_columns, at_starts, begin / 4, ceil_div(end, 4), sums);
                 });
}

// A matrix with its columns filled up to whole blocks by zeros, as float.
Tensor padded_floats(const Tensor& t, int64_t width) {
  const int64_t rows = t.size(0), size = t.size(1), padded = ceil_div(size, width) * width;
  const Floats from(t);
  Tensor out = empty_cpu({rows, padded}, ScalarType::Float);
  auto* to = static_cast<float*>(out.mutable_data_ptr());
  parallel(rows, padded, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::copy(from.data + r * size, from.data + (r + 1) * size, to + r * padded);
      std::fill(to + r * padded + size, to + (r + 1) * padded, 0.0f);
    }
  });
  return out;
}

template <class S>
void squares_product(const Tensor& x, const float* values, const Tensor& starts, const Tensor& columns,
                     const float* bias, int64_t outputs, S* y) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), blocks = columns.numel(), weights = blocks * 256;
  if (batch == 1) {
    const Tensor padded = padded_floats(x, 16);
    const auto* in = static_cast<const float*>(padded.const_data_ptr());
    vector_product(outputs, weights, bias, y, [&](int64_t begin, int64_t end, float* sums) {
      MASKWISE_AT_ISA(vector_squares(in, values, at_columns, at_starts, begin / 16, ceil_div(end, 16), sums));
    });
    return;
  }
  Tensor memory = empty_cpu({std::max<int64_t>(1, weights)}, ScalarType::Float);
  auto* on_side = static_cast<float*>(memory.mutable_data_ptr());
  parallel(blocks, 256, [&](int64_t begin, int64_t end) { MASKWISE_AT_ISA(turn_squares(values, begin, end, on_side)); });
  // Batch rows that stay in the second cache while all rows of blocks pass; those are dense, and take less room.
  constexpr int64_t kRoom = 81920, kGroup = 12, kMost = 8 * kGroup, kBlockRows = 8;
  const int64_t padded = ceil_div(inputs, 16) * 16;
  const int64_t room = std::max<int64_t>(1, kRoom / std::max<int64_t>(1, padded) / kGroup) * kGroup;
  const Strips strips{batch, std::min(room, kMost), padded};
  const int64_t block_rows = ceil_div(outputs, 16);
  const auto* from = static_cast<const S*>(x.const_data_ptr());
  strip_product(
      strips, ceil_div(block_rows, kBlockRows), weights,
      [&](int64_t s, int64_t begin, int64_t end, float* tile) {
        MASKWISE_AT_ISA(pack_squares<S>(from + s * strips.size * inputs, inputs, strips.rows(s), begin, end, strips.size, tile));
      },
      [&](int64_t s, const float* tile, int64_t chunk) {
        const int64_t end = std::min((chunk + 1) * kBlockRows, block_rows);
        for (int64_t r = chunk * kBlockRows; r < end; ++r) {
          const int64_t n = r * 16, count = std::min<int64_t>(16, outputs - n);
          float shift[16] = {};
          if (bias != nullptr) std::copy(bias + n, bias + n + count, shift);
          MASKWISE_AT_ISA(walk_squares<S>(tile, strips.size, strips.rows(s), on_side, at_columns, at_starts[r],
                                          at_starts[r + 1], shift, y + s * strips.size * outputs + n, outputs, count));
        }
      });
}

// The gradient of the kept weights in float; pieces of columns, or blocks of 4 x 1.
template <class S>
void sampled(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, int64_t rows, float* out) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), outputs = grad.size(1);
  int64_t strip;
  MASKWISE_AT_ISA(sample_strip(&strip));
  const int64_t all = ceil_div(outputs, rows), weights = columns.numel() * rows;
  const int64_t pieces = (starts.numel() - 1) / all;
  // Ranges of columns that stay in the second cache while all outputs of a thread pass.
  const int64_t together = std::max<int64_t>(1, kSecondCache / std::max<int64_t>(1, ceil_div(inputs, pieces) * strip));
  if (batch == 1 && rows == 1) {
    const Floats one(x), above(grad);
    parallel(outputs, share(weights, outputs, 4), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t p = at_starts[n * pieces]; p < at_starts[(n + 1) * pieces]; ++p)
          out[p] = above.data[n] * one.data[at_columns[p]];
    });
    return;
  }
  const Strips in{batch, strip, inputs}, up{batch, strip, all * rows};
  const int64_t step = std::min(in.at_once(), up.at_once());
  Tensor in_memory = in.memory(step), up_memory = up.memory(step);
  auto* in_tiles = static_cast<float*>(in_memory.mutable_data_ptr());
  auto* up_tiles = static_cast<float*>(up_memory.mutable_data_ptr());
  constexpr int64_t kRows = 16;
  const int64_t chunks = ceil_div(all, kRows);
  for (int64_t first = 0; first < in.count(); first += step) {
    const int64_t now = std::min(step, in.count() - first);
    pack_strips(in, first, now, in_tiles, turned(static_cast<const S*>(x.const_data_ptr()), inputs, in));
    pack_strips(up, first, now, up_tiles, turned(static_cast<const S*>(grad.const_data_ptr()), outputs, up));
    // A task owns the weights of its outputs, so the sums do not depend on the number of threads.
    parallel(chunks, share(weights, chunks, strip) * now, [&](int64_t from, int64_t to) {
      for (int64_t within = 0; within < now; ++within) {
        const bool fresh = first + within == 0;
        const float* tile = in_tiles + within * in.tile();
        const float* grads = up_tiles + within * up.tile();
        const int64_t begin = from * kRows, end = std::min(to * kRows, all);
        if (rows == 1) {
          MASKWISE_AT_ISA(sample_rows(grads, tile, at_columns, at_starts, pieces, together, begin, end, fresh, out));
        } else {
          for (int64_t r = begin; r < end; ++r) {
            const int64_t a = at_starts[r], b = at_starts[r + 1];
            MASKWISE_AT_ISA(sample_columns(grads + r * 4 * strip, tile, at_columns, a, b, fresh, out));
          }
        }
      }
    });
  }
}

void sampled_squares(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, float* out) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const bool as_is = x.scalar_type() == ScalarType::Float && x.size(1) % 16 == 0 && grad.size(1) % 16 == 0;
  const Tensor in = as_is ? x : padded_floats(x, 16), up = as_is ? grad : padded_floats(grad, 16);
  const int64_t batch = x.size(0), x_stride = in.size(1), grad_stride = up.size(1), all = starts.numel() - 1;
  const auto* from = static_cast<const float*>(in.const_data_ptr());
  const auto* above = static_cast<const float*>(up.const_data_ptr());
  parallel(all, share(columns.numel() * 256, all, batch), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t p = at_starts[r]; p < at_starts[r + 1]; ++p)
        MASKWISE_AT_ISA(sample_block(above + r * 16, grad_stride, from + at_columns[p] * 16, x_stride, batch, out + p * 256));
  });
}

Tensor linear_product(const Tensor& x, const Tensor& values, const Tensor& starts, const Tensor& columns,
                      const std::optional<Tensor>& bias, int64_t outputs, int64_t rows, int64_t) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "maskwise: linear takes float32 and bfloat16");
  Tensor out = empty_cpu({x.size(0), outputs}, dtype);
  if (out.numel() == 0) return out;
  const Floats weights(values);
  const OptionalFloats shift(bias);
  const auto run = [&](auto* y) {
    if (rows == 1)
      rows_product(x, weights.data, starts, columns, shift.data(), outputs, y);
    else if (rows == 4)
      fours_product(x, weights.data, starts, columns, shift.data(), outputs, y);
    else
      squares_product(x, weights.data, starts, columns, shift.data(), outputs, y);
  };
  if (dtype == ScalarType::Float)
    run(static_cast<float*>(out.mutable_data_ptr()));
  else
    run(static_cast<BFloat16*>(out.mutable_data_ptr()));
  return out;
}

Tensor linear_sampled(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, int64_t rows,
                      int64_t width) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "maskwise: linear takes float32 and bfloat16");
  const int64_t n = columns.numel() * rows * width;
  Tensor sums = empty_cpu({n}, ScalarType::Float);
  auto* out = static_cast<float*>(sums.mutable_data_ptr());
  if (x.size(0) == 0) std::fill(out, out + n, 0.0f);
  if (n > 0 && x.size(0) > 0) {
    if (rows == 16)
      sampled_squares(grad, x, starts, columns, out);
    else
      (dtype == ScalarType::Float ? sampled<float> : sampled<BFloat16>)(grad, x, starts, columns, rows, out);
  }
  if (dtype == ScalarType::Float) return sums;
  Tensor rounded = empty_cpu({n}, dtype);
  auto* to = static_cast<BFloat16*>(rounded.mutable_data_ptr());
  parallel(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<BFloat16>(out[i]);
  });
  return rounded;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("linear_product", TORCH_BOX(&maskwise::linear_product));
  m.impl("linear_sampled", TORCH_BOX(&maskwise::linear_sampled));
}
