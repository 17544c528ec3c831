// Normalization of kept elements by given statistics, with its gradients, as registered ops. Arguments were checked in
// Python: weight, bias, mean and var are contiguous, of x's shape with size 1 along the dims of a slice, and have the dtype
// that x is accumulated in; the gradient has x's shape and dtype.
#include "elementwise.h"
#include "norm.h"
#include "select_mask.h"

#define MASKWISE_KERNELS "norm_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

NormRuns runs_of(const Tensor& x) { return MASKWISE_AT_ISA(norm_runs(x.scalar_type())); }

int bytes_of(const Tensor& x) { return static_cast<int>(x.element_size()); }

// Runs over what is kept; nothing else is read or written.
void for_each_kept_run(const Elementwise& loops, NormRun run) {
  loops.for_each([&](int64_t, Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
    if (keeps != Kept::none) run(keeps, at, stride, n);
  });
}

// Runs over everything; the result, which is the operand `out`, is 0 where nothing is kept.
void write_runs(Elementwise loops, NormRun run, int out, const Tensor& result) {
  const auto bytes = static_cast<int64_t>(result.element_size());
  constexpr int64_t kAheadLines = 3, kAheadBytes = 512;
  const int64_t pitch = result.is_contiguous() && result.dim() > 0 ? result.size(result.dim() - 1) * bytes : 0;
  if (pitch >= kAheadBytes && pitch <= 16 * kAheadBytes) loops.look_ahead(kAheadLines, kAheadBytes);
  loops.for_each(FreshPages(result, true), [&](int64_t, Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
    if (keeps != Kept::none)
      run(keeps, at, stride, n);
    else
      std::memset(at[out], 0, n * bytes);
  });
}

// -- moments ----------------------------------------------------------------------------------------------------------
// A slice of at most so many bytes is read twice, the second time from a near cache.
constexpr int64_t kNearBytes = int64_t{1} << 19;

// Whether slices are contiguous runs, each of which is kept as a whole, by its interval, or by bytes that lie together.
bool in_near_runs(const ReduceNest& nest, int64_t bytes) {
  if (nest.inner.empty() || nest.length * bytes > kNearBytes) return false;
  const ReduceLoop& run = nest.inner.back();
  return run.stride[kX] == bytes && (run.stride[kMask] == 0 || (run.stride[kMask] == 1 && !nest.mask.has_intervals()));
}

// The runs of a slice that keep something, and how many elements they keep.
int64_t runs_of_slice(const ReduceNest& nest, int64_t bytes, const Offset<3>& from, std::vector<MomentRun>& runs) {
  const ReduceLoop& inner = nest.inner.back();
  const Loops<3> lines(nest.inner.begin(), nest.inner.end() - 1);
  Steps<3> line(lines, 0);
  int64_t kept = 0;
  runs.clear();
  for (int64_t done = 0; done < nest.length; done += inner.size, line.next()) {
    const uint8_t* mask = nest.mask.data + from[kMask] + line.at[kMask];
    const KeptRun of = kept_of_run(nest.mask, mask, from[kPosition] + line.at[kPosition], inner.stride[kMask],
                                   inner.stride[kPosition], inner.size);
    const auto add = [&](Kept keeps, int64_t begin, int64_t end) {
      if (keeps == Kept::none || begin == end) return;
      const uint8_t* bits = keeps == Kept::bits ? mask + begin : nullptr;
      kept += bits == nullptr ? end - begin : count_kept(bits, end - begin);
      runs.push_back({line.at[kX] + begin * bytes, bits, end - begin});
    };
    if (of.kept == Kept::bits && inner.size >= 2 * kMaskBlock)
      for_each_block(mask, inner.size, add);
    else
      add(of.kept, of.begin, of.end);
  }
  return kept;
}

