// Preloaded (LD_PRELOAD), it lets one allocation of the kernels fail: C++'s, and the mappings that hold caches and buffers.
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <atomic>
#include <new>

namespace {

// How many allocations still succeed before one fails; negative: none fails, and all are counted.
std::atomic<long> left{-1};

bool fails() { return left.load() >= 0 && left.fetch_sub(1) == 0; }

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

// The allocation after the next `succeeding` fails, once; negative: none does.
__attribute__((visibility("default"))) void no_memory_after(long succeeding) { left.store(succeeding); }
// How many allocations still succeed before the one that is to fail; negative: it has failed, or none is to.
__attribute__((visibility("default"))) long no_memory_left() { return left.load(); }

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
