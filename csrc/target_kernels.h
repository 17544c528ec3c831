// One pass of foreach_target.h. Headers that MASKWISE_BARE names do not open the target's namespace themselves.
#if defined(MASKWISE_BARE)
#include "simd.h"
#include "vector_math.h"
namespace maskwise::MASKWISE_TARGET {
#include MASKWISE_KERNELS
}
#else
#include MASKWISE_KERNELS
#endif
