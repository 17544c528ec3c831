// Slices as lists of entries: how the kept elements behind each output are collected, and how results are written.
// Compiled once a target, for the order family.
#include "order_select.h"
#if defined(MASKWISE_ORDER_SLICES_H) == defined(MASKWISE_TARGET_TOGGLE)
#ifdef MASKWISE_TARGET_TOGGLE
#undef MASKWISE_ORDER_SLICES_H
#else
#define MASKWISE_ORDER_SLICES_H
#endif

namespace maskwise::MASKWISE_TARGET {

// Slices of a block, at most.
constexpr int64_t kWidest = 64;

// An element type behind function pointers: what sorts and selects knows keys and entries, and is compiled for those
// alone.
template <class Kind>
struct ElementType {
  using K = typename Kind::K;
  using E = typename Kind::E;
  int64_t bytes;
  bool is_floating;
  int64_t (*compact)(E* out, const void* x, const uint8_t* m, int64_t n, int64_t place, K flip, K limit);
  int64_t (*compact_limited)(E* out, const void* x, const uint8_t* m, int64_t n, int64_t place, K flip, K limit);
  // w sorted lists as results, and the tail where a list is shorter.
  void (*write)(const Ordered& o, const OrderNest& nest, E* const* lists, const int64_t* counts, int64_t first, int64_t w,
                const void* x, K flip, Padding padding);
  // One value between two keys; the first where weight is negative.
  void (*interpolate)(void* out, int64_t at, K below, K above, double weight);
};

template <class T, class Kind>
struct ElementFunctions {
  using K = typename Kind::K;

  static void write(const Ordered& o, const OrderNest& nest, typename Kind::E* const* lists, const int64_t* counts,
                    int64_t first, int64_t w, const void* from, K flip, Padding padding) {
    const T* x = static_cast<const T*>(from);
    T* values = static_cast<T*>(o.values);
    const T rest = padding == Padding::zero ? T(0) : losing_value<T>(padding == Padding::least);
    const int64_t step = innermost(nest.inner).stride[nest.kX];
    int64_t starts[kWidest], sources[kWidest];
    for (int64_t j = 0; j < w; ++j) {
      starts[j] = o.start(first + j);
      sources[j] = offset_of(nest.outer, first + j)[nest.kX];
    }
    const auto put = [&](int64_t j, int64_t r, int64_t at) {
      if (r >= counts[j]) {
        o.indices[at] = -1;
        if (values != nullptr) values[at] = rest;
        return;
      }
      const auto e = lists[j][r];
      const int64_t place = Kind::place(e);
      o.indices[at] = place;
      if (values == nullptr) return;
      // A zero or a NaN stands for several patterns of bits.
      const K key = Kind::key(e);
      const bool ambiguous = kFloating<T> && ((key ^ flip) == kTop<K> || (key ^ flip) == ~K{0});
      values[at] = ambiguous ? x[sources[j] + place * step] : value_of<T>(key, flip);
    };
    if (w == 1 && o.inner == 1) {
      const int64_t n = std::min(counts[0], o.size);
      for (int64_t r = 0; r < n; ++r) put(0, r, starts[0] + r);
      std::fill(o.indices + starts[0] + n, o.indices + starts[0] + o.size, int64_t{-1});
      if (values != nullptr) std::fill(values + starts[0] + n, values + starts[0] + o.size, rest);
      return;
    }
    const int64_t longest = std::min(*std::max_element(counts, counts + w), o.size);
    for (int64_t r = 0; r < longest; ++r)
      for (int64_t j = 0; j < w; ++j) put(j, r, starts[j] + r * o.inner);
    const bool side_by_side = starts[w - 1] - starts[0] == w - 1;
    for (int64_t r = longest; r < o.size; ++r)
      for (int64_t j = 0, n = side_by_side ? w : 1; j < w; j += n) {
        const int64_t at = starts[j] + r * o.inner;
        std::fill_n(o.indices + at, n, int64_t{-1});
        if (values != nullptr) std::fill_n(values + at, n, rest);
      }
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

// A slice, or a block of slices, of x: typed memory behind an untyped pointer.
template <class Kind>
struct Source {
  ElementType<Kind> type;
  const char* data;

  Source at(int64_t offset) const { return {type, data + offset * type.bytes}; }
};

template <class Kind>
int64_t place_of(const Source<Kind>&, const typename Kind::E& entry) {
  return Kind::place(entry);
}

template <class T, class Kind, bool kOrders = false>
Source<Kind> make_source(const void* x) {
  using F = ElementFunctions<T, Kind>;
  ElementType<Kind> type{sizeof(T), kFloating<T>, compact<Kind, false, T>, nullptr, nullptr, F::interpolate};
  if constexpr (kOrders) {
    type.compact_limited = compact<Kind, true, T>;
    type.write = F::write;
  }
  return {type, static_cast<const char*>(x)};
}

// Calls run(Source<Kind>) for entries without places.
template <class Run>
void with_keys(ScalarType dtype, const void* x, const Run& run) {
  Source<Keys<uint32_t>> narrow{};
  Source<Keys<uint64_t>> wide{};
  dispatch_numeric(dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 8)
      wide = make_source<T, Keys<uint64_t>>(x);
    else
      narrow = make_source<T, Keys<uint32_t>>(x);
  });
  if (wide.type.compact != nullptr)
    run(wide);
  else
    run(narrow);
}

// Calls run(Source<Kind>) for entries with places in slices of so many elements; kOrders for sort and topk.
template <bool kOrders, class Run>
void with_places(ScalarType dtype, const void* x, int64_t length, const Run& run) {
  Source<Places32> narrow{};
  Source<Places64<uint32_t>> narrow_long{};
  Source<Places64<uint64_t>> wide{};
  const bool is_long = length >= int64_t{1} << 32;
  dispatch_any(dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 8)
      wide = make_source<T, Places64<uint64_t>, kOrders>(x);
    else if (is_long)
      narrow_long = make_source<T, Places64<uint32_t>, kOrders>(x);
    else
      narrow = make_source<T, Places32, kOrders>(x);
  });
  if (wide.type.compact != nullptr)
    run(wide);
  else if (is_long)
    run(narrow_long);
  else
    run(narrow);
}

