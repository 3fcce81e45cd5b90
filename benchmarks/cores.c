// How long a line of memory takes from one core to another and back, for cores.py.
#include <stdint.h>
#include <time.h>

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

static void take_turns(int64_t *line, int64_t first, int64_t turns) {
  for (int64_t turn = 0; turn < turns; ++turn, first += 2) {
    while (__atomic_load_n(line, __ATOMIC_ACQUIRE) != first) {
    }
    __atomic_store_n(line, first + 1, __ATOMIC_RELEASE);
  }
}

// Nanoseconds a round trip. Two threads call it with the same line, which holds 0, one as `number` 0 and one as 1. The first
// turns are not counted: until the other thread has come this one waits for it.
double round_trips(int64_t *line, int64_t number, int64_t uncounted, int64_t turns) {
  take_turns(line, number, uncounted);
  const double started = now();
  take_turns(line, number + 2 * uncounted, turns);
  return (now() - started) / (double)turns;
}
