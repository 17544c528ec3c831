// The running maximum and minimum with their places, and the gradient of both. Compiled once a target, through scan.cpp.
#include "scan_columns.h"
#include "scan_fold.h"
#if defined(MASKWISE_SCAN_EXTREME_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SCAN_EXTREME_H
#else
#define MASKWISE_SCAN_EXTREME_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What values are compared as: half precision has no lanes of its own, and bools are 0 and 1.
template <class T>
using OrderOf = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float,
                                   std::conditional_t<std::is_same_v<T, Bool>, uint8_t, T>>;

template <class T, bool kMax>
struct CumExtreme {
  using A = OrderOf<T>;
  static constexpr int L = kLanes<A>;
  // Places stand behind the values: 8 bytes a column each.
  static constexpr Scan scan() { return {4, 2, {sizeof(T), 1, sizeof(int64_t), sizeof(T)}, 1, 0, -1, false}; }

  static A worst() {
    using Limits = std::numeric_limits<A>;
    if (std::is_same_v<T, Bool>) return static_cast<A>(kMax ? 0 : 1);
    if (Limits::has_infinity) return kMax ? -Limits::infinity() : Limits::infinity();
    return kMax ? Limits::lowest() : Limits::max();
  }

  // Whether v takes the place of the running value: the latest of equals does, and NaN does always.
  static bool takes(A v, A running) { return (kMax ? v >= running : v <= running) || v != v; }
  static LaneMask<A> takes(Vec<A> v, Vec<A> running) {
    return (LaneMask<A>)(kMax ? v >= running : v <= running) | (LaneMask<A>)(v != v);
  }

  struct Row {
    A value;
    int64_t place;
  };
  static int64_t* places_of(void* state) { return reinterpret_cast<int64_t*>(static_cast<A*>(state) + kScanColumns); }

  static void init(void* state, int64_t begin, int64_t end) {
    std::fill_n(static_cast<A*>(state) + begin, end - begin, worst());
    std::fill_n(places_of(state) + begin, end - begin, int64_t{-1});
  }

  static void row(void* state, char* const* at, int64_t n, const int64_t* first) {
    const T* x = reinterpret_cast<const T*>(at[0]);
    const auto* m = reinterpret_cast<const uint8_t*>(at[kRows]);
    auto* places = reinterpret_cast<int64_t*>(at[2 * kRows]);
    T* values = reinterpret_cast<T*>(at[3 * kRows]);
    A running = *static_cast<A*>(state);
    int64_t place = *places_of(state);
    int64_t i = 0;
    while (i < n) {
      const int64_t count = std::min<int64_t>(L, n - i);
      bool some = true;
      if (count == L) some = any_lane(load_mask<A>(m + i) & takes(load_kept<A>(At{at, kRows}, x + i, m + i), splat<A>(running)));
      if (!some) {
        // Most stretches bring nothing new.
        store(values + i, splat<A>(running));
        for (int k = 0; k < L; k += kLanes<int64_t>) store(places + i + k, splat<int64_t>(place));
      } else {
        for (int64_t k = i; k < i + count; ++k) {
          if (const A v = m[k] ? static_cast<A>(x[k]) : A{}; m[k] && takes(v, running)) {
            running = v;
            place = *first + k;
          }
          values[k] = static_cast<T>(running);
          places[k] = place;
        }
      }
      i += count;
    }
    *static_cast<A*>(state) = running;
    *places_of(state) = place;
  }

  static void drop(void* state, int, char* const* at, int64_t n) {
    std::fill_n(reinterpret_cast<int64_t*>(at[2]), n, *places_of(state));
    std::fill_n(reinterpret_cast<T*>(at[3]), n, static_cast<T>(*static_cast<A*>(state)));
  }