// How many elements of each slice are kept, their mean, and the mean of squared distances from it; 0 where none is.
std::tuple<Tensor, Tensor, Tensor> moments(const Tensor& x, const Tensor& mask, Dims dim, int64_t along) {
  const ScalarType dtype = x.scalar_type(), wide = dtype == ScalarType::Double ? dtype : ScalarType::Float;
  ReduceCall call(x, mask, dim, true, along, ScalarType::Long);
  const int64_t bytes = bytes_of(x);
  const ReduceNest& nest = call.nest;
  if (!in_near_runs(nest, bytes)) return moments_kept(x, mask, dim, along);
  Tensor mean = empty_cpu(reduced_sizes(x, dim, true), wide), var = empty_cpu(reduced_sizes(x, dim, true), wide);
  const MomentsOf moments_of = MASKWISE_AT_ISA(moments_kernel(dtype));
  const bool is_shared = std::all_of(nest.outer.begin(), nest.outer.end(), [](const ReduceLoop& loop) {
    return loop.stride[kMask] == 0 && loop.stride[kPosition] == 0;
  });
  auto* counts = static_cast<int64_t*>(call.result);
  parallel_uneven(nest.slices, nest.length, [&](int64_t begin, int64_t end) {
    std::vector<MomentRun> runs;
    Steps<3> slice(nest.outer, begin);
    for (int64_t s = begin; s < end; ++s, slice.next()) {
      counts[s] = is_shared && s > begin ? counts[begin] : runs_of_slice(nest, bytes, slice.at, runs);
      const char* from = static_cast<const char*>(call.x) + slice.at[kX];
      const SliceMoments found = counts[s] == 0 ? SliceMoments{} : moments_of(from, runs, counts[s]);
      const auto write = [&](auto a) {
        static_cast<decltype(a)*>(mean.mutable_data_ptr())[s] = static_cast<decltype(a)>(found.mean);
        static_cast<decltype(a)*>(var.mutable_data_ptr())[s] = static_cast<decltype(a)>(found.var);
      };
      wide == ScalarType::Double ? write(double{}) : write(float{});
    }
  });
  return {call.out, mean, var};
}

// -- scale and shift --------------------------------------------------------------------------------------------------

// x * scale + shift where kept, 0 elsewhere; with the layout of `like`.
Tensor scale_shift(const Tensor& x, const Tensor& mask, const Tensor& scale, const Tensor& shift, const Tensor& like,
                   int64_t along) {
  Tensor out = new_like(like, x.scalar_type());
  const int own = bytes_of(x), wide = bytes_of(scale);
  write_runs(Elementwise({&x, &mask, &scale, &shift, &out},
                         {5, {own, 1, wide, wide, own}, {false, true, true, true, false}, 1, true}, along),
             runs_of(x).scale_shift, 4, out);
  return out;
}

// The sums of grad, and of grad * (x - mean), over the kept elements of each slice.
std::tuple<Tensor, Tensor> sums_of(const Tensor& grad, const Tensor& x, const Tensor& mask, const Tensor& mean,
                                   const Dims& dim, int64_t along) {
  const int own = bytes_of(x), wide = bytes_of(mean);
  // Its dropped places are neither written nor read.
  Tensor buffer = new_like(x, mean.scalar_type());
  for_each_kept_run(Elementwise({&x, &mask, &mean, &grad, &buffer},
                                {5, {own, 1, wide, own, wide}, {false, true, true, false, false}, 1, true}, along),
                    runs_of(x).product);
  Tensor products = sum_kept(buffer, mask, dim, true, along);
  if (own == wide) return {sum_kept(grad, mask, dim, true, along), products};
  for_each_kept_run(
      Elementwise({&grad, &mask, &buffer}, {3, {own, 1, wide}, {false, true, false}, 1, true}, along), runs_of(x).widen);
  return {sum_kept(buffer, mask, dim, true, along), products};
}

// Calls call(A{}) with the type of a tensor of float or double.
template <class Call>
void dispatch_wide(const Tensor& like, const Call& call) {
  if (like.scalar_type() == ScalarType::Double) return call(double{});
  call(float{});
}

