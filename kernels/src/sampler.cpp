#include "sampler.h"

#include <math.h>

#include <algorithm>
#include <functional>
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

// Calls take(token) for the tokens whose bits are set, by rising id.
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

// Applies penalties, bias, min_tokens and temperature.
void process(double *scores, int vocabulary, const Sampling &sampling, const int32_t *history, int length, int prompt,
             SamplerScratch *scratch) {
  if (sampling.penalised()) penalise(scores, sampling, history, length, prompt, vocabulary, &scratch->counts);
  for (const auto &[token, bias] : sampling.bias) scores[token] += bias;
  if (length - prompt < sampling.min_tokens)
    for (const int32_t token : sampling.end_tokens) scores[token] = kNone;
  if (sampling.greedy()) return;
  for (int i = 0; i < vocabulary; ++i) scores[i] /= sampling.temperature;
}

// The `count` best tokens so far; of equal scores the lower id is better.
class Leaders {
 public:
  explicit Leaders(int count) : count_(count) {}
  int32_t token(int place) const { return places_[place].token; }
  double score(int place) const { return places_[place].score; }
  // The worst score of these: a lower one cannot become a leader.
  double least() const { return places_[count_ - 1].score; }
  void offer(double score, int32_t token) {
    int place = count_;
    for (; place > 0 && better(score, token, places_[place - 1]); --place)
      if (place < count_) places_[place] = places_[place - 1];
    if (place < count_) places_[place] = {score, token};
  }

 private:
  struct Place {
    double score = kNone;
    int32_t token = -1;
  };
  static bool better(double score, int32_t token, const Place &than) {
    return score > than.score || (score == than.score && score > kNone && token < than.token);
  }

  Place places_[kMostLeaders];
  const int count_;
};

// The noise of a token is a falling function of its random word. An upper bound for the words whose noise is at least `least`.
uint32_t most_word(double least) {
  const double share = -expm1(-exp(-least)) * 0x1p32 * (1.0 + 1e-9) + 4.0;
  return share < 0x1p32 ? static_cast<uint32_t>(share) : UINT32_MAX;
}

// The scores of tokens, without noise: logits / temperature, or the result of `process`.
struct Scores {
  const float *logits;
  const double *processed;  // or null
  const uint32_t *mask;     // or null, also where `processed` includes it
  double temperature;       // 1 for a greedy choice

  bool rules_out(int token) const { return mask && !(mask[token / 32] >> token % 32 & 1u); }
  double of(int token) const {
    if (processed) return processed[token];
    return rules_out(token) ? kNone : static_cast<double>(logits[token]) / temperature;
  }
  // The highest score of tokens first .. first + count; first is a multiple of 32.
  double highest(int first, int count) const {
    if (processed) {
      double most = kNone;
      for (int i = first; i < first + count; ++i) most = processed[i] > most ? processed[i] : most;
      return most;
    }
    float most = -std::numeric_limits<float>::infinity();
    if (!mask) {
      for (int i = first; i < first + count; ++i) most = logits[i] > most ? logits[i] : most;
      return static_cast<double>(most) / temperature;
    }
    for (int start = first; start < first + count; start += 32) {
      const int left = first + count - start;
      uint32_t word = mask[start / 32];
      if (left < 32) word &= (1u << left) - 1;
      if (word == ~0u)
        for (int i = start; i < start + 32; ++i) most = logits[i] > most ? logits[i] : most;
      else
        for (; word; word &= word - 1) most = std::max(most, logits[start + __builtin_ctz(word)]);
    }
    return static_cast<double>(most) / temperature;
  }
};

// Tokens by falling score, equal scores by rising token.
bool ranks_before(const Kept &a, const Kept &b) { return a.score != b.score ? a.score > b.score : a.token < b.token; }

// Finds the tokens that top-k, top-p and min-p keep. Most scores are read only once, for the highest score of their block, since the tokens
// that are kept lie in few blocks.
class Shares {
 public:
  Shares(const Kernels &kernels, const Scores &scores, int vocabulary, SamplerScratch *scratch)
      : kernels_(kernels), scores_(scores), vocabulary_(vocabulary), scratch_(*scratch) {
    scratch_.highest.clear();
    for (int first = 0; first < vocabulary; first += kBlock)
      scratch_.highest.push_back(scores.highest(first, std::min(kBlock, vocabulary - first)));
  }

