// Results in fresh memory: zeros that are not written, in pages that nobody touches; and pages that are, each by one thread.
#pragma once

#include "common.h"

namespace maskwise {

// Whether a value is one number whose bytes are all 0; those of -0.0 are not.
inline bool is_zero(const Tensor& value) {
  if (value.numel() != 1) return false;
  const char* bytes = static_cast<const char*>(value.const_data_ptr());
  return std::all_of(bytes, bytes + value.element_size(), [](char byte) { return byte == 0; });
}

// Makes a fresh tensor read as zeros without writing it, where its pages are new to the process and the system can: pages
// go back to it, and are zeros again until they are written. Returns whether it does; otherwise the tensor is as it was.
// `scattered` is whether little is written of each huge page: it takes small ones then, since pages are cleared as a whole.
bool zero_pages(const Tensor& fresh, bool scattered);

// The memory of a result that is about to be written in full, but for the zeros that it has already.
class FreshPages {
 public:
  // `wants_zeros` is whether what is dropped is zeros; see zero_pages for `scattered`.
  FreshPages(const Tensor& result, bool wants_zeros, bool scattered = false);

  // Whether what is not written reads as zeros.
  bool are_zeros() const { return zeros; }
  // Whether the system has yet to clear the pages. It clears them in the caches: what is written there at once is fast,
  // and what is written past the caches is not.
  bool are_new() const { return is_new; }

  // parallel_uneven over n items, for each of which `each` bytes of the result are written, one after the other; 0 if they
  // lie otherwise. Two threads that met in a huge page would both clear it, and one of them for nothing: each gets whole
  // ones, and writes them while they are in its caches.
  template <class Body>
  void parallel(int64_t n, int64_t elements_each, int64_t each, const Body& body) const {
    if (!in_huge_pages()) return parallel_uneven(n, elements_each, body);
    deal(n, elements_each, each, &body,
         [](const void* self, int64_t begin, int64_t end) { (*static_cast<const Body*>(self))(begin, end); });
  }

 private:
  bool in_huge_pages() const;
  void deal(int64_t n, int64_t elements_each, int64_t each, const void* body,
            void (*call)(const void* body, int64_t begin, int64_t end)) const;
  void touch(int64_t at) const;

  char* data;
  int64_t bytes;
  bool scattered, zeros, is_new;
};

// Takes the pages of scattered memory that is about to be written, all at once rather than by a fault each.
void populate(char* data, int64_t bytes);

}  // namespace maskwise
