// A program, the rows it runs for, and one forward pass.
#ifndef OUTRIDER_SRC_ENGINE_H
#define OUTRIDER_SRC_ENGINE_H

#include <memory>
#include <vector>

#include "cache.h"
#include "claims.h"
#include "corrections.h"
#include "halves_choice.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "recurrence.h"
#include "sampler.h"
#include "shortlist.h"

namespace outrider {

// The rope frequencies of a row's keys, in programs that change them with the row's length (Engine::longest); kNone in all others.
enum class RowRope { kNone, kUsual, kLong };

// A pass consists of at most this many parts (Part).
constexpr size_t kMostParts = 2;

struct RowState {
  bool open = false;
  int32_t prompt = 0;
  std::vector<int32_t> history;  // every token in the cache
  std::vector<int> blocks;
  RowRope rope = RowRope::kNone;  // kNone where longest > 0: no keys yet, the history must be recomputed
  int32_t begin = 0;              // tokens before this one were skipped; no query attends to them
  // What STORE_HIDDEN stored for the row's last token, and the length of the row then.
  std::vector<float> stored_hidden;
  size_t stored_at = 0;
  Recurrence recurrence;
  Sampling sampling;
  // With corrections: the latest choices, and the hidden states that they were made from.
  std::vector<KeptChoice> kept;  // [kKeptChoices], index: number of tokens before the choice, modulo kKeptChoices
  std::vector<float> kept_states;
};

// Columns of a value head; they may differ from those of a key head (head_size).
inline int32_t value_size(const outrider_op &op) { return op.value.width / op.kv_heads; }

// How many parts the weights of a CONNECT have: for reads, writes and mixes; 0: it is none.
inline int parts_of_connections(const outrider_op &op) {
  const int64_t n = op.heads, width = op.out.width;
  return width == n ? 1 : width == 2 * n ? 2 : width == (2 + n) * n ? 3 : 0;
}

// Whether there is one kv head whose values are the last columns of its keys. An int8 cache then stores them only once, in the keys.
inline bool value_in_key(const outrider_op &op) {
  return op.kv_heads == 1 && op.key.buffer == op.value.buffer && op.value.width < op.key.width &&
         op.key.offset + op.key.width == op.value.offset + op.value.width;
}

// Rope's sines and cosines for every token of the batch, by one set of frequencies.
struct Rotation {
  int32_t weight, long_weight;
  float factor;
  int32_t half;
  Scratch tables;  // [tokens][cosine: half, sine: half], half rounded up to 16
};

// How often guesses of one kind were right, with exponential decay.
struct GuessRecord {
  double held = 2.0, tried = 4.0;
  double chance() const { return held / tried; }
  void observe(bool right) {
    constexpr double memory = 0.98;
    held = held * memory + (right ? 1.0 : 0.0);
    tried = tried * memory + 1.0;
  }
};

struct Engine {
  static int32_t create(const outrider_program &program, const outrider_options &options, std::unique_ptr<Engine> *engine);

  int32_t open(const outrider_sampling &sampling, int prompt, int32_t *row);
  int32_t fork(int source, int length, const outrider_sampling &sampling, int prompt, int32_t *row);
  int32_t skip(int row, const int32_t *tokens, int count);
  int32_t truncate(int row, int length);
  int32_t close(int row);
  int32_t length(int row) const;
  int32_t use_threads(int threads, const int32_t *cores);
  int32_t reserve(int tokens, int selected, int64_t cache_tokens);
  int32_t forward(const outrider_batch &batch);
  int32_t decode(const outrider_decode_batch &wanted);
  int32_t correct(int tokens);
  int32_t shorten(int tokens);
  int32_t learn(int row, int first, const int32_t *tokens, int count, int32_t *better, int32_t *worse);
  int32_t rank(int choice, const uint32_t *mask, int mask_words, int count, int32_t *tokens);
  // Null for a matrix that is never multiplied in pairs. `weight` is the first expert's; the constants of the others follow.
  const int32_t *pair_constants_of(int weight, int expert = 0) const;
  int fewest_in_pairs_of(const outrider_weight &weight) const {
    return weight.scales == OUTRIDER_WORDS     ? fewest_of_words_in_pairs
           : weight.scales == OUTRIDER_FACTORS ? fewest_of_factors_in_pairs
                                               : fewest_of_groups_in_pairs;
  }
  // Whether so many tokens are multiplied in pairs with this weight, which can be.
  bool enough_for_pairs(const outrider_weight &weight, int tokens) const {
    return tokens * digits_of(weight.format) >= fewest_in_pairs_of(weight);
  }

