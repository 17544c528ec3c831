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
      : buffer(runs.height * runs.pitch * static_cast<int64_t>(sizeof(A))), data(reinterpret_cast<A*>(buffer.data)) {
    std::memset(data, 0, runs.height * runs.pitch * sizeof(A));
  }

  template <class T>
  void stage(const DepthwiseRuns& runs, int64_t b, const T* plane, int64_t row_stride) {
    for (const StagedBlock& block : runs.blocks_of(b)) {
      A* to = data + (runs.top + block.row) * runs.pitch + runs.margin + block.begin;
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
        int64_t i = 0;
        if (runs.valid.column == 1)
          for (; i + kLanes<A> <= n; i += kLanes<A>) store(to + i, keep<A>(load<A>(from + i), load_mask<A>(bits + i)));
        for (; i < n; ++i) to[i] = bits[i * runs.valid.column] != 0 ? static_cast<A>(from[i]) : A(0);
      }
    }
  }

  // The position of a tap of a coarse row, at its first column.
  const A* tap(const DepthwiseRuns& runs, int64_t y, int64_t ky) const {
    const int64_t row = y * runs.stride[0] - runs.before[0] + ky * runs.dilation[0];
    return data + (runs.top + row) * runs.pitch + runs.margin - runs.before[1];
  }
};

template <int N>
using Number = std::integral_constant<int, N>;

// R rows of a band times U vectors of N lanes, by S sums each: products of one sum wait for each other.
template <int N, int R, int U, int S, class A>
inline void convolve_vectors(const StagedPlane<A>& plane, const DepthwiseRuns& runs, int64_t y, int64_t x, const A* weight,
                             A bias, Vec<A, N> (&sums)[R][U]) {
  using V = Vec<A, N>;
  V parts[S][R][U];
  for (int s = 0; s < S; ++s)
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) parts[s][r][u] = (s == 0 ? bias : A(0)) - V{};
  const int64_t step = runs.dilation[1], apart = runs.stride[0] * runs.pitch;
  for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
    const A* from = plane.tap(runs, y, ky) + x;
    int64_t kx = 0;
    for (; kx + S <= runs.kernel[1]; kx += S, from += S * step, weight += S)
      for (int s = 0; s < S; ++s) {
        const V w = weight[s] - V{};
        for (int r = 0; r < R; ++r)
          for (int u = 0; u < U; ++u) parts[s][r][u] += w * load<A, N>(from + s * step + r * apart + u * N);
      }
    for (; kx < runs.kernel[1]; ++kx, from += step) {
      const V w = *weight++ - V{};
      for (int r = 0; r < R; ++r)
        for (int u = 0; u < U; ++u) parts[S - 1][r][u] += w * load<A, N>(from + r * apart + u * N);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < U; ++u) {
      sums[r][u] = parts[0][r][u];
      for (int s = 1; s < S; ++s) sums[r][u] += parts[s][r][u];
    }
}

// One vector of N lanes takes as long as two of half as many on some CPUs: ends of runs that fit into a half take one.
template <class A>
constexpr int kHalf = MASKWISE_VECTOR_BYTES == 64 ? kLanes<A> / 2 : kLanes<A>;

// R rows of the columns [begin, end); the rows of the result are `apart`.
template <int R, class T, class A = Acc<T>>
void convolve_band(const StagedPlane<A>& plane, const DepthwiseRuns& runs, const Band& band, const A* weight, A bias, T* line,
                   int64_t apart) {
  constexpr int N = kLanes<A>, H = kHalf<A>;
  int64_t at = band.begin;
  const auto vectors = [&](auto lanes, auto count, auto parts) {
    constexpr int L = decltype(lanes)::value, U = decltype(count)::value, S = decltype(parts)::value;
    for (; U == 1 ? at < band.end : at + U * L <= band.end; at += U * L) {
      if constexpr (U == 1 && L == N && H < N)
        if (band.end - at <= H) return;
      Vec<A, L> sums[R][U];
      convolve_vectors<L, R, U, S>(plane, runs, band.row, at, weight, bias, sums);
      for (int r = 0; r < R; ++r)
        for (int u = 0; u < U; ++u) {
          if constexpr (U == 1) store_partial<A, L>(line + r * apart + at, band.end - at, sums[r][0]);
          else store(line + r * apart + at + u * L, sums[r][u]);
        }
    }
  };
  constexpr Number<N> wide{};
  if constexpr (R == 1) {
    vectors(wide, Number<8>{}, Number<1>{});
    vectors(wide, Number<2>{}, Number<3>{});
    vectors(wide, Number<1>{}, Number<4>{});
    if constexpr (H < N) vectors(Number<H>{}, Number<1>{}, Number<4>{});
  } else {
    vectors(wide, Number<2>{}, Number<1>{});
    vectors(wide, Number<1>{}, Number<2>{});
    if constexpr (H < N) vectors(Number<H>{}, Number<1>{}, Number<2>{});
  }
}

