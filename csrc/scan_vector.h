// What a scan accumulates in. Included once a SIMD level, inside its namespace, after simd.h.

// What a scan accumulates a type in: as torch does on the CPU, one step wider than the result. Integers are unsigned,
// so that they wrap around as torch's do.
template <class T>
struct ScanAccOf {
  using type = uint64_t;
};
template <>
struct ScanAccOf<float> {
  using type = double;
};
template <>
struct ScanAccOf<double> {
  using type = double;
};
template <>
struct ScanAccOf<BFloat16> {
  using type = float;
};
template <>
struct ScanAccOf<Half> {
  using type = float;
};
template <class T>
using ScanAcc = typename ScanAccOf<T>::type;

// Writes kLanes<A> values to p, each rounded to the nearest T.
template <class A, class T>
inline void put(T* p, Vec<A> v) {
  store(p, v);
}
