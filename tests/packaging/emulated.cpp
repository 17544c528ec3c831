// The kernels of another CPU, run by an emulator and compared with plain loops: `make test-arm`.
//
// All of csrc is linked with this file, which stands in for torch: the functions of LibTorch's C interface that the
// extension calls, over tensors of a few lines and on one thread. Ops are called by their registered names, as torch
// calls them.
#include "vector_math.h"

#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <string>

using maskwise::BFloat16;
using maskwise::Half;
using maskwise::ScalarType;
using maskwise::Tensor;
using Ints = std::vector<int64_t>;

// -- a torch that has just tensors and a table of ops ------------------------------------------------------------------

struct AtenTensorOpaque {
  Ints sizes, strides;
  ScalarType dtype;
  std::shared_ptr<std::vector<double>> data;  // aligned, whatever the type

  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
};

namespace {

using Op = void (*)(StableIValue*, uint64_t, uint64_t);

std::map<std::string, Op>& ops() {
  static std::map<std::string, Op> table;
  return table;
}

size_t size_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
    case ScalarType::Long: return 8;
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Short: return 2;
    default: return 1;
  }
}

Ints contiguous(const Ints& sizes) {
  Ints strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(1, sizes[d])) strides[d] = stride;
  return strides;
}

AtenTensorHandle make(const Ints& sizes, const Ints& strides, ScalarType dtype) {
  auto* made = new AtenTensorOpaque{sizes, strides, dtype, nullptr};
  made->data = std::make_shared<std::vector<double>>(made->numel() * size_of(dtype) / 8 + 1);
  return made;
}

using List = std::vector<StableIValue>;
List& as_list(StableListHandle list) { return *reinterpret_cast<List*>(list); }

}  // namespace

extern "C" {
#define MASKWISE_DTYPE(NAME, TYPE) \
  int32_t aoti_torch_dtype_##NAME() { return static_cast<int32_t>(ScalarType::TYPE); }
MASKWISE_DTYPE(float8_e5m2, Float8_e5m2)
MASKWISE_DTYPE(float8_e4m3fn, Float8_e4m3fn)
MASKWISE_DTYPE(float8_e5m2fnuz, Float8_e5m2fnuz)
MASKWISE_DTYPE(float8_e4m3fnuz, Float8_e4m3fnuz)
MASKWISE_DTYPE(bfloat16, BFloat16)
MASKWISE_DTYPE(float16, Half)
MASKWISE_DTYPE(float32, Float)
MASKWISE_DTYPE(float64, Double)
MASKWISE_DTYPE(uint8, Byte)
MASKWISE_DTYPE(uint16, UInt16)
MASKWISE_DTYPE(uint32, UInt32)
MASKWISE_DTYPE(uint64, UInt64)
MASKWISE_DTYPE(int8, Char)
MASKWISE_DTYPE(int16, Short)
MASKWISE_DTYPE(int32, Int)
MASKWISE_DTYPE(int64, Long)
MASKWISE_DTYPE(bool, Bool)
MASKWISE_DTYPE(complex32, ComplexHalf)
MASKWISE_DTYPE(complex64, ComplexFloat)
MASKWISE_DTYPE(complex128, ComplexDouble)
#undef MASKWISE_DTYPE

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_memory_format_contiguous_format() { return 0; }
size_t aoti_torch_dtype_element_size(int32_t dtype) { return size_of(static_cast<ScalarType>(dtype)); }

AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle* out) {
  *out = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, Op op, uint64_t) {
  ops()[name] = op;
  return 0;
}
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue*, uint64_t) {
  std::printf("%s was called, which this torch does not have\n", name);
  return 1;
}

AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t, int32_t, AtenTensorHandle* out) {
  *out = make(Ints(sizes, sizes + dims), Ints(strides, strides + dims), static_cast<ScalarType>(dtype));
  return 0;
}
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle of, AtenTensorHandle* out) {
  *out = new AtenTensorOpaque(*of);
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  delete tensor;
  return 0;
}
#define MASKWISE_GETTER(NAME, TYPE, ...)                               \
  AOTITorchError NAME(AtenTensorHandle tensor, TYPE* out) {            \
    *out = __VA_ARGS__;                                                \
    return 0;                                                          \
  }
