// The paged KV cache: reference-counted blocks of 32 tokens, each with the keys and values of all layers.
#ifndef OUTRIDER_SRC_CACHE_H
#define OUTRIDER_SRC_CACHE_H

#include <stdint.h>

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace outrider {

// Offsets of one layer's heads within a block: the keys of all heads, then the values of all heads. So attention over several heads
// reads contiguous memory; separate areas in pages of their own would each need an address translation.
struct CacheLayer {
  int64_t keys = 0;                        // of the first head
  int64_t values = 0;                      // likewise
  int64_t key_bytes = 0, value_bytes = 0;  // bytes of one head
};

class Cache {
 public:
  Cache(std::vector<CacheLayer> layers, int64_t block_bytes, int64_t limit_bytes);
  ~Cache();
  Cache(const Cache &) = delete;
  Cache &operator=(const Cache &) = delete;

  // Returns a block with one reference; or -1, with the status in *status.
  int take(int32_t *status);
  // Grows the cache to `blocks` blocks, kMostReserved bytes at most, and appends their memory to *memory for the caller to touch.
  int32_t reserve(int64_t blocks, std::vector<Pages> *memory);
  void retain(int block) { ++references_[static_cast<size_t>(block)]; }
  void release(int block);
  bool shared(int block) const { return references_[static_cast<size_t>(block)] > 1; }
  char *data(int block) const { return data_[static_cast<size_t>(block)]; }
  const CacheLayer &layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  bool empty() const { return layers_.empty(); }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t bytes_held() const { return bytes_held_; }
  int64_t blocks_used() const { return static_cast<int64_t>(data_.size() - free_.size()); }

 private:
  int32_t grow();

  std::vector<CacheLayer> layers_;
  int64_t block_bytes_, limit_bytes_, bytes_held_ = 0;
  std::vector<Pages> slabs_;
  std::vector<char *> data_;
  std::vector<int32_t> references_;
  std::vector<int> free_;
};

}  // namespace outrider

#endif
