// Losses of single elements as registered ops. Arguments were checked in Python: x and target have one shape and one
// dtype that the capability table knows, the mask is bool and broadcasts to them.
#include "scan_layout.h"

#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "loss_kernels.h"
#include "foreach_isa.h"

namespace maskwise {
namespace {

// Elements that one task does, whatever the number of threads: the sum is then the same for any.
constexpr int64_t kTask = 16384;
// Elements that are brought next to each other where memory has gaps.
constexpr int64_t kStaged = 512;

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

// How many of n mask bytes are set.
int64_t count_bytes(const uint8_t* m, int64_t n) {
  int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, m + i, 8);
    // A bool is 0 or 1, so the bytes add up in the highest one.
    count += static_cast<int64_t>((word * 0x0101010101010101u) >> 56);
  }
  for (; i < n; ++i) count += m[i];
  return count;
}

// The elements in the memory order of the last operand, in stretches of the innermost loop. Operands: x, target, mask,
// then what has x's dtype too.
struct Walk {
  ScanLayout layout;
  ScanLoop inner;
  int64_t elements;
  int bytes;
  int operands;

  Walk(std::initializer_list<const Tensor*> tensors, const Tensor& x)
      : elements(x.numel()),
        bytes(static_cast<int>(x.element_size())),
        operands(static_cast<int>(tensors.size())) {
    const int sizes[] = {bytes, bytes, 1, bytes, bytes};
    layout = make_scan_layout(tensors, sizes, -1);
    if (layout.lines.empty()) return;
    inner = layout.lines.back();
    layout.lines.pop_back();
  }

  int64_t tasks() const { return ceil_div(elements, kTask); }

  // Calls each(task, x, target, mask, n, at) for every stretch, in which x and target lie next to each other, and the
  // mask too, or is null where all is kept. A stretch that is dropped as a whole goes to skip(n, at) instead.
  template <class Each, class Skip>
  void run(const Each& each, const Skip& skip) const {
    parallel(tasks(), kTask, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) one(task, each, skip);
    });
  }

  template <class Each, class Skip>
  void one(int64_t task, const Each& each, const Skip& skip) const {
    const bool whole = inner.stride[2] == 0;
    const bool dense = inner.size == 1 || (inner.stride[0] == bytes && inner.stride[1] == bytes);
    const bool in_place = dense && (whole || inner.stride[2] == 1);
    const int64_t end = std::min(elements, (task + 1) * kTask);
    for (int64_t index = task * kTask, n = 0; index < end; index += n) {
      const int64_t step = index % inner.size;
      n = std::min(inner.size - step, end - index);
      char* at[kOperands];
      locate(layout, layout.lines, operands, index / inner.size, at);
      for (int o = 0; o < operands; ++o) at[o] += step * inner.stride[o];
      const auto* m = reinterpret_cast<const uint8_t*>(at[2]);
      if (whole && *m == 0) {
        skip(n, at);
      } else if (in_place) {
        each(task, at[0], at[1], whole ? nullptr : m, n, at);
      } else {
        n = std::min(n, kStaged);
        staged(task, at, n, whole, each);
      }
    }
  }

  template <class Each>
  void staged(int64_t task, char* const* at, int64_t n, bool whole, const Each& each) const {
    alignas(64) char x[kStaged * 8], t[kStaged * 8];
    alignas(64) uint8_t m[kStaged];
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(x + i * bytes, at[0] + i * inner.stride[0], bytes);
      std::memcpy(t + i * bytes, at[1] + i * inner.stride[1], bytes);
      if (!whole) m[i] = static_cast<uint8_t>(at[2][i * inner.stride[2]]);
    }
    each(task, x, t, whole ? nullptr : m, n, at);
  }
};

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

// What the tasks of a walk add up to, in the order of the tasks.
struct Sums {
  double total = 0;
  int64_t count = 0;
};

// The loss; and how many elements are kept, as float64, where it is a mean.
std::tuple<Tensor, Tensor> loss(const Tensor& x, const Tensor& target, const Tensor& mask, int64_t code,
                                double parameter, int64_t reduction) {
  const auto kernel = kernel_of(x.scalar_type(), code);
  Tensor kept = empty_cpu({}, ScalarType::Double);
  double& count = *static_cast<double*>(kept.mutable_data_ptr());
  count = 0;
  if (reduction == none) {
    Tensor out = new_like(x, x.scalar_type());
    const Walk walk({&x, &target, &mask, &out}, x);
    walk.run(
        [&](int64_t, const char* a, const char* b, const uint8_t* m, int64_t n, char* const* at) {
          kernel.values(a, b, m, n, parameter, at[3]);
        },
        [&](int64_t n, char* const* at) { std::memset(at[3], 0, n * walk.bytes); });
    return {out, kept};
  }
  // x stands in for the result that there is not: the walk follows its memory.
  const Walk walk({&x, &target, &mask, &x}, x);
  std::vector<Sums> sums(walk.tasks());
  walk.run(
      [&](int64_t task, const char* a, const char* b, const uint8_t* m, int64_t n, char* const*) {
        sums[task].total += kernel.total(a, b, m, n, parameter);
        if (reduction == mean) sums[task].count += m == nullptr ? n : count_bytes(m, n);
      },
      [](int64_t, char* const*) {});
  double total = 0;
  for (const Sums& each : sums) {
    total += each.total;
    count += static_cast<double>(each.count);
  }
  Tensor out = empty_cpu({}, x.scalar_type());
  write_scalar(out, reduction == mean ? total / std::max(count, 1.0) : total);
  return {out, kept};
}

// The gradient of x. `grad` has x's dtype; it is contiguous, or one number.
Tensor loss_backward(const Tensor& grad, const Tensor& x, const Tensor& target, const Tensor& mask, const Tensor& kept,
                     int64_t code, double parameter, int64_t reduction) {
  const auto kernel = kernel_of(x.scalar_type(), code);
  const double count = *static_cast<const double*>(kept.const_data_ptr());
  const double scale = reduction == mean ? 1.0 / std::max(count, 1.0) : 1.0;
  const bool each = reduction == none;
  Tensor out = new_like(x, x.scalar_type());
  const Walk walk({&x, &target, &mask, &grad, &out}, x);
  walk.run(
      [&](int64_t, const char* a, const char* b, const uint8_t* m, int64_t n, char* const* at) {
        kernel.slopes(a, b, m, n, parameter, at[3], each ? walk.inner.stride[3] : 0, scale, at[4]);
      },
      [&](int64_t n, char* const* at) { std::memset(at[4], 0, n * walk.bytes); });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("loss_fused", TORCH_BOX(&maskwise::loss));
  m.impl("loss_fused_forward", TORCH_BOX(&maskwise::loss));
  m.impl("loss_fused_backward", TORCH_BOX(&maskwise::loss_backward));
}
