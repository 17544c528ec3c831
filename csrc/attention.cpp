// Attention as a registered op: out and whether every key and value that was read is finite. Arguments were checked in
// Python: q, k and v are float32 or float64 of four dims, the mask is bool.
#include "attention.h"

#include <atomic>
#include <optional>

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "attention_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Heads heads_of(const Tensor& x) {
  const auto strides = x.strides();
  return {x.mutable_data_ptr(), strides[0], strides[1], strides[2], strides[3]};
}

// A mask of two dims that `is_of_keys` is (batch, keys); any other lines up from the right, as torch broadcasts.
void place_mask(AttentionCall& call, const Tensor& mask, bool is_of_keys) {
  const auto sizes = mask.sizes();
  const auto strides = mask.strides();
  const int64_t ndim = mask.dim();
  const auto stride = [&](int64_t d) { return d < 0 || sizes[d] == 1 ? 0 : strides[d]; };
  call.mask = static_cast<const uint8_t*>(mask.data_ptr());
  call.mask_key = stride(ndim - 1);
  call.mask_row = is_of_keys ? 0 : stride(ndim - 2);
  call.mask_head = is_of_keys ? 0 : stride(ndim - 3);
  call.mask_batch = is_of_keys ? stride(0) : stride(ndim - 4);
}

template <class T>
bool run(const AttentionCall& call, int64_t batch) {
  const int64_t heads = batch * call.heads;
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // Multiply-adds in the measure of kGrain, which is simple operations.
  const int64_t work = heads * call.queries * call.keys * (call.features + call.out_features) / 8;
  const int64_t workers = work < 2 * kGrain ? 1 : threads;
  // Each task packs the keys that it needs, so queries are cut only as far as threads have to be kept busy.
  constexpr int64_t kMostRows = 512, kLeastRows = 2 * kRowBlock;
  const int64_t wanted = workers == 1 ? 1 : ceil_div(4 * workers, heads);
  const int64_t rows = std::min(kMostRows, std::max(kLeastRows, ceil_div(call.queries, wanted * kRowBlock) * kRowBlock));
  const int64_t cuts = ceil_div(call.queries, rows), tasks = heads * cuts;
  const int64_t held = std::min(rows, call.queries);
  const auto size = static_cast<int64_t>(MASKWISE_AT_ISA(scratch_bytes<T>(call, held)));
  Tensor memory = empty_cpu({workers * size}, ScalarType::Byte);
  char* scratch = static_cast<char*>(memory.mutable_data_ptr());
  std::atomic<int64_t> next{0};
  std::atomic<bool> sound{true};
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t task = next++; task < tasks; task = next++) {
        const int64_t head = task / cuts, first = task % cuts * rows;
        const AttentionTask one{head / call.heads, head % call.heads, first, std::min(first + rows, call.queries)};
        if (!MASKWISE_AT_ISA(attend_task<T>(call, one, held, scratch + worker * size))) sound = false;
      }
    }
  };
  if (workers == 1)
    body(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, body);
  return sound;
}

std::tuple<Tensor, bool> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                                   bool is_of_keys, bool is_causal, double scale) {
  const auto of_q = q.sizes();
  const auto of_v = v.sizes();
  const int64_t batch = of_q[0], heads = of_q[1], queries = of_q[2], size = of_v[3];
  // In q's order, as torch's kernel gives it: where heads lie side by side for each query they will be joined next.
  const bool is_joined = q.strides()[1] < q.strides()[2];
  const int64_t by_head = is_joined ? size : queries * size, by_query = is_joined ? heads * size : size;
  Tensor out = empty_cpu({batch, heads, queries, size}, {queries * heads * size, by_head, by_query, 1}, q.scalar_type());
  if (out.numel() == 0) return {std::move(out), true};
  AttentionCall call{};
  call.q = heads_of(q), call.k = heads_of(k), call.v = heads_of(v), call.out = heads_of(out);
  call.heads = heads, call.shared = heads / of_v[1], call.queries = queries, call.keys = of_v[2];
  call.features = of_q[3], call.out_features = size;
  call.is_causal = is_causal, call.scale = scale;
  if (mask.has_value()) place_mask(call, *mask, is_of_keys);
  const bool sound = q.scalar_type() == ScalarType::Double ? run<double>(call, batch) : run<float>(call, batch);
  return {std::move(out), sound};
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) { m.impl("attention_fused_forward", TORCH_BOX(&maskwise::attention)); }
