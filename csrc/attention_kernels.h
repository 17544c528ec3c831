// Attention of one head: the keys that are kept are packed block by block, and dropped ones never read. Compiled once a
// target, through attention.cpp.
#include "attention.h"
#include "vector_math.h"
#if defined(MASKWISE_ATTENTION_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ATTENTION_KERNELS_H
#else
#define MASKWISE_ATTENTION_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

// The width of a panel, the tile of a product being kScoreRows panels high: twelve sums, which leaves registers for the
// operands at every level.
template <class T>
constexpr int64_t kPanel = 2 * kLanes<T>;

template <class T>
constexpr int64_t panels(int64_t n) {
  return (n + kPanel<T> - 1) / kPanel<T>;
}

// Where a worker keeps what it needs, one after the other in one piece of memory.
template <class T>
struct AttentionScratch {
  T *keys, *values, *queries, *scores, *sums, *tops, *totals;
  int64_t* places;
  uint8_t *kept, *some, *any;
  size_t bytes;
  // How many keys are packed at the moment; how many panels of values are read where they lie, and where that is.
  int64_t packed = 0, direct = 0;
  const T* unpacked = nullptr;

  AttentionScratch(const AttentionCall& call, int64_t rows, char* memory) {
    bytes = 0;
    const auto take = [&](size_t count, size_t size) {
      char* here = memory == nullptr ? nullptr : memory + bytes;
      bytes += (count * size + 63) / 64 * 64;
      return here;
    };
    const int64_t block = panels<T>(std::min(kKeyBlock, call.keys)) * kPanel<T>;
    const int64_t wide = panels<T>(call.out_features) * kPanel<T>;
    const auto numbers = [&take](int64_t count) { return reinterpret_cast<T*>(take(count, sizeof(T))); };
    keys = numbers(block * call.features);
    values = numbers(block * wide);
    queries = numbers(kRowBlock * call.features);
    scores = numbers(kRowBlock * kKeyBlock);
    sums = numbers((rows + kScoreRows) * wide);
    tops = numbers(rows + kScoreRows);
    totals = numbers(rows + kScoreRows);
    places = reinterpret_cast<int64_t*>(take(call.keys, sizeof(int64_t)));
    kept = reinterpret_cast<uint8_t*>(take(kRowBlock * kKeyBlock, 1));
    some = reinterpret_cast<uint8_t*>(take(rows, 1));
    any = reinterpret_cast<uint8_t*>(take(call.keys, 1));
  }
};

// -- packing -----------------------------------------------------------------------------------------------------------

// Keys at `places`, as panels (features, kPanel); what lies behind the last key is zero.
template <class T>
void pack_keys(const T* k, int64_t row, int64_t column, const int64_t* places, int64_t count, int64_t features, T* to) {
  constexpr int kN = kLanes<T>;
  for (int64_t first = 0; first < count; first += kN) {
    // Two groups of rows side by side are a panel.
    T* at = to + first / kPanel<T> * features * kPanel<T> + first % kPanel<T>;
    const int64_t wide = std::min<int64_t>(kN, count - first);
    int64_t d = 0;
    if (column == 1 && wide == kN) {
      for (; d + kN <= features; d += kN) {
        Vec<T> block[kN];
        for (int i = 0; i < kN; ++i) block[i] = load_raw<Vec<T>>(k + places[first + i] * row + d);
        transpose<T>(block);
        for (int i = 0; i < kN; ++i) store(at + (d + i) * kPanel<T>, block[i]);
      }
    }
    for (; d < features; ++d) {
      for (int64_t i = 0; i < wide; ++i) at[d * kPanel<T> + i] = k[places[first + i] * row + d * column];
      for (int64_t i = wide; i < kN; ++i) at[d * kPanel<T> + i] = T(0);
    }
  }
  if (panels<T>(count) * kPanel<T> - count >= kN) {
    T* at = to + (panels<T>(count) - 1) * features * kPanel<T> + kN;
    for (int64_t d = 0; d < features; ++d) store(at + d * kPanel<T>, Vec<T>{});
  }
}

// Features [first, features) of the values at `places`, as panels (count, kPanel); what lies behind the last feature is
// zero.
template <class T>
void pack_values(const T* v, int64_t row, int64_t column, const int64_t* places, int64_t count, int64_t first,
                 int64_t features, T* to) {
  for (; first < features; first += kPanel<T>) {
    const int64_t wide = std::min(kPanel<T>, features - first);
    for (int64_t j = 0; j < count; ++j, to += kPanel<T>) {
      const T* from = v + places[j] * row + first * column;
      if (wide == kPanel<T> && column == 1) {
        std::memcpy(to, from, kPanel<T> * sizeof(T));
        continue;
      }
      for (int64_t d = 0; d < wide; ++d) to[d] = from[d * column];
      for (int64_t d = wide; d < kPanel<T>; ++d) to[d] = T(0);
    }
  }
}