  // The tokens that are kept, by rising id; none if the mask allows none.
  const std::vector<Kept> &keep(const Sampling &sampling) {
    std::vector<Kept> &kept = scratch_.kept;
    kept.clear();
    const double highest = *std::max_element(scratch_.highest.begin(), scratch_.highest.end());
    if (highest == kNone) return kept;
    const bool some = sampling.top_k > 0 && sampling.top_k < vocabulary_;
    if (some) keep_top_k(static_cast<size_t>(sampling.top_k));
    if (sampling.top_p < 1.0) {
      const double threshold = sampling.top_p * (some ? sum_of_kept(highest) : sum_of_all(highest));
      if (some) cut_behind(threshold, highest);
      // A token whose score is more than kFirstReach below the highest is hardly ever needed.
      for (double reach = kFirstReach; !some; reach *= 2.0) {
        gather(reach > kLastReach ? kNone : highest - reach);
        if (cut_behind(threshold, highest) || reach > kLastReach) break;
      }
    } else if (!some) {
      gather(highest + log(sampling.min_p) - 1e-6);
    }
    if (sampling.min_p > 0.0) {
      weigh(highest);
      size_t left = 0;
      for (size_t i = 0; i < kept.size(); ++i)
        if (!(scratch_.weights[i] < sampling.min_p)) kept[left++] = kept[i];
      kept.resize(left);
    }
    return kept;
  }

 private:
  static constexpr int kBlock = 64;
  static constexpr double kFirstReach = 12.0, kLastReach = 1e6;

  // Keeps the tokens with a score of at least `least`, without those of -inf.
  void gather(double least) {
    std::vector<Kept> &kept = scratch_.kept;
    kept.clear();
    for (size_t b = 0; b < scratch_.highest.size(); ++b) {
      if (!(scratch_.highest[b] >= least) || scratch_.highest[b] == kNone) continue;
      const int first = static_cast<int>(b) * kBlock, count = std::min(kBlock, vocabulary_ - first);
      for (int token = first; token < first + count; ++token) {
        const double score = scores_.of(token);
        if (score >= least && score > kNone) kept.push_back({token, score});
      }
    }
  }

  void keep_top_k(size_t top_k) {
    // The k-th highest of the blocks' highest scores is a lower bound for the k-th best score: k blocks have a token at least as good.
    double least = kNone;
    if (top_k <= scratch_.highest.size()) {
      std::vector<double> &order = scratch_.scores_of_blocks;
      order = scratch_.highest;
      std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(top_k) - 1, order.end(),
                       std::greater<double>());
      least = order[top_k - 1];
    }
    gather(least);
    std::vector<Kept> &kept = scratch_.kept;
    if (kept.size() <= top_k) return;
    std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(top_k), kept.end(), ranks_before);
    kept.resize(top_k);
    in_order();
  }

  // Keeps the best tokens until their weights sum to the threshold, the one that crosses it included. Whether the sum reached it.
  bool cut_behind(double threshold, double highest) {
    std::vector<Kept> &kept = scratch_.kept;
    std::sort(kept.begin(), kept.end(), ranks_before);
    weigh(highest);
    double before = 0.0;
    size_t count = 0;
    for (; count < kept.size() && !(before >= threshold); ++count) before += scratch_.weights[count];
    kept.resize(count);
    in_order();
    return before >= threshold;
  }

  void in_order() {
    std::sort(scratch_.kept.begin(), scratch_.kept.end(), [](const Kept &a, const Kept &b) { return a.token < b.token; });
  }

  // weights[i] = exp(score - highest) of the i-th token kept.
  void weigh(double highest) {
    std::vector<double> &values = scratch_.kept_scores;
    values.clear();
    for (const Kept &each : scratch_.kept) values.push_back(each.score);
    scratch_.weights.resize(std::max(scratch_.weights.size(), values.size()));
    kernels_.exponentials(values.data(), highest, scratch_.weights.data(), static_cast<int>(values.size()));
  }

  // The sum in the order in which lane_sum adds the weights of the whole vocabulary, where tokens that are not kept have weight 0.
  double sum_of_kept(double highest) {
    weigh(highest);
    double lanes[16] = {};
    for (size_t i = 0; i < scratch_.kept.size(); ++i) lanes[scratch_.kept[i].token % 16] += scratch_.weights[i];
    return lane_sum(lanes, 16);
  }

  double sum_of_all(double highest) const {
    double lanes[16] = {}, values[kNoiseBlock], weights[kNoiseBlock];
    for (int first = 0; first < vocabulary_; first += kNoiseBlock) {
      const int count = std::min(kNoiseBlock, vocabulary_ - first);
      const double *scores = values;
      if (scores_.processed) scores = scores_.processed + first;
      else if (scores_.mask)
        for (int i = 0; i < count; ++i) values[i] = scores_.of(first + i);
      else
        for (int i = 0; i < count; ++i) values[i] = static_cast<double>(scores_.logits[first + i]) / scores_.temperature;
      kernels_.exponentials(scores, highest, weights, count);
      for (int i = 0; i < count; ++i) lanes[i % 16] += weights[i];
    }
    return lane_sum(lanes, 16);
  }

  const Kernels &kernels_;
  const Scores &scores_;
  const int vocabulary_;
  SamplerScratch &scratch_;
};

