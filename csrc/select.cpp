// Selection: pack moves the kept rows of x together, unpack puts them back. Pure movement of bytes, so one code path
// serves every dtype and every CPU. Arguments were checked in Python: x has the mask's dims first, then those of a row. A
// mask is bool; or int64 with a leading dim of 2, the starts and ends of what is kept along its last dim, expanded to it.
#include "loops.h"
#include "select_mask.h"
#include "zero_pages.h"

namespace maskwise {
namespace {

// Rows are handled in blocks of at most this many, and of about kGrain elements. A block's place in the packed tensor is
// known before any is copied, so blocks are independent, and the result does not depend on the number of threads.
constexpr int64_t kBlock = 2048;

int64_t block_rows(int64_t elements) {
  return std::clamp<int64_t>(kGrain / std::max<int64_t>(1, elements), 1, kBlock);
}

// The dims [from, to) of a tensor as loops.
Loops<1> loops_of(const Tensor& t, int64_t from, int64_t to) {
  Loops<1> loops;
  for (int64_t d = from; d < to; ++d) loops.push_back({t.size(d), {t.stride(d)}});
  coalesce(loops);
  return loops;
}

// As loops_of, for a tensor that broadcasts to `sizes`: missing and single dims have stride 0.
Loops<1> broadcast_loops(const Tensor& t, const std::vector<int64_t>& sizes, size_t from, size_t to) {
  const int64_t shift = static_cast<int64_t>(sizes.size()) - t.dim();
  Loops<1> loops;
  for (size_t d = from; d < to; ++d) {
    const int64_t own = static_cast<int64_t>(d) - shift;
    const bool broadcast = own < 0 || t.size(own) == 1;
    loops.push_back({sizes[d], {broadcast ? 0 : t.stride(own)}});
  }
  coalesce(loops);
  return loops;
}

bool is_contiguous(const Loops<1>& loops) { return loops.empty() || (loops.size() == 1 && loops[0].stride[0] == 1); }

// Results of at least this many bytes are written past the caches: they would not stay there, and a plain write reads
// each line first.
constexpr size_t kStreamed = size_t{1} << 23;

// memcpy, past the caches where `streamed`.
inline void move_bytes(void* to, const void* from, size_t bytes, bool streamed) {
#if defined(__SSE2__)
  char* t = static_cast<char*>(to);
  const char* f = static_cast<const char*>(from);
  if (streamed && bytes >= 256) {
    const size_t head = (64 - (reinterpret_cast<uintptr_t>(t) & 63)) & 63;
    std::memcpy(t, f, head);
    t += head, f += head, bytes -= head;
    for (; bytes >= 64; t += 64, f += 64, bytes -= 64) {
      const auto* source = reinterpret_cast<const __m128i*>(f);
      auto* target = reinterpret_cast<__m128i*>(t);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
  }
  std::memcpy(t, f, bytes);
#else
  std::memcpy(to, from, bytes);
#endif
}

// std::fill_n, past the caches where `streamed`: the pattern of a word repeats in every 16 bytes.
template <class Word>
void fill_words(Word* to, int64_t count, Word value, bool streamed) {
#if defined(__SSE2__)
  if (streamed && count * sizeof(Word) >= 256) {
    for (; reinterpret_cast<uintptr_t>(to) & 15; --count) *to++ = value;
    Word pattern[16 / sizeof(Word)];
    std::fill_n(pattern, 16 / sizeof(Word), value);
    __m128i v;
    std::memcpy(&v, pattern, 16);
    constexpr int64_t each = 16 / sizeof(Word);
    for (; count >= each; count -= each, to += each) _mm_stream_si128(reinterpret_cast<__m128i*>(to), v);
  }
#endif
  std::fill_n(to, count, value);
}

// Makes what was written past the caches visible to other threads.
inline void end_stream(bool streamed) {
#if defined(__SSE2__)
  if (streamed) _mm_sfence();
#else
  (void)streamed;
#endif
}

// One row, whose elements lie as `loops` say, into contiguous memory.
template <class Word>
void gather_row(const Word* from, const Loops<1>& loops, int64_t elements, Word* to) {
  const int64_t step = loops.empty() ? 1 : loops.back().stride[0];
  for_each_run(loops, 0, elements, [&](const Offset<1>& at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) *to++ = from[at[0] + i * step];
  });
}

// The mask as contiguous bytes: itself, or a copy where its strides are of another kind.
struct MaskBytes {
  std::vector<uint8_t> copy;
  const uint8_t* data;
  int64_t rows = 1;

