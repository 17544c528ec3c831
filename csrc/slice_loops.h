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

// Operands: x, the gradient of the result (x itself where there is none), mask, result, all in bytes; and the position
// along the intervals of the mask.
enum SliceOperand : int { kValues = 0, kGrad = 1, kBits = 2, kOut = 3, kLinePosition = 4 };
constexpr int kSliceOperands = 5;
using SliceNest = Nest<kSliceOperands>;
using SliceLoop = Loop<kSliceOperands>;
using SliceLoops = Loops<kSliceOperands>;
using SliceOffset = Offset<kSliceOperands>;

// A row, or a row of columns. Where a kernel gets it, `bits` are bytes, or null where all is kept; before that they may be
// the bounds of intervals.
struct SliceRun {
  const char* x;
  const char* grad;
  const uint8_t* bits;
  char* out;
  int64_t position;
};

// `count` contiguous slices of n elements, which are a step of `loop` apart; `inner` steps along a slice.
struct SliceRows {
  SliceRun first;
  const Mask& mask;
  const SliceLoop& loop;
  const SliceLoop& inner;
  int64_t count, n;
  bool zeros;  // whether the results are zeros already, as they are where nothing is kept
};

// Rows of a block of columns that follow each other: all kept, none, what their bytes say, or what ColumnBlock::kept says
// of each vector.
enum class GroupKept { all, none, bits, by_vector };
struct RowGroup {
  int64_t rows;
  GroupKept kept;
  const uint8_t* bits = nullptr;  // the bytes of the first row, where a vector has any, and the step to the next
  int64_t bit_step = 0;
};

// A block of w columns, whose rows are a step of `row` apart, and what is kept of it.
struct ColumnBlock {
  ColumnBlock(const Mask& mask, const SliceLoop& row, const SliceLoop& column, int lanes, bool zeros)
      : mask(mask), row(row), column(column), lanes(lanes), zeros(zeros) {
    // Where a slice has no loops, `row` is one step of 1 for every operand.
    if (!mask.has_intervals()) this->row.stride[kLinePosition] = 0;
  }

  const Mask& mask;
  SliceLoop row, column;
  const int lanes;
  const bool zeros;  // see SliceRows
  int64_t w = 0;
  alignas(64) char states[kBlockStates];
  Kept kept[kBlock / 2 + 64];  // of the vectors of a group

  int64_t vectors() const { return ceil_div(w, lanes); }
  // The last vector of a row of columns reaches back over the one before it rather than past the end.
  int64_t first_column(int64_t v) const { return std::min(v * lanes, w - lanes); }

  // Before the first group of a run of `count` rows.
  void start(const SliceRun& run, int64_t count);
  // The group that begins with row r: at most kGroup rows, unless nothing is kept of them.
  RowGroup group(int64_t r);

 private:
  RowGroup whole_rows(int64_t r) const;
  RowGroup ranges_of_rows(int64_t r);
  RowGroup ranges_of_columns(int64_t r);
  RowGroup bytes(int64_t r);
  template <class Keeps>
  void stage(int64_t v, int64_t rows, const Keeps& keeps);
  RowGroup staged_group(int64_t rows);

  const uint8_t* first = nullptr;
  int64_t position = 0, count = 0;
  KeptRun rows_kept{Kept::none, 0, 0};  // where one answer holds for all columns of a row
  // Where columns have intervals of rows: those, and of each vector the rows that are kept of some, and of all of them.
  struct Ranges {
    Interval some, all;
  };
  Interval intervals[kBlock + 64];
  Ranges ranges[kBlock / 2 + 64];
  Interval some_rows{0, 0};
  uint8_t staged[kGroup * (kBlock + 64)];
};

// A function of slices, compiled for one SIMD level and one dtype. The loops know states by their size alone.
struct SliceKernel {
  const void* op;
  int bytes;        // of an element
  int lanes;        // of a vector
  int state_bytes;  // of a state: each lane has accumulated elements of its own
  bool reads_grad;
  bool drops_to_zero;  // whether results are zeros where nothing is kept
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
  // n results where nothing is kept; past the caches if `stream`, as beside results that are.
  void (*fill)(char* out, int64_t n, bool stream);
  // All of the above for contiguous slices.
  void (*rows)(const void* op, const SliceRows& rows, bool stream);
  // `count` rows of a block of columns, and their results.
  void (*accumulate_columns)(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count);
  void (*map_columns)(const void* op, ColumnBlock& block, const SliceRun& run, int64_t count, bool stream);
  // For softmax, else null: a contiguous slice, or w slices side by side along `row`, in three passes (maximum, sum of
  // exponentials, results). Exponentials are stored at `held` until the sum is known.
  void (*three_pass_row)(const void* op, const SliceRun& run, char* held, int64_t n, bool stream);
  void (*three_pass_columns)(const void* op, void* states, const SliceRun& run, const SliceLoop& row, int64_t bit_step,
                             char* held, int64_t held_step, int64_t w, bool stream);
  bool holds;  // whether the three passes store exponentials
};

// x and grad have the shape of the result; out is new, with the layout of x.
struct SliceCall {
  Tensor out;
  Mask mask;
  SliceNest nest;
  SliceRun run;
  ScalarType dtype;

  SliceCall(const Tensor& x, const Tensor& grad, const Tensor& kept, const Dims& dims, int64_t along);
};

void run_slices(const SliceKernel& kernel, const SliceCall& call);

}  // namespace maskwise
