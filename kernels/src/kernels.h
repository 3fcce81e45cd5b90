// The interface of a unit (the kernels compiled for one instruction set), and the layouts that all units share.
//
// A unit is compiled with its own flags, so nothing in it may be shared with other units by the linker: units include no
// C++ library header, and everything they define lies in an unnamed namespace.
#ifndef OUTRIDER_SRC_KERNELS_H
#define OUTRIDER_SRC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "outrider_kernels.h"

namespace outrider {

constexpr int kLanes = 16;       // the logical vector: every float reduction has 16 lanes, which are then folded in halves
constexpr int kTileRows = 32;    // outputs in one tile of a packed matrix: two vectors
constexpr int kTileBytes = 128;  // one line of a tile: two vectors
constexpr int kTilesTogether = 4;  // tiles of a packed matrix that some kernels read side by side
constexpr int kBlockTokens = 32;   // tokens in one block of the cache
constexpr int kMostTaps = 16;      // the longest convolution, in tokens
constexpr int kChunkTokens = 256;  // keys whose softmax is computed at once; the order of summation depends on it

// In an int8 block a head's keys are followed by the scales of its keys, one for each token, then those of its values. Where the values
// are stored as the last columns of the keys (kept_once), the first scales are those of the other columns.
constexpr int64_t kScaleBytes = 4 * kBlockTokens;

// Units are compiled with different flags. Functions that they share are static, or the linker would keep one unit's copy for all.
static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

static inline bool integer_format(int format) {
  return format != OUTRIDER_FP32 && format != OUTRIDER_BF16 && format != OUTRIDER_FP16;
}

// Whether a weight's codes are floats that are expanded to bf16 during the product.
static inline bool expands_codes(const outrider_weight &weight) {
  return weight.format == OUTRIDER_BF16 && weight.codes != OUTRIDER_NO_CODES;
}

// Whether a weight is stored in codes.
static inline bool has_codes(const outrider_weight &weight) {
  return integer_format(weight.format) || expands_codes(weight);
}

// The layout of a tile of codes: a tile is a sequence of blocks of channels; a block is a header with the scales of its groups, then
// lines of codes. kernels/storage.py is the definition.
struct Geometry {
  int block;        // channels of a block; activations have one scale for each block
  int header;       // bytes of the header
  int scale_bytes;  // offset of the zero points in the header
  int unit;         // the fewest channels whose codes fill whole lines
  int unit_lines;   // the number of those lines
};

constexpr int kBlockChannels = 128, kSuperChannels = 256;
constexpr int kSmallGroup = 16;  // the smallest group; it has no zero points
constexpr int kLeastFactor = 2;  // FACTORS stores factor - kLeastFactor

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
    case OUTRIDER_FOUR_BITS:
      result.block = kSuperChannels;
      result.scale_bytes = 5 * kTileBytes;
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
  // WORDS has its zero points in the words. The others have one byte for each group of a row; a single group takes two.
  result.header = result.scale_bytes;
  if (weight.zeros && weight.scales != OUTRIDER_WORDS) result.header += groups == 4 ? kTileBytes : kTileBytes / 2;
  switch (weight.codes) {
    case OUTRIDER_INT5:
      result.unit = 32;
      result.unit_lines = 5;
      break;
    case OUTRIDER_INT2:
      result.unit = 16;
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

// Whether a block has a minimum for all its channels, and each group a factor of it.
static inline bool has_factored_minima(const outrider_weight &weight) {
  return weight.scales == OUTRIDER_SIX_BITS || weight.scales == OUTRIDER_FOUR_BITS;
}

// The implicit zero point of codes whose groups have neither zero points nor minima, else 0. Kernels work on E2M1 codes as
// 2 * value + 12, on IQ4 codes as value + 128.
static inline int middle_code(const outrider_weight &weight) {
  if (weight.zeros || has_factored_minima(weight) || weight.scales == OUTRIDER_FACTORS ||
      weight.scales == OUTRIDER_HALF_MINIMA)
    return 0;
  switch (weight.codes) {
    case OUTRIDER_INT8:
    case OUTRIDER_IQ4:
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

// The int8 that the largest activation of a block is scaled to. With 4-bit codes the sum of an activation and a code must fit into a
// byte, since linear_pairs.inc multiplies such sums.
static inline float largest_activation(const outrider_weight &weight) {
  return weight.codes == OUTRIDER_INT4 ? 120.0f : 127.0f;
}

// Bytes of the codes of `channels` channels, for all rows of a tile.
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

// Bytes of a tile of codes expanded to bf16, up to the end of its last line of codes. AMX reads it from there for many rows.
static inline int64_t expanded_bytes(const outrider_weight &weight) {
  return expands_codes(weight) ? round_up(weight.columns, 8) / 2 * kTileBytes : 0;
}

static inline int tile_count(const outrider_weight &weight) {
  return weight.gated ? (weight.rows / 2 + kLanes - 1) / kLanes : (weight.rows + kTileRows - 1) / kTileRows;
}

// Words from one row of a matrix's input to the next, a multiple of 16. A whole number of kilobytes is avoided: such rows would map to
// the same sets of the L1 cache.
static inline int32_t words_in_row(const outrider_weight &weight) {
  const int64_t columns = weight.columns;
  const int64_t words = weight.format == OUTRIDER_BF16  ? (columns + 1) / 2
                        : integer_format(weight.format) ? (columns + 7) / 8 * 2
                                                        : columns;
  const int64_t rounded = round_up(words, kLanes);
  return static_cast<int32_t>(rounded % 256 ? rounded : rounded + kLanes);
}

// Input::starts of a group whose sums of activation * (code - 8) may overflow 16 bits. No group that fits has this value.
constexpr int32_t kDoesNotFit = INT32_MIN;

// A matrix's input, converted once for all tiles. Rows are divided into blocks of at most the unit's row_block, and the 32-bit words
// of a block's rows are interleaved (word w of row r at w * rows + r). A word is one fp32, two bf16 or four int8 channels.
// Codes are always multiplied by int8, so products are exact. For that, bf16 activations become integers of 15 bits and fp32 activations
// of 24, each of which takes two or three rows of int8: its digits to the base 240 or 256, the lowest first. Where rows are not
// interleaved, each token is a block, and the rows of its digits follow each other.
struct Input {
  int32_t *words;  // [blocks][words per row][rows of the block]
  float *scales;   // for codes: [blocks of channels][rows]
  // For codes: minus the sum of a group's int8, as the low int16, or times middle_code: [groups][rows]. For FACTORS two int16: those
  // sums of a block's groups 0 and 2, then of its groups 1 and 3: [2 * blocks][rows].
  int32_t *offsets;
  // For codes in WORDS, in units that accumulate in 16 bits: the initial value of a group's two sums, minus eight times the sum of the
  // int8 of channels 0 and 1 of every four, and of channels 2 and 3; or kDoesNotFit: [groups][rows].
  int32_t *starts;
  int32_t row_words;  // words per row (words_in_row); for bf16 those after the last column are zero
  int32_t tokens;
  int32_t digits;  // rows of each token
  int32_t rows;    // tokens * digits
  int32_t blocks;
  int32_t apart;  // 1: rows are not interleaved
  int32_t *less;  // minus the sums of y' x' (pairs.inc): [groups][rows]; null where rows are not multiplied in pairs
};

// The most rows that are interleaved.
constexpr int kMostRows = 24;
static inline int digits_of(int format) { return format == OUTRIDER_W8AF32 ? 3 : format == OUTRIDER_W4ABF16 ? 2 : 1; }

// Input::offsets of a block of channels, for each row.
static inline int offsets_in_block(const outrider_weight &weight) {
  return weight.scales == OUTRIDER_FACTORS ? 2 : geometry(weight).block / weight.group;
}

// Channels of a piece: inputs are prepared in pieces, each some channels of a block's rows.
static inline int piece_channels(const outrider_weight &weight) {
  return integer_format(weight.format) ? geometry(weight).block : kBlockChannels;
}

// Tokens are divided evenly: block b holds tokens block_first(b) .. block_first(b + 1).
static inline int block_first(int tokens, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tokens) * block / blocks);
}

// Prefetching of memory that this thread will read soon, in small steps between other work.
struct PrefetchBeside {
  struct Area {
    const char *begin, *end;
  };
  const Area *area = nullptr, *end_area = nullptr;  // areas not begun
  const char *line = nullptr, *end = nullptr;       // the rest of the current area
  static constexpr int kMostRate = 128;
  int rate = 0;  // bytes to prefetch for each step of a product, at most kMostRate
  int due = 0;   // bytes due that do not yet make a cache line
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
  float scale;               // applied before the residual is added
  float cap;                 // 0: none
  char *expanded;            // the thread's scratch: expanded_bytes of the weight
  const int32_t *constants;  // for products in pairs: [tiles][blocks][kTileRows]
  PrefetchBeside *beside;    // or null; only with products in pairs
};

static constexpr int element_bytes(int cache_format) {
  return cache_format == OUTRIDER_CACHE_FP32 ? 4 : cache_format == OUTRIDER_CACHE_INT8 ? 1 : 2;
}
static constexpr int64_t scale_bytes(int cache_format) { return cache_format == OUTRIDER_CACHE_INT8 ? kScaleBytes : 0; }
// Keys and values are prefetched by cache lines, so each area must begin at one.
static_assert(kScaleBytes % 64 == 0, "scales have to fill whole lines");

// One layer of one kv head in the KV cache blocks of one row: its keys in block i are at blocks[i] + key_offset. value_bytes is 0 where an
// int8 cache stores the values of the only head as the last columns of its keys.
struct CacheView {
  char *const *blocks;
  int64_t key_offset;    // bytes from a block's start to this layer's and head's keys
  int64_t value_offset;  // likewise to its values
  int64_t key_bytes;     // from one head's keys to the next head's
  int64_t value_bytes;
  int32_t format;  // outrider_cache
};

static inline bool kept_once(const CacheView &cache) { return cache.value_bytes == 0; }

// A call of `attend`: queries of one kv head, or of several consecutive ones.
struct Attend {
  CacheView cache;       // of the first kv head
  const float *query;    // the first query head of the first kv head, at the first token
  float *out;            // likewise
  int64_t query_stride;  // from one token to the next
  int64_t out_stride;
  int32_t position;               // of the first token
  int32_t first_query;            // queries are (token, head of the group), token-major
  int32_t query_count;            // for each kv head
  int32_t heads;                  // kv heads; if several, at most kQueryBlock queries for each
  int32_t group;                  // query heads per kv head
  int32_t head_size, value_size;  // columns of a query or key, and of a value
  int32_t window;
  int32_t begin;  // the first token that was not skipped
  float scale;
  float cap;               // of scores, 0: none
  const float *sinks;      // [heads][group] the score of each query head's attention sink, or null
  const float *slopes;     // [heads][group] ALiBi's slope of each query head, or null
  bool bf16_biases;        // whether ALiBi is computed in bf16, of the keys' positions, and scaled as scores are
  float *scratch;          // attention_scratch floats
  PrefetchBeside *beside;  // prefetched meanwhile, or null; where given, this task's own cache has been prefetched already
};

// kMostQueries: of all kv heads in one call, if there are several. Their sums stay in the L1 cache.
constexpr int kQueryBlock = 8, kMostQueries = 16;
// The first key that a query at this position attends to: 0 (window 0), that of a sliding window, or (window < 0) of its chunk.
static inline int32_t first_seen(int32_t window, int32_t position) {
  if (window < 0) return position / -window * -window;
  return window > 0 && position >= window ? position + 1 - window : 0;
}

static inline int64_t attention_scratch(int head_size, int value_size) {
  return kMostQueries * (kChunkTokens + round_up(head_size, kLanes) + 2 * round_up(value_size, kLanes));
}

// What a token adds to a head's state [rows, columns]: state = state * decay + key delta^T.
struct StateUpdate {
  const float *key, *delta;
  float decay;
  const float *decays;  // instead of `decay`: of each row (delta_rule_by_row), or the steps of columns (scan_by_column)
};

// A step of a recurrent head. First the pending updates are applied to its state; then a token's delta and output are computed. The delta
// overwrites `value`:
//   delta_rule  delta = (value - decay * state^T key) * factor, out = decay * state^T query + (key query) delta
//   delta_rule_by_row  the same, with a decay for each row of the state
//   scan        delta = value * factor, out = decay * state^T query + (key query) delta + skip * value
//   scan_by_column  the same, with a factor for each column, the decay e^(-rate * factor) for each element, and a skip for each column
struct StateStep {
  const float *from;  // the state; null: as the last step that put it aside left it
  float *to;          // out: the state after the pending updates, or null; may be `from`
  bool aside;         // whether to put the state aside: after the pending updates, and after the token's if `updates`
  bool updates;       // of scans only
  const StateUpdate *pending;
  int32_t pending_count;
  StateUpdate token;  // its delta is where `value` is; key null: the pending updates only
  const float *query;
  float factor, both;  // both: key query, which the step computes
  float *value, *out;
};

// Steps of one head, in this order. Each block of columns goes through all of them before the next, and stays in the first cache.
struct StateSteps {
  int32_t rows, columns;
  float skip;                  // of scan
  const float *rates, *skips;  // of scan_by_column: [rows][columns], [columns]
  float *aside;                // [rows * columns] floats, in an order of the steps' own
  StateStep *steps;
  int32_t count;
};

// The MoE router: see ROUTE in outrider_op. All kinds but SOFTMAX and SOFTMAX_CHOSEN allow at most kMostRouted experts.
constexpr int kMostRouted = 1024;
struct Route {
  int experts, chosen, kind;
  const float *corrections;  // [experts] or null
  const float *factors;      // [experts] multiply the weights, or null
  int group, groups_kept;    // 0: no groups
  float epsilon, scale;
};

// The numbers p, n, beta and epsilon of OUTRIDER_XIELU.
struct Xielu {
  float positive, negative, beta, epsilon;
};

// The weights of hyper-connections: see CONNECT in outrider_op.
constexpr int kMostStreams = kLanes;
struct Connect {
  int streams;
  bool writes, mixes;
  int rounds;
  const float *factors, *biases;  // one for each part, one for each column
  float epsilon, scale, least;    // least: what is added to writes
};

// Matrix products, and how their inputs are prepared.
struct Products {
  const char *name;
  // Tokens in a block of rows that `linear` works on at once and that are interleaved; 0: rows are not interleaved.
  int32_t (*row_block)(const outrider_weight &weight, int tokens);
  // Converts one piece of the channels of a block's rows to the format that the weight is multiplied with. Row t is at x + t * stride,
  // or at x + chosen[t] * stride.
  void (*prepare)(const outrider_weight &weight, const float *x, int64_t stride, const int32_t *chosen, const Input &input,
                  int block, int piece);
  // Tiles first..last of a matrix product, with bias, activation and residual. `next` and `next_tile` are the matrix and the tile that
  // this thread will work on next, for prefetching; or null.
  void (*linear)(const Linear &task, int first_tile, int last_tile, const outrider_weight *next, int next_tile);
  // Whether `linear` can multiply a weight in pairs of channels (linear_pairs.inc), and the constants that it needs for one tile. Both
  // are null in units that never do.
  bool (*paired)(const outrider_weight &weight);
  void (*pair_constants)(const outrider_weight &weight, int tile, int32_t *to);
};

struct Kernels : Products {
  // A transposition: to[word * rows + r] = from[r][word].
  void (*interleave)(const int32_t *const *from, int rows, int words, int32_t *to);
  // Norms, plus residual (or null). bias may be null too.
  void (*rms_norm)(const float *x, const float *weight, const float *residual, float *out, int width, float epsilon);
  void (*layer_norm)(const float *x, const float *weight, const float *bias, const float *residual, float *out, int width,
                     float epsilon);
  // Rotates the first `rotated` columns of a head in place: column i with column i + rotated / 2.
  void (*rope)(float *head, const float *cosine, const float *sine, int rotated);
  void (*table_row)(const void *row, int format, float scale, float *out, int width);
  void (*add)(const float *x, const float *y, float *out, int width);
  // The best experts and their weights, activation(x), and x * factor + added (or null).
  void (*route)(const Route &task, const float *scores, float *out);
  float (*activated)(float x, int activation);
  void (*scaled)(const float *x, float factor, const float *added, float *out, int width);
  void (*xielu)(const float *x, const Xielu &task, float *out, int width);
  // max(0, x - (mean + deviations * standard deviation)).
  void (*gaussian_top_k)(const float *x, float deviations, float *out, int width);
  // The sum of `count` consecutive vectors, each times its coefficient, plus `added` (or null).
  void (*blend)(const float *vectors, int count, const float *coefficients, const float *added, float *out, int width);
  // x * sqrt(mean(model^2) / max(mean(x^2), least)) + added (or null).
  void (*match_rms)(const float *x, const float *model, float least, const float *added, float *out, int width);
  void (*connect)(const Connect &task, const float *logits, float *out);
  // The products of x with each of `count` vectors, which are `stride` floats apart.
  void (*products)(const float *vectors, int64_t stride, int count, const float *x, int width, float *out);
  void (*store_cache)(const CacheView &cache, int position, const float *key, const float *value, int head_size,
                      int value_size);
  void (*attend)(const Attend &task);
  // Returns the index of the largest logit (the first of equals). *second: the second-largest, *finite: whether all logits are finite.
  // With a mask (or null) only logits whose bits are set count; *best is -inf where none is set.
  int32_t (*argmax)(const float *logits, int count, const uint32_t *mask, float *best, float *second, int *finite);
  // The noise of tokens first .. first + count (first a multiple of 4) at one position, for those whose random word is at most `most`:
  // the noise is a falling function of the word. Returns the number of these tokens; places: out, their offsets from `first`.
  int (*gumbel_up_to)(uint64_t seed, uint32_t sample, uint32_t position, int first, int count, uint32_t most,
                      int32_t *places, double *noise);
  // exp(score - highest) for every score.
  void (*exponentials)(const double *scores, double highest, double *out, int count);
  // The natural logarithm of a positive, normal number.
  double (*logarithm)(double x);
  // Quantises one group of weights: out its header (with the `dropped` low bits of the scale cleared) and one code for each channel.
  void (*quantise)(const float *x, int channels, int codes, uint32_t dropped, uint32_t *header, uint8_t *values);
  // Quantises one block of at most 128 channels to FACTORS: its scale, the factors and offsets of its groups of 32, and the codes.
  void (*find_factors)(const float *x, int channels, float *scale, int16_t *factors, int16_t *offsets, uint8_t *codes);
  // x * activation(y) + added (or null).
  void (*gated_by)(const float *x, const float *y, int activation, const float *added, float *out, int width);
  // activation(sum of rows[tap] * taps[tap] + bias (or null)) * factors (or null); the oldest token is first.
  void (*convolve)(const float *const *rows, const float *const *taps, int count, const float *bias, int activation,
                   const float *factors, float *out, int width);
  // x / sqrt(x x + epsilon) * scale.
  void (*unit_vector)(const float *x, float epsilon, float scale, float *out, int width);
  void (*delta_rule)(const StateSteps &steps);
  void (*delta_rule_by_row)(const StateSteps &steps);
  void (*scan)(const StateSteps &steps);
  void (*scan_by_column)(const StateSteps &steps);
  // x = softplus(x + bias), of a multiple of 16 columns.
  void (*steps)(float *x, const float *bias, int width);
};

extern const Kernels kGeneric;
extern const Kernels kAvx2;
extern const Kernels kAvx512Vnni;
// What later instructions are for; all else is kAvx512Vnni's, so that it is compiled once.
extern const Products kAvx512Bf16;
extern const Products kAvx512Pairs;
extern const Products kAmx;

// The best unit for this machine, or the one that OUTRIDER_ISA names; null, with the reason in *message, if it is not available.
const Kernels *choose_kernels(const char **message);
const char *available_kernels();

// The fewest rows of a pass (Input::rows) that can be multiplied in pairs. With fewer, memory bandwidth is the limit, and the constants are
// additional memory to read.
constexpr int kFewestInPairs = 4;
// The most of a block.
constexpr int kMostInPairs = 12;
// Whether the engine stores the term that depends on the codes alone. Otherwise the first block of rows of each tile computes it.
static inline bool has_pair_constants(const outrider_weight &weight) {
  return weight.scales == OUTRIDER_WORDS || weight.scales == OUTRIDER_FACTORS;
}
// The fewest rows for which codes with these scales are multiplied in pairs on this machine; 0: never. Without stored constants more than
// one block of rows is needed. Zen 5 multiplies twice as fast as Zen 4 but reads memory no faster, so it needs more rows before products
// are the limit; and FACTORS loses there, since the sums of its groups are multiplied for every row, as others' are, which have not been
// measured. If OUTRIDER_ISA names the unit, the answer is kFewestInPairs.
int fewest_in_pairs(int scales);

}  // namespace outrider

#endif
