// Convolutions by tiles: which tiles have something wanted, a batch of what they read, and the result of what they gave.
// Pure movement of bytes, as in select.cpp; between them torch's own convolution runs. Arguments were checked in Python.
// Bits are bool of (batch, height, width), by strides. A tile is three int32: batch entry, row and column of the grid.
#include "conv.h"
#include "zero_pages.h"

namespace maskwise {
namespace {

struct Tile {
  int32_t batch, row, column;
};

// What a tile reads: see Tiling in ops/conv/tiles.py.
struct Window {
  int64_t step[2], first[2], size[2];
  explicit Window(const Sizes& reads)
      : step{reads[0], reads[1]}, first{reads[2], reads[3]}, size{reads[4], reads[5]} {}
};

// Tiles in which something is wanted and, where there are source bits, something that is read is valid.
std::tuple<Tensor, int64_t> conv_active(const std::optional<Tensor>& target, const std::optional<Tensor>& source,
                                        Sizes sizes, Sizes size, Sizes reads) {
  const Bits wanted(target), valid(source);
  const Window window(reads);
  const int64_t height = sizes[1], width = sizes[2];
  const int64_t rows = ceil_div(height, size[0]), columns = ceil_div(width, size[1]), bands = sizes[0] * rows;
  // Wanted positions of each tile; those of the same band are next to each other.
  std::vector<int32_t> counts(bands * columns, 0);
  const auto reads_valid = [&](int64_t b, int64_t row, int64_t column) {
    const int64_t top = row * window.step[0] + window.first[0], left = column * window.step[1] + window.first[1];
    const int64_t bottom = std::min(top + window.size[0], source->size(1));
    const int64_t begin = std::max<int64_t>(left, 0), end = std::min(left + window.size[1], source->size(2));
    for (int64_t y = std::max<int64_t>(top, 0); y < bottom && begin < end; ++y)
      if (valid.count(b, y, begin, end) > 0) return true;
    return false;
  };
  parallel(bands, size[0] * width, [&](int64_t from, int64_t to) {
    for (int64_t band = from; band < to; ++band) {
      const int64_t b = band / rows, row = band % rows;
      int32_t* count = counts.data() + band * columns;
      for (int64_t y = row * size[0]; y < std::min((row + 1) * size[0], height); ++y)
        for (int64_t c = 0; c < columns; ++c)
          count[c] += static_cast<int32_t>(wanted.count(b, y, c * size[1], std::min((c + 1) * size[1], width)));
      if (!source.has_value()) continue;
      for (int64_t c = 0; c < columns; ++c)
        if (count[c] > 0 && !reads_valid(b, row, c)) count[c] = 0;
    }
  });
  const int64_t active = static_cast<int64_t>(counts.size()) - std::count(counts.begin(), counts.end(), 0);
  Tensor tiles = empty_cpu({active, 3}, ScalarType::Int);
  auto* tile = static_cast<Tile*>(tiles.mutable_data_ptr());
  int64_t kept = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    const auto band = static_cast<int64_t>(i) / columns;
    *tile++ = {static_cast<int32_t>(band / rows), static_cast<int32_t>(band % rows),
               static_cast<int32_t>(static_cast<int64_t>(i) % columns)};
    kept += counts[i];
  }
  return {tiles, kept};
}

// A map of (batch, channels, height, width) by strides in bytes.
template <class Byte>
struct Map {
  Byte* data;
  int64_t channels, height, width, batch, channel, row, column;

