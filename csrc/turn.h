// The bytes of a mask that lies across: its rows are turned into what a walk over columns reads.
#pragma once

#include "common.h"

namespace maskwise {

constexpr int kTurned = 8;

// kTurned rows of w bytes, to rows + k * pitch; byte k of column j is at m[k + j * stride]. Eight by eight bytes are
// turned in registers, so that each cache line is asked for once and not for every row.
inline void turn(const uint8_t* m, int64_t stride, int64_t w, uint8_t* rows, int64_t pitch) {
  int64_t j = 0;
  for (; j + 8 <= w; j += 8) {
    uint64_t block[8];
    for (int c = 0; c < 8; ++c) std::memcpy(&block[c], m + (j + c) * stride, 8);
    // Halves, quarters and eighths change places between words, as in any transposition by powers of two.
    for (int step = 4; step > 0; step /= 2) {
      const uint64_t low = step == 4 ? 0x00000000ffffffffull : step == 2 ? 0x0000ffff0000ffffull : 0x00ff00ff00ff00ffull;
      for (int c = 0; c < 8; ++c) {
        if (c & step) continue;
        const uint64_t a = block[c], b = block[c + step];
        block[c] = (a & low) | ((b & low) << (8 * step));
        block[c + step] = ((a >> (8 * step)) & low) | (b & ~low);
      }
    }
    for (int k = 0; k < 8; ++k) std::memcpy(rows + k * pitch + j, &block[k], 8);
  }
  for (; j < w; ++j)
    for (int k = 0; k < kTurned; ++k) rows[k * pitch + j] = m[k + j * stride];
}

}  // namespace maskwise
