// Depthwise convolutions over kept runs: nothing is computed outside of what is wanted, and nothing is read outside of
// what is valid. Two orders of memory: planes, of which rows are contiguous, and pixels, of which channels are.
// Compiled once a target: see foreach_target.h.
#include "conv.h"
#include "simd.h"
#if defined(MASKWISE_CONV_ROWS_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_CONV_ROWS_KERNELS_H
#else
#define MASKWISE_CONV_ROWS_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// -- planes ------------------------------------------------------------------------------------------------------------

// The rows of one plane that its runs read, widened, with zeros around them and where nothing is valid. What lies between
// them may be of another plane: it is loaded with the last vector of a run, and discarded.
template <class A>
struct StagedPlane {
  Buffer buffer;
  A* data;

  explicit StagedPlane(const DepthwiseRuns& runs)
      : buffer((runs.rows + 1) * runs.pitch * static_cast<int64_t>(sizeof(A))), data(reinterpret_cast<A*>(buffer.data)) {
    std::memset(data, 0, (runs.rows + 1) * runs.pitch * sizeof(A));
  }

  template <class T>
  void stage(const DepthwiseRuns& runs, int64_t b, const T* plane, int64_t row_stride) {
    for (const StagedBlock& block : runs.blocks_of(b)) {
      A* to = data + block.row * runs.pitch + runs.margin + block.begin;
      const T* from = plane + block.row * row_stride + block.begin;
      const int64_t n = block.end - block.begin;
      if (block.kept == Kept::none) {
        std::memset(to, 0, n * sizeof(A));
      } else if (block.kept == Kept::all) {
        int64_t i = 0;
        for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, load<A>(from + i));
        for (; i < n; ++i) to[i] = static_cast<A>(from[i]);
      } else {
        const uint8_t* bits = runs.valid.line(b, block.row) + block.begin * runs.valid.column;
        for (int64_t i = 0; i < n; ++i) to[i] = bits[i * runs.valid.column] != 0 ? static_cast<A>(from[i]) : A(0);
      }
    }
  }

  // The position of a tap of a coarse row, at its first column; rows outside of the plane are zeros.
  const A* tap(const DepthwiseRuns& runs, int64_t y, int64_t ky) const {
    const int64_t row = y * runs.stride[0] - runs.before[0] + ky * runs.dilation[0];
    return data + (row < 0 || row >= runs.rows ? runs.rows : row) * runs.pitch + runs.margin - runs.before[1];
  }
};

// U vectors of a run.
template <int U, class A>
inline void convolve_vectors(const StagedPlane<A>& plane, const DepthwiseRuns& runs, int64_t y, int64_t x, const A* weight,
                             A bias, Vec<A> (&sums)[U]) {
  for (int u = 0; u < U; ++u) sums[u] = splat<A>(bias);
  for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
    const A* from = plane.tap(runs, y, ky) + x;
    for (int64_t kx = 0; kx < runs.kernel[1]; ++kx, from += runs.dilation[1]) {
      const Vec<A> w = splat<A>(*weight++);
      for (int u = 0; u < U; ++u) sums[u] += w * load<A>(from + u * kLanes<A>);
    }
  }
}

template <class T>
void depthwise_planes(const DepthwiseRuns& runs, const T* x, const T* weight, const T* bias, const Strides& x_strides,
                      T* out, const Strides& out_strides) {
  using A = Acc<T>;
  constexpr int64_t N = kLanes<A>;
  const int64_t taps = runs.kernel[0] * runs.kernel[1];
  parallel_uneven(runs.batch * runs.channels, runs.work, [&](int64_t begin, int64_t end) {
    StagedPlane<A> plane(runs);
    std::vector<A> w(taps);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / runs.channels, c = i % runs.channels;
      if (runs.runs_of(b).empty()) continue;
      plane.stage(runs, b, x + b * x_strides.batch + c * x_strides.channel, x_strides.row);
      for (int64_t t = 0; t < taps; ++t) w[t] = static_cast<A>(weight[c * taps + t]);
      const A start = bias == nullptr ? A(0) : static_cast<A>(bias[c]);
      T* to = out + b * out_strides.batch + c * out_strides.channel;
      for (const Run& run : runs.runs_of(b)) {
        T* line = to + run.row * out_strides.row;
        int64_t at = run.begin;
        for (; at + 4 * N <= run.end; at += 4 * N) {
          Vec<A> sums[4];
          convolve_vectors(plane, runs, run.row, at, w.data(), start, sums);
          for (int u = 0; u < 4; ++u) store(line + at + u * N, sums[u]);
        }
        for (; at < run.end; at += N) {
          Vec<A> sums[1];
          convolve_vectors(plane, runs, run.row, at, w.data(), start, sums);
          store_partial<A>(line + at, run.end - at, sums[0]);
        }
      }
    }
  });
}

