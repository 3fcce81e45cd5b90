// Measures memory bandwidth, the roofline of decoding.
#include "outrider_kernels.h"

#include <cstring>

namespace {

constexpr int64_t kLine = 64;

// The distance of prefetches, in bytes. Of 1 to 8 streams and 0 to 8 KB, two streams and 1 KB were the fastest where the hardware
// prefetcher stops at the end of every page. Zen 5 reads one stream, prefetched as far ahead as a matrix (linear.inc), up to 1.6 times
// as fast (docs/lab/2026-11-22-two-states-and-attention.md).
constexpr int64_t kAheadOfOne = 8704, kAheadOfTwo = 1024;

template <int STREAMS, int64_t AHEAD> uint64_t read(const void *data, int64_t bytes) {
  // Independent sums, so that the loop waits only for memory. Bytes that do not fill a line of each stream are left out.
  constexpr int kSums = kLine / sizeof(uint64_t);
  const char *from = static_cast<const char *>(data);
  const int64_t part = bytes / STREAMS / kLine * kLine;
  uint64_t sums[STREAMS][kSums] = {};
  for (int64_t offset = 0; offset < part; offset += kLine) {
    for (int stream = 0; stream < STREAMS; ++stream) {
      const char *at = from + stream * part + offset;
      // Prefetching beyond the end is harmless. The address is an integer, since a pointer beyond the end would be undefined behaviour.
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(at) + AHEAD));
      uint64_t words[kSums];
      std::memcpy(words, at, sizeof(words));
      for (int i = 0; i < kSums; ++i) sums[stream][i] += words[i];
    }
  }
  uint64_t total = 0;
  for (const auto &stream : sums)
    for (const uint64_t sum : stream) total += sum;
  return total;
}

}  // namespace

uint64_t outrider_stream_read(const void *data, int64_t bytes, int32_t streams) {
  return streams == 1 ? read<1, kAheadOfOne>(data, bytes) : read<2, kAheadOfTwo>(data, bytes);
}
