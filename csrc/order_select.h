// Sorting a list of entries, and finding the one of a rank. Compiled once a target, for the order family.
#include "order_compact.h"
#if defined(MASKWISE_ORDER_SELECT_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_SELECT_H
#else
#define MASKWISE_ORDER_SELECT_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Fewer entries than this are sorted by comparisons: a radix sort first has its histograms to clear and sum.
constexpr int64_t kRadixFrom = 96;

// Sorts n entries, least significant byte first, and returns where the result is: a or other. Entries of one key stay
// in order, and entries are made in the order of their places, so only the bytes of the key need a pass; a byte that
// all keys share needs none.
template <class Kind>
typename Kind::E* sort_entries(typename Kind::E* a, typename Kind::E* other, int64_t n) {
  using E = typename Kind::E;
  if (n < kRadixFrom || n > std::numeric_limits<uint32_t>::max()) {
    std::sort(a, a + n);
    return a;
  }
  constexpr int kBytes = sizeof(typename Kind::K);
  uint32_t counts[kBytes][256] = {};
  for (int64_t i = 0; i < n; ++i) {
    const auto key = Kind::key(a[i]);
    for (int b = 0; b < kBytes; ++b) ++counts[b][key >> 8 * b & 0xff];
  }
  for (int b = 0; b < kBytes; ++b) {
    uint32_t* ends = counts[b];
    if (ends[Kind::key(a[0]) >> 8 * b & 0xff] == n) continue;
    uint32_t start = 0;
    for (int d = 0; d < 256; ++d) start += std::exchange(ends[d], start);
    for (int64_t i = 0; i < n; ++i) {
      const E e = a[i];
      other[ends[Kind::key(e) >> 8 * b & 0xff]++] = e;
    }
    std::swap(a, other);
  }
  return a;
}

constexpr int64_t kSample = 64;

// The entries of two ranks among n <= kSample of them: the greatest that has no more than `rank` below it. Every pair is
// compared, which for so few is faster than any sort: nothing is mispredicted.
template <class E>
std::pair<E, E> pick(const E* s, int64_t n, int64_t first, int64_t second) {
  using S = BitsOf<E>;
  constexpr int L = kLanes<E>;
  // Vectors that are compared with one entry at a time, so that it is loaded once for all of them.
  constexpr int64_t kTogether = 4;
  // As signed numbers, which is what the CPU compares; padded with the greatest, which is below nothing.
  alignas(64) S values[kSample];
  static_assert(kSample % (kTogether * L) == 0);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<S>(s[i] ^ kTop<E>);
  const int64_t padded = ceil_div(n, kTogether * L) * kTogether * L;
  std::fill(values + n, values + padded, std::numeric_limits<S>::max());
  Vec<S> low = splat<S>(std::numeric_limits<S>::min()), high = low;
  for (int64_t i = 0; i < n; i += kTogether * L) {
    Vec<S> v[kTogether], below[kTogether] = {};
    for (int k = 0; k < kTogether; ++k) v[k] = load_raw<Vec<S>>(values + i + k * L);
    for (int64_t j = 0; j < n; ++j) {
      const Vec<S> each = splat<S>(values[j]);
      for (int k = 0; k < kTogether; ++k) below[k] -= each < v[k];
    }
    for (int k = 0; k < kTogether; ++k) {
      const Vec<S> to_first = below[k] <= static_cast<S>(first) ? v[k] : splat<S>(std::numeric_limits<S>::min());
      const Vec<S> to_second = below[k] <= static_cast<S>(second) ? v[k] : splat<S>(std::numeric_limits<S>::min());
      low = to_first > low ? to_first : low;
      high = to_second > high ? to_second : high;
    }
  }
  S a = low[0], b = high[0];
  for (int l = 1; l < L; ++l) {
    a = std::max<S>(a, low[l]);
    b = std::max<S>(b, high[l]);
  }
  return {static_cast<E>(a) ^ kTop<E>, static_cast<E>(b) ^ kTop<E>};
}

// The few least are found by holding each entry against the worst of them so far, in lists up to this length: it takes
// one comparison for almost all of them, and no histogram. Longer ones might be in the worst order.
constexpr int64_t kFew = 16, kScanned = 2048;

// An entry that at least kVectors vectors' worth of n entries are not above: the greatest of the minima of the lanes.
template <int kVectors, class E>
E bound_by_lanes(const E* a, int64_t n) {
  constexpr int L = kLanes<E>;
  Vec<E> least[kVectors];
  for (int k = 0; k < kVectors; ++k) least[k] = load_raw<Vec<E>>(a + k * L);
  for (int64_t i = kVectors * L; i + kVectors * L <= n; i += kVectors * L)
    for (int k = 0; k < kVectors; ++k) {
      const auto v = load_raw<Vec<E>>(a + i + k * L);
      least[k] = v < least[k] ? v : least[k];
    }
  E greatest = 0;
  for (int k = 0; k < kVectors; ++k)
    for (int l = 0; l < L; ++l) greatest = std::max<E>(greatest, least[k][l]);
  return greatest;
}