void lead_of_block(const Scores &scores, int first, int count, Leaders *leaders) {
  if (!(scores.highest(first, count) >= leaders->least())) return;
  for (int token = first; token < first + count; ++token) leaders->offer(scores.of(token), token);
}

// Likewise with noise. A token can only become a leader if its noise is at least leaders->least() - (the block's highest score). Its random
// word shows whether it may be, so most noise is never computed.
void lead_of_block(const Kernels &kernels, const Scores &scores, const Sampling &sampling, int position, int first,
                   int count, Leaders *leaders) {
  // The noise lies between about -3.2 and -log(-log(1 - 2^-33)) = 22.9.
  constexpr double kReach = 23.0, kAlways = -3.3;
  const double highest = scores.highest(first, count), wanted = leaders->least() - highest;
  if (!(highest > kNone) || wanted > kReach) return;
  int32_t places[kNoiseBlock];
  double noise[kNoiseBlock];
  const uint32_t most = wanted > kAlways ? most_word(wanted) : UINT32_MAX;
  const int found = kernels.gumbel_up_to(sampling.seed, sampling.sample, static_cast<uint32_t>(position), first, count,
                                         most, places, noise);
  for (int i = 0; i < found; ++i) leaders->offer(scores.of(first + places[i]) + noise[i], first + places[i]);
}

bool allows(const uint32_t *mask, int32_t token) { return mask[token / 32] >> token % 32 & 1u; }

// The lowest token other than `first` that has this logit and is allowed, -1 if there is none. Most blocks are skipped as a whole.
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
    return fail(OUTRIDER_INVALID, "temperature %g: it must be 0 or more, and finite", from.temperature);
  if (!(from.repetition_penalty > 0.0) || isinf(from.repetition_penalty))
    return fail(OUTRIDER_INVALID, "repetition penalty %g: it must be more than 0, and finite", from.repetition_penalty);
  if (!(from.top_p > 0.0 && from.top_p <= 1.0))
    return fail(OUTRIDER_INVALID, "top_p %g: it must be more than 0 and at most 1", from.top_p);
  if (!(from.min_p >= 0.0 && from.min_p <= 1.0))
    return fail(OUTRIDER_INVALID, "min_p %g: it must be from 0 to 1", from.min_p);
  if (!isfinite(from.presence_penalty))
    return fail(OUTRIDER_INVALID, "presence penalty %g: it must be finite", from.presence_penalty);
  if (!isfinite(from.frequency_penalty))
    return fail(OUTRIDER_INVALID, "frequency penalty %g: it must be finite", from.frequency_penalty);
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
    if (!isfinite(from.bias_values[i]))
      return fail(OUTRIDER_INVALID, "a bias of %g on token %d: it must be finite", from.bias_values[i],
                  from.bias_tokens[i]);
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

