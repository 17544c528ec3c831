// The loops of kernels that map single elements (fill, losses, gradients of reductions): in the memory order of the
// result, in runs of the innermost loop; a run of which an interval is kept is handed out in parts that are all kept, or
// all dropped, and so are blocks of mask bytes. Operands that lie across it (a contiguous mask of a transposed x) are transposed
// tile by tile; those of any other stride are gathered into small buffers. Counts in bytes, knows nothing of types.
#pragma once

#include "loops.h"
#include "zero_pages.h"

namespace maskwise {

// At most so many, and the position along the intervals of the mask.
constexpr int kElementOperands = 9;
constexpr int kElementPosition = kElementOperands - 1;
// Elements of one task, whatever the number of threads: a sum over tasks is then the same for any.
constexpr int64_t kElementTask = 16384;
// Elements that are gathered at a time.
constexpr int64_t kGathered = 512;
// Elements of a tile, and how many rows it has at least where there are as many: a cache line of mask bytes.
constexpr int64_t kTile = 4096;
constexpr int64_t kTileRows = 64;

using ElementLoops = Loops<kElementOperands>;

// What the loops do not say of the operands.
struct ElementOperands {
  int count;                        // how many the kernel takes
  int bytes[kElementOperands];      // of an element
  bool expands[kElementOperands];   // whether the kernel takes a stride of 0
  int mask;                         // which is the mask: bytes, or bounds of intervals
  bool skips;                       // whether nothing is read of a run of which nothing is kept
};

// Where the operands stand, step by step: no division for each, as `offset_of` has.
template <int N>
struct Steps {
  const Loops<N>& loops;
  Offset<N> at;
  std::vector<int64_t> left;  // steps of each loop that are still to come

  Steps(const Loops<N>& all, int64_t index) : loops(all), at(offset_of(all, index)), left(all.size()) {
    for (size_t l = loops.size(); l-- > 0; index /= loops[l].size) left[l] = loops[l].size - 1 - index % loops[l].size;
  }

  void next() {
    for (size_t l = loops.size(); l-- > 0;) {
      if (left[l]-- > 0) return at.step(loops[l], 1);
      left[l] = loops[l].size - 1;
      at.step(loops[l], -left[l]);
    }
  }
};

class Elementwise {
 public:
  // `loops` are as make_loops gives them, with the mask's position last; the operand `order` decides the order of the
  // elements.
  Elementwise(ElementLoops loops, const ElementOperands& operands, const Mask& kept, char* const* pointers, int order)
      : outer(std::move(loops)), of(operands), mask(kept) {
    for (const auto& loop : outer) elements *= loop.size;
    std::copy_n(pointers, of.count, data);
    if (elements == 0) return;
    if (outer.size() > 1) sort_by_stride(outer, order);
    if (mask.has_intervals()) mask.scale = linearize(outer, of.mask, kElementPosition);
    coalesce(outer);
    inner = innermost(outer, mask, of.mask);
    if (!outer.empty()) outer.pop_back();
    for (int o = 0; o < of.count; ++o) {
      stride[o] = inner.stride[o] == 0 && of.expands[o] ? 0 : of.bytes[o];
      gathered[o] = inner.stride[o] != stride[o] && inner.size != 1;
      if (gathered[o]) buffered += of.bytes[o];
    }
    const auto across = find_rows();
    if (across == outer.end()) return;
    tiled = true;
    rows = *across;
    outer.erase(across);
    width = std::min(inner.size, kTile / std::min(rows.size, kTileRows));
    height = std::min(rows.size, kTile / width);
    tiles = ceil_div(rows.size, height) * ceil_div(inner.size, width);
  }

  // The last tensor decides the order; one more than there are operands stands in for a result. `along` is the dim of the
  // mask's intervals.
  Elementwise(std::initializer_list<const Tensor*> tensors, const ElementOperands& operands, int64_t along)
      : Elementwise(tensors, operands, Mask(*tensors.begin()[operands.mask], along, **(tensors.end() - 1))) {}

