// Convolutions of tiles that read their map in place: the registered op. Channels of the map are contiguous.
#include "conv_direct.h"
#define MASKWISE_COMPUTE_BOUND
#define MASKWISE_KERNELS "conv_direct_kernels.h"
#include "foreach_target.h"

namespace maskwise {
namespace {

Tensor conv_direct(const Tensor& x, const std::optional<Tensor>& bits, const Tensor& tiles, const Tensor& weight,
                   const std::optional<Tensor>& bias, Sizes reads, Sizes size, Sizes geometry, int64_t outputs) {
  const int64_t n = tiles.size(0), height = size[0], width = size[1];
  Tensor out = empty_cpu({n, outputs, height, width}, {height * width * outputs, 1, width * outputs, outputs},
                         x.scalar_type());
  if (out.numel() == 0) return out;
  std::vector<float> added(ceil_div(outputs, kDirectPanel) * kDirectPanel, 0.0f), zeros(x.size(1), 0.0f);
  if (bias.has_value()) {
    const auto* from = static_cast<const float*>(bias->const_data_ptr());
    for (int64_t i = 0; i < outputs; ++i) added[i] = from[i * bias->stride(0)];
  }
  const DirectCall call{static_cast<const float*>(x.const_data_ptr()),
                        static_cast<const float*>(weight.const_data_ptr()),
                        added.data(),
                        zeros.data(),
                        static_cast<const int32_t*>(tiles.const_data_ptr()),
                        n,
                        x.size(1),
                        outputs,
                        x.size(2),
                        x.size(3),
                        Strides(x),
                        Bits(bits),
                        {reads[0], reads[1]},
                        {reads[2], reads[3]},
                        {height, width},
                        {geometry[0], geometry[1]},
                        {geometry[2], geometry[3]},
                        {geometry[4], geometry[5]}};
  auto* to = static_cast<float*>(out.mutable_data_ptr());
  MASKWISE_AT_ISA(convolve_direct(call, to));
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) { m.impl("conv_direct", TORCH_BOX(&maskwise::conv_direct)); }