template <class A>
const A* numbers(const Tensor& t) {
  return static_cast<const A*>(t.const_data_ptr());
}

Tensor affine_norm(const Tensor& x, const Tensor& mask, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                   const Tensor& var, std::optional<Tensor>, Dims, double eps, int64_t along) {
  Tensor scale = new_like(mean, mean.scalar_type()), shift = new_like(mean, mean.scalar_type());
  dispatch_wide(mean, [&](auto a) {
    using A = decltype(a);
    auto* scales = static_cast<A*>(scale.mutable_data_ptr());
    auto* shifts = static_cast<A*>(shift.mutable_data_ptr());
    // In the order, and with the roundings, of torch's own batch norm.
    for (int64_t i = 0; i < mean.numel(); ++i) {
      scales[i] = A(1) / std::sqrt(numbers<A>(var)[i] + static_cast<A>(eps)) * numbers<A>(weight)[i];
      shifts[i] = std::fma(-numbers<A>(mean)[i], scales[i], numbers<A>(bias)[i]);
    }
  });
  return scale_shift(x, mask, scale, shift, x, along);
}

// The gradients of x, weight and bias. With a count the statistics are those of the kept elements of x, and have a gradient
// too: that of x is scale * (grad - mean(grad) - (x - mean) * mean(grad * (x - mean)) / (var + eps)).
std::tuple<Tensor, Tensor, Tensor> affine_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& mask,
                                                        const Tensor& weight, const Tensor& mean, const Tensor& var,
                                                        std::optional<Tensor> count, Dims dim, double eps, int64_t along) {
  // By name: a lambda of C++17 captures no structured binding, which GCC alone overlooks.
  const auto sums = sums_of(grad, x, mask, mean, dim, along);
  Tensor of_bias = std::get<0>(sums), of_weight = std::get<1>(sums);
  const auto like_mean = [&] { return new_like(mean, mean.scalar_type()); };
  Tensor scale = like_mean(), shift = like_mean(), slope = like_mean();
  dispatch_wide(mean, [&](auto a) {
    using A = decltype(a);
    const auto write = [](Tensor& t) { return static_cast<A*>(t.mutable_data_ptr()); };
    A *scales = write(scale), *shifts = write(shift), *slopes = write(slope), *products = write(of_weight);
    for (int64_t i = 0; i < mean.numel(); ++i) {
      const double inverse = 1 / std::sqrt(numbers<A>(var)[i] + eps);
      const auto kept = count ? static_cast<double>(std::max<int64_t>(1, numbers<int64_t>(*count)[i])) : 0;
      scales[i] = static_cast<A>(numbers<A>(weight)[i] * inverse);
      shifts[i] = count ? static_cast<A>(-numbers<A>(of_bias)[i] / kept) : A(0);
      slopes[i] = count ? static_cast<A>(inverse * inverse * products[i] / kept) : A(0);
      products[i] = static_cast<A>(products[i] * inverse);
    }
  });
  if (!count) return {scale_shift(grad, mask, scale, shift, x, along), of_weight, of_bias};
  Tensor of_x = new_like(x, x.scalar_type());
  const int own = bytes_of(x), wide = bytes_of(mean);
  write_runs(Elementwise({&x, &mask, &mean, &slope, &scale, &shift, &grad, &of_x},
                         {8, {own, 1, wide, wide, wide, wide, own, own},
                          {false, true, true, true, true, true, false, false}, 1, true},
                         along),
             runs_of(x).gradient, 7, of_x);
  return {of_x, of_weight, of_bias};
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  MASKWISE_IMPL_REDUCTION(m, moments);
  m.impl("affine_norm_fused", TORCH_BOX(&maskwise::affine_norm));
  m.impl("affine_norm_fused_forward", TORCH_BOX(&maskwise::affine_norm));
  m.impl("affine_norm_backward", TORCH_BOX(&maskwise::affine_norm_backward));
}
