// Products with a sparse weight: forward, and the gradient of the kept weights. The gradient of the input is the forward
// product with the transposed weight. Arguments were checked in Python: x is contiguous, (batch, inputs); values, starts
// and columns belong to one layout; all of x's dtype, which is float32 or bfloat16, or int32.
#include "common.h"

#include <optional>

namespace maskwise {
// The inner loops, as each SIMD level gives them: see linear_kernels.h for the arguments.
using WalkRows = void (*)(const float*, const float*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, float*);
using WalkBlocks = void (*)(const float*, const float*, const int32_t*, int64_t, int64_t, float*);
}  // namespace maskwise

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "linear_isa.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

// Sums of one task stay in the first cache: this many floats.
constexpr int64_t kSums = 4096;
// Packed strips of the batch are made for as much of it as fits here, so that scratch does not grow with the batch.
constexpr int64_t kPacked = int64_t{1} << 19;

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
  const float* at(int64_t n) const { return held.has_value() ? held->data + n : nullptr; }
};

// The batch as packed strips, a group of them at a time: run(group, first strip, strips) for each.
template <class S>
class Strips {
 public:
  Strips(const S* x, int64_t batch, int64_t inputs, int64_t padded, int64_t strip)
      : x_(x), batch_(batch), inputs_(inputs), padded_(padded), strip_(strip), count_(ceil_div(batch, strip)) {
    const int64_t room = std::max<int64_t>(kPacked / std::max<int64_t>(1, padded * strip), 1);
    at_once_ = std::min(count_, room);
    memory_ = empty_cpu({std::max<int64_t>(1, at_once_ * padded * strip)}, ScalarType::Float);
    data_ = static_cast<float*>(memory_.mutable_data_ptr());
  }

  int64_t count() const { return count_; }
  int64_t at_once() const { return at_once_; }
  int64_t rows(int64_t strip) const { return std::min(strip_, batch_ - strip * strip_); }
  const float* tile(int64_t within) const { return data_ + within * padded_ * strip_; }

  void pack(int64_t first, int64_t strips) {
    constexpr int64_t kColumns = 128;
    const int64_t pieces = std::max<int64_t>(1, ceil_div(padded_, kColumns));
    parallel(strips * pieces, kColumns * strip_, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t within = task / pieces, strip = first + within;
        const int64_t from = task % pieces * kColumns, to = std::min(from + kColumns, padded_);
        float* tile = data_ + within * padded_ * strip_;
        const int64_t real = std::max(from, std::min(to, inputs_));
        MASKWISE_AT_ISA(pack_tile<S>(x_ + strip * strip_ * inputs_, inputs_, rows(strip), from, real, strip_, tile));
        std::fill(tile + real * strip_, tile + to * strip_, 0.0f);
      }
    });
  }

 private:
  const S* x_;
  int64_t batch_, inputs_, padded_, strip_, count_, at_once_;
  Tensor memory_;
  float* data_;
};

// The elements of work that a task over a share of all weights is, for the choice of how many threads to wake.
int64_t share(int64_t weights, int64_t tasks, int64_t strip) {
  return std::max<int64_t>(1, weights / std::max<int64_t>(1, tasks)) * strip / 4 + 1;
}

template <class S>
void rows_product(const Tensor& x, const Floats& values, const Tensor& starts, const Tensor& columns,
                  const OptionalFloats& bias, int64_t outputs, Tensor& out) {
  // Asking a tensor for its memory is a call across the library's border: once, not in a loop.
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), weights = columns.numel();
  const int64_t pieces = (starts.numel() - 1) / outputs;
  auto* y = static_cast<S*>(out.mutable_data_ptr());
  if (batch == 1) {
    const Floats in(x);
    constexpr int64_t kRows = 64;
    parallel(ceil_div(outputs, kRows), share(weights, outputs / kRows, 4), [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t begin = task * kRows, end = std::min(begin + kRows, outputs);
        float sums[kRows];
        MASKWISE_AT_ISA(walk_vector(in.data, values.data, at_columns, at_starts, pieces, begin, end, sums));
        for (int64_t n = begin; n < end; ++n)
          y[n] = static_cast<S>(sums[n - begin] + (bias.at(0) == nullptr ? 0.0f : *bias.at(n)));
      }
    });
    return;
  }
  WalkRows run;
  int64_t strip;
  MASKWISE_AT_ISA(row_walk(batch, inputs, &run, &strip));
  Strips<S> strips(static_cast<const S*>(x.const_data_ptr()), batch, inputs, inputs, strip);
  const int64_t chunk = kSums / strip, chunks = ceil_div(outputs, chunk);
  for (int64_t first = 0; first < strips.count(); first += strips.at_once()) {
    const int64_t now = std::min(strips.at_once(), strips.count() - first);
    strips.pack(first, now);
    parallel(now * chunks, share(weights, chunks, strip), [&](int64_t from, int64_t to) {
      alignas(64) float sums[kSums];
      for (int64_t task = from; task < to; ++task) {
        const int64_t within = task / chunks, s = first + within;
        const int64_t begin = task % chunks * chunk, end = std::min(begin + chunk, outputs);
        run(strips.tile(within), values.data, at_columns, at_starts, pieces, begin, end, sums);
        MASKWISE_AT_ISA(unpack_tile<S>(sums, strip, strips.rows(s), end - begin, bias.at(begin), y + s * strip * outputs + begin, outputs));
      }
    });
  }
}