// The gradient of the weight, (channels, taps), and of the bias. A channel is one task, so sums do not depend on threads.
template <class T>
void depthwise_planes_weight(const DepthwiseRuns& runs, const T* x, const T* grad, const Strides& x_strides,
                             const Strides& grad_strides, T* weight, T* bias) {
  using A = Acc<T>;
  constexpr int64_t N = kLanes<A>;
  const int64_t taps = runs.kernel[0] * runs.kernel[1];
  parallel(runs.channels, runs.batch * runs.work, [&](int64_t begin, int64_t end) {
    StagedPlane<A> plane(runs);
    std::vector<A> totals((taps + 1) * N);
    for (int64_t c = begin; c < end; ++c) {
      std::fill(totals.begin(), totals.end(), A(0));
      const auto add = [&](int64_t t, Vec<A> v) { store(totals.data() + t * N, load<A>(totals.data() + t * N) + v); };
      for (int64_t b = 0; b < runs.batch; ++b) {
        if (runs.runs_of(b).empty()) continue;
        plane.stage(runs, b, x + b * x_strides.batch + c * x_strides.channel, x_strides.row);
        const T* from = grad + b * grad_strides.batch + c * grad_strides.channel;
        for (const Run& run : runs.runs_of(b)) {
          const T* line = from + run.row * grad_strides.row;
          Vec<A> total = splat<A>(A(0));
          for (int64_t at = run.begin; at < run.end; at += N) total += load_partial<A>(line + at, run.end - at, A(0));
          add(taps, total);
          for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
            const A* row = plane.tap(runs, run.row, ky);
            int64_t kx = 0;
            const auto some = [&](auto count) {
              constexpr int U = decltype(count)::value;
              Vec<A> sums[U];
              for (int u = 0; u < U; ++u) sums[u] = splat<A>(A(0));
              for (int64_t at = run.begin; at < run.end; at += N) {
                const int64_t rest = run.end - at;
                const Vec<A> g = load_partial<A>(line + at, rest, A(0));
                // Not even times zero is anything used that lies behind the run.
                for (int u = 0; u < U; ++u)
                  sums[u] += g * load_partial<A>(row + at + (kx + u) * runs.dilation[1], rest, A(0));
              }
              for (int u = 0; u < U; ++u) add(ky * runs.kernel[1] + kx + u, sums[u]);
              kx += U;
            };
            while (kx + 8 <= runs.kernel[1]) some(std::integral_constant<int, 8>{});
            while (kx + 3 <= runs.kernel[1]) some(std::integral_constant<int, 3>{});
            while (kx < runs.kernel[1]) some(std::integral_constant<int, 1>{});
          }
        }
      }
      for (int64_t t = 0; t <= taps; ++t) {
        A sum = A(0);
        for (int64_t i = 0; i < N; ++i) sum += totals[t * N + i];
        (t < taps ? weight[c * taps + t] : bias[c]) = static_cast<T>(sum);
      }
    }
  });
}

// -- pixels ------------------------------------------------------------------------------------------------------------

// The first position of a tap of a coarse position, or null where it is outside or not valid.
template <class T>
inline const T* tap_of(const DepthwiseRuns& runs, const T* x, const Strides& strides, int64_t b, int64_t y, int64_t at,
                       int64_t ky, int64_t kx) {
  const int64_t row = y * runs.stride[0] - runs.before[0] + ky * runs.dilation[0];
  const int64_t column = at * runs.stride[1] - runs.before[1] + kx * runs.dilation[1];
  if (row < 0 || row >= runs.rows || column < 0 || column >= runs.columns) return nullptr;
  if (runs.valid.data != nullptr && runs.valid.line(b, row)[column * runs.valid.column] == 0) return nullptr;
  return x + b * strides.batch + row * strides.row + column * strides.column;
}

// `weight` and `bias` are in A, the weight with its channels last.
template <class T>
void depthwise_pixels(const DepthwiseRuns& runs, const T* x, const Acc<T>* weight, const Acc<T>* bias,
                      const Strides& x_strides, T* out, const Strides& out_strides) {
  using A = Acc<T>;
  constexpr int64_t N = kLanes<A>;
  constexpr int U = 4;
  const int64_t channels = runs.channels;
  const std::vector<int64_t>& starts = runs.run_starts;
  const auto batch_of = [&](int64_t r) { return std::upper_bound(starts.begin(), starts.end(), r) - starts.begin() - 1; };
  const int64_t each = runs.work * runs.batch * channels / std::max<int64_t>(1, starts.back());
  parallel_uneven(starts.back(), each, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = batch_of(r);
      const Run& run = runs.runs[r];
      for (int64_t at = run.begin; at < run.end; ++at) {
        T* to = out + b * out_strides.batch + run.row * out_strides.row + at * out_strides.column;
        const auto block = [&](int64_t c, auto count, int64_t rest) {
          constexpr int V = decltype(count)::value;
          Vec<A> sums[V];
          for (int u = 0; u < V; ++u) sums[u] = bias == nullptr ? splat<A>(A(0)) : load<A>(bias + c + u * N);
          const A* w = weight + c;
          for (int64_t ky = 0; ky < runs.kernel[0]; ++ky)
            for (int64_t kx = 0; kx < runs.kernel[1]; ++kx, w += runs.padded) {
              const T* from = tap_of(runs, x, x_strides, b, run.row, at, ky, kx);
              if (from == nullptr) continue;
              if (rest > 0) {
                sums[0] += load<A>(w) * load_partial<A>(from + c, rest, A(0));
              } else {
                for (int u = 0; u < V; ++u) sums[u] += load<A>(w + u * N) * load<A>(from + c + u * N);
              }
            }
          if (rest > 0) return store_partial<A>(to + c, rest, sums[0]);
          for (int u = 0; u < V; ++u) store(to + c + u * N, sums[u]);
        };
        int64_t c = 0;
        for (; c + U * N <= channels; c += U * N) block(c, std::integral_constant<int, U>{}, 0);
        for (; c + N <= channels; c += N) block(c, std::integral_constant<int, 1>{}, 0);
        if (c < channels) block(c, std::integral_constant<int, 1>{}, channels - c);
      }
    }
  });
}

