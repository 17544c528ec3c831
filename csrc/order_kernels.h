// The masked sort and topk. Included once a SIMD level, inside its namespace, by foreach_isa.h (through order.cpp).
#include "order_keys.h"
#include "order_compact.h"
#include "order_select.h"
#include "order_slices.h"
namespace ordering {

// What to write for each slice: its n least entries, n = size; values may be null.
struct Ordered {
  void* values;
  int64_t* indices;
  int64_t size;   // results a slice
  int64_t inner;  // how far apart the results of a slice are: the product of the sizes behind the dim
  bool descending;

  int64_t start(int64_t slice) const { return slice / inner * size * inner + slice % inner; }
};

// Writes w sorted lists of entries, and the tail where a list is shorter than the result.
template <class Kind, class T>
void write_sorted(const Ordered& o, const Layout& layout, typename Kind::E* const* lists, const int64_t* counts,
                  int64_t first, int64_t w, const T* x, KeyOf<T> flip, T tail) {
  T* values = static_cast<T*>(o.values);
  const int64_t step = layout.reduced.empty() ? 1 : layout.reduced.back().x;
  int64_t starts[kWidest], sources[kWidest];
  for (int64_t j = 0; j < w; ++j) {
    starts[j] = o.start(first + j);
    sources[j] = offset_of(layout.kept, first + j).x;
  }
  const auto write = [&](int64_t j, int64_t r, int64_t at) {
    if (r >= counts[j]) {
      o.indices[at] = -1;
      if (values != nullptr) values[at] = tail;
      return;
    }
    const auto e = lists[j][r];
    const int64_t place = Kind::place(e);
    o.indices[at] = place;
    if (values == nullptr) return;
    const auto key = static_cast<KeyOf<T>>(Kind::key(e));
    values[at] = is_ambiguous<T>(key, flip) ? x[sources[j] + place * step] : value_of<T>(key, flip);
  };
  if (w == 1 && o.inner == 1) {
    const int64_t n = std::min(counts[0], o.size);
    for (int64_t r = 0; r < n; ++r) write(0, r, starts[0] + r);
    std::fill(o.indices + starts[0] + n, o.indices + starts[0] + o.size, int64_t{-1});
    if (values != nullptr) std::fill(values + starts[0] + n, values + starts[0] + o.size, tail);
    return;
  }
  for (int64_t r = 0; r < o.size; ++r)
    for (int64_t j = 0; j < w; ++j) write(j, r, starts[j] + r * o.inner);
}

template <class Kind, class T>
void sort_slices(const Layout& layout, const T* x, const uint8_t* m, const Ordered& o) {
  using E = typename Kind::E;
  const KeyOf<T> flip = o.descending ? ~KeyOf<T>{0} : 0;
  // A block's entries should stay in the second-level cache.
  const int64_t wide = block_width<E, T>(layout.length);
  const Blocks blocks = make_blocks(layout, wide, o.inner == 1 ? 1 : wide);
  blocks.for_each(layout.length, [&](const auto& visit_each) {
    const bool one = blocks.width == 1;
    int64_t stride = (one && layout.length > 65536 ? 0 : layout.length) + kSlack;
    auto room = std::make_unique<Room<E>>(stride * (blocks.width + 1));
    visit_each([&](int64_t first, int64_t w) {
      if (one && layout.length > 65536) {
        const int64_t wanted = room_for(layout, m + offset_of(layout.kept, first).mask);
        if (wanted > stride) {
          stride = wanted;
          room.reset();
          room = std::make_unique<Room<E>>(2 * stride);
        }
      }
      int64_t counts[kWidest];
      E* lists[kWidest];
      fill_block<Kind>(room->data, stride, counts, blocks, layout, x, m, first, w, flip);
      E* other = room->data + blocks.width * stride;
      for (int64_t j = 0; j < w; ++j) {
        E* mine = room->data + j * stride;
        lists[j] = sort_entries<Kind>(mine, other, counts[j]);
        // The list that was not the result is the next one's second buffer.
        if (lists[j] == other) other = mine;
      }
      write_sorted<Kind, T>(o, layout, lists, counts, first, w, x, flip, T(0));
    });
  });
}

// The k least entries seen so far, and a few more: the list is cut back to k whenever it is full, and from then on only
// what beats the k-th is let in.
template <class Kind, class K>
struct Best {
  using E = typename Kind::E;
  E* list;
  E* room;
  int64_t k;
  int64_t count = 0;
  K limit = ~K{0};

  static int64_t full(int64_t k) { return 2 * k + 128; }

  void cut() {
    if (count <= k) return;
    const E last = select(list, count, k - 1, room);
    int64_t less = 0;
    // Places are unique, so exactly k entries are not above the last.
    count = within(list, list, count, E{}, last, less);
    const K key = static_cast<K>(Kind::key(last));
    limit = key == 0 ? 0 : key - 1;
  }

