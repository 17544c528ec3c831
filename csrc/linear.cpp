// Products with a sparse weight: forward, and the gradient of the kept weights. The gradient of the input is the forward
// product with the transposed weight. Arguments were checked in Python: x is contiguous, (batch, inputs); values, starts
// and columns belong to one layout; all of x's dtype, which is float32 or bfloat16, or int32.
#include "linear.h"

#include <atomic>
#include <optional>

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "linear_gradient.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

// -- how the work is cut: the batch into packed panels, outputs into chunks whose sums stay in the first cache ----------

// Panels that threads share are made for as much of the batch as fits here, so that scratch does not grow with the batch.
constexpr int64_t kPacked = int64_t{1} << 19;

// Runs body(worker, task) for every task in [0, n), each worker taking the next as it finishes one: a core that other
// programs slow down does not keep the rest waiting.
template <class Body>
void parallel_tasks(int64_t workers, int64_t n, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task = next++; task < n; task = next++) body(worker, task);
  };
  if (workers <= 1)
    work(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, work);
}

int64_t threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// The batch in panels of T rows, each packed into a tile of `width` columns.
struct Panels {
  int64_t batch, size, width;

  int64_t count() const { return ceil_div(batch, size); }
  int64_t rows(int64_t panel) const { return std::min(size, batch - panel * size); }
  int64_t tile() const { return width * size; }
  int64_t at_once() const { return std::min(count(), std::max<int64_t>(kPacked / std::max<int64_t>(1, tile()), 1)); }
  Tensor memory(int64_t tiles) const { return empty_cpu({std::max<int64_t>(1, tiles * tile())}, ScalarType::Float); }
};

// Packs panels [first, first + count), one tile after the other, by all threads: pack(panel, from, to, tile) fills
// columns [from, to) of one.
template <class Pack>
void pack_panels(const Panels& panels, int64_t first, int64_t count, float* tiles, const Pack& pack) {
  constexpr int64_t kColumns = 128;
  const int64_t pieces = ceil_div(panels.width, kColumns);
  parallel(count * pieces, kColumns * panels.size, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t within = task / pieces, from = task % pieces * kColumns;
      pack(first + within, from, std::min(from + kColumns, panels.width), tiles + within * panels.tile());
    }
  });
}

// Columns [from, to) of a panel of x, transposed; what lies behind the last input is zero.
template <class S>
auto transposed(const S* x, int64_t inputs, const Panels& panels) {
  return [x, inputs, panels](int64_t panel, int64_t from, int64_t to, float* tile) {
    const int64_t real = std::max(from, std::min(to, inputs));
    MASKWISE_AT_ISA(pack_tile<S>(x + panel * panels.size * inputs, inputs, panels.rows(panel), from, real, panels.size, tile));
    std::fill(tile + real * panels.size, tile + to * panels.size, 0.0f);
  };
}

// The elements of work that a task over a share of all weights is, for the choice of how many threads to wake.
int64_t share(int64_t weights, int64_t tasks, int64_t panel) {
  return std::max<int64_t>(1, weights / std::max<int64_t>(1, tasks)) * panel / 4 + 1;
}

// Runs finish(panel, tile, chunk) for every panel and every chunk of outputs. With many panels each thread packs its
// own, which is then in its own cache; with few, all threads pack together and share out the outputs.
template <class Pack, class Finish>
void panel_product(const Panels& panels, int64_t chunks, int64_t weights, const Pack& pack, const Finish& finish) {
  const int64_t workers = threads(), count = panels.count();
  if (count >= 4 * workers) {
    Tensor memory = panels.memory(workers);
    auto* tiles = static_cast<float*>(memory.mutable_data_ptr());
    parallel_tasks(weights * panels.batch / 4 < kGrain ? 1 : workers, count, [&](int64_t worker, int64_t s) {
      float* tile = tiles + worker * panels.tile();
      pack(s, 0, panels.width, tile);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) finish(s, tile, chunk);
    });
    return;
  }
  const int64_t step = panels.at_once();
  Tensor memory = panels.memory(step);
  auto* tiles = static_cast<float*>(memory.mutable_data_ptr());
  for (int64_t first = 0; first < count; first += step) {
    const int64_t now = std::min(step, count - first);
    pack_panels(panels, first, now, tiles, pack);
    parallel(now * chunks, share(weights, chunks, panels.size), [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task)
        finish(first + task / chunks, tiles + task / chunks * panels.tile(), task % chunks);
    });
  }
}