// -- the two products ----------------------------------------------------------------------------------------------------

// kRows queries by one panel of keys. Loops over rows are unrolled early, or the sums would go through memory.
template <class T, int kRows>
void score_tile(const T* queries, int64_t pitch, const T* keys, int64_t features, T* scores) {
  Vec<T> sum[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = Vec<T>{};
  for (int64_t d = 0; d < features; ++d) {
    const Vec<T> low = load_raw<Vec<T>>(keys + d * kPanel<T>);
    const Vec<T> high = load_raw<Vec<T>>(keys + d * kPanel<T> + kLanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T query = queries[i * pitch + d];
      sum[i][0] += low * query;
      sum[i][1] += high * query;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    store(scores + i * kKeyBlock, sum[i][0]);
    store(scores + i * kKeyBlock + kLanes<T>, sum[i][1]);
  }
}

// kRows rows of weights by one panel of values, which lie at `places`, or packed one after the other; they are added to
// what `sums` holds.
template <class T, int kRows, bool kPacked>
void value_tile(const T* weights, const T* values, const int64_t* places, int64_t row, int64_t count, T* sums,
                int64_t pitch) {
  Vec<T> sum[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = load_raw<Vec<T>>(sums + i * pitch);
    sum[i][1] = load_raw<Vec<T>>(sums + i * pitch + kLanes<T>);
  }
  for (int64_t j = 0; j < count; ++j) {
    const T* value = values + (kPacked ? j * kPanel<T> : places[j] * row);
    const Vec<T> low = load_raw<Vec<T>>(value), high = load_raw<Vec<T>>(value + kLanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T weight = weights[i * kKeyBlock + j];
      sum[i][0] += low * weight;
      sum[i][1] += high * weight;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    store(sums + i * pitch, sum[i][0]);
    store(sums + i * pitch + kLanes<T>, sum[i][1]);
  }
}

// Calls with_rows(std::integral_constant<int, rows>) for 1 <= rows <= kScoreRows.
template <int kRows = kScoreRows, class Body>
inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, body);
  }
  body(std::integral_constant<int, kRows>{});
}

// -- softmax, row by row -------------------------------------------------------------------------------------------------

// Turns `count` scores, a multiple of the panel's width, into weights below the largest score so far, which goes into
// `top`; the sum of weights so far goes into `total`. Returns what sums of weighted values so far must be multiplied by.
template <class T>
T softmax_row(T* scores, int64_t count, T scale, T& top, T& total) {
  constexpr T kInf = std::numeric_limits<T>::infinity();
  // A NaN may get lost in a comparison, and does not in the exponentials.
  Vec<T> low = load_raw<Vec<T>>(scores) * scale, high = load_raw<Vec<T>>(scores + kLanes<T>) * scale;
  for (int64_t c = kPanel<T>; c < count; c += kPanel<T>) {
    const Vec<T> a = load_raw<Vec<T>>(scores + c) * scale, b = load_raw<Vec<T>>(scores + c + kLanes<T>) * scale;
    low = a > low ? a : low;
    high = b > high ? b : high;
  }
  const T highest = max_lanes<T>(high > low ? high : low);
  const T most = highest > top ? highest : top;
  // Nothing was kept so far: -inf less -inf would be NaN.
  const T base = most == -kInf ? T(0) : most;
  Vec<T> sums[2] = {};
  for (int64_t c = 0; c < count; c += kPanel<T>) {
    const Vec<T> a = vexp_nonpositive<T>(load_raw<Vec<T>>(scores + c) * scale - base);
    const Vec<T> b = vexp_nonpositive<T>(load_raw<Vec<T>>(scores + c + kLanes<T>) * scale - base);
    store(scores + c, a);
    store(scores + c + kLanes<T>, b);
    sums[0] += a;
    sums[1] += b;
  }
  const T shrink = top == -kInf ? T(0) : top == most ? T(1) : vexp_nonpositive<T>(splat<T>(top - base))[0];
  total = total * shrink + add_lanes<T>(sums[0] + sums[1]);
  top = most;
  return shrink;
}

// -- one head ------------------------------------------------------------------------------------------------------------

