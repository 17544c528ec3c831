// What one call of attention is, for the kernels of every SIMD level.
#pragma once

#include "common.h"

namespace maskwise {

// Keys that are packed and scored at a time, and queries that meet them before the next are packed. The scores of such
// a block stay in the first cache, the packed keys and values in the second.
constexpr int64_t kKeyBlock = 128;
constexpr int64_t kScoreRows = 6;
constexpr int64_t kRowBlock = 4 * kScoreRows;

// Where a tensor of (batch, heads, length, features) lies; strides are in elements.
struct Heads {
  void* data;
  int64_t batch, head, row, column;
};

struct AttentionCall {
  Heads q, k, v, out;
  // bool, (batch, heads, queries, keys); a stride of 0 is broadcasting. Null where all is kept.
  const uint8_t* mask;
  int64_t mask_batch, mask_head, mask_row, mask_key;
  int64_t heads, shared, queries, keys, features, out_features;
  bool is_causal;
  double scale;

  // Whether queries of one head may keep different keys.
  bool by_query() const { return mask_row != 0 || is_causal; }
};

// Queries [begin, end) of one head.
struct AttentionTask {
  int64_t batch, head, begin, end;
};

}  // namespace maskwise
