// One forward pass: all threads walk the program together.
#include <string.h>

#include <algorithm>

#include "engine.h"
#include "message.h"
#include "pack.h"
#include "rotary.h"

namespace outrider {

// Attention is shared out in about so many pieces a thread, with so many blocks of queries a piece at most.
constexpr int64_t kPiecesAThread = 4, kMostQueryBlocks = 4;
// Of a matrix a thread has 8 to 32 pieces, of so many bytes where that is between.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

// How a matrix is shared out: every thread has pieces that lie one after the other, from first(thread) to first(thread + 1).
struct Pieces {
  int tiles, tiles_each, count;
  int first(int thread, int threads) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads); }
};

// A token that is tried in place of one that is fed, which stands at `instead`.
struct Branch {
  int32_t token, instead;  // indices into the pass's tokens
};

// What all threads of one pass share. Behind the tokens of all feeds come those of the branches.
struct Pass {
  Engine &engine;
  const outrider_batch &batch;
  std::vector<FeedState> feeds;
  std::vector<int32_t> token, position, feed_of;  // [tokens]
  std::vector<int32_t> selected;                  // token indices whose logits are needed
  std::vector<int32_t> choice_at, logits_at;      // [selected] index of the output, or -1
  std::vector<int64_t> logprobs_at;               // [selected] likewise
  std::vector<Branch> branches;
  int tokens = 0;
  std::atomic<int32_t> not_finite{-1};

  explicit Pass(Engine &owner, const outrider_batch &wanted) : engine(owner), batch(wanted) {}
  void plan();
  void walk(int thread);

  void run_op(size_t index, int count, int thread);
  void embed(const outrider_op &op, int thread);
  void norm(const outrider_op &op, int count, int thread);
  void linear(const outrider_op &op, size_t index, int count, int thread);
  Pieces pieces_of(const outrider_weight &weight) const;
  int claim_piece(size_t index, const Pieces &pieces, int thread, int *owner);
  void attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread);
  CacheView view(const outrider_op &op, int64_t token, int64_t head) const;
  void store(const outrider_op &op, int64_t token, int64_t head) const;
  Attend queries_from(const outrider_op &op, int64_t token, int64_t head, int thread) const;
  void rotate(const outrider_op &op, int thread);
  void rotation_tables(int thread);
  void attention(const outrider_op &op, size_t index, int thread);
  void select(const outrider_op &op, int thread);
  void choose(const outrider_op &op, size_t index, int thread);
  // Calls work(first, last) over this thread's even share of 0..count.
  template <typename Work> void share(int64_t count, int thread, Work work) const {
    const int64_t threads = engine.pool->threads();
    const int64_t first = count * thread / threads, last = count * (thread + 1) / threads;
    if (first < last) work(first, last);
  }
  // Calls work(first, last) over pieces of 0..count that the threads claim one after the other.
  template <typename Work> void claim(size_t index, int64_t count, int64_t piece, Work work) {
    for (;;) {
      const size_t at = index * static_cast<size_t>(engine.pool->threads());
      const int64_t first = engine.claims[at].fetch_add(piece, std::memory_order_relaxed);
      if (first >= count) return;
      work(first, std::min(first + piece, count));
    }
  }
};