// The k <= kFew least of n entries, in order, at the front; what is behind them is not defined any more.
template <class E>
void least_few(E* a, int64_t n, int64_t k) {
  if (k == 0) return;
  if constexpr (!std::is_same_v<E, WideEntry>) {
    constexpr int kHalf = kFew / 2 / kLanes<E>;
    if (n >= 3 * kFew) {
      // Few entries are not above such a bound, and only these are held against each other.
      const E bound = k <= kFew / 2 ? bound_by_lanes<std::max(1, kHalf)>(a, n) : bound_by_lanes<std::max(1, 2 * kHalf)>(a, n);
      int64_t less = 0;
      n = within(a, a, n, E{}, bound, less);
    }
  }
  E best[kFew];
  std::copy_n(a, k, best);
  std::sort(best, best + k);
  for (int64_t i = k; i < n; ++i) {
    const E e = a[i];
    if (!(e < best[k - 1])) continue;
    int64_t j = k - 1;
    for (; j > 0 && e < best[j - 1]; --j) best[j] = best[j - 1];
    best[j] = e;
  }
  std::copy_n(best, k, a);
}

// The buffer that `select` needs for n entries.
inline int64_t select_buffer(int64_t n) { return 2 * (n + kSlack); }

// The entry of a rank (0 is the least) among n entries, which are not touched.
template <class E>
E select(const E* a, int64_t n, int64_t rank, E* buffer) {
  if constexpr (!std::is_same_v<E, WideEntry>) {
    // A sample tells between which two entries the wanted one lies, most likely; only what is between them is kept.
    E* next = buffer + n + kSlack;
    while (n > kSample / 2) {
      // To pick costs the square of the sample, so that few entries take a smaller one; a margin of about two deviations.
      const int64_t size = n <= 2 * kSample ? kSample / 4 : n <= 16 * kSample ? kSample / 2 : kSample;
      const int64_t margin = size == kSample ? 7 : size == kSample / 2 ? 6 : 4;
      E sample[kSample];
      for (int64_t i = 0; i < size; ++i) sample[i] = a[i * n / size];
      const int64_t middle =
          static_cast<int64_t>(static_cast<double>(rank) / static_cast<double>(n) * static_cast<double>(size));
      auto [lo, hi] = pick(sample, size, std::max<int64_t>(0, middle - margin), middle + margin);
      if (middle < margin) lo = 0;
      if (middle + margin >= size) hi = ~E{0};
      int64_t less = 0;
      int64_t inside = within(buffer, a, n, lo, hi, less);
      if (rank < less || rank >= less + inside) {
        // It lies beyond one of them, on the side that is now known.
        if (rank < less)
          hi = lo - 1, lo = 0;
        else
          lo = hi + 1, hi = ~E{0};
        less = 0;
        inside = within(buffer, a, n, lo, hi, less);
      }
      rank -= less;
      if (lo == hi) return lo;
      if (inside > n - n / 4) {
        std::nth_element(buffer, buffer + rank, buffer + inside);
        return buffer[rank];
      }
      a = buffer;
      n = inside;
      std::swap(buffer, next);
    }
    return pick(a, n, rank, rank).first;
  } else {
    std::copy_n(a, n, buffer);
    std::nth_element(buffer, buffer + rank, buffer + n);
    return buffer[rank];
  }
}

// The entry that follows `e`, the one of a rank, among n entries; e is not the last of them.
template <class E>
E next_entry(const E* a, int64_t n, int64_t rank, E e) {
  int64_t upto = 0, i = 0;
  bool found = false;
  E best = e;
  if constexpr (!std::is_same_v<E, WideEntry>) {
    constexpr int L = kLanes<E>;
    LaneMask<E> counts{};
    Vec<E> least = splat<E>(~E{0});
    for (; i + L <= n; i += L) {
      const auto v = load_raw<Vec<E>>(a + i);
      const auto low = (LaneMask<E>)(v <= e);
      counts -= low;
      const auto candidate = v | (Vec<E>)low;
      least = candidate < least ? candidate : least;
    }
    for (int l = 0; l < L; ++l) {
      upto += static_cast<int64_t>(counts[l]);
      if (e < least[l] && (!found || least[l] < best)) best = least[l], found = true;
    }
  }
  for (; i < n; ++i) {
    if (!(e < a[i]))
      ++upto;
    else if (!found || a[i] < best)
      best = a[i], found = true;
  }
  return upto > rank + 1 ? e : best;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
