// Inputs of several matrices of one shape that are converted into one area, those of each from a token on.
#ifndef OUTRIDER_SRC_PASS_INPUTS_H
#define OUTRIDER_SRC_PASS_INPUTS_H

#include "kernels.h"
#include "pass.h"

namespace outrider {

// The input of one matrix from a token on, of those that lie one behind the other.
struct Inputs {
  int32_t *words;
  float *scales;
  int32_t *offsets, *starts, *less;
  int32_t row_words, scale_blocks, offset_words, groups, digits;

  // In blocks of so many tokens, or rows as they are; multiplied in pairs of channels or not.
  Input from(int64_t token, int32_t tokens, int32_t row_block, bool in_pairs = false) const {
    const int64_t before = token * digits;
    Input input{};
    input.words = words + before * row_words;
    input.scales = scales + before * scale_blocks;
    input.offsets = offsets + before * offset_words;
    input.starts = starts + before * offset_words;
    if (in_pairs) input.less = less + before * groups;
    input.row_words = row_words;
    input.tokens = tokens;
    input.digits = digits;
    input.rows = tokens * digits;
    input.apart = row_block == 0;
    input.blocks = row_block ? (tokens + row_block - 1) / row_block : tokens;
    return input;
  }
};

}  // namespace outrider

#endif
