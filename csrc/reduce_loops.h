// The loops of reductions. Arguments were checked in Python: dims are sorted, unique and not negative, the mask
// broadcasts to x, and the capability table knows that the dtype is served.
#pragma once

#include "elementwise.h"

namespace maskwise {

// Rows of columns that a kernel accumulates in one step. More rows would share too few sets of the cache.
constexpr int kColumnRows = 4;
// Columns done side by side: wide enough to read long stretches of memory, while their lanes stay in a near cache.
constexpr int64_t kColumns = kConstantMask;

// The operands of a reduction's nest: x in bytes, its mask, and the position along the intervals of that.
enum : int { kX = 0, kMask = 1, kPosition = 2 };
using ReduceLoop = Loop<3>;
struct ReduceNest : Nest<3> {
  Mask mask;
  // Whether the mask drops few rows of x, and those whole: they are then prefetched, so that the CPU goes on reading ahead.
  // mw.explain counts them as read (ops/operation.py).
  bool few_dropped = false;
};

// Contiguous rows, which are a step of `loop` apart, with their mask. Along a row the mask moves by `bits`, its position by
// `step`.
struct RowRuns {
  const char* x;
  const Mask& mask;
  const uint8_t* m;
  int64_t position;
  const ReduceLoop& loop;
  int64_t bits, step;
};

// A run of rows of columns: rows are a step of `row` apart, columns one of `column`.
struct ColumnRun {
  const char* x;
  const Mask& mask;
  const uint8_t* m;
  int64_t position;
  const ReduceLoop& row;
  const ReduceLoop& column;
  bool few_dropped;  // see ReduceNest
};

// Up to kColumns outputs side by side, and what they have accumulated.
struct Columns {
  char* lanes;
  char* states;
  int64_t w;
  int64_t base = 0;     // the position at which the lanes started
  int64_t pending = 0;  // rows in the lanes
};

// A reduction, compiled for one SIMD level and one dtype. The loops know states and lanes by their size alone.
struct Reduction {
  const void* op;
  int in_bytes, out_bytes, state_bytes;
  int lanes_bytes, lanes;  // of one vector of columns, and how many columns it has
  // n states that have accumulated nothing.
  void (*init)(void* states, int64_t n);
  // n contiguous elements at position `at`; m is null where all are kept.
  void (*accumulate)(const void* op, void* state, const void* x, const uint8_t* m, int64_t n, int64_t at);
  // `count` outputs of n contiguous elements each, and their results.
  void (*reduce_rows)(const void* op, const RowRuns& rows, int64_t n, int64_t count, void* out);
  // Columns that have accumulated nothing; `count` rows of them, from position `at` on; and the lanes joined to the states.
  void (*init_columns)(const void* op, Columns& columns);
  void (*accumulate_columns)(const void* op, Columns& columns, const ColumnRun& run, int64_t count, int64_t at);
  void (*collect_columns)(const void* op, Columns& columns);
  // Joins the state of a later range.
  void (*combine)(const void* op, void* state, const void* other);
  // The results of n states.
  void (*finalize)(const void* op, const void* states, int64_t n, void* out);
};

// The result of a reduction, contiguous in the order of the outer dims.
void run_reduction(const Reduction& kernel, const ReduceNest& nest, const void* x, void* out);

// Accumulates elements [begin, end) of one output, whose data starts at `from`.
void accumulate_range(const Reduction& kernel, void* state, const ReduceNest& nest, const char* x, const Offset<3>& from,
                      int64_t begin, int64_t end);

// A reduction that is about to run: its loops, from where, and to where.
struct ReduceCall {
  ReduceNest nest;
  Tensor out;
  const void* x;
  void* result;

  ReduceCall(const Tensor& values, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along, ScalarType dtype);
};

// The sum of what is kept along dims.
Tensor sum_kept(const Tensor& x, const Tensor& mask, const Dims& dim, bool keepdim, int64_t along);

// How many are kept along dims, their mean, and the mean of squared distances from it; 0 where nothing is kept.
std::tuple<Tensor, Tensor, Tensor> moments_kept(const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along);

// A gradient that is about to run: each element by two numbers that its output gives. It is written contiguously; grad
// has the shape of the reduction's result.
struct GradientCall {
  ReduceNest nest;
  Tensor grad;
  Tensor out;
  const Tensor& x;
  const Tensor& mask;
  const Dims& dim;
  int64_t along;

  GradientCall(const Tensor& of_result, const Tensor& x, const Tensor& mask, const Dims& dim, int64_t along);

  // Operands of the kernel: x, mask, the two numbers (of `bytes` each, contiguous in the shape of the result), gradient.
  using Run = void (*)(const void* op, Kept kept, char* const* at, const int64_t* stride, int64_t n);
  void run(Run kernel, const void* op, const void* a, const void* b, int bytes) const;
};

}  // namespace maskwise

// Both ops of a reduction: with autograd around it, and without.
#define MASKWISE_IMPL_REDUCTION(LIBRARY, NAME)                       \
  LIBRARY.impl(#NAME "_fused", TORCH_BOX(&maskwise::NAME));          \
  LIBRARY.impl(#NAME "_fused_forward", TORCH_BOX(&maskwise::NAME))
