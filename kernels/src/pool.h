// Threads that run one function together, with barriers inside it.
#ifndef OUTRIDER_SRC_POOL_H
#define OUTRIDER_SRC_POOL_H

#include <stdint.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace outrider {

// A waiting thread spins for a few microseconds and then sleeps in the kernel, so that a second engine on the same cores gets
// them. The calling thread is thread 0, and is kept to the first of the cores too: left alone, the kernel may
// wake it beside another thread of the pool, and all of them wait for these two.
class Pool {
 public:
  Pool(int threads, const int32_t *cores, int spin_microseconds);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }
  // Runs job(thread) on every thread and returns when all are done.
  void run(const std::function<void(int)> &job);
  // All threads of the running job meet here.
  void barrier() { meet(spin_); }

 private:
  void work(int thread);
  void meet(int64_t spin);
  // True for the last of all threads, by which the others go on.
  bool arrive();
  void keep_to_core(int thread) const;

  const int threads_;
  const int64_t spin_;
  const std::vector<int32_t> cores_;
  // No two pools of a process have the same, so a thread knows whether it has called this one before.
  const uint64_t number_;
  const std::function<void(int)> *job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::vector<std::thread> workers_;
};

}  // namespace outrider

#endif
