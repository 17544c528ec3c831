// Scans as folds: a state of one lane a line, one step after the other in the order of the scan, so that a dropped
// position repeats the running value to the bit. Rows are read kLanes at a time and transposed in registers; columns
// lie side by side as they are. Compiled once a target, through scan.cpp.
//
// A fold is a struct F with
//   A, kInputs, kStates   the lane type, how many vectors a step consumes, how many the state has
//   scan()                the operands; the functions are filled in here (see Scan)
//   init(k)               the first value of a state vector
//   load_inputs(at, i, in)  the inputs of kLanes elements
//   accumulate(state, in) one step of kLanes lines: its results
//   store_results(at, i, v) writes the results of kLanes elements
// and, where an operand is wanted one step earlier as the last input, Previous (its type) and kBefore (what stands
// before the first step).
#include "scan_loops.h"
#include "simd.h"
#if defined(MASKWISE_SCAN_FOLD_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_SCAN_FOLD_H
#else
#define MASKWISE_SCAN_FOLD_H
#endif

namespace maskwise::MASKWISE_TARGET {

// What a scan accumulates a type in: as torch does on the CPU, one step wider than the result. Integers are unsigned,
// so that they wrap around as torch's do.
template <class T>
using ScanAcc = std::conditional_t<kIntegral<T>, uint64_t, std::conditional_t<(sizeof(T) >= 4), double, float>>;

// The operands of one row (pitch kRows) or of columns (pitch 1).
struct At {
  char* const* pointers;
  int pitch;
  template <class T>
  T* of(int operand) const {
    return reinterpret_cast<T*>(pointers[operand * pitch]);
  }
};

template <class F>
void fold_init(void* state, int64_t columns) {
  using A = typename F::A;
  auto* states = static_cast<A*>(state);
  const int64_t lanes = ceil_div(columns, kLanes<A>) * kLanes<A>;
  for (int k = 0; k < F::kStates; ++k) std::fill_n(states + k * kScanColumns, lanes, F::init(k));
}

// kLanes steps of kLanes rows; only `count` of the steps are done.
template <class F, bool kFull>
inline void fold_block(Vec<typename F::A>* state, char* const* at, int64_t i, bool before, int count) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  Vec<A> v[F::kInputs][L];
  for (int r = 0; r < L; ++r) {
    const At row{at + r, kRows};
    Vec<A> in[F::kInputs];
    F::load_inputs(row, i, in);
    if constexpr (scan.previous >= 0) {
      const auto* p = row.of<const typename F::Previous>(scan.previous) + i;
      in[F::kInputs - 1] = before ? load<A>(p - 1) : shift_up<A>(F::kBefore, load<A>(p));
    }
    for (int k = 0; k < F::kInputs; ++k) v[k][r] = in[k];
  }
  for (int k = 0; k < F::kInputs; ++k) transpose<A>(v[k]);
  for (int t = 0; t < (kFull ? L : count); ++t) {
    const int s = scan.reverse ? (kFull ? L : count) - 1 - t : t;
    Vec<A> in[F::kInputs];
    for (int k = 0; k < F::kInputs; ++k) in[k] = v[k][s];
    v[0][s] = F::accumulate(state, in);
  }
  transpose<A>(v[0]);
  for (int r = 0; r < L; ++r) F::store_results(At{at + r, kRows}, i, v[0][r]);
}

// The same at the end of rows, on copies that are filled up.
template <class F>
void fold_tail(Vec<typename F::A>* state, char* const* at, int64_t i, bool before, int count) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  // One vector, after the element that stands before it.
  constexpr int kBuffer = L * 8 + 8;
  alignas(64) char space[kOperands][L][kBuffer];
  char* copies[kOperands * kRows];
  for (int o = 0; o < scan.operands; ++o) {
    for (int r = 0; r < L; ++r) {
      char* copy = copies[o * kRows + r] = space[o][r] + 8;
      const char* from = at[o * kRows + r] + i * scan.bytes[o];
      std::memset(copy, 0, L * 8);
      if (o < scan.operands - scan.written) std::memcpy(copy, from, count * scan.bytes[o]);
      if (o == scan.previous && before) std::memcpy(copy - scan.bytes[o], from - scan.bytes[o], scan.bytes[o]);
    }
  }
  fold_block<F, false>(state, copies, 0, before, count);
  for (int o = scan.operands - scan.written; o < scan.operands; ++o)
    for (int r = 0; r < L; ++r)
      std::memcpy(at[o * kRows + r] + i * scan.bytes[o], copies[o * kRows + r], count * scan.bytes[o]);
}

