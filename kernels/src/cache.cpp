#include "cache.h"

#include <algorithm>
#include <utility>

#include "message.h"

namespace outrider {
namespace {
// Memory is allocated in slabs of about this size.
constexpr int64_t kSlabBytes = int64_t{64} << 20;
// The most that reserve() allocates: enough for the first tokens of the rows, whatever number of rows is asked for.
constexpr int64_t kMostReserved = int64_t{2} << 30;

template <typename T> void make_room(std::vector<T> *list, size_t count) {
  if (list->capacity() < count) list->reserve(std::max(count, 2 * list->capacity()));
}

}  // namespace

Cache::Cache(std::vector<CacheLayer> layers, int64_t block_bytes, int64_t limit_bytes)
    : layers_(std::move(layers)), block_bytes_(block_bytes), limit_bytes_(limit_bytes) {}

Cache::~Cache() {
  for (const Pages &slab : slabs_) free_pages(slab.memory, slab.bytes);
}

int32_t Cache::grow() {
  int64_t blocks = std::max<int64_t>(1, kSlabBytes / block_bytes_);
  if (limit_bytes_ > 0) blocks = std::min(blocks, (limit_bytes_ - bytes_held_) / block_bytes_);
  if (blocks < 1)
    return fail(OUTRIDER_CACHE_FULL, "the cache holds %lld bytes and may not grow beyond %lld",
                static_cast<long long>(bytes_held_), static_cast<long long>(limit_bytes_));
  // Room in all lists first: if memory runs out, the cache is as it was, and release() never needs any.
  const size_t count = data_.size() + static_cast<size_t>(blocks);
  make_room(&slabs_, slabs_.size() + 1);
  make_room(&data_, count);
  make_room(&references_, count);
  make_room(&free_, count);
  const int64_t bytes = blocks * block_bytes_;
  char *memory = static_cast<char *>(allocate_pages(bytes));
  if (!memory) return fail(OUTRIDER_NO_MEMORY, "no memory for %lld more bytes of cache", static_cast<long long>(bytes));
  slabs_.push_back({memory, bytes});
  bytes_held_ += bytes;
  // take() pops the last element. The new blocks are stored in descending order, so that the lowest is taken first: short jobs touch
  // little memory.
  free_.insert(free_.begin(), static_cast<size_t>(blocks), 0);
  for (int64_t i = 0; i < blocks; ++i) {
    free_[static_cast<size_t>(blocks - 1 - i)] = static_cast<int>(data_.size());
    data_.push_back(memory + i * block_bytes_);
  }
  references_.resize(data_.size(), 0);
  return OUTRIDER_OK;
}

int32_t Cache::reserve(int64_t blocks, std::vector<Pages> *memory) {
  blocks = std::min(blocks, kMostReserved / block_bytes_);
  if (limit_bytes_ > 0) blocks = std::min(blocks, limit_bytes_ / block_bytes_);
  while (static_cast<int64_t>(data_.size()) < blocks) {
    const int32_t status = grow();
    if (status != OUTRIDER_OK) return status;
  }
  int64_t left = blocks * block_bytes_;
  for (const Pages &slab : slabs_) {
    const int64_t bytes = std::min(left, slab.bytes);
    if (bytes > 0) memory->push_back({slab.memory, bytes});
    left -= bytes;
  }
  return OUTRIDER_OK;
}

int Cache::take(int32_t *status) {
  *status = OUTRIDER_OK;
  if (free_.empty()) {
    *status = grow();
    if (*status != OUTRIDER_OK) return -1;
  }
  const int block = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(block)] = 1;
  return block;
}

void Cache::release(int block) {
  if (--references_[static_cast<size_t>(block)] == 0) free_.push_back(block);
}

}  // namespace outrider