  int64_t tasks() const {
    if (elements == 0) return 0;
    return tiled ? elements / (inner.size * rows.size) * tiles : ceil_div(elements, kElementTask);
  }

  // Calls run(task, kept, at, stride, n) for every run: operand o has its n elements at at[o], next to each other or, if
  // it expands, with a stride of 0.
  template <class Run>
  void for_each(const Run& run) const {
    const int64_t each = tiled ? width * height : kElementTask;
    parallel_uneven(tasks(), each, [&](int64_t begin, int64_t end) { run_tasks(begin, end, run); });
  }

  // Of lines of which a part is kept, has the first `bytes` of what is kept `lines` later prefetched, of the first operand and
  // of the last one: the CPU reads ahead along a line, and not from where one ends to where the next one begins.
  void look_ahead(int64_t lines, int64_t bytes) {
    const bool in_bits = !mask.has_intervals() && inner.stride[of.mask] == 1;
    const bool in_intervals = inner.stride[of.mask] == 0 && inner.stride[kElementPosition] != 0;
    if (!(in_bits || in_intervals) || tiled || buffered > 0) return;
    ahead_lines = lines;
    ahead_bytes = bytes;
  }

  // The same where the elements are written, as those of a result that has no gaps; of one that is zeros already, without
  // the runs of which nothing is kept.
  template <class Run>
  void for_each(const FreshPages& result, const Run& run) const {
    const int64_t each = tiled ? width * height : kElementTask, bytes = of.bytes[of.count - 1];
    const auto write = [&](int64_t task, Kept kept, char* const* at, const int64_t* strides, int64_t n) {
      if (kept != Kept::none || !result.are_zeros()) run(task, kept, at, strides, n);
    };
    result.parallel(tasks(), each, tiled ? 0 : each * bytes,
                    [&](int64_t begin, int64_t end) { run_tasks(begin, end, write); });
  }

 private:
  template <class Run>
  void run_tasks(int64_t begin, int64_t end, const Run& run) const {
    std::unique_ptr<char[]> buffer;
    char* buffers[kElementOperands];
    if (buffered > 0) {
      const int64_t most = tiled ? kTile : kGathered;
      buffer.reset(new char[buffered * most]);
      char* next = buffer.get();
      for (int o = 0; o < of.count; ++o) {
        buffers[o] = next;
        if (gathered[o]) next += most * of.bytes[o];
      }
    }
    for (int64_t task = begin; task < end; ++task) {
      if (tiled)
        run_tile(task, buffers, run);
      else
        run_lines(task, buffers, run);
    }
  }

  struct Pointers {
    char* of[kElementOperands];
    explicit Pointers(std::initializer_list<const Tensor*> tensors) {
      int o = 0;
      // Results are the operands that were made for this call.
      for (const Tensor* tensor : tensors) of[o++] = static_cast<char*>(const_cast<void*>(tensor->const_data_ptr()));
    }
  };

  Elementwise(std::initializer_list<const Tensor*> tensors, const ElementOperands& operands, const Mask& kept)
      : Elementwise(loops_of(tensors, operands, kept), operands, kept, Pointers(tensors).of,
                    static_cast<int>(tensors.size()) - 1) {}

  static ElementLoops loops_of(std::initializer_list<const Tensor*> tensors, const ElementOperands& operands,
                               const Mask& kept) {
    Operand all[kElementOperands] = {};
    int o = 0;
    for (const Tensor* tensor : tensors) {
      all[o] = {tensor, operands.bytes[o]};
      ++o;
    }
    all[operands.mask] = kept.operand;
    all[kElementPosition] = kept.position;
    return make_loops(**(tensors.end() - 1), all);
  }

