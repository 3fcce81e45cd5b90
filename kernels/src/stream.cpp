// How fast memory can be read: what every figure of a decoder is measured against.
#include "outrider_kernels.h"

#include <cstring>

uint64_t outrider_stream_read(const void *data, int64_t bytes) {
  // Independent sums, so that the loop waits for memory and for nothing else; what does not fill a step is left out.
  constexpr int kSums = 32;
  const char *from = static_cast<const char *>(data);
  uint64_t sums[kSums] = {};
  for (int64_t offset = 0; offset + static_cast<int64_t>(sizeof(sums)) <= bytes; offset += sizeof(sums)) {
    uint64_t words[kSums];
    std::memcpy(words, from + offset, sizeof(words));
    for (int i = 0; i < kSums; ++i) sums[i] += words[i];
  }
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}