MASKWISE_GETTER(aoti_torch_get_data_ptr, void*, tensor->data->data())
MASKWISE_GETTER(torch_get_mutable_data_ptr, void*, tensor->data->data())
MASKWISE_GETTER(torch_get_const_data_ptr, const void*, tensor->data->data())
MASKWISE_GETTER(aoti_torch_get_dim, int64_t, static_cast<int64_t>(tensor->sizes.size()))
MASKWISE_GETTER(aoti_torch_get_dtype, int32_t, static_cast<int32_t>(tensor->dtype))
MASKWISE_GETTER(aoti_torch_get_numel, int64_t, tensor->numel())
MASKWISE_GETTER(aoti_torch_get_sizes, int64_t*, tensor->sizes.data())
MASKWISE_GETTER(aoti_torch_get_strides, int64_t*, tensor->strides.data())
MASKWISE_GETTER(aoti_torch_is_contiguous, bool, tensor->strides == contiguous(tensor->sizes))
#undef MASKWISE_GETTER
AOTITorchError aoti_torch_get_size(AtenTensorHandle tensor, int64_t d, int64_t* out) {
  *out = tensor->sizes[d < 0 ? d + tensor->sizes.size() : d];
  return 0;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle tensor, int64_t d, int64_t* out) {
  *out = tensor->strides[d < 0 ? d + tensor->sizes.size() : d];
  return 0;
}

AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle* out) {
  *out = reinterpret_cast<StableListHandle>(new List);
  return 0;
}
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item) {
  as_list(list).push_back(item);
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = as_list(list).size();
  return 0;
}
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = as_list(list)[index];
  return 0;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete &as_list(list);
  return 0;
}
// No op that is called here takes a string.
AOTITorchError torch_delete_string(StringHandle) { return 1; }
AOTITorchError torch_string_c_str(StringHandle, const char**) { return 1; }
AOTITorchError torch_string_length(StringHandle, size_t*) { return 1; }

AOTITorchError torch_get_num_threads(uint32_t* threads) {
  *threads = 1;
  return 0;
}
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  body(begin, end, context);
  return 0;
}
}  // extern "C"

// -- calls and comparisons ---------------------------------------------------------------------------------------------

namespace {

namespace simd = maskwise::baseline;
namespace stable = torch::stable::detail;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
int checks = 0, failures = 0;

// Calls an op; gives its first result.
template <class... Args>
Tensor call(const std::string& name, int outputs, const Args&... args) {
  StableIValue stack[] = {stable::from(args)...};
  ops().at(name)(stack, sizeof...(Args), outputs);
  for (int i = 1; i < outputs; ++i) stable::to<Tensor>(stack[i]);
  return stable::to<Tensor>(stack[0]);
}

// The elements of a tensor as doubles, in the order of its indices.
template <class T>
std::vector<double> numbers_of(const Tensor& tensor) {
  const auto* data = static_cast<const T*>(tensor.const_data_ptr());
  const Ints sizes(tensor.sizes().begin(), tensor.sizes().end()), strides(tensor.strides().begin(), tensor.strides().end());
  const Ints steps = contiguous(sizes);
  std::vector<double> out(tensor.numel());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < sizes.size(); ++d) at += i / steps[d] % sizes[d] * strides[d];
    out[i] = static_cast<double>(data[at]);
  }
  return out;
}

