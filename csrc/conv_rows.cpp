// Depthwise convolutions: the registered ops. Rows of x, or its pixels, are contiguous; the weight is contiguous.
#include "conv.h"
#include "zero_pages.h"
#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "conv_rows_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

// One value into what is not wanted.
void fill_unwanted(const Tensor& out, const DepthwiseRuns& runs, const Bits& wanted, const Tensor& other, bool planes) {
  const Strides strides(out);
  // Between many short runs lie many short stretches of each plane: one long fill is faster than those.
  if (planes && is_zero(other) && static_cast<int64_t>(runs.runs.size()) > 2 * out.size(0) * out.size(2)) {
    auto* data = static_cast<char*>(out.mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(out.element_size());
    parallel(out.numel(), 1, [&](int64_t begin, int64_t end) {
      std::memset(data + begin * bytes, 0, (end - begin) * bytes);
    });
    return;
  }
  const int64_t rows = out.size(2), columns = out.size(3), channels = out.size(1);
  dispatch_bytes(out.element_size(), [&](auto word) {
    using Word = decltype(word);
    Word value;
    std::memcpy(&value, other.const_data_ptr(), sizeof(Word));
    Word* data = static_cast<Word*>(out.mutable_data_ptr());
    parallel(out.size(0) * rows, channels * columns, [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        Word* to = data + line / rows * strides.batch + line % rows * strides.row;
        wanted.for_each_stretch(line / rows, line % rows, 0, columns, [&](bool kept, int64_t from, int64_t stop) {
          if (kept) return;
          if (!planes) {
            std::fill(to + from * strides.column, to + stop * strides.column, value);
            return;
          }
          for (int64_t c = 0; c < channels; ++c)
            std::fill(to + c * strides.channel + from, to + c * strides.channel + stop, value);
        });
      }
    });
  });
}

Tensor conv_rows(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& valid, const std::optional<Tensor>& wanted, const Tensor& other,
                 Sizes geometry, Sizes coarse, bool channels_last) {
  const bool planes = !channels_last;
  const int64_t channels = x.size(1);
  const Sizes sizes{x.size(0), channels, coarse[0], coarse[1]};
  Tensor out = planes ? empty_cpu(sizes, x.scalar_type())
                      : empty_cpu(sizes, {coarse[0] * coarse[1] * channels, 1, coarse[1] * channels, channels},
                                  x.scalar_type());
  if (out.numel() == 0) return out;
  DepthwiseRuns runs(x, valid, wanted, geometry, coarse);
  if (planes) runs.find_blocks(), runs.find_bands();
  fill_unwanted(out, runs, Bits(wanted), other, planes);
  MASKWISE_AT_ISA(depthwise(x.scalar_type(), runs, x, weight, bias, out, planes));
  return out;
}

std::tuple<Tensor, Tensor> conv_rows_weight(const Tensor& x, const Tensor& grad, const std::optional<Tensor>& valid,
                                            const std::optional<Tensor>& wanted, Sizes geometry,
                                            bool channels_last) {
  const bool planes = !channels_last;
  Tensor weight = empty_cpu({x.size(1), 1, geometry[0], geometry[1]}, x.scalar_type());
  Tensor bias = empty_cpu({x.size(1)}, x.scalar_type());
  DepthwiseRuns runs(x, valid, wanted, geometry, {grad.size(2), grad.size(3)});
  if (planes) runs.find_blocks();
  MASKWISE_AT_ISA(depthwise_weight(x.scalar_type(), runs, x, grad, weight, bias, planes));
  return {weight, bias};
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("conv_rows", TORCH_BOX(&maskwise::conv_rows));
  m.impl("conv_rows_weight", TORCH_BOX(&maskwise::conv_rows_weight));
}