// Uninitialised memory: it is filled as far as something is kept, so what is not kept is not even touched.
template <class E>
struct EntryBuffer {
  explicit EntryBuffer(int64_t n) : data(static_cast<E*>(std::malloc(std::max<int64_t>(1, n) * sizeof(E)))) {
    STD_TORCH_CHECK(data != nullptr, "maskwise: no memory for the kept elements of a slice");
  }
  ~EntryBuffer() { std::free(data); }
  EntryBuffer(const EntryBuffer&) = delete;
  EntryBuffer& operator=(const EntryBuffer&) = delete;
  E* data;
};

// Slices are taken a block at a time. Columns that lie side by side share cache lines, so a block of them is read at
// once; and results that do are written at once.
struct Blocks {
  bool columns;   // whether x is read side by side
  int64_t width;  // slices a block
  int64_t run;    // slices that a block must not reach across
  int64_t each;   // blocks a run
  int64_t total;

  // `written` is how many bytes of a result each block writes, one after the other; 0 for few.
  template <class Body>
  void for_each(int64_t length, int64_t written, const Body& body) const {
    // Two threads that met in a huge page of a fresh result would both clear it: each takes blocks of whole ones, as long
    // as there are some for every thread.
    constexpr int64_t kHugePage = int64_t{1} << 21;
    int64_t together = written == 0 ? 1 : std::max<int64_t>(1, kHugePage / written);
    if (together * 4 * static_cast<int64_t>(torch::stable::get_num_threads()) > total) together = 1;
    // To order an element costs many times what it costs to read it.
    parallel_uneven(ceil_div(total, together), together * length * width * 8, [&](int64_t begin, int64_t end) {
      body([&](const auto& visit) {
        for (int64_t b = begin * together; b < std::min(total, end * together); ++b) {
          const int64_t within_run = b % each * width;
          visit(b / each * run + within_run, std::min(width, run - within_run));
        }
      });
    });
  }
};

