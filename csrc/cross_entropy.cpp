// Cross entropy as registered ops. Arguments were checked in Python: x is (N, C, ...), with its classes next to each
// other or else contiguous; target is int64, (N, ...); mask is bool, or the bounds of intervals along a dim of the target, and
// broadcasts to it; weight has x's dtype, (C,).
#include "cross_entropy.h"
#include "loops.h"
#include "zero_pages.h"

#define MASKWISE_KERNELS "cross_entropy_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

enum Reduction : int64_t { none = 0, sum = 1, mean = 2 };

CrossEntropyKernel kernel_of(ScalarType dtype) {
  CrossEntropyKernel kernel;
  MASKWISE_AT_ISA(cross_entropy_kernel(dtype, kernel));
  return kernel;
}

// The shape of the loss: that of x without its classes.
std::vector<int64_t> loss_sizes(const Tensor& x) {
  const auto sizes = x.sizes();
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  out.erase(out.begin() + 1);
  return out;
}

// A tensor that broadcasts to the loss, as one element for each position, next to each other.
template <class T>
class Dense {
 public:
  Dense(const Tensor& tensor, const std::vector<int64_t>& sizes) {
    const auto own_sizes = tensor.sizes();
    const auto own_strides = tensor.strides();
    at_ = static_cast<const T*>(tensor.const_data_ptr());
    if (own_sizes.size() == sizes.size() && tensor.is_contiguous() &&
        std::equal(sizes.begin(), sizes.end(), own_sizes.begin()))
      return;
    // It is small beside x, which has all the classes.
    Loops<1> loops;
    const size_t shift = sizes.size() - own_sizes.size();
    int64_t count = 1;
    for (size_t d = 0; d < sizes.size(); ++d) {
      const bool broadcast = d < shift || own_sizes[d - shift] != sizes[d];
      loops.push_back({sizes[d], {broadcast ? 0 : own_strides[d - shift]}});
      count *= sizes[d];
    }
    coalesce(loops);
    copy_.reserve(count);
    for_each_run(loops, 0, count, [&](const Offset<1>& offset, int64_t n) {
      const int64_t stride = loops.empty() ? 0 : loops.back().stride[0];
      for (int64_t i = 0; i < n; ++i) copy_.push_back(at_[offset[0] + i * stride]);
    });
    at_ = copy_.data();
  }
  Dense(const Dense&) = delete;

  T operator[](int64_t position) const { return at_[position]; }
  const T* operator+(int64_t position) const { return at_ + position; }

 private:
  const T* at_;
  std::vector<T> copy_;
};

// The operands of a call. Positions are those of the loss, in its order.
struct Call {
  CrossEntropyKernel kernel;
  int64_t classes, step, bytes, positions;
  // Whether a position's classes are next to each other; otherwise positions are, class by class.
  bool rows;
  const char* x;
  const void* weight;
  Dense<int64_t> target;
  Mask mask;
  int64_t ignored;
  // Of x, of the mask, and of the position along its intervals.
  Loops<3> loops;
  Loop<3> inner;
  static constexpr int kX = 0, kMask = 1, kPosition = 2;

