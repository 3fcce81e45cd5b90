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
constexpr int kMostTaps = 16;      // of a convolution: the tokens that it is over
constexpr int kChunkTokens = 256;  // keys whose softmax is computed at once; the order of summation depends on it

// Behind a head's keys in a block of int8 a scale for each token, and as many for its values. Where values are the last columns of
// keys and kept with them, the first scales are those of the columns before, the second those of the values.
constexpr int64_t kScaleBytes = 4 * kBlockTokens;

// Units are compiled with flags of their own: what they share is static, or the linker would keep one unit's copy for all.
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

static inline bool integer_format(int format) {
  return format != OUTRIDER_FP32 && format != OUTRIDER_BF16 && format != OUTRIDER_FP16;
}

// Whether a weight is kept in codes: of floats, those of E4M3 become bf16 while they are worked on.
static inline bool has_codes(const outrider_weight &weight) {
  return integer_format(weight.format) || (weight.format == OUTRIDER_BF16 && weight.codes == OUTRIDER_E4M3);
}

// How the tiles of a matrix of codes are built: a tile is a sequence of blocks of channels, and a block is a header with the scales
// of its groups, then lines of codes. kernels/storage.py is the definition.
struct Geometry {
  int block;        // channels of a block; activations have a scale for each
  int header;       // bytes of its header
  int scale_bytes;  // of these, where zero points begin
  int unit;         // channels that fill whole lines
  int unit_lines;
};

constexpr int kBlockChannels = 128, kSuperChannels = 256;
constexpr int kLeastFactor = 2;  // FACTORS keeps factors less this

static inline Geometry geometry(const outrider_weight &weight) {
  Geometry result{kBlockChannels, 0, 0, 8, 1};
  const int groups = weight.group ? kBlockChannels / weight.group : 0;
  switch (weight.scales) {
    case OUTRIDER_SCALE_F32:
      result.scale_bytes = groups * kTileBytes;
      break;
    case OUTRIDER_SCALE_F16:
    case OUTRIDER_SCALE_BF16:
      result.scale_bytes = groups * kTileBytes / 2;
      break;
    case OUTRIDER_HALF_MINIMA:
      result.scale_bytes = groups * kTileBytes;
      break;
    case OUTRIDER_SCALE_E8M0:
      result.scale_bytes = kTileBytes;
      break;
    case OUTRIDER_SIX_BITS:
      result.block = kSuperChannels;
      result.scale_bytes = 4 * kTileBytes;
      break;
    case OUTRIDER_FACTORS:
      result.scale_bytes = 2 * kTileBytes;
      break;
    case OUTRIDER_EIGHT_BITS:
      result.block = kSuperChannels;
      result.scale_bytes = 4 * kTileBytes + kTileBytes / 2;
      break;
    default:
      result.block = weight.group;
      result.scale_bytes = kTileBytes;
      break;
  }
  // Of WORDS the zero points are in the words. Others have a byte for each group of a row's block, two for one.
  result.header = result.scale_bytes;
  if (weight.zeros && weight.scales != OUTRIDER_WORDS) result.header += groups == 4 ? kTileBytes : kTileBytes / 2;
  switch (weight.codes) {
    case OUTRIDER_INT5:
      result.unit = 32;
      result.unit_lines = 5;
      break;
    case OUTRIDER_INT6:
      result.unit = 16;
      result.unit_lines = 3;
      break;
    case OUTRIDER_INT8:
    case OUTRIDER_E4M3:
      result.unit_lines = 2;
      break;
    default:
      break;
  }
  return result;
}
static_assert(kTileBytes / 2 % 64 == 0, "every part of a header fills whole lines");

// What is taken off every code where groups have neither zero points nor minima of their own. Of E2M1 codes, which are worked
// on as twice their value and 12 more.
static inline int middle_code(const outrider_weight &weight) {
  if (weight.zeros || weight.scales == OUTRIDER_SIX_BITS || weight.scales == OUTRIDER_FACTORS ||
      weight.scales == OUTRIDER_HALF_MINIMA)
    return 0;
  switch (weight.codes) {
    case OUTRIDER_INT8:
      return 128;
    case OUTRIDER_INT6:
      return 32;
    case OUTRIDER_INT5:
      return 16;
    case OUTRIDER_E2M1:
      return 12;
    default:
      return 8;
  }
}

