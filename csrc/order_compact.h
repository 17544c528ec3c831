// Moving what is kept, and nothing else: a slice of x becomes the entries of its kept elements, and a list of entries
// shrinks to those within bounds. Compiled once a target, for the order family.
//
// Every function here may write up to kSlack entries beyond the ones that it counts.
#include "order_keys.h"
#if defined(MASKWISE_ORDER_COMPACT_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_COMPACT_H
#else
#define MASKWISE_ORDER_COMPACT_H
#endif

namespace maskwise::MASKWISE_TARGET {

#undef MASKWISE_COMPACT
constexpr int64_t kSlack = 16;

#if MASKWISE_VECTOR_BYTES == 32 && defined(MASKWISE_F16C)
#define MASKWISE_COMPACT 8
inline unsigned lane_bits(const uint8_t* m) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)m);
  return ~static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128()))) & 0xffu;
}
inline __m256i chosen_lanes(unsigned bits) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kLaneTable.lanes[bits]));
}
template <class K>
inline unsigned lane_bits_of(LaneMask<K> lanes) {
  if constexpr (sizeof(K) == 4) return static_cast<unsigned>(_mm256_movemask_ps((__m256)lanes));
  return static_cast<unsigned>(_mm256_movemask_pd((__m256d)lanes));
}
// Stores the chosen lanes one after the other; returns how many.
inline int64_t store_chosen(uint32_t* out, Vec<uint32_t> v, unsigned bits) {
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32((__m256i)v, chosen_lanes(bits)));
  return __builtin_popcount(bits);
}
inline int64_t store_chosen(uint64_t* out, Vec<uint64_t> v, unsigned bits) {
  // Each 64-bit lane is two of the 32-bit lanes that the permutation moves.
  const unsigned pairs = (bits & 1) * 3 | (bits & 2) * 6 | (bits & 4) * 12 | (bits & 8) * 24;
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32((__m256i)v, chosen_lanes(pairs)));
  return __builtin_popcount(bits);
}
// Stores every lane's key above its place.
inline void store_pairs(uint64_t* out, Vec<uint32_t> keys, Vec<uint32_t> places) {
  const __m256i even = _mm256_unpacklo_epi32((__m256i)places, (__m256i)keys);
  const __m256i odd = _mm256_unpackhi_epi32((__m256i)places, (__m256i)keys);
  _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((__m256i*)(out + 4), _mm256_permute2x128_si256(even, odd, 0x31));
}
inline int64_t store_placed(uint64_t* out, Vec<uint32_t> keys, Vec<uint32_t> places, unsigned bits) {
  const __m256i lanes = chosen_lanes(bits);
  store_pairs(out, (Vec<uint32_t>)_mm256_permutevar8x32_epi32((__m256i)keys, lanes),
              (Vec<uint32_t>)_mm256_permutevar8x32_epi32((__m256i)places, lanes));
  return __builtin_popcount(bits);
}
#elif MASKWISE_VECTOR_BYTES == 64
#define MASKWISE_COMPACT 16
inline unsigned lane_bits(const uint8_t* m) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)m);
  return _mm_test_epi8_mask(bytes, bytes);
}
template <class K>
inline unsigned lane_bits_of(LaneMask<K> lanes) {
  if constexpr (sizeof(K) == 4) return _mm512_movepi32_mask((__m512i)lanes);
  return _mm512_movepi64_mask((__m512i)lanes);
}
inline int64_t store_chosen(uint32_t* out, Vec<uint32_t> v, unsigned bits) {
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)v));
  return __builtin_popcount(bits);
}
inline int64_t store_chosen(uint64_t* out, Vec<uint64_t> v, unsigned bits) {
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits), (__m512i)v));
  return __builtin_popcount(bits);
}
inline void store_pairs(uint64_t* out, Vec<uint32_t> keys, Vec<uint32_t> places) {
  const auto k = (__m512i)keys, p = (__m512i)places;
  const auto pack = [](__m256i key, __m256i place) {
    return _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(key), 32), _mm512_cvtepu32_epi64(place));
  };
  _mm512_storeu_si512(out, pack(_mm512_castsi512_si256(k), _mm512_castsi512_si256(p)));
  _mm512_storeu_si512(out + 8, pack(_mm512_extracti64x4_epi64(k, 1), _mm512_extracti64x4_epi64(p, 1)));
}
inline int64_t store_placed(uint64_t* out, Vec<uint32_t> keys, Vec<uint32_t> places, unsigned bits) {
  store_pairs(out, (Vec<uint32_t>)_mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)keys),
              (Vec<uint32_t>)_mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)places));
  return __builtin_popcount(bits);
}
#endif

