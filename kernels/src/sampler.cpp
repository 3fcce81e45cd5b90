#include "sampler.h"

#include <math.h>

#include <algorithm>
#include <limits>

#include "message.h"

namespace outrider {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();
constexpr int kNoiseBlock = 1024;

double lane_sum(const double *x, int count) {
  double lanes[16] = {};
  for (int i = 0; i < count; ++i) lanes[i % 16] += x[i];
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

void penalise(double *scores, const Sampling &sampling, const int32_t *history, int length, int prompt, int vocabulary,
              std::vector<int32_t> *counts) {
  counts->resize(static_cast<size_t>(vocabulary), 0);
  int32_t *count = counts->data();
  if (sampling.repetition_penalty != 1.0) {
    for (int i = 0; i < length; ++i) {
      double &score = scores[history[i]];
      if (count[history[i]]++ == 0)
        score = score > 0.0 ? score / sampling.repetition_penalty : score * sampling.repetition_penalty;
    }
    for (int i = 0; i < length; ++i) count[history[i]] = 0;
  }
  if (sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0) return;
  for (int i = prompt; i < length; ++i) ++count[history[i]];
  for (int i = prompt; i < length; ++i) {
    if (count[history[i]] == 0) continue;
    scores[history[i]] -= static_cast<double>(count[history[i]]) * sampling.frequency_penalty + sampling.presence_penalty;
    count[history[i]] = 0;
  }
}

// Token ids by falling score, equal scores by rising id: the first `wanted` of them are put in order.
void rank(const double *scores, std::vector<int32_t> *order, size_t wanted) {
  std::partial_sort(order->begin(), order->begin() + static_cast<std::ptrdiff_t>(wanted), order->end(),
                    [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
}

void all_tokens(const double *scores, int vocabulary, std::vector<int32_t> *order) {
  order->clear();
  for (int32_t token = 0; token < vocabulary; ++token)
    if (scores[token] > kNone) order->push_back(token);
}

void keep_top_k(double *scores, int vocabulary, int top_k, SamplerScratch *scratch) {
  std::vector<int32_t> &order = scratch->order;
  all_tokens(scores, vocabulary, &order);
  if (order.size() <= static_cast<size_t>(top_k)) return;
  std::nth_element(order.begin(), order.begin() + top_k, order.end(),
                   [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  for (size_t i = static_cast<size_t>(top_k); i < order.size(); ++i) scores[order[i]] = kNone;
}

void keep_top_p(double *scores, const double *weights, int vocabulary, double top_p, SamplerScratch *scratch) {
  std::vector<int32_t> &order = scratch->order;
  all_tokens(scores, vocabulary, &order);
  const double threshold = top_p * lane_sum(weights, vocabulary);
  // Most of the time a few dozen tokens hold the threshold; the order is widened until it does.
  double before = 0.0;
  size_t kept = 0;
  for (size_t sorted = 0; kept == sorted && sorted < order.size();) {
    sorted = std::min(order.size(), std::max<size_t>(64, sorted * 8));
    rank(scores, &order, sorted);
    before = 0.0;
    for (kept = 0; kept < sorted && !(before >= threshold); ++kept) before += weights[order[kept]];
  }
  for (size_t i = kept; i < order.size(); ++i) scores[order[i]] = kNone;
}

// Calls take(token) for the tokens whose bits are set, in their order.
template <typename Take> void each_allowed(const uint32_t *mask, int vocabulary, Take take) {
  for (int first = 0; first < vocabulary; first += 32) {
    uint32_t word = mask[first / 32];
    if (vocabulary - first < 32) word &= (1u << (vocabulary - first)) - 1;
    for (; word; word &= word - 1) take(first + __builtin_ctz(word));
  }
}

bool allows_all(const uint32_t *mask, int vocabulary) {
  const int whole = vocabulary / 32, rest = vocabulary % 32;
  for (int word = 0; word < whole; ++word)
    if (mask[word] != ~0u) return false;
  const uint32_t last = (1u << rest) - 1;
  return !rest || (mask[whole] & last) == last;
}

void process(const Kernels &kernels, double *scores, int vocabulary, const Sampling &sampling, const int32_t *history,
             int length, int prompt, SamplerScratch *scratch) {
  if (sampling.penalised()) penalise(scores, sampling, history, length, prompt, vocabulary, &scratch->counts);
  for (const auto &[token, bias] : sampling.bias) scores[token] += bias;
  if (length - prompt < sampling.min_tokens)
    for (const int32_t token : sampling.end_tokens) scores[token] = kNone;
  if (sampling.greedy()) return;
  for (int i = 0; i < vocabulary; ++i) scores[i] /= sampling.temperature;
  if (sampling.top_k > 0 && sampling.top_k < vocabulary) keep_top_k(scores, vocabulary, sampling.top_k, scratch);
  if (!(sampling.top_p < 1.0) && !(sampling.min_p > 0.0)) return;
  double highest = kNone;
  for (int i = 0; i < vocabulary; ++i) highest = std::max(highest, scores[i]);
  if (highest == kNone) return;
  scratch->weights.resize(static_cast<size_t>(vocabulary));
  double *weights = scratch->weights.data();
  kernels.exponentials(scores, highest, weights, vocabulary);
  if (sampling.top_p < 1.0) keep_top_p(scores, weights, vocabulary, sampling.top_p, scratch);
  for (int i = 0; i < vocabulary; ++i)
    if (weights[i] < sampling.min_p) scores[i] = kNone;
}

// The largest and the second largest of scores + noise. A token can only matter if its score lies no further below the best sum so
// far than the noise can reach, so most of the noise is never drawn.
Choice best_with_noise(const Kernels &kernels, const double *scores, int vocabulary, const Sampling &sampling,
                       int position) {
  double noise[kNoiseBlock];
  Choice choice{0, -1, 0.0, true};
  double best = kNone, second = kNone;
  // -log(-log(1 - 2^-33)) is 22.9; the least noise is about -3.2.
  constexpr double kReach = 23.0;
  for (int first = 0; first < vocabulary; first += kNoiseBlock) {
    const int count = std::min(kNoiseBlock, vocabulary - first);
    double highest = kNone;
    for (int i = 0; i < count; ++i) highest = std::max(highest, scores[first + i]);
    if (!(highest + kReach > second)) continue;
    kernels.gumbel(sampling.seed, sampling.sample, static_cast<uint32_t>(position), first, count, noise);
    for (int i = 0; i < count; ++i) {
      const double score = scores[first + i] + noise[i];
      if (score > best) {
        second = best;
        choice.runner_up = best > kNone ? choice.token : -1;
        best = score;
        choice.token = first + i;
      } else if (score > second) {
        second = score;
        choice.runner_up = first + i;
      }
    }
  }
  choice.margin = best - second;
  return best > kNone ? choice : Choice{-1, -1, 0.0, true};
}

bool allows(const uint32_t *mask, int32_t token) { return mask[token / 32] >> token % 32 & 1u; }

// The first token but `first` that has this logit and is allowed, -1 where there is none. Most of the time a block is passed over as a
// whole.
int32_t holder(const float *logits, int vocabulary, const uint32_t *mask, float value, int32_t first) {
  constexpr int kBlock = 64;
  for (int start = 0; start < vocabulary; start += kBlock) {
    const int count = std::min(kBlock, vocabulary - start);
    int found = 0;
    for (int i = 0; i < count; ++i) found |= logits[start + i] == value;
    if (!found) continue;
    for (int i = start; i < start + count; ++i)
      if (logits[i] == value && i != first && (!mask || allows(mask, i))) return i;
  }
  return -1;
}

}  // namespace

int32_t copy_sampling(const outrider_sampling &from, int vocabulary, Sampling *to) {
  if (!(from.temperature >= 0.0) || isinf(from.temperature))
    return fail(OUTRIDER_INVALID, "temperature %g: it must be 0 or more", from.temperature);
  if (!(from.repetition_penalty > 0.0))
    return fail(OUTRIDER_INVALID, "repetition penalty %g: it must be more than 0", from.repetition_penalty);
  to->temperature = from.temperature;
  to->top_p = from.top_p;
  to->min_p = from.min_p;
  to->repetition_penalty = from.repetition_penalty;
  to->presence_penalty = from.presence_penalty;
  to->frequency_penalty = from.frequency_penalty;
  to->seed = from.seed;
  to->sample = from.sample;
  to->top_k = from.top_k;
  to->bias.clear();
  for (int i = 0; i < from.bias_count; ++i) {
    if (from.bias_tokens[i] < 0 || from.bias_tokens[i] >= vocabulary)
      return fail(OUTRIDER_INVALID, "a bias on token %d of a vocabulary of %d", from.bias_tokens[i], vocabulary);
    to->bias.emplace_back(from.bias_tokens[i], from.bias_values[i]);
  }
  to->min_tokens = from.min_tokens;
  to->end_tokens.clear();
  for (int i = 0; i < from.end_count; ++i) {
    if (from.end_tokens[i] < 0 || from.end_tokens[i] >= vocabulary)
      return fail(OUTRIDER_INVALID, "end token %d of a vocabulary of %d", from.end_tokens[i], vocabulary);
    to->end_tokens.push_back(from.end_tokens[i]);
  }
  return OUTRIDER_OK;
}

Choice choose_token(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling,
                    const int32_t *history, int length, int prompt, SamplerScratch *scratch, const uint32_t *mask,
                    double *scores, bool runner_up) {
  // Places that are left open have such a mask, which takes longer than none.
  if (mask && allows_all(mask, vocabulary)) mask = nullptr;
  float high = 0.0f, next = 0.0f;
  int finite = 0;
  const bool too_early = length - prompt < sampling.min_tokens;
  const bool plain = sampling.greedy() && !sampling.penalised() && sampling.bias.empty() && !too_early && !scores;
  const int32_t first = kernels.argmax(logits, vocabulary, plain ? mask : nullptr, &high, &next, &finite);
  if (!finite) return {first, -1, 0.0, false};
  if (plain) {
    // Nothing is allowed.
    if (!(high > -std::numeric_limits<float>::infinity())) return {-1, -1, 0.0, true};
    const int32_t after = runner_up ? holder(logits, vocabulary, mask, next, first) : -1;
    return {first, after, static_cast<double>(high) - static_cast<double>(next), true};
  }
  scratch->scores.resize(static_cast<size_t>(vocabulary));
  double *work = scratch->scores.data();
  if (mask) {
    std::fill_n(work, vocabulary, kNone);
    each_allowed(mask, vocabulary, [&](int token) { work[token] = static_cast<double>(logits[token]); });
  } else {
    for (int i = 0; i < vocabulary; ++i) work[i] = static_cast<double>(logits[i]);
  }
  process(kernels, work, vocabulary, sampling, history, length, prompt, scratch);
  if (scores) std::copy(work, work + vocabulary, scores);
  if (!sampling.greedy()) return best_with_noise(kernels, work, vocabulary, sampling, length);
  Choice choice{0, -1, 0.0, true};
  double best = kNone, second = kNone;
  for (int token = 0; token < vocabulary; ++token) {
    if (work[token] > best) {
      second = best;
      choice.runner_up = best > kNone ? choice.token : -1;
      best = work[token];
      choice.token = token;
    } else if (work[token] > second) {
      second = work[token];
      choice.runner_up = token;
    }
  }
  choice.margin = best - second;
  // Nothing is allowed.
  return best > kNone ? choice : Choice{-1, -1, 0.0, true};
}

void log_probabilities(const Kernels &kernels, const float *logits, int vocabulary, int32_t chosen, int count,
                       SamplerScratch *scratch, int32_t *tokens, double *values) {
  scratch->scores.resize(static_cast<size_t>(vocabulary));
  scratch->weights.resize(static_cast<size_t>(vocabulary));
  double *scores = scratch->scores.data();
  int32_t *likeliest = tokens + 1;
  int held = 0;
  double highest = kNone;
  for (int32_t token = 0; token < vocabulary; ++token) {
    const double score = scores[token] = static_cast<double>(logits[token]);
    highest = std::max(highest, score);
    // Those so far stand in order; a later token goes behind its equals.
    if (count == 0 || (held == count && !(score > scores[likeliest[held - 1]]))) continue;
    int at = held < count ? held++ : held - 1;
    for (; at > 0 && score > scores[likeliest[at - 1]]; --at) likeliest[at] = likeliest[at - 1];
    likeliest[at] = token;
  }
  kernels.exponentials(scores, highest, scratch->weights.data(), vocabulary);
  const double total = kernels.logarithm(lane_sum(scratch->weights.data(), vocabulary));
  tokens[0] = chosen;
  for (int i = 0; i <= count; ++i) values[i] = (scores[tokens[i]] - highest) - total;
}

}  // namespace outrider