  Map(Byte* data, const Tensor& map)
      : data(data), channels(map.size(1)), height(map.size(2)), width(map.size(3)) {
    const auto bytes = static_cast<int64_t>(map.element_size());
    batch = map.stride(0) * bytes, channel = map.stride(1) * bytes, row = map.stride(2) * bytes;
    column = map.stride(3) * bytes;
  }
  Byte* at(int64_t b, int64_t y, int64_t x) const { return data + b * batch + y * row + x * column; }
};

// n pixels, of which the channels become contiguous.
template <class Word>
void copy_pixels(const Map<const char>& x, const char* from, int64_t n, char* to) {
  const int64_t pixel = x.channels * static_cast<int64_t>(sizeof(Word));
  if (x.channel == static_cast<int64_t>(sizeof(Word)) || x.channels == 1) {
    if (x.column == pixel || n == 1) {
      std::memcpy(to, from, n * pixel);
      return;
    }
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * pixel, from + i * x.column, pixel);
  } else if (x.column == static_cast<int64_t>(sizeof(Word)) && n > 1) {
    transpose_tile<Word>(from, x.channel, n, x.channels, to, pixel);
  } else {
    for (int64_t i = 0; i < n; ++i) gather<Word>(to + i * pixel, from + i * x.column, x.channel, x.channels);
  }
}

template <class Word>
void fill_words(char* to, Word value, int64_t n) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * static_cast<int64_t>(sizeof(Word)), &value, sizeof(Word));
}

// Writes one value into n pixels of a line, all channels.
template <class Word>
void fill_pixels(const Map<char>& out, char* to, Word value, int64_t n) {
  if (out.channel == static_cast<int64_t>(sizeof(Word)) && out.column == out.channels * out.channel) {
    fill_words(to, value, n * out.channels);
  } else if (out.column == static_cast<int64_t>(sizeof(Word))) {
    for (int64_t c = 0; c < out.channels; ++c) fill_words(to + c * out.channel, value, n);
  } else {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < out.channels; ++c)
        std::memcpy(to + i * out.column + c * out.channel, &value, sizeof(Word));
  }
}

// The windows of tiles, channels last. Outside of the map, and where nothing is valid, lies zero or `fill`, which has one
// element; with `edge`, what is outside repeats the nearest position.
Tensor conv_gather(const Tensor& x, const std::optional<Tensor>& bits, const Tensor& tiles, Sizes reads,
                   const std::optional<Tensor>& fill, bool edge) {
  const Window window(reads);
  const int64_t n = tiles.size(0), channels = x.size(1), height = window.size[0], width = window.size[1];
  Tensor out = empty_cpu({n, channels, height, width}, {height * width * channels, 1, width * channels, channels},
                         x.scalar_type());
  if (out.numel() == 0) return out;
  const Bits valid(bits);
  const auto* tile = static_cast<const Tile*>(tiles.const_data_ptr());
  dispatch_bytes(x.element_size(), [&](auto word) {
    using Word = decltype(word);
    const Map<const char> map(static_cast<const char*>(x.const_data_ptr()), x);
    const int64_t pixel = channels * static_cast<int64_t>(sizeof(Word));
    Word value{};
    if (fill.has_value()) std::memcpy(&value, fill->const_data_ptr(), sizeof(Word));
    const auto blank = [&](char* to, int64_t pixels) {
      if (fill.has_value()) fill_words<Word>(to, value, pixels * channels);
      else std::memset(to, 0, pixels * pixel);
    };
    char* data = static_cast<char*>(out.mutable_data_ptr());
    // Narrow windows of planes take some channels of all tiles at a time: the pages of a few planes stay in the TLB.
    constexpr int64_t kBlock = 16;
    const bool in_blocks = width <= 4 && map.column == static_cast<int64_t>(sizeof(Word)) && map.channel != map.column;
    // Rows, since there may be one tile alone.
    parallel(n * height, channels * width, [&](int64_t begin, int64_t end) {
      // The channels from c on, of one row of a window.
      const auto copy_row = [&](int64_t line, int64_t c, int64_t some) {
        const Tile& at = tile[line / height];
        const int64_t left = at.column * window.step[1] + window.first[1];
        const int64_t first = std::clamp<int64_t>(-left, 0, width);
        const int64_t last = std::clamp<int64_t>(map.width - left, first, width);
        int64_t y = at.row * window.step[0] + window.first[0] + line % height;
        if (edge) y = std::clamp<int64_t>(y, 0, map.height - 1);
        char* to = data + line * width * pixel;
        if (y < 0 || y >= map.height || first == last) {
          if (c == 0) blank(to, width);
          return;
        }
        const int64_t offset = c * static_cast<int64_t>(sizeof(Word));
        valid.for_each_stretch(at.batch, y, left + first, left + last, [&](bool kept, int64_t from, int64_t stop) {
          char* place = to + (from - left) * pixel;
          if (!kept && c == 0) blank(place, stop - from);
          if (kept && !in_blocks) copy_pixels<Word>(map, map.at(at.batch, y, from), stop - from, place);
          for (int64_t x = from; kept && in_blocks && x < stop; ++x, place += pixel)
            gather<Word>(place + offset, map.at(at.batch, y, x) + c * map.channel, map.channel, some);
        });
        if (c + some < channels) return;
        if (!edge) {
          blank(to, first);
          blank(to + last * pixel, width - last);
          return;
        }
        for (int64_t i = 0; i < first; ++i) std::memcpy(to + i * pixel, to + first * pixel, pixel);
        for (int64_t i = last; i < width; ++i) std::memcpy(to + i * pixel, to + (last - 1) * pixel, pixel);
      };
      const int64_t step = in_blocks ? kBlock : channels;
      for (int64_t c = 0; c < channels; c += step)
        for (int64_t line = begin; line < end; ++line) copy_row(line, c, std::min(step, channels - c));
    });
  });
  return out;
}