  Call(const Tensor& x, const Tensor& target, const Tensor& mask, const std::optional<Tensor>& weight, int64_t ignored,
       int64_t along, const std::vector<int64_t>& sizes)
      : kernel(kernel_of(x.scalar_type())),
        classes(x.size(1)),
        step(x.stride(1)),
        bytes(static_cast<int64_t>(x.element_size())),
        positions(1),
        rows(step == 1),
        x(static_cast<const char*>(x.const_data_ptr())),
        weight(weight ? weight->const_data_ptr() : nullptr),
        target(target, sizes),
        mask(mask, along, target),
        ignored(ignored),
        loops(make_loops<3>(target, {{nullptr}, this->mask.operand, this->mask.position})) {
    const auto strides = x.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      loops[d].stride[kX] = strides[d == 0 ? 0 : d + 1] * bytes;
      positions *= sizes[d];
    }
    if (this->mask.has_intervals()) this->mask.scale = linearize(loops, kMask, kPosition);
    coalesce(loops);
    inner = innermost(loops, this->mask, kMask);
  }

  bool exists(int64_t p) const { return (target[p] >= 0) & (target[p] < classes); }
  double weight_of(int64_t p) const { return weight == nullptr ? 1.0 : kernel.element(weight, target[p]); }

  // Calls block(p, at, n, counts) for up to kPositions positions from p on, a run of the innermost loop: the first class
  // of the first is at `at`, and `counts` is 1 where the mask keeps a position whose target is not ignored.
  template <class Block>
  void for_each_block(int64_t begin, int64_t end, const Block& block) const {
    int64_t p = begin;
    for_each_run(loops, begin, end, [&](const Offset<3>& offset, int64_t count) {
      for (int64_t done = 0, n = 0; done < count; done += n, p += n) {
        n = std::min(kPositions, count - done);
        Offset<3> at = offset;
        at.step(inner, done);
        uint8_t counts[kPositions];
        stage_mask(at, n, counts);
        // Without a branch: that of a random mask is guessed wrong half of the time.
        for (int64_t i = 0; i < n; ++i) counts[i] &= target[p + i] != ignored;
        block(p, x + at[kX], n, counts);
      }
    });
  }

  // The same on all threads, for work on what counts.
  template <class Block>
  void run(const Block& block) const {
    parallel_uneven(positions, classes, [&](int64_t begin, int64_t end) { for_each_block(begin, end, block); });
  }
  // And for work that writes to a result of x's shape.
  template <class Block>
  void run(const FreshPages& result, const Block& block) const {
    result.parallel(positions, classes, rows ? classes * bytes : 0,
                    [&](int64_t begin, int64_t end) { for_each_block(begin, end, block); });
  }

 private:
  // 1 where the mask keeps one of n positions.
  void stage_mask(const Offset<3>& at, int64_t n, uint8_t* keeps) const {
    const uint8_t* from = mask.data + at[kMask];
    const int64_t stride = inner.stride[kMask];
    const KeptRun run = kept_of_run(mask, from, at[kPosition], stride, inner.stride[kPosition], n);
    if (run.kept == Kept::bits && mask.has_intervals()) return stage_bits(mask, from, at[kPosition], stride, n, keeps);
    if (run.kept == Kept::bits) {
      for (int64_t i = 0; i < n; ++i) keeps[i] = from[i * stride] != 0;
      return;
    }
    std::memset(keeps, 0, n);
    if (run.kept == Kept::all) std::memset(keeps + run.begin, 1, run.end - run.begin);
  }
};

void write(const Tensor& out, int64_t i, double value) {
  dispatch_floating(out.scalar_type(), [&](auto t) {
    using T = decltype(t);
    static_cast<T*>(out.mutable_data_ptr())[i] = static_cast<T>(static_cast<Acc<T>>(value));
  });
}

// The loss; the log of the sum of exponentials at each position that counts, which the gradient needs; and two numbers:
// by what a mean divides, and the first position that counts with a class that does not exist, or -1.
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& x, const Tensor& target, const Tensor& mask,
                                                 const std::optional<Tensor>& weight, int64_t ignored,
                                                 double smoothing, int64_t reduction, int64_t along) {
  const std::vector<int64_t> sizes = loss_sizes(x);
  const Call call(x, target, mask, weight, ignored, along, sizes);
  const double classes = static_cast<double>(call.classes);
  Tensor sums = empty_cpu(sizes, ScalarType::Double);
  Tensor facts = empty_cpu({2}, ScalarType::Double);
  Tensor out = empty_cpu(reduction == none ? sizes : std::vector<int64_t>{}, x.scalar_type());
  auto* log_sums = static_cast<double*>(sums.mutable_data_ptr());
  std::vector<double> losses(call.positions);
  std::vector<uint8_t> counted(call.positions);
  call.run([&](int64_t p, const char* at, int64_t n, uint8_t* counts) {
    double totals[kPositions];
    std::memcpy(counted.data() + p, counts, n);
    for (int64_t i = 0; i < n; ++i) counts[i] &= call.exists(p + i);
    if (!call.rows) call.kernel.columns(at, call.classes, call.step, n, counts, log_sums + p, totals);
    for (int64_t i = 0; i < n; ++i, at += call.inner.stride[Call::kX]) {
      if (!counts[i]) {
        log_sums[p + i] = 0;
        continue;
      }
      if (call.rows) call.kernel.row(at, call.classes, log_sums + p + i, totals + i);
      const double log_sum = log_sums[p + i];
      const double own = call.kernel.element(at, call.target[p + i] * call.step);
      losses[p + i] = (1 - smoothing) * (log_sum - own) * call.weight_of(p + i);
      if (smoothing != 0) losses[p + i] += smoothing * (log_sum - totals[i] / classes);
    }
  });
  double total = 0, divisor = 0;
  int64_t stray = -1;
  for (int64_t p = 0; p < call.positions; ++p) {
    if (reduction == none) write(out, p, losses[p]);
    total += losses[p];
    const bool counts = counted[p] != 0, exists = call.exists(p);
    if (call.weight == nullptr) {
      divisor += counts & exists;
    } else if (counts & exists) {
      divisor += call.weight_of(p);
    }
    if (counts & !exists & (stray < 0)) stray = p;
  }
  if (reduction != none) write(out, 0, reduction == mean && divisor != 0 ? total / divisor : total);
  auto* fact = static_cast<double*>(facts.mutable_data_ptr());
  fact[0] = divisor;
  fact[1] = static_cast<double>(stray);
  return {out, sums, facts};
}

