// Scans as folds: a state of one lane a line, one step after the other in the order of the scan, so that a dropped
// position repeats the running value to the bit. Rows are read kLanes at a time and transposed in registers; columns
// lie side by side as they are. Compiled once a target, through scan.cpp.
//
// A fold is a struct F with
//   A, kInputs, kStates   the lane type, how many vectors a step consumes, how many the state has
//   scan()                the operands; the functions are filled in here (see Scan)
//   In, kOut              the type of x or of a gradient; which operand is the result, in a gradient, or -1
//   init(k)               the first value of a state vector
//   load_inputs(at, i, in)  the inputs of kLanes elements
//   drop_inputs(grad, out, in)  the inputs of dropped elements: in a gradient, of any number with the same result
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

// The operands of one row (pitch kRows) or of columns (pitch 1). Of rows, vectors are looked at through the mask before they
// are read; of columns, groups have been.
struct At {
  char* const* pointers;
  int pitch;
  template <class T>
  T* of(int operand) const {
    return reinterpret_cast<T*>(pointers[operand * pitch]);
  }
};

// Not read where none of kLanes elements of a row is kept. By arithmetic: a branch on a mask at random is mispredicted.
template <class A, class T>
inline Vec<A> load_kept(const At& at, const T* x, const uint8_t* m) {
  if (at.pitch == 1) return load<A>(x);
  const uintptr_t any = -static_cast<uintptr_t>(!none_of<kLanes<A>>(m));
  const auto values = reinterpret_cast<uintptr_t>(x), zeros = reinterpret_cast<uintptr_t>(kNoneKept.bytes);
  return load<A>(reinterpret_cast<const T*>((values & any) | (zeros & ~any)));
}

template <class F>
void fold_init(void* state, int64_t begin, int64_t end) {
  auto* states = static_cast<typename F::A*>(state);
  for (int k = 0; k < F::kStates; ++k) std::fill_n(states + k * kScanColumns + begin, end - begin, F::init(k));
}

template <class F>
inline void load_states(const typename F::A* states, Vec<typename F::A>* s) {
  for (int k = 0; k < F::kStates; ++k) s[k] = load_raw<Vec<typename F::A>>(states + k * kScanColumns);
}

template <class F>
inline void store_states(typename F::A* states, const Vec<typename F::A>* s) {
  for (int k = 0; k < F::kStates; ++k) std::memcpy(states + k * kScanColumns, &s[k], sizeof(s[k]));
}

// kLanes steps of kLanes rows, the first of them at[...] + i; those that are not 0 in first[row] + i have one before them.
// Without kFull, row r has only that many of the steps as `count` says.
template <class F, bool kFull>
inline void fold_block(Vec<typename F::A>* state, char* const* at, int64_t i, const int64_t* first,
                       const Vec<typename F::A>* count) {
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
      in[F::kInputs - 1] = first[r] + i > 0 ? load<A>(p - 1) : shift_up<A>(F::kBefore, load<A>(p));
    }
    for (int k = 0; k < F::kInputs; ++k) v[k][r] = in[k];
  }
  for (int k = 0; k < F::kInputs; ++k) transpose<A>(v[k]);
  int most = L;
  if constexpr (!kFull)
    for (most = 0; any_lane(splat<A>(static_cast<A>(most)) < *count);) ++most;
  for (int t = 0; t < (kFull ? L : most); ++t) {
    const int s = scan.reverse ? (kFull ? L : most) - 1 - t : t;
    Vec<A> in[F::kInputs], before[F::kStates];
    for (int k = 0; k < F::kInputs; ++k) in[k] = v[k][s];
    for (int k = 0; k < F::kStates; ++k) before[k] = state[k];
    v[0][s] = F::accumulate(state, in);
    if constexpr (!kFull)
      for (int k = 0; k < F::kStates; ++k) state[k] = splat<A>(static_cast<A>(s)) < *count ? state[k] : before[k];
  }
  transpose<A>(v[0]);
  for (int r = 0; r < L; ++r) F::store_results(At{at + r, kRows}, i, v[0][r]);
}

