// The masked sum. Included once a SIMD level, inside its namespace, by foreach_isa.h (through reduce.cpp).
#include "reduce_walk.h"

// Elements that are added in one arithmetic type before the total widens: bounds the rounding error of long sums.
constexpr int64_t kChunk = 2048;

template <class T>
struct Sum {
  using In = T;
  using A = Acc<T>;
  using Wide = std::conditional_t<std::is_floating_point_v<A>, double, int64_t>;
  using Out = std::conditional_t<std::is_integral_v<T>, int64_t, T>;

  struct State {
    Wide total = 0;
  };

  // The sum of at most kChunk elements; m is null where all are kept.
  static A chunk(const T* x, const uint8_t* m, int64_t n) {
    constexpr int L = kLanes<A>;
    Vec<A> sums[4] = {};
    int64_t i = 0;
    if (m != nullptr) {
      for (; i + 4 * L <= n; i += 4 * L)
        for (int k = 0; k < 4; ++k)
          sums[k] += keep<A>(load<A>(x + i + k * L), load_mask<A>(m + i + k * L));
    } else {
      for (; i + 4 * L <= n; i += 4 * L)
        for (int k = 0; k < 4; ++k) sums[k] += load<A>(x + i + k * L);
    }
    A total = add_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i)
      if (m == nullptr || m[i]) total += static_cast<A>(x[i]);
    return total;
  }

  static void row(State& s, const T* x, const uint8_t* m, int64_t n) {
    for (int64_t i = 0; i < n; i += kChunk)
      s.total += static_cast<Wide>(chunk(x + i, m == nullptr ? nullptr : m + i, std::min(kChunk, n - i)));
  }

  struct Columns {
    A sums[kColumns];
    Wide totals[kColumns];
    int64_t pending = 0;
  };
  static void start(Columns& c, int64_t w) {
    std::fill_n(c.sums, w, A{0});
    std::fill_n(c.totals, w, Wide{0});
    c.pending = 0;
  }
  static void flush(Columns& c, int64_t w) {
    for (int64_t j = 0; j < w; ++j) c.totals[j] += static_cast<Wide>(c.sums[j]);
    std::fill_n(c.sums, w, A{0});
    c.pending = 0;
  }
  static void cols(Columns& c, const T* x, const uint8_t* m, int64_t w) {
    constexpr int L = kLanes<A>;
    if (c.pending++ == 256) flush(c, w);
    int64_t j = 0;
    for (; j + L <= w; j += L) {
      Vec<A> v = load<A>(x + j);
      if (m != nullptr) v = keep<A>(v, load_mask<A>(m + j));
      v += load_raw<Vec<A>>(c.sums + j);
      std::memcpy(c.sums + j, &v, sizeof(v));
    }
    for (; j < w; ++j)
      if (m == nullptr || m[j]) c.sums[j] += static_cast<A>(x[j]);
  }
  static State column(Columns& c, int64_t j) { return {c.totals[j] + static_cast<Wide>(c.sums[j])}; }

  static void merge(State& s, const State& other) { s.total += other.total; }
  static Out finish(const State& s) { return static_cast<Out>(s.total); }
};

// Picks Op<T> for the dtype of x, among the types that sums serve.
template <template <class> class Op>
void reduce_any(ScalarType dtype, const Layout& layout, const void* x, const void* m, void* out) {
  switch (dtype) {
    case ScalarType::Float: return reduce<Op<float>>(layout, x, m, out);
    case ScalarType::Double: return reduce<Op<double>>(layout, x, m, out);
    case ScalarType::Half: return reduce<Op<Half>>(layout, x, m, out);
    case ScalarType::BFloat16: return reduce<Op<BFloat16>>(layout, x, m, out);
    case ScalarType::Long: return reduce<Op<int64_t>>(layout, x, m, out);
    case ScalarType::Int: return reduce<Op<int32_t>>(layout, x, m, out);
    case ScalarType::Short: return reduce<Op<int16_t>>(layout, x, m, out);
    case ScalarType::Char: return reduce<Op<int8_t>>(layout, x, m, out);
    case ScalarType::Byte:
    case ScalarType::Bool: return reduce<Op<uint8_t>>(layout, x, m, out);
    default: STD_TORCH_CHECK(false, "maskwise: a reduction was called with a dtype that has no kernel");
  }
}

inline void sum(ScalarType dtype, const Layout& layout, const void* x, const void* m, void* out) {
  reduce_any<Sum>(dtype, layout, x, m, out);
}
