// One forward pass: its plan, its operations, and how the threads divide them.
#ifndef OUTRIDER_SRC_PASS_H
#define OUTRIDER_SRC_PASS_H

#include <atomic>
#include <vector>

#include "engine.h"

namespace outrider {

// One feed of the batch being run.
struct FeedState {
  int32_t row, first_token, count, position;
  int32_t first_selected, selected;  // its last tokens, among the selected rows
  int32_t first_branch, end_branch;  // indices into the pass's branches
  int32_t again;                     // its first tokens, which are fed again to restore a recurrent state
  int64_t state_out, state_in;       // indices of its tokens' hidden states in the batch's, or -1
  std::vector<char *> blocks;
};

// A branch: a token that is computed at the position of the fed token `instead`, in place of it.
struct Branch {
  int32_t token, instead;  // indices into the pass's tokens
  int32_t selected;        // its index among the selected rows
};

// An expert that some tokens of this pass use: its number, the first of its (token, expert) pairs, and its part of the converted input.
struct NeededExpert {
  int32_t number, first;
  Input input;
};

// The division of a matrix into pieces of `tiles_each` tiles; a thread's share is the pieces first(thread) .. first(thread + 1).
struct Pieces {
  int tiles, tiles_each, count;
  int first(int thread, int threads) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads); }
};

// A range of rows in the buffers: tokens before SELECT, selected tokens after it.
struct Rows {
  int first, count;
};

// The queries of a feed: the first one's row in the buffers, its token's index in the pass, and the number of tokens.
struct QueryRows {
  int64_t row, token;
  int32_t count;
};

// The feeds of a pass that run through the program together: all feeds, or one half of them (pass_halves.cpp).
struct Part {
  int number = 0;
  int first_feed = 0, end_feed = 0;
  Rows tokens{}, selected{};
};

class AttentionBeside;
struct Inputs;

// What all threads of one pass share. The tokens of all feeds come first, then those of the branches.
struct Pass {
  Engine &engine;
  const outrider_batch &batch;
  std::vector<FeedState> feeds;
  std::vector<int32_t> token, position, feed_of;  // [tokens]
  int32_t last_position = 0;                      // the highest of all tokens
  std::vector<int32_t> selected;                  // indices of the tokens whose logits are needed
  std::vector<int32_t> choice_at, logits_at;      // [selected] index in the batch's output, or -1
  std::vector<int64_t> logprobs_at;               // [selected] likewise
  std::vector<Branch> branches;
  std::vector<Part> parts;  // one or two
  int tokens = 0;
  bool any_given = false;  // whether a token came with a state
  std::atomic<int32_t> not_finite{-1};
  std::atomic<bool> no_memory{false};  // in the choice of a token
  // The latest ROUTE: pairs of a token and one of its experts, sorted by expert, then by token.
  std::vector<int32_t> expert_first;                        // [experts + 1] index of each expert's first pair
  std::vector<int32_t> expert_next;                         // [experts] the next free index, while pairs are sorted
  std::vector<int32_t> pair_of;                             // [tokens, experts of a token] index of the pair
  std::vector<int32_t> token_of;                            // [pairs] the token
  std::vector<std::vector<NeededExpert>> needed_of_thread;  // every thread makes the same list of its own

  explicit Pass(Engine &owner, const outrider_batch &wanted) : engine(owner), batch(wanted) {}
  void plan();
  // Allocates the vectors that the threads fill: a thread of the pool has no way to report a failed allocation.
  void reserve_for_threads();
  void walk(int thread);
  void keep_choosings() const;

