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
  int32_t first_branch, end_branch;  // of the pass's branches
  int64_t state_out, state_in;       // where the states of its tokens lie in the batch's, or -1
  std::vector<char *> blocks;
};

// A token that is tried in place of one that is fed, which stands at `instead`.
struct Branch {
  int32_t token, instead;  // indices into the pass's tokens
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

  void run_op(size_t index, int count, int thread);
  void embed(const outrider_op &op, int thread);
  void norm(const outrider_op &op, int count, int thread);
  void linear(const outrider_op &op, size_t index, int count, int thread);
  void route(const outrider_op &op, int count, int thread);
  void group_by_expert(const outrider_op &op, int count);
  void multiply_experts(const outrider_op &op, size_t index, int count, int thread);
  void mix(const outrider_op &op, int count, int thread);
  void gate(const outrider_op &op, int count, int thread);
  void convolve(const outrider_op &op, size_t index, int thread);
  void convolve_columns(const outrider_op &op, const FeedState &feed, int32_t first, int32_t columns) const;
  void delta(const outrider_op &op, size_t index, int thread);
  void delta_heads(const outrider_op &op, const FeedState &feed, int32_t key_head, int thread) const;
  float decay(const outrider_op &op, int32_t head, float a) const;
  void hand_out(const outrider_op &op, int thread) const;
  void take_in(const outrider_op &op, int thread) const;
  void go_on(const outrider_op &op, int thread) const;
  void leave(const outrider_op &op, int thread) const;
  void spread(const outrider_op &op, int thread) const;
  // Whether the pass has anything for an operation that concerns states.
  bool is_left_out(const outrider_op &op) const;
  Pieces pieces_of(const outrider_weight &weight) const;
  template <typename Wanted> void store_granules(const outrider_op &op, Wanted wanted, int thread) const;
  void attend_branch(const outrider_op &op, const Branch &branch, int64_t head, int thread);
  CacheView view(const outrider_op &op, int64_t token, int64_t head) const;
  void store(const outrider_op &op, int64_t token, int64_t head) const;
  Attend queries_from(const outrider_op &op, int64_t token, int64_t head, int thread) const;
  void rotate(const outrider_op &op, int thread);
  void rotation_tables(int thread);
  // Whether a token's row takes the frequencies of long rows.
  bool is_long(int64_t token) const {
    const FeedState &feed = feeds[static_cast<size_t>(feed_of[static_cast<size_t>(token)])];
    return engine.rows[static_cast<size_t>(feed.row)].rope == RowRope::kLong;
  }
  void attention(const outrider_op &op, size_t index, int thread);
  void select(const outrider_op &op, int thread);
  void choose(const outrider_op &op, size_t index, int thread);
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
  // Calls work(item) for those of 0..count that this thread claims: its share, and what others have not come to.
  template <typename Work> void claim(size_t index, int64_t count, int thread, Work work) {
    int owner = thread;
    for (int64_t item; (item = engine.claims.next(index, count, thread, &owner)) >= 0;) work(item);
  }
};

}  // namespace outrider

#endif