  const Kernels *kernels = nullptr;
  std::vector<outrider_op> ops;
  std::vector<outrider_weight> weights;
  std::vector<int32_t> widths;
  // [weights] constants of matrices that are multiplied in pairs (all experts' at the first one's index), else null. Empty if there are
  // none.
  std::vector<std::unique_ptr<Scratch>> pair_constants;
  // Rows of a pass (Input::rows); 0: never.
  int fewest_of_words_in_pairs = 0, fewest_of_factors_in_pairs = 0, fewest_of_groups_in_pairs = 0;
  bool any_in_pairs = false;
  int64_t bytes_multiplied = 0;  // of all matrices that every pass reads, not those of experts
  HalvesChoice halves;
  std::vector<int32_t> next_linear;  // [ops] the next LINEAR after each operation, -1: none
  int32_t vocabulary = 0, context = 0;
  int64_t first_select = 0;               // the first operation that is a SELECT
  int32_t hidden_out = 0, hidden_in = 0;  // columns of hidden states
  int32_t longest = 0;                    // the longest row with the usual rope frequencies, 0: they never change
  int32_t cache_format = OUTRIDER_CACHE_BF16;
  int32_t spin_microseconds = -1;
  RecurrencePlan recurrence;
  bool stepping = false;  // in decode(): its tokens may be taken back by truncation
  // [feeds] in run_with_lacking, else empty: how many of a feed's first tokens are fed again, to restore its row's recurrent state.
  std::vector<int32_t> fed_again;
  std::array<GuessRecord, kRepetitionKinds> guess_records;
  std::unique_ptr<Corrections> corrections;    // or null
  std::unique_ptr<Shortlist> shortlist;        // or null
  outrider_op whole_head{};                    // with a shortlist: the LM head over the whole vocabulary
  outrider_slice states_of_choices{-1, 0, 0};  // with corrections: the input of the LM head
  int64_t experts_read = 0;                    // distinct experts used by the latest forward, summed over all layers
  // Where each choice of the latest pass was made, as long as its logits are in memory. The row of a choice after a branch is -1.
  struct Choosing {
    int32_t row = -1, length = 0;  // the choice follows this many tokens of the row
    int32_t token = 0;             // or -1
    const float *logits = nullptr;
  };
  std::vector<Choosing> choosings;
  std::unique_ptr<Pool> pool;
  std::unique_ptr<Cache> cache;
  std::vector<RowState> rows;

 private:
  friend struct Pass;
  friend class AttentionBeside;
  int32_t check(const outrider_program &program);
  int32_t plan_cache(int layers, int64_t limit);
  int32_t plan_recurrence();
  int32_t plan_pairs();
  void plan_pairs_of(int weight, int expert, int tile);
  bool in_pairs(const outrider_weight &weight) const;
  void plan_linear();
  void plan_scratch();
  void plan_rotations();
  // The LINEAR that computes the logits (the LM head), or null.
  outrider_op *head();
  void meet(const int32_t *tokens, int count);
  void score_all();
  int32_t run(const outrider_batch &batch);
  // One pass, in which all keys of a row have the same rope frequencies; and the passes into which a batch is split to achieve that.
  int32_t run_pass(const outrider_batch &batch);
  int32_t run_by_length(const outrider_batch &batch);
  // Computes the row's tokens up to `until`, a few at a time (prefill).
  int32_t read(int32_t id, const std::vector<int32_t> &text, int32_t until);
  // Runs a batch with rows whose recurrent state covers fewer tokens than they have (see lacks).
  int32_t run_with_lacking(const outrider_batch &batch);
  bool lacks(const outrider_batch &batch) const;
  // Tokens of the row that have been computed: all, unless a truncation lost the recurrent state.
  int32_t cached(const RowState &row) const {
    return recurrence.empty() ? static_cast<int32_t>(row.history.size()) : row.recurrence.computed();
  }
  int32_t check_row(int row) const;
  int32_t check_threads() const;
  int32_t check_batch(const outrider_batch &batch, int *tokens, int *selected) const;
  int32_t check_states(const outrider_batch &batch, int feed) const;
  int32_t check_states_of_program();
  int32_t reserve_blocks(const outrider_batch &batch);
  int32_t reserve_blocks_of(RowState *row, int count);
  // Takes back what was reserved for a batch that will not run; the rows are then as they were.
  void give_back(const outrider_batch &batch);
  // The id of a new row with this state.
  int32_t add(RowState &&state);
  int32_t reserve_recurrence(const outrider_batch &batch);
  int32_t reserve_scratch(int tokens, int selected);
  float *buffer(const outrider_slice &slice) const {
    return buffers[static_cast<size_t>(slice.buffer)]->as<float>() + slice.offset;
  }
  // Floats from one row of a buffer to the next: an odd number of cache lines. A tile's outputs are written row by row, and rows a power
  // of two apart would map to a few sets of the L1 cache.
  int64_t stride(int buffer) const { return (round_up(widths[static_cast<size_t>(buffer)], kLanes) / kLanes | 1) * kLanes; }
  int64_t stride(const outrider_slice &slice) const { return stride(slice.buffer); }

  std::vector<std::unique_ptr<Scratch>> buffers;
  std::vector<std::unique_ptr<Rotation>> rotations;
  // Where a thread expands a tile of float codes to bf16.
  char *expanded_of(int thread) const { return most_expanded ? expanded.as<char>() + thread * most_expanded : nullptr; }

  Scratch words, scales, offsets, starts, less, attention, expanded;
  Claims claims;
  std::vector<SamplerScratch> samplers;
  int64_t most_words = 0, most_groups = 0, most_attention = 0, most_expanded = 0;
};

}  // namespace outrider

#endif