  // Runs operations from..end for one part, with barriers between them. beside: attention of the other part meanwhile, or null.
  void run_ops(size_t from, size_t end, const Part &part, AttentionBeside *beside, int thread);
  void run_op(size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread);
  // Whether the pass can run in two halves, and whether that may be faster.
  bool may_go_in_halves() const;
  bool tries_halves() const;
  int64_t cache_bytes() const;
  void divide();
  void walk_in_halves(int thread);
  // Steps of all products from..end that can prefetch meanwhile, over `count` rows. A step: eight channels of a tile times a block of rows.
  int64_t steps_in_pairs(size_t from, size_t end, int count) const;
  void embed(const outrider_op &op, Rows rows, int thread);
  void norm(const outrider_op &op, Rows rows, int thread);
  void linear(const outrider_op &op, size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread);
  // Multiplies the pieces of a matrix that this thread claims; the input has been prepared.
  void multiply_pieces(Linear &task, size_t index, const Part &part, AttentionBeside *beside, int thread);
  void route(const outrider_op &op, int count, int thread);
  void group_by_expert(const outrider_op &op, int count);
  void multiply_experts(const outrider_op &op, size_t index, int count, int thread);
  void mix(const outrider_op &op, int count, int thread);
  void gate(const outrider_op &op, Rows rows, int thread);
  void scale(const outrider_op &op, Rows rows, int thread);
  void xielu(const outrider_op &op, Rows rows, int thread);
  void gaussian_top_k(const outrider_op &op, Rows rows, int thread);
  void blend(const outrider_op &op, Rows rows, int thread);
  void match_rms(const outrider_op &op, Rows rows, int thread);
  void connect(const outrider_op &op, Rows rows, int thread);
  double softplus(double x) const;
  void multiply_heads(const outrider_op &op, size_t index, const Part &part, Rows rows, int thread);
  // Where the converted inputs of several matrices with this shape are stored.
  Inputs inputs_of(const outrider_weight &shape) const;
  void convolve(const outrider_op &op, size_t index, int thread);
  void convolve_columns(const outrider_op &op, const FeedState &feed, int32_t first, int32_t columns) const;
  void step_states(const outrider_op &op, size_t index, int thread);
  struct HeadSteps;
  float scan_step(const outrider_op &op, int32_t head, float dt) const;
  float delta_decay(const outrider_op &op, int32_t number, double rate, float a) const;
  double decay_rate(const outrider_op &op, int32_t head) const;
  float number_of(int32_t weight, int32_t index) const;
  void return_hidden(const outrider_op &op, int thread) const;
  void hidden_in(const outrider_op &op, int thread) const;
  void load_hidden(const outrider_op &op, int thread) const;
  void store_hidden(const outrider_op &op, int thread) const;
  void scatter(const outrider_op &op, int thread) const;
  // Whether an operation processes only selected tokens.
  bool is_behind_select(const outrider_op &op) const { return &op - engine.ops.data() >= engine.first_select; }
  QueryRows queries_of(const outrider_op &op, const FeedState &feed) const {
    if (!is_behind_select(op)) return {feed.first_token, feed.first_token, feed.count};
    return {feed.first_selected, feed.first_token + feed.count - feed.selected, feed.selected};
  }
  // Whether this pass can skip an operation: on hidden states if it has none, or a SCALE whose factor is 1 at all of its positions.
  bool is_left_out(const outrider_op &op) const;
  Pieces pieces_of(const outrider_weight &weight) const;
  template <typename Wanted> void store_granules(const outrider_op &op, Wanted wanted, int thread) const;
  // Attention of queries first..end of each of the feed's kv heads head..end_head. stores: stores their keys and values first. beside:
  // prefetched meanwhile, or null; if not null, the keys and values of these heads were prefetched before.
  void attend_heads(const outrider_op &op, const FeedState &feed, int64_t head, int64_t end_head, int64_t first_query,
                    int64_t end_query, bool stores, int thread, PrefetchBeside *beside = nullptr) const;
  void attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread);
  CacheView view(const outrider_op &op, int64_t token, int64_t head) const;
  void store(const outrider_op &op, int64_t token, int64_t head) const;
  Attend queries_from(const outrider_op &op, int64_t row, int64_t token, int64_t head, int thread) const;
  void rotate(const outrider_op &op, Rows rows, int thread);
  void rotation_tables(int thread);
  // Whether a token's row uses the rope frequencies of long rows.
  bool is_long(int64_t token) const {
    const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(token)])];
    return engine.rows[static_cast<size_t>(feed.row)].rope == RowRope::kLong;
  }
  void attention(const outrider_op &op, size_t index, int thread);
  void select(const outrider_op &op, Rows chosen, int thread);
  void choose(const outrider_op &op, size_t index, const Part &part, int thread);
  void choose_one(const outrider_op &op, int64_t s, int thread);
  template <typename ChooseBy>
  Choice corrected(const Choice &own, int64_t s, SamplerScratch *scratch, const ChooseBy &choose_by) const;
  void wait_for_masks() const;
  // Calls work(first, last) for this thread's even share of 0..count.
  template <typename Work> void share(int64_t count, int thread, Work work) const {
    const int64_t threads = engine.pool->threads();
    const int64_t first = count * thread / threads, last = count * (thread + 1) / threads;
    if (first < last) work(first, last);
  }
  template <typename Work> void share(Rows rows, int thread, Work work) const {
    share(rows.count, thread, [&](int64_t first, int64_t last) { work(rows.first + first, rows.first + last); });
  }
  // Shares the items of rows, `each` items of every row: one thread gets all items of a row.
  template <typename Work> void share_items(Rows rows, int64_t each, int thread, Work work) const {
    share(rows, thread, [&](int64_t first, int64_t last) { work(first * each, last * each); });
  }
  // The index of an operation's counters in Claims: each part has its own.
  size_t claimed(size_t index, const Part &part) const {
    return index + static_cast<size_t>(part.number) * engine.ops.size();
  }
  // Work stealing: calls work(item) for the items of 0..count that this thread claims, those of its own share first.
  template <typename Work> void claim(size_t claimed, int64_t count, int thread, Work work) {
    int owner = thread;
    for (int64_t item; (item = engine.claims.next(claimed, count, thread, &owner)) >= 0;) work(item);
  }
};

}  // namespace outrider

#endif
