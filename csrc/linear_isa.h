// All that linear.cpp needs of one SIMD level. Included once a level, inside its namespace, by foreach_isa.h.
#include "linear_kernels.h"
#include "linear_sampled.h"
#include "linear_squares.h"
#include "linear_vector.h"