void compare(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected, double tolerance) {
  ++checks;
  bool same = got.size() == expected.size();
  size_t i = 0;
  for (; same && i < got.size(); ++i) {
    const double a = got[i], b = expected[i];
    same = (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
  }
  if (same) return;
  ++failures;
  if (i > 0) std::printf("%s: at %zu got %.9g, expected %.9g\n", what.c_str(), i - 1, got[i - 1], expected[i - 1]);
  else std::printf("%s: %zu elements, expected %zu\n", what.c_str(), got.size(), expected.size());
}

// What an op gives for a slice of x by a plain loop, in double; a number or as many as there are elements.
using Line = std::vector<double>;
using Reference = std::function<Line(const Line& x, const std::vector<bool>& kept)>;

Line kept_of(const Line& x, const std::vector<bool>& kept) {
  Line out;
  for (size_t i = 0; i < x.size(); ++i)
    if (kept[i]) out.push_back(x[i]);
  return out;
}
double sum_of(const Line& x) {
  double total = 0;
  for (const double value : x) total += value;
  return total;
}
double max_of(const Line& x) {
  double most = -kInf;
  for (const double value : x) most = std::max(most, value);
  return most;
}
double log_sum_exp(const Line& x) {
  const double most = max_of(x);
  double total = 0;
  for (const double value : x) total += std::exp(value - most);
  return x.empty() ? -kInf : most + std::log(total);
}
// One result for each element, of its value; `other` where it is dropped.
Line each(const Line& x, const std::vector<bool>& kept, double other, const std::function<double(double)>& f) {
  Line out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(kept[i] ? f(x[i]) : other);
  return out;
}

const std::map<std::string, Reference> kReductions = {
    {"sum", [](const Line& x, const auto& kept) { return Line{sum_of(kept_of(x, kept))}; }},
    {"mean", [](const Line& x, const auto& kept) {
       const Line values = kept_of(x, kept);
       return Line{values.empty() ? kNan : sum_of(values) / values.size()};
     }},
    {"prod", [](const Line& x, const auto& kept) {
       double product = 1;
       for (const double value : kept_of(x, kept)) product *= value;
       return Line{product};
     }},
    {"amax", [](const Line& x, const auto& kept) { return Line{max_of(kept_of(x, kept))}; }},
    {"amin", [](const Line& x, const auto& kept) {
       double least = kInf;
       for (const double value : kept_of(x, kept)) least = std::min(least, value);
       return Line{least};
     }},
    {"logsumexp", [](const Line& x, const auto& kept) { return Line{log_sum_exp(kept_of(x, kept))}; }},
};
const std::map<std::string, Reference> kSlices = {
    {"softmax", [](const Line& x, const auto& kept) {
       const double total = log_sum_exp(kept_of(x, kept));
       return each(x, kept, 0, [&](double value) { return std::exp(value - total); });
     }},
    {"log_softmax", [](const Line& x, const auto& kept) {
       const double total = log_sum_exp(kept_of(x, kept));
       return each(x, kept, -kInf, [&](double value) { return value - total; });
     }},
    {"cumsum", [](const Line& x, const auto& kept) {
       Line out;
       double total = 0;
       for (size_t i = 0; i < x.size(); ++i) out.push_back(total += kept[i] ? x[i] : 0);
       return out;
     }},
};

template <class T>
struct Batch {
  int64_t rows, columns;
  Tensor x, bits, bounds;           // bounds: [start, end) of each row
  std::vector<bool> kept, between;  // by bits, by bounds
  Line values;

  Batch(int64_t rows_, int64_t columns_, ScalarType dtype)
      : rows(rows_),
        columns(columns_),
        x(make({rows, columns}, {columns, 1}, dtype)),
        bits(make({rows, columns}, {columns, 1}, ScalarType::Bool)),
        bounds(make({2, rows, 1}, {rows, 1, 1}, ScalarType::Long)) {
    std::mt19937 random(static_cast<unsigned>(rows * 1000 + columns));
    std::normal_distribution<float> normal;
    auto* xs = static_cast<T*>(x.mutable_data_ptr());
    auto* ms = static_cast<uint8_t*>(bits.mutable_data_ptr());
    auto* bs = static_cast<int64_t*>(bounds.mutable_data_ptr());
    for (int64_t r = 0; r < rows; ++r) {
      // The first row keeps nothing, the last one everything.
      const int64_t a = random() % (columns + 1), b = random() % (columns + 1);
      bs[r] = r == 0 || r == rows - 1 ? 0 : std::min(a, b);
      bs[rows + r] = r == 0 ? 0 : r == rows - 1 ? columns : std::max(a, b);
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t i = r * columns + c;
        // Any byte but 0 keeps.
        ms[i] = r == 0 ? 0 : r == rows - 1 ? 255 : (random() % 3 > 0 ? 1 : 0);
        kept.push_back(ms[i] != 0);
        between.push_back(bs[r] <= c && c < bs[rows + r]);
        xs[i] = static_cast<T>(normal(random));
        values.push_back(static_cast<double>(xs[i]));
      }
    }
  }

  // x with NaN in what is dropped: nothing may leak from there.
  Tensor poisoned(const std::vector<bool>& by) const {
    Tensor out(make({rows, columns}, {columns, 1}, x.scalar_type()));
    for (size_t i = 0; i < by.size(); ++i)
      static_cast<T*>(out.mutable_data_ptr())[i] = static_cast<T>(by[i] ? values[i] : kNan);
    return out;
  }

  // The results of all slices along a dim; in the order of a contiguous result.
  Line expected(const Reference& reference, const std::vector<bool>& by, int64_t dim) const {
    const int64_t slices = dim == 0 ? columns : rows, length = dim == 0 ? rows : columns;
    const int64_t step = dim == 0 ? columns : 1, apart = dim == 0 ? 1 : columns;
    Line out;
    for (int64_t s = 0; s < slices; ++s) {
      Line line;
      std::vector<bool> mask;
      for (int64_t i = 0; i < length; ++i) {
        line.push_back(values[s * apart + i * step]);
        mask.push_back(by[s * apart + i * step]);
      }
      const Line result = reference(line, mask);
      if (out.empty()) out.resize(slices * result.size());
      for (size_t i = 0; i < result.size(); ++i) out[result.size() == 1 ? s : s * apart + i * step] = result[i];
    }
    return out;
  }

  void check(const std::string& type, double tolerance) const {
    const std::string shape = type + " " + std::to_string(rows) + "x" + std::to_string(columns);
    for (const int64_t dim : {int64_t{0}, int64_t{1}})
      for (const bool intervals : {false, true}) {
        const auto& by = intervals ? between : kept;
        const Tensor input = poisoned(by);
        const Tensor& mask = intervals ? bounds : bits;
        const int64_t along = intervals ? -1 : 0;
        const std::string where = " " + shape + " dim " + std::to_string(dim) + (intervals ? " intervals" : " bits");
        for (const auto& [name, reference] : kReductions) {
          // A product of many is near 0, and says little.
          if (name == "prod" && rows * columns > 300) continue;
          const Tensor out = call(name + "_fused_forward", 1, input, mask, Ints{dim}, false, along);
          compare(name + where, numbers_of<T>(out), expected(reference, by, dim), tolerance);
        }
        for (const auto& [name, reference] : kSlices) {
          const Tensor out = call(name + "_fused_forward", 1, input, mask, Ints{dim}, along);
          compare(name + where, numbers_of<T>(out), expected(reference, by, dim), tolerance);
        }
        // Kept values in order; what is behind them is a matter of Python.
        const Reference ordered = [](const Line& x, const auto& kept_bits) {
          Line out = kept_of(x, kept_bits);
          std::sort(out.begin(), out.end());
          out.resize(x.size(), kNan);
          return out;
        };
        const Tensor sorted = call("sort_fused_forward", 2, input, mask, Ints{dim}, false, along);
        const Line wanted = expected(ordered, by, dim);
        Line got = numbers_of<T>(sorted);
        for (size_t i = 0; i < std::min(got.size(), wanted.size()); ++i)
          if (std::isnan(wanted[i])) got[i] = kNan;
        compare("sort" + where, got, wanted, 0);
      }
  }
};