void Pass::plan() {
  int choices = 0, logits = 0, branch = 0;
  int64_t logprobs = 0;
  // Of the branches: their feeds, and where the choices after them go.
  std::vector<int32_t> branch_feeds, branch_choices;
  std::vector<int64_t> branch_logprobs;
  for (int i = 0; i < batch.feeds; ++i) {
    const RowState &row = engine.rows[static_cast<size_t>(batch.rows[i])];
    FeedState feed;
    feed.row = batch.rows[i];
    feed.first_token = tokens;
    feed.count = batch.counts[i];
    feed.position = static_cast<int32_t>(row.history.size()) - batch.counts[i];
    for (const int block : row.blocks) feed.blocks.push_back(engine.cache->data(block));
    const int wanted_choices = batch.choose[i], wanted_logits = batch.logits ? batch.logits[i] : 0;
    const int explained = batch.logprobs ? batch.logprobs[i] : -1;
    const auto explain = [&](bool wanted) {
      const int64_t at = wanted && explained >= 0 ? logprobs : -1;
      if (at >= 0) logprobs += 1 + explained;
      return at;
    };
    for (int t = 0; t < feed.count; ++t, ++tokens) {
      token.push_back(batch.tokens[tokens]);
      position.push_back(feed.position + t);
      feed_of.push_back(i);
      const int left = feed.count - t;
      if (left > wanted_choices && left > wanted_logits) continue;
      selected.push_back(tokens);
      choice_at.push_back(left <= wanted_choices ? choices++ : -1);
      logits_at.push_back(left <= wanted_logits ? logits++ : -1);
      logprobs_at.push_back(explain(left <= wanted_choices));
    }
    feed.first_branch = branch;
    feed.end_branch = branch + (batch.branches ? batch.branches[i] : 0);
    for (; branch < feed.end_branch; ++branch) {
      branches.push_back({-1, feed.first_token + batch.branch_after[branch]});
      branch_feeds.push_back(i);
      branch_choices.push_back(choices++);
      branch_logprobs.push_back(explain(true));
    }
    feeds.push_back(std::move(feed));
  }
  for (size_t b = 0; b < branches.size(); ++b, ++tokens) {
    branches[b].token = tokens;
    token.push_back(batch.branch_tokens[b]);
    position.push_back(position[static_cast<size_t>(branches[b].instead)]);
    feed_of.push_back(branch_feeds[b]);
    selected.push_back(tokens);
    choice_at.push_back(branch_choices[b]);
    logits_at.push_back(-1);
    logprobs_at.push_back(branch_logprobs[b]);
  }
}

void Pass::rotation_tables(int thread) {
  for (const auto &rotation : engine.rotations) {
    const int64_t half = round_up(rotation->half, kLanes);
    float *tables = rotation->tables.as<float>();
    const float *frequencies = static_cast<const float *>(engine.weights[static_cast<size_t>(rotation->weight)].data);
    share(tokens, thread, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        rotary_angles(position[static_cast<size_t>(t)], frequencies, rotation->half, rotation->factor,
                      tables + 2 * t * half, tables + (2 * t + 1) * half);
    });
  }
}

void Pass::embed(const outrider_op &op, int thread) {
  const outrider_weight &table = engine.weights[static_cast<size_t>(op.weight)];
  const int fp32 = table.format == OUTRIDER_FP32;
  const int64_t row_bytes = static_cast<int64_t>(table.columns) * (fp32 ? 4 : 2);
  float *out = engine.buffer(op.out);
  const int64_t stride = engine.stride(op.out);
  share(tokens, thread, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = op.kind == OUTRIDER_EMBED ? token[static_cast<size_t>(t)] : position[static_cast<size_t>(t)] + op.integer;
      const char *source = static_cast<const char *>(table.data) + row * row_bytes;
      engine.kernels->table_row(source, fp32, out + t * stride, table.columns);
      if (op.kind == OUTRIDER_POSITION)
        engine.kernels->add(engine.buffer(op.in) + t * engine.stride(op.in), out + t * stride, out + t * stride, table.columns);
    }
  });
}

void Pass::norm(const outrider_op &op, int count, int thread) {
  const float *weight = static_cast<const float *>(engine.weights[static_cast<size_t>(op.weight)].data);
  const float *bias = op.bias >= 0 ? static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) : nullptr;
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share(static_cast<int64_t>(count) * op.heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item / op.heads, at = item % op.heads * op.head_size;
      const float *x = in + t * in_stride + at;
      float *y = out + t * out_stride + at;
      if (op.integer == OUTRIDER_RMS) engine.kernels->rms_norm(x, weight, y, op.head_size, op.epsilon);
      else engine.kernels->layer_norm(x, weight, bias, y, op.head_size, op.epsilon);
    }
  });
}

