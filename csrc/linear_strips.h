// How the work of a sparse product is cut: the batch into packed strips, outputs into chunks whose sums stay in the first
// cache. Included once, by linear.cpp, after the kernels of every SIMD level.
#pragma once

#include <atomic>

namespace maskwise {

// Strips that threads share are made for as much of the batch as fits here, so that scratch does not grow with the batch.
constexpr int64_t kPacked = int64_t{1} << 19;

// Runs body(worker, task) for every task in [0, n), each worker taking the next as it finishes one: a core that other
// programs slow down does not keep the rest waiting.
template <class Body>
void parallel_tasks(int64_t workers, int64_t n, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task = next++; task < n; task = next++) body(worker, task);
  };
  if (workers <= 1)
    work(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, work);
}

inline int64_t threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// The batch in strips of T rows, each packed into a tile of `width` columns.
struct Strips {
  int64_t batch, size, width;

  int64_t count() const { return ceil_div(batch, size); }
  int64_t rows(int64_t strip) const { return std::min(size, batch - strip * size); }
  int64_t tile() const { return width * size; }
  int64_t at_once() const { return std::min(count(), std::max<int64_t>(kPacked / std::max<int64_t>(1, tile()), 1)); }
  Tensor memory(int64_t tiles) const { return empty_cpu({std::max<int64_t>(1, tiles * tile())}, ScalarType::Float); }
};

// Packs strips [first, first + count), one tile after the other, by all threads: pack(strip, from, to, tile) fills
// columns [from, to) of one.
template <class Pack>
void pack_strips(const Strips& strips, int64_t first, int64_t count, float* tiles, const Pack& pack) {
  constexpr int64_t kColumns = 128;
  const int64_t pieces = ceil_div(strips.width, kColumns);
  parallel(count * pieces, kColumns * strips.size, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t within = task / pieces, from = task % pieces * kColumns;
      pack(first + within, from, std::min(from + kColumns, strips.width), tiles + within * strips.tile());
    }
  });
}

// Columns [from, to) of a strip of x, turned on their side; what lies behind the last input is zero.
template <class S>
auto turned(const S* x, int64_t inputs, const Strips& strips) {
  return [x, inputs, strips](int64_t strip, int64_t from, int64_t to, float* tile) {
    const int64_t real = std::max(from, std::min(to, inputs));
    MASKWISE_AT_ISA(pack_tile<S>(x + strip * strips.size * inputs, inputs, strips.rows(strip), from, real, strips.size, tile));
    std::fill(tile + real * strips.size, tile + to * strips.size, 0.0f);
  };
}

// The elements of work that a task over a share of all weights is, for the choice of how many threads to wake.
inline int64_t share(int64_t weights, int64_t tasks, int64_t strip) {
  return std::max<int64_t>(1, weights / std::max<int64_t>(1, tasks)) * strip / 4 + 1;
}

// Runs finish(strip, tile, chunk) for every strip and every chunk of outputs. With many strips each thread packs its
// own, which is then in its own cache; with few, all threads pack together and share out the outputs.
template <class Pack, class Finish>
void strip_product(const Strips& strips, int64_t chunks, int64_t weights, const Pack& pack, const Finish& finish) {
  const int64_t workers = threads(), count = strips.count();
  if (count >= 4 * workers) {
    Tensor memory = strips.memory(workers);
    auto* tiles = static_cast<float*>(memory.mutable_data_ptr());
    parallel_tasks(weights * strips.batch / 4 < kGrain ? 1 : workers, count, [&](int64_t worker, int64_t s) {
      float* tile = tiles + worker * strips.tile();
      pack(s, 0, strips.width, tile);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) finish(s, tile, chunk);
    });
    return;
  }
  const int64_t step = strips.at_once();
  Tensor memory = strips.memory(step);
  auto* tiles = static_cast<float*>(memory.mutable_data_ptr());
  for (int64_t first = 0; first < count; first += step) {
    const int64_t now = std::min(step, count - first);
    pack_strips(strips, first, now, tiles, pack);
    parallel(now * chunks, share(weights, chunks, strips.size), [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task)
        finish(first + task / chunks, tiles + task / chunks * strips.tile(), task % chunks);
    });
  }
}

// The product by sums that are turned on their side: walk(tile, begin, end, sums) makes those of outputs [begin, end), T
// each, where begin is a multiple of `chunk`.
template <class S, class Walk>
void turned_product(const S* x, int64_t inputs, const Strips& strips, int64_t outputs, int64_t chunk, int64_t weights,
                    const float* bias, S* y, const Walk& walk) {
  const auto finish = [&](int64_t s, const float* tile, int64_t task) {
    alignas(64) float sums[kSums];
    const int64_t begin = task * chunk, end = std::min(begin + chunk, outputs);
    walk(tile, begin, end, sums);
    MASKWISE_AT_ISA(unpack_tile<S>(sums, strips.size, strips.rows(s), end - begin,
                                   bias == nullptr ? nullptr : bias + begin, y + s * strips.size * outputs + begin, outputs));
  };
  strip_product(strips, ceil_div(outputs, chunk), weights, turned(x, inputs, strips), finish);
}

}  // namespace maskwise