  explicit MaskBytes(const Tensor& mask) {
    const auto* bytes = static_cast<const uint8_t*>(mask.const_data_ptr());
    const auto loops = loops_of(mask, 0, mask.dim());
    for (int64_t d = 0; d < mask.dim(); ++d) rows *= mask.size(d);
    if (!is_contiguous(loops)) {
      copy.resize(rows);
      gather_row(bytes, loops, rows, copy.data());
      bytes = copy.data();
    }
    data = bytes;
  }

  int64_t count(int64_t begin, int64_t end) const { return count_kept(data + begin, end - begin); }

  template <class Run>
  void for_each(int64_t begin, int64_t end, const Run& run) const {
    for_each_segment(data, begin, end, run);
  }
};

// The mask as one interval for each line along its last dim. Bounds may lie outside of the line.
struct MaskRuns {
  const int64_t* data;
  int64_t to_end;  // elements from a start to its end
  int64_t length;  // of a line
  int64_t rows;
  Loops<1> lines;

  explicit MaskRuns(const Tensor& bounds)
      : data(static_cast<const int64_t*>(bounds.const_data_ptr())),
        to_end(bounds.stride(0)),
        length(bounds.size(bounds.dim() - 1)),
        rows(bounds.numel() / 2),
        lines(loops_of(bounds, 1, bounds.dim() - 1)) {}

  int64_t count(int64_t begin, int64_t end) const {
    int64_t kept = 0;
    for_each(begin, end, [&](bool is_kept, int64_t, int64_t count) { kept += is_kept ? count : 0; });
    return kept;
  }

  // As for_each_segment.
  template <class Run>
  void for_each(int64_t begin, int64_t end, const Run& run) const {
    const auto part = [&](bool kept, int64_t from, int64_t to) {
      if (from < to) run(kept, from, to - from);
    };
    while (begin < end) {
      const int64_t line = begin / length, first = line * length, stop = std::min(end, first + length);
      const int64_t* bounds = data + offset_of(lines, line)[0];
      const int64_t from = std::clamp(first + std::clamp<int64_t>(bounds[0], 0, length), begin, stop);
      const int64_t to = std::clamp(first + std::clamp<int64_t>(bounds[to_end], 0, length), from, stop);
      part(false, begin, from);
      part(true, from, to);
      part(false, to, stop);
      begin = stop;
    }
  }
};


// How many rows are kept before each block; the last entry is how many there are in all.
template <class Kept>
std::vector<int64_t> block_starts(const Kept& mask, int64_t block) {
  const int64_t blocks = ceil_div(mask.rows, block);
  std::vector<int64_t> starts(blocks + 1, 0);
  parallel(blocks, block, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      starts[b + 1] = mask.count(b * block, std::min((b + 1) * block, mask.rows));
    }
  });
  for (int64_t b = 0; b < blocks; ++b) starts[b + 1] += starts[b];
  return starts;
}

// Where the rows of a tensor are: rows that touch are moved as one piece.
template <class Word>
struct Rows {
  const Word* data;
  Loops<1> lead;
  Loops<1> row;
  int64_t elements;  // in a row
  bool touching;     // the whole tensor is contiguous
  bool solid;        // each row is

  Rows(const void* bytes, Loops<1> lead_loops, Loops<1> row_loops, int64_t row_elements, int64_t count)
      : data(static_cast<const Word*>(bytes)), lead(std::move(lead_loops)), row(std::move(row_loops)), elements(row_elements) {
    solid = is_contiguous(row);
    touching = solid && (count <= 1 || lead.empty() || (lead.size() == 1 && lead[0].stride[0] == elements));
  }

