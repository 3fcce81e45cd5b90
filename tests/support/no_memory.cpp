// Preloaded (LD_PRELOAD), it lets one allocation of the kernels fail: C++'s, and the mappings that hold caches and buffers.
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <new>

namespace {

constexpr int kFrames = 32;
constexpr long kMost = 1 << 16;

// Whether a call is under way whose allocations are looked at.
std::atomic<bool> watched{false};
// The chain of calls of each allocation that was looked at, as one number.
uint64_t chains[kMost];
std::atomic<long> count{0};
// Of the allocations by one chain of calls: how many still succeed before one fails; negative: none fails.
uint64_t chosen = 0;
std::atomic<long> left{-1};

// Where the code of the kernels lies.
uintptr_t begin_of_kernels = 0, end_of_kernels = 0;

int find_kernels(dl_phdr_info *library, size_t, void *) {
  if (!strstr(library->dlpi_name, "outrider_kernels")) return 0;
  for (int number = 0; number < library->dlpi_phnum; ++number) {
    const auto &segment = library->dlpi_phdr[number];
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X)) continue;
    begin_of_kernels = library->dlpi_addr + segment.p_vaddr;
    end_of_kernels = begin_of_kernels + segment.p_memsz;
  }
  return 1;
}

// Of calls within the kernels: those around them are the interpreter's.
uint64_t chain_of_calls() {
  void *frames[kFrames];
  const int known = backtrace(frames, kFrames);
  uint64_t hash = 14695981039346656037u;
  for (int number = 0; number < known; ++number) {
    const auto frame = reinterpret_cast<uintptr_t>(frames[number]);
    if (frame >= begin_of_kernels && frame < end_of_kernels) hash = (hash ^ frame) * 1099511628211u;
  }
  return hash;
}

bool fails() {
  if (!watched.load()) return false;
  const uint64_t chain = chain_of_calls();
  if (const long number = count.fetch_add(1); number < kMost) chains[number] = chain;
  return chain == chosen && left.load() >= 0 && left.fetch_sub(1) == 0;
}

void *allocate(size_t bytes, size_t alignment) {
  if (fails()) return nullptr;
  void *memory = nullptr;
  return posix_memalign(&memory, alignment, bytes ? bytes : 1) == 0 ? memory : nullptr;
}

void *or_throw(void *memory) {
  if (!memory) throw std::bad_alloc();
  return memory;
}

constexpr size_t kUsual = alignof(max_align_t);

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void no_memory_watch(int whether) {
  void *frames[1];
  // The first call of backtrace loads a library, which takes memory.
  if (!end_of_kernels && backtrace(frames, 1) && !dl_iterate_phdr(find_kernels, nullptr)) abort();
  watched.store(whether);
}
// Of the allocations by this chain of calls the one after the next `succeeding` fails, once; negative: none does. Counting
// begins anew.
__attribute__((visibility("default"))) void no_memory_after(uint64_t chain, long succeeding) {
  chosen = chain;
  left.store(succeeding);
  count.store(0);
}
// How many of those allocations still succeed before the one that is to fail; negative: it has failed, or none is to.
__attribute__((visibility("default"))) long no_memory_left() { return left.load(); }
__attribute__((visibility("default"))) long no_memory_count() { return count.load(); }
__attribute__((visibility("default"))) uint64_t no_memory_chain(long number) { return chains[number]; }

__attribute__((visibility("default"))) void *mmap(void *address, size_t bytes, int protection, int flags, int file,
                                                  off_t offset) noexcept {
  using Map = void *(*)(void *, size_t, int, int, int, off_t);
  static const Map next = reinterpret_cast<Map>(dlsym(RTLD_NEXT, "mmap"));
  if (!fails()) return next(address, bytes, protection, flags, file, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
}

void *operator new(size_t bytes) { return or_throw(allocate(bytes, kUsual)); }
void *operator new[](size_t bytes) { return or_throw(allocate(bytes, kUsual)); }
void *operator new(size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate(bytes, static_cast<size_t>(alignment)));
}
void *operator new[](size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate(bytes, static_cast<size_t>(alignment)));
}
void *operator new(size_t bytes, const std::nothrow_t &) noexcept { return allocate(bytes, kUsual); }
void *operator new[](size_t bytes, const std::nothrow_t &) noexcept { return allocate(bytes, kUsual); }
void operator delete(void *memory) noexcept { free(memory); }
void operator delete[](void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }
void operator delete[](void *memory, size_t) noexcept { free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { free(memory); }
void operator delete[](void *memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void *memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete[](void *memory, size_t, std::align_val_t) noexcept { free(memory); }