// The last steps of rows, on copies that are filled up.
template <class F>
void fold_tail(void* state, char* const* at, const int64_t* n, const int64_t* first) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  // One vector, after the element that stands before it.
  constexpr int kBuffer = L * 8 + 8;
  alignas(64) char space[kOperands][L][kBuffer];
  char* copies[kOperands * kRows];
  Vec<A> s[F::kStates], count;
  for (int r = 0; r < L; ++r) {
    count[r] = static_cast<A>(n[r]);
    for (int o = 0; o < scan.operands; ++o) {
      char* copy = copies[o * kRows + r] = space[o][r] + 8;
      const char* from = at[o * kRows + r];
      std::memset(copy, 0, L * 8);
      if (n[r] == 0 || o >= scan.results()) continue;
      std::memcpy(copy, from, n[r] * scan.bytes[o]);
      if (o == scan.previous && first[r] > 0) std::memcpy(copy - scan.bytes[o], from - scan.bytes[o], scan.bytes[o]);
    }
  }
  load_states<F>(static_cast<A*>(state), s);
  fold_block<F, false>(s, copies, 0, first, &count);
  store_states<F>(static_cast<A*>(state), s);
  for (int o = scan.results(); o < scan.operands; ++o)
    for (int r = 0; r < L; ++r)
      if (n[r] != 0) std::memcpy(at[o * kRows + r], copies[o * kRows + r], n[r] * scan.bytes[o]);
}

template <class F>
void fold_rows(void* state, char* const* at, int64_t n, const int64_t* first) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  Vec<A> s[F::kStates];
  load_states<F>(static_cast<A*>(state), s);
  if (F::scan().reverse)
    for (int64_t i = n - L; i >= 0; i -= L) fold_block<F, true>(s, at, i, first, nullptr);
  else
    for (int64_t i = 0; i < n; i += L) fold_block<F, true>(s, at, i, first, nullptr);
  store_states<F>(static_cast<A*>(state), s);
}

template <class F>
void fold_drop(void* state, int row, char* const* at, int64_t n) {
  using A = typename F::A;
  using In = typename F::In;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  constexpr int kResult = scan.operands - 1;
  Vec<A> s[F::kStates], in[F::kInputs] = {};
  load_states<F>(static_cast<A*>(state), s);
  int64_t i = 0;
  if constexpr (scan.reverse) {
    const In* grad = reinterpret_cast<const In*>(at[0]);
    Vec<A> sums[4] = {};
    for (; i + 4 * L <= n; i += 4 * L) {
      // One row alone is too little for the hardware to run ahead of.
      for (int64_t k = 0; k < 4 * L; k += 64 / sizeof(In)) __builtin_prefetch(grad + std::min(i + k + 1024, n - 1));
      for (int k = 0; k < 4; ++k) sums[k] += load<A>(grad + i + k * L);
    }
    A total = add_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) total += static_cast<A>(grad[i]);
    Vec<A> out = {};
    if constexpr (F::kOut >= 0) out = splat<A>(static_cast<A>(*reinterpret_cast<const In*>(at[F::kOut])));
    F::drop_inputs(splat<A>(total), out, in);
    F::accumulate(s, in);
    for (int k = 0; k < F::kStates; ++k) static_cast<A*>(state)[k * kScanColumns + row] = s[k][row];
    std::memset(at[kResult], 0, n * scan.bytes[kResult]);
  } else {
    const Vec<A> none = {};
    F::drop_inputs(none, none, in);
    const Vec<A> value = splat<A>(F::accumulate(s, in)[row]);
    for (; i + L <= n; i += L) F::store_results(At{at, 1}, i, value);
    if (i == n) return;
    alignas(64) char rest[L * 8];
    char* const to[kOperands] = {nullptr, nullptr, rest};
    static_assert(kResult == 2);
    F::store_results(At{to, 1}, 0, value);
    std::memcpy(at[kResult] + i * scan.bytes[kResult], rest, (n - i) * scan.bytes[kResult]);
  }
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
  load_states<F>(states, s);
  for (int64_t i = 0; i < count; ++i) {
    F::load_inputs(At{here, 1}, j, in);
    if constexpr (scan.previous >= 0) {
      using P = typename F::Previous;
      in[F::kInputs - 1] = previous != nullptr ? load<A>(reinterpret_cast<const P*>(previous) + j) : splat<A>(F::kBefore);
    }
    F::store_results(At{here, 1}, j, F::accumulate(s, in));
    for (int o = 0; o < scan.operands; ++o) here[o] += next[o];
  }
  store_states<F>(states, s);
}