// The product by sums that are transposed: walk(tile, begin, end, sums) makes those of outputs [begin, end), T
// each, where begin is a multiple of `chunk`.
template <class S, class Walk>
void transposed_product(const S* x, int64_t inputs, const Panels& panels, int64_t outputs, int64_t chunk, int64_t weights,
                    const float* bias, S* y, const Walk& walk) {
  const auto finish = [&](int64_t s, const float* tile, int64_t task) {
    alignas(64) float sums[kSums];
    const int64_t begin = task * chunk, end = std::min(begin + chunk, outputs);
    walk(tile, begin, end, sums);
    MASKWISE_AT_ISA(unpack_tile<S>(sums, panels.size, panels.rows(s), end - begin,
                                   bias == nullptr ? nullptr : bias + begin, y + s * panels.size * outputs + begin, outputs));
  };
  panel_product(panels, ceil_div(outputs, chunk), weights, transposed(x, inputs, panels), finish);
}

// -- the products --------------------------------------------------------------------------------------------------------

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
  // Reading a tensor's pointer is a call across the library's border: once, not in a loop.
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
  const RowPlan plan = MASKWISE_AT_ISA(plan_rows(batch, inputs, outputs, pieces, weights));
  // A column of zeros behind the inputs, for the weights that fill up a row's last four.
  const Panels panels{batch, plan.panel, inputs + 1};
  transposed_product(static_cast<const S*>(x.const_data_ptr()), inputs, panels, outputs, plan.sums / plan.panel, weights, bias,
                 y, [&](const float* tile, int64_t begin, int64_t end, float* sums) {
                   plan.run(tile, values, at_columns, at_starts, pieces, plan.step, begin, end,
                            static_cast<int32_t>(inputs), sums);
                 });
}

template <class S>
void quads_product(const Tensor& x, const float* values, const Tensor& starts, const Tensor& columns, const float* bias,
                   int64_t outputs, S* y) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), weights = columns.numel() * 4;
  if (batch == 1) {
    const Floats in(x);
    vector_product(outputs, weights, bias, y, [&](int64_t begin, int64_t end, float* sums) {
      MASKWISE_AT_ISA(vector_quads(in.data, values, at_columns, at_starts, begin / 4, ceil_div(end, 4), sums));
    });
    return;
  }
  MultiplyQuads run;
  int64_t panel;
  MASKWISE_AT_ISA(plan_quads(batch, inputs, &run, &panel));
  const Panels panels{batch, panel, inputs};
  transposed_product(static_cast<const S*>(x.const_data_ptr()), inputs, panels, outputs, kSums / (panel * 4) * 4, weights, bias, y,
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
void blocks_product(const Tensor& x, const float* values, const Tensor& starts, const Tensor& columns,
                     const float* bias, int64_t outputs, S* y) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), blocks = columns.numel(), weights = blocks * 256;
  if (batch == 1) {
    const Tensor padded = padded_floats(x, 16);
    const auto* in = static_cast<const float*>(padded.const_data_ptr());
    vector_product(outputs, weights, bias, y, [&](int64_t begin, int64_t end, float* sums) {
      MASKWISE_AT_ISA(vector_blocks(in, values, at_columns, at_starts, begin / 16, ceil_div(end, 16), sums));
    });
    return;
  }
  Tensor memory = empty_cpu({std::max<int64_t>(1, weights)}, ScalarType::Float);
  auto* transposed_blocks = static_cast<float*>(memory.mutable_data_ptr());
  parallel(blocks, 256, [&](int64_t begin, int64_t end) { MASKWISE_AT_ISA(transpose_blocks(values, begin, end, transposed_blocks)); });
  // Batch rows that stay in the second cache while all rows of blocks pass; those are dense, and take less space.
  constexpr int64_t kBudget = 81920, kGroup = 12, kMost = 8 * kGroup, kBlockRows = 8;
  const int64_t padded = ceil_div(inputs, 16) * 16;
  const int64_t fitting = std::max<int64_t>(1, kBudget / std::max<int64_t>(1, padded) / kGroup) * kGroup;
  const Panels panels{batch, std::min(fitting, kMost), padded};
  const int64_t block_rows = ceil_div(outputs, 16);
  const auto* from = static_cast<const S*>(x.const_data_ptr());
  panel_product(
      panels, ceil_div(block_rows, kBlockRows), weights,
      [&](int64_t s, int64_t begin, int64_t end, float* tile) {
        MASKWISE_AT_ISA(pack_blocks<S>(from + s * panels.size * inputs, inputs, panels.rows(s), begin, end, panels.size, tile));
      },
      [&](int64_t s, const float* tile, int64_t chunk) {
        const int64_t end = std::min((chunk + 1) * kBlockRows, block_rows);
        for (int64_t r = chunk * kBlockRows; r < end; ++r) {
          const int64_t n = r * 16, count = std::min<int64_t>(16, outputs - n);
          float shift[16] = {};
          if (bias != nullptr) std::copy(bias + n, bias + n + count, shift);
          MASKWISE_AT_ISA(multiply_blocks<S>(tile, panels.size, panels.rows(s), transposed_blocks, at_columns, at_starts[r],
                                          at_starts[r + 1], shift, y + s * panels.size * outputs + n, outputs, count));
        }
      });
}

