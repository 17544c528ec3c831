// Values as keys: unsigned integers that compare as the values do, NaN greatest. Compiled once a target, for the order
// family.
#include "order_entry.h"
#include "simd.h"
#if defined(MASKWISE_ORDER_KEYS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_KEYS_H
#else
#define MASKWISE_ORDER_KEYS_H
#endif

namespace maskwise::MASKWISE_TARGET {

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// The type whose bits the key is made of: every narrower type widens to it exactly.
template <class T>
using PlainOf = std::conditional_t<kFloating<T>, std::conditional_t<sizeof(T) == 8, double, float>,
                                   std::conditional_t<sizeof(T) == 8, int64_t, int32_t>>;

template <class K>
constexpr K kTop = K{1} << (8 * sizeof(K) - 1);

// How slices become entries, and how entries sort. Keys alone serve where only values are needed; with places, an entry
// also holds where it came from, and no two are equal, so that every order is the stable one.
template <class Key>
struct Keys {
  using K = Key;
  using E = Key;
  static constexpr bool kPlaced = false;
  static E make(K key, int64_t) { return key; }
  static K key(E e) { return e; }
  static int64_t place(E) { return 0; }
};
// A 32-bit key above a 32-bit place, in one integer. For slices of fewer than 2^32 elements.
struct Places32 {
  using K = uint32_t;
  using E = uint64_t;
  static constexpr bool kPlaced = true;
  static E make(K key, int64_t place) { return uint64_t{key} << 32 | static_cast<uint64_t>(place); }
  static K key(E e) { return static_cast<K>(e >> 32); }
  static int64_t place(E e) { return static_cast<int64_t>(e & 0xffffffffu); }
};
template <class Key>
struct Places64 {
  using K = Key;
  using E = WideEntry;
  static constexpr bool kPlaced = true;
  static E make(K key, int64_t place) { return {key, place}; }
  static K key(const E& e) { return static_cast<K>(e.key); }
  static int64_t place(const E& e) { return e.place; }
};

// -0 and +0 are one value, so with places they share a key and keep their order; the value is then read from its place.
// Without places the keys differ, so that the value that comes back has its sign.
template <bool kOneZero, class T>
inline KeyOf<T> key_of(T x, KeyOf<T> flip) {
  using K = KeyOf<T>;
  PlainOf<T> v = static_cast<PlainOf<T>>(x);
  K bits;
  if constexpr (kFloating<T>) {
    if constexpr (kOneZero) v += 0;
    std::memcpy(&bits, &v, sizeof(bits));
    bits ^= bits & kTop<K> ? ~K{0} : kTop<K>;
    if (v != v) bits = ~K{0};
  } else {
    bits = static_cast<K>(v) ^ kTop<K>;
  }
  return bits ^ flip;
}

template <bool kOneZero, class T>
inline Vec<KeyOf<T>> load_keys(const T* x, KeyOf<T> flip) {
  using K = KeyOf<T>;
  using P = PlainOf<T>;
  Vec<P> v = load<P>(x);
  if constexpr (kFloating<T>) {
    if constexpr (kOneZero) v += P{0};
    const auto bits = (LaneMask<P>)v;
    const auto negative = (Vec<K>)(bits < 0);
    return (((Vec<K>)bits ^ (negative | kTop<K>)) | (Vec<K>)(v != v)) ^ flip;
  } else {
    return (Vec<K>)v ^ kTop<K> ^ flip;
  }
}

template <class T>
inline T value_of(KeyOf<T> key, KeyOf<T> flip) {
  using K = KeyOf<T>;
  key ^= flip;
  if constexpr (kFloating<T>) {
    if (key == ~K{0}) return static_cast<T>(std::numeric_limits<PlainOf<T>>::quiet_NaN());
    key ^= key & kTop<K> ? kTop<K> : ~K{0};
    PlainOf<T> v;
    std::memcpy(&v, &key, sizeof(v));
    return static_cast<T>(v);
  } else {
    return static_cast<T>(static_cast<PlainOf<T>>(key ^ kTop<K>));
  }
}

// What stands where fewer than k are kept: the value that loses against every other.
template <class T>
T worst(bool largest) {
  using Limits = std::numeric_limits<std::conditional_t<kFloating<T>, float, T>>;
  if constexpr (kFloating<T>) return static_cast<T>(largest ? -Limits::infinity() : Limits::infinity());
  if constexpr (std::is_same_v<T, Bool>) return T(!largest);
  return largest ? Limits::lowest() : Limits::max();
}

// As torch.lerp, from whichever end is nearer.
template <class P>
P lerp(P a, P b, P weight) {
  return weight < P(0.5) ? a + weight * (b - a) : b - (b - a) * (P(1) - weight);
}

// An element type, as the order kernels know it: they work on keys of 32 or 64 bits, and are compiled for those only.
template <class K>
struct ElementType {
  int64_t bytes;
  bool is_floating;
  // The keys of n contiguous elements.
  void (*load)(const void* x, int64_t n, K flip, K* keys);
  // n values at out, `stride` apart. A key that stands for several patterns of bits, a zero or a NaN, is read from x.
  void (*write)(void* out, int64_t stride, const K* keys, const int64_t* places, int64_t n, K flip, const void* x,
                int64_t step);
  // n times what stands behind the last value: zero, or for topk the value that loses against every other.
  void (*fill)(void* out, int64_t stride, int64_t n, bool is_topk, bool largest);
  // One value between two keys: the first where weight is negative.
  void (*interpolate)(void* out, int64_t at, K below, K above, double weight);
};

template <class T, bool kOneZero>
struct ElementFunctions {
  using K = KeyOf<T>;

