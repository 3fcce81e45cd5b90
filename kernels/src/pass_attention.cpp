// Attention: stores keys and values into the KV cache, then computes the attention of all queries; a branch follows when no other thread
// reads its head any more.
#include <algorithm>

#include "pass.h"

namespace outrider {

// Attention is divided into about kPiecesAThread pieces for each thread, with at most kMostQueryBlocks blocks of queries in a piece.
constexpr int64_t kPiecesAThread = 4, kMostQueryBlocks = 4;

// Stores this thread's share of the keys and values of the wanted feeds. The keys of a granule (16 tokens) share cache lines, so one
// thread stores them all: two would contend for the lines.
template <typename Wanted> void Pass::store_granules(const outrider_op &op, Wanted wanted, int thread) const {
  const auto granules_of = [](const FeedState &feed) {
    return (feed.position + feed.count - 1) / kLanes - feed.position / kLanes + 1;
  };
  int64_t items = 0;
  for (const FeedState &feed : feeds)
    if (wanted(feed)) items += int64_t{op.kv_heads} * granules_of(feed);
  share(items, thread, [&](int64_t first, int64_t last) {
    for (const FeedState &feed : feeds) {
      if (!wanted(feed)) continue;
      const int64_t here = int64_t{op.kv_heads} * granules_of(feed);
      for (int64_t item = std::max<int64_t>(first, 0); item < std::min(last, here); ++item) {
        const int64_t head = item / granules_of(feed), granule = feed.position / kLanes + item % granules_of(feed);
        const int64_t begin = std::max<int64_t>(granule * kLanes - feed.position, 0);
        const int64_t end = std::min<int64_t>((granule + 1) * kLanes - feed.position, feed.count);
        for (int64_t t = begin; t < end; ++t) store(op, feed.first_token + t, head);
      }
      first -= here;
      last -= here;
    }
  });
}

void Pass::attention(const outrider_op &op, size_t index, int thread) {
  const bool stores = !is_behind_select(op);
  const size_t rows = stores ? static_cast<size_t>(tokens) : selected.size();
  const int64_t kept = static_cast<int64_t>(rows - branches.size());
  const int group = op.heads / op.kv_heads;
  // One thread computes several queries of a head at once, since they share the keys and values that are in its caches.
  const int64_t all_queries = kept * op.heads, threads = engine.pool->threads(), even = kPiecesAThread * threads;
  // With fewer blocks of queries than threads, pieces are half blocks: more threads work, and the queries of a half still share what they
  // read.
  const int64_t piece = all_queries < kQueryBlock * threads
                            ? kQueryBlock / 2
                            : kQueryBlock * std::clamp<int64_t>(all_queries / kQueryBlock / even, 1, kMostQueryBlocks);
  const auto pieces_of_head = [&](const FeedState &feed) {
    return (static_cast<int64_t>(queries_of(op, feed).count) * group + piece - 1) / piece;
  };
  const auto divided = [&](const FeedState &feed) { return pieces_of_head(feed) > 1; };
  // Heads with few queries are taken several at a time, since the keys of adjacent heads are contiguous, and so are their values.
  const int64_t even_heads = static_cast<int64_t>(feeds.size()) * op.kv_heads / even;
  const auto heads_of_piece = [&](const FeedState &feed) {
    const int64_t queries = std::max<int64_t>(queries_of(op, feed).count * int64_t{group}, 1);
    return queries > kQueryBlock ? 1 : std::clamp<int64_t>(even_heads, 1, kMostQueries / queries);
  };
  const auto pieces_of = [&](const FeedState &feed) {
    const int64_t heads = heads_of_piece(feed);
    return pieces_of_head(feed) * ((op.kv_heads + heads - 1) / heads);
  };
  const auto attend_branches = [&](const FeedState &feed, int64_t head) {
    for (int b = feed.first_branch; b < feed.end_branch; ++b)
      attend_branch(op, branches[static_cast<size_t>(b)], head, thread);
  };
  if (stores && std::any_of(feeds.begin(), feeds.end(), divided)) {
    store_granules(op, divided, thread);
    engine.pool->barrier();
  }
  int64_t items = 0;
  for (const FeedState &feed : feeds) items += pieces_of(feed);
  claim(index, items, thread, [&](int64_t item) {
    size_t number = 0;
    while (item >= pieces_of(feeds[number])) item -= pieces_of(feeds[number++]);
    const FeedState &feed = feeds[number];
    const int64_t heads = heads_of_piece(feed), head = item / pieces_of_head(feed) * heads;
    const int64_t end_head = std::min<int64_t>(head + heads, op.kv_heads);
    const int64_t first_query = item % pieces_of_head(feed) * piece;
    attend_heads(op, feed, head, end_head, first_query,
                 std::min<int64_t>(first_query + piece, queries_of(op, feed).count * group), stores && !divided(feed),
                 thread);
    // Keys and values of these heads are in this core's caches now, and no other thread reads them.
    if (!divided(feed))
      for (int64_t each = head; each < end_head; ++each) attend_branches(feed, each);
  });
  // A branch changes the KV cache temporarily: where several threads read a head, it waits for all of them. A feed without selected
  // tokens has no pieces, so its branches have not been computed above.
  const auto waits = [&](const FeedState &feed) {
    return feed.first_branch < feed.end_branch && (divided(feed) || pieces_of_head(feed) == 0);
  };
  if (std::none_of(feeds.begin(), feeds.end(), waits)) return;
  engine.pool->barrier();
  for (const FeedState &feed : feeds)
    if (waits(feed))
      share(op.kv_heads, thread, [&](int64_t first, int64_t last) {
        for (int64_t head = first; head < last; ++head) attend_branches(feed, head);
      });
}

void Pass::attend_heads(const outrider_op &op, const FeedState &feed, int64_t head, int64_t end_head, int64_t first_query,
                        int64_t end_query, bool stores, int thread, PrefetchBeside *beside) const {
  const QueryRows queries = queries_of(op, feed);
  Attend task = queries_from(op, queries.row, queries.token, head, thread);
  task.heads = static_cast<int32_t>(end_head - head);
  task.first_query = static_cast<int32_t>(first_query);
  task.query_count = static_cast<int32_t>(end_query - first_query);
  task.beside = beside;
  if (stores)
    for (int t = 0; t < feed.count; ++t)
      for (int64_t each = head; each < end_head; ++each) store(op, feed.first_token + t, each);
  engine.kernels->attend(task);
}

// While a branch's attention is computed, its key and value replace in the cache those of the candidate at its position.
void Pass::attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread) {
  store(op, branch.token, head);
  Attend task = queries_from(op, is_behind_select(op) ? branch.selected : branch.token, branch.token, head, thread);
  task.query_count = task.group;
  engine.kernels->attend(task);
  store(op, branch.instead, head);
}

