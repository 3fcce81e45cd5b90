#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <exception>
#include <stdexcept>
#include <string>

namespace outrider {
namespace {

// How long workers spin between jobs: enough to catch a call that follows at once, without taking the cores from Python's work between
// passes.
constexpr int64_t kIdleSpinMicroseconds = 5;

std::atomic<uint64_t> pools_so_far{0};

int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t> *word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads, const int32_t *cores, int spin_microseconds)
    : threads_(threads),
      spin_(spin_microseconds < 0 ? 50 : spin_microseconds),
      cores_(cores ? std::vector<int32_t>(cores, cores + threads) : std::vector<int32_t>()),
      number_(++pools_so_far),
      process_(getpid()) {
  workers_.reserve(static_cast<size_t>(threads));
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::exception &error) {
    // The threads that were started wait at the barrier: it is passed on behalf of the missing ones, and they end.
    const int begun = static_cast<int>(workers_.size()) + 1;
    stopping_ = true;
    for (int thread = begun; thread <= threads; ++thread) arrive();
    for (std::thread &worker : workers_) worker.join();
    throw std::runtime_error(
        "only " + std::to_string(begun) + " of " + std::to_string(threads) + " threads could be started (" + error.what() +
        "): raise the limit of processes or of memory (ulimit -u, ulimit -v, pids.max), or use fewer cores");
  }
}

bool Pool::lost_threads() const { return threads_ > 1 && getpid() != process_; }

Pool::~Pool() {
  if (lost_threads()) {
    // There is nothing to wait for; and what cannot be joined may not be destroyed.
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  stopping_ = true;
  meet(0);
  for (std::thread &worker : workers_) worker.join();
}

void Pool::keep_to_core(int thread) const {
  if (cores_.empty() || cores_[static_cast<size_t>(thread)] < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cores_[static_cast<size_t>(thread)], &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

void Pool::run(const std::function<void(int)> &job) {
  thread_local uint64_t called_before = 0;
  if (called_before != number_) {
    keep_to_core(0);
    called_before = number_;
  }
  job_ = &job;
  meet(spin_);
  job(0);
  meet(spin_);
}

void Pool::work(int thread) {
  keep_to_core(thread);
  for (;;) {
    meet(kIdleSpinMicroseconds);
    if (stopping_) return;
    (*job_)(thread);
    meet(spin_);
  }
}

bool Pool::arrive() {
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != threads_) return false;
  arrived_.store(0, std::memory_order_relaxed);
  phase_.fetch_add(1);
  if (sleepers_.load() > 0) futex(&phase_, FUTEX_WAKE, INT_MAX);
  return true;
}

void Pool::meet(int64_t spin) {
  if (threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrive()) return;
  int64_t deadline = 0;
  for (int tries = 1; phase_.load(std::memory_order_acquire) == phase; ++tries) {
    relax();
    if (tries % 64) continue;
    const int64_t now = now_nanoseconds();
    if (!deadline) deadline = now + spin * 1000;
    if (now < deadline) continue;
    sleepers_.fetch_add(1);
    while (phase_.load() == phase) futex(&phase_, FUTEX_WAIT, phase);
    sleepers_.fetch_sub(1);
    return;
  }
}

}  // namespace outrider
