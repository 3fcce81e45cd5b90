// A pass of many rows is bound by arithmetic in matrix products, while memory is idle, and bound by memory in attention. If its feeds go
// through the program in two halves, one half's attention runs between the products of the other: each thread prefetches the keys and
// values of some heads into L2 while it multiplies, and computes their attention after a tile, once they have arrived. The price is that
// matrices are read twice. Measurements: docs/lab/2026-11-29-two-halves.md.
#include "pass_halves.h"

#include <algorithm>

namespace outrider {
namespace {

// Bytes of keys and values that a thread prefetches before it computes their attention; they share L2 with the tiles that are multiplied.
constexpr int64_t kAskedBytes = int64_t{128} << 10;
// The share of all keys and values that is prefetched during products; the rest is prefetched during attention (kLinesForLine). With a
// smaller share some heads are never prefetched, with a larger one products wait for memory.
constexpr double kShareBesideProducts = 0.8;
// With more queries of a head, attention is not bound by memory.
constexpr int64_t kMostQueriesOfHead = 32;
// Half of these tokens make a block of rows large enough to be multiplied as fast as several blocks.
constexpr int kFewestTokens = 16;
// Halves are tried if keys and values have at least a quarter of the matrices' bytes.
constexpr int64_t kBytesOverCache = 4;

}  // namespace

AttentionBeside::AttentionBeside(const Pass &pass, size_t index, const Part &part, int64_t steps, int thread)
    : pass_(pass),
      op_(pass.engine.ops[index]),
      part_(part),
      claimed_(pass.claimed(index, part)),
      thread_(thread),
      owner_(thread) {
  const CacheLayer &layer = pass.engine.cache->layer(op_.integer);
  // For one head: the most bytes and queries of a feed, and the bytes of all feeds.
  int64_t most_bytes = 1, most_queries = 1, bytes = 0;
  for (int i = part.first_feed; i < part.end_feed; ++i) {
    const FeedState &feed = pass.feeds[static_cast<size_t>(i)];
    const int64_t here = static_cast<int64_t>(feed.blocks.size()) * (layer.key_bytes + layer.value_bytes);
    most_bytes = std::max(most_bytes, here);
    bytes += here;
    most_queries = std::max(most_queries, int64_t{feed.count} * (op_.heads / op_.kv_heads));
  }
  heads_each_ = std::clamp<int64_t>(std::min(kAskedBytes / most_bytes, kMostQueries / most_queries), 1, op_.kv_heads);
  items_of_feed_ = (op_.kv_heads + heads_each_ - 1) / heads_each_;
  items_ = items_of_feed_ * (part.end_feed - part.first_feed);
  const double wanted =
      kShareBesideProducts * static_cast<double>(bytes) * op_.kv_heads / static_cast<double>(std::max<int64_t>(steps, 1));
  rate_ = static_cast<int>(std::min(wanted, double{PrefetchBeside::kMostRate}));
  claim();
}

const FeedState &AttentionBeside::feed_of(int64_t item) const {
  return pass_.feeds[static_cast<size_t>(part_.first_feed + item / items_of_feed_)];
}

int64_t AttentionBeside::end_head_of(int64_t item) const {
  return std::min<int64_t>(head_of(item) + heads_each_, op_.kv_heads);
}

void AttentionBeside::claim() {
  const CacheLayer &layer = pass_.engine.cache->layer(op_.integer);
  size_t areas = 0;
  int64_t bytes = 0;
  batch_->count = 0;
  batch_->whole = true;
  while (bytes < kAskedBytes && batch_->count < kMostItems && areas < kMostAreas) {
    const int64_t item = pass_.engine.claims.next(claimed_, items_, thread_, &owner_);
    if (item < 0) break;
    batch_->items[batch_->count++] = item;
    const int64_t head = head_of(item), heads = end_head_of(item) - head;
    const FeedState &feed = feed_of(item);
    const int32_t begin = pass_.engine.rows[static_cast<size_t>(feed.row)].begin;
    const int32_t seen = std::max(begin, first_seen(op_.window, feed.position));
    for (size_t i = static_cast<size_t>(seen / kBlockTokens); i < feed.blocks.size(); ++i) {
      // The other blocks of a long row are prefetched by the attention kernel itself.
      if (areas + 2 > kMostAreas) {
        batch_->whole = false;
        break;
      }
      const char *const block = feed.blocks[i];
      const char *const keys = block + layer.keys + head * layer.key_bytes;
      const char *const values = block + layer.values + head * layer.value_bytes;
      batch_->areas[areas++] = {keys, keys + heads * layer.key_bytes};
      if (layer.value_bytes) batch_->areas[areas++] = {values, values + heads * layer.value_bytes};
      bytes += heads * (layer.key_bytes + layer.value_bytes);
    }
  }
  prefetch_ = {batch_->areas.data(), batch_->areas.data() + areas, nullptr, nullptr, rate_, 0};
}

void AttentionBeside::attend_batch(PrefetchBeside *beside) {
  const Batch &batch = *batch_;
  batch_ = &batches_[batch_ == &batches_[0] ? 1 : 0];
  claim();
  for (size_t i = 0; i < batch.count; ++i) {
    const int64_t item = batch.items[i];
    const FeedState &feed = feed_of(item);
    pass_.attend_heads(op_, feed, head_of(item), end_head_of(item), 0, int64_t{feed.count} * (op_.heads / op_.kv_heads),
                       /*stores=*/true, thread_, batch.whole ? beside : nullptr);
  }
}

void AttentionBeside::go_on() {
  if (batch_->count > 0 && prefetch_.done()) attend_batch(&prefetch_);
}

void AttentionBeside::finish() {
  while (batch_->count > 0) attend_batch(nullptr);
}

bool Pass::may_go_in_halves() const {
  if (tokens < kFewestTokens || feeds.size() < 2 || !branches.empty()) return false;
  bool has_selected = false;
  for (const outrider_op &op : engine.ops) {
    switch (op.kind) {
      case OUTRIDER_SELECT:
        has_selected = true;
        break;
      case OUTRIDER_ATTENTION:
        if (has_selected) return false;
        for (const FeedState &feed : feeds)
          if (int64_t{feed.count} * (op.heads / op.kv_heads) > kMostQueriesOfHead) return false;
        break;
      case OUTRIDER_EMBED:
      case OUTRIDER_POSITION:
      case OUTRIDER_NORM:
      case OUTRIDER_LINEAR:
      case OUTRIDER_ROPE:
      case OUTRIDER_GATE:
      case OUTRIDER_SCALE:
      case OUTRIDER_XIELU:
      case OUTRIDER_HEADS:
      case OUTRIDER_GAUSSIAN_TOP_K:
      case OUTRIDER_BLEND:
      case OUTRIDER_MATCH_RMS:
      case OUTRIDER_CONNECT:
      case OUTRIDER_CHOOSE:
        break;
      default:
        if (!is_left_out(op)) return false;
    }
  }
  return has_selected;
}

int64_t Pass::cache_bytes() const {
  int64_t blocks = 0;
  for (const FeedState &feed : feeds) blocks += (feed.position + feed.count + kBlockTokens - 1) / kBlockTokens;
  return blocks * engine.cache->block_bytes();
}

bool Pass::tries_halves() const {
  return !engine.pair_constants.empty() && kBytesOverCache * cache_bytes() >= engine.bytes_multiplied && may_go_in_halves();
}

void Pass::divide() {
  size_t feed = 1;
  while (feed + 1 < feeds.size() && feeds[feed].first_token < tokens / 2) ++feed;
  const int token = feeds[feed].first_token;
  const int chosen = static_cast<int>(std::lower_bound(selected.begin(), selected.end(), token) - selected.begin());
  Part first = parts[0], second = parts[0];
  second.number = 1;
  first.end_feed = second.first_feed = static_cast<int>(feed);
  first.tokens.count = token;
  first.selected.count = chosen;
  second.tokens = {token, parts[0].tokens.count - token};
  second.selected = {chosen, parts[0].selected.count - chosen};
  parts = {first, second};
}

int64_t Pass::steps_in_pairs(size_t from, size_t end, int count) const {
  int64_t steps = 0;
  for (size_t index = from; index < end; ++index) {
    const outrider_op &op = engine.ops[index];
    if (op.kind != OUTRIDER_LINEAR || is_left_out(op)) continue;
    const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
    if (!engine.pair_constants_of(op.weight) || !engine.enough_for_pairs(weight, count)) continue;
    const int block = engine.kernels->row_block(weight, count);
    steps += int64_t{tile_count(weight)} * ((weight.columns + 7) / 8) * ((count + block - 1) / block);
  }
  return steps;
}

// The first half is one attention operation ahead of the second.
void Pass::walk_in_halves(int thread) {
  const Part &first = parts[0], &second = parts[1];
  const auto attention_from = [&](size_t index) {
    while (index < engine.ops.size() && engine.ops[index].kind != OUTRIDER_ATTENTION) ++index;
    return index;
  };
  const auto run_beside = [&](size_t from, size_t end, const Part &part, size_t attention, const Part &other) {
    AttentionBeside beside(*this, attention, other, steps_in_pairs(from, end, part.tokens.count), thread);
    run_ops(from, end, part, &beside, thread);
    beside.finish();
    engine.pool->barrier();
  };
  size_t begin = 0, attention = attention_from(0);
  run_ops(0, attention, first, nullptr, thread);
  while (attention < engine.ops.size()) {
    const size_t next = attention_from(attention + 1);
    run_beside(begin, attention, second, attention, first);
    run_beside(attention + 1, next, first, attention, second);
    begin = attention + 1;
    attention = next;
  }
  run_ops(begin, engine.ops.size(), second, nullptr, thread);
}

}  // namespace outrider