// The places of the keys that some query of the task keeps, in order; returns how many.
inline int64_t find_keys(const AttentionCall& call, const AttentionTask& task, uint8_t* any, int64_t* places) {
  const int64_t keys = call.is_causal ? std::min(call.keys, task.end) : call.keys;
  if (call.mask == nullptr) {
    for (int64_t j = 0; j < keys; ++j) places[j] = j;
    return keys;
  }
  const uint8_t* mask = call.mask + task.batch * call.mask_batch + task.head * call.mask_head;
  int64_t stride = call.mask_key;
  if (call.mask_row != 0) {
    std::memset(any, 0, static_cast<size_t>(keys));
    for (int64_t i = task.begin; i < task.end; ++i) {
      const uint8_t* row = mask + i * call.mask_row;
      const int64_t visible = call.is_causal ? std::min(keys, i + 1) : keys;
      if (stride == 1) {
        for (int64_t j = 0; j < visible; ++j) any[j] |= row[j];
      } else {
        for (int64_t j = 0; j < visible; ++j) any[j] |= row[j * stride];
      }
    }
    mask = any;
    stride = 1;
  }
  int64_t count = 0;
  for (int64_t j = 0; j < keys; ++j) {
    places[count] = j;
    count += mask[j * stride] != 0;
  }
  return count;
}

// Which keys of a block query `row` keeps, as bytes; returns whether any.
inline bool find_kept(const AttentionCall& call, const AttentionTask& task, int64_t row, const int64_t* places,
                      int64_t count, uint8_t* kept) {
  if (call.mask_row != 0) {
    const uint8_t* mask =
        call.mask + task.batch * call.mask_batch + task.head * call.mask_head + row * call.mask_row;
    if (call.mask_key == 1 && places[count - 1] - places[0] == count - 1) {
      std::memcpy(kept, mask + places[0], static_cast<size_t>(count));
    } else {
      for (int64_t j = 0; j < count; ++j) kept[j] = mask[places[j] * call.mask_key];
    }
  } else {
    std::memset(kept, 1, static_cast<size_t>(count));
  }
  if (call.is_causal) {
    const int64_t visible = std::upper_bound(places, places + count, row) - places;
    std::memset(kept + visible, 0, static_cast<size_t>(count - visible));
  }
  uint8_t any = 0;
  for (int64_t j = 0; j < count; ++j) any |= kept[j];
  return any != 0;
}

// Makes scores -inf where they are dropped, or lie behind the last key; returns the scale that is still to be applied.
template <class T>
T mask_scores(const AttentionCall& call, T* scores, int64_t count, int64_t padded, uint8_t* kept) {
  constexpr T kInf = std::numeric_limits<T>::infinity();
  const T scale = static_cast<T>(call.scale);
  // A scale that is not positive would make something else of -inf.
  const bool scaled_here = call.by_query() || !(scale > T(0));
  if (scaled_here) {
    if (!call.by_query()) std::memset(kept, 1, static_cast<size_t>(count));
    std::memset(kept + count, 0, static_cast<size_t>(padded - count));
    for (int64_t c = 0; c < padded; c += kLanes<T>) {
      const Vec<T> x = load_raw<Vec<T>>(scores + c) * scale;
      store(scores + c, load_mask<T>(kept + c) ? x : splat<T>(-kInf));
    }
    return T(1);
  }
  for (int64_t c = count; c < padded; ++c) scores[c] = -kInf;
  return scale;
}

