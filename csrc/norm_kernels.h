// Scale and shift of kept elements, and its gradients. Compiled once a target, through norm.cpp.
#include "norm.h"
#include "simd.h"
#if defined(MASKWISE_NORM_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_NORM_KERNELS_H
#else
#define MASKWISE_NORM_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// The vectors of a run of n elements. The last one overlaps the one before it, whose elements are then written twice; that
// of a run which is shorter than a vector is not whole, which `Whole` says as a constant.
template <class A, class Body>
inline void for_each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) body(i, std::true_type{});
  if (i == n) return;
  if (n > kLanes<A>)
    body(n - kLanes<A>, std::true_type{});
  else
    body(i, std::false_type{});
}

// Elements of a run from i on.
template <class A, class Whole, class T>
inline Vec<A> load_run(const T* p, int64_t i, int64_t n, Whole whole) {
  if constexpr (whole) return load<A>(p + i);
  else return load_partial<A>(p + i, n - i, A(0));
}

template <class A, class Whole, class T>
inline void store_run(T* p, int64_t i, int64_t n, Vec<A> v, Whole whole) {
  if constexpr (whole) store<false>(p + i, v);
  else store_partial<A>(p + i, n - i, v);
}

// Numbers of slices along a run: one for each element, or one for all.
template <class A>
struct Numbers {
  const A* p;
  bool one;
  Vec<A> same;
  Numbers(char* const* at, const int64_t* stride, int o)
      : p(reinterpret_cast<const A*>(at[o])), one(stride[o] == 0), same(splat<A>(*p)) {}
  template <class Whole>
  Vec<A> operator()(int64_t i, int64_t n, Whole whole) const {
    return one ? same : load_run<A>(p, i, n, whole);
  }
};

// The mask of a run: of bits what they say, else everything.
struct RunBits {
  const uint8_t* m;
  explicit RunBits(Kept keeps, const char* at)
      : m(keeps == Kept::bits ? reinterpret_cast<const uint8_t*>(at) : nullptr) {}
  template <class A, class Whole>
  Vec<A> keep_of(Vec<A> v, int64_t i, int64_t n, Whole whole) const {
    if (m == nullptr) return v;
    if constexpr (whole) return keep<A>(v, load_mask<A>(m + i));
    uint8_t bytes[kLanes<A>] = {};
    std::memcpy(bytes, m + i, std::min<int64_t>(kLanes<A>, n - i));
    return keep<A>(v, load_mask<A>(bytes));
  }
};

// a * b + c, rounded once, as torch's own batch norm rounds. The compiler fuses whole vectors by itself, and not the last.
template <class A, class Whole>
inline Vec<A> fused(Vec<A> a, Vec<A> b, Vec<A> c, Whole whole) {
  if constexpr (whole) return a * b + c;
  for (int k = 0; k < kLanes<A>; ++k) c[k] = std::fma(a[k], b[k], c[k]);
  return c;
}

// x * scale + shift where kept, 0 elsewhere. Operands: x, mask, scale, shift, result.
template <class T>
void scale_shift_run(Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const RunBits bits(keeps, at[1]);
  const Numbers<A> scale(at, stride, 2), shift(at, stride, 3);
  auto* out = reinterpret_cast<T*>(at[4]);
  for_each_vector<A>(n, [&](int64_t i, auto whole) {
    const Vec<A> v = fused<A>(load_run<A>(x, i, n, whole), scale(i, n, whole), shift(i, n, whole), whole);
    store_run<A>(out, i, n, bits.template keep_of<A>(v, i, n, whole), whole);
  });
}

// grad * (x - mean), of dropped elements too: what sums it up leaves them out. Operands: x, mask, mean, grad, result.
template <class T>
void product_run(Kept, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const Numbers<A> mean(at, stride, 2);
  const auto* grad = reinterpret_cast<const T*>(at[3]);
  auto* out = reinterpret_cast<A*>(at[4]);
  for_each_vector<A>(n, [&](int64_t i, auto whole) {
    const Vec<A> centred = load_run<A>(x, i, n, whole) - mean(i, n, whole);
    store_run<A>(out, i, n, centred * load_run<A>(grad, i, n, whole), whole);
  });
}

// The gradient in the type that it is accumulated in. Operands: grad, mask, result.
template <class T>
void widen_run(Kept, char* const* at, const int64_t*, int64_t n) {
  using A = Acc<T>;
  const auto* grad = reinterpret_cast<const T*>(at[0]);
  auto* out = reinterpret_cast<A*>(at[2]);
  for_each_vector<A>(n, [&](int64_t i, auto whole) { store_run<A>(out, i, n, load_run<A>(grad, i, n, whole), whole); });
}

// scale * (grad + shift - (x - mean) * slope) where it is kept, 0 elsewhere. Centred before it is scaled: where few are
// kept, or the mean is large beside the deviation, all but the last digits cancel. Operands: x, mask, mean, slope, scale,
// shift, grad, result.
template <class T>
void norm_gradient_run(Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
  using A = Acc<T>;
  const auto* x = reinterpret_cast<const T*>(at[0]);
  const RunBits bits(keeps, at[1]);
  const Numbers<A> mean(at, stride, 2), slope(at, stride, 3), scale(at, stride, 4), shift(at, stride, 5);
  const auto* grad = reinterpret_cast<const T*>(at[6]);
  auto* out = reinterpret_cast<T*>(at[7]);
  for_each_vector<A>(n, [&](int64_t i, auto whole) {
    const Vec<A> centred = load_run<A>(x, i, n, whole) - mean(i, n, whole);
    const Vec<A> of_grad = load_run<A>(grad, i, n, whole) + shift(i, n, whole);
    const Vec<A> v = (of_grad - centred * slope(i, n, whole)) * scale(i, n, whole);
    store_run<A>(out, i, n, bits.template keep_of<A>(v, i, n, whole), whole);
  });
}

