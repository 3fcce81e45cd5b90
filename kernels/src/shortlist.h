// The tokens that a draft scores: those of its texts, far fewer than a vocabulary has. Their rows of the matrix that makes the scores are
// copied into one of their own, which is all that a pass reads of it.
#ifndef OUTRIDER_SRC_SHORTLIST_H
#define OUTRIDER_SRC_SHORTLIST_H

#include <stdint.h>

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace outrider {

class Shortlist {
 public:
  // Of a matrix with a row for each token of the vocabulary, and its bias (or null): `count` tokens, at first those with the lowest
  // ids, which in most vocabularies are the commonest.
  int32_t create(const outrider_weight &all, const outrider_weight *bias, int32_t count);

  // Tokens of a text come in, each in the place of the one that was met longest ago; of those never met, the highest id goes first.
  // Returns the tiles of the matrix that have changed.
  std::vector<int32_t> meet(const int32_t *tokens, int count);

  const outrider_weight &matrix() const { return matrix_; }
  const outrider_weight &bias() const { return bias_; }
  // A vector of the tokens' ids, as SPREAD takes it.
  const outrider_weight &ids() const { return ids_; }

 private:
  void put(int32_t place, int32_t token);
  void make_latest(int32_t place);

  outrider_weight all_{}, all_bias_{}, matrix_{}, bias_{}, ids_{};
  Scratch memory_;
  std::vector<float> biases_, tokens_;    // [count], whole numbers
  std::vector<int32_t> places_;           // [vocabulary], -1: not there
  std::vector<int32_t> earlier_, later_;  // [count + 1] a ring of places by when they were met; the last one is its ends
};

}  // namespace outrider

#endif