// Appends to out the entries of x's kept elements whose key is at most `limit`, and returns how many. The elements are
// contiguous; m is null where all are kept; `place` is where the first of them stands.
template <class Kind, bool kLimited, class T>
int64_t compact(typename Kind::E* out, const void* from, const uint8_t* m, int64_t n, int64_t place, KeyOf<T> flip,
                KeyOf<T> limit) {
  using K = KeyOf<T>;
  const T* x = static_cast<const T*>(from);
  int64_t count = 0, i = 0;
#if defined(MASKWISE_COMPACT)
  constexpr int L = kLanes<K>;
  if constexpr (!std::is_same_v<typename Kind::E, WideEntry>) {
    Vec<uint32_t> places{};
    for (int l = 0; l < kLanes<uint32_t>; ++l) places[l] = static_cast<uint32_t>(place + l);
    const auto load = [&](int64_t at) { return load_keys<Kind::kPlaced>(x + at, flip); };
    const auto put = [&](int64_t at, Vec<K> keys, unsigned bits) {
      if constexpr (Kind::kPlaced)
        count += store_placed(out + count, keys, places + static_cast<uint32_t>(at), bits);
      else
        count += store_chosen(out + count, keys, bits);
    };
    // All of a run is a plain copy.
    if (!kLimited && m == nullptr)
      for (; i + L <= n; i += L, count += L) {
        const Vec<K> keys = load(i);
        if constexpr (Kind::kPlaced)
          store_pairs(out + i, keys, places + static_cast<uint32_t>(i));
        else
          store(out + i, keys);
      }
    constexpr unsigned kAll = (1u << L) - 1;
    for (; i + 32 <= n; i += 32) {
      if (m != nullptr && none_of<32>(m + i)) continue;
      unsigned bits[32 / L];
      unsigned any = 0;
      // lane_bits reads MASKWISE_COMPACT bytes, of which the narrower steps of 64-bit keys use some.
      for (int s = 0; s < 32; s += MASKWISE_COMPACT) {
        const unsigned kept = m == nullptr ? ~0u : lane_bits(m + i + s);
        for (int l = 0; l < MASKWISE_COMPACT; l += L) {
          unsigned& mine = bits[(s + l) / L];
          mine = kept >> l & kAll;
          if constexpr (kLimited) mine &= lane_bits_of<K>((LaneMask<K>)(load(i + s + l) <= limit));
          any |= mine;
        }
      }
      // Few get below a limit, so many are refused together.
      if (kLimited && any == 0) continue;
      for (int s = 0; s < 32; s += L) put(i + s, load(i + s), bits[s / L]);
    }
  }
#endif
  for (; i < n; ++i) {
    const K key = key_of<Kind::kPlaced>(x[i], flip);
    out[count] = Kind::make(key, place + i);
    count += (m == nullptr || m[i] != 0) && (!kLimited || key <= limit);
  }
  return count;
}

// Copies the entries e with lo <= e <= hi, in order, and returns how many; adds to `less` how many are below. In place
// (out == from) is fine.
template <class E>
int64_t within(E* out, const E* from, int64_t n, E lo, E hi, int64_t& less) {
  int64_t count = 0, below = 0, i = 0;
#if defined(MASKWISE_COMPACT)
  if constexpr (!std::is_same_v<E, WideEntry>) {
    constexpr int L = kLanes<E>;
    LaneMask<E> belows{};
    for (; i + L <= n; i += L) {
      const auto v = load_raw<Vec<E>>(from + i);
      const auto low = (LaneMask<E>)(v < lo);
      belows -= low;
      count += store_chosen(out + count, v, lane_bits_of<E>(~low & (LaneMask<E>)(v <= hi)));
    }
    for (int l = 0; l < L; ++l) below += static_cast<int64_t>(belows[l]);
  }
#endif
  for (; i < n; ++i) {
    const E e = from[i];
    out[count] = e;
    const bool low = e < lo;
    below += low;
    count += !low && !(hi < e);
  }
  less += below;
  return count;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
