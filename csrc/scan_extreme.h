// The running maximum and minimum with their places, and the gradient of both. Compiled once a target, through scan.cpp.
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
  static constexpr Scan scan() { return {4, 2, {sizeof(T), 1, sizeof(int64_t), sizeof(T)}, 1, -1, false}; }

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

  static void init(void* state, int64_t columns) {
    std::fill_n(static_cast<A*>(state), ceil_div(columns, L) * L, worst());
    std::fill_n(places_of(state), ceil_div(columns, L) * L, int64_t{-1});
  }

  static void row(void* state, char* const* at, int64_t n, int64_t first) {
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
      if (count == L) some = any_lane(load_mask<A>(m + i) & takes(load<A>(x + i), splat<A>(running)));
      if (!some) {
        // Most stretches bring nothing new.
        store(values + i, splat<A>(running));
        for (int k = 0; k < L; k += kLanes<int64_t>) store(places + i + k, splat<int64_t>(place));
      } else {
        for (int64_t k = i; k < i + count; ++k) {
          const A v = static_cast<A>(x[k]);
          if (m[k] && takes(v, running)) {
            running = v;
            place = first + k;
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

  static void columns(void* state, char* const* at, const int64_t* next, int64_t w, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      char* const here[] = {at[0] + i * next[0], at[1] + i * next[1], at[2] + i * next[2], at[3] + i * next[3]};
      columns(state, here, w, step + i);
    }
  }

  static void columns(void* state, char* const* at, int64_t w, int64_t step) {
    const T* x = reinterpret_cast<const T*>(at[0]);
    const auto* m = reinterpret_cast<const uint8_t*>(at[1]);
    auto* places = reinterpret_cast<int64_t*>(at[2]);
    T* values = reinterpret_cast<T*>(at[3]);
    A* running = static_cast<A*>(state);
    int64_t* place = places_of(state);
    int64_t j = 0;
    for (; j + L <= w; j += L) {
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
    for (; j < w; ++j) {
      const A v = static_cast<A>(x[j]);
      if (m[j] && takes(v, running[j])) {
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
    kernel.columns = &columns;
    return kernel;
  }
};

// Operands: gradient of the values, places, gradient of x. Places never fall along a line and never lie ahead, so all
// gradients for one place come in one stretch: they are added up, and written when the place changes.
template <class T>
struct CumExtremeBackward {
  using A = ScanAcc<T>;

  static void row(const ScanLoops& loops, char* const* at) {
    const int64_t n = loops.steps.size;
    const int64_t gs = loops.steps.stride[0], ps = loops.steps.stride[1], xs = loops.steps.stride[2];
    const bool together = gs == sizeof(T) && ps == sizeof(int64_t);
    for (int64_t i = 0; i < n; ++i) *reinterpret_cast<T*>(at[2] + i * xs) = static_cast<T>(0.0f);
    constexpr int L = kLanes<A>;
    for (int64_t i = 0; i < n;) {
      const int64_t place = *reinterpret_cast<const int64_t*>(at[1] + i * ps);
      A total = 0;
      Vec<A> sums = {};
      while (together && i + L <= n) {
        const auto* places = reinterpret_cast<const int64_t*>(at[1]) + i;
        bool same = true;
        for (int k = 0; k < L; k += kLanes<int64_t>) same &= !any_lane(load_raw<Vec<int64_t>>(places + k) != place);
        if (!same) break;
        sums += load<A>(reinterpret_cast<const T*>(at[0]) + i);
        i += L;
      }
      for (; i < n && *reinterpret_cast<const int64_t*>(at[1] + i * ps) == place; ++i)
        total += static_cast<A>(*reinterpret_cast<const T*>(at[0] + i * gs));
      total += add_lanes<A>(sums);
      if (place >= 0) *reinterpret_cast<T*>(at[2] + place * xs) = static_cast<T>(total);
    }
  }

  // w columns side by side; every operand is contiguous along them.
  static void columns(const ScanLoops& loops, char* const* at, int64_t w) {
    A total[kScanColumns];
    int64_t place[kScanColumns];
    std::fill_n(total, w, A{0});
    std::fill_n(place, w, int64_t{-1});
    const int64_t* stride = loops.steps.stride;
    const auto write = [&](int64_t j) {
      if (place[j] >= 0) reinterpret_cast<T*>(at[2] + place[j] * stride[2])[j] = static_cast<T>(total[j]);
    };
    constexpr int L = kLanes<A>;
    for (int64_t i = 0; i < loops.steps.size; ++i) {
      const T* grad = reinterpret_cast<const T*>(at[0] + i * stride[0]);
      const auto* places = reinterpret_cast<const int64_t*>(at[1] + i * stride[1]);
      std::memset(at[2] + i * stride[2], 0, w * sizeof(T));
      for (int64_t j = 0; j < w;) {
        const int64_t count = std::min<int64_t>(L, w - j);
        if (std::memcmp(places + j, place + j, count * sizeof(int64_t)) != 0) {
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
          for (int64_t k = j; k < w; ++k) total[k] += static_cast<A>(grad[k]);
        }
        j += count;
      }
    }
    for (int64_t j = 0; j < w; ++j) write(j);
  }

  static void run(const ScanLoops& loops) {
    const bool side_by_side = over_columns(loops, 2, sizeof(T)) && loops.lines.back().stride[0] == sizeof(T) &&
                              loops.lines.back().stride[1] == sizeof(int64_t);
    if (!side_by_side) {
      parallel(loops.count, loops.steps.size, [&](int64_t begin, int64_t end) {
        char* at[kOperands];
        for (int64_t line = begin; line < end; ++line) {
          loops.locate(loops.lines, 3, line, at);
          row(loops, at);
        }
      });
      return;
    }
    const Loop<kOperands> inner = loops.lines.back();
    const Loops<kOperands> outer(loops.lines.begin(), loops.lines.end() - 1);
    const int64_t blocks = ceil_div(inner.size, kScanColumns);
    parallel(loops.count / inner.size * blocks, loops.steps.size * kScanColumns, [&](int64_t begin, int64_t end) {
      char* at[kOperands];
      for (int64_t task = begin; task < end; ++task) {
        loops.locate(outer, 3, task / blocks, at);
        const int64_t column = task % blocks * kScanColumns;
        for (int o = 0; o < 3; ++o) at[o] += column * inner.stride[o];
        columns(loops, at, std::min(kScanColumns, inner.size - column));
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