// The inverse of copy_pixels: n pixels, of which the channels are contiguous, into a map.
template <class Word>
void place_pixels(const Map<char>& out, const char* from, int64_t n, char* to) {
  const int64_t pixel = out.channels * static_cast<int64_t>(sizeof(Word));
  if (out.channel == static_cast<int64_t>(sizeof(Word)) || out.channels == 1) {
    if (out.column == pixel || n == 1) {
      std::memcpy(to, from, n * pixel);
      return;
    }
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * out.column, from + i * pixel, pixel);
  } else if (out.column == static_cast<int64_t>(sizeof(Word)) && n > 1) {
    transpose_tile<Word>(from, pixel, out.channels, n, to, out.channel);
  } else {
    for (int64_t i = 0; i < n; ++i) scatter<Word>(to + i * out.column, out.channel, from + i * pixel, out.channels);
  }
}

// A batch of tiles: (n, channels, height, width), channels last.
struct Batch {
  const char* data;
  int64_t pixel, row, tile, top, left, height, width;

  Batch(const Tensor& batch, const Sizes& size, const Sizes& crop)
      : data(static_cast<const char*>(batch.const_data_ptr())),
        pixel(batch.size(1) * static_cast<int64_t>(batch.element_size())),
        row(batch.size(3) * pixel),
        tile(batch.size(2) * row),
        top(crop[0]),
        left(crop[1]),
        height(size[0]),
        width(size[1]) {}
  const char* at(int64_t t, int64_t y, int64_t x) const { return data + t * tile + (top + y) * row + (left + x) * pixel; }
};

// One tile into its place; what is not wanted of it gets `other`, where there is one.
template <class Word>
void place_tile(const Batch& batch, int64_t t, const Tile& at, const Bits& wanted, const Word* other,
                const Map<char>& out) {
  const int64_t top = at.row * batch.height, left = at.column * batch.width;
  const int64_t end = std::min(left + batch.width, out.width);
  for (int64_t y = top; y < std::min(top + batch.height, out.height); ++y) {
    wanted.for_each_stretch(at.batch, y, left, end, [&](bool kept, int64_t from, int64_t stop) {
      char* to = out.at(at.batch, y, from);
      if (kept) place_pixels<Word>(out, batch.at(t, y - top, from - left), stop - from, to);
      else if (other != nullptr) fill_pixels<Word>(out, to, *other, stop - from);
    });
  }
}