  void copy(int64_t first, int64_t count, Word* to, bool streamed) const {
    if (touching) {
      move_bytes(to, data + first * elements, count * elements * sizeof(Word), streamed);
      return;
    }
    if (elements == 1) {
      const int64_t step = lead.back().stride[0];
      for_each_run(lead, first, first + count, [&](const Offset<1>& at, int64_t n) {
        for (int64_t i = 0; i < n; ++i) *to++ = data[at[0] + i * step];
      });
      return;
    }
    for (int64_t i = 0; i < count; ++i, to += elements) {
      const Word* from = data + offset_of(lead, first + i)[0];
      if (solid)
        move_bytes(to, from, elements * sizeof(Word), streamed);
      else
        gather_row(from, row, elements, to);
    }
  }
};

// A block is looked through for its kept elements where less than one in this many is kept.
constexpr int64_t kFew = 8;

// The kept ones of the single elements [begin, end) into [to, stop).
template <class Word>
void pack_single(const Rows<Word>& x, const uint8_t* mask, int64_t begin, int64_t end, Word* to, Word* stop) {
  const bool few = (stop - to) * kFew < end - begin;
  const int64_t step = x.lead.empty() ? 1 : x.lead.back().stride[0];
  mask += begin;
  for_each_run(x.lead, begin, end, [&](const Offset<1>& at, int64_t count) {
    const Word* from = x.data + at[0];
    if (few) {
      for_each_kept(mask, count, [&](int64_t i) { *to++ = from[i * step]; });
    } else {
      // No branch, since a random mask would mispredict every other one. It stays within the block's own places but for
      // one write past its end, so it ends with the last that is kept.
      for (int64_t i = 0; i < count && to < stop; ++i) {
        *to = from[i * step];
        to += mask[i] != 0;
      }
    }
    mask += count;
  });
}

template <class Word, class Kept>
void pack_words(const Rows<Word>& x, const Kept& mask, const std::vector<int64_t>& starts, Word* out) {
  const int64_t block = block_rows(x.elements);
  const bool streamed = starts.back() * x.elements * sizeof(Word) >= kStreamed;
  parallel(static_cast<int64_t>(starts.size()) - 1, block * x.elements, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min((b + 1) * block, mask.rows);
      Word* to = out + starts[b] * x.elements;
      if constexpr (std::is_same_v<Kept, MaskBytes>) {
        if (x.elements == 1) {
          pack_single(x, mask.data, b * block, last, to, out + starts[b + 1]);
          continue;
        }
      }
      mask.for_each(b * block, last, [&](bool kept, int64_t first, int64_t count) {
        if (!kept) return;
        x.copy(first, count, to, streamed);
        to += count * x.elements;
      });
    }
    end_stream(streamed);
  });
}

// kept ? a : b, of addresses and by arithmetic: of two loads a compiler would make a branch.
template <class Word>
inline const Word* either(bool kept, const Word* a, const Word* b) {
  const uintptr_t all = -static_cast<uintptr_t>(kept);
  return reinterpret_cast<const Word*>((reinterpret_cast<uintptr_t>(a) & all) | (reinterpret_cast<uintptr_t>(b) & ~all));
}

// The single elements [i, last), of which those from `from` to `stop` are kept: no branch here either. What is read ahead
// of its place is the block's own, or the next to come, until none is left; then the rest of the block is dropped.
template <class Word>
void unpack_single(const Word* from, const Word* stop, const uint8_t* mask, int64_t i, int64_t last, const Word* other,
                   Word* out) {
  if ((stop - from) * kFew < last - i) {
    std::fill_n(out + i, last - i, *other);
    for_each_kept(mask + i, last - i, [&](int64_t k) { out[i + k] = *from++; });
    return;
  }
  for (; i < last && from < stop; ++i) {
    const bool kept = mask[i] != 0;
    out[i] = *either(kept, from, other);
    from += kept;
  }
  std::fill_n(out + i, last - i, *other);
}

