// Work stealing between the threads of a pass: each thread takes the items of its own share of an operation, then those left in others'.
#ifndef OUTRIDER_SRC_CLAIMS_H
#define OUTRIDER_SRC_CLAIMS_H

#include <stdint.h>

#include <atomic>
#include <vector>

namespace outrider {

// Counters of the items taken from each thread's share of every operation. Counters of different shares never lie in the same cache
// line: a line that two cores write in turn costs as much as a memory access if the cores share no cache.
class Claims {
 public:
  Claims() = default;
  Claims(size_t operations, int threads)
      : threads_(threads), lines_(operations / kCounters + 1), counters_(lines_ * static_cast<size_t>(threads)) {}
  void clear() {
    for (Line &line : counters_)
      for (std::atomic<int64_t> &taken : line.taken) taken.store(0, std::memory_order_relaxed);
  }

  // Takes the next of `count` items, which are divided evenly into a share for each thread; -1 when none is left. *owner is the thread
  // whose share is being taken from; the caller initialises it to `thread`. The first `own` items of each share are left out: the
  // owner takes them without a claim.
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
  // Takes the next of the `count` items of an owner's share; -1 when none is left.
  int64_t take(size_t operation, int owner, int64_t count) {
    Line &line = counters_[static_cast<size_t>(owner) * lines_ + operation / kCounters];
    std::atomic<int64_t> &taken = line.taken[operation % kCounters];
    // A load first: it leaves the line shared, where fetch_add would take it away from the other cores.
    if (taken.load(std::memory_order_relaxed) >= count) return -1;
    const int64_t item = taken.fetch_add(1, std::memory_order_relaxed);
    return item < count ? item : -1;
  }

  static constexpr size_t kCounters = 64 / sizeof(std::atomic<int64_t>);
  struct alignas(64) Line {
    std::atomic<int64_t> taken[kCounters] = {};
  };

  int threads_ = 0;
  size_t lines_ = 0;            // for each share
  std::vector<Line> counters_;  // [threads][lines]
};

}  // namespace outrider

#endif