  static void load(const void* from, int64_t n, K flip, K* keys) {
    const T* x = static_cast<const T*>(from);
    int64_t i = 0;
    for (; i + kLanes<K> <= n; i += kLanes<K>) store(keys + i, load_keys<kOneZero>(x + i, flip));
    for (; i < n; ++i) keys[i] = key_of<kOneZero>(x[i], flip);
  }

  static void write(void* out, int64_t stride, const K* keys, const int64_t* places, int64_t n, K flip, const void* x,
                    int64_t step) {
    T* to = static_cast<T*>(out);
    for (int64_t i = 0; i < n; ++i) {
      const bool ambiguous = kFloating<T> && ((keys[i] ^ flip) == kTop<K> || (keys[i] ^ flip) == ~K{0});
      to[i * stride] = ambiguous ? static_cast<const T*>(x)[places[i] * step] : value_of<T>(keys[i], flip);
    }
  }

  static void fill(void* out, int64_t stride, int64_t n, bool is_topk, bool largest) {
    const T value = is_topk ? worst<T>(largest) : T(0);
    for (int64_t i = 0; i < n; ++i) static_cast<T*>(out)[i * stride] = value;
  }

  static void interpolate(void* out, int64_t at, K below, K above, double weight) {
    const T a = value_of<T>(below, 0);
    T result = a;
    if constexpr (kFloating<T>) {
      using P = PlainOf<T>;
      const T b = value_of<T>(above, 0);
      if (weight >= 0) result = static_cast<T>(lerp<P>(static_cast<P>(a), static_cast<P>(b), static_cast<P>(weight)));
    }
    static_cast<T*>(out)[at] = result;
  }
};

template <class T, bool kOneZero>
ElementType<KeyOf<T>> element_type() {
  using F = ElementFunctions<T, kOneZero>;
  return {sizeof(T), kFloating<T>, F::load, F::write, F::fill, F::interpolate};
}

// A slice, or a block of slices, of x: typed memory behind an untyped pointer.
template <class K>
struct Elements {
  ElementType<K> type;
  const char* data;

  Elements at(int64_t offset) const { return {type, data + offset * type.bytes}; }
  void load(int64_t offset, int64_t n, K flip, K* keys) const { type.load(data + offset * type.bytes, n, flip, keys); }
};

// Calls narrow(Elements<uint32_t>) or wide(Elements<uint64_t>), by the width of the dtype's keys.
template <bool kOneZero, class Narrow, class Wide>
void with_elements(ScalarType dtype, const void* x, const Narrow& narrow, const Wide& wide) {
  const char* data = static_cast<const char*>(x);
  Elements<uint32_t> in_32{};
  Elements<uint64_t> in_64{};
  dispatch_any(dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 8)
      in_64 = {element_type<T, kOneZero>(), data};
    else
      in_32 = {element_type<T, kOneZero>(), data};
  });
  if (in_64.type.load != nullptr)
    wide(in_64);
  else
    narrow(in_32);
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
