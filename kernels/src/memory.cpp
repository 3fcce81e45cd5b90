#include "memory.h"

#include <sys/mman.h>

#include "kernels.h"

namespace outrider {
namespace {
constexpr int64_t kHugePage = int64_t{2} << 20;
}

void *allocate_pages(int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const int64_t size = round_up(bytes, kHugePage);
  // One page more than needed is mapped, and what lies before and after the aligned part is given back.
  char *mapped = static_cast<char *>(mmap(nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (mapped == MAP_FAILED) return nullptr;
  const int64_t before = round_up(reinterpret_cast<int64_t>(mapped), kHugePage) - reinterpret_cast<int64_t>(mapped);
  if (before > 0) munmap(mapped, static_cast<size_t>(before));
  if (before < kHugePage) munmap(mapped + before + size, static_cast<size_t>(kHugePage - before));
  madvise(mapped + before, static_cast<size_t>(size), MADV_HUGEPAGE);
  return mapped + before;
}

void free_pages(void *memory, int64_t bytes) {
  if (memory) munmap(memory, static_cast<size_t>(round_up(bytes, kHugePage)));
}

bool Scratch::reserve(int64_t bytes) {
  if (bytes <= bytes_) return true;
  // A quarter more than asked for, so that slowly growing batches do not allocate every time.
  const int64_t wanted = bytes + bytes / 4;
  void *grown = allocate_pages(wanted);
  if (!grown) return false;
  free_pages(memory_, bytes_);
  memory_ = grown;
  bytes_ = wanted;
  return true;
}

}  // namespace outrider
