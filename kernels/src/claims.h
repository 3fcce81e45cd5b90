// How the threads of a pass share out an operation's items: each goes through a share of its own, and then helps the others.
#ifndef OUTRIDER_SRC_CLAIMS_H
#define OUTRIDER_SRC_CLAIMS_H

#include <stdint.h>

#include <atomic>
#include <vector>

namespace outrider {

// How many items of each thread's share of every operation are taken. The counters of one share lie in lines of memory that those
// of no other lie in: a line that cores write in turn takes as long as memory does where they do not share a cache.
class Claims {
 public:
  void resize(size_t operations, int threads) {
    threads_ = threads;
    lines_ = operations / kCounters + 1;
    counters_ = std::vector<Line>(lines_ * static_cast<size_t>(threads));
  }
  void clear() {
    for (Line &line : counters_)
      for (std::atomic<int64_t> &taken : line.taken) taken.store(0, std::memory_order_relaxed);
  }

  // The next of `count` items, of which every thread has an even share, or -1 behind the last. *owner says whose share it is of,
  // and is the thread itself at first. The first `own` items of a share are its owner's without a claim.
  int64_t next(size_t operation, int64_t count, int thread, int *owner, int64_t own = 0) {
    do {
      const int64_t first = count * *owner / threads_ + own, end = count * (*owner + 1) / threads_;
      const int64_t item = take(operation, *owner, end - first);
      if (item >= 0) return first + item;
      *owner = (*owner + 1) % threads_;
    } while (*owner != thread);
    return -1;
  }

 private:
  // The next of `count` items of an owner's share, counted from its first, or -1 behind the last.
  int64_t take(size_t operation, int owner, int64_t count) {
    Line &line = counters_[static_cast<size_t>(owner) * lines_ + operation / kCounters];
    std::atomic<int64_t> &taken = line.taken[operation % kCounters];
    // Whoever only looks takes the line from nobody.
    if (taken.load(std::memory_order_relaxed) >= count) return -1;
    const int64_t item = taken.fetch_add(1, std::memory_order_relaxed);
    return item < count ? item : -1;
  }

  static constexpr size_t kCounters = 64 / sizeof(std::atomic<int64_t>);
  struct alignas(64) Line {
    std::atomic<int64_t> taken[kCounters] = {};
  };

  int threads_ = 0;
  size_t lines_ = 0;            // of one share
  std::vector<Line> counters_;  // [threads][lines]
};

}  // namespace outrider

#endif
