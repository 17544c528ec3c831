// Chooses how a function that maps slices to slices walks, by how they lie in memory. Included last of the slice headers,
// once a SIMD level.

template <class Op>
void walk_slices(const Op& op, const SliceLayout& layout, const void* x, const void* grad, const void* mask, void* out) {
  using T = typename Op::T;
  if (layout.slices == 0 || layout.length == 0) return;
  const bool stream = layout.slices * layout.length * static_cast<int64_t>(sizeof(T)) >= kStreamFrom;
  const Operands<Op> all{static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<const uint8_t*>(mask),
                         static_cast<T*>(out), stream};
  const bool rows_touch = !layout.within.empty() && layout.within.back().touches();
  const bool columns_touch =
      !layout.over.empty() && layout.over.back().touches() && layout.over.back().size >= kLanes<typename Op::A>;
  if (!rows_touch && columns_touch) {
    if constexpr (Op::kSettles)
      if (const int64_t width = settled_columns<Op>(layout); width >= kLanes<typename Op::A>)
        return walk_settled_columns(op, layout, all, width);
    return walk_columns(op, layout, all);
  }
  if constexpr (Op::kSettles)
    if (settles_rows<Op>(layout)) return walk_settled_rows(op, layout, all);
  walk_rows(op, layout, all);
}

// Picks the type of the elements, and runs make(T{}) over the slices.
template <class Make>
void walk_floating(ScalarType dtype, const Make& make, const SliceLayout& layout, const void* x, const void* grad,
                   const void* mask, void* out) {
  switch (dtype) {
    case ScalarType::Float: return walk_slices(make(float{}), layout, x, grad, mask, out);
    case ScalarType::Double: return walk_slices(make(double{}), layout, x, grad, mask, out);
    case ScalarType::Half: return walk_slices(make(Half{}), layout, x, grad, mask, out);
    case ScalarType::BFloat16: return walk_slices(make(BFloat16{}), layout, x, grad, mask, out);
    default: STD_TORCH_CHECK(false, "maskwise: a function of slices was called with a dtype that has no kernel");
  }
}
