// The paged cache: blocks of 32 tokens, each with the keys and values of all layers, counted by reference.
#ifndef OUTRIDER_SRC_CACHE_H
#define OUTRIDER_SRC_CACHE_H

#include <stdint.h>

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace outrider {

// Where one layer's heads lie within a block: the keys of all, then the values of all. So a pass over several heads reads on and
// on, where areas of a page each would have to be looked up one by one.
struct CacheLayer {
  int64_t keys = 0;                        // where the first head's begin
  int64_t values = 0;                      // likewise
  int64_t key_bytes = 0, value_bytes = 0;  // of one head
};

class Cache {
 public:
  Cache(std::vector<CacheLayer> layers, int64_t block_bytes, int64_t limit_bytes);
  ~Cache();
  Cache(const Cache &) = delete;
  Cache &operator=(const Cache &) = delete;

  // A block with one reference, or -1 and the status in *status.
  int take(int32_t *status);
  // Where the first `blocks` blocks lie, of kMostReserved bytes at most: for whoever has their memory taken before the work.
  int32_t reserve(int64_t blocks, std::vector<Pages> *memory);
  void retain(int block) { ++references_[static_cast<size_t>(block)]; }
  void release(int block);
  bool shared(int block) const { return references_[static_cast<size_t>(block)] > 1; }
  char *data(int block) const { return data_[static_cast<size_t>(block)]; }
  const CacheLayer &layer(int index) const { return layers_[static_cast<size_t>(index)]; }
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