  // The loop along which an operand that must be gathered is contiguous; the widest decides, where there are more.
  ElementLoops::iterator find_rows() {
    auto found = outer.end();
    int widest = 0;
    for (int o = 0; o < of.count; ++o) {
      if (!gathered[o] || of.bytes[o] <= widest || (o == of.mask && mask.has_intervals())) continue;
      for (auto loop = outer.begin(); loop != outer.end(); ++loop) {
        if (loop->stride[o] != of.bytes[o]) continue;
        found = loop;
        widest = of.bytes[o];
      }
    }
    return found;
  }

  KeptRun kept_at(const char* at, int64_t position, int64_t n) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(at);
    return kept_of_run(mask, bytes, position, inner.stride[of.mask], inner.stride[kElementPosition], n);
  }

  // n elements of operand o, from `from` on, next to each other.
  void gather_operand(int o, char* to, const char* from, int64_t position, int64_t n) const {
    if (o == of.mask && mask.has_intervals())
      stage_bits(mask, reinterpret_cast<const uint8_t*>(from), position, inner.stride[o], n, reinterpret_cast<uint8_t*>(to));
    else
      gather(of.bytes[o], to, from, inner.stride[o], n);
  }

  // Hands out a run: what lies before the interval that is kept, the interval, and what lies behind it; of bytes, blocks
  // of which nothing or all is kept, and the others.
  template <class Run>
  void run_parts(int64_t task, const KeptRun& kept, char* const* at, int64_t n, const Run& run) const {
    const auto part = [&](Kept keeps, int64_t begin, int64_t end) {
      if (begin == end) return;
      char* from[kElementOperands];
      for (int o = 0; o < of.count; ++o) from[o] = at[o] + begin * stride[o];
      run(task, keeps, from, stride, end - begin);
    };
    if (kept.kept == Kept::bits && stride[of.mask] == 1 && n >= 2 * kMaskBlock)
      return for_each_block(reinterpret_cast<const uint8_t*>(at[of.mask]), n, part);
    if (kept.kept != Kept::all || kept.end - kept.begin == n) return run(task, kept.kept, at, stride, n);
    part(Kept::none, 0, kept.begin);
    part(Kept::all, kept.begin, kept.end);
    part(Kept::none, kept.end, n);
  }