void Pass::linear(const outrider_op &op, size_t index, int count, int thread) {
  const outrider_weight &weight = engine.weights[static_cast<size_t>(op.weight)];
  const Kernels &kernels = *engine.kernels;
  Input input{};
  input.words = engine.words.as<int32_t>();
  input.scales = engine.scales.as<float>();
  input.offsets = engine.offsets.as<int32_t>();
  input.row_words = words_in_row(weight);
  input.groups = weight.group ? (weight.columns + weight.group - 1) / weight.group : 0;
  input.tokens = count;
  const int row_block = kernels.row_block(weight.format, count);
  input.blocks = (count + row_block - 1) / row_block;
  const float *in = engine.buffer(op.in);
  const int64_t in_stride = engine.stride(op.in);
  // A block's rows lie interleaved, so threads share its channels: with a row each, they would write into the same lines of the
  // cache, and of one row all but one thread would wait.
  const int parts = (weight.columns + piece_channels(weight) - 1) / piece_channels(weight);
  share(static_cast<int64_t>(input.blocks) * parts, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item)
      kernels.prepare(weight, in, in_stride, input, static_cast<int>(item / parts), static_cast<int>(item % parts));
  });
  engine.pool->barrier();
  Linear task{};
  task.weight = &weight;
  task.input = &input;
  task.bias = op.bias >= 0 ? static_cast<const float *>(engine.weights[static_cast<size_t>(op.bias)].data) : nullptr;
  if (op.residual.buffer >= 0) {
    task.residual = engine.buffer(op.residual);
    task.residual_stride = engine.stride(op.residual);
  }
  task.out = engine.buffer(op.out);
  task.out_stride = engine.stride(op.out);
  task.width = op.out.width;
  task.activation = op.activation;
  // Everybody's first piece is known beforehand, and the next one is claimed before the last is worked on: a thread asks memory
  // for what it will read next while it finishes what it has, over barriers and what else lies between two matrices.
  const Pieces pieces = pieces_of(weight);
  const int threads = engine.pool->threads(), later = engine.next_linear[index];
  const outrider_weight *later_weight =
      later < 0 ? nullptr : &engine.weights[static_cast<size_t>(engine.ops[static_cast<size_t>(later)].weight)];
  int later_tile = 0;
  if (later_weight) {
    const Pieces to_come = pieces_of(*later_weight);
    later_tile = to_come.first(thread, threads) * to_come.tiles_each;
    if (to_come.first(thread, threads) == to_come.first(thread + 1, threads)) later_weight = nullptr;
  }
  int owner = thread, mine = pieces.first(thread, threads);
  if (mine == pieces.first(thread + 1, threads)) mine = claim_piece(index, pieces, thread, &owner);
  while (mine >= 0) {
    const int next = claim_piece(index, pieces, thread, &owner);
    const int first = mine * pieces.tiles_each, last = std::min(first + pieces.tiles_each, pieces.tiles);
    if (next >= 0) kernels.linear(task, first, last, &weight, next * pieces.tiles_each);
    else kernels.linear(task, first, last, later_weight, later_tile);
    mine = next;
  }
}

// The next piece of this thread's share, which it reads from end to end; once that is done, of the share of another; -1 behind
// the last.
int Pass::claim_piece(size_t index, const Pieces &pieces, int thread, int *owner) {
  const int threads = engine.pool->threads();
  do {
    const int first = pieces.first(*owner, threads), end = pieces.first(*owner + 1, threads);
    std::atomic<int64_t> &claimed = engine.claims[index * static_cast<size_t>(threads) + static_cast<size_t>(*owner)];
    // An owner's first piece is its own, without a claim.
    const int64_t piece = first + 1 + claimed.fetch_add(1, std::memory_order_relaxed);
    if (piece < end) return static_cast<int>(piece);
    *owner = (*owner + 1) % threads;
  } while (*owner != thread);
  return -1;
}

// So few tiles in a piece that the threads are evened out, but bytes enough that claiming them is no matter; and as many as some
// kernels work on together.
Pieces Pass::pieces_of(const outrider_weight &weight) const {
  const int threads = engine.pool->threads(), tiles = tile_count(weight);
  const int enough = static_cast<int>(kPieceBytes * tiles / packed_bytes(weight));
  const int even = std::clamp(enough, tiles / (32 * threads), tiles / (8 * threads));
  const int together = tiles / threads >= 2 * kTilesTogether ? kTilesTogether : std::max(1, even);
  const int each = even >= kTilesTogether ? even / kTilesTogether * kTilesTogether : together;
  return {tiles, each, (tiles + each - 1) / each};
}

void Pass::rotate(const outrider_op &op, int thread) {
  const Rotation &rotation = *engine.rotations[static_cast<size_t>(op.integer)];
  const int64_t half = round_up(rotation.half, kLanes);
  const float *tables = rotation.tables.as<float>();
  float *x = engine.buffer(op.in);
  const int64_t stride = engine.stride(op.in);
  share(static_cast<int64_t>(tokens) * op.heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item / op.heads, head = item % op.heads;
      engine.kernels->rope(x + t * stride + head * op.head_size, tables + 2 * t * half, tables + (2 * t + 1) * half, op.head_size);
    }
  });
}

