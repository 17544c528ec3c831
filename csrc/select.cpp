// Selection: pack moves the kept rows of x together, unpack puts them back. Pure movement of bytes, so one code path
// serves every dtype and every CPU. Arguments were checked in Python: x has the mask's dims first, then those of a row.
#include "layout.h"

namespace maskwise {
namespace {

// Rows are handled in blocks of at most this many, and of about kGrain elements. A block's place in the packed tensor is
// known before any is copied, so blocks are independent, and the result does not depend on the number of threads.
constexpr int64_t kBlock = 2048;

int64_t block_rows(int64_t elements) {
  return std::clamp<int64_t>(kGrain / std::max<int64_t>(1, elements), 1, kBlock);
}

// The dims [from, to) of a tensor as loops; the mask stride stays unused.
std::vector<Loop> loops_of(const Tensor& t, int64_t from, int64_t to) {
  std::vector<Loop> loops;
  for (int64_t d = from; d < to; ++d) loops.push_back({t.size(d), t.stride(d), 0});
  coalesce(loops);
  return loops;
}

// As loops_of, for a tensor that broadcasts to `sizes`: missing and single dims have stride 0.
std::vector<Loop> broadcast_loops(const Tensor& t, const std::vector<int64_t>& sizes, size_t from, size_t to) {
  const int64_t shift = static_cast<int64_t>(sizes.size()) - t.dim();
  std::vector<Loop> loops;
  for (size_t d = from; d < to; ++d) {
    const int64_t own = static_cast<int64_t>(d) - shift;
    const bool broadcast = own < 0 || t.size(own) == 1;
    loops.push_back({sizes[d], broadcast ? 0 : t.stride(own), 0});
  }
  coalesce(loops);
  return loops;
}

bool is_contiguous(const std::vector<Loop>& loops) { return loops.empty() || (loops.size() == 1 && loops[0].x == 1); }

// One row, whose elements lie as `loops` say, into contiguous memory.
template <class Word>
void gather_row(const Word* from, const std::vector<Loop>& loops, int64_t elements, Word* to) {
  const int64_t step = loops.empty() ? 1 : loops.back().x;
  for_each_run(loops, 0, elements, [&](Offset at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) *to++ = from[at.x + i * step];
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
};

// How many rows are kept before each block; the last entry is how many there are in all.
std::vector<int64_t> block_starts(const MaskBytes& mask, int64_t block) {
  const int64_t blocks = ceil_div(mask.rows, block);
  std::vector<int64_t> starts(blocks + 1, 0);
  parallel(blocks, block, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min((b + 1) * block, mask.rows);
      int64_t kept = 0;
      for (int64_t i = b * block; i < last; ++i) kept += mask.data[i] != 0;
      starts[b + 1] = kept;
    }
  });
  for (int64_t b = 0; b < blocks; ++b) starts[b + 1] += starts[b];
  return starts;
}

// Calls run(kept, first, count) for each stretch of rows in [begin, end) that are all kept or all dropped.
template <class Run>
void for_each_stretch(const uint8_t* mask, int64_t begin, int64_t end, const Run& run) {
  while (begin < end) {
    const bool kept = mask[begin] != 0;
    int64_t stop = begin + 1;
    while (stop < end && (mask[stop] != 0) == kept) ++stop;
    run(kept, begin, stop - begin);
    begin = stop;
  }
}

// Where the rows of a tensor are: rows that touch are moved as one piece.
template <class Word>
struct Rows {
  const Word* data;
  std::vector<Loop> lead;
  std::vector<Loop> row;
  int64_t elements;  // in a row
  bool touching;     // the whole tensor is contiguous
  bool solid;        // each row is

  Rows(const void* bytes, std::vector<Loop> lead_loops, std::vector<Loop> row_loops, int64_t row_elements, int64_t count)
      : data(static_cast<const Word*>(bytes)), lead(std::move(lead_loops)), row(std::move(row_loops)), elements(row_elements) {
    solid = is_contiguous(row);
    touching = solid && (count <= 1 || lead.empty() || (lead.size() == 1 && lead[0].x == elements));
  }

  void copy(int64_t first, int64_t count, Word* to) const {
    if (touching) {
      std::memcpy(to, data + first * elements, count * elements * sizeof(Word));
      return;
    }
    for (int64_t i = 0; i < count; ++i, to += elements) {
      const Word* from = data + offset_of(lead, first + i).x;
      if (solid)
        std::memcpy(to, from, elements * sizeof(Word));
      else
        gather_row(from, row, elements, to);
    }
  }
};

template <class Word>
void pack_words(const Rows<Word>& x, const MaskBytes& mask, const std::vector<int64_t>& starts, Word* out) {
  const int64_t block = block_rows(x.elements);
  parallel(static_cast<int64_t>(starts.size()) - 1, block * x.elements, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min((b + 1) * block, mask.rows);
      Word* to = out + starts[b] * x.elements;
      if (x.elements == 1 && x.touching) {
        // Single elements: no branch, since a random mask would mispredict every other one. Stays within the block's
        // own places but for one write past its end, so the last element of a block is written by itself.
        Word* const stop = out + starts[b + 1];
        for (int64_t i = b * block; i < last && to < stop; ++i) {
          *to = x.data[i];
          to += mask.data[i] != 0;
        }
        continue;
      }
      for_each_stretch(mask.data, b * block, last, [&](bool kept, int64_t first, int64_t count) {
        if (!kept) return;
        x.copy(first, count, to);
        to += count * x.elements;
      });
    }
  });
}

