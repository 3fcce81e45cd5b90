// A thread pool: all threads run the same function, which may contain barriers.
#ifndef OUTRIDER_SRC_POOL_H
#define OUTRIDER_SRC_POOL_H

#include <stdint.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace outrider {

// A waiting thread spins for a few microseconds and then sleeps in the kernel, so that a second engine can use the same cores. The
// calling thread is thread 0 and is pinned to the first core. Otherwise the kernel might wake it on the core of another thread of the
// pool, and all threads would wait for these two.
class Pool {
 public:
  Pool(int threads, const int32_t *cores, int spin_microseconds);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }
  // Whether this process is a fork of the one whose threads these are: a fork has only the thread that called it.
  bool lost_threads() const;
  // Runs job(thread) on every thread and returns when all are done.
  void run(const std::function<void(int)> &job);
  // A barrier for all threads of the running job.
  void barrier() { meet(spin_); }

 private:
  void work(int thread);
  void meet(int64_t spin);
  // Counts a thread as arrived. The last one releases the others and gets true.
  bool arrive();
  void keep_to_core(int thread) const;

  const int threads_;
  const int64_t spin_;
  const std::vector<int32_t> cores_;
  // Unique within the process, so that a thread can tell whether it called this pool last (and is pinned to its core).
  const uint64_t number_;
  const int32_t process_;
  const std::function<void(int)> *job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::vector<std::thread> workers_;
};

}  // namespace outrider

#endif
