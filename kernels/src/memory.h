// Large, zeroed memory with huge pages asked for.
#ifndef OUTRIDER_SRC_MEMORY_H
#define OUTRIDER_SRC_MEMORY_H

#include <stdint.h>

#include <memory>

namespace outrider {

struct Pages {
  void *memory;
  int64_t bytes;
};

void *allocate_pages(int64_t bytes);
void free_pages(void *memory, int64_t bytes);
// Makes the system allocate these pages now. In a virtual machine whose memory is lent, a 2 MB page can take 5 ms at first touch.
void touch_pages(void *memory, int64_t bytes);

// Scratch memory that only grows. Growing discards its content.
class Scratch {
 public:
  ~Scratch() { free_pages(memory_, bytes_); }
  Scratch() = default;
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  bool reserve(int64_t bytes);
  void touch() const { touch_pages(memory_, bytes_); }
  template <typename T> T *as() const { return static_cast<T *>(memory_); }

 private:
  void *memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace outrider

#endif
