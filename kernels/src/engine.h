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

// With which frequencies a row's keys have been computed: in most programs there is one set of them.
enum class RowRope { kNone, kUsual, kLong };

// A pass may go through the program in so many parts, one after the other.
constexpr size_t kMostParts = 2;

struct RowState {
  bool open = false;
  int32_t prompt = 0;
  std::vector<int32_t> history;  // every token in the cache
  std::vector<int> blocks;
  RowRope rope = RowRope::kNone;  // of none the history has no blocks, and has to be fed anew
  int32_t begin = 0;              // tokens before this one have been skipped, and nobody sees them
  // What the last token has left for the next, where the row was so long: TAKE_IN's programs.
  std::vector<float> left;
  size_t left_at = 0;
  Recurrence recurrence;
  Sampling sampling;
  // With corrections the latest choices, and the states that they were made from.
  std::vector<KeptChoice> kept;  // [kKeptChoices], by the tokens before them
  std::vector<float> kept_states;
};

// Columns of a head's values, which may be others than those of its keys.
inline int32_t value_size(const outrider_op &op) { return op.value.width / op.kv_heads; }

// Whether the values are the last columns of the only head's keys: in int8 they are kept once then, as these.
inline bool value_in_key(const outrider_op &op) {
  return op.kv_heads == 1 && op.key.buffer == op.value.buffer && op.value.width < op.key.width &&
         op.key.offset + op.key.width == op.value.offset + op.value.width;
}

// Sines and cosines of one set of frequencies, for every token of the batch.
struct Rotation {
  int32_t weight, long_weight;
  float factor;
  int32_t half;
  Scratch tables;  // [tokens][cosine: half, sine: half], half rounded up to 16
};

// How often guesses of one kind have held, what is longer ago counting less.
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
  // Null of a matrix that is never multiplied in pairs. Those of experts lie behind the first one's.
  const int32_t *pair_constants_of(int weight, int expert = 0) const;
  int fewest_in_pairs_of(const outrider_weight &weight) const {
    return weight.scales == OUTRIDER_FACTORS ? fewest_of_factors_in_pairs : fewest_of_words_in_pairs;
  }

  const Kernels *kernels = nullptr;
  std::vector<outrider_op> ops;
  std::vector<outrider_weight> weights;
  std::vector<int32_t> widths;
  // [weights] of those that are multiplied in pairs, or of the first of such experts, else null; empty where none is.
  std::vector<std::unique_ptr<Scratch>> pair_constants;
  int fewest_of_words_in_pairs = 0, fewest_of_factors_in_pairs = 0;  // tokens; 0: never
  int64_t bytes_multiplied = 0;                                      // of all matrices that are multiplied
  HalvesChoice halves;
  std::vector<int32_t> next_linear;  // [ops] the matrix product after each operation, -1 behind the last
  int32_t vocabulary = 0, context = 0;
  int64_t first_select = 0;              // the first operation that is a SELECT
  int32_t handed_out = 0, taken_in = 0;  // columns of states
  int32_t longest = 0;                   // the longest row that the usual frequencies hold for, 0: all
  int32_t cache_format = OUTRIDER_CACHE_BF16;
  int32_t spin_microseconds = -1;
  RecurrencePlan recurrence;
  bool stepping = false;  // whether rows go on by themselves, and may be taken back to before they did
  std::array<GuessRecord, kRepetitionKinds> guess_records;
  std::unique_ptr<Corrections> corrections;    // or null
  std::unique_ptr<Shortlist> shortlist;        // likewise
  outrider_op whole_head{};                    // beside a shortlist, the matrix product that it takes the place of
  outrider_slice states_of_choices{-1, 0, 0};  // what the head multiplies, once it is known
  int64_t experts_read = 0;                    // by the latest forward, over all layers
  // Of the latest pass, while its logits are there: where each of its choices was made. A branch's row is -1.
  struct Choosing {
    int32_t row = -1, length = 0;  // the choice is what comes behind so many tokens of the row
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
  int32_t check_op(const outrider_op &op, bool selecting, std::vector<bool> *selected);
  int32_t check_experts(const outrider_op &op) const;
  int32_t check_heads(const outrider_op &op) const;
  // Whether so many weights from one on are matrices in tiles, all of one shape and storage.
  bool are_alike(int32_t weight, int32_t count) const;
  int32_t check_choice(const outrider_op &op) const;
  int32_t check_slice(const outrider_slice &slice, int width, const char *what) const;
  int32_t check_vectors(const outrider_op &op) const;
  int32_t check_convolution(const outrider_op &op) const;
  int32_t plan_cache(int layers, int64_t limit);
  int32_t plan_recurrence();
  int32_t plan_pairs();
  void plan_pairs_of(int weight, int expert, int tile);
  bool in_pairs(const outrider_weight &weight) const;
  void plan_linear();
  // The matrix product that makes the scores, or null.
  outrider_op *head();
  void meet(const int32_t *tokens, int count);
  void score_all();
  int32_t run(const outrider_batch &batch);
  // A pass in which every row's keys are those of one set of frequencies, and the passes that a batch takes to be that.
  int32_t run_pass(const outrider_batch &batch);
  int32_t run_by_length(const outrider_batch &batch);
  // Brings a row's text up to there into its cache, a part after the other.
  int32_t read(int32_t id, const std::vector<int32_t> &text, int32_t until);
  // A batch with rows whose recurrent state is behind fewer tokens than they have.
  int32_t run_with_lacking(const outrider_batch &batch);
  bool lacks(const outrider_batch &batch) const;
  // Tokens of the row that have been computed: all, unless a recurrent state was lost.
  int32_t cached(const RowState &row) const {
    return recurrence.empty() ? static_cast<int32_t>(row.history.size()) : row.recurrence.computed();
  }
  int32_t check_row(int row) const;
  int32_t check_batch(const outrider_batch &batch, int *tokens, int *selected) const;
  int32_t check_states(const outrider_batch &batch, int feed) const;
  int32_t check_states_of_program();
  int32_t reserve_blocks(const outrider_batch &batch);
  int32_t reserve_recurrence(const outrider_batch &batch);
  int32_t reserve_scratch(int tokens, int selected);
  float *buffer(const outrider_slice &slice) const {
    return buffers[static_cast<size_t>(slice.buffer)]->as<float>() + slice.offset;
  }
  // Floats from one row of a buffer to the next: an odd number of lines of memory. A tile's outputs are written for one row after
  // the other, and rows a power of two apart would share a few sets of the nearest cache.
  int64_t stride(int buffer) const { return (round_up(widths[static_cast<size_t>(buffer)], kLanes) / kLanes | 1) * kLanes; }
  int64_t stride(const outrider_slice &slice) const { return stride(slice.buffer); }

  std::vector<std::unique_ptr<Scratch>> buffers;
  std::vector<std::unique_ptr<Rotation>> rotations;
  // A thread's tile of E4M3, as bf16.
  char *expanded_of(int thread) const { return most_expanded ? expanded.as<char>() + thread * most_expanded : nullptr; }

  Scratch words, scales, offsets, starts, less, attention, expanded;
  Claims claims;
  std::vector<SamplerScratch> samplers;
  int64_t most_words = 0, most_groups = 0, most_attention = 0, most_expanded = 0;
};

}  // namespace outrider

#endif