void Pass::attention(const outrider_op &op, size_t index, int thread) {
  const int64_t kept = tokens - static_cast<int64_t>(branches.size());
  share(kept * op.kv_heads, thread, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) store(op, item / op.kv_heads, item % op.kv_heads);
  });
  engine.pool->barrier();
  const int group = op.heads / op.kv_heads;
  // Queries of a head that one thread takes at once share what the first of them brings into its cache.
  const int64_t all_queries = kept * op.heads, even = kPiecesAThread * engine.pool->threads();
  const int64_t piece = kQueryBlock * std::clamp<int64_t>(all_queries / kQueryBlock / even, 1, kMostQueryBlocks);
  const auto pieces_of = [&](const FeedState &feed) {
    return (static_cast<int64_t>(feed.count) * group + piece - 1) / piece;
  };
  const auto attend_branches = [&](const FeedState &feed, int64_t head) {
    for (int b = feed.first_branch; b < feed.end_branch; ++b) attend_branch(op, branches[static_cast<size_t>(b)], head, thread);
  };
  int64_t items = 0;
  for (const FeedState &feed : feeds) items += pieces_of(feed) * op.kv_heads;
  claim(index, items, 1, [&](int64_t item, int64_t) {
    size_t number = 0;
    while (item >= pieces_of(feeds[number]) * op.kv_heads) item -= pieces_of(feeds[number++]) * op.kv_heads;
    const FeedState &feed = feeds[number];
    const int64_t head = item / pieces_of(feed), first_query = item % pieces_of(feed) * piece;
    Attend task = queries_from(op, feed.first_token, head, thread);
    task.first_query = static_cast<int32_t>(first_query);
    task.query_count = static_cast<int32_t>(std::min(piece, feed.count * group - first_query));
    engine.kernels->attend(task);
    // Keys and values of this head are in this processor's caches now, and nobody else reads them.
    if (pieces_of(feed) == 1) attend_branches(feed, head);
  });
  // A branch changes the cache for a moment: where several threads read a head, it waits for all of them.
  const auto waits = [&](const FeedState &feed) { return feed.first_branch < feed.end_branch && pieces_of(feed) > 1; };
  if (std::none_of(feeds.begin(), feeds.end(), waits)) return;
  engine.pool->barrier();
  for (const FeedState &feed : feeds)
    if (waits(feed))
      share(op.kv_heads, thread, [&](int64_t first, int64_t last) {
        for (int64_t head = first; head < last; ++head) attend_branches(feed, head);
      });
}

// While a branch's queries are answered its key and value lie where those of the token lie whose place it takes.
void Pass::attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread) {
  store(op, branch.token, head);
  Attend task = queries_from(op, branch.token, head, thread);
  task.query_count = task.group;
  engine.kernels->attend(task);
  store(op, branch.instead, head);
}

CacheView Pass::view(const outrider_op &op, int64_t token, int64_t head) const {
  const CacheLayer &layer = engine.cache->layer(op.integer);
  const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(token)])];
  const int64_t at = layer.offset + head * layer.head_bytes;
  return {feed.blocks.data(), at, at + layer.key_bytes, engine.cache_format};
}

// A token's key and value of one head go into the cache.
void Pass::store(const outrider_op &op, int64_t token, int64_t head) const {
  const int64_t at = head * op.head_size;
  engine.kernels->store_cache(view(op, token, head), position[static_cast<size_t>(token)],
                              engine.buffer(op.key) + token * engine.stride(op.key) + at,
                              engine.buffer(op.value) + token * engine.stride(op.value) + at, op.head_size);
}

// The queries of one kv head from this token on, none of them yet.
Attend Pass::queries_from(const outrider_op &op, int64_t token, int64_t head, int thread) const {
  const int group = op.heads / op.kv_heads;
  Attend task{};
  task.cache = view(op, token, head);
  task.query_stride = engine.stride(op.in);
  task.out_stride = engine.stride(op.out);
  task.query = engine.buffer(op.in) + token * task.query_stride + head * group * op.head_size;
  task.out = engine.buffer(op.out) + token * task.out_stride + head * group * op.head_size;
  task.position = position[static_cast<size_t>(token)];
  task.group = group;
  task.head_size = op.head_size;
  task.window = op.window;
  task.scale = op.scale;
  task.scratch = engine.attention.as<float>() + thread * engine.most_attention;
  return task;
}

void Pass::select(const outrider_op &op, int thread) {
  const float *in = engine.buffer(op.in);
  float *out = engine.buffer(op.out);
  const int64_t in_stride = engine.stride(op.in), out_stride = engine.stride(op.out);
  share(static_cast<int64_t>(selected.size()), thread, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s)
      memcpy(out + s * out_stride, in + selected[static_cast<size_t>(s)] * in_stride, sizeof(float) * static_cast<size_t>(op.in.width));
  });
}