// Into a result that is there: only what is wanted is written.
void conv_scatter_out(const Tensor& values, const Tensor& tiles, const std::optional<Tensor>& bits, Sizes size,
                      Sizes crop, Tensor out) {
  if (values.numel() == 0 || out.numel() == 0) return;
  const Bits wanted(bits);
  const Batch batch(values, size, crop);
  const auto* tile = static_cast<const Tile*>(tiles.const_data_ptr());
  dispatch_bytes(out.element_size(), [&](auto word) {
    using Word = decltype(word);
    const Map<char> map(static_cast<char*>(out.mutable_data_ptr()), out);
    parallel(tiles.size(0), size[0] * size[1] * map.channels, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) place_tile<Word>(batch, t, tile[t], wanted, nullptr, map);
    });
  });
}

// A result with one value wherever no tile writes; every place is written once. `other` has one element.
Tensor conv_scatter(const Tensor& values, const Tensor& tiles, const std::optional<Tensor>& bits, const Tensor& other,
                    Sizes sizes, Sizes size, Sizes crop, bool channels_last) {
  const int64_t channels = sizes[1], height = sizes[2], width = sizes[3];
  Tensor out = channels_last ? empty_cpu(sizes, {height * width * channels, 1, width * channels, channels},
                                         values.scalar_type())
                             : empty_cpu(sizes, values.scalar_type());
  if (out.numel() == 0) return out;
  // Where the channels of a pixel lie together, most pages of a large result are not touched.
  if (channels_last && is_zero(other) && zero_pages(out, true)) {
    conv_scatter_out(values, tiles, bits, size, crop, out);
    return out;
  }
  // Between few tiles lie many short stretches of each plane: one long fill is faster than those.
  if (!channels_last && is_zero(other) && 2 * tiles.size(0) * size[0] * size[1] < sizes[0] * height * width) {
    char* data = static_cast<char*>(out.mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(out.element_size());
    parallel(out.numel(), 1, [&](int64_t begin, int64_t end) {
      std::memset(data + begin * bytes, 0, (end - begin) * bytes);
    });
    conv_scatter_out(values, tiles, bits, size, crop, out);
    return out;
  }
  const Bits wanted(bits);
  const Batch batch(values, size, crop);
  const int64_t rows = ceil_div(height, size[0]), bands = sizes[0] * rows;
  const auto* tile = static_cast<const Tile*>(tiles.const_data_ptr());
  // Tiles are in the order of the bands: where each band starts.
  std::vector<int64_t> starts(bands + 1, 0);
  for (int64_t t = 0; t < tiles.size(0); ++t) ++starts[tile[t].batch * rows + tile[t].row + 1];
  for (int64_t band = 0; band < bands; ++band) starts[band + 1] += starts[band];
  dispatch_bytes(out.element_size(), [&](auto word) {
    using Word = decltype(word);
    Word value;
    std::memcpy(&value, other.const_data_ptr(), sizeof(Word));
    const Map<char> map(static_cast<char*>(out.mutable_data_ptr()), out);
    parallel_uneven(bands, size[0] * width * channels, [&](int64_t begin, int64_t end) {
      for (int64_t band = begin; band < end; ++band) {
        const int64_t b = band / rows, top = band % rows * size[0], bottom = std::min(top + size[0], height);
        const auto fill = [&](int64_t from, int64_t stop) {
          if (from >= stop) return;
          if (channels_last || (from > 0 || stop < width)) {
            for (int64_t y = top; y < bottom; ++y) fill_pixels<Word>(map, map.at(b, y, from), value, stop - from);
            return;
          }
          for (int64_t c = 0; c < channels; ++c)
            fill_words(map.at(b, top, 0) + c * map.channel, value, (bottom - top) * width);
        };
        int64_t done = 0;
        for (int64_t t = starts[band]; t < starts[band + 1]; ++t) {
          fill(done, tile[t].column * size[1]);
          place_tile<Word>(batch, t, tile[t], wanted, &value, map);
          done = std::min((tile[t].column + 1) * size[1], width);
        }
        fill(done, width);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("conv_active", TORCH_BOX(&maskwise::conv_active));
  m.impl("conv_gather", TORCH_BOX(&maskwise::conv_gather));
  m.impl("conv_scatter", TORCH_BOX(&maskwise::conv_scatter));
  m.impl("conv_scatter_out", TORCH_BOX(&maskwise::conv_scatter_out));
}
