// The choice of a token; workers/engines/sampling.py is the definition.
#ifndef OUTRIDER_SRC_SAMPLER_H
#define OUTRIDER_SRC_SAMPLER_H

#include <stdint.h>

#include <utility>
#include <vector>

#include "kernels.h"

namespace outrider {

struct Sampling {
  double temperature = 0.0, top_p = 1.0, min_p = 0.0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
  uint64_t seed = 0;
  uint32_t sample = 0;
  int32_t top_k = 0;
  std::vector<std::pair<int32_t, double>> bias;
  int32_t min_tokens = 0;
  std::vector<int32_t> end_tokens;

  bool greedy() const { return temperature == 0.0; }
  // Whether scores are just logits, or logits / temperature (no penalties, bias or min_tokens), after `written` tokens of the answer.
  bool only_tempered(int written) const {
    return !penalised() && bias.empty() && (written >= min_tokens || end_tokens.empty());
  }
  bool keeps_some(int vocabulary) const {
    return !greedy() && ((top_k > 0 && top_k < vocabulary) || top_p < 1.0 || min_p > 0.0);
  }
  bool penalised() const { return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0; }
};

// Copies the C structure; a status code if it is invalid for this vocabulary.
int32_t copy_sampling(const outrider_sampling &from, int vocabulary, Sampling *to);

struct Choice {
  int32_t token;
  int32_t runner_up;  // the token with the second-best score, -1: none, or not asked for
  double margin;
  bool finite;
};

struct Kept {
  int32_t token;
  double score;
};

// Scratch memory of one thread's choices.
struct SamplerScratch {
  std::vector<double> scores, weights, highest, scores_of_blocks, kept_scores;
  std::vector<Kept> kept;
  std::vector<int32_t> counts, history;
  std::vector<float> corrections;
};

// The choice at position `length` after `history`, whose first `prompt` tokens are the prompt; with a mask among tokens whose bits are
// set, -1 if there are none. scores: out [vocabulary], without the noise, or null. runner_up: whether to find Choice::runner_up.
Choice choose_token(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling,
                    const int32_t *history, int length, int prompt, SamplerScratch *scratch, const uint32_t *mask,
                    double *scores, bool runner_up = false);

// The most tokens that are ranked at once.
constexpr int kMostLeaders = 16;

// Likewise the `count` best tokens, best first; -1 where there are no more. Logits must be finite. `likely`: a token that is probably
// among them, which makes the search faster.
void rank_tokens(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling,
                 const int32_t *history, int length, int prompt, SamplerScratch *scratch, const uint32_t *mask, int likely,
                 int count, int32_t *tokens);

// The log-probabilities of `chosen` and of the `count` likeliest tokens (equal logits by rising id), by the raw logits, which must be
// finite. workers/engines/sampling.py is the definition. tokens, values: out [1 + count].
void log_probabilities(const Kernels &kernels, const float *logits, int vocabulary, int32_t chosen, int count,
                       SamplerScratch *scratch, int32_t *tokens, double *values);

}  // namespace outrider

#endif