void Pass::choose(const outrider_op &op, size_t index, int thread) {
  const float *in = engine.buffer(op.in);
  const int64_t stride = engine.stride(op.in);
  claim(index, static_cast<int64_t>(selected.size()), 1, [&](int64_t s, int64_t) {
    const size_t at = static_cast<size_t>(s), t = static_cast<size_t>(selected[at]);
    const float *logits = in + s * stride;
    if (logits_at[at] >= 0)
      memcpy(batch.logits_out + static_cast<int64_t>(logits_at[at]) * engine.vocabulary, logits,
             sizeof(float) * static_cast<size_t>(engine.vocabulary));
    if (choice_at[at] < 0) return;
    const int feed = feed_of[t];
    const RowState &row = engine.rows[static_cast<size_t>(feeds[static_cast<size_t>(feed)].row)];
    SamplerScratch *scratch = &engine.samplers[static_cast<size_t>(thread)];
    const int32_t length = position[t] + 1, *history = row.history.data();
    const bool branch = s >= static_cast<int64_t>(selected.size() - branches.size());
    if (branch) {
      // The row's own history goes on with the token whose place the branch takes.
      scratch->history.assign(history, history + length);
      scratch->history.back() = token[t];
      history = scratch->history.data();
    }
    const Choice choice = choose_token(*engine.kernels, logits, engine.vocabulary, row.sampling, history, length,
                                       std::min(row.prompt, length), scratch, nullptr, batch.runners_up != nullptr);
    batch.chosen[choice_at[at]] = choice.token;
    if (batch.runners_up) batch.runners_up[choice_at[at]] = choice.runner_up;
    if (batch.margins) batch.margins[choice_at[at]] = choice.margin;
    // A branch is only tried: what came of it is as if it had not been.
    if (!choice.finite && branch) batch.chosen[choice_at[at]] = -1;
    else if (!choice.finite) not_finite.store(feeds[static_cast<size_t>(feed)].row);
    else if (logprobs_at[at] >= 0)
      log_probabilities(*engine.kernels, logits, engine.vocabulary, choice.token, batch.logprobs[feed], scratch,
                        batch.logprob_tokens + logprobs_at[at], batch.logprob_values + logprobs_at[at]);
  });
}

void Pass::run_op(size_t index, int count, int thread) {
  const outrider_op &op = engine.ops[index];
  switch (op.kind) {
    case OUTRIDER_EMBED:
    case OUTRIDER_POSITION: return embed(op, thread);
    case OUTRIDER_NORM: return norm(op, count, thread);
    case OUTRIDER_LINEAR: return linear(op, index, count, thread);
    case OUTRIDER_ROPE: return rotate(op, thread);
    case OUTRIDER_ATTENTION: return attention(op, index, thread);
    case OUTRIDER_SELECT: return select(op, thread);
    default: return choose(op, index, thread);
  }
}

void Pass::walk(int thread) {
  rotation_tables(thread);
  int count = tokens;
  for (size_t index = 0; index < engine.ops.size(); ++index) {
    run_op(index, count, thread);
    if (engine.ops[index].kind == OUTRIDER_SELECT) count = static_cast<int>(selected.size());
    if (count == 0) break;
    engine.pool->barrier();
  }
}

int32_t Engine::forward(const outrider_batch &batch) {
  int tokens = 0, selected = 0;
  int32_t status = check_batch(batch, &tokens, &selected);
  if (status != OUTRIDER_OK || tokens == 0) return status;
  status = reserve_scratch(tokens, selected);
  if (status == OUTRIDER_OK) status = reserve_blocks(batch);
  if (status != OUTRIDER_OK) return status;
  const int32_t *next = batch.tokens;
  for (int i = 0; i < batch.feeds; next += batch.counts[i], ++i) {
    std::vector<int32_t> &history = rows[static_cast<size_t>(batch.rows[i])].history;
    history.insert(history.end(), next, next + batch.counts[i]);
  }
  Pass pass(*this, batch);
  pass.plan();
  for (std::atomic<int64_t> &claim : claims) claim.store(0, std::memory_order_relaxed);
  pool->run([&pass](int thread) { pass.walk(thread); });
  if (pass.not_finite >= 0)
    return fail(OUTRIDER_NOT_FINITE, "row %d: a logit is not a finite number", pass.not_finite.load());
  return OUTRIDER_OK;
}

}  // namespace outrider
