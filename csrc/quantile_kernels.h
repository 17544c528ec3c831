// Masked quantiles, of which the median is one. Compiled once a target, through quantile.cpp.
#include "order_columns.h"
#include "quantile_call.h"
#if defined(MASKWISE_QUANTILE_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_QUANTILE_KERNELS_H
#else
#define MASKWISE_QUANTILE_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Fewer ranks than this are looked for one by one; for more, the slice is sorted.
constexpr int64_t kSortFrom = 4;

// Finds every rank that one slice needs, as (slice's entries) -> (entry below, entry above) for each quantile.
template <class Kind, class Found>
void find_ranks(const QuantileCall& call, bool is_floating, typename Kind::E* list, int64_t n, typename Kind::E* buffer,
                const Found& found) {
  using E = typename Kind::E;
  if (is_floating) {
    // A kept NaN is every quantile, as in torch; it is the last entry in order.
    int64_t less = 0;
    const auto nan = ~typename Kind::K{0};
    E lo = Kind::make(nan, 0), hi = Kind::make(nan, std::numeric_limits<uint32_t>::max());
    if constexpr (std::is_same_v<E, WideEntry>) hi = Kind::make(nan, std::numeric_limits<int64_t>::max());
    const int64_t nans = within(buffer, list, n, lo, hi, less);
    if (nans > 0) {
      for (int64_t i = 0; i < call.quantiles; ++i) found(i, buffer[nans - 1], buffer[nans - 1], 0.0);
      return;
    }
  }
  const bool sorted = call.quantiles >= kSortFrom;
  if (sorted) list = sort_entries<Kind>(list, buffer, n);
  for (int64_t i = 0; i < call.quantiles; ++i) {
    const Rank rank = call.rank(i, n);
    if (!rank.valid) continue;
    const E below = sorted ? list[rank.below] : select(list, n, rank.below, buffer);
    E above = below;
    if (rank.above > rank.below) above = sorted ? list[rank.above] : next_entry(list, n, rank.below, below);
    found(i, below, above, rank.weight);
  }
}

template <class Kind, class Found, class K = typename Kind::K>
void quantile_slices(const QuantileCall& call, const Source<Kind>& x, const Found& found) {
  using E = typename Kind::E;
  const OrderNest& nest = call.nest;
  const Blocks blocks = make_blocks(nest, block_width<E>(nest.length, x.type.bytes), 1);
  blocks.for_each((nest.length + 3) / 4, 0, [&](const auto& visit_each) {
    const bool one = blocks.width == 1;
    int64_t stride = (one && nest.length > 65536 ? 0 : nest.length) + kSlack;
    auto lists = std::make_unique<EntryBuffer<E>>(stride * blocks.width);
    auto buffer = std::make_unique<EntryBuffer<E>>(select_buffer(stride));
    visit_each([&](int64_t first, int64_t w) {
      if (one && nest.length > 65536) {
        const int64_t wanted = entries_for(nest, first);
        if (wanted > stride) {
          stride = wanted;
          lists = std::make_unique<EntryBuffer<E>>(stride);
          buffer = std::make_unique<EntryBuffer<E>>(select_buffer(stride));
        }
      }
      int64_t counts[kWidest];
      collect_block<Kind>(lists->data, stride, counts, blocks, nest, x, first, w, K{0});
      for (int64_t j = 0; j < w; ++j) {
        if (counts[j] == 0) continue;
        find_ranks<Kind>(call, x.type.is_floating, lists->data + j * stride, counts[j], buffer->data,
                            [&](int64_t i, const E& below, const E& above, double weight) {
                              found(i * nest.slices + first + j, first + j, below, above, weight);
                            });
      }
    });
  });
}

inline void quantile_values(ScalarType dtype, const QuantileCall& call, const void* x, void* out) {
  // Slices of which nothing is kept: NaN, or the least integer.
  dispatch_numeric(dtype, [&](auto t) {
    using T = decltype(t);
    using Limits = std::numeric_limits<std::conditional_t<kFloating<T>, float, T>>;
    const T none = static_cast<T>(kFloating<T> ? Limits::quiet_NaN() : Limits::lowest());
    std::fill_n(static_cast<T*>(out), call.quantiles * call.nest.slices, none);
  });
  const bool lerps = call.interpolates();
  with_keys(dtype, x, [&](const auto& source) {
    const auto found = [&](int64_t at, int64_t, auto below, auto above, double weight) {
      source.type.interpolate(out, at, below, above, lerps ? weight : -1.0);
    };
    quantile_slices(call, source, found);
  });
}

inline void quantile_places(ScalarType dtype, const QuantileCall& call, const void* x, int64_t* lower,
                            int64_t* upper, double* weights) {
  const int64_t all = call.quantiles * call.nest.slices;
  std::fill_n(lower, all, int64_t{-1});
  std::fill_n(upper, all, int64_t{-1});
  std::fill_n(weights, all, 0.0);
  with_places<false>(dtype, x, call.nest.length, [&](const auto& source) {
    const auto found = [&](int64_t at, int64_t slice, auto below, auto above, double weight) {
      lower[at] = call.flat(slice, place_of(source, below));
      upper[at] = call.flat(slice, place_of(source, above));
      weights[at] = weight;
    };
    quantile_slices(call, source, found);
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