// exp and log of vectors, within 2 units in the last place.
template <class A>
void check_math(const std::string& type, double low, double high) {
  const auto compare_all = [&](const std::string& name, auto vector, auto scalar, double from_x, double to_x) {
    Line got, expected;
    for (int i = 0; i < 4096; i += simd::kLanes<A>) {
      simd::Vec<A> x;
      for (int k = 0; k < simd::kLanes<A>; ++k) x[k] = static_cast<A>(from_x + (to_x - from_x) * (i + k) / 4096);
      const simd::Vec<A> y = vector(x);
      for (int k = 0; k < simd::kLanes<A>; ++k) {
        const A right = static_cast<A>(scalar(static_cast<double>(x[k])));
        const A unit = std::nextafter(std::abs(right), std::numeric_limits<A>::infinity()) - std::abs(right);
        got.push_back(std::isfinite(right) ? (static_cast<double>(y[k]) - right) / unit : y[k] == right ? 0 : kInf);
        expected.push_back(0);
      }
    }
    compare(name + " " + type, got, expected, 2);
  };
  compare_all("vexp", [](auto x) { return simd::vexp<A>(x); }, [](double x) { return std::exp(x); }, low, high);
  compare_all("vlog", [](auto x) { return simd::vlog<A>(x); }, [](double x) { return std::log(x); }, 1e-3, 1e3);
}

}  // namespace

int main() {
  StableIValue level[] = {stable::from(int64_t{-1})};
  ops().at("simd_level")(level, 1, 1);
  check_math<float>("float", -100, 88);
  check_math<double>("double", -740, 709);
  // Shapes of part of a vector, of some, and with ends that fill none.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{3, 2}, {5, 31}, {7, 64}, {37, 133}}) {
    Batch<float>(rows, columns, ScalarType::Float).check("float", 2e-5);
    Batch<double>(rows, columns, ScalarType::Double).check("double", 1e-12);
    Batch<Half>(rows, columns, ScalarType::Half).check("half", 2e-3);
    Batch<BFloat16>(rows, columns, ScalarType::BFloat16).check("bfloat16", 1.6e-2);
  }
  std::printf("%zu ops, SIMD level %d: %d checks, %d failed\n", ops().size(), static_cast<int>(level[0]), checks, failures);
  return failures > 0;
}