// What is known of memory that kept rows are written to: whether it reads as zeros already, and as small pages.
struct Zeroed {
  bool all = false, scattered = false;
};

template <class Word, class Kept>
void unpack_words(const Word* values, const Kept& mask, const std::vector<int64_t>& starts, const Rows<Word>& other,
                  bool constant, Zeroed zeroed, Word* out) {
  const int64_t elements = other.elements;
  const int64_t block = block_rows(elements);
  const bool streamed = mask.rows * elements * sizeof(Word) >= kStreamed;
  parallel(static_cast<int64_t>(starts.size()) - 1, block * elements, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Word* from = values + starts[b] * elements;
      const int64_t last = std::min((b + 1) * block, mask.rows);
      if constexpr (std::is_same_v<Kept, MaskBytes>) {
        if (elements == 1 && constant) {
          unpack_single(from, values + starts[b + 1], mask.data, b * block, last, other.data, out);
          continue;
        }
      }
      mask.for_each(b * block, last, [&](bool kept, int64_t first, int64_t count) {
        Word* to = out + first * elements;
        if (kept) {
          const int64_t bytes = count * elements * static_cast<int64_t>(sizeof(Word));
          if (zeroed.scattered) populate(reinterpret_cast<char*>(to), bytes);
          move_bytes(to, from, bytes, streamed);
          from += count * elements;
        } else if (zeroed.all) {
          return;
        } else if (constant) {
          fill_words(to, count * elements, *other.data, streamed);
        } else {
          other.copy(first, count, to, streamed);
        }
      });
    }
    end_stream(streamed);
  });
}

// A tensor of rows: the sizes of a row, and how many elements it has.
struct RowSizes {
  std::vector<int64_t> sizes;
  int64_t elements = 1;

  RowSizes(const Tensor& t, int64_t from) {
    for (int64_t d = from; d < t.dim(); ++d) {
      sizes.push_back(t.size(d));
      elements *= t.size(d);
    }
  }

  // These many rows, or a grid of them.
  std::vector<int64_t> with(std::vector<int64_t> lead) const {
    lead.insert(lead.end(), sizes.begin(), sizes.end());
    return lead;
  }
};

bool has_runs(const Tensor& mask) { return mask.scalar_type() == ScalarType::Long; }

// The sizes of a mask.
std::vector<int64_t> sizes_of(const Tensor& mask) {
  std::vector<int64_t> sizes;
  for (int64_t d = has_runs(mask); d < mask.dim(); ++d) sizes.push_back(mask.size(d));
  return sizes;
}

int64_t lead_dims(const Tensor& mask) { return mask.dim() - has_runs(mask); }

// What both directions know before they move anything.
template <class Kept>
struct Selection {
  Kept mask;
  RowSizes row;
  std::vector<int64_t> starts;

  Selection(const Tensor& kept, const Tensor& rows, int64_t lead)
      : mask(kept), row(rows, lead), starts(block_starts(mask, block_rows(row.elements))) {}
};

// Calls call(selection) for the rows of a tensor from dim `lead` on.
template <class Call>
void with_selection(const Tensor& mask, const Tensor& rows, int64_t lead, const Call& call) {
  if (has_runs(mask))
    call(Selection<MaskRuns>(mask, rows, lead));
  else
    call(Selection<MaskBytes>(mask, rows, lead));
}

template <class Kept>
void pack_into(const Selection<Kept>& s, const Tensor& x, const Tensor& mask, const Tensor& out) {
  const int64_t lead = lead_dims(mask);
  dispatch_bytes(x.element_size(), [&](auto word) {
    using Word = decltype(word);
    const Rows<Word> rows(x.const_data_ptr(), loops_of(x, 0, lead), loops_of(x, lead, x.dim()), s.row.elements,
                          s.mask.rows);
    if (s.row.elements > 0) pack_words(rows, s.mask, s.starts, static_cast<Word*>(out.mutable_data_ptr()));
  });
}

