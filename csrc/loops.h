// The loop nest of every kernel: sizes, and the strides of N operands. Broadcasting is a stride of 0, so nothing is
// expanded in memory; loops that step through every operand as one loop would are merged. Built once a call from sizes,
// strides and dims; knows nothing of types. ATen's TensorIterator is the model.
#pragma once

#include "fresh.h"
#include "transpose.h"

namespace maskwise {

using Dims = std::vector<int64_t>;

// One loop: how often, and how far each operand moves each time.
template <int N>
struct Loop {
  int64_t size = 1;
  int64_t stride[N] = {};
};

// Loops from outer to inner.
template <int N>
using Loops = std::vector<Loop<N>>;

// Where the operands stand.
template <int N>
struct Offset {
  int64_t of[N] = {};
  int64_t operator[](int operand) const { return of[operand]; }
  void step(const Loop<N>& loop, int64_t steps) {
    for (int o = 0; o < N; ++o) of[o] += steps * loop.stride[o];
  }
};

// An operand. Its strides count in steps of `unit`: 1 where the kernel has typed pointers, the bytes of an element where
// it has not. Without a tensor the strides are 0, for the caller to set; with a dim `along`, they count the positions
// along it.
struct Operand {
  const Tensor* tensor;
  int64_t unit = 1;
  int64_t along = 0;  // negative, of intervals
};

// What is kept of a line: [start, end).
struct Interval {
  int64_t start, end;
};

// A mask as it comes from Python: bool; or int64 with a leading dim of 2, the starts and ends of intervals along the dim
// `along`, which is counted from the right and negative. Bounds may lie outside of the line.
struct Mask {
  const uint8_t* data;  // bytes, or starts
  int64_t ends = 0;     // bytes from a start to its end; 0 where the mask is bytes
  int64_t length = 0;   // of the lines along which the intervals lie
  int64_t scale = 1;    // steps for each position: see `linearize`
  Operand operand;      // its bytes or bounds
  Operand position;     // the position along its intervals

  Mask(const Tensor& mask, int64_t along, const Tensor& x)
      : data(static_cast<const uint8_t*>(mask.const_data_ptr())),
        operand{&mask, along == 0 ? 1 : static_cast<int64_t>(sizeof(int64_t)), along},
        position{nullptr, 1, along} {
    if (along == 0) return;
    ends = mask.stride(0) * static_cast<int64_t>(sizeof(int64_t));
    length = x.size(x.dim() + along);
  }

  // Bytes that are the same for all.
  explicit Mask(const uint8_t* bytes) : data(bytes), operand{nullptr}, position{nullptr} {}

  bool has_intervals() const { return ends != 0; }

