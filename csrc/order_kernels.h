// The masked sort and topk. Compiled once a target, through order.cpp.
#include "order_columns.h"
#if defined(MASKWISE_ORDER_KERNELS_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_KERNELS_H
#else
#define MASKWISE_ORDER_KERNELS_H
#endif

namespace maskwise::MASKWISE_TARGET {

template <class Kind, class K = typename Kind::K>
void sort_slices(const OrderNest& nest, const Source<Kind>& x, const Ordered& o) {
  using E = typename Kind::E;
  const K flip = o.descending ? ~K{0} : 0;
  // A block's entries should stay in the second-level cache.
  const int64_t wide = block_width<E>(nest.length, x.type.bytes);
  const Blocks blocks = make_blocks(nest, wide, o.inner == 1 ? 1 : wide);
  // Values take fewer bytes than indices do, so that pages are counted in them.
  const int64_t written = o.inner == 1 ? o.size * (o.values == nullptr ? 8 : x.type.bytes) : 0;
  blocks.for_each(nest.length, written, [&](const auto& visit_each) {
    const bool one = blocks.width == 1;
    int64_t stride = (one && nest.length > 65536 ? 0 : nest.length) + kSlack;
    auto entries = std::make_unique<EntryBuffer<E>>(stride * (blocks.width + 1));
    visit_each([&](int64_t first, int64_t w) {
      if (one && nest.length > 65536) {
        const int64_t wanted = entries_for(nest, first);
        if (wanted > stride) {
          stride = wanted;
          entries.reset();
          entries = std::make_unique<EntryBuffer<E>>(2 * stride);
        }
      }
      int64_t counts[kWidest];
      E* lists[kWidest];
      collect_block<Kind>(entries->data, stride, counts, blocks, nest, x, first, w, flip);
      E* other = entries->data + blocks.width * stride;
      for (int64_t j = 0; j < w; ++j) {
        E* mine = entries->data + j * stride;
        lists[j] = sort_entries<Kind>(mine, other, counts[j]);
        // The list that was not the result is the next one's second buffer.
        if (lists[j] == other) other = mine;
      }
      x.type.write(o, nest, lists, counts, first, w, x.data, flip, Padding::zero);
    });
  });
}

// The k least entries so far, and a few more: the list is cut back to k whenever it is full, and from then on only what
// beats the k-th is let in.
template <class Kind>
struct Best {
  using E = typename Kind::E;
  using K = typename Kind::K;
  E* list;
  E* buffer;
  int64_t k;
  int64_t count = 0;
  K limit = ~K{0};

  // Adds what is kept of a piece of at most kPiece elements.
  void add(const Source<Kind>& x, const uint8_t* m, int64_t n, int64_t place, K flip) {
    // As long as the list was not full, nothing is refused.
    const auto compact = limit == ~K{0} ? x.type.compact : x.type.compact_limited;
    count += compact(list + count, x.data, m, n, place, flip, limit);
    if (count >= full(k)) cut();
  }

  static constexpr int64_t kPiece = 256;
  static int64_t full(int64_t k) { return 2 * k + 128; }

  void cut() {
    if (count <= k) return;
    if (k <= kFew && count <= kScanned) {
      least_few(list, count, k);
      count = k;
      limit_to(list[k - 1]);
      return;
    }
    const E last = select(list, count, k - 1, buffer);
    int64_t less = 0;
    // Places are unique, so exactly k entries are not above the last.
    count = within(list, list, count, E{}, last, less);
    limit_to(last);
  }

  // Only what is less than the k-th entry is let in: its place is before those to come, so of equal keys it wins.
  void limit_to(const E& last) {
    const K key = Kind::key(last);
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
    E* sorted = sort_entries<Kind>(list, buffer, count);
    if (sorted != list) std::copy_n(sorted, count, list);
    return list;
  }
};

template <class Kind, class K = typename Kind::K>
void topk_slices(const OrderNest& nest, const Source<Kind>& x, const Ordered& o) {
  using E = typename Kind::E;
  using B = Best<Kind>;
  const K flip = o.descending ? ~K{0} : 0;
  const int64_t k = o.size;
  if (k == 0) return;
  // A k that is not small refuses nothing before most have come: the slice is collected whole.
  const bool whole = 2 * B::full(k) > nest.length;
  const int64_t stride = (whole ? nest.length : B::full(k) + B::kPiece) + kSlack;
  const int64_t wide = block_width<E>(stride, x.type.bytes);
  const Blocks blocks = make_blocks(nest, wide, o.inner == 1 ? 1 : wide);
  blocks.for_each((nest.length + 7) / 8 + k, 0, [&](const auto& visit_each) {
    EntryBuffer<E> entries(stride * blocks.width);
    EntryBuffer<E> buffer(select_buffer(stride));
    std::vector<B> best(blocks.width);
    visit_each([&](int64_t first, int64_t w) {
      for (int64_t j = 0; j < w; ++j) best[j] = B{entries.data + j * stride, buffer.data, k};
      if (whole) {
        int64_t counts[kWidest];
        collect_block<Kind>(entries.data, stride, counts, blocks, nest, x, first, w, flip);
        for (int64_t j = 0; j < w; ++j) best[j].count = counts[j];
      } else if (blocks.columns) {
        for_each_column_piece(nest, x, first, w,
                              [&](int64_t j, const Source<Kind>& xs, const uint8_t* m, int64_t n, int64_t place) {
                                best[j].add(xs, m, n, place, flip);
                              });
      } else {
        for (int64_t j = 0; j < w; ++j) {
          prefetch_slice(nest, x, first + j + 1);
          for_each_piece(nest, x, offset_of(nest.outer, first + j), B::kPiece,
                         [&](const Source<Kind>& xs, const uint8_t* m, int64_t n, int64_t place) {
                           best[j].add(xs, m, n, place, flip);
                         });
        }
      }
      int64_t counts[kWidest];
      E* lists[kWidest];
      for (int64_t j = 0; j < w; ++j) {
        lists[j] = best[j].finish();
        counts[j] = std::min(k, best[j].count);
      }
      x.type.write(o, nest, lists, counts, first, w, x.data, flip, o.descending ? Padding::least : Padding::greatest);
    });
  });
}

inline void order(ScalarType dtype, bool is_topk, const OrderNest& nest, const void* x, const Ordered& o) {
  with_places<true>(dtype, x, nest.length, [&](const auto& source) {
    if (is_topk)
      topk_slices(nest, source, o);
    else
      sort_slices(nest, source, o);
  });
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