  // The k least in order, at the front of the list.
  E* finish() {
    if (k <= kFew && count <= kScanned) {
      least_few(list, count, std::min(k, count));
      return list;
    }
    if (count < kRadixFrom) {
      std::partial_sort(list, list + std::min(k, count), list + count);
      return list;
    }
    cut();
    E* sorted = sort_entries<Kind>(list, room, count);
    if (sorted != list) std::copy_n(sorted, count, list);
    return list;
  }
};

// Shows a row of w keys to the lists of w columns. Few get in, so whole vectors are turned away at once.
template <class Kind, class K>
inline void offer(Best<Kind, K>* best, K* limits, const K* keys, const uint8_t* ms, int64_t w, int64_t place) {
  using B = Best<Kind, K>;
  const auto enter = [&](int64_t j) {
    B& b = best[j];
    b.list[b.count++] = Kind::make(keys[j], place);
    if (b.count < B::full(b.k)) return;
    b.cut();
    limits[j] = b.limit;
  };
  int64_t j = 0;
#if defined(MASKWISE_COMPACT)
  for (; j + MASKWISE_COMPACT <= w; j += MASKWISE_COMPACT) {
    unsigned bits = 0;
    for (int l = 0; l < MASKWISE_COMPACT; l += kLanes<K>)
      bits |= bits_of<K>((LaneMask<K>)(load_raw<Vec<K>>(keys + j + l) <= load_raw<Vec<K>>(limits + j + l))) << l;
    bits &= lane_bits(ms + j);
    for (; bits != 0; bits &= bits - 1) enter(j + __builtin_ctz(bits));
  }
#endif
  for (; j < w; ++j)
    if (is_kept(ms[j]) && keys[j] <= limits[j]) enter(j);
}

template <class Kind, class T>
void topk_slices(const Layout& layout, const T* x, const uint8_t* m, const Ordered& o, T tail) {
  using E = typename Kind::E;
  using K = KeyOf<T>;
  using B = Best<Kind, K>;
  constexpr int64_t kPiece = 256;
  const K flip = o.descending ? ~K{0} : 0;
  const int64_t k = o.size;
  if (k == 0) return;
  // A k that is not small turns nobody away before most have come: the slice is collected whole.
  const bool whole = 2 * B::full(k) > layout.length;
  const int64_t stride = (whole ? layout.length : B::full(k) + kPiece) + kSlack;
  const int64_t wide = block_width<E, T>(stride);
  const Blocks blocks = make_blocks(layout, wide, o.inner == 1 ? 1 : wide);
  blocks.for_each((layout.length + 7) / 8 + k, [&](const auto& visit_each) {
    Room<E> lists_room(stride * blocks.width);
    Room<E> room(select_room(stride));
    visit_each([&](int64_t first, int64_t w) {
      B best[kWidest];
      K limits[kWidest];
      for (int64_t j = 0; j < w; ++j) {
        best[j] = B{lists_room.data + j * stride, room.data, k};
        limits[j] = best[j].limit;
      }
      if (whole) {
        int64_t counts[kWidest];
        fill_block<Kind>(lists_room.data, stride, counts, blocks, layout, x, m, first, w, flip);
        for (int64_t j = 0; j < w; ++j) best[j].count = counts[j];
      } else if (blocks.columns) {
        const Offset at = offset_of(layout.kept, first);
        for_each_row<T, true>(
            layout, x + at.x, m + at.mask, w, flip,
            [&](const K* keys, const uint8_t* ms, int64_t place) { offer(best, limits, keys, ms, w, place); });
      } else {
        for (int64_t j = 0; j < w; ++j) {
          B& b = best[j];
          const Offset at = offset_of(layout.kept, first + j);
          for_each_piece(layout, x + at.x, m + at.mask, kPiece,
                         [&](const T* xs, const uint8_t* ms, int64_t n, int64_t place) {
                           b.count += compact<Kind, true>(b.list + b.count, xs, ms, n, place, flip, b.limit);
                           if (b.count >= B::full(k)) b.cut();
                         });
        }
      }
      int64_t counts[kWidest];
      E* lists[kWidest];
      for (int64_t j = 0; j < w; ++j) {
        lists[j] = best[j].finish();
        counts[j] = std::min(k, best[j].count);
      }
      write_sorted<Kind, T>(o, layout, lists, counts, first, w, x, flip, tail);
    });
  });
}

// What stands where fewer than k are kept: the value that loses against every other.
template <class T>
T worst(bool largest) {
  using Limits = std::numeric_limits<std::conditional_t<kFloating<T>, float, T>>;
  if constexpr (kFloating<T>) return static_cast<T>(largest ? -Limits::infinity() : Limits::infinity());
  if constexpr (std::is_same_v<T, Bool>) return T(!largest);
  return largest ? Limits::lowest() : Limits::max();
}

template <class T>
void order_typed(bool best, const Layout& layout, const void* x, const void* m, const Ordered& o) {
  const auto* xs = static_cast<const T*>(x);
  const auto* ms = static_cast<const uint8_t*>(m);
  const auto run = [&](auto kind) {
    using Kind = decltype(kind);
    if (best)
      topk_slices<Kind>(layout, xs, ms, o, worst<T>(o.descending));
    else
      sort_slices<Kind>(layout, xs, ms, o);
  };
  if (layout.length < int64_t{1} << 32)
    run(PlacesFor<T>{});
  else
    run(Places64{});
}

inline void order(ScalarType dtype, bool best, const Layout& layout, const void* x, const void* m, const Ordered& o) {
  switch (dtype) {
    case ScalarType::Float: return order_typed<float>(best, layout, x, m, o);
    case ScalarType::Double: return order_typed<double>(best, layout, x, m, o);
    case ScalarType::Half: return order_typed<Half>(best, layout, x, m, o);
    case ScalarType::BFloat16: return order_typed<BFloat16>(best, layout, x, m, o);
    case ScalarType::Long: return order_typed<int64_t>(best, layout, x, m, o);
    case ScalarType::Int: return order_typed<int32_t>(best, layout, x, m, o);
    case ScalarType::Short: return order_typed<int16_t>(best, layout, x, m, o);
    case ScalarType::Char: return order_typed<int8_t>(best, layout, x, m, o);
    case ScalarType::Byte: return order_typed<uint8_t>(best, layout, x, m, o);
    case ScalarType::Bool: return order_typed<Bool>(best, layout, x, m, o);
    default: STD_TORCH_CHECK(false, "maskwise: an order function was called with a dtype that has no kernel");
  }
}

}  // namespace ordering