template <class S>
void blocks_product(const Tensor& x, const Floats& values, const Tensor& starts, const Tensor& columns,
                    const OptionalFloats& bias, int64_t outputs, int64_t rows, int64_t width, Tensor& out) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), weights = columns.numel() * rows * width;
  auto* y = static_cast<S*>(out.mutable_data_ptr());
  WalkBlocks run;
  int64_t strip;
  MASKWISE_AT_ISA(block_walk_of(rows, batch, &run, &strip));
  Strips<S> strips(static_cast<const S*>(x.const_data_ptr()), batch, inputs, ceil_div(inputs, width) * width, strip);
  const int64_t block_rows = ceil_div(outputs, rows), each = std::max<int64_t>(1, kSums / (strip * rows));
  const int64_t chunks = ceil_div(block_rows, each);
  for (int64_t first = 0; first < strips.count(); first += strips.at_once()) {
    const int64_t now = std::min(strips.at_once(), strips.count() - first);
    strips.pack(first, now);
    parallel(now * chunks, share(weights, chunks, strip), [&](int64_t from, int64_t to) {
      alignas(64) float sums[kSums];
      for (int64_t task = from; task < to; ++task) {
        const int64_t within = task / chunks, s = first + within;
        const int64_t begin = task % chunks * each, end = std::min(begin + each, block_rows);
        for (int64_t r = begin; r < end; ++r)
          run(strips.tile(within), values.data, at_columns, at_starts[r], at_starts[r + 1], sums + (r - begin) * rows * strip);
        const int64_t n = begin * rows, count = std::min(end * rows, outputs) - n;
        MASKWISE_AT_ISA(unpack_tile<S>(sums, strip, strips.rows(s), count, bias.at(n), y + s * strip * outputs + n, outputs));
      }
    });
  }
}

// The gradient of the kept weights in float; pieces of columns, or blocks of 4 x 1.
template <class S>
void sampled(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, int64_t rows, float* out) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), outputs = grad.size(1);
  int64_t strip;
  MASKWISE_AT_ISA(sample_strip(&strip));
  const int64_t padded = ceil_div(outputs, rows) * rows, all = padded / rows, weights = columns.numel() * rows;
  const int64_t pieces = (starts.numel() - 1) / all;
  if (batch == 1 && rows == 1) {
    const Floats one(x), above(grad);
    parallel(outputs, share(weights, outputs, 4), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t p = at_starts[n * pieces]; p < at_starts[(n + 1) * pieces]; ++p)
          out[p] = above.data[n] * one.data[at_columns[p]];
    });
    return;
  }
  Strips<S> in(static_cast<const S*>(x.const_data_ptr()), batch, inputs, inputs, strip);
  Strips<S> up(static_cast<const S*>(grad.const_data_ptr()), batch, outputs, padded, strip);
  const int64_t step = std::min(in.at_once(), up.at_once());
  constexpr int64_t kRows = 16;
  const int64_t chunks = ceil_div(all, kRows);
  for (int64_t first = 0; first < in.count(); first += step) {
    const int64_t now = std::min(step, in.count() - first);
    in.pack(first, now);
    up.pack(first, now);
    // A task owns the weights of its outputs, so the sums do not depend on the number of threads.
    parallel(chunks, share(weights, chunks, strip) * now, [&](int64_t from, int64_t to) {
      for (int64_t within = 0; within < now; ++within) {
        const bool fresh = first + within == 0;
        const float* tile = in.tile(within);
        const float* grads = up.tile(within);
        const int64_t begin = from * kRows, end = std::min(to * kRows, all);
        if (rows == 1) {
          MASKWISE_AT_ISA(sample_rows(grads, tile, at_columns, at_starts, pieces, begin, end, fresh, out));
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
                      const std::optional<Tensor>& bias, int64_t outputs, int64_t rows, int64_t width) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "maskwise: linear takes float32 and bfloat16");
  Tensor out = empty_cpu({x.size(0), outputs}, dtype);
  if (out.numel() == 0) return out;
  const Floats weights(values);
  const OptionalFloats shift(bias);
  const bool wide = dtype == ScalarType::Float;
  if (rows == 1)
    (wide ? rows_product<float> : rows_product<BFloat16>)(x, weights, starts, columns, shift, outputs, out);
  else
    (wide ? blocks_product<float> : blocks_product<BFloat16>)(x, weights, starts, columns, shift, outputs, rows, width, out);
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
