// What a reduction is, and the table of its functions; its inner loops are in reduce_rows.h and reduce_columns.h. Compiled once
// a target.
//
// A reduction is a struct Op, derived from ReduceOp, with
//   In, A, Out                    the element types of x, of the arithmetic and of the result
//   Lanes                         what each lane of a vector accumulates in A; init() is the start
//   State                         what one output accumulates; default-constructed it has accumulated nothing
//   accumulate(lanes, x, kept, p) R vectors of values and of masks; p is the position of the first, of columns only
//   collect(s, lanes)             combines all lanes into the state of one output
//   lane(lanes, i, base)          one lane as a state of its own, whose positions start at `base`
//   combine(s, other)             joins the state of a later range
//   finalize(s)                   the result
#include "reduce_columns.h"
#if defined(MASKWISE_REDUCE_KERNEL_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_REDUCE_KERNEL_H
#else
#define MASKWISE_REDUCE_KERNEL_H
#endif

namespace maskwise::MASKWISE_TARGET {

// The functions of a Reduction.
template <class Op>
struct ReduceKernel : ReduceColumns<Op> {
  using Out = typename Op::Out;
  using State = typename Op::State;
  using ReduceRows<Op>::self;

  static void combine(const void* op, void* state, const void* other) {
    self(op).combine(*static_cast<State*>(state), *static_cast<const State*>(other));
  }

  static void finalize(const void* op, const void* states, int64_t n, void* out) {
    for (int64_t i = 0; i < n; ++i) static_cast<Out*>(out)[i] = self(op).finalize(static_cast<const State*>(states)[i]);
  }
};

template <class Op>
void reduce(const Op& op, const ReduceNest& nest, const void* x, void* out) {
  using K = ReduceKernel<Op>;
  static_assert(sizeof(typename Op::State) <= 64 && alignof(typename Op::State) <= 16);
  const Reduction kernel{&op,
                         sizeof(typename Op::In),
                         sizeof(typename Op::Out),
                         sizeof(typename Op::State),
                         sizeof(typename Op::Lanes),
                         K::L,
                         K::init,
                         K::accumulate,
                         K::reduce_rows,
                         K::init_columns,
                         K::accumulate_columns,
                         K::collect_columns,
                         K::combine,
                         K::finalize};
  run_reduction(kernel, nest, x, out);
}

// Calls call(T{}) with the signed integer that is as wide as the dtype.
template <class Call>
void with_width(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Long:
    case ScalarType::Double: return call(int64_t{});
    case ScalarType::Int:
    case ScalarType::Float: return call(int32_t{});
    case ScalarType::Short:
    case ScalarType::Half:
    case ScalarType::BFloat16: return call(int16_t{});
    default: return call(int8_t{});
  }
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