// The gradient of the kept weights in float; pieces of columns, or blocks of 4 x 1.
template <class S>
void sampled(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, int64_t rows, float* out) {
  const int32_t *at_starts = ints(starts), *at_columns = ints(columns);
  const int64_t batch = x.size(0), inputs = x.size(1), outputs = grad.size(1);
  int64_t panel;
  MASKWISE_AT_ISA(sample_panel(&panel));
  const int64_t all = ceil_div(outputs, rows), weights = columns.numel() * rows;
  const int64_t pieces = (starts.numel() - 1) / all;
  // Ranges of columns that stay in the second cache while all outputs of a thread pass.
  const int64_t together = std::max<int64_t>(1, kSecondCache / std::max<int64_t>(1, ceil_div(inputs, pieces) * panel));
  if (batch == 1 && rows == 1) {
    const Floats one(x), above(grad);
    parallel(outputs, share(weights, outputs, 4), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t p = at_starts[n * pieces]; p < at_starts[(n + 1) * pieces]; ++p)
          out[p] = above.data[n] * one.data[at_columns[p]];
    });
    return;
  }
  const Panels in{batch, panel, inputs}, up{batch, panel, all * rows};
  const int64_t step = std::min(in.at_once(), up.at_once());
  Tensor in_memory = in.memory(step), up_memory = up.memory(step);
  auto* in_tiles = static_cast<float*>(in_memory.mutable_data_ptr());
  auto* up_tiles = static_cast<float*>(up_memory.mutable_data_ptr());
  constexpr int64_t kRows = 16;
  const int64_t chunks = ceil_div(all, kRows);
  for (int64_t first = 0; first < in.count(); first += step) {
    const int64_t now = std::min(step, in.count() - first);
    pack_panels(in, first, now, in_tiles, transposed(static_cast<const S*>(x.const_data_ptr()), inputs, in));
    pack_panels(up, first, now, up_tiles, transposed(static_cast<const S*>(grad.const_data_ptr()), outputs, up));
    // A task owns the weights of its outputs, so the sums do not depend on the number of threads.
    parallel(chunks, share(weights, chunks, panel) * now, [&](int64_t from, int64_t to) {
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
            MASKWISE_AT_ISA(sample_quads(grads + r * 4 * panel, tile, at_columns, a, b, fresh, out));
          }
        }
      }
    });
  }
}

void sampled_blocks(const Tensor& grad, const Tensor& x, const Tensor& starts, const Tensor& columns, float* out) {
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
      quads_product(x, weights.data, starts, columns, shift.data(), outputs, y);
    else
      blocks_product(x, weights.data, starts, columns, shift.data(), outputs, y);
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
      sampled_blocks(grad, x, starts, columns, out);
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
