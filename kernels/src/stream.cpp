// How fast memory can be read: what every figure of a decoder is measured against.
#include "outrider_kernels.h"

#include <cstring>

namespace {

// Two streams, each asked for 1 KB ahead, were the fastest of one to eight streams and of 0 to 8 KB (docs/measurements.md): the
// processor's own prefetching stops at the end of every page.
constexpr int kStreams = 2;
constexpr int64_t kAhead = 1024;
constexpr int64_t kLine = 64;

}  // namespace

uint64_t outrider_stream_read(const void *data, int64_t bytes) {
  // Independent sums, so that the loop waits for memory and for nothing else; what does not fill a step is left out.
  constexpr int kSums = kLine / sizeof(uint64_t);
  const char *from = static_cast<const char *>(data);
  const int64_t part = bytes / kStreams / kLine * kLine;
  uint64_t sums[kStreams][kSums] = {};
  for (int64_t offset = 0; offset < part; offset += kLine) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const char *at = from + stream * part + offset;
      // Asking for what lies beyond the end does no harm.
      __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(at) + kAhead));
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