namespace {

// Finds the best tokens. The block of `likely` comes first: with good leaders most of the other blocks need no noise.
void lead(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling, const int32_t *history,
          int length, int prompt, SamplerScratch *scratch, const uint32_t *mask, double *wanted_scores, int likely,
          Leaders *leaders) {
  const bool greedy = sampling.greedy();
  Scores scores{logits, nullptr, mask, greedy ? 1.0 : sampling.temperature};
  if (wanted_scores || !sampling.only_tempered(length - prompt)) {
    scratch->scores.resize(static_cast<size_t>(vocabulary));
    double *work = scratch->scores.data();
    if (mask) {
      std::fill_n(work, vocabulary, kNone);
      each_allowed(mask, vocabulary, [&](int token) { work[token] = static_cast<double>(logits[token]); });
    } else {
      for (int i = 0; i < vocabulary; ++i) work[i] = static_cast<double>(logits[i]);
    }
    process(work, vocabulary, sampling, history, length, prompt, scratch);
    if (wanted_scores) std::copy(work, work + vocabulary, wanted_scores);
    scores.processed = work;
    scores.mask = nullptr;
  }
  if (sampling.keeps_some(vocabulary)) {
    const std::vector<Kept> &kept = Shares(kernels, scores, vocabulary, scratch).keep(sampling);
    if (wanted_scores) std::fill_n(wanted_scores, vocabulary, kNone);
    for (const Kept &each : kept) {
      if (wanted_scores) wanted_scores[each.token] = each.score;
      int32_t places[4];
      double noise[4];
      kernels.gumbel_up_to(sampling.seed, sampling.sample, static_cast<uint32_t>(length), each.token / 4 * 4,
                           each.token % 4 + 1, UINT32_MAX, places, noise);
      leaders->offer(each.score + noise[each.token % 4], each.token);
    }
    return;
  }
  const auto block = [&](int first) {
    const int count = std::min(kNoiseBlock, vocabulary - first);
    if (greedy) lead_of_block(scores, first, count, leaders);
    else lead_of_block(kernels, scores, sampling, length, first, count, leaders);
  };
  const int before_others = likely / kNoiseBlock * kNoiseBlock;
  block(before_others);
  for (int first = 0; first < vocabulary; first += kNoiseBlock)
    if (first != before_others) block(first);
}

}  // namespace

Choice choose_token(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling,
                    const int32_t *history, int length, int prompt, SamplerScratch *scratch, const uint32_t *mask,
                    double *scores, bool runner_up) {
  // A mask that was left open allows every token (workers/constraints/matching.py); without a mask the choice is faster.
  if (mask && allows_all(mask, vocabulary)) mask = nullptr;
  float high = 0.0f, next = 0.0f;
  int finite = 0;
  const bool plain = sampling.greedy() && sampling.only_tempered(length - prompt) && !scores;
  const int32_t first = kernels.argmax(logits, vocabulary, plain ? mask : nullptr, &high, &next, &finite);
  if (!finite) return {first, -1, 0.0, false};
  if (plain) {
    // The mask allows no token.
    if (!(high > -std::numeric_limits<float>::infinity())) return {-1, -1, 0.0, true};
    const int32_t after = runner_up ? holder(logits, vocabulary, mask, next, first) : -1;
    return {first, after, static_cast<double>(high) - static_cast<double>(next), true};
  }
  Leaders leaders(2);
  lead(kernels, logits, vocabulary, sampling, history, length, prompt, scratch, mask, scores, first, &leaders);
  // The mask allows no token.
  if (leaders.token(0) < 0) return {-1, -1, 0.0, true};
  return {leaders.token(0), leaders.token(1), leaders.score(0) - leaders.score(1), true};
}

void rank_tokens(const Kernels &kernels, const float *logits, int vocabulary, const Sampling &sampling,
                 const int32_t *history, int length, int prompt, SamplerScratch *scratch, const uint32_t *mask, int likely,
                 int count, int32_t *tokens) {
  Leaders leaders(count);
  lead(kernels, logits, vocabulary, sampling, history, length, prompt, scratch, mask, nullptr, likely, &leaders);
  for (int place = 0; place < count; ++place) tokens[place] = leaders.token(place);
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
    // Insertion sort: a token is inserted after those with an equal score.
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
