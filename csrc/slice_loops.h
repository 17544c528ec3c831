// The loops of functions that map slices to slices (softmax, normalize). Arguments were checked in Python: dims are
// sorted, unique and not negative, the mask is bool and broadcasts to x, and the capability table knows the dtype.
#pragma once

#include "loops.h"

// Inlines all that an inner loop calls: the compiler would stop where the file has grown enough.
#define MASKWISE_FLATTEN __attribute__((flatten))

namespace maskwise {

// Vectors that a kernel accumulates in one step: enough to pay for what it does once a group.
constexpr int kGroup = 8;
static_assert(kGroup == kTransposedRows, "the masks of a group are transposed together");
// Columns done side by side; their states stay in the first-level cache. A block has fewer than a vector more.
constexpr int64_t kBlock = 512;
// Bytes of any state, and of the states of a block.
constexpr int64_t kSliceState = 6 * 64;
constexpr int64_t kBlockStates = 25 * 1024;

// Operands, all in bytes: x, the gradient of the result (x itself where there is none), mask, result.
enum SliceOperand : int { kValues = 0, kGrad = 1, kBits = 2, kOut = 3 };
using SliceNest = Nest<4>;
using SliceLoop = Loop<4>;

// A row, or a row of columns; `bits` is null where all is kept.
struct SliceRun {
  const char* x;
  const char* grad;
  const uint8_t* bits;
  char* out;
};

// A block of w columns, whose rows are a step of `row` apart.
struct ColumnBlock {
  ColumnBlock(const SliceLoop& row, int64_t column_step) : row(row), column_step(column_step) {}

  const SliceLoop& row;
  const int64_t column_step;  // the mask's stride from column to column
  int64_t w = 0;
  alignas(64) char states[kBlockStates];
  uint8_t staged[kGroup * (kBlock + 64)];

  // The mask bytes of up to kGroup rows, each next to each other, and the step from row to row.
  const uint8_t* bits_of(const uint8_t* m, int64_t count, int64_t& step);
};

// A function of slices, compiled for one SIMD level and one dtype. The loops know states by their size alone.
struct SliceKernel {
  const void* op;
  int bytes;        // of an element
  int lanes;        // of a vector
  int state_bytes;  // of a state: each lane has accumulated elements of its own
  bool reads_grad;
  // n states that have accumulated nothing.
  void (*init)(const void* op, void* states, int64_t n);
  // n contiguous elements.
  void (*accumulate)(const void* op, void* state, const SliceRun& run, int64_t n);
  // Joins two states lane by lane.
  void (*combine)(const void* op, void* state, const void* other);
  // Makes sums the coefficients of map, lane by lane; joins the lanes before that, where they are of one slice.
  void (*finalize)(const void* op, void* states, int64_t n, bool join_lanes);
  // The results of n contiguous elements; past the caches if `stream`.
  void (*map)(const void* op, const void* state, const SliceRun& run, int64_t n, bool stream);
  // n results where nothing is kept.
  void (*fill)(void* out, int64_t n);
  // All of the above for `count` contiguous slices, which are a step of `loop` apart; with one mask byte each where
  // `broadcast`.
  void (*rows)(const void* op, const SliceRun& first, const SliceLoop& loop, int64_t count, int64_t n, bool broadcast,
               bool stream);
  // `count` rows of a block of columns, and their results.
  void (*accumulate_columns)(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count);
  void (*map_columns)(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count, bool stream);
  // For softmax, else null: a contiguous slice, or w slices side by side along `row`, in three passes (maximum, sum of
  // exponentials, results). Exponentials are stored at `held` until the sum is known.
  void (*three_pass_row)(const void* op, const SliceRun& run, void* held, int64_t n, bool stream);
  void (*three_pass_columns)(const void* op, void* states, const SliceRun& run, const SliceLoop& row, int64_t bit_step,
                             char* held, int64_t held_step, int64_t w, bool stream);
  bool holds;  // whether the three passes store exponentials
};

// x and grad have the shape of the result; out is new, with the layout of x.
struct SliceCall {
  Tensor out;
  SliceNest nest;
  SliceRun run;
  ScalarType dtype;

  SliceCall(const Tensor& x, const Tensor& grad, const Tensor& mask, const Dims& dims);
};

void run_slices(const SliceKernel& kernel, const SliceCall& call);

}  // namespace maskwise