template <class Word>
void unpack_words(const Word* values, const MaskBytes& mask, const std::vector<int64_t>& starts, const Rows<Word>& other,
                  bool constant, Word* out) {
  const int64_t elements = other.elements;
  const int64_t block = block_rows(elements);
  parallel(static_cast<int64_t>(starts.size()) - 1, block * elements, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Word* from = values + starts[b] * elements;
      const int64_t last = std::min((b + 1) * block, mask.rows);
      if (elements == 1 && constant) {
        // Single elements: no branch here either. What is read ahead of its place is the block's own, or the next to
        // come, until none is left; then the rest of the block is dropped.
        const Word* const stop = values + starts[b + 1];
        int64_t i = b * block;
        for (; i < last && from < stop; ++i) {
          const bool kept = mask.data[i] != 0;
          out[i] = kept ? *from : *other.data;
          from += kept;
        }
        std::fill_n(out + i, last - i, *other.data);
        continue;
      }
      for_each_stretch(mask.data, b * block, last, [&](bool kept, int64_t first, int64_t count) {
        Word* to = out + first * elements;
        if (kept) {
          std::memcpy(to, from, count * elements * sizeof(Word));
          from += count * elements;
        } else if (constant) {
          std::fill_n(to, count * elements, *other.data);
        } else {
          other.copy(first, count, to);
        }
      });
    }
  });
}

struct Word16 {
  uint64_t low, high;
};

// Calls f with a null pointer to the word of this many bytes.
template <class F>
void with_word(size_t bytes, const F& f) {
  switch (bytes) {
    case 1: return f(static_cast<uint8_t*>(nullptr));
    case 2: return f(static_cast<uint16_t*>(nullptr));
    case 4: return f(static_cast<uint32_t*>(nullptr));
    case 8: return f(static_cast<uint64_t*>(nullptr));
    default: return f(static_cast<Word16*>(nullptr));
  }
}

Tensor pack_rows(const Tensor& x, const Tensor& mask) {
  const MaskBytes bytes(mask);
  std::vector<int64_t> sizes{0};
  int64_t elements = 1;
  for (int64_t d = mask.dim(); d < x.dim(); ++d) {
    sizes.push_back(x.size(d));
    elements *= x.size(d);
  }
  const auto starts = block_starts(bytes, block_rows(elements));
  sizes[0] = starts.back();
  Tensor out = empty_cpu(sizes, x.scalar_type());
  with_word(x.element_size(), [&](auto* word) {
    using Word = std::remove_pointer_t<decltype(word)>;
    const Rows<Word> rows(x.const_data_ptr(), loops_of(x, 0, mask.dim()), loops_of(x, mask.dim(), x.dim()), elements, bytes.rows);
    if (elements > 0) pack_words(rows, bytes, starts, static_cast<Word*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor unpack_rows(const Tensor& values, const Tensor& mask, const Tensor& other) {
  const MaskBytes bytes(mask);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < mask.dim(); ++d) sizes.push_back(mask.size(d));
  int64_t elements = 1;
  for (int64_t d = 1; d < values.dim(); ++d) {
    sizes.push_back(values.size(d));
    elements *= values.size(d);
  }
  const auto starts = block_starts(bytes, block_rows(elements));
  STD_TORCH_CHECK(values.size(0) >= starts.back(), "maskwise: unpack was called with fewer rows than the mask keeps");
  Tensor out = empty_cpu(sizes, values.scalar_type());
  with_word(values.element_size(), [&](auto* word) {
    using Word = std::remove_pointer_t<decltype(word)>;
    const size_t lead = mask.dim();
    const Rows<Word> rows(other.const_data_ptr(), broadcast_loops(other, sizes, 0, lead),
                          broadcast_loops(other, sizes, lead, sizes.size()), elements, bytes.rows);
    if (elements > 0)
      unpack_words(static_cast<const Word*>(values.const_data_ptr()), bytes, starts, rows, other.numel() == 1,
                   static_cast<Word*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace maskwise

STABLE_TORCH_LIBRARY_IMPL(maskwise, CPU, m) {
  m.impl("pack_rows", TORCH_BOX(&maskwise::pack_rows));
  m.impl("unpack_rows", TORCH_BOX(&maskwise::unpack_rows));
}