// The same of columns of which nothing is kept in these steps.
template <class F>
inline void drop_lanes(typename F::A* states, char* const* at, const int64_t* next, const char*, int64_t j, int64_t count) {
  using A = typename F::A;
  constexpr Scan scan = F::scan();
  constexpr int kResult = scan.operands - 1;
  Vec<A> in[F::kInputs] = {}, s[F::kStates], grad = {}, out = {};
  char* to[kOperands] = {};
  load_states<F>(states, s);
  if constexpr (scan.reverse) {
    using In = typename F::In;
    for (int64_t i = 0; i < count; ++i) grad += load<A>(reinterpret_cast<const In*>(at[0] + i * next[0]) + j);
    if constexpr (F::kOut >= 0) out = load<A>(reinterpret_cast<const In*>(at[F::kOut]) + j);
  }
  F::drop_inputs(grad, out, in);
  const Vec<A> value = F::accumulate(s, in);
  store_states<F>(states, s);
  for (int64_t i = 0; i < count; ++i) {
    to[kResult] = at[kResult] + i * next[kResult];
    if constexpr (scan.reverse)
      std::memset(to[kResult] + j * scan.bytes[kResult], 0, kLanes<A> * scan.bytes[kResult]);
    else
      F::store_results(At{to, 1}, j, value);
  }
}

// Does kLanes columns after kLanes columns by `lanes`, and the last ones on copies that are filled up.
template <class F, class Lanes>
inline void fold_columns(void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t count,
                         bool reads_x, const char* previous, const Lanes& lanes) {
  using A = typename F::A;
  constexpr int L = kLanes<A>;
  constexpr Scan scan = F::scan();
  auto* states = static_cast<A*>(state);
  int64_t j = begin;
  for (; j + L <= end; j += L) lanes(states + j, at, next, previous, j, count);
  if (j == end) return;
  for (int64_t i = 0; i < count; ++i) {
    alignas(64) char space[kOperands + 1][L * 8] = {};
    char* copies[kOperands];
    for (int o = 0; o < scan.operands; ++o) {
      copies[o] = space[o];
      const char* from = at[o] + i * next[o] + j * scan.bytes[o];
      if (o < scan.results() && (o != scan.x || reads_x)) std::memcpy(copies[o], from, (end - j) * scan.bytes[o]);
    }
    if (previous != nullptr) {
      const int size = scan.bytes[scan.previous];
      std::memcpy(space[kOperands], previous + j * size, (end - j) * size);
    }
    lanes(states + j, copies, next, previous != nullptr ? space[kOperands] : nullptr, 0, 1);
    for (int o = scan.results(); o < scan.operands; ++o)
      std::memcpy(at[o] + i * next[o] + j * scan.bytes[o], copies[o], (end - j) * scan.bytes[o]);
  }
}

template <class F>
Scan fold() {
  Scan scan = F::scan();
  scan.rows = kLanes<typename F::A>;
  scan.init = &fold_init<F>;
  scan.row = &fold_rows<F>;
  scan.tail = &fold_tail<F>;
  scan.drop = &fold_drop<F>;
  scan.columns = [](void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t, int64_t count) {
    const char* previous = F::scan().previous >= 0 ? at[kOperands] : nullptr;
    fold_columns<F>(state, at, next, begin, end, count, true, previous, fold_lanes<F>);
  };
  scan.drop_columns = [](void* state, char* const* at, const int64_t* next, int64_t begin, int64_t end, int64_t count) {
    fold_columns<F>(state, at, next, begin, end, count, false, nullptr, drop_lanes<F>);
  };
  return scan;
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
