// A convolution of tiles that reads its map in place: which position reads what.
#pragma once

#include "conv.h"

namespace maskwise {

// Output channels of a panel of the weight: (panels, taps, channels, kDirectPanel).
constexpr int64_t kDirectPanel = 32;

// A tile is three int32: batch entry, row and column of the grid. See Tiling in ops/conv/tiles.py.
struct DirectCall {
  const float* x;
  const float* weight;
  const float* bias;   // as many as the panels have outputs
  const float* zeros;  // as many as there are channels
  const int32_t* tiles;
  int64_t count, channels, outputs, height, width;
  Strides strides;
  Bits valid;
  int64_t step[2], first[2], size[2], kernel[2], stride[2], dilation[2];

  int64_t positions() const { return count * size[0] * size[1]; }

  // For positions [begin, begin + rows), the pointers that each tap reads, `rows` of them a tap, and the numbers of the
  // taps; those of which nothing is valid are left out. Returns how many there are.
  int64_t find_taps(int64_t begin, int64_t rows, const float** from, int32_t* which) const {
    int64_t batch[16], top[16], left[16];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = begin + r, inner = at % (size[0] * size[1]);
      const int32_t* tile = tiles + at / (size[0] * size[1]) * 3;
      batch[r] = tile[0];
      top[r] = tile[1] * step[0] + first[0] + inner / size[1] * stride[0];
      left[r] = tile[2] * step[1] + first[1] + inner % size[1] * stride[1];
    }
    int64_t used = 0;
    for (int64_t ky = 0; ky < kernel[0]; ++ky)
      for (int64_t kx = 0; kx < kernel[1]; ++kx) {
        bool any = false;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t y = top[r] + ky * dilation[0], column = left[r] + kx * dilation[1];
          const bool kept = y >= 0 && y < height && column >= 0 && column < width &&
                            (valid.data == nullptr || valid.line(batch[r], y)[column * valid.column] != 0);
          any |= kept;
          from[used * rows + r] = kept ? x + batch[r] * strides.batch + y * strides.row + column * strides.column : zeros;
        }
        which[used] = static_cast<int32_t>(ky * kernel[1] + kx);
        used += any;
      }
    return used;
  }
};

}  // namespace maskwise