  // The interval whose start is at `at`, in steps.
  Interval interval(const uint8_t* at) const {
    int64_t start, end;
    std::memcpy(&start, at, sizeof(start));
    std::memcpy(&end, at + ends, sizeof(end));
    start = std::clamp<int64_t>(start, 0, length);
    return {start * scale, std::clamp(end, start, length) * scale};
  }
};

struct Segments;

// Loops in two parts: over the slices (outputs of a reduction, lines of a scan), and within a slice.
template <int N>
struct Nest {
  Loops<N> outer, inner;
  int64_t slices = 1;                  // product of the outer sizes
  int64_t length = 1;                  // product of the inner sizes
  const Segments* segments = nullptr;  // the slices instead of the loops, where they are segments of rows (segments.h)
};

// One loop for each dim of `shape`, not merged. Operands have at most its dims, and line up from the right as torch
// broadcasts.
template <int N>
Loops<N> make_loops(const Tensor& shape, const Operand (&operands)[N]) {
  const int64_t ndim = shape.dim();
  const auto sizes = shape.sizes();
  Loops<N> loops(ndim);
  for (int64_t d = 0; d < ndim; ++d) loops[d].size = sizes[d];
  for (int o = 0; o < N; ++o) {
    const int64_t along = operands[o].along;
    if (operands[o].tensor == nullptr) {
      if (along != 0 && sizes[ndim + along] != 1) loops[ndim + along].stride[o] = 1;
      continue;
    }
    const Tensor& tensor = *operands[o].tensor;
    const auto own_sizes = tensor.sizes();
    const auto own_strides = tensor.strides();
    // Bounds have a dim more, in front; along their dim they have size 1.
    const int64_t shift = ndim - static_cast<int64_t>(own_sizes.size());
    for (int64_t d = along == 0 ? std::max<int64_t>(shift, 0) : shift + 1; d < ndim; ++d)
      if (own_sizes[d - shift] == sizes[d] && sizes[d] != 1)
        loops[d].stride[o] = own_strides[d - shift] * operands[o].unit;
  }
  return loops;
}

// Drops loops of size 1, and merges neighbours that step through every operand as one loop would.
template <int N>
void coalesce(Loops<N>& loops) {
  size_t count = 0;
  for (size_t l = 0; l < loops.size(); ++l) {
    const Loop<N>& loop = loops[l];
    if (loop.size == 1) continue;
    bool merges = count > 0;
    for (int o = 0; merges && o < N; ++o) merges = loops[count - 1].stride[o] == loop.stride[o] * loop.size;
    const int64_t size = merges ? loops[--count].size * loop.size : loop.size;
    if (count != l) loops[count] = loop;
    loops[count++].size = size;
  }
  loops.resize(count);
}

// Puts the loops in which an operand moves far outside. For kernels that may visit elements in any order.
template <int N>
void sort_by_stride(Loops<N>& loops, int operand) {
  std::stable_sort(loops.begin(), loops.end(),
                   [&](const Loop<N>& a, const Loop<N>& b) { return a.stride[operand] > b.stride[operand]; });
}

// Makes the dims inside of that of the intervals one with it, as far as the bounds are the same for all of them: positions
// then count the steps through all, and what is kept of whole rows is one run. Before coalesce, on one part of a nest.
template <int N>
int64_t linearize(Loops<N>& loops, int mask, int position) {
  const auto along = std::find_if(loops.begin(), loops.end(), [&](const Loop<N>& l) { return l.stride[position] != 0; });
  if (along == loops.end()) return 1;
  int64_t steps = 1;
  for (auto loop = along + 1; loop != loops.end(); ++loop) {
    if (loop->stride[mask] != 0 && loop->size != 1) return 1;
    steps *= loop->size;
  }
  if (steps == 0) return 1;
  along->stride[position] = steps;
  for (auto loop = along + 1; loop != loops.end(); ++loop) loop->stride[position] = steps /= loop->size;
  return along->stride[position];
}

// The nest of a kernel that works on slices along `dims`, which are sorted. Loops are in the order of the dims, or in the
// memory order of the operand `memory`. The last operand is the position along the intervals of `mask`, the operand
// `kept`, where there is one.
template <int N>
Nest<N> make_nest(const Tensor& shape, const Operand (&operands)[N], const Dims& dims, int memory = -1,
                  Mask* mask = nullptr, int kept = 0) {
  Nest<N> nest;
  const Loops<N> loops = make_loops(shape, operands);
  size_t next = 0;
  for (size_t d = 0; d < loops.size(); ++d) {
    const bool within = next < dims.size() && dims[next] == static_cast<int64_t>(d);
    next += within;
    (within ? nest.inner : nest.outer).push_back(loops[d]);
    (within ? nest.length : nest.slices) *= loops[d].size;
  }
  for (Loops<N>* part : {&nest.outer, &nest.inner}) {
    if (memory >= 0 && part->size() > 1) sort_by_stride(*part, memory);
    if (mask != nullptr && mask->has_intervals()) mask->scale *= linearize(*part, kept, N - 1);
    coalesce(*part);
  }
  return nest;
}

// The innermost loop; where there is none, one step to a neighbour.
template <int N>
Loop<N> innermost(const Loops<N>& loops) {
  if (!loops.empty()) return loops.back();
  Loop<N> loop;
  for (int64_t& stride : loop.stride) stride = 1;
  return loop;
}

// The same of a nest whose operand `kept` is a mask, and whose last one is the position along its intervals: one step does
// not move along them.
template <int N>
Loop<N> innermost(const Loops<N>& loops, const Mask& mask, int kept) {
  Loop<N> loop = innermost(loops);
  if (loops.empty() && mask.has_intervals()) loop.stride[kept] = loop.stride[N - 1] = 0;
  return loop;
}

// Where the operands stand after `index` steps of the innermost loop.
template <int N>
Offset<N> offset_of(const Loops<N>& loops, int64_t index) {
  Offset<N> at;
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    // The outermost loop is not taken modulo its size: a division that most nests do without.
    if (loop + 1 == loops.rend()) {
      at.step(*loop, index);
    } else {
      at.step(*loop, index % loop->size);
      index /= loop->size;
    }
  }
  return at;
}

// Calls run(offset, count) for the steps [begin, end) of the loops, one call for each stretch of the innermost loop.
template <int N, class Run>
void for_each_run(const Loops<N>& loops, int64_t begin, int64_t end, const Run& run) {
  if (loops.size() <= 1) {
    if (begin < end) run(offset_of(loops, begin), loops.empty() ? int64_t{1} : end - begin);
    return;
  }
  // Of nothing, a loop may have no size to divide by.
  if (begin >= end) return;
  const int64_t inner = loops.back().size;
  int64_t within = begin % inner;
  Offset<N> at = offset_of(loops, begin);
  while (begin < end) {
    const int64_t count = std::min(inner - within, end - begin);
    run(at, count);
    begin += count;
    if (loops.size() == 2) {
      // A step of the outer loop, without the divisions of offset_of: runs can be short.
      at.step(loops[1], -within);
      at.step(loops[0], 1);
    } else if (begin < end) {
      at = offset_of(loops, begin);
    }
    within = 0;
  }
}

// What a mask keeps of a run: everything, nothing, or what its bytes say.
enum class Kept { all, none, bits };