// Calls add(lane, v, keep) for the vectors of a run, with four lanes of accumulators in turn. Dropped elements are those
// of which keep(v) is 0. Behind the end of the run stands `other`.
template <class T, class Add>
inline void for_each_kept_vector(const char* x, const MomentRun& run, Acc<T> other, const Add& add) {
  using A = Acc<T>;
  const auto* p = reinterpret_cast<const T*>(x + run.x);
  const RunBits bits(run.mask == nullptr ? Kept::all : Kept::bits, reinterpret_cast<const char*>(run.mask));
  int64_t i = 0;
  const int64_t n = run.n;
  if (run.mask == nullptr)
    for (; i + 4 * kLanes<A> <= n; i += 4 * kLanes<A>)
      for (int l = 0; l < 4; ++l) add(l, load<A>(p + i + l * kLanes<A>), [](Vec<A> v) { return v; });
  for (; i + kLanes<A> <= n; i += kLanes<A>)
    add(0, load<A>(p + i), [&](Vec<A> v) { return bits.template keep_of<A>(v, i, n, std::true_type{}); });
  if (i < n)
    add(1, load_partial<A>(p + i, n - i, other),
        [&](Vec<A> v) { return bits.template keep_of<A>(v, i, n, std::false_type{}); });
}

// Four vectors of sums, which are added up in double before they lose digits.
template <class A>
struct LaneSums {
  Vec<A> lanes[4] = {};
  double total = 0;
  void flush() {
    for (Vec<A>& v : lanes) {
      for (int k = 0; k < kLanes<A>; ++k) total += static_cast<double>(v[k]);
      v = Vec<A>{};
    }
  }
};

// Two passes, of which the second reads from a near cache. It corrects the mean of the first one, and so does not depend
// on its rounding (Chan, Golub and LeVeque). What leaves the range of float32 is done again in float64.
template <class T>
SliceMoments moments_of(const char* x, const std::vector<MomentRun>& runs, int64_t kept) {
  using A = Acc<T>;
  constexpr int64_t kFlush = 16384;
  constexpr int64_t kAheadBytes = 1024;
  const auto for_each = [&](A other, const auto& add, const auto& flush) {
    int64_t since = 0;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (r + 1 < runs.size()) {
        const MomentRun& next = runs[r + 1];
        const int64_t bytes = std::min<int64_t>(next.n * static_cast<int64_t>(sizeof(T)), kAheadBytes);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + next.x + i);
      }
      // A long run in parts, so that no lane adds up many.
      for (int64_t i = 0; i < runs[r].n; i += kFlush) {
        const MomentRun part{runs[r].x + i * static_cast<int64_t>(sizeof(T)),
                            runs[r].mask == nullptr ? nullptr : runs[r].mask + i, std::min(kFlush, runs[r].n - i)};
        for_each_kept_vector<T>(x, part, other, add);
        if ((since += part.n) >= kFlush) {
          flush();
          since = 0;
        }
      }
    }
    flush();
  };
  const auto count = static_cast<double>(kept);
  LaneSums<A> sums;
  for_each(A(0), [&](int l, Vec<A> v, const auto& keep_of) { sums.lanes[l] += keep_of(v); }, [&] { sums.flush(); });
  const auto centre = static_cast<A>(sums.total / count);
  LaneSums<A> rest, squares;
  // What is centred is 0 behind the end of a run.
  for_each(
      centre,
      [&](int l, Vec<A> v, const auto& keep_of) {
        const Vec<A> apart = keep_of(v - splat<A>(centre));
        rest.lanes[l] += apart;
        squares.lanes[l] += apart * apart;
      },
      [&] { rest.flush(), squares.flush(); });
  SliceMoments found{static_cast<double>(centre) + rest.total / count,
                     std::max(0.0, squares.total - rest.total * rest.total / count) / count};
  if constexpr (std::is_same_v<A, float>) {
    // Where every square is 0, as in a channel of zeros, so is the variance in float32.
    const bool in_range = found.var > 1e-30 && found.var <= std::numeric_limits<double>::max();
    if (in_range || squares.total == 0) return found;
    const auto each = [&](const auto& add) {
      for (const MomentRun& run : runs)
        for (int64_t i = 0; i < run.n; ++i)
          if (run.mask == nullptr || run.mask[i] != 0) add(static_cast<double>(reinterpret_cast<const T*>(x + run.x)[i]));
    };
    found = {};
    each([&](double v) { found.mean += v; });
    found.mean /= count;
    each([&](double v) { found.var += (v - found.mean) * (v - found.mean); });
    found.var /= count;
  }
  return found;
}

inline MomentsOf moments_kernel(ScalarType dtype) {
  MomentsOf found = nullptr;
  dispatch_floating(dtype, [&](auto t) { found = &moments_of<decltype(t)>; });
  return found;
}

inline NormRuns norm_runs(ScalarType dtype) {
  NormRuns runs;
  dispatch_floating(dtype, [&](auto t) {
    using T = decltype(t);
    runs = {&scale_shift_run<T>, &product_run<T>, &widen_run<T>, &norm_gradient_run<T>};
  });
  return runs;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
