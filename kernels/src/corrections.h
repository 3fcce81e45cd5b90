// What a draft's scores lack, learned from its choices while it works. To the scores of some tokens is added the product of a vector
// of each with the state that the head multiplies, and where the text's last tokens came before, something to what came then.
#ifndef OUTRIDER_SRC_CORRECTIONS_H
#define OUTRIDER_SRC_CORRECTIONS_H

#include <stdint.h>

#include <array>
#include <vector>

#include "kernels.h"
#include "repetition.h"

namespace outrider {

// A choice whose truth may be told later: what came behind `length` tokens of its row, by the model's own scores and by the
// corrected ones, which had the runner-up behind it by a margin.
struct KeptChoice {
  int32_t length = -1, own = -1, corrected = -1, runner_up = -1;
  double margin = 0.0;
  Repetition repetition;
};
// Of each row so many choices are kept, those behind other lengths modulo this are overwritten.
constexpr int32_t kKeptChoices = 64;

class Corrections {
 public:
  // For states of so many columns, and `most` tokens at once: those that were corrected last.
  Corrections(int32_t width, int32_t most) : width_(width), stride_(round_up(width, kLanes)), most_(most) {
    mean_.resize(static_cast<size_t>(width));
    centred_.resize(static_cast<size_t>(width));
    repetitions_.fill(kFirstRepetition);
  }

  int32_t width() const { return width_; }
  // Whether they change the scores where the text goes on like this.
  bool change(const Repetition &repetition) const { return !tokens_.empty() || repetition.next >= 0; }
  // Whether the corrected choices were the better ones of late.
  bool trusted() const { return record_ >= kLeastRecord; }
  void add(const Kernels &kernels, const float *state, const Repetition &repetition, float *scores,
           std::vector<float> *scratch) const;
  // `right` is what came in truth where `choice` was made from `state`. What its corrections were good for: 1 where they made it
  // right, -1 where they made it wrong, else 0.
  int learn(const Kernels &kernels, const KeptChoice &choice, const float *state, int32_t right);

 private:
  // A state says something by how it differs from those of late, which point much the same way in large models. The first few
  // are taken as they are.
  static constexpr int64_t kFirstStates = 64, kStatesOfLate = 512;
  // Corrections that changed a few more right choices than wrong ones are still believed: they have only begun to learn.
  static constexpr double kLeastRecord = -3.0, kMemory = 0.99;
  // What a repetition adds to a score before anything is known of the job's texts.
  static constexpr float kFirstRepetition = 1.5f;

  float *vector_of(int32_t token);
  // The state without what those of late have in common.
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
  std::array<float, kRepetitionKinds> repetitions_;  // what one of each kind adds to a score
};

}  // namespace outrider

#endif