inline Blocks make_blocks(const OrderNest& nest, int64_t columns_width, int64_t rows_width) {
  const bool rows_touch = !nest.inner.empty() && nest.inner.back().stride[nest.kX] == 1;
  const bool columns_touch = !nest.outer.empty() && nest.outer.back().stride[nest.kX] == 1 && nest.outer.back().size >= 4;
  const bool columns = !rows_touch && columns_touch;
  const int64_t run = columns ? nest.outer.back().size : nest.slices;
  int64_t width = std::max<int64_t>(1, std::min(run, columns ? columns_width : rows_width));
  // One block of long columns: threads share lines rather than that one does it all.
  if (columns && nest.slices == width && width >= 16 && nest.length >= 4096) width = ceil_div(ceil_div(width, 4), 8) * 8;
  const int64_t each = ceil_div(run, width);
  return {columns, width, run, each, run == 0 ? 0 : nest.slices / run * each};
}

// The mask bytes of n elements of a run, which stand at `m` and `position`: of bounds that change along it, or of bytes
// that lie apart.
inline void stage_kept(const Mask& mask, const uint8_t* m, int64_t position, int64_t stride, int64_t n, uint8_t* bytes) {
  if (mask.has_intervals()) return stage_bits(mask, m, position, stride, n, bytes);
  gather<uint8_t>(reinterpret_cast<char*>(bytes), reinterpret_cast<const char*>(m), stride, n);
}

// Elements that are gathered at a time.
constexpr int64_t kOrderStage = 512;

// Calls piece(x, m, n, place) for stretches of at most `most` contiguous elements of the slice at `slice`. m is null where
// all are kept; stretches of which nothing is kept may be left out.
template <class Kind, class Piece>
void for_each_piece(const OrderNest& nest, const Source<Kind>& x, const Offset<3>& slice, int64_t most,
                    const Piece& piece) {
  const Mask& mask = nest.mask;
  const Loop<3> inner = innermost(nest.inner, mask, nest.kMask);
  const int64_t stride = inner.stride[nest.kX], bits = inner.stride[nest.kMask];
  const int bytes = static_cast<int>(x.type.bytes);
  char values[kOrderStage * 8];
  uint8_t staged[kOrderStage];
  int64_t place = 0;
  for_each_run(nest.inner, 0, nest.length, [&](const Offset<3>& to, int64_t count) {
    const Source<Kind> xs = x.at(slice[nest.kX] + to[nest.kX]);
    const uint8_t* m = mask.data + slice[nest.kMask] + to[nest.kMask];
    const int64_t position = slice[nest.kPosition] + to[nest.kPosition];
    const int64_t first = place;
    place += count;
    const KeptRun run = kept_of_run(mask, m, position, bits, inner.stride[nest.kPosition], count);
    if (run.kept == Kept::none) return;
    const bool stages = run.kept == Kept::bits && (bits != 1 || mask.has_intervals());
    const int64_t step = stages || stride != 1 ? std::min(most, kOrderStage) : most;
    for (int64_t i = run.begin; i < run.end; i += step) {
      const int64_t n = std::min(step, run.end - i);
      const uint8_t* kept = run.kept == Kept::all ? nullptr : stages ? staged : m + i;
      if (stages) stage_kept(mask, m + i * bits, position, bits, n, staged);
      if (kept != nullptr && step < most && none_of(kept, n)) continue;
      if (stride == 1) {
        piece(xs.at(i), kept, n, first + i);
      } else {
        gather(bytes, values, xs.at(i * stride).data, stride * bytes, n);
        piece(Source<Kind>{x.type, values}, kept, n, first + i);
      }
    }
  });
}

