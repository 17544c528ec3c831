// Zeros that are not written: pages of fresh memory that nobody touches.
#pragma once

#include "common.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace maskwise {

// Whether a value is one number whose bytes are all 0; those of -0.0 are not.
inline bool is_zero(const Tensor& value) {
  if (value.numel() != 1) return false;
  const char* bytes = static_cast<const char*>(value.const_data_ptr());
  return std::all_of(bytes, bytes + value.element_size(), [](char byte) { return byte == 0; });
}

#if defined(__linux__)
// Whether one of three pages of [begin, end) is there. Those of memory that malloc has kept are; those of memory that is
// new to the process are not, until they are written.
inline bool is_resident(char* begin, char* end, uintptr_t page) {
  const auto pages = static_cast<uintptr_t>(end - begin) / page;
  for (const uintptr_t at : {uintptr_t{0}, pages / 2, pages - 1}) {
    unsigned char found = 1;
    if (mincore(begin + at * page, page, &found) != 0 || (found & 1) != 0) return true;
  }
  return false;
}
#endif

// Makes a fresh tensor read as zeros without writing it, where the system can: whole pages go back to it, and are zeros
// again until they are written. Returns whether it does; otherwise the tensor is as it was. `scattered` is
// whether little is written of each huge page: it takes small ones then, since pages are cleared as a whole.
inline bool zero_pages(const Tensor& fresh, bool scattered) {
#if defined(__linux__)
  // Up to that, memory may be some that malloc has kept, whose pages are there: to write zeros is faster. Below, it always
  // is.
  constexpr size_t kKeptByMalloc = size_t{1} << 25, kLeast = size_t{1} << 22;
  const size_t bytes = static_cast<size_t>(fresh.numel()) * fresh.element_size();
  if (bytes < kLeast) return false;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* data = static_cast<char*>(fresh.mutable_data_ptr());
  char* begin = data + (page - reinterpret_cast<uintptr_t>(data) % page) % page;
  char* end = data + bytes - (reinterpret_cast<uintptr_t>(data) + bytes) % page;
  if (bytes <= kKeptByMalloc && is_resident(begin, end, page)) return false;
  // An allocator may hand out memory that is not private, and locked pages stay: one byte shows it. The last page is seldom
  // a part of a huge one, which would be cleared as a whole.
  volatile char* probe = end - page;
  *probe = 1;
  if (madvise(begin, end - begin, MADV_DONTNEED) != 0 || *probe != 0) return false;
  if (scattered) (void)madvise(begin, end - begin, MADV_NOHUGEPAGE);
  std::memset(data, 0, begin - data);
  std::memset(end, 0, data + bytes - end);
  return true;
#else
  (void)fresh, (void)scattered;
  return false;
#endif
}

// Takes the pages of scattered memory that is about to be written, all at once rather than by a fault each.
inline void populate(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  // Only a wish: where the system does not know it, nothing changes.
  (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_POPULATE_WRITE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace maskwise
