// A mask as selection reads it: eight positions at a time. Knows nothing of what is moved.
#pragma once

#include "common.h"

namespace maskwise {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of eight positions is the lowest byte of a word");

constexpr uint64_t kOnes = 0x0101010101010101;

// Eight positions, each a byte that is 1 where it is kept and 0 elsewhere. A bool may be any byte that is not 0.
inline uint64_t kept_of_eight(const uint8_t* mask) {
  uint64_t word;
  std::memcpy(&word, mask, 8);
  constexpr uint64_t low = 0x7f * kOnes;
  return ((((word & low) + low) | word) >> 7) & kOnes;
}

// How many of `count` positions are kept.
inline int64_t count_kept(const uint8_t* mask, int64_t count) {
  int64_t kept = 0;
  while (count >= 8) {
    // Each byte counts its own positions, and holds up to 255 of them.
    const int64_t words = std::min<int64_t>(count / 8, 255);
    uint64_t bytes = 0;
    for (int64_t w = 0; w < words; ++w) bytes += kept_of_eight(mask + 8 * w);
    constexpr uint64_t even = 0x00ff00ff00ff00ff;
    const uint64_t pairs = (bytes & even) + ((bytes >> 8) & even);
    kept += static_cast<int64_t>((pairs * 0x0001000100010001) >> 48);
    mask += 8 * words;
    count -= 8 * words;
  }
  for (; count > 0; --count) kept += *mask++ != 0;
  return kept;
}

// Calls run(i) for each of `count` positions that is kept, in order. It pays where few are.
template <class Run>
void for_each_kept(const uint8_t* mask, int64_t count, const Run& run) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (uint64_t kept = kept_of_eight(mask + i); kept; kept &= kept - 1) run(i + __builtin_ctzll(kept) / 8);
  }
  for (; i < count; ++i) {
    if (mask[i]) run(i);
  }
}

// Calls run(kept, first, count) for each stretch of positions in [begin, end) that are all kept or all dropped.
template <class Run>
void for_each_segment(const uint8_t* mask, int64_t begin, int64_t end, const Run& run) {
  while (begin < end) {
    const bool kept = mask[begin] != 0;
    const uint64_t same = kept ? kOnes : 0;
    int64_t stop = begin + 1;
    uint64_t others = 0;
    for (; stop + 8 <= end && others == 0; stop += 8) others = kept_of_eight(mask + stop) ^ same;
    if (others != 0)
      stop += __builtin_ctzll(others) / 8 - 8;
    else
      while (stop < end && (mask[stop] != 0) == kept) ++stop;
    run(kept, begin, stop - begin);
    begin = stop;
  }
}

}  // namespace maskwise