  static void columns(void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t step,
                      int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      char* const here[] = {at[0] + i * next[0], at[1] + i * next[1], at[2] + i * next[2], at[3] + i * next[3]};
      columns(state, here, begin, end, step + i);
    }
  }

  static void drop_columns(void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t count) {
    const A* running = static_cast<const A*>(state);
    for (int64_t i = 0; i < count; ++i) {
      auto* places = reinterpret_cast<int64_t*>(at[2] + i * next[2]);
      T* values = reinterpret_cast<T*>(at[3] + i * next[3]);
      std::copy(places_of(state) + begin, places_of(state) + end, places + begin);
      int64_t j = begin;
      for (; j + L <= end; j += L) store(values + j, load_raw<Vec<A>>(running + j));
      for (; j < end; ++j) values[j] = static_cast<T>(running[j]);
    }
  }

  static void columns(void* state, char* const* at, int64_t begin, int64_t end, int64_t step) {
    const T* x = reinterpret_cast<const T*>(at[0]);
    const auto* m = reinterpret_cast<const uint8_t*>(at[1]);
    auto* places = reinterpret_cast<int64_t*>(at[2]);
    T* values = reinterpret_cast<T*>(at[3]);
    A* running = static_cast<A*>(state);
    int64_t* place = places_of(state);
    int64_t j = begin;
    for (; j + L <= end; j += L) {
      Vec<A> best = load_raw<Vec<A>>(running + j);
      const Vec<A> v = load<A>(x + j);
      const LaneMask<A> taken = load_mask<A>(m + j) & takes(v, best);
      if (any_lane(taken)) {
        best = taken ? v : best;
        std::memcpy(running + j, &best, sizeof(best));
        for (int k = 0; k < L; ++k) place[j + k] = taken[k] ? step : place[j + k];
      }
      store(values + j, best);
      std::memcpy(places + j, place + j, L * sizeof(int64_t));
    }
    for (; j < end; ++j) {
      if (const A v = m[j] ? static_cast<A>(x[j]) : A{}; m[j] && takes(v, running[j])) {
        running[j] = v;
        place[j] = step;
      }
      values[j] = static_cast<T>(running[j]);
      places[j] = place[j];
    }
  }

  static Scan kernel() {
    Scan kernel = scan();
    kernel.rows = 1;
    kernel.init = &init;
    kernel.row = &row;
    kernel.drop = &drop;
    kernel.columns = &columns;
    kernel.drop_columns = &drop_columns;
    return kernel;
  }
};

// Operands: gradient of the values, places, mask, gradient of x. Places never fall along a line and never lie ahead, so all
// gradients for one place come in one stretch: they are added up, and written when the place changes. Nothing is read
// before the first kept step, where the mask knows it, nor places behind the last.
template <class T>
struct CumExtremeBackward {
  using A = ScanAcc<T>;
  static constexpr int kMaskOperand = 2, kResult = 3;

  static void row(const ScanLoops& loops, char* const* at, int64_t position) {
    const int64_t n = loops.steps.size;
    const int64_t* stride = loops.steps.stride;
    const int64_t gs = stride[0], ps = stride[1], xs = stride[kResult];
    const KeptRun run = kept_of_run(loops.mask, reinterpret_cast<const uint8_t*>(at[kMaskOperand]), position,
                                    stride[kMaskOperand], stride[kScanPosition], n);
    if (xs == sizeof(T))
      std::memset(at[kResult], 0, n * sizeof(T));
    else
      for (int64_t i = 0; i < n; ++i) *reinterpret_cast<T*>(at[kResult] + i * xs) = static_cast<T>(0.0f);
    if (run.kept == Kept::none) return;
    const bool together = gs == sizeof(T) && ps == sizeof(int64_t);
    constexpr int L = kLanes<A>;
    for (int64_t i = run.begin; i < n;) {
      const int64_t place = *reinterpret_cast<const int64_t*>(at[1] + i * ps);
      A total = 0;
      Vec<A> sums = {};
      while (together && i + L <= n) {
        const auto* places = reinterpret_cast<const int64_t*>(at[1]) + i;
        bool same = true;
        for (int k = 0; k < L && i < run.end; k += kLanes<int64_t>)
          same &= !any_lane(load_raw<Vec<int64_t>>(places + k) != place);
        if (!same) break;
        sums += load<A>(reinterpret_cast<const T*>(at[0]) + i);
        i += L;
      }
      for (; i < n && (i >= run.end || *reinterpret_cast<const int64_t*>(at[1] + i * ps) == place); ++i)
        total += static_cast<A>(*reinterpret_cast<const T*>(at[0] + i * gs));
      total += add_lanes<A>(sums);
      if (place >= 0) *reinterpret_cast<T*>(at[kResult] + place * xs) = static_cast<T>(total);
    }
  }

