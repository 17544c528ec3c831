// What the kernels of convolutions share: masks of positions, and the runs of what is wanted.
#pragma once

#include "loops.h"
#include "select_mask.h"

#include <optional>

namespace maskwise {

using Sizes = std::vector<int64_t>;

// A mask of positions; without a tensor, everything is kept.
struct Bits {
  const uint8_t* data = nullptr;
  int64_t batch = 0, row = 0, column = 0;

  explicit Bits(const std::optional<Tensor>& bits) {
    if (!bits.has_value()) return;
    data = static_cast<const uint8_t*>(bits->const_data_ptr());
    batch = bits->stride(0), row = bits->stride(1), column = bits->stride(2);
  }

  const uint8_t* line(int64_t b, int64_t y) const { return data + b * batch + y * row; }

  // How many of the positions [begin, end) of a line are kept.
  int64_t count(int64_t b, int64_t y, int64_t begin, int64_t end) const {
    if (data == nullptr) return end - begin;
    const uint8_t* at = line(b, y) + begin * column;
    if (column == 1) return count_kept(at, end - begin);
    int64_t kept = 0;
    for (int64_t x = begin; x < end; ++x, at += column) kept += *at != 0;
    return kept;
  }

  // Calls run(kept, begin, end) for stretches of [begin, end) of a line that are all kept or all dropped.
  template <class Run>
  void for_each_stretch(int64_t b, int64_t y, int64_t begin, int64_t end, const Run& run) const {
    if (data == nullptr) {
      if (begin < end) run(true, begin, end);
      return;
    }
    const uint8_t* at = line(b, y);
    while (begin < end) {
      const bool kept = at[begin * column] != 0;
      int64_t stop = begin + 1;
      while (stop < end && (at[stop * column] != 0) == kept) ++stop;
      run(kept, begin, stop);
      begin = stop;
    }
  }
};

// The strides of a map of (batch, channels, height, width), in elements.
struct Strides {
  int64_t batch, channel, row, column;
  explicit Strides(const Tensor& map)
      : batch(map.stride(0)), channel(map.stride(1)), row(map.stride(2)), column(map.stride(3)) {}
};

// Wanted positions next to each other.
struct Run {
  int64_t row, begin, end;
};

// Runs of the same columns in rows that follow each other, which share the loads of the weight.
struct Band {
  int64_t row, rows, begin, end;
};

// A part of a row that runs read, and what is valid of it.
struct StagedBlock {
  int64_t row, begin, end;
  Kept kept;
};

template <class T>
struct Slice {
  const T *first, *last;
  const T* begin() const { return first; }
  const T* end() const { return last; }
  bool empty() const { return first == last; }
};

// A depthwise convolution: what is wanted as runs, and what these read; the same for all channels.
struct DepthwiseRuns {
  // Columns that are staged together.
  static constexpr int64_t kBlock = 32;
  // Runs of a band.
  static constexpr int64_t kBand = 4;

  int64_t batch, channels, rows, columns;
  int64_t kernel[2], stride[2], before[2], dilation[2];
  int64_t top, height;    // of staged planes: rows of zeros before the first row, and rows in all
  int64_t margin, pitch;  // of staged rows: zeros before the first column, and elements of a row
  int64_t padded;         // channels, rounded up to whole vectors
  int64_t work = 0;       // products of one channel of one batch entry
  Bits valid;
  std::vector<Run> runs;
  std::vector<Band> bands;
  std::vector<StagedBlock> blocks;
  std::vector<int64_t> run_starts{0}, band_starts{0}, block_starts{0};  // of each batch entry

