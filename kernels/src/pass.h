// One forward pass: its plan, its operations, and how its threads divide them.
#ifndef OUTRIDER_SRC_PASS_H
#define OUTRIDER_SRC_PASS_H

#include <atomic>
#include <vector>

#include "engine.h"

namespace outrider {

// One feed of the batch being run.
struct FeedState {
  int32_t row, first_token, count, position;
  int32_t first_selected, selected;  // of the selected rows: its last tokens
  int32_t first_branch, end_branch;  // of the pass's branches
  int64_t state_out, state_in;       // where the states of its tokens lie in the batch's, or -1
  std::vector<char *> blocks;
};

// A token that is tried in place of one that is fed, which stands at `instead`.
struct Branch {
  int32_t token, instead;  // indices into the pass's tokens
  int32_t selected;        // its index among the selected rows
};

// An expert with rows of this pass: its number, the first of the pairs that are its own, and their part of the converted input.
struct NeededExpert {
  int32_t number, first;
  Input input;
};

// How a matrix is shared out: every thread has pieces that lie one after the other, from first(thread) to first(thread + 1).
struct Pieces {
  int tiles, tiles_each, count;
  int first(int thread, int threads) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads); }
};

// Rows of buffers: of tokens, behind SELECT of selected ones.
struct Rows {
  int first, count;
};

// Queries of a feed: where the first lies in the buffers, which of the pass's tokens it is, and of how many tokens they are.
struct QueryRows {
  int64_t row, token;
  int32_t count;
};

// Feeds of a pass that go through the program together: all of them, or one half (pass_halves.cpp).
struct Part {
  int number = 0;
  int first_feed = 0, end_feed = 0;
  Rows tokens{}, selected{};
};

class AttentionBeside;
struct Inputs;

// What all threads of one pass share. Behind the tokens of all feeds come those of the branches.
struct Pass {
  Engine &engine;
  const outrider_batch &batch;
  std::vector<FeedState> feeds;
  std::vector<int32_t> token, position, feed_of;  // [tokens]
  int32_t last_position = 0;                      // of all tokens
  std::vector<int32_t> selected;                  // token indices whose logits are needed
  std::vector<int32_t> choice_at, logits_at;      // [selected] index of the output, or -1
  std::vector<int64_t> logprobs_at;               // [selected] likewise
  std::vector<Branch> branches;
  std::vector<Part> parts;  // one or two
  int tokens = 0;
  bool any_given = false;  // whether a token came with a state
  std::atomic<int32_t> not_finite{-1};
  std::atomic<bool> no_memory{false};  // for some choice
  // Of the latest ROUTE: pairs of a token and one of its experts, ordered by expert, then by token.
  std::vector<int32_t> expert_first;                        // [experts + 1] of the pairs
  std::vector<int32_t> expert_next;                         // [experts] the next of its pairs while these are ordered
  std::vector<int32_t> pair_of;                             // [tokens, experts of a token] where the pair stands
  std::vector<int32_t> token_of;                            // of each pair where it stands
  std::vector<std::vector<NeededExpert>> needed_of_thread;  // the same for all of them

  explicit Pass(Engine &owner, const outrider_batch &wanted) : engine(owner), batch(wanted) {}
  void plan();
  // Memory that the threads fill: none of them may ask for it, since nothing could be made of its failure.
  void reserve_for_threads();
  void walk(int thread);
  void keep_choosings() const;

