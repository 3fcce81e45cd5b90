// Online corrections of a draft's scores, learned from the target's choices. Some tokens have a correction vector, whose product with
// the hidden state before the LM head is added to the token's score. Where the row's last tokens have occurred before, a bonus is added
// to the score of the token that followed them.
#ifndef OUTRIDER_SRC_CORRECTIONS_H
#define OUTRIDER_SRC_CORRECTIONS_H

#include <stdint.h>

#include <array>
#include <vector>

#include "kernels.h"
#include "repetition.h"

namespace outrider {

// A choice from which Corrections::learn can learn once the target's choice is known: the one after `length` tokens of its row, by the
// model's own scores (`own`) and by the corrected ones (`corrected`, `runner_up`, `margin`).
struct KeptChoice {
  int32_t length = -1, own = -1, corrected = -1, runner_up = -1;
  double margin = 0.0;
  Repetition repetition;
};
// Choices kept for each row, in a ring: the choice after n tokens overwrites the one after n - kKeptChoices.
constexpr int32_t kKeptChoices = 64;

class Corrections {
 public:
  // width: columns of a hidden state. most: tokens that can have a vector at once; a new one replaces the least recently changed.
  Corrections(int32_t width, int32_t most) : width_(width), stride_(round_up(width, kLanes)), most_(most) {
    mean_.resize(static_cast<size_t>(width));
    centred_.resize(static_cast<size_t>(width));
    repetitions_.fill(kFirstRepetition);
  }

  int32_t width() const { return width_; }
  // Whether add() would change any score, given the row's latest repetition.
  bool change(const Repetition &repetition) const { return !tokens_.empty() || repetition.next >= 0; }
  // Whether corrections have lately been worth it, see kLeastRecord.
  bool trusted() const { return record_ >= kLeastRecord; }
  void add(const Kernels &kernels, const float *state, const Repetition &repetition, float *scores,
           std::vector<float> *scratch) const;
  // `right` is the target's choice where the draft made `choice` from the hidden state `state`. Returns 1 if the corrections had made
  // the choice right, -1 if they had made it wrong, else 0.
  int learn(const Kernels &kernels, const KeptChoice &choice, const float *state, int32_t right);

 private:
  // Vectors are multiplied with state - mean(recent states): the states of large models all point in much the same direction, and only
  // the difference is informative. For the first kFirstStates states nothing is subtracted.
  static constexpr int64_t kFirstStates = 64, kStatesOfLate = 512;
  // Corrections are trusted as long as choices made right minus choices made wrong, older ones decaying by kMemory, is at least
  // kLeastRecord. It is negative because a few wrong changes are normal at first.
  static constexpr double kLeastRecord = -3.0, kMemory = 0.99;
  // The initial bonus of a repetition, in logits.
  static constexpr float kFirstRepetition = 1.5f;

  float *vector_of(int32_t token);
  // out = state - mean.
  void centre(const Kernels &kernels, const float *state, float *out) const;
  void move(const Kernels &kernels, int32_t token, float by, const float *state);

  int32_t width_;
  int64_t stride_;
  int32_t most_;
  int64_t time_ = 0, states_ = 0;
  double record_ = 0.0;
  std::vector<float> mean_, centred_;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> changed_at_;                  // [tokens]
  std::vector<float> vectors_;                       // [tokens][stride]
  std::array<float, kRepetitionKinds> repetitions_;  // the bonus of each kind
};

}  // namespace outrider

#endif