  DepthwiseRuns(const Tensor& x, const std::optional<Tensor>& valid_bits, const std::optional<Tensor>& wanted_bits,
                const Sizes& g, const Sizes& coarse)
      : batch(x.size(0)),
        channels(x.size(1)),
        rows(x.size(2)),
        columns(x.size(3)),
        kernel{g[0], g[1]},
        stride{g[2], g[3]},
        before{g[4], g[5]},
        dilation{g[6], g[7]},
        padded(ceil_div(x.size(1), 16) * 16),
        valid(valid_bits) {
    const Bits wanted(wanted_bits);
    const int64_t span = dilation[1] * (kernel[1] - 1);
    top = std::max<int64_t>(before[0], 0);
    height = top + std::max(rows, (coarse[0] - 1) * stride[0] + dilation[0] * (kernel[0] - 1) + 1 - before[0]);
    margin = ceil_div(before[1], 16) * 16;
    // Vectors may reach past the last tap of the last position.
    pitch = ceil_div(margin + std::max(columns, coarse[1] + span - before[1]) + 64, 16) * 16;
    int64_t count = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t y = 0; y < coarse[0]; ++y)
        wanted.for_each_stretch(b, y, 0, coarse[1], [&](bool kept, int64_t begin, int64_t end) {
          if (!kept) return;
          runs.push_back({y, begin, end});
          count += end - begin;
        });
      run_starts.push_back(static_cast<int64_t>(runs.size()));
    }
    work = std::max<int64_t>(1, count / std::max<int64_t>(1, batch)) * kernel[0] * kernel[1];
  }

  // Joins runs of the same columns: kBand of them, or one.
  void find_bands() {
    for (int64_t b = 0; b < batch; ++b) {
      std::vector<Run> open;
      const auto close = [&](const Run& first, int64_t end) {
        int64_t row = first.row;
        for (; row + kBand <= end; row += kBand) bands.push_back({row, kBand, first.begin, first.end});
        for (; row < end; ++row) bands.push_back({row, 1, first.begin, first.end});
      };
      const Slice<Run> all = runs_of(b);
      int64_t row = 0;
      for (const Run *first = all.begin(), *last = first; first != all.end(); first = last, ++row) {
        while (last != all.end() && last->row == first->row) ++last;
        // Those of the row before that go on; both are in the order of their columns.
        std::vector<Run> next;
        size_t at = 0;
        if (first->row != row) {
          for (const Run& run : open) close(run, row);
          open.clear();
          row = first->row;
        }
        for (const Run* run = first; run != last; ++run) {
          for (; at < open.size() && open[at].begin < run->begin; ++at) close(open[at], row);
          const bool same = at < open.size() && open[at].begin == run->begin && open[at].end == run->end;
          next.push_back(same ? open[at++] : *run);
        }
        for (; at < open.size(); ++at) close(open[at], row);
        open = std::move(next);
      }
      for (const Run& run : open) close(run, row);
      band_starts.push_back(static_cast<int64_t>(bands.size()));
    }
  }

  // Finds what the runs read, for kernels that stage it.
  void find_blocks() {
    const int64_t each = ceil_div(columns, kBlock), span = dilation[1] * (kernel[1] - 1);
    std::vector<uint8_t> needed(rows * each);
    for (int64_t b = 0; b < batch; ++b) {
      std::fill(needed.begin(), needed.end(), 0);
      for (const Run& run : runs_of(b)) {
        const int64_t from = std::max<int64_t>(run.begin * stride[1] - before[1], 0);
        const int64_t to = std::min((run.end - 1) * stride[1] - before[1] + span + 1, columns);
        if (from >= to) continue;
        for (int64_t ky = 0; ky < kernel[0]; ++ky) {
          const int64_t row = run.row * stride[0] - before[0] + ky * dilation[0];
          if (row < 0 || row >= rows) continue;
          std::memset(needed.data() + row * each + from / kBlock, 1, (to - 1) / kBlock - from / kBlock + 1);
        }
      }
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < each; ++i) {
          if (!needed[row * each + i]) continue;
          const int64_t begin = i * kBlock, end = std::min(begin + kBlock, columns);
          const int64_t kept = valid.count(b, row, begin, end);
          blocks.push_back({row, begin, end, kept == 0 ? Kept::none : kept == end - begin ? Kept::all : Kept::bits});
        }
      block_starts.push_back(static_cast<int64_t>(blocks.size()));
    }
  }

  Slice<Run> runs_of(int64_t b) const { return {runs.data() + run_starts[b], runs.data() + run_starts[b + 1]}; }
  Slice<Band> bands_of(int64_t b) const { return {bands.data() + band_starts[b], bands.data() + band_starts[b + 1]}; }
  Slice<StagedBlock> blocks_of(int64_t b) const {
    return {blocks.data() + block_starts[b], blocks.data() + block_starts[b + 1]};
  }
};

}  // namespace maskwise