// What the largest int8 activation of a block is. With codes of four bits that leaves room for a sum of one with a code in a byte:
// linear_pairs.inc multiplies such sums.
static inline float largest_activation(const outrider_weight &weight) {
  return weight.codes == OUTRIDER_INT4 ? 120.0f : 127.0f;
}

// Bytes of the codes of so many channels.
static inline int64_t code_bytes(const Geometry &shape, int channels) {
  return static_cast<int64_t>((channels + shape.unit - 1) / shape.unit) * shape.unit_lines * kTileBytes;
}

static inline int64_t tile_bytes(const outrider_weight &weight) {
  const int64_t columns = weight.columns;
  if (weight.format == OUTRIDER_FP32) return columns * kTileBytes;
  if (!has_codes(weight) && (weight.format == OUTRIDER_BF16 || weight.format == OUTRIDER_FP16))
    return (columns + 1) / 2 * kTileBytes;
  const Geometry shape = geometry(weight);
  const int whole = weight.columns / shape.block, rest = weight.columns % shape.block;
  return whole * (shape.header + code_bytes(shape, shape.block)) + (rest ? shape.header + code_bytes(shape, rest) : 0);
}

// What a tile of E4M3 takes as bf16, up to the end of its last line of codes: AMX multiplies many rows from there.
static inline int64_t expanded_bytes(const outrider_weight &weight) {
  return weight.codes == OUTRIDER_E4M3 ? round_up(weight.columns, 8) / 2 * kTileBytes : 0;
}

static inline int tile_count(const outrider_weight &weight) {
  return weight.gated ? (weight.rows / 2 + kLanes - 1) / kLanes : (weight.rows + kTileRows - 1) / kTileRows;
}

// Words from one row of a matrix's input to the next, a multiple of 16. Rows a whole number of kilobytes apart would fall
// into the same sets of the nearest cache.
static inline int32_t words_in_row(const outrider_weight &weight) {
  const int64_t columns = weight.columns;
  const int64_t words = weight.format == OUTRIDER_BF16  ? (columns + 1) / 2
                        : integer_format(weight.format) ? (columns + 7) / 8 * 2
                                                        : columns;
  const int64_t rounded = round_up(words, kLanes);
  return static_cast<int32_t>(rounded % 256 ? rounded : rounded + kLanes);
}

// Of groups whose products, times codes less 8, may leave 16 bits. None of those that fit begins with it.
constexpr int32_t kDoesNotFit = INT32_MIN;

// A matrix's input, converted once for all tiles: rows in blocks of at most the unit's row_block, 32-bit words of a block's
// rows interleaved (word w of row r at w * rows + r). A word is one fp32, two bf16 or four int8 channels.
// Codes are multiplied with bytes, exactly, whatever the activations: bf16 and fp32 ones are three rows of int8 each, the digits
// to the base 256 of a whole number of 24 bits, the lowest first. Where rows do not lie interleaved, a token is a block, and its
// digits are rows one behind the other.
struct Input {
  int32_t *words;  // [blocks][words per row][rows of the block]
  float *scales;   // of codes: [blocks of channels][rows]
  int32_t
      *offsets;  // of codes: minus the sum of a group's int8, as the low int16, or times middle_code: [groups][rows]; of
                 // FACTORS those of a block's groups 0 and 2, then of 1 and 3, as two int16: [2 * blocks][rows]
  // Of codes in WORDS, for units that sum up in 16 bits: what the sums of a group begin with, minus eight times the int8 of
  // channels 0 and 1 of every four, then of 2 and 3, or kDoesNotFit: [groups][rows]
  int32_t *starts;
  int32_t row_words;  // words per row (words_in_row); of bf16 those behind the columns are zero
  int32_t tokens;
  int32_t digits;  // rows of a token
  int32_t rows;    // tokens * digits
  int32_t blocks;
  int32_t apart;  // whether rows are as they are, not interleaved
  int32_t *less;  // minus the sums of y' x' (pairs.inc): [groups][rows]; null where rows are not multiplied in pairs
};