// Rows [begin, begin + rows) of the task against one block of packed keys and values.
template <class T>
void attend_block(const AttentionCall& call, const AttentionTask& task, int64_t begin, int64_t rows,
                  const int64_t* places, int64_t count, AttentionScratch<T>& s) {
  const int64_t wide = panels<T>(call.out_features) * kPanel<T>, last = task.begin + begin + rows - 1;
  // Behind the last key that a query of these rows may see nothing need be scored.
  if (call.is_causal) count = std::upper_bound(places, places + count, last) - places;
  if (count == 0) return;
  if (call.by_query()) {
    bool some = false;
    for (int64_t i = 0; i < rows; ++i) {
      const bool found =
          find_kept(call, task, task.begin + begin + i, places, count, s.kept + i * kKeyBlock);
      s.some[begin + i] |= found;
      some |= found;
    }
    if (!some) return;
  }
  const int64_t across = panels<T>(count), padded = across * kPanel<T>;
  const T* q = static_cast<const T*>(call.q.data) + task.batch * call.q.batch + task.head * call.q.head +
               (task.begin + begin) * call.q.row;
  int64_t pitch = call.q.row;
  if (call.q.column != 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t d = 0; d < call.features; ++d) s.queries[i * call.features + d] = q[i * pitch + d * call.q.column];
    q = s.queries;
    pitch = call.features;
  }
  for (int64_t panel = 0; panel < across; ++panel) {
    for (int64_t i = 0; i < rows; i += kScoreRows) {
      with_rows(std::min(kScoreRows, rows - i), [&](auto high) {
        score_tile<T, decltype(high)::value>(q + i * pitch, pitch, s.keys + panel * call.features * kPanel<T>,
                                             call.features, s.scores + i * kKeyBlock + panel * kPanel<T>);
      });
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    T* scores = s.scores + i * kKeyBlock;
    const T scale = mask_scores<T>(call, scores, count, padded, s.kept + i * kKeyBlock);
    const T shrink = softmax_row<T>(scores, padded, scale, s.tops[begin + i], s.totals[begin + i]);
    if (shrink != T(1)) {
      T* sums = s.sums + (begin + i) * wide;
      for (int64_t d = 0; d < wide; d += kLanes<T>) store(sums + d, load_raw<Vec<T>>(sums + d) * shrink);
    }
  }
  for (int64_t panel = 0; panel < wide / kPanel<T>; ++panel) {
    const bool packed = panel >= s.direct;
    const T* values = packed ? s.values + (panel - s.direct) * s.packed * kPanel<T> : s.unpacked + panel * kPanel<T>;
    for (int64_t i = 0; i < rows; i += kScoreRows) {
      const T* weights = s.scores + i * kKeyBlock;
      T* sums = s.sums + (begin + i) * wide + panel * kPanel<T>;
      with_rows(std::min(kScoreRows, rows - i), [&](auto high) {
        constexpr int kRows = decltype(high)::value;
        if (packed)
          value_tile<T, kRows, true>(weights, values, places, 0, count, sums, wide);
        else
          value_tile<T, kRows, false>(weights, values, places, call.v.row, count, sums, wide);
      });
    }
  }
}

// How much memory a worker needs for tasks of up to so many rows.
template <class T>
size_t scratch_bytes(const AttentionCall& call, int64_t rows) {
  return AttentionScratch<T>(call, rows, nullptr).bytes;
}

// A task as a whole. Returns whether its result is finite.
template <class T>
bool attend_task(const AttentionCall& call, const AttentionTask& task, int64_t most_rows, char* memory) {
  AttentionScratch<T> s(call, most_rows, memory);
  const int64_t rows = task.end - task.begin, wide = panels<T>(call.out_features) * kPanel<T>;
  const int64_t found = find_keys(call, task, s.any, s.places);
  const int64_t shared = task.head / call.shared;
  std::fill_n(s.sums, rows * wide, T(0));
  std::fill_n(s.totals, rows, T(0));
  std::fill_n(s.tops, rows, -std::numeric_limits<T>::infinity());
  std::memset(s.some, !call.by_query() && found > 0, static_cast<size_t>(rows));
  const T* k = static_cast<const T*>(call.k.data) + task.batch * call.k.batch + shared * call.k.head;
  s.unpacked = static_cast<const T*>(call.v.data) + task.batch * call.v.batch + shared * call.v.head;
  // Few queries do not read values often enough for a copy to pay.
  s.direct = rows <= kRowBlock && call.v.column == 1 ? call.out_features / kPanel<T> : 0;
  for (int64_t first = 0; first < found; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, found - first);
    const int64_t* places = s.places + first;
    s.packed = count;
    pack_keys<T>(k, call.k.row, call.k.column, places, count, call.features, s.keys);
    pack_values<T>(s.unpacked, call.v.row, call.v.column, places, count, s.direct * kPanel<T>, call.out_features,
                   s.values);
    for (int64_t begin = 0; begin < rows; begin += kRowBlock)
      attend_block<T>(call, task, begin, std::min(kRowBlock, rows - begin), places, count, s);
  }
  T* out = static_cast<T*>(call.out.data) + task.batch * call.out.batch + task.head * call.out.head +
           task.begin * call.out.row;
  // Stays 0 as long as all is finite, and becomes NaN otherwise.
  Vec<T> finite = {};
  for (int64_t i = 0; i < rows; ++i, out += call.out.row) {
    if (!s.some[i]) {
      std::fill_n(out, call.out_features, T(0));
      continue;
    }
    T* sums = s.sums + i * wide;
    // Scores that are all -inf though something is kept have no softmax: 0 / 0.
    const T part = T(1) / s.totals[i];
    for (int64_t d = 0; d < wide; d += kLanes<T>) {
      const Vec<T> x = load_raw<Vec<T>>(sums + d) * part;
      finite += x * T(0);
      store(sums + d, x);
    }
    std::memcpy(out, sums, static_cast<size_t>(call.out_features) * sizeof(T));
  }
  return add_lanes<T>(finite) == T(0);
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