// The gradient of the weight, (taps, padded channels), and of the bias, in A. Threads take channels.
template <class T>
void depthwise_pixels_weight(const DepthwiseRuns& runs, const T* x, const T* grad, const Strides& x_strides,
                             const Strides& grad_strides, Acc<T>* weight, Acc<T>* bias) {
  using A = Acc<T>;
  constexpr int64_t N = kLanes<A>;
  parallel(ceil_div(runs.channels, N), runs.batch * runs.work * N, [&](int64_t begin, int64_t end) {
    for (int64_t b = 0; b < runs.batch; ++b)
      for (const Run& run : runs.runs_of(b))
        for (int64_t at = run.begin; at < run.end; ++at) {
          const T* from = grad + b * grad_strides.batch + run.row * grad_strides.row + at * grad_strides.column;
          for (int64_t v = begin; v < end; ++v) {
            const int64_t c = v * N, rest = runs.channels - c;
            store(bias + c, load<A>(bias + c) + load_partial<A>(from + c, rest, A(0)));
          }
          A* w = weight;
          for (int64_t ky = 0; ky < runs.kernel[0]; ++ky)
            for (int64_t kx = 0; kx < runs.kernel[1]; ++kx, w += runs.padded) {
              const T* tap = tap_of(runs, x, x_strides, b, run.row, at, ky, kx);
              if (tap == nullptr) continue;
              for (int64_t v = begin; v < end; ++v) {
                const int64_t c = v * N, rest = runs.channels - c;
                const Vec<A> g = load_partial<A>(from + c, rest, A(0)), value = load_partial<A>(tap + c, rest, A(0));
                store(w + c, load<A>(w + c) + g * value);
              }
            }
        }
  });
}

// -- both --------------------------------------------------------------------------------------------------------------

// Of planes, rows are contiguous; of pixels, channels are.
inline void depthwise(ScalarType dtype, const DepthwiseRuns& runs, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out, bool planes) {
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Acc<T>;
    const auto* from = static_cast<const T*>(x.const_data_ptr());
    const auto* w = static_cast<const T*>(weight.const_data_ptr());
    const auto* start = bias.has_value() ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    if (planes) return depthwise_planes<T>(runs, from, w, start, Strides(x), to, Strides(out));
    const int64_t taps = runs.kernel[0] * runs.kernel[1];
    std::vector<A> transposed(taps * runs.padded, A(0)), added(runs.padded, A(0));
    for (int64_t c = 0; c < runs.channels; ++c) {
      for (int64_t i = 0; i < taps; ++i) transposed[i * runs.padded + c] = static_cast<A>(w[c * taps + i]);
      if (start != nullptr) added[c] = static_cast<A>(start[c]);
    }
    depthwise_pixels<T>(runs, from, transposed.data(), added.data(), Strides(x), to, Strides(out));
  });
}

inline void depthwise_weight(ScalarType dtype, const DepthwiseRuns& runs, const Tensor& x, const Tensor& grad,
                             const Tensor& weight, const Tensor& bias, bool planes) {
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    using A = Acc<T>;
    const auto* from = static_cast<const T*>(x.const_data_ptr());
    const auto* g = static_cast<const T*>(grad.const_data_ptr());
    auto* dw = static_cast<T*>(weight.mutable_data_ptr());
    auto* db = static_cast<T*>(bias.mutable_data_ptr());
    if (planes) return depthwise_planes_weight<T>(runs, from, g, Strides(x), Strides(grad), dw, db);
    const int64_t taps = runs.kernel[0] * runs.kernel[1];
    std::vector<A> sums(taps * runs.padded, A(0)), added(runs.padded, A(0));
    depthwise_pixels_weight<T>(runs, from, g, Strides(x), Strides(grad), sums.data(), added.data());
    for (int64_t c = 0; c < runs.channels; ++c) {
      for (int64_t i = 0; i < taps; ++i) dw[c * taps + i] = static_cast<T>(sums[i * runs.padded + c]);
      db[c] = static_cast<T>(added[c]);
    }
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif
