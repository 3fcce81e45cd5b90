// Converted inputs of several matrices of one shape in one area: each matrix has a range of tokens there.
#ifndef OUTRIDER_SRC_PASS_INPUTS_H
#define OUTRIDER_SRC_PASS_INPUTS_H

#include "kernels.h"
#include "pass.h"

namespace outrider {

// The area, from which `from` takes the input of one matrix.
struct Inputs {
  int32_t *words;
  float *scales;
  int32_t *offsets, *starts, *less;
  int32_t row_words, scale_blocks, offset_words, groups, digits;

  // The input of `tokens` tokens from `token` on. row_block: tokens in a block; 0: rows are not interleaved. in_pairs: multiplied in pairs
  // of channels.
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

// The pieces of channels in which a block of rows is prepared for a matrix of this shape.
inline int pieces_of_block(const outrider_weight &shape) {
  // The divisor is positive for every format that is prepared.
  return (shape.columns + piece_channels(shape) - 1) / piece_channels(shape);  // NOLINT(clang-analyzer-core.DivideZero)
}

}  // namespace outrider

#endif