template <class T>
void depthwise_planes(const DepthwiseRuns& runs, const T* x, const T* weight, const T* bias, const Strides& x_strides,
                      T* out, const Strides& out_strides) {
  using A = Acc<T>;
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
      for (const Band& band : runs.bands_of(b)) {
        T* line = to + band.row * out_strides.row;
        if (band.rows == 1) convolve_band<1>(plane, runs, band, w.data(), start, line, out_strides.row);
        else convolve_band<DepthwiseRuns::kBand>(plane, runs, band, w.data(), start, line, out_strides.row);
      }
    }
  });
}

// The gradient of the weight, (channels, taps), and of the bias. A channel is one task, so sums do not depend on threads.
template <class T>
void depthwise_planes_weight(const DepthwiseRuns& runs, const T* x, const T* grad, const Strides& x_strides,
                             const Strides& grad_strides, T* weight, T* bias) {
  using A = Acc<T>;
  constexpr int N = kLanes<A>, H = kHalf<A>;
  // Rows of runs whose gradients stay in the first cache, with what they read.
  constexpr int64_t kRows = 16;
  const int64_t taps = runs.kernel[0] * runs.kernel[1];
  parallel(runs.channels, runs.batch * runs.work, [&](int64_t begin, int64_t end) {
    StagedPlane<A> plane(runs);
    std::vector<A> totals((taps + 1) * N);
    for (int64_t c = begin; c < end; ++c) {
      std::fill(totals.begin(), totals.end(), A(0));
      const auto add = [&](int64_t t, Vec<A> v, Vec<A, H> half) {
        A* to = totals.data() + t * N;
        store(to, load<A>(to) + v);
        store(to, load<A, H>(to) + half);
      };
      for (int64_t b = 0; b < runs.batch; ++b) {
        if (runs.runs_of(b).empty()) continue;
        plane.stage(runs, b, x + b * x_strides.batch + c * x_strides.channel, x_strides.row);
        const T* from = grad + b * grad_strides.batch + c * grad_strides.channel;
        const Slice<Run> all = runs.runs_of(b);
        for (const Run *first = all.begin(), *last = first; first != all.end(); first = last) {
          // The runs of some rows share their sums.
          while (last != all.end() && last->row < first->row + kRows) ++last;
          const auto each_vector = [&](const auto& full, const auto& half) {
            for (const Run* run = first; run != last; ++run) {
              const T* line = from + run->row * grad_strides.row;
              int64_t at = run->begin;
              for (; H < N ? at + H < run->end : at < run->end; at += N) full(*run, line + at, at, run->end - at);
              if (at < run->end) half(*run, line + at, at, run->end - at);
            }
          };
          Vec<A> total{};
          Vec<A, H> total_half{};
          each_vector([&](const Run&, const T* g, int64_t, int64_t n) { total += load_partial<A>(g, n, A(0)); },
                      [&](const Run&, const T* g, int64_t, int64_t n) { total_half += load_partial<A, H>(g, n, A(0)); });
          add(taps, total, total_half);
          for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
            int64_t kx = 0;
            const auto some = [&](auto count) {
              constexpr int U = decltype(count)::value;
              Vec<A> sums[U];
              Vec<A, H> halves[U];
              for (int u = 0; u < U; ++u) sums[u] = Vec<A>{}, halves[u] = Vec<A, H>{};
              // Not even times zero is anything used that lies behind a run.
              each_vector(
                  [&](const Run& run, const T* from_grad, int64_t at, int64_t n) {
                    const A* row = plane.tap(runs, run.row, ky) + at + kx * runs.dilation[1];
                    const Vec<A> g = load_partial<A>(from_grad, n, A(0));
                    for (int u = 0; u < U; ++u) sums[u] += g * load_partial<A>(row + u * runs.dilation[1], n, A(0));
                  },
                  [&](const Run& run, const T* from_grad, int64_t at, int64_t n) {
                    const A* row = plane.tap(runs, run.row, ky) + at + kx * runs.dilation[1];
                    const Vec<A, H> g = load_partial<A, H>(from_grad, n, A(0));
                    for (int u = 0; u < U; ++u) halves[u] += g * load_partial<A, H>(row + u * runs.dilation[1], n, A(0));
                  });
              for (int u = 0; u < U; ++u) add(ky * runs.kernel[1] + kx + u, sums[u], halves[u]);
              kx += U;
            };
            while (kx + 8 <= runs.kernel[1]) some(Number<8>{});
            if (kx + 7 <= runs.kernel[1]) some(Number<7>{});
            if (kx + 5 <= runs.kernel[1]) some(Number<5>{});
            while (kx + 3 <= runs.kernel[1]) some(Number<3>{});
            while (kx < runs.kernel[1]) some(Number<1>{});
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

// The taps of a coarse position that are valid: where each is read, and its number.
template <class T>
struct Taps {
  std::vector<const T*> from;
  std::vector<int64_t> number;
  int64_t count = 0;

  explicit Taps(const DepthwiseRuns& runs) : from(runs.kernel[0] * runs.kernel[1]), number(from.size()) {}

  void find(const DepthwiseRuns& runs, const T* x, const Strides& strides, int64_t b, int64_t y, int64_t at) {
    count = 0;
    const int64_t left = at * runs.stride[1] - runs.before[1];
    for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
      const int64_t row = y * runs.stride[0] - runs.before[0] + ky * runs.dilation[0];
      if (row < 0 || row >= runs.rows) continue;
      const T* line = x + b * strides.batch + row * strides.row;
      const uint8_t* bits = runs.valid.data == nullptr ? nullptr : runs.valid.line(b, row);
      for (int64_t kx = 0, column = left; kx < runs.kernel[1]; ++kx, column += runs.dilation[1]) {
        if (column < 0 || column >= runs.columns) continue;
        from[count] = line + column * strides.column;
        number[count] = ky * runs.kernel[1] + kx;
        count += bits == nullptr || bits[column * runs.valid.column] != 0;
      }
    }
  }
};

// What some neighbouring coarse positions read: for each row of taps the pixels of its columns, and zeros where nothing is
// valid. The taps of a row that reads nothing valid are left out.
template <class T>
struct PixelRows {
  int64_t width;  // columns of a row of taps
  std::vector<const T*> pixels;
  std::vector<int64_t> rows;  // of taps
  std::vector<T> zeros;

  PixelRows(const DepthwiseRuns& runs, int64_t positions)
      : width((positions - 1) * runs.stride[1] + runs.dilation[1] * (runs.kernel[1] - 1) + 1),
        pixels(runs.kernel[0] * width),
        zeros(runs.channels, static_cast<T>(0)) {}

  void find(const DepthwiseRuns& runs, const T* x, const Strides& strides, int64_t b, int64_t y, int64_t at) {
    rows.clear();
    const int64_t left = at * runs.stride[1] - runs.before[1];
    const int64_t first = std::clamp<int64_t>(-left, 0, width), last = std::clamp<int64_t>(runs.columns - left, first, width);
    for (int64_t ky = 0; ky < runs.kernel[0]; ++ky) {
      const int64_t row = y * runs.stride[0] - runs.before[0] + ky * runs.dilation[0];
      if (row < 0 || row >= runs.rows || first == last) continue;
      const T* line = x + b * strides.batch + row * strides.row + left * strides.column;
      const uint8_t* bits = runs.valid.data == nullptr ? nullptr : runs.valid.line(b, row) + left * runs.valid.column;
      const T** to = pixels.data() + rows.size() * width;
      bool any = bits == nullptr;
      for (int64_t i = 0; i < first; ++i) to[i] = zeros.data();
      for (int64_t i = first; i < last; ++i) {
        const bool kept = bits == nullptr || bits[i * runs.valid.column] != 0;
        any |= kept;
        to[i] = kept ? line + i * strides.column : zeros.data();
      }
      for (int64_t i = last; i < width; ++i) to[i] = zeros.data();
      if (any) rows.push_back(ky);
    }
  }
};

// P positions times U vectors of channels from c on: they share the loads of the weight.
template <int P, int U, class T>
void depthwise_block(const DepthwiseRuns& runs, const PixelRows<T>& from, const Acc<T>* weight, const Acc<T>* bias, T* to,
                     int64_t column, int64_t c, int64_t rest) {
  using A = Acc<T>;
  constexpr int64_t N = kLanes<A>;
  Vec<A> sums[P][U];
  for (int p = 0; p < P; ++p)
    for (int u = 0; u < U; ++u) sums[p][u] = load<A>(bias + c + u * N);
  for (size_t r = 0; r < from.rows.size(); ++r) {
    const T* const* pixels = from.pixels.data() + static_cast<int64_t>(r) * from.width;
    const A* w = weight + from.rows[r] * runs.kernel[1] * runs.padded + c;
    for (int64_t kx = 0; kx < runs.kernel[1]; ++kx, pixels += runs.dilation[1], w += runs.padded) {
      Vec<A> each[U];
      for (int u = 0; u < U; ++u) each[u] = load<A>(w + u * N);
      for (int p = 0; p < P; ++p) {
        const T* pixel = pixels[p * runs.stride[1]] + c;
        if constexpr (U == 1) sums[p][0] += each[0] * load_partial<A>(pixel, rest, A(0));
        else
          for (int u = 0; u < U; ++u) sums[p][u] += each[u] * load<A>(pixel + u * N);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    if constexpr (U == 1) store_partial<A>(to + p * column + c, rest, sums[p][0]);
    else
      for (int u = 0; u < U; ++u) store(to + p * column + c + u * N, sums[p][u]);
  }
}

// `weight` and `bias` are in A, the weight with its channels last.
template <class T>
void depthwise_pixels(const DepthwiseRuns& runs, const T* x, const Acc<T>* weight, const Acc<T>* bias,
                      const Strides& x_strides, T* out, const Strides& out_strides) {
  constexpr int64_t N = kLanes<Acc<T>>, kPositions = 4;
  constexpr int kVectors = MASKWISE_VECTOR_BYTES == 64 ? 4 : 2;
  const std::vector<int64_t>& starts = runs.run_starts;
  const auto batch_of = [&](int64_t r) { return std::upper_bound(starts.begin(), starts.end(), r) - starts.begin() - 1; };
  const int64_t each = runs.work * runs.batch * runs.channels / std::max<int64_t>(1, starts.back());
  parallel_uneven(starts.back(), each, [&](int64_t begin, int64_t end) {
    PixelRows<T> four(runs, kPositions), one(runs, 1);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = batch_of(r);
      const Run& run = runs.runs[r];
      int64_t at = run.begin;
      const auto positions = [&](auto count, PixelRows<T>& rows) {
        constexpr int P = decltype(count)::value;
        rows.find(runs, x, x_strides, b, run.row, at);
        T* to = out + b * out_strides.batch + run.row * out_strides.row + at * out_strides.column;
        int64_t c = 0;
        for (; c + kVectors * N <= runs.channels; c += kVectors * N)
          depthwise_block<P, kVectors>(runs, rows, weight, bias, to, out_strides.column, c, N);
        for (; c < runs.channels; c += N)
          depthwise_block<P, 1>(runs, rows, weight, bias, to, out_strides.column, c, runs.channels - c);
        at += P;
      };
      while (at + kPositions <= run.end) positions(std::integral_constant<int, kPositions>{}, four);
      while (at < run.end) positions(std::integral_constant<int, 1>{}, one);
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
    Taps<T> taps(runs);
    for (int64_t b = 0; b < runs.batch; ++b)
      for (const Run& run : runs.runs_of(b))
        for (int64_t at = run.begin; at < run.end; ++at) {
          const T* from = grad + b * grad_strides.batch + run.row * grad_strides.row + at * grad_strides.column;
          taps.find(runs, x, x_strides, b, run.row, at);
          int64_t v = begin;
          const auto block = [&](auto count) {
            constexpr int U = decltype(count)::value;
            const int64_t c = v * N;
            Vec<A> g[U];
            for (int u = 0; u < U; ++u) {
              g[u] = load<A>(from + c + u * N);
              store(bias + c + u * N, load<A>(bias + c + u * N) + g[u]);
            }
            for (int64_t t = 0; t < taps.count; ++t) {
              A* w = weight + taps.number[t] * runs.padded + c;
              for (int u = 0; u < U; ++u) store(w + u * N, load<A>(w + u * N) + g[u] * load<A>(taps.from[t] + c + u * N));
            }
            v += U;
          };
          while (v + 4 <= end && (v + 4) * N <= runs.channels) block(std::integral_constant<int, 4>{});
          while (v < end && (v + 1) * N <= runs.channels) block(std::integral_constant<int, 1>{});
          if (v == end) continue;
          const int64_t c = v * N, rest = runs.channels - c;
          const Vec<A> g = load_partial<A>(from + c, rest, A(0));
          store(bias + c, load<A>(bias + c) + g);
          for (int64_t t = 0; t < taps.count; ++t) {
            A* w = weight + taps.number[t] * runs.padded + c;
            store(w, load<A>(w) + g * load_partial<A>(taps.from[t] + c, rest, A(0)));
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
