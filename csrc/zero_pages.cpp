// Pages of fresh memory: which are new, and which thread writes to them.
#include "zero_pages.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace maskwise {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;

#if defined(__linux__)
size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// The small pages that lie within the memory of a tensor.
struct WholePages {
  char *data, *begin, *end;
  size_t bytes;

  explicit WholePages(const Tensor& tensor)
      : data(static_cast<char*>(tensor.mutable_data_ptr())),
        bytes(static_cast<size_t>(tensor.numel()) * tensor.element_size()) {
    const size_t page = page_size();
    begin = data + (page - reinterpret_cast<uintptr_t>(data) % page) % page;
    end = data + bytes - (reinterpret_cast<uintptr_t>(data) + bytes) % page;
  }

  // Whether none of three of them is there: then they are new to the process, and the system clears each when it is first
  // written. Those of memory that an allocator has kept are there, as malloc always does below kLeast.
  bool are_new() const {
    constexpr size_t kLeast = size_t{1} << 22;
    if (bytes < kLeast) return false;
    const size_t page = page_size(), count = static_cast<size_t>(end - begin) / page;
    for (const size_t at : {size_t{0}, count / 2, count - 1}) {
      unsigned char found = 1;
      // Tests have written to all of them.
      if (mincore(begin + at * page, page, &found) != 0 || (found & 1) != 0) return poisoned();
    }
    return true;
  }
};
#endif

bool are_new_pages(const Tensor& fresh) {
#if defined(__linux__)
  return WholePages(fresh).are_new();
#else
  (void)fresh;
  return false;
#endif
}

}  // namespace

bool zero_pages(const Tensor& fresh, bool scattered) {
#if defined(__linux__)
  const WholePages pages(fresh);
  // Where pages are there, to write zeros is faster.
  if (!pages.are_new()) return false;
  const auto size = static_cast<size_t>(pages.end - pages.begin);
  // An allocator may hand out memory that is not private, and locked pages stay: one byte shows it. The last page is seldom
  // a part of a huge one, which would be cleared as a whole.
  volatile char* probe = pages.end - page_size();
  *probe = 1;
  if (madvise(pages.begin, size, MADV_DONTNEED) != 0 || *probe != 0) return false;
  if (scattered) (void)madvise(pages.begin, size, MADV_NOHUGEPAGE);
  std::memset(pages.data, 0, pages.begin - pages.data);
  std::memset(pages.end, 0, pages.data + pages.bytes - pages.end);
  return true;
#else
  (void)fresh, (void)scattered;
  return false;
#endif
}

void populate(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page_size() * page_size();
  // Only a wish: where the system does not know it, nothing changes.
  (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_POPULATE_WRITE);
#else
  (void)data, (void)bytes;
#endif
}

FreshPages::FreshPages(const Tensor& result, bool wants_zeros, bool scattered)
    : data(static_cast<char*>(result.mutable_data_ptr())),
      bytes(result.numel() * static_cast<int64_t>(result.element_size())),
      scattered(scattered),
      zeros(wants_zeros && zero_pages(result, scattered)),
      is_new(zeros || are_new_pages(result)) {}

bool FreshPages::in_huge_pages() const { return is_new && !(zeros && scattered); }

// Nothing is written there yet.
void FreshPages::touch(int64_t at) const { *static_cast<volatile char*>(data + at) = 0; }

void FreshPages::deal(int64_t n, int64_t elements_each, int64_t each, const void* body,
                      void (*call)(const void* body, int64_t begin, int64_t end)) const {
  constexpr int64_t kChunks = 16;
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // Bytes of the first huge page that lie before the result.
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kHugePage);
  const int64_t pages = ceil_div(before + bytes, kHugePage);
  if (each == 0 || threads == 1 || pages < 2 * threads) {
    if (!zeros && threads > 1)
      maskwise::parallel(pages, kHugePage, [&](int64_t begin, int64_t end) {
        for (int64_t page = begin; page < end; ++page) touch(std::min(bytes, (page + 1) * kHugePage - before) - 1);
      });
    return parallel_uneven(n, elements_each, [&](int64_t begin, int64_t end) { call(body, begin, end); });
  }
  const auto start_of = [&](int64_t page) { return std::max<int64_t>(0, page * kHugePage - before); };
  // The first item that ends in a page.
  const auto first = [&](int64_t page) { return page >= pages ? n : std::min(n, start_of(page) / each); };
  const int64_t step = std::max<int64_t>(1, pages / (kChunks * threads));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t page; (page = next.fetch_add(step)) < pages;) {
      const int64_t begin = first(page), end = first(page + step);
      if (begin == end) continue;
      // The first item may begin in the page before, whose thread has done the same by now.
      touch(start_of(page));
      call(body, begin, end);
    }
  });
}

}  // namespace maskwise
