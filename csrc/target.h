// The target that a kernel header is compiled for: MASKWISE_TARGET names its namespace, MASKWISE_VECTOR_BYTES is the
// width of its vectors. foreach_target.h sets them; a header that is compiled by itself gets the portable target. Kernel
// headers have toggle guards in place of include guards: each is compiled once a target, however often it is included.
#pragma once

#include "common.h"

#if !defined(MASKWISE_TARGET)
#define MASKWISE_TARGET baseline
#define MASKWISE_VECTOR_BYTES 16
#endif
