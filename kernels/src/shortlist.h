// A draft's shortlist: it computes logits only for tokens that occurred in its texts, far fewer than the vocabulary has. Their rows of the
// LM head are copied into a smaller matrix, and a pass reads only that one.
#ifndef OUTRIDER_SRC_SHORTLIST_H
#define OUTRIDER_SRC_SHORTLIST_H

#include <stdint.h>

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace outrider {

class Shortlist {
 public:
  // all: the LM head, with a row for each token of the vocabulary; its bias (or null). The list has `count` tokens, at first those with
  // the lowest ids, which are the most frequent in most vocabularies.
  int32_t create(const outrider_weight &all, const outrider_weight *bias, int32_t count);

  // Adds the tokens of a text. Each new one replaces the least recently met token; tokens that were never met go first, the highest id
  // before all. Returns the tiles of the matrix that have changed.
  std::vector<int32_t> meet(const int32_t *tokens, int count);

  const outrider_weight &matrix() const { return matrix_; }
  const outrider_weight &bias() const { return bias_; }
  // The tokens' ids as a vector, the weight of SCATTER.
  const outrider_weight &ids() const { return ids_; }

 private:
  void put(int32_t place, int32_t token);
  void make_latest(int32_t place);

  outrider_weight all_{}, all_bias_{}, matrix_{}, bias_{}, ids_{};
  Scratch memory_;
  std::vector<float> biases_, tokens_;  // [count] tokens_ holds ids
  std::vector<int32_t> places_;         // [vocabulary] a token's row in the matrix, -1: not in the list
  std::vector<int32_t> earlier_,
      later_;  // [count + 1] a ring of rows by the time they were met; element `count` is its head
};

}  // namespace outrider

#endif
