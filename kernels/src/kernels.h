// What every instruction set's unit provides, and the layouts that all of them share.
//
// A unit is compiled with its own flags, so nothing in it may be shared with other units by the linker: units include no
// C++ library header, and everything they define lies in an unnamed namespace.
#ifndef OUTRIDER_SRC_KERNELS_H
#define OUTRIDER_SRC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "outrider_kernels.h"

namespace outrider {

constexpr int kLanes = 16;         // the logical vector: every float reduction is 16 lanes, folded in halves
constexpr int kTileRows = 32;      // outputs in one tile of a packed matrix: two vectors
constexpr int kTileBytes = 128;    // one step of a tile: two vectors
constexpr int kTilesTogether = 4;  // of a packed matrix, that some kernels work on together
constexpr int kBlockTokens = 32;   // tokens in one block of the cache
constexpr int kChunkTokens = 256;  // keys whose softmax is computed at once; the order of summation depends on it

// Behind a head's keys in a block of int8, and behind its values: a scale for each token.
constexpr int64_t kScaleBytes = 4 * kBlockTokens;

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Words from one row of a matrix's input to the next, a multiple of 16. Rows a whole number of kilobytes apart would fall
// into the same sets of the nearest cache.
inline int32_t words_in_row(const outrider_weight &weight) {
  const int64_t columns = weight.columns;
  const int64_t words = weight.format == OUTRIDER_FP32   ? columns
                        : weight.format == OUTRIDER_BF16 ? (columns + 1) / 2
                                                         : (columns + 7) / 8 * 2;
  const int64_t rounded = round_up(words, kLanes);
  return static_cast<int32_t>(rounded % 256 ? rounded : rounded + kLanes);
}

// A matrix's input, converted once for all tiles: rows in blocks of at most the unit's row_block, 32-bit words of a block's
// rows interleaved (word w of row r at w * rows + r). A word is one fp32, two bf16 or four int8 channels.
struct Input {
  int32_t *words;     // [blocks][words per row][rows of the block]
  float *scales;      // integer formats: [groups][tokens]
  int32_t *offsets;   // integer formats: minus the sum of a group's int8, as the low int16: [groups][tokens]
  int32_t row_words;  // words per row (words_in_row); of bf16 those behind the columns are zero
  int32_t groups;
  int32_t tokens;
  int32_t blocks;
};

// An input is prepared in pieces: so many channels of a block's rows.
inline int piece_channels(const outrider_weight &weight) { return weight.group ? weight.group : 128; }

// Rows are spread evenly: block b holds rows first(b) .. first(b + 1).
inline int block_first(int tokens, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tokens) * block / blocks);
}

struct Linear {
  const outrider_weight *weight;
  const Input *input;
  const float *bias;      // or null
  const float *residual;  // or null; [tokens, residual_stride]
  float *out;             // [tokens, out_stride]
  int64_t residual_stride;
  int64_t out_stride;
  int32_t width;  // columns of out
  int32_t activation;
};

constexpr int element_bytes(int cache_format) {
  return cache_format == OUTRIDER_CACHE_FP32 ? 4 : cache_format == OUTRIDER_CACHE_INT8 ? 1 : 2;
}
constexpr int64_t scale_bytes(int cache_format) { return cache_format == OUTRIDER_CACHE_INT8 ? kScaleBytes : 0; }
// Keys and values are asked for line by line, so each begins with one.
static_assert(kScaleBytes % 64 == 0, "scales have to fill whole lines");

// One layer of one kv head in the blocks of one row: base[i] + offset is block i.
struct CacheView {
  char *const *blocks;
  int64_t key_offset;    // bytes from a block's start to this layer's and head's keys
  int64_t value_offset;  // likewise values
  int32_t format;        // outrider_cache
};

// Queries of one kv head that are worked on together.
struct Attend {
  CacheView cache;
  const float *query;    // queries' first head of this kv head, first token
  float *out;            // likewise
  int64_t query_stride;  // from one token to the next
  int64_t out_stride;
  int32_t position;      // of the first token
  int32_t first_query;   // queries are (token, head of the group), token-major
  int32_t query_count;
  int32_t group;         // query heads per kv head
  int32_t head_size;
  int32_t window;
  float scale;
  float *scratch;        // attention_scratch floats
};

constexpr int kQueryBlock = 8;
inline int64_t attention_scratch(int head_size) {
  const int64_t padded = round_up(head_size, kLanes);
  return kQueryBlock * (kChunkTokens + 3 * padded + 64);
}

struct Kernels {
  const char *name;
  // Activation rows that `linear` works on at once for a format and a number of tokens.
  int32_t (*row_block)(int format, int tokens);
  // Converts a piece of the channels of a block's rows for a matrix of the weight's format. Row t lies at x + t * stride.
  void (*prepare)(const outrider_weight &weight, const float *x, int64_t stride, const Input &input, int block, int piece);
  // Tiles first..last of a matrix product, with bias, activation and residual. `next` is the matrix and the tile that this
  // thread will go on with, or null.
  void (*linear)(const Linear &task, int first_tile, int last_tile, const outrider_weight *next, int next_tile);
  void (*rms_norm)(const float *x, const float *weight, float *out, int width, float epsilon);
  void (*layer_norm)(const float *x, const float *weight, const float *bias, float *out, int width, float epsilon);
  // Rotates the halves of one head in place.
  void (*rope)(float *head, const float *cosine, const float *sine, int head_size);
  void (*table_row)(const void *row, int fp32, float *out, int width);
  void (*add)(const float *x, const float *y, float *out, int width);
  void (*store_cache)(const CacheView &cache, int position, const float *key, const float *value, int head_size);
  void (*attend)(const Attend &task);
  // The index of the largest logit (the first of equals), the runner-up's value, and whether all are numbers.
  int32_t (*argmax)(const float *logits, int count, float *best, float *second, int *finite);
  // The noise of tokens first .. first + count (first a multiple of 4) at one position.
  void (*gumbel)(uint64_t seed, uint32_t sample, uint32_t position, int first, int count, double *noise);
  // exp(score - highest) for every score.
  void (*exponentials)(const double *scores, double highest, double *out, int count);
  // The natural logarithm of a positive, normal number.
  double (*logarithm)(double x);
  // Packing one group of weights: its header, and one byte a channel.
  void (*quantise)(const float *x, int channels, int format, uint32_t *header, uint8_t *values);
};

extern const Kernels kGeneric;
extern const Kernels kAvx2;
extern const Kernels kAvx512Vnni;
extern const Kernels kAvx512Bf16;
extern const Kernels kAmx;

// The best unit of this machine, or the one that OUTRIDER_ISA names; null with the reason in *message.
const Kernels *choose_kernels(const char **message);
const char *available_kernels();

}  // namespace outrider

#endif