// How many of n mask bytes keep something, in short sums, which a compiler makes of vectors.
inline int64_t count_bytes(const uint8_t* m, int64_t n) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; i += 4096) {
    uint32_t part = 0;
    for (int64_t k = i; k < std::min(i + 4096, n); ++k) part += m[k] != 0;
    total += part;
  }
  return total;
}

// How many elements of a slice are kept.
inline int64_t count_slice(const OrderNest& nest, const Offset<3>& slice) {
  const Mask& mask = nest.mask;
  const Loop<3> inner = innermost(nest.inner, mask, nest.kMask);
  const int64_t bits = inner.stride[nest.kMask];
  int64_t total = 0;
  for_each_run(nest.inner, 0, nest.length, [&](const Offset<3>& to, int64_t count) {
    const uint8_t* m = mask.data + slice[nest.kMask] + to[nest.kMask];
    const int64_t position = slice[nest.kPosition] + to[nest.kPosition];
    const KeptRun run = kept_of_run(mask, m, position, bits, inner.stride[nest.kPosition], count);
    if (run.kept == Kept::all) total += run.end - run.begin;
    if (run.kept != Kept::bits) return;
    if (bits == 1 && !mask.has_intervals()) {
      total += count_bytes(m, count);
      return;
    }
    uint8_t staged[kOrderStage];
    for (int64_t i = 0; i < count; i += kOrderStage) {
      const int64_t n = std::min(kOrderStage, count - i);
      stage_kept(mask, m + i * bits, position, bits, n, staged);
      total += count_bytes(staged, n);
    }
  });
  return total;
}

// The entries that one slice needs. To count what is kept is cheap, but dearer than a little memory.
inline int64_t entries_for(const OrderNest& nest, int64_t slice) {
  return (nest.length <= 65536 ? nest.length : count_slice(nest, offset_of(nest.outer, slice))) + kSlack;
}

// Reads ahead the beginning of what an interval keeps of a slice, which is read next: where slices end early, the CPU does
// not find the next one by itself.
template <class Kind>
void prefetch_slice(const OrderNest& nest, const Source<Kind>& x, int64_t slice) {
  constexpr int64_t kAheadBytes = 512;
  if (slice >= nest.slices || !nest.mask.has_intervals() || nest.inner.size() != 1) return;
  const Loop<3>& inner = nest.inner[0];
  if (inner.stride[nest.kX] != 1) return;
  const Offset<3> at = offset_of(nest.outer, slice);
  const KeptRun run = kept_of_run(nest.mask, nest.mask.data + at[nest.kMask], at[nest.kPosition], inner.stride[nest.kMask],
                                  inner.stride[nest.kPosition], nest.length);
  if (run.kept != Kept::all) return;
  const char* from = x.at(at[nest.kX] + run.begin).data;
  const int64_t bytes = std::min((run.end - run.begin) * x.type.bytes, kAheadBytes);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

template <class Kind, class K = typename Kind::K>
int64_t collect_row(typename Kind::E* out, const OrderNest& nest, const Source<Kind>& x, int64_t slice, K flip) {
  int64_t count = 0;
  prefetch_slice(nest, x, slice + 1);
  for_each_piece(nest, x, offset_of(nest.outer, slice), nest.length,
                 [&](const Source<Kind>& xs, const uint8_t* ms, int64_t n, int64_t place) {
                   count += xs.type.compact(out + count, xs.data, ms, n, place, flip, K{0});
                 });
  return count;
}

// How many slices of n entries to take at once: as many as a second-level cache holds when half is kept, but enough
// that whole cache lines are read.
template <class E>
int64_t block_width(int64_t n, int64_t bytes) {
  const int64_t fit = (int64_t{1} << 20) / (std::max<int64_t>(1, n) * static_cast<int64_t>(sizeof(E)));
  return std::clamp<int64_t>(fit / 8 * 8, std::min<int64_t>(64 / bytes, kWidest), kWidest);
}

}  // namespace maskwise::MASKWISE_TARGET
#endif  // toggle