CacheView Pass::view(const outrider_op &op, int64_t token, int64_t head) const {
  const CacheLayer &layer = engine.cache->layer(op.integer);
  const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(token)])];
  return {feed.blocks.data(),
          layer.keys + head * layer.key_bytes,
          layer.values + head * layer.value_bytes,
          layer.key_bytes,
          layer.value_bytes,
          engine.cache_format};
}

// Stores a token's key and value of one head into the KV cache.
void Pass::store(const outrider_op &op, int64_t token, int64_t head) const {
  const int64_t at = head * op.head_size, value_at = head * value_size(op);
  engine.kernels->store_cache(view(op, token, head), position[static_cast<size_t>(token)],
                              engine.buffer(op.key) + token * engine.stride(op.key) + at,
                              engine.buffer(op.value) + token * engine.stride(op.value) + value_at, op.head_size,
                              value_size(op));
}

// A task for the queries of one kv head from `token` on, which are in the buffers from `row` on; the caller sets query_count.
Attend Pass::queries_from(const outrider_op &op, int64_t row, int64_t token, int64_t head, int thread) const {
  const int group = op.heads / op.kv_heads;
  Attend task{};
  task.cache = view(op, token, head);
  task.query_stride = engine.stride(op.in);
  task.out_stride = engine.stride(op.out);
  task.query = engine.buffer(op.in) + row * task.query_stride + head * group * op.head_size;
  task.out = engine.buffer(op.out) + row * task.out_stride + head * group * value_size(op);
  task.position = position[static_cast<size_t>(token)];
  task.heads = 1;
  task.group = group;
  task.head_size = op.head_size;
  task.value_size = value_size(op);
  task.window = op.window;
  task.begin = engine.rows[static_cast<size_t>(feeds[static_cast<size_t>(feed_of[static_cast<size_t>(token)])].row)].begin;
  task.scale = op.scale;
  task.cap = op.cap;
  if (op.weight >= 0)
    task.sinks = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data) + head * group;
  if (op.bias >= 0)
    task.slopes = static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) + head * group;
  task.bf16_biases = op.rotated != 0;
  task.scratch = engine.attention.as<float>() + thread * engine.most_attention;
  return task;
}

}  // namespace outrider
