// Losses of single elements as registered ops. Arguments were checked in Python: x and target have one shape and one
// dtype that the capability table knows; the mask broadcasts to them, and is bool, or the bounds of intervals along a dim.
#include "elementwise.h"
#include "select_mask.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "loss_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

enum Reduction : int64_t { none = 0, sum = 1, mean = 2 };

// A loss as loss_kernels.h compiles it, at the SIMD level in force.
struct Kernel {
  double (*total)(const void*, const void*, const uint8_t*, int64_t, double);
  void (*values)(const void*, const void*, const uint8_t*, int64_t, double, void*);
  void (*slopes)(const void*, const void*, const uint8_t*, int64_t, double, const void*, int64_t, double, void*);
};

Kernel kernel_of(ScalarType dtype, int64_t code) {
  Kernel kernel;
  MASKWISE_AT_ISA(loss_kernel(dtype, code, kernel));
  return kernel;
}

// Operands: x, target, mask; the result, or its gradient and the gradient of x. A loss wants x and target element by
// element; one number may be the gradient of all.
ElementOperands operands_of(int count, const Tensor& x) {
  const int bytes = static_cast<int>(x.element_size());
  return {count, {bytes, bytes, 1, bytes, bytes}, {false, false, true, count == 5, false}, 2, true};
}

// The mask bytes of a run; null where all is kept.
const uint8_t* bits_of(Kept keeps, char* const* at) {
  return keeps == Kept::all ? nullptr : reinterpret_cast<const uint8_t*>(at[2]);
}

template <class T>
void write_number(void* out, double value) {
  *static_cast<T*>(out) = static_cast<T>(static_cast<float>(value));
}

void write_scalar(const Tensor& out, double value) {
  void* p = out.mutable_data_ptr();
  switch (out.scalar_type()) {
    case ScalarType::Double: *static_cast<double*>(p) = value; return;
    case ScalarType::Half: return write_number<Half>(p, value);
    case ScalarType::BFloat16: return write_number<BFloat16>(p, value);
    default: return write_number<float>(p, value);
  }
}

// What one task adds up; tasks are summed in their order.
struct Sums {
  double total = 0;
  int64_t count = 0;
};

// The loss; and how many elements are kept, as float64, where it is a mean.
std::tuple<Tensor, Tensor> loss(const Tensor& x, const Tensor& target, const Tensor& mask, int64_t code,
                                double parameter, int64_t reduction, int64_t along) {
  const auto kernel = kernel_of(x.scalar_type(), code);
  Tensor kept = empty_cpu({}, ScalarType::Double);
  double& count = *static_cast<double*>(kept.mutable_data_ptr());
  count = 0;
  if (reduction == none) {
    Tensor out = new_like(x, x.scalar_type());
    Elementwise({&x, &target, &mask, &out}, operands_of(4, x), along)
        .for_each(FreshPages(out, true), [&](int64_t, Kept keeps, char* const* at, const int64_t*, int64_t n) {
          if (keeps != Kept::none)
            kernel.values(at[0], at[1], bits_of(keeps, at), n, parameter, at[3]);
          else
            std::memset(at[3], 0, n * x.element_size());
        });
    return {out, kept};
  }
  // x stands in for the result that there is not: the loops follow its memory.
  const Elementwise loops({&x, &target, &mask, &x}, operands_of(3, x), along);
  std::vector<Sums> sums(loops.tasks());
  loops.for_each([&](int64_t task, Kept keeps, char* const* at, const int64_t*, int64_t n) {
    if (keeps == Kept::none) return;
    const uint8_t* m = bits_of(keeps, at);
    sums[task].total += kernel.total(at[0], at[1], m, n, parameter);
    if (reduction == mean) sums[task].count += m == nullptr ? n : count_kept(m, n);
  });
  double total = 0;
  for (const Sums& each : sums) {
    total += each.total;
    count += static_cast<double>(each.count);
  }
  Tensor out = empty_cpu({}, x.scalar_type());
  write_scalar(out, reduction == mean ? total / std::max(count, 1.0) : total);
  return {out, kept};
}

// The gradient of x. `grad` has x's dtype; it has x's shape, or is one number.
Tensor loss_backward(const Tensor& grad, const Tensor& x, const Tensor& target, const Tensor& mask, const Tensor& kept,
                     int64_t code, double parameter, int64_t reduction, int64_t along) {
  const auto kernel = kernel_of(x.scalar_type(), code);
  const double count = *static_cast<const double*>(kept.const_data_ptr());
  const double scale = reduction == mean ? 1.0 / std::max(count, 1.0) : 1.0;
  Tensor out = new_like(x, x.scalar_type());
  Elementwise({&x, &target, &mask, &grad, &out}, operands_of(5, x), along)
      .for_each(FreshPages(out, true), [&](int64_t, Kept keeps, char* const* at, const int64_t* stride, int64_t n) {
        if (keeps != Kept::none)
          kernel.slopes(at[0], at[1], bits_of(keeps, at), n, parameter, at[3], stride[3], scale, at[4]);
        else
          std::memset(at[4], 0, n * x.element_size());
      });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("loss_fused", TORCH_BOX(&maskwise::loss));
  m.impl("loss_fused_forward", TORCH_BOX(&maskwise::loss));
  m.impl("loss_fused_backward", TORCH_BOX(&maskwise::loss_backward));
}
