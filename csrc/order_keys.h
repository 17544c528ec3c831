// Values as keys: unsigned integers that compare as the values do, NaN greatest. Included once a SIMD level, inside its
// namespace, by the kernel headers of the order family.
namespace ordering {

template <class T>
constexpr bool kFloating = std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// The type whose bits the key is made of: every narrower type widens to it exactly.
template <class T>
using PlainOf = std::conditional_t<kFloating<T>, std::conditional_t<sizeof(T) == 8, double, float>,
                                   std::conditional_t<sizeof(T) == 8, int64_t, int32_t>>;

template <class K>
constexpr K kTop = K{1} << (8 * sizeof(K) - 1);

// How slices become entries, and how entries sort. Keys alone serve where only values are asked for; with places, an
// entry also tells where it came from, and no two are equal, so that every order is the stable one.
struct Keys32 {
  using E = uint32_t;
  static constexpr bool placed = false;
  static E make(uint64_t key, int64_t) { return static_cast<E>(key); }
  static uint64_t key(E e) { return e; }
  static int64_t place(E) { return 0; }
};
struct Keys64 {
  using E = uint64_t;
  static constexpr bool placed = false;
  static E make(uint64_t key, int64_t) { return key; }
  static uint64_t key(E e) { return e; }
  static int64_t place(E) { return 0; }
};
// A 32-bit key above a 32-bit place, in one integer. For slices of fewer than 2^32 elements.
struct Places32 {
  using E = uint64_t;
  static constexpr bool placed = true;
  static E make(uint64_t key, int64_t place) { return key << 32 | static_cast<uint64_t>(place); }
  static uint64_t key(E e) { return e >> 32; }
  static int64_t place(E e) { return static_cast<int64_t>(e & 0xffffffffu); }
};
struct Places64 {
  using E = WideEntry;
  static constexpr bool placed = true;
  static E make(uint64_t key, int64_t place) { return {key, place}; }
  static uint64_t key(const E& e) { return e.key; }
  static int64_t place(const E& e) { return e.place; }
};

template <class T>
using KeysFor = std::conditional_t<sizeof(T) == 8, Keys64, Keys32>;
template <class T>
using PlacesFor = std::conditional_t<sizeof(T) == 8, Places64, Places32>;

// -0 and +0 are one value, so with places they share a key and keep their order; the value is then read from its place.
// Without places the keys tell them apart, so that the value that comes back has its sign.
template <bool OneZero, class T>
inline KeyOf<T> key_of(T x, KeyOf<T> flip) {
  using K = KeyOf<T>;
  PlainOf<T> v = static_cast<PlainOf<T>>(x);
  K bits;
  if constexpr (kFloating<T>) {
    if constexpr (OneZero) v += 0;
    std::memcpy(&bits, &v, sizeof(bits));
    bits ^= bits & kTop<K> ? ~K{0} : kTop<K>;
    if (v != v) bits = ~K{0};
  } else {
    bits = static_cast<K>(v) ^ kTop<K>;
  }
  return bits ^ flip;
}

template <bool OneZero, class T>
inline Vec<KeyOf<T>> load_keys(const T* x, KeyOf<T> flip) {
  using K = KeyOf<T>;
  using P = PlainOf<T>;
  Vec<P> v = load<P>(x);
  if constexpr (kFloating<T>) {
    if constexpr (OneZero) v += P{0};
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

// Whether a key that was made with OneZero stands for more than one pattern of bits: a zero or a NaN.
template <class T>
inline bool is_ambiguous(KeyOf<T> key, KeyOf<T> flip) {
  using K = KeyOf<T>;
  if constexpr (kFloating<T>) return (key ^ flip) == kTop<K> || (key ^ flip) == ~K{0};
  return false;
}

// Any byte but 0 keeps.
inline bool is_kept(uint8_t m) { return m != 0; }

}  // namespace ordering
