// Masked quantiles, of which the median is one. Included once a SIMD level, inside its namespace, by foreach_isa.h
// (through quantile.cpp).
#include "order_keys.h"
#include "order_compact.h"
#include "order_select.h"
#include "order_slices.h"
namespace ordering {

// Fewer ranks than this are looked for one by one; for more, the slice is sorted.
constexpr int64_t kSortFrom = 4;

// Finds every rank that is asked of one slice, as (slice's entries) -> (entry below, entry above) for each quantile.
template <class Kind, class T, class Found>
void find_ranks(const QuantileCall& call, typename Kind::E* list, int64_t n, typename Kind::E* room, const Found& found) {
  using E = typename Kind::E;
  if constexpr (kFloating<T>) {
    // A kept NaN is every quantile, as in torch; it is the last entry in order.
    int64_t less = 0;
    const KeyOf<T> nan = ~KeyOf<T>{0};
    E lo = Kind::make(nan, 0), hi = Kind::make(nan, std::numeric_limits<uint32_t>::max());
    if constexpr (std::is_same_v<Kind, Places64>) hi = Kind::make(nan, std::numeric_limits<int64_t>::max());
    const int64_t nans = within(room, list, n, lo, hi, less);
    if (nans > 0) {
      for (int64_t i = 0; i < call.quantiles; ++i) found(i, room[nans - 1], room[nans - 1], 0.0);
      return;
    }
  }
  const bool sorted = call.quantiles >= kSortFrom;
  if (sorted) list = sort_entries<Kind>(list, room, n);
  for (int64_t i = 0; i < call.quantiles; ++i) {
    const Rank rank = call.rank(i, n);
    if (!rank.valid) continue;
    const E below = sorted ? list[rank.below] : select(list, n, rank.below, room);
    E above = below;
    if (rank.above > rank.below) above = sorted ? list[rank.above] : next_entry(list, n, rank.below, below);
    found(i, below, above, rank.weight);
  }
}

template <class Kind, class T, class Found>
void quantile_slices(const QuantileCall& call, const T* x, const uint8_t* m, const Found& found) {
  using E = typename Kind::E;
  const Layout& layout = call.layout;
  const Blocks blocks = make_blocks(layout, block_width<E>(layout.length), 1);
  blocks.for_each((layout.length + 3) / 4, [&](const auto& visit_each) {
    const bool one = blocks.width == 1;
    int64_t stride = (one && layout.length > 65536 ? 0 : layout.length) + kSlack;
    auto lists = std::make_unique<Room<E>>(stride * blocks.width);
    auto room = std::make_unique<Room<E>>(select_room(stride));
    visit_each([&](int64_t first, int64_t w) {
      if (one && layout.length > 65536) {
        const int64_t wanted = room_for(layout, m + offset_of(layout.kept, first).mask);
        if (wanted > stride) {
          stride = wanted;
          lists = std::make_unique<Room<E>>(stride);
          room = std::make_unique<Room<E>>(select_room(stride));
        }
      }
      int64_t counts[kWidest];
      fill_block<Kind>(lists->data, stride, counts, blocks, layout, x, m, first, w, KeyOf<T>{0});
      for (int64_t j = 0; j < w; ++j) {
        if (counts[j] == 0) continue;
        find_ranks<Kind, T>(call, lists->data + j * stride, counts[j], room->data,
                            [&](int64_t i, const E& below, const E& above, double weight) {
                              found(i * layout.outputs + first + j, first + j, below, above, weight);
                            });
      }
    });
  });
}

// As torch.lerp, from whichever end is nearer.
template <class P>
P lerp(P a, P b, P weight) {
  return weight < P(0.5) ? a + weight * (b - a) : b - (b - a) * (P(1) - weight);
}

template <class T>
void quantile_values(const QuantileCall& call, const void* x, const void* m, void* out) {
  using K = KeyOf<T>;
  using Kind = KeysFor<T>;
  T* results = static_cast<T*>(out);
  T none;
  if constexpr (kFloating<T>)
    none = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
  else
    none = std::numeric_limits<T>::lowest();
  std::fill_n(results, call.quantiles * call.layout.outputs, none);
  quantile_slices<Kind, T>(call, static_cast<const T*>(x), static_cast<const uint8_t*>(m),
                           [&](int64_t at, int64_t, auto below, auto above, double weight) {
                             const T a = value_of<T>(static_cast<K>(Kind::key(below)), 0);
                             if constexpr (kFloating<T>) {
                               if (call.interpolates()) {
                                 using P = PlainOf<T>;
                                 const T b = value_of<T>(static_cast<K>(Kind::key(above)), 0);
                                 results[at] = static_cast<T>(
                                     lerp<P>(static_cast<P>(a), static_cast<P>(b), static_cast<P>(weight)));
                                 return;
                               }
                             }
                             results[at] = a;
                           });
}

template <class T>
void quantile_places(const QuantileCall& call, const void* x, const void* m, int64_t* lower, int64_t* upper,
                     double* weights) {
  const auto find = [&](auto kind) {
    using Kind = decltype(kind);
    quantile_slices<Kind, T>(call, static_cast<const T*>(x), static_cast<const uint8_t*>(m),
                             [&](int64_t at, int64_t slice, auto below, auto above, double weight) {
                               lower[at] = call.flat(slice, Kind::place(below));
                               upper[at] = call.flat(slice, Kind::place(above));
                               weights[at] = weight;
                             });
  };
  const int64_t all = call.quantiles * call.layout.outputs;
  std::fill_n(lower, all, int64_t{-1});
  std::fill_n(upper, all, int64_t{-1});
  std::fill_n(weights, all, 0.0);
  if (call.layout.length < int64_t{1} << 32)
    find(PlacesFor<T>{});
  else
    find(Places64{});
}

// Calls serve(T{}) for the type of x.
template <class Serve>
void for_type(ScalarType dtype, const Serve& serve) {
  switch (dtype) {
    case ScalarType::Float: return serve(float{});
    case ScalarType::Double: return serve(double{});
    case ScalarType::Half: return serve(Half{});
    case ScalarType::BFloat16: return serve(BFloat16{});
    case ScalarType::Long: return serve(int64_t{});
    case ScalarType::Int: return serve(int32_t{});
    case ScalarType::Short: return serve(int16_t{});
    case ScalarType::Char: return serve(int8_t{});
    case ScalarType::Byte: return serve(uint8_t{});
    default: STD_TORCH_CHECK(false, "maskwise: an order function was called with a dtype that has no kernel");
  }
}

inline void values(ScalarType dtype, const QuantileCall& call, const void* x, const void* m, void* out) {
  for_type(dtype, [&](auto t) { quantile_values<decltype(t)>(call, x, m, out); });
}
inline void places(ScalarType dtype, const QuantileCall& call, const void* x, const void* m, int64_t* lower,
                   int64_t* upper, double* weights) {
  for_type(dtype, [&](auto t) { quantile_places<decltype(t)>(call, x, m, lower, upper, weights); });
}

}  // namespace ordering
