#include "memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

namespace outrider {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Interleaves pages over the NUMA nodes of a process that is bound to several: its threads run on all of these nodes, and each may work
// on any tile. First touch would place pages on the nodes where the loading threads happened to run. Best effort: where the system
// refuses (containers may), the memory is used as it is.
void interleave(void *memory, size_t bytes) {
  constexpr int kWordBits = 8 * sizeof(unsigned long), kWords = 1024 / kWordBits;
  unsigned long nodes[kWords] = {};
  int mode = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &mode, nodes, kWords * kWordBits, nullptr, 0) != 0 || mode != MPOL_BIND) return;
  int count = 0;
  for (const unsigned long word : nodes) count += __builtin_popcountl(word);
  if (count > 1) syscall(SYS_mbind, memory, bytes, MPOL_INTERLEAVE, nodes, kWords * kWordBits, 0);
}

}  // namespace

void *allocate_pages(int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const int64_t size = round_up(bytes, kHugePage);
  // One huge page more than needed is mapped; the parts before and after the aligned range are unmapped again.
  char *mapped = static_cast<char *>(mmap(nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (mapped == MAP_FAILED) return nullptr;
  const int64_t before = round_up(reinterpret_cast<int64_t>(mapped), kHugePage) - reinterpret_cast<int64_t>(mapped);
  if (before > 0) munmap(mapped, static_cast<size_t>(before));
  if (before < kHugePage) munmap(mapped + before + size, static_cast<size_t>(kHugePage - before));
  madvise(mapped + before, static_cast<size_t>(size), MADV_HUGEPAGE);
  interleave(mapped + before, static_cast<size_t>(size));
  return mapped + before;
}

void free_pages(void *memory, int64_t bytes) {
  if (memory) munmap(memory, static_cast<size_t>(round_up(bytes, kHugePage)));
}

void touch_pages(void *memory, int64_t bytes) {
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;
#endif
  // Best effort: where an older kernel refuses, pages are allocated at first use.
  if (memory) madvise(memory, static_cast<size_t>(bytes), MADV_POPULATE_WRITE);
}

bool Scratch::reserve(int64_t bytes) {
  if (bytes <= bytes_) return true;
  // A quarter more than requested, so that slowly growing batches do not allocate each time.
  const int64_t wanted = bytes + bytes / 4;
  void *grown = allocate_pages(wanted);
  if (!grown) return false;
  free_pages(memory_, bytes_);
  memory_ = grown;
  bytes_ = wanted;
  return true;
}

}  // namespace outrider
