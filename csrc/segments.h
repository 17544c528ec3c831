// Segments: runs of rows of a contiguous (rows, columns) tensor, each reduced, or mapped, as a slice of its own. They are
// the sequences of packed values. A nest that has them runs its kernel over each, so every reduction and every function of
// slices serves them with its own inner loops.
#pragma once

#include "reduce_loops.h"
#include "slice_loops.h"

namespace maskwise {

struct Segments {
  const int32_t* bounds;  // count + 1: the first row of each, and the end of the last
  int64_t count, rows, columns;

  Segments(const Tensor& values, const Tensor& bounds);

  int64_t length(int64_t segment) const { return bounds[segment + 1] - bounds[segment]; }
  // Whether the average one is worth all threads, rather than one of them.
  bool are_long() const { return rows * columns > count * kLongSegment; }

  // Calls body(first, last) for ranges of segments, which have about as many rows for each thread.
  template <class Body>
  void for_each_range(const Body& body) const {
    if (columns == 0) return;
    // Each segment costs its rows, and about one more: its place among both is where its range is found.
    parallel(rows + count, columns, [&](int64_t begin, int64_t end) {
      const int64_t first = after(begin), last = after(end);
      if (first < last) body(first, last);
    });
  }

 private:
  static constexpr int64_t kLongSegment = 1 << 20;

  // The first segment whose place is not before `place`.
  int64_t after(int64_t place) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (bounds[middle] + middle < place)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

// What run_reduction, GradientCall::run and run_slices do where the nest has segments.
void reduce_segments(const Reduction& kernel, const Segments& segments, const char* x, char* out);
void map_segments(const SliceKernel& kernel, const Segments& segments, const SliceRun& all);
void segment_gradient(GradientCall::Run kernel, const void* op, const Segments& segments, int bytes,
                      const char* const (&params)[2], int param_bytes, const char* x, char* out);

// The reductions of a nest, as their own files have them.
using ReduceNestInto = void(ScalarType dtype, const ReduceNest& nest, const void* x, void* out);
ReduceNestInto sum_into, mean_into, amax_into, amin_into, logsumexp_into;

// The gradients of a call, from its results; and the functions of slices, into the call's `out`.
void extremum_gradient(const GradientCall& call, const void* of, bool greatest);
void logsumexp_gradient(const GradientCall& call, const void* of);
void softmax_slices(const SliceCall& call);
void softmax_gradient(const SliceCall& call);

}  // namespace maskwise
