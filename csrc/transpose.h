// Transposes, gathers and scatters of elements that are only bytes. Squares are transposed in registers, so that each cache
// line is read once and not once for every row.
#pragma once

#include "common.h"

namespace maskwise {

// A vector of 16 bytes, which every CPU has; wider ones would not transpose faster than memory delivers them.
template <class T>
struct Packed16 {
  typedef T type __attribute__((vector_size(16)));
};

// Lanes of a and b alternately, of their lower or upper halves.
template <bool kUpper, class V, size_t... I>
inline V zip(V a, V b, std::index_sequence<I...>) {
  constexpr size_t N = sizeof...(I);
  return __builtin_shufflevector(a, b, static_cast<int>(I % 2 * N + I / 2 + (kUpper ? N / 2 : 0))...);
}

// The side of the squares that are transposed in registers.
template <class T>
constexpr int kSquare = sizeof(T) == 1 ? 8 : 16 / static_cast<int>(sizeof(T));

// Row j of a square of T is at from + j * across; it becomes column j of the rows at to + k * pitch. In bytes.
template <class T>
inline void transpose_square(const char* from, int64_t across, char* to, int64_t pitch) {
  using V = typename Packed16<T>::type;
  constexpr int N = kSquare<T>;
  constexpr auto kLanes = std::make_index_sequence<16 / sizeof(T)>{};
  if constexpr (sizeof(T) == 1) {
    // Half vectors: the first round leaves four whole ones, each with alternate bytes of two rows.
    using W = Packed16<uint16_t>::type;
    using D = Packed16<uint32_t>::type;
    constexpr auto kWords = std::make_index_sequence<8>{};
    constexpr auto kDoubles = std::make_index_sequence<4>{};
    V rows[8];
    for (int j = 0; j < 8; ++j) {
      uint64_t word;
      std::memcpy(&word, from + j * across, 8);
      rows[j] = (V)(typename Packed16<uint64_t>::type{word, 0});
    }
    W pairs[4];
    for (int j = 0; j < 4; ++j) pairs[j] = (W)zip<false>(rows[2 * j], rows[2 * j + 1], kLanes);
    const D low[] = {(D)zip<false>(pairs[0], pairs[1], kWords), (D)zip<false>(pairs[2], pairs[3], kWords)};
    const D high[] = {(D)zip<true>(pairs[0], pairs[1], kWords), (D)zip<true>(pairs[2], pairs[3], kWords)};
    const D zipped[] = {zip<false>(low[0], low[1], kDoubles), zip<true>(low[0], low[1], kDoubles),
                        zip<false>(high[0], high[1], kDoubles), zip<true>(high[0], high[1], kDoubles)};
    for (int k = 0; k < 8; ++k)
      std::memcpy(to + k * pitch, reinterpret_cast<const char*>(zipped) + 8 * k, 8);
  } else {
    V rows[N], zipped[N];
    for (int j = 0; j < N; ++j) std::memcpy(&rows[j], from + j * across, 16);
    for (int step = 1; step < N; step *= 2) {
      for (int j = 0; j < N / 2; ++j) {
        zipped[2 * j] = zip<false>(rows[j], rows[j + N / 2], kLanes);
        zipped[2 * j + 1] = zip<true>(rows[j], rows[j + N / 2], kLanes);
      }
      for (int j = 0; j < N; ++j) rows[j] = zipped[j];
    }
    for (int k = 0; k < N; ++k) std::memcpy(to + k * pitch, &rows[k], 16);
  }
}

// `height` rows of w elements, to + k * pitch: element j of row k is at from + k * sizeof(T) + j * across. In bytes.
template <class T>
inline void transpose_tile(const char* from, int64_t across, int64_t height, int64_t w, char* to, int64_t pitch) {
  constexpr int64_t kSize = sizeof(T);
  int64_t j = 0;
  // Elements of 16 bytes (complex128) have no lanes.
  if constexpr (kSize <= 8) {
    constexpr int N = kSquare<T>;
    for (; j + N <= w; j += N) {
      int64_t k = 0;
      for (; k + N <= height; k += N)
        transpose_square<T>(from + k * kSize + j * across, across, to + k * pitch + j * kSize, pitch);
      for (; k < height; ++k)
        for (int64_t c = j; c < j + N; ++c)
          std::memcpy(to + k * pitch + c * kSize, from + k * kSize + c * across, kSize);
    }
  }
  for (; j < w; ++j)
    for (int64_t k = 0; k < height; ++k)
      std::memcpy(to + k * pitch + j * kSize, from + k * kSize + j * across, kSize);
}

inline void transpose_tile(int bytes, const char* from, int64_t across, int64_t height, int64_t w, char* to, int64_t pitch) {
  dispatch_bytes(bytes, [&](auto t) { transpose_tile<decltype(t)>(from, across, height, w, to, pitch); });
}

// Eight at a time, since the compiler unrolls no loop of unknown length.
template <class T>
inline void gather(char* to, const char* from, int64_t stride, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8, to += 8 * sizeof(T), from += 8 * stride) {
    T values[8];
    for (int k = 0; k < 8; ++k) std::memcpy(&values[k], from + k * stride, sizeof(T));
    std::memcpy(to, values, sizeof(values));
  }
  for (; i < n; ++i, to += sizeof(T), from += stride) std::memcpy(to, from, sizeof(T));
}

// n elements of any size next to each other, from any stride in bytes.
inline void gather(int bytes, char* to, const char* from, int64_t stride, int64_t n) {
  dispatch_bytes(bytes, [&](auto t) { gather<decltype(t)>(to, from, stride, n); });
}

template <class T>
inline void scatter(char* to, int64_t stride, const char* from, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8, to += 8 * stride, from += 8 * sizeof(T)) {
    T values[8];
    std::memcpy(values, from, sizeof(values));
    for (int k = 0; k < 8; ++k) std::memcpy(to + k * stride, &values[k], sizeof(T));
  }
  for (; i < n; ++i, to += stride, from += sizeof(T)) std::memcpy(to, from, sizeof(T));
}

// The inverse of gather.
inline void scatter(int bytes, char* to, int64_t stride, const char* from, int64_t n) {
  dispatch_bytes(bytes, [&](auto t) { scatter<decltype(t)>(to, stride, from, n); });
}

// Rows of a mask that are transposed together.
constexpr int kTransposedRows = 8;

// kTransposedRows rows of w bytes, to rows + k * pitch; byte k of column j is at m[k + j * stride].
inline void transpose_rows(const uint8_t* m, int64_t stride, int64_t w, uint8_t* rows, int64_t pitch) {
  transpose_tile<uint8_t>(reinterpret_cast<const char*>(m), stride, kTransposedRows, w, reinterpret_cast<char*>(rows), pitch);
}

}  // namespace maskwise
