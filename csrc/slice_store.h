// Its functions are in simd.h.