  // Operations from..end for one part, with a barrier behind each; and attention of the other part beside them, or null.
  void run_ops(size_t from, size_t end, const Part &part, AttentionBeside *beside, int thread);
  void run_op(size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread);
  // Whether the pass can go in two halves, and whether that may be quicker.
  bool may_go_in_halves() const;
  bool tries_halves() const;
  int64_t cache_bytes() const;
  void divide();
  void walk_in_halves(int thread);
  // Of all products from..end that ask memory beside them, over so many rows: eight channels of a tile and a block of rows each.
  int64_t steps_in_pairs(size_t from, size_t end, int count) const;
  void embed(const outrider_op &op, Rows rows, int thread);
  void norm(const outrider_op &op, Rows rows, int thread);
  void linear(const outrider_op &op, size_t index, const Part &part, Rows rows, AttentionBeside *beside, int thread);
  void route(const outrider_op &op, int count, int thread);
  void group_by_expert(const outrider_op &op, int count);
  void multiply_experts(const outrider_op &op, size_t index, int count, int thread);
  void mix(const outrider_op &op, int count, int thread);
  void gate(const outrider_op &op, Rows rows, int thread);
  void scale(const outrider_op &op, Rows rows, int thread);
  void xielu(const outrider_op &op, Rows rows, int thread);
  void cut(const outrider_op &op, Rows rows, int thread);
  void blend(const outrider_op &op, Rows rows, int thread);
  void match(const outrider_op &op, Rows rows, int thread);
  double softplus(double x) const;
  void multiply_heads(const outrider_op &op, size_t index, const Part &part, Rows rows, int thread);
  // Where inputs of several matrices like this one go.
  Inputs inputs_of(const outrider_weight &shape) const;
  void convolve(const outrider_op &op, size_t index, int thread);
  void convolve_columns(const outrider_op &op, const FeedState &feed, int32_t first, int32_t columns) const;
  void step_states(const outrider_op &op, size_t index, int thread);
  void step_heads(const outrider_op &op, const FeedState &feed, int32_t part, int thread) const;
  float scan_step(const outrider_op &op, int32_t head, float dt) const;
  float delta_decay(const outrider_op &op, int32_t number, double rate, float a) const;
  double decay_rate(const outrider_op &op, int32_t head) const;
  float number_of(int32_t weight, int32_t index) const;
  void hand_out(const outrider_op &op, int thread) const;
  void take_in(const outrider_op &op, int thread) const;
  void go_on(const outrider_op &op, int thread) const;
  void leave(const outrider_op &op, int thread) const;
  void spread(const outrider_op &op, int thread) const;
  // Whether an operation works on selected rows alone.
  bool is_behind_select(const outrider_op &op) const { return &op - engine.ops.data() >= engine.first_select; }
  QueryRows queries_of(const outrider_op &op, const FeedState &feed) const {
    if (!is_behind_select(op)) return {feed.first_token, feed.first_token, feed.count};
    return {feed.first_selected, feed.first_token + feed.count - feed.selected, feed.selected};
  }
  // Whether the pass has nothing for an operation: on states, or factors that are 1 up to its last position.
  bool is_left_out(const outrider_op &op) const;
  Pieces pieces_of(const outrider_weight &weight) const;
  template <typename Wanted> void store_granules(const outrider_op &op, Wanted wanted, int thread) const;
  // Queries first..end of each of the feed's heads head..end_head, whose keys and values are stored before if nobody has. Memory is
  // asked for `beside` (or null) meanwhile; then these heads' keys and values have been asked for.
  void attend_heads(const outrider_op &op, const FeedState &feed, int64_t head, int64_t end_head, int64_t first_query,
                    int64_t end_query, bool stores, int thread, AskedBeside *beside = nullptr) const;
  void attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread);
  CacheView view(const outrider_op &op, int64_t token, int64_t head) const;
  void store(const outrider_op &op, int64_t token, int64_t head) const;
  Attend queries_from(const outrider_op &op, int64_t row, int64_t token, int64_t head, int thread) const;
  void rotate(const outrider_op &op, Rows rows, int thread);
  void rotation_tables(int thread);
  // Whether a token's row takes the frequencies of long rows.
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
  // Calls work(first, last) over this thread's even share of 0..count.
  template <typename Work> void share(int64_t count, int thread, Work work) const {
    const int64_t threads = engine.pool->threads();
    const int64_t first = count * thread / threads, last = count * (thread + 1) / threads;
    if (first < last) work(first, last);
  }
  template <typename Work> void share(Rows rows, int thread, Work work) const {
    share(rows.count, thread, [&](int64_t first, int64_t last) { work(rows.first + first, rows.first + last); });
  }
  // Items of rows, so many of each: a thread has all of a row's.
  template <typename Work> void share_items(Rows rows, int64_t each, int thread, Work work) const {
    share(rows, thread, [&](int64_t first, int64_t last) { work(first * each, last * each); });
  }
  // Each part claims items of an operation of its own.
  size_t claimed(size_t index, const Part &part) const {
    return index + static_cast<size_t>(part.number) * engine.ops.size();
  }
  // Calls work(item) for those of 0..count that this thread claims: its share, and what others have not come to.
  template <typename Work> void claim(size_t claimed, int64_t count, int thread, Work work) {
    int owner = thread;
    for (int64_t item; (item = engine.claims.next(claimed, count, thread, &owner)) >= 0;) work(item);
  }
};

}  // namespace outrider

#endif
