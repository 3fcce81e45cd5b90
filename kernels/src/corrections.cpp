#include "corrections.h"

#include <algorithm>

namespace outrider {
namespace {

// One step changes the scores of the right and the wrong token by this (in logits) for the same state; for another state by this times
// the projection of that state onto this one.
constexpr float kStep = 0.5f;
// A right choice with a smaller margin than this teaches as much as a wrong choice.
constexpr double kClose = 1.0;
// The change of a repetition's bonus after a wrong choice.
constexpr float kRepetitionStep = 0.1f;

}  // namespace

void Corrections::add(const Kernels &kernels, const float *state, const Repetition &repetition, float *scores,
                      std::vector<float> *scratch) const {
  scratch->resize(tokens_.size() + static_cast<size_t>(width_));
  float *const found = scratch->data(), *const centred = found + tokens_.size();
  centre(kernels, state, centred);
  kernels.products(vectors_.data(), stride_, static_cast<int>(tokens_.size()), centred, width_, found);
  for (size_t i = 0; i < tokens_.size(); ++i) scores[tokens_[i]] += found[i];
  if (repetition.next >= 0) scores[repetition.next] += repetitions_[repetition.kind];
}

int Corrections::learn(const Kernels &kernels, const KeptChoice &choice, const float *state, int32_t right) {
  // There was no choice if its mask allowed no token.
  if (choice.own < 0 || choice.corrected < 0) return 0;
  const bool corrected_right = choice.corrected == right;
  const int good = static_cast<int>(corrected_right) - static_cast<int>(choice.own == right);
  if (choice.own != choice.corrected) record_ = record_ * kMemory + good;
  const float share = 1.0f / static_cast<float>(std::min(++states_, kStatesOfLate));
  kernels.scaled(mean_.data(), 1.0f - share, nullptr, mean_.data(), width_);
  kernels.scaled(state, share, mean_.data(), mean_.data(), width_);
  const int32_t wrong = corrected_right ? choice.runner_up : choice.corrected;
  if (corrected_right && (wrong < 0 || choice.margin >= kClose)) return good;
  if (!corrected_right && choice.repetition.next == right) repetitions_[choice.repetition.kind] += kRepetitionStep;
  if (!corrected_right && choice.repetition.next == wrong) repetitions_[choice.repetition.kind] -= kRepetitionStep;
  float square = 0.0f;
  centre(kernels, state, centred_.data());
  kernels.products(centred_.data(), stride_, 1, centred_.data(), width_, &square);
  // A state equal to the mean gives no direction to move the vectors in.
  if (!(square > 0.0f)) return good;
  ++time_;
  move(kernels, right, kStep / square, centred_.data());
  move(kernels, wrong, -kStep / square, centred_.data());
  return good;
}

void Corrections::centre(const Kernels &kernels, const float *state, float *out) const {
  kernels.scaled(mean_.data(), states_ > kFirstStates ? -1.0f : 0.0f, state, out, width_);
}

void Corrections::move(const Kernels &kernels, int32_t token, float by, const float *state) {
  float *vector = vector_of(token);
  kernels.scaled(state, by, vector, vector, width_);
}

// The token's vector. A new one is zero, and replaces the least recently changed one when there are `most_`.
float *Corrections::vector_of(int32_t token) {
  size_t at = static_cast<size_t>(std::find(tokens_.begin(), tokens_.end(), token) - tokens_.begin());
  if (at == tokens_.size()) {
    if (tokens_.size() < static_cast<size_t>(most_)) {
      // The vector first: without memory for it the token is not in the list.
      vectors_.resize((at + 1) * static_cast<size_t>(stride_));
      changed_at_.resize(at + 1);
      tokens_.push_back(token);
    } else {
      at = static_cast<size_t>(std::min_element(changed_at_.begin(), changed_at_.end()) - changed_at_.begin());
      tokens_[at] = token;
      std::fill_n(vectors_.begin() + static_cast<int64_t>(at) * stride_, stride_, 0.0f);
    }
  }
  changed_at_[at] = time_;
  return vectors_.data() + static_cast<int64_t>(at) * stride_;
}

}  // namespace outrider
