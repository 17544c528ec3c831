// Zeros that are not written: pages of fresh memory that nobody touches.
#pragma once

#include "common.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace maskwise {

// Makes a fresh tensor read as zeros without writing it, where the system can: whole pages go back to it, and are zeros
// again until they are written. Returns whether it does; otherwise the tensor is as it was. `scattered` is
// whether little is written of each huge page: it takes small ones then, since pages are cleared as a whole.
inline bool zero_pages(const Tensor& fresh, bool scattered) {
#if defined(__linux__)
  // Less than that may be memory that malloc has kept, whose pages are there: to write zeros is faster.
  constexpr size_t kKeptByMalloc = size_t{1} << 25;
  const size_t bytes = static_cast<size_t>(fresh.numel()) * fresh.element_size();
  if (bytes <= kKeptByMalloc) return false;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* data = static_cast<char*>(fresh.mutable_data_ptr());
  char* begin = data + (page - reinterpret_cast<uintptr_t>(data) % page) % page;
  char* end = data + bytes - (reinterpret_cast<uintptr_t>(data) + bytes) % page;
  // An allocator may hand out memory that is not private, and locked pages stay: one byte tells.
  volatile char* probe = begin;
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