  // w columns side by side; every operand is contiguous along them. Those of which nothing is kept are 0.
  static void columns(const ScanLoops& loops, char* const* at, int64_t position, int64_t w) {
    const int64_t n = loops.steps.size;
    const int64_t* stride = loops.steps.stride;
    const int64_t* across = loops.lines.back().stride;
    const auto* m = reinterpret_cast<const uint8_t*>(at[kMaskOperand]);
    // What is kept of all steps, where it is the same for all columns, and of the columns, where it is for all steps.
    KeptRun steps{Kept::bits, 0, n}, side{Kept::bits, 0, w};
    if (stride[kMaskOperand] == 0 && across[kMaskOperand] == 0) {
      if (across[kScanPosition] == 0)
        steps = kept_of_run(loops.mask, m, position, 0, stride[kScanPosition], n);
      else
        side = kept_of_run(loops.mask, m, position, 0, across[kScanPosition], w);
    }
    const bool none = steps.kept == Kept::none || side.kept == Kept::none;
    const int64_t first = none ? n : steps.begin, begin = side.begin, end = side.end;
    A total[kScanColumns];
    int64_t place[kScanColumns];
    std::fill_n(total, w, A{0});
    std::fill_n(place, w, int64_t{-1});
    const auto write = [&](int64_t j) {
      if (place[j] >= 0) reinterpret_cast<T*>(at[kResult] + place[j] * stride[kResult])[j] = static_cast<T>(total[j]);
    };
    constexpr int L = kLanes<A>;
    for (int64_t i = 0; i < n; ++i) {
      std::memset(at[kResult] + i * stride[kResult], 0, w * sizeof(T));
      if (i < first) continue;
      const T* grad = reinterpret_cast<const T*>(at[0] + i * stride[0]);
      const auto* places = reinterpret_cast<const int64_t*>(at[1] + i * stride[1]);
      for (int64_t j = begin; j < end;) {
        const int64_t count = std::min<int64_t>(L, end - j);
        if (i < steps.end && std::memcmp(places + j, place + j, count * sizeof(int64_t)) != 0) {
          for (int64_t k = j; k < j + count; ++k) {
            if (places[k] == place[k]) continue;
            write(k);
            place[k] = places[k];
            total[k] = 0;
          }
        }
        if (count == L) {
          const Vec<A> sum = load_raw<Vec<A>>(total + j) + load<A>(grad + j);
          std::memcpy(total + j, &sum, sizeof(sum));
        } else {
          for (int64_t k = j; k < end; ++k) total[k] += static_cast<A>(grad[k]);
        }
        j += count;
      }
    }
    for (int64_t j = begin; j < end; ++j) write(j);
  }

  static void run(const ScanLoops& loops) {
    const bool side_by_side = over_columns(loops, kResult, sizeof(T)) && loops.lines.back().stride[0] == sizeof(T) &&
                              loops.lines.back().stride[1] == sizeof(int64_t);
    if (!side_by_side) {
      parallel_uneven(loops.count, loops.steps.size, [&](int64_t begin, int64_t end) {
        char* at[kOperands];
        for (int64_t line = begin; line < end; ++line) {
          const int64_t position = loops.locate(loops.lines, kResult + 1, line, at);
          row(loops, at, position);
        }
      });
      return;
    }
    const ScanLoop inner = loops.lines.back();
    const Loops<kOperands + 1> outer(loops.lines.begin(), loops.lines.end() - 1);
    const int64_t blocks = ceil_div(inner.size, kScanColumns);
    parallel_uneven(loops.count / inner.size * blocks, loops.steps.size * kScanColumns, [&](int64_t begin, int64_t end) {
      char* at[kOperands];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t position = loops.locate(outer, kResult + 1, task / blocks, at);
        const int64_t column = task % blocks * kScanColumns;
        for (int o = 0; o <= kResult; ++o) at[o] += column * inner.stride[o];
        columns(loops, at, position + column * inner.stride[kScanPosition], std::min(kScanColumns, inner.size - column));
      }
    });
  }
};

template <bool kMax>
Scan extreme_of(ScalarType dtype) {
  Scan scan;
  dispatch_any(dtype, [&](auto t) { scan = CumExtreme<decltype(t), kMax>::kernel(); });
  return scan;
}
inline Scan cummax(ScalarType dtype) { return extreme_of<true>(dtype); }
inline Scan cummin(ScalarType dtype) { return extreme_of<false>(dtype); }

inline void cumextreme_backward(ScalarType dtype, const ScanLoops& loops) {
  dispatch_floating(dtype, [&](auto t) { CumExtremeBackward<decltype(t)>::run(loops); });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