  // What look_ahead says, of the line at `to`; of one that is kept as a whole nothing, since the CPU reads on to the next.
  // Always inlined, both: see prefetch_line (reduce_rows.h).
  __attribute__((always_inline)) void prefetch_later(const Offset<kElementOperands>& to) const {
    const int last = of.count - 1;
    const auto prefetch = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
      const char* from = data[0] + to[0] + begin * stride[0];
      const char* result = data[last] + to[last] + begin * stride[last];
      for (int64_t i = 0; i < (end - begin) * stride[0]; i += 64) {
        __builtin_prefetch(from + i);
        __builtin_prefetch(result + i, 1);
      }
    };
    const int64_t most = ahead_bytes / stride[0];
    const KeptRun kept = kept_at(data[of.mask] + to[of.mask], to[kElementPosition], inner.size);
    if (kept.kept == Kept::all && kept.end - kept.begin < inner.size)
      prefetch(kept.begin, std::min(kept.end, kept.begin + most));
    if (kept.kept != Kept::bits) return;
    const auto* bits = reinterpret_cast<const uint8_t*>(data[of.mask] + to[of.mask]);
    if (inner.size < kMaskBlock || kept_of_block(bits + inner.size - kMaskBlock) == Kept::all) return;
    for (int64_t i = 0; i + kMaskBlock <= std::min(inner.size, most); i += kMaskBlock)
      if (kept_of_block(bits + i) != Kept::none) prefetch(i, i + kMaskBlock);
  }

  template <class Run>
  void run_lines(int64_t task, char* const* buffers, const Run& run) const {
    const int64_t begin = task * kElementTask, end = std::min(elements, begin + kElementTask);
    Steps<kElementOperands> lines(outer, begin / inner.size);
    std::optional<Steps<kElementOperands>> later;
    int64_t left = ahead_lines == 0 ? 0 : elements / inner.size - begin / inner.size - ahead_lines;
    if (left > 0) later.emplace(outer, begin / inner.size + ahead_lines);
    int64_t step = begin % inner.size;
    for (int64_t index = begin, n = 0; index < end; index += n) {
      n = std::min(inner.size - step, end - index);
      if (left > 0 && step == 0) prefetch_later(later->at);
      auto offset = lines.at;
      if (step != 0) offset.step(inner, step);
      char* at[kElementOperands];
      for (int o = 0; o < of.count; ++o) at[o] = data[o] + offset[o];
      const int64_t position = offset[kElementPosition];
      KeptRun kept = kept_at(at[of.mask], position, n);
      if (buffered > 0 && !(of.skips && kept.kept == Kept::none)) {
        n = std::min(n, kGathered);
        kept = kept_at(at[of.mask], position, n);
        // What is dropped is not read, where the kernel does not need it.
        const int64_t from = of.skips ? kept.begin : 0, to = of.skips ? kept.end : n;
        for (int o = 0; o < of.count; ++o) {
          if (!gathered[o]) continue;
          gather_operand(o, buffers[o] + from * of.bytes[o], at[o] + from * inner.stride[o], position, to - from);
          at[o] = buffers[o];
        }
      }
      run_parts(task, kept, at, n, run);
      step += n;
      if (step == inner.size) {
        step = 0;
        lines.next();
        if (--left > 0) later->next();
      }
    }
  }

  template <class Run>
  void run_tile(int64_t task, char* const* buffers, const Run& run) const {
    const int64_t across = ceil_div(inner.size, width);
    const int64_t column = task % tiles % across * width, row = task % tiles / across * height;
    const int64_t w = std::min(width, inner.size - column), h = std::min(height, rows.size - row);
    auto offset = offset_of(outer, task / tiles);
    offset.step(rows, row);
    offset.step(inner, column);
    const int64_t position = offset[kElementPosition], position_pitch = rows.stride[kElementPosition];
    char* at[kElementOperands];
    int64_t pitch[kElementOperands];
    // Rows that follow each other in every operand are one run.
    bool one_run = true;
    for (int o = 0; o < of.count; ++o) {
      const int bytes = of.bytes[o];
      at[o] = data[o] + offset[o];
      pitch[o] = rows.stride[o];
      if (gathered[o]) {
        pitch[o] = w * bytes;
        if (rows.stride[o] == bytes && !(o == of.mask && mask.has_intervals()))
          transpose_tile(bytes, at[o], inner.stride[o], h, w, buffers[o], pitch[o]);
        else
          for (int64_t r = 0; r < h; ++r)
            gather_operand(o, buffers[o] + r * pitch[o], at[o] + r * rows.stride[o], position + r * position_pitch, w);
        at[o] = buffers[o];
      }
      one_run = one_run && pitch[o] == w * stride[o];
    }
    // An interval begins and ends in each row anew, and its bounds may be others.
    if (one_run && !mask.has_intervals()) return run_parts(task, kept_at(at[of.mask], 0, h * w), at, h * w, run);
    for (int64_t r = 0; r < h; ++r) {
      run_parts(task, kept_at(at[of.mask], position + r * position_pitch, w), at, w, run);
      for (int o = 0; o < of.count; ++o) at[o] += pitch[o];
    }
  }

  ElementLoops outer;  // all loops but the innermost and that of the rows of a tile
  Loop<kElementOperands> inner;
  Loop<kElementOperands> rows;  // the loop along which an operand is contiguous that lies across
  ElementOperands of;
  Mask mask;
  char* data[kElementOperands];
  int64_t elements = 1;
  int64_t stride[kElementOperands] = {};  // of the operands as the kernel gets them
  bool gathered[kElementOperands] = {};   // which operands are copied before the kernel gets them
  int64_t buffered = 0;                   // bytes that the copies take for each element
  bool tiled = false;
  int64_t width = 0, height = 0, tiles = 1;  // of a tile; and how many
  int64_t ahead_lines = 0, ahead_bytes = 0;  // see look_ahead
};

}  // namespace maskwise