// The most rows that lie interleaved.
constexpr int kMostRows = 24;
constexpr int kDigits = 3;
static inline int digits_of(int format) { return format == OUTRIDER_W4ABF16 || format == OUTRIDER_W8AF32 ? kDigits : 1; }

// Words of offsets from one block of channels to the next, of each row.
static inline int offsets_in_block(const outrider_weight &weight) {
  return weight.scales == OUTRIDER_FACTORS ? 2 : geometry(weight).block / weight.group;
}

// An input is prepared in pieces: so many channels of a block's rows.
static inline int piece_channels(const outrider_weight &weight) {
  return integer_format(weight.format) ? geometry(weight).block : kBlockChannels;
}

// Tokens are spread evenly: block b holds tokens first(b) .. first(b + 1).
static inline int block_first(int tokens, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tokens) * block / blocks);
}

// Memory that this thread reads soon, which is asked for while it does other things.
struct AskedBeside {
  struct Area {
    const char *begin, *end;
  };
  const Area *area = nullptr, *end_area = nullptr;  // not begun
  const char *line = nullptr, *end = nullptr;       // of the one at hand
  static constexpr int kMostRate = 128;
  int rate = 0;  // bytes for a step of a product, no more than kMostRate
  int due = 0;   // of them, less than a line that has not been asked for
  bool done() const { return line >= end && area == end_area; }
};

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
  float scale;               // of what is added to the residual
  float cap;                 // 0: none
  char *expanded;            // the thread's own: expanded_bytes of the weight
  const int32_t *constants;  // of a weight that is multiplied in pairs: [tiles][blocks][kTileRows]
  AskedBeside *beside;       // or null; for products in pairs
};

static constexpr int element_bytes(int cache_format) {
  return cache_format == OUTRIDER_CACHE_FP32 ? 4 : cache_format == OUTRIDER_CACHE_INT8 ? 1 : 2;
}
static constexpr int64_t scale_bytes(int cache_format) { return cache_format == OUTRIDER_CACHE_INT8 ? kScaleBytes : 0; }
// Keys and values are asked for line by line, so each begins with one.
static_assert(kScaleBytes % 64 == 0, "scales have to fill whole lines");

// One layer of one kv head in the blocks of one row: base[i] + offset is block i. value_bytes is 0 in int8 where the values are the
// keys' last columns, of the only head: they are kept as these then.
struct CacheView {
  char *const *blocks;
  int64_t key_offset;    // bytes from a block's start to this layer's and head's keys
  int64_t value_offset;  // likewise values
  int64_t key_bytes;     // from one head's keys to the next's
  int64_t value_bytes;
  int32_t format;  // outrider_cache
};

static inline bool kept_once(const CacheView &cache) { return cache.value_bytes == 0; }

// Queries of one kv head, or of some that follow each other, that are worked on together.
struct Attend {
  CacheView cache;       // of the first of them
  const float *query;    // queries' first head of this kv head, first token
  float *out;            // likewise
  int64_t query_stride;  // from one token to the next
  int64_t out_stride;
  int32_t position;               // of the first token
  int32_t first_query;            // queries are (token, head of the group), token-major
  int32_t query_count;            // of each kv head
  int32_t heads;                  // kv heads; of several, no more than kQueryBlock queries each
  int32_t group;                  // query heads per kv head
  int32_t head_size, value_size;  // of a query or key, and of a value
  int32_t window;
  int32_t begin;  // the first key that anybody sees
  float scale;
  float cap;            // of scores, 0: none
  const float *sinks;   // [heads][group] a score for each head that belongs to no token, or null
  float *scratch;       // attention_scratch floats
  AskedBeside *beside;  // what is asked for meanwhile, or null; then the cache at hand has been asked for before
};