template <class F>
void fold_rows(void* state, char* const* at, int64_t n, int64_t first) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  auto* states = static_cast<A*>(state);
  Vec<A> s[F::kStates];
  for (int k = 0; k < F::kStates; ++k) s[k] = load_raw<Vec<A>>(states + k * kScanColumns);
  const int64_t whole = n / L * L;
  if (scan.reverse) {
    if (whole < n) fold_tail<F>(s, at, whole, first + whole > 0, static_cast<int>(n - whole));
    for (int64_t i = whole - L; i >= 0; i -= L) fold_block<F, true>(s, at, i, first + i > 0, L);
  } else {
    for (int64_t i = 0; i < whole; i += L) fold_block<F, true>(s, at, i, first + i > 0, L);
    if (whole < n) fold_tail<F>(s, at, whole, first + whole > 0, static_cast<int>(n - whole));
  }
  for (int k = 0; k < F::kStates; ++k) std::memcpy(states + k * kScanColumns, &s[k], sizeof(s[k]));
}

// Some steps of kLanes columns at j; `at` and `next` as in Scan::columns.
template <class F>
inline void fold_lanes(typename F::A* states, char* const* at, const int64_t* next, const char* previous, int64_t j,
                       int64_t count) {
  using A = typename F::A;
  constexpr Scan scan = F::scan();
  Vec<A> in[F::kInputs], s[F::kStates];
  char* here[kOperands];
  for (int o = 0; o < scan.operands; ++o) here[o] = at[o];
  for (int k = 0; k < F::kStates; ++k) s[k] = load_raw<Vec<A>>(states + k * kScanColumns);
  for (int64_t i = 0; i < count; ++i) {
    F::load_inputs(At{here, 1}, j, in);
    if constexpr (scan.previous >= 0) {
      using P = typename F::Previous;
      in[F::kInputs - 1] = previous != nullptr ? load<A>(reinterpret_cast<const P*>(previous) + j) : splat<A>(F::kBefore);
    }
    F::store_results(At{here, 1}, j, F::accumulate(s, in));
    for (int o = 0; o < scan.operands; ++o) here[o] += next[o];
  }
  for (int k = 0; k < F::kStates; ++k) std::memcpy(states + k * kScanColumns, &s[k], sizeof(s[k]));
}

template <class F>
void fold_columns(void* state, char* const* at, const int64_t* next, int64_t w, int64_t, int64_t count) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  auto* states = static_cast<A*>(state);
  const char* previous = scan.previous >= 0 ? at[kOperands] : nullptr;
  int64_t j = 0;
  for (; j + L <= w; j += L) fold_lanes<F>(states + j, at, next, previous, j, count);
  if (j == w) return;
  // The last columns, on copies that are filled up.
  for (int64_t i = 0; i < count; ++i) {
    alignas(64) char space[kOperands + 1][L * 8] = {};
    char* copies[kOperands];
    for (int o = 0; o < scan.operands; ++o) {
      copies[o] = space[o];
      const char* from = at[o] + i * next[o] + j * scan.bytes[o];
      if (o < scan.operands - scan.written) std::memcpy(copies[o], from, (w - j) * scan.bytes[o]);
    }
    if (previous != nullptr) {
      const int size = scan.bytes[scan.previous];
      std::memcpy(space[kOperands], previous + j * size, (w - j) * size);
    }
    fold_lanes<F>(states + j, copies, next, previous != nullptr ? space[kOperands] : nullptr, 0, 1);
    for (int o = scan.operands - scan.written; o < scan.operands; ++o)
      std::memcpy(at[o] + i * next[o] + j * scan.bytes[o], copies[o], (w - j) * scan.bytes[o]);
  }
}

template <class F>
Scan fold() {
  Scan scan = F::scan();
  scan.rows = kLanes<typename F::A>;
  scan.init = [](void* state, int64_t columns) { fold_init<F>(state, std::max<int64_t>(columns, kLanes<typename F::A>)); };
  scan.row = &fold_rows<F>;
  scan.columns = &fold_columns<F>;
  return scan;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
