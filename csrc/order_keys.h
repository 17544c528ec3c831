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
T losing_value(bool largest) {
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

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