// Of several kv heads, at most so many queries in all: what they gather stays in the nearest cache.
constexpr int kQueryBlock = 8, kMostQueries = 16;
// The first key that a token at this position sees: of all, of so many tokens back, or (window < 0) of its own chunk.
static inline int32_t first_seen(int32_t window, int32_t position) {
  if (window < 0) return position / -window * -window;
  return window > 0 && position >= window ? position + 1 - window : 0;
}

static inline int64_t attention_scratch(int head_size, int value_size) {
  return kMostQueries * (kChunkTokens + round_up(head_size, kLanes) + 2 * round_up(value_size, kLanes));
}

// A head's state, [rows, columns]: after the pending updates, each state = state * decay + key delta^T, what a token with a key makes
// of it. Delta takes the place of the token's value, and out is what its query reads of the state that has been updated with it:
//   delta_rule  delta = (value - decay * state^T key) * factor, out = decay * state^T query + (key query) delta
//   delta_rule_by_row  the same, with a decay for each row of the state
//   scan        delta = value * factor, out = decay * state^T query + (key query) delta + skip * value
struct StateStep {
  const float *from;
  float *to;  // the state after the pending updates goes here, or null; may be `from`
  int32_t rows, columns;
  int32_t pending;
  const float *const *keys, *const *deltas;  // of the pending updates
  const float *const *decays;                // one each, or [rows]
  const float *key, *query;                  // or null: no token
  const float *decay;
  float factor, skip;
  float *value, *out;
};

// How a token's experts are chosen from their scores, as outrider_op has it. Of what groups or corrections choose there are up to
// kMostRouted.
constexpr int kMostRouted = 1024;
struct Route {
  int experts, chosen, kind;
  const float *corrections;  // [experts] or null
  const float *factors;      // [experts] of their weights, or null
  int group, groups_kept;    // 0: no groups
  float epsilon, scale;
};

// Factors of OUTRIDER_XIELU.
struct Xielu {
  float positive, negative, beta, epsilon;
};