// Whether to write few rows into small pages: where they are less than a quarter, in runs of pages. A huge page is
// cleared as a whole for whatever is written of it.
bool is_scattered(const MaskBytes&, int64_t, int64_t) { return false; }
bool is_scattered(const MaskRuns& mask, int64_t kept, int64_t row_bytes) {
  constexpr int64_t kFewest = 4, kLeastRun = 8192;
  const int64_t lines = std::max<int64_t>(1, mask.rows / std::max<int64_t>(1, mask.length));
  return kept * kFewest <= mask.rows && kept * row_bytes >= lines * kLeastRun;
}

template <class Kept>
void unpack_into(const Selection<Kept>& s, const Tensor& values, const Tensor& mask, const Tensor& other,
                 const Tensor& out, bool fresh = false) {
  STD_TORCH_CHECK(values.size(0) >= s.starts.back(), "maskwise: unpack was called with fewer rows than the mask keeps");
  dispatch_bytes(values.element_size(), [&](auto word) {
    using Word = decltype(word);
    const size_t lead = lead_dims(mask);
    const auto sizes = s.row.with(sizes_of(mask));
    const Rows<Word> rows(other.const_data_ptr(), broadcast_loops(other, sizes, 0, lead),
                          broadcast_loops(other, sizes, lead, sizes.size()), s.row.elements, s.mask.rows);
    if (s.row.elements == 0) return;
    Zeroed zeroed;
    // Single elements of bytes are written without a branch, dropped ones too.
    if (fresh && is_zero(other) && (std::is_same_v<Kept, MaskRuns> || s.row.elements > 1)) {
      const bool scattered = is_scattered(s.mask, s.starts.back(), s.row.elements * static_cast<int64_t>(sizeof(Word)));
      zeroed.all = zero_pages(out, scattered);
      zeroed.scattered = zeroed.all && scattered;
    }
    unpack_words(static_cast<const Word*>(values.const_data_ptr()), s.mask, s.starts, rows, other.numel() == 1, zeroed,
                 static_cast<Word*>(out.mutable_data_ptr()));
  });
}

Tensor pack_rows(const Tensor& x, const Tensor& mask) {
  std::optional<Tensor> out;
  with_selection(mask, x, lead_dims(mask), [&](const auto& s) {
    out = empty_cpu(s.row.with({s.starts.back()}), x.scalar_type());
    pack_into(s, x, mask, *out);
  });
  return *out;
}

// Into memory that is there: contiguous, of x's dtype, and with as many rows as are kept.
void pack_rows_out(const Tensor& x, const Tensor& mask, Tensor out) {
  with_selection(mask, x, lead_dims(mask), [&](const auto& s) {
    STD_TORCH_CHECK(out.size(0) == s.starts.back(), "maskwise: pack was called with an `out` of another number of rows");
    pack_into(s, x, mask, out);
  });
}

Tensor unpack_rows(const Tensor& values, const Tensor& mask, const Tensor& other) {
  Tensor out = empty_cpu(RowSizes(values, 1).with(sizes_of(mask)), values.scalar_type());
  with_selection(mask, values, 1, [&](const auto& s) { unpack_into(s, values, mask, other, out, true); });
  return out;
}

void unpack_rows_out(const Tensor& values, const Tensor& mask, const Tensor& other, Tensor out) {
  with_selection(mask, values, 1, [&](const auto& s) { unpack_into(s, values, mask, other, out); });
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("pack_rows", TORCH_BOX(&maskwise::pack_rows));
  m.impl("pack_rows_forward", TORCH_BOX(&maskwise::pack_rows));
  m.impl("pack_rows_out", TORCH_BOX(&maskwise::pack_rows_out));
  m.impl("unpack_rows", TORCH_BOX(&maskwise::unpack_rows));
  m.impl("unpack_rows_forward", TORCH_BOX(&maskwise::unpack_rows));
  m.impl("unpack_rows_out", TORCH_BOX(&maskwise::unpack_rows_out));
}
