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

struct Segments;

// Loops in two parts: over the slices (outputs of a reduction, lines of a scan), and within a slice.
template <int N>
struct Nest {
  Loops<N> outer, inner;
  int64_t slices = 1;                  // product of the outer sizes
  int64_t length = 1;                  // product of the inner sizes
  const Segments* segments = nullptr;  // the slices instead of the loops, where they are segments of rows (segments.h)
};

// An operand. Its strides count in steps of `unit`: 1 where the kernel has typed pointers, the bytes of an element where
// it has not. Without a tensor the strides are 0, for the caller to set.
struct Operand {
  const Tensor* tensor;
  int64_t unit = 1;
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
    if (operands[o].tensor == nullptr) continue;
    const Tensor& tensor = *operands[o].tensor;
    const auto own_sizes = tensor.sizes();
    const auto own_strides = tensor.strides();
    const int64_t shift = ndim - static_cast<int64_t>(own_sizes.size());
    for (int64_t d = std::max<int64_t>(shift, 0); d < ndim; ++d)
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

// The nest of a kernel that works on slices along `dims`, which are sorted. Loops are in the order of the dims, or in the
// memory order of the operand `memory`.
template <int N>
Nest<N> make_nest(const Tensor& shape, const Operand (&operands)[N], const Dims& dims, int memory = -1) {
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
  const int64_t inner = loops.back().size;
  while (begin < end) {
    const int64_t count = std::min(inner - begin % inner, end - begin);
    run(offset_of(loops, begin), count);
    begin += count;
  }
}

// What a mask keeps of a run: everything, nothing, or what its bytes say.
enum class Kept { all, none, bits };

// The one place where a run's mask is looked at before its elements are: a mask that is broadcast along the run is one
// byte. Masks that are known by more than their bytes (an interval along the run) answer here.
inline Kept kept_of_run(const void* mask, int64_t stride) {
  if (stride != 0) return Kept::bits;
  return *static_cast<const uint8_t*>(mask) != 0 ? Kept::all : Kept::none;
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