struct Kernels {
  const char *name;
  // Tokens whose rows `linear` works on at once, and which lie interleaved; 0: rows as they are.
  int32_t (*row_block)(const outrider_weight &weight, int tokens);
  // Converts a piece of the channels of a block's rows for a matrix of the weight's format. Row t lies at x + t * stride, or at
  // x + chosen[t] * stride.
  void (*prepare)(const outrider_weight &weight, const float *x, int64_t stride, const int32_t *chosen, const Input &input,
                  int block, int piece);
  // Rows of words become words of rows: to[word * rows + r] = from[r][word].
  void (*interleave)(const int32_t *const *from, int rows, int words, int32_t *to);
  // Tiles first..last of a matrix product, with bias, activation and residual. `next` is the matrix and the tile that this
  // thread will go on with, or null.
  void (*linear)(const Linear &task, int first_tile, int last_tile, const outrider_weight *next, int next_tile);
  // Norms, plus residual (or null). Bias may be null too.
  void (*rms_norm)(const float *x, const float *weight, const float *residual, float *out, int width, float epsilon);
  void (*layer_norm)(const float *x, const float *weight, const float *bias, const float *residual, float *out, int width,
                     float epsilon);
  // Rotates the halves of a head's first columns in place.
  void (*rope)(float *head, const float *cosine, const float *sine, int rotated);
  void (*table_row)(const void *row, int format, float scale, float *out, int width);
  void (*add)(const float *x, const float *y, float *out, int width);
  // The best experts and their weights, 1 / (1 + e^-x), and x * factor + added (or null).
  void (*route)(const Route &task, const float *scores, float *out);
  float (*logistic)(float x);
  void (*scaled)(const float *x, float factor, const float *added, float *out, int width);
  void (*xielu)(const float *x, const Xielu &task, float *out, int width);
  // How far x lies above its mean plus so many of its standard deviations; 0 where it does not.
  void (*cut)(const float *x, float deviations, float *out, int width);
  // The sum of `count` vectors, one behind the other, each times its coefficient, plus what is added (or null).
  void (*blend)(const float *vectors, int count, const float *coefficients, const float *added, float *out, int width);
  // x times the root of the mean square of `model` over that of its own, which is `least` at least, plus what is added (or null).
  void (*match)(const float *x, const float *model, float least, const float *added, float *out, int width);
  // Of `count` vectors, `stride` floats from one to the next, the product of each with x.
  void (*products)(const float *vectors, int64_t stride, int count, const float *x, int width, float *out);
  void (*store_cache)(const CacheView &cache, int position, const float *key, const float *value, int head_size,
                      int value_size);
  void (*attend)(const Attend &task);
  // The index of the largest logit (the first of equals), the runner-up's value, and whether all logits are numbers. With a mask (or
  // null) the largest of those whose bits are set; best is -inf where there is none.
  int32_t (*argmax)(const float *logits, int count, const uint32_t *mask, float *best, float *second, int *finite);
  // The noise of tokens first .. first + count (first a multiple of 4) at one position: of those whose words, of which the noise is made
  // and falls as they rise, are `most` or less. How many these are, and their places behind `first`.
  int (*gumbel_up_to)(uint64_t seed, uint32_t sample, uint32_t position, int first, int count, uint32_t most,
                      int32_t *places, double *noise);
  // exp(score - highest) for every score.
  void (*exponentials)(const double *scores, double highest, double *out, int count);
  // The natural logarithm of a positive, normal number.
  double (*logarithm)(double x);
  // Packing one group of weights: its header, the scale without its `dropped` bits, and one byte a channel.
  void (*quantise)(const float *x, int channels, int codes, uint32_t dropped, uint32_t *header, uint8_t *values);
  // One block of at most 128 for FACTORS: its scale, the factors and offsets of its groups of 32, and a code a channel.
  void (*find_factors)(const float *x, int channels, float *scale, int16_t *factors, int16_t *offsets, uint8_t *codes);
  // x * activation(y) + added (or null).
  void (*gated_by)(const float *x, const float *y, int activation, const float *added, float *out, int width);
  // activation(sum of rows[tap] * taps[tap] + bias (or null)) * factors (or null), the oldest row first.
  void (*convolve)(const float *const *rows, const float *const *taps, int count, const float *bias, int activation,
                   const float *factors, float *out, int width);
  // x / sqrt(x x + epsilon) * scale.
  void (*unit_vector)(const float *x, float epsilon, float scale, float *out, int width);
  void (*delta_rule)(const StateStep &step);
  void (*delta_rule_by_row)(const StateStep &step);
  void (*scan)(const StateStep &step);
  // Whether `linear` can multiply a weight in pairs of channels (linear_pairs.inc), and what it needs for that, for one tile of it.
  // Null where it never does.
  bool (*paired)(const outrider_weight &weight);
  void (*pair_constants)(const outrider_weight &weight, int tile, int32_t *to);
};

extern const Kernels kGeneric;
extern const Kernels kAvx2;
extern const Kernels kAvx512Vnni;
extern const Kernels kAvx512Bf16;
extern const Kernels kAvx512Pairs;
extern const Kernels kAmx;

// The best unit of this machine, or the one that OUTRIDER_ISA names; null with the reason in *message.
const Kernels *choose_kernels(const char **message);
const char *available_kernels();

// The unit that multiplies in pairs can from so many tokens on: with fewer, products take little, and what codes alone make is as
// much more to read.
constexpr int kFewestInPairs = 4;
// From how many tokens on it does, of codes with such scales; 0: never. On Zen 5, which multiplies twice as fast as Zen 4 and reads
// no faster, fewer tokens wait for memory, and groups that have factors, by which sums are multiplied for every row, lose. Where
// OUTRIDER_ISA names the unit it does all that it can.
int fewest_in_pairs(int scales);

}  // namespace outrider

#endif