// The same, with where: nothing outside of [begin, end).
struct KeptRun {
  Kept kept;
  int64_t begin, end;
};

inline Kept kept_of_run(const void* mask, int64_t stride) {
  if (stride != 0) return Kept::bits;
  return *static_cast<const uint8_t*>(mask) != 0 ? Kept::all : Kept::none;
}

// The one place where a run of n elements is looked at through its mask before its elements are. The mask stands at `at`
// and `position`, and moves by `stride` and `step`. Bytes that are broadcast along the run are one byte; an interval along
// it is two bounds. Bounds that change along a run are bits, which `stage_bits` makes bytes of.
inline KeptRun kept_of_run(const Mask& mask, const uint8_t* at, int64_t position, int64_t stride, int64_t step, int64_t n) {
  if (stride != 0) return {Kept::bits, 0, n};
  if (!mask.has_intervals()) return {*at != 0 ? Kept::all : Kept::none, 0, n};
  const Interval of = mask.interval(at);
  if (step == 0) return {of.start <= position && position < of.end ? Kept::all : Kept::none, 0, n};
  const int64_t begin = std::clamp<int64_t>(of.start - position, 0, n);
  const int64_t end = std::clamp<int64_t>(of.end - position, begin, n);
  return {begin < end ? Kept::all : Kept::none, begin, end};
}

// The bytes of n elements whose bounds are `stride` apart, at one position.
inline void stage_bits(const Mask& mask, const uint8_t* at, int64_t position, int64_t stride, int64_t n, uint8_t* bytes) {
  position /= mask.scale;
  for (int64_t i = 0; i < n; ++i) {
    int64_t start, end;
    std::memcpy(&start, at + i * stride, sizeof(start));
    std::memcpy(&end, at + i * stride + mask.ends, sizeof(end));
    bytes[i] = static_cast<uint8_t>((start <= position) & (position < end));
  }
}

// Mask bytes that are looked at together before x is.
constexpr int64_t kMaskBlock = 64;

// What a block keeps. The first words of it are enough where bytes are random.
inline Kept kept_of_block(const uint8_t* m) {
  constexpr uint64_t kOnes = 0x0101010101010101, kTops = kOnes << 7;
  uint64_t some = 0, dropped = 0;
  for (int i = 0; i < kMaskBlock && (some == 0 || dropped == 0); i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, m + i, sizeof(bytes));
    some |= bytes;
    dropped |= (bytes - kOnes) & ~bytes & kTops;
  }
  return some == 0 ? Kept::none : dropped == 0 ? Kept::all : Kept::bits;
}

// Calls part(kept, begin, end) for stretches of blocks of n mask bytes that keep nothing, all, or some; the bytes of an
// incomplete block are some.
template <class Part>
void for_each_block(const uint8_t* m, int64_t n, const Part& part) {
  Kept kept = kept_of_block(m);
  int64_t begin = 0;
  for (int64_t i = kMaskBlock; i < n; i += kMaskBlock) {
    const Kept next = i + kMaskBlock <= n ? kept_of_block(m + i) : Kept::bits;
    if (next == kept) continue;
    part(kept, begin, i);
    kept = next;
    begin = i;
  }
  part(kept, begin, n);
}

// As for_each_run, with what operand `operand`, the mask, keeps of each run: run(offset, count, kept).
template <int N, class Run>
void for_each_masked_run(const Loops<N>& loops, int operand, const void* mask, int64_t begin, int64_t end,
                         const Run& run) {
  const int64_t stride = innermost(loops).stride[operand];
  for_each_run(loops, begin, end, [&](const Offset<N>& at, int64_t count) {
    run(at, count, kept_of_run(static_cast<const uint8_t*>(mask) + at[operand], stride));
  });
}

// Mask bytes of runs that keep everything or nothing, for kernels that are compiled once, for bytes.
constexpr int64_t kConstantMask = 4096;
struct ConstantMask {
  uint8_t bytes[kConstantMask];
  constexpr explicit ConstantMask(uint8_t value) : bytes() {
    for (auto& byte : bytes) byte = value;
  }
};
inline constexpr ConstantMask kAllKept(1), kNoneKept(0);

// Uninitialised memory, aligned for any vector.
struct Buffer {
  std::unique_ptr<char[]> bytes;
  char* data = nullptr;
  Buffer() = default;
  explicit Buffer(int64_t size) : bytes(new char[size + 63]) {
    data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.get()) + 63) & ~uintptr_t{63});
  }
};

// The sizes of x reduced along `dims`, which are sorted.
inline std::vector<int64_t> reduced_sizes(const Tensor& x, const Dims& dims, bool keepdim) {
  std::vector<int64_t> sizes;
  const auto all = x.sizes();
  size_t next = 0;
  for (size_t d = 0; d < all.size(); ++d) {
    const bool reduced = next < dims.size() && dims[next] == static_cast<int64_t>(d);
    next += reduced;
    if (!reduced) sizes.push_back(all[d]);
    if (reduced && keepdim) sizes.push_back(1);
  }
  return sizes;
}

}  // namespace maskwise