// An uninitialised tensor for the gradient of x: with the classes next to each other if x has them so, else contiguous.
Tensor gradient_like(const Tensor& x, const Call& call) {
  const auto all = x.sizes();
  const std::vector<int64_t> sizes(all.begin(), all.end());
  if (!call.rows) return empty_cpu(sizes, x.scalar_type());
  std::vector<int64_t> strides(sizes.size());
  strides[1] = 1;
  int64_t stride = std::max<int64_t>(1, call.classes);
  for (size_t d = sizes.size(); d-- > 0;) {
    if (d == 1) continue;
    strides[d] = stride;
    stride *= std::max<int64_t>(1, sizes[d]);
  }
  return empty_cpu(sizes, strides, x.scalar_type());
}

// Whether the rows that count take less than a quarter of the huge pages of the gradient on which they lie: to clear the
// pages takes as long as to take a quarter of them as small ones (90 against 0.67 µs each, on two threads).
bool is_scattered(const Call& call) {
  constexpr int64_t kPage = 4096, kHugePage = int64_t{1} << 21;
  const int64_t row = call.classes * call.bytes;
  if (!call.rows || row < kPage) return false;
  int64_t used = 0, pages = 0, next = 0;
  call.for_each_block(0, call.positions, [&](int64_t p, const char*, int64_t n, const uint8_t* counts) {
    for (int64_t i = p; i < p + n; ++i) {
      if (!counts[i - p]) continue;
      const int64_t begin = std::max(next, i * row / kHugePage);
      next = ceil_div((i + 1) * row, kHugePage);
      pages += next - begin;
      used += row;
    }
  });
  return 4 * used < pages * kHugePage;
}

// The gradient of x; `grad` is contiguous, and one number unless the loss is unreduced.
Tensor cross_entropy_backward(const Tensor& grad, const Tensor& x, const Tensor& target, const Tensor& mask,
                              const std::optional<Tensor>& weight, const Tensor& sums, const Tensor& facts,
                              int64_t ignored, double smoothing, int64_t reduction, int64_t along) {
  const std::vector<int64_t> sizes = loss_sizes(x);
  const Call call(x, target, mask, weight, ignored, along, sizes);
  const auto* log_sums = static_cast<const double*>(sums.const_data_ptr());
  const double divisor = *static_cast<const double*>(facts.const_data_ptr());
  const double scale = reduction == mean && divisor != 0 ? 1.0 / divisor : 1.0;
  const void* above = grad.const_data_ptr();
  Tensor out = gradient_like(x, call);
  const bool scattered = is_scattered(call);
  const FreshPages pages(out, true, scattered);
  const bool zeroed = pages.are_zeros();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  // Positions behind one index of dim 0.
  const int64_t inner = std::max<int64_t>(1, call.positions / std::max<int64_t>(1, x.size(0)));
  const int64_t row = call.classes * call.bytes;
  call.run(pages, [&](int64_t p, const char* at, int64_t n, uint8_t* counts) {
    Slope slopes[kPositions];
    for (int64_t i = 0; i < n; ++i) {
      counts[i] &= call.exists(p + i);
      if (!counts[i]) continue;
      const double factor = call.kernel.element(above, reduction == none ? p + i : 0) * scale * call.weight_of(p + i);
      slopes[i] = {log_sums[p + i], factor, smoothing / static_cast<double>(call.classes), 1 - smoothing};
    }
    if (!call.rows) {
      // A stretch of positions that are next to each other in x lies within one index of dim 0, or has one class.
      char* from = to + (p / inner * call.classes * inner + p % inner) * call.bytes;
      call.kernel.column_slopes(at, call.classes, call.step, n, counts, call.target + p, slopes, from, inner, zeroed);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      char* from = to + (p + i) * row;
      if (counts[i]) {
        if (zeroed && scattered) populate(from, row);
        call.kernel.row_slopes(at + i * call.inner.stride[Call::kX], call.classes, call.target[p + i], slopes[i], from);
      } else if (!zeroed) {
        std::memset(from, 0, row);
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("cross_entropy_fused", TORCH_BOX(&maskwise::cross_entropy));
  m.impl("cross_entropy_fused_forward", TORCH_BOX(&maskwise::cross_entropy));
  m.impl("cross_entropy_fused_backward", TORCH_BOX(&maskwise::cross_entropy_backward));
}
