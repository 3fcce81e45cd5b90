/* The C interface of outrider's native kernels.
 *
 * A model is a program: a flat list of operations over packed weights and numbered buffers. An engine runs a program for
 * ragged batches of rows; it owns the rows' caches and their token histories, and a pool of threads. One call of
 * outrider_forward is one whole forward pass, the choice of the tokens included.
 *
 * Functions that return int32_t return a status code unless their comment says otherwise; after any status but
 * OUTRIDER_OK, outrider_message() says in words what was wrong, for the calling thread. An engine is for one thread at a
 * time. Every pointer's layout is given where the pointer is; sizes are in elements unless they are called bytes.
 */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include <stdint.h>

/* Raised whenever a signature or a layout changes; the binding refuses a library of another number. */
#define OUTRIDER_ABI 32

#define OUTRIDER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum outrider_status {
  OUTRIDER_OK = 0,
  OUTRIDER_INVALID = 1,     /* an argument or a program that makes no sense */
  OUTRIDER_NO_MEMORY = 2,   /* the system has no memory left */
  OUTRIDER_CACHE_FULL = 3,  /* the cache's limit is reached: close or truncate rows, then feed again */
  OUTRIDER_NO_ROW = 4,      /* a row id that is not open */
  OUTRIDER_CONTEXT = 5,     /* a row would grow beyond the program's context */
  OUTRIDER_UNSUPPORTED = 6, /* a format or an instruction set that is not there */
  OUTRIDER_NOT_FINITE = 7   /* a weight to pack, or a logit, is NaN or infinite */
};

/* What a matrix's weights are, and what its activations are made for the product. */
enum outrider_format {
  OUTRIDER_FP32 = 0,
  OUTRIDER_BF16 = 1,
  OUTRIDER_W4A8 = 2,    /* codes by group of channels, activations int8 by token and block of channels */
  OUTRIDER_W8A8 = 3,    /* likewise: how codes are stored is said apart */
  OUTRIDER_W4ABF16 = 4, /* codes by group of channels, activations bf16 */
  OUTRIDER_W8AF32 = 5,  /* codes by group of channels, activations fp32 */
  OUTRIDER_FP16 = 6     /* activations fp32: what a quantised checkpoint leaves in fp16 */
};

/* What a code of the formats with scales is; kernels/packing.py and kernels/storage.py define how all of it lies. */
enum outrider_codes {
  OUTRIDER_NO_CODES = 0, /* fp32 and bf16 */
  OUTRIDER_INT4 = 1,     /* unsigned integers, less a zero point */
  OUTRIDER_INT5 = 2,
  OUTRIDER_INT6 = 3,
  OUTRIDER_INT8 = 4,
  OUTRIDER_E2M1 = 5, /* floats of four bits: 0 .5 1 1.5 2 3 4 6, then the same with the sign set */
  OUTRIDER_E4M3 = 6  /* floats of eight bits, of bf16 weights: value * scale, rounded to bf16, is what is multiplied */
};

/* How the scales of the groups are stored. */
enum outrider_scales {
  OUTRIDER_WORDS = 0,     /* 24 bits of fp32 and a zero point of 8 bits before each group */
  OUTRIDER_SCALE_F32 = 1, /* one for each group, those of 128 channels together */
  OUTRIDER_SCALE_F16 = 2,
  OUTRIDER_SCALE_BF16 = 3,
  OUTRIDER_SCALE_E8M0 = 4, /* 2^(code - 127); groups of 32 */
  OUTRIDER_SIX_BITS = 5,   /* of 256 channels fp16 scale and minimum, of 32 integers of 6 bits that multiply these */
  OUTRIDER_EIGHT_BITS = 6, /* of 256 channels an fp16 scale, of 16 an int8 that multiplies it */
  OUTRIDER_FACTORS = 7,    /* of 128 channels a bf16 scale; of 32 a factor of 2 to 17 and an offset of 8 bits */
  OUTRIDER_HALF_MINIMA = 8 /* fp16 scale and minimum of each group of 32, those of 128 channels together */
};

/* How the keys and values of rows are kept. */
enum outrider_cache {
  OUTRIDER_CACHE_BF16 = 0,
  OUTRIDER_CACHE_FP32 = 1,
  OUTRIDER_CACHE_INT8 = 2 /* one scale for each token and kv head, of its key and of its value; queries likewise int8 */
};

enum outrider_operation {
  OUTRIDER_EMBED = 0,     /* out = weight[token] * scale */
  OUTRIDER_POSITION = 1,  /* out = in + weight[position + integer] */
  OUTRIDER_NORM = 2,      /* out = normalised in + residual, per head of head_size (the whole width where heads is 1) */
  OUTRIDER_LINEAR = 3,    /* out = cap(activation(in * weight^T + bias)) * scale + residual */
  OUTRIDER_ROPE = 4,      /* in place on in: of heads of head_size the first `rotated` columns, their halves rotated;
                                 weight = inverse frequencies */
  OUTRIDER_ATTENTION = 5, /* stores key and value in the cache of layer `integer`, out = attention of in over the cache */
  OUTRIDER_SELECT = 6,    /* out = the rows of in whose choice or logits are asked for; selects stand side by side, and what
                                 follows them has these rows only: of attention, whose cache is filled then, the queries */
  OUTRIDER_CHOOSE = 7,    /* in = logits; ends the program */
  OUTRIDER_ROUTE = 8,     /* in = scores of experts; out = the kv_heads best ones' numbers, then their weights */
  OUTRIDER_EXPERTS = 9,   /* out = for each expert of a token the product with that expert's matrix, as LINEAR has it */
  OUTRIDER_MIX = 10,      /* out = sum of a token's experts' products (integer 0: times their weights) + residual */
  OUTRIDER_GATE = 11,     /* out = in * sigmoid(key) + residual, key one column; or in * activation(key), key as wide */
  OUTRIDER_HAND_OUT = 12, /* in = columns integer.. of the states that a batch asks for; comes before select */
  OUTRIDER_TAKE_IN = 13,  /* out = the state that was given with the token; a GO_ON follows */
  OUTRIDER_GO_ON = 14,    /* out = in for a token that came with a state, else what its row's last token left */
  OUTRIDER_LEAVE = 15,    /* in = what a row's last token leaves for the one fed behind it; comes behind select */
  OUTRIDER_SPREAD =
      16, /* out = logits of the whole vocabulary: in's column j is that of token weight[j], others have none */
  OUTRIDER_CONVOLVE =
      17, /* in = in * key; out = activation(sum over a token and those before it of in * weight + bias) * value */
  OUTRIDER_DELTA = 18, /* the gated delta rule: in = queries, key, value, residual = gates; writes over all of them */
  OUTRIDER_SCALE = 19, /* out = in * an element of weight, or column by column * weight, + residual */
  OUTRIDER_XIELU =
      20, /* out = weight's p * in^2 + beta * in where in is positive, else (e^min(in, epsilon) - 1 - in) * n + beta * in */
  OUTRIDER_HEADS =
      21, /* out = for each head its first columns of in, then the product of its last ones with a matrix of its own */
  OUTRIDER_CUT = 22, /* out = how far in lies above its mean plus scale times its standard deviation; 0 where it does not */
  OUTRIDER_BLEND =
      23, /* out = vectors, each the sum of in's vectors times coefficients of the token's own, key, + residual */
  OUTRIDER_MATCH = 24, /* out = in's vectors, each made as long as key, + residual */
  OUTRIDER_SCAN =
      25 /* Mamba 2's selective scan: in = C, key = B, value = x, residual = dt; writes over value and residual */
};

enum outrider_activation {
  OUTRIDER_NONE = 0,
  OUTRIDER_RELU = 1,
  OUTRIDER_GELU_ERF = 2,
  OUTRIDER_GELU_TANH = 3,
  OUTRIDER_SILU = 4,
  OUTRIDER_SIGMOID = 6,
  OUTRIDER_RELU_SQUARED = 7,
  OUTRIDER_CLIP = 8, /* of a linear layer that is not gated: within cap of 0, and no soft cap */
  OUTRIDER_CLAMPED_SWIGLU =
      5 /* of gated matrices: gate = min(gate, cap), up within cap of 0; gate * sigmoid(scale * gate) * (up + 1) */
};

/* What the weights of a token's experts are. */
enum outrider_route {
  OUTRIDER_SOFTMAX = 0,        /* of a softmax over all experts */
  OUTRIDER_SOFTMAX_CHOSEN = 1, /* of a softmax over the chosen ones */
  OUTRIDER_SIGMOID_EACH = 2,   /* the sigmoid of each score */
  OUTRIDER_SIGMOID_SHARE = 3,  /* likewise, by the sum of the chosen ones' plus epsilon */
  OUTRIDER_SOFTMAX_SHARE =
      4, /* of a softmax over all, by the sum of the chosen ones', which counts as epsilon where it is less */
  OUTRIDER_SPARSE_MIXER =
      5, /* two experts: of a softmax over what is near the best score, then over what is near the second */
  OUTRIDER_SOFTMAX_GROUPS = 6 /* of a softmax over all; groups are chosen by their best expert */
};

enum outrider_norm { OUTRIDER_RMS = 0, OUTRIDER_LAYER = 1 };

/* Columns offset .. offset + width of a buffer. A buffer is [tokens, buffer width] fp32, its width rounded up to 16.
 * buffer -1: absent. */
typedef struct outrider_slice {
  int32_t buffer;
  int32_t offset;
  int32_t width;
} outrider_slice;

/* One packed matrix [rows, columns], or a vector (rows 1, fp32, columns plain floats), or an embedding table (fp32, bf16
 * or fp16, rows one after the other; a matrix of codes may be one as it is). `data` is 64-byte aligned and stays where it is while the engine lives.
 * gated: the matrix is two stacked ones, gate over up, whose 16-row tiles alternate; rows counts both. */
typedef struct outrider_weight {
  const void *data;
  int32_t format;
  int32_t rows;
  int32_t columns;
  int32_t group; /* channels per scale: 16, 32, 64 or 128; 0 for float formats */
  int32_t gated;
  int32_t table;  /* 1: embedding table or vector (row-major); 0: matrix in tiles */
  int32_t codes;  /* outrider_codes */
  int32_t scales; /* outrider_scales */
  int32_t zeros;  /* 1: every group has its own zero point; 0: it is the middle of the codes' range */
  int32_t
      ordered; /* 1: channel j of the matrix is channel order[j] of its input; int32 order[columns] lies behind the tiles */
} outrider_weight;

/* Rows of a matrix that is quantised already. A row has a value of `scales`, `zeros` and `sub_*` for every `group` of its columns,
 * the last group may be shorter; of SIX_BITS and EIGHT_BITS `scales` and `minima` are for every 256, of FACTORS for every 128. A
 * weight is (code - zero) * scale; of SIX_BITS code * scale * sub_scale - minimum * sub_minimum; of FACTORS
 * (code * sub_scale - sub_minimum) * scale. Of HALF_MINIMA it is code * scale - minimum, both for every 32. */
typedef struct outrider_quantised {
  const uint8_t *codes;      /* [count, columns] */
  const float *scales;       /* [count, groups], exact in the type that stores them */
  const uint8_t *zeros;      /* [count, groups] or NULL: the middle of the codes' range */
  const int16_t *sub_scales; /* [count, groups] or NULL */
  const float *minima;       /* [count, columns / 256] or NULL */
  const int16_t *sub_minima; /* [count, groups] or NULL */
  int32_t group;             /* a multiple of the weight's group */
} outrider_quantised;

/* One operation. Fields that its kind does not name above or here are ignored; weight, bias: index into the weights or -1.
 * cap: 0 is none, else cap(x) = cap * tanh(x / cap).
 *   EMBED      scale (1: as it is)
 *   NORM       integer = outrider_norm, epsilon, weight, bias, heads, head_size, residual
 *   LINEAR     weight, bias, activation, cap, scale, residual; with a gated weight out = activation(gate) * up, bias has
 *              gate's, then up's
 *   ROPE       heads, head_size, rotated, weight; scale multiplies the sine and cosine (yarn's attention factor; else 1);
 *              longest: 0, or the longest row for which weight holds: the frequencies of longer ones are `bias`. The same in
 *              all of a program's that have it. Where a row grows beyond it, all of its keys and values are computed anew; not so
 *              behind a token that is not what was chosen before it: there choices are -1, unless logits are wanted.
 *   ROUTE      heads = experts, kv_heads = how many of them a token takes, best first, of equals the first; integer = outrider_route;
 *              scale multiplies the weights. Of SIGMOID_EACH, SIGMOID_SHARE, SOFTMAX_SHARE and SOFTMAX_GROUPS: weight: -1 or corrections, one for each
 *              expert, which count for the choice alone; epsilon; head_size: 0, or experts of a group, and then window: so many groups
 *              are chosen from, whose best two experts add up to most (of SOFTMAX_GROUPS: whose best one is best). Of SPARSE_MIXER
 *              epsilon: how far from the best a score may be that has a share, as a part of the larger of the best and its own size.
 *              bias: -1 or a factor for each expert, which multiplies its weight
 *   EXPERTS    key = ROUTE's output, heads, kv_heads likewise; weight, bias: those of the first expert, the others' follow, all of one
 *              shape and storage; activation, cap, scale; integer: 0: in is the tokens' vectors, 1: what EXPERTS has put out; out is
 *              a whole buffer of kv_heads * (columns of a product, rounded up to 16), in an order that only EXPERTS and MIX know
 *   MIX        in = EXPERTS' output, key = ROUTE's, kv_heads, residual, integer
 *   GATE       in, key, residual, activation (where key is as wide)
 *   HAND_OUT   in, integer
 *   TAKE_IN    out, of as many columns as a given state has. What stands between it and the GO_ON is left out of passes in which no
 *              token came with a state
 *   GO_ON      in, out, as wide as LEAVE's in
 *   SPREAD     in, out, weight: a vector of token ids, each once. The logits of tokens that it has not are -1e30
 *   CONVOLVE   in, out, weight: [columns, taps] an fp32 table, the last tap is the token's own; key, value (absent: 1), bias,
 *              activation
 *   DELTA      in, key [kv_heads, head_size], value, out [heads, columns: a multiple of 16]; residual: b of all heads, then a; each key head is
 *              that of heads / kv_heads heads. Queries and keys become unit vectors (epsilon), queries times scale. Of a head a state
 *              [head_size, columns] goes from token to token: decay = exp(-exp(weight) * softplus(a + bias)), beta = sigmoid(b) (times
 *              cap, where that is not 0), state = state * decay; state += key ((value - state^T key) * beta)^T; out = state^T query.
 *              a and bias may be one number for each head, or one for each row of its state (residual [heads, 1 + head_size])
 *   SCAN       in, key [kv_heads, head_size], value, out [heads, columns: a multiple of 16]; residual [heads]; weight: A_log of all heads,
 *              then D; bias: one for each head. Heads share keys as of DELTA. step = softplus(residual + bias), decay = exp(-exp(A_log) *
 *              step); state = state * decay + key (value * step)^T; out = state^T in + D * value
 *   ATTENTION  in = queries, key, value, heads, kv_heads, head_size, scale, cap (of scores), window (0: all; else the last
 *              `window` tokens; negative: those of the token's own chunk of so many), weight: a score for each head that belongs
 *              to no token (a sink), or -1. Several operations may share the cache of one layer: with the same key and value,
 *              kv_heads and head_size. Of value and out a head may have another size, a multiple of 8
 *   SCALE      in, out, residual, weight: a vector; integer: 1: each column is multiplied by its own element; 0: all by one. window: 0: the
 *              first, else element (position + integer) / window, at most the last, by which all are: that comes before select
 *   XIELU      in, out, weight: a vector of four: p and n are softplus(its first) and beta + softplus(its second), then beta and epsilon
 *   HEADS      in, out [heads, columns], weight: that of the first head, the others' follow, all of one shape [rows, columns] and
 *              storage; of a head as many columns of in as a matrix has are multiplied, the last ones, and what stands before them
 *              stands before the product too
 *   CUT        in, out, scale. The standard deviation is that of the columns themselves, not an estimate from a sample
 *   BLEND      in [heads, columns], key [vectors of out, heads], out [.., columns], residual (as wide as out): vector v of out is the sum over
 *              h of key[v][h] * in[h], + residual's
 *   MATCH      in [heads, columns], key [columns], out and residual as wide as in, epsilon: a vector times the root of key's mean square over
 *              that of its own, which counts as epsilon where it is less */
typedef struct outrider_op {
  int32_t kind;
  outrider_slice in;
  outrider_slice key;
  outrider_slice value;
  outrider_slice residual;
  outrider_slice out;
  int32_t weight;
  int32_t bias;
  int32_t activation;
  int32_t integer;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_size;
  int32_t window;
  int32_t rotated;
  int32_t longest;
  float epsilon;
  float scale;
  float cap;
} outrider_op;

typedef struct outrider_program {
  const outrider_op *ops;         /* [op_count] */
  const outrider_weight *weights; /* [weight_count] */
  const int32_t *buffers;         /* [buffer_count] the widths of the buffers */
  int32_t op_count;
  int32_t weight_count;
  int32_t buffer_count;
  int32_t layers; /* attention layers, that is caches */
  int32_t vocabulary;
  int32_t context; /* the longest row */
  int32_t cache;   /* outrider_cache */
} outrider_program;

typedef struct outrider_options {
  const int32_t *cores; /* [threads] the core of each thread, or NULL: not pinned. The calling thread is thread 0, and is
                              * pinned as well when it first calls; with NULL later on it stays where it is. */
  int32_t threads;      /* at least 1 */
  int32_t spin_microseconds; /* how long a waiting thread spins before it sleeps; -1: the default (50) */
  int64_t cache_bytes;       /* the most memory the cache may take, recurrent states apart; 0: no limit but the machine's */
} outrider_options;

/* How a row's tokens are chosen: workers/engines/sampling.py is the definition. Greedy where temperature is 0.
 * The end tokens cannot be chosen before min_tokens others have been written. */
typedef struct outrider_sampling {
  double temperature;
  double top_p;
  double min_p;
  double repetition_penalty;
  double presence_penalty;
  double frequency_penalty;
  uint64_t seed;
  const int32_t *bias_tokens; /* [bias_count] */
  const double *bias_values;  /* [bias_count] */
  int32_t bias_count;
  int32_t top_k;
  uint32_t sample;
  int32_t min_tokens;
  const int32_t *end_tokens; /* [end_count] */
  int32_t end_count;
} outrider_sampling;

/* One ragged batch: feed i appends counts[i] tokens to row rows[i] (a row at most once a batch).
 * choose[i] choices are wanted, after the last choose[i] tokens fed; logits[i] likewise for logits. Either may be 0.
 * logprobs[i] of 0 or more: beside each choice of feed i, its log-probability and those of the logprobs[i] likeliest tokens.
 * branches[i] tokens are tried in place of tokens of feed i: each comes after the feed's first branch_after tokens instead of the
 * next one. A choice after each of them follows the feed's own choices (-1 where a
 * logit is not a finite number). Neither row nor cache know of a branch afterwards.
 * A choice with a mask is made among the tokens whose bits are set (token t: bit t % 32 of word t / 32); -1 where that is none. Masks
 * may be made while the pass runs: another thread sets *masks_ready to 1 when they are there, and choices wait for that.
 * A program with HAND_OUT gives the states of all tokens of the feeds that ask; one with TAKE_IN is given a state with each token of a
 * feed, or with none where that is one token which follows what its row was fed last, its choice asked for. */
typedef struct outrider_batch {
  int32_t feeds;
  const int32_t *rows;          /* [feeds] */
  const int32_t *counts;        /* [feeds] at least 1 */
  const int32_t *tokens;        /* [sum of counts] */
  const int32_t *choose;        /* [feeds] */
  const int32_t *logits;        /* [feeds], or NULL: none */
  const int32_t *branches;      /* [feeds] or NULL: none */
  const int32_t *branch_after;  /* [sum of branches] at least 1, less than the feed's count */
  const int32_t *branch_tokens; /* [sum of branches] */
  int32_t *chosen;              /* out [sum of choose and branches] */
  int32_t *runners_up;          /* out, likewise: the tokens with the second best scores, -1 where there is none; or NULL */
  double *margins;              /* out, likewise: the margins over the second best scores; or NULL */
  float *logits_out;            /* out [sum of logits, vocabulary], or NULL */
  const int32_t *logprobs;      /* [feeds] -1: none wanted; or NULL: none */
  int32_t *
      logprob_tokens; /* out [sum of (choose + branches) * (1 + logprobs)] for each choice itself, then the likeliest, best first */
  double *logprob_values; /* out, likewise: log-probabilities by the raw logits */
  const uint32_t *masks;  /* [.., mask_words] or NULL: none */
  const int32_t *mask_of; /* [sum of choose and branches] which of the masks, in the order of chosen; -1: none. Or NULL */
  const int32_t *masks_ready; /* or NULL: they are there */
  int32_t mask_words;         /* of one mask: enough for the vocabulary */
  const int32_t *states;      /* [feeds] 1: states are wanted; or NULL: none */
  uint16_t *states_out;       /* out [tokens of those feeds, columns of all HAND_OUTs] bf16 */
  const int32_t *given;       /* [feeds] how many of the feed's tokens come with a state: all or none; or NULL: none */
  const uint16_t *states_in;  /* [sum of given, columns of TAKE_IN] bf16 */
} outrider_batch;

/* Rows that go on by themselves: feed i appends counts[i] tokens to row rows[i], then again and again what the row chose last.
 * It stops after most[i] choices, after one that is among its ends, or when its reach falls below least_reach. Each choice
 * multiplies reach by max(least_chance, 1 - (1 - usual[span]) * miss_factor[i]); span is the number of bounds that its margin reaches.
 * All stop when sum(reach - least_reach) over the rows that go on is less than least_sum.
 *
 * Where a row's last tokens have come before in it, what followed there is fed behind them, up to guess_room tokens of all rows
 * in one pass: as far as the row chooses the same, a pass makes several choices. Choices, runners-up and margins are what they
 * are without; only least_sum is asked about less often, behind passes. A head's rows, and those of programs with recurrent states, have
 * none. */
typedef struct outrider_decode_batch {
  int32_t feeds;
  const int32_t *rows;       /* [feeds] */
  const int32_t *counts;     /* [feeds] at least 1 */
  const int32_t *tokens;     /* [sum of counts] */
  const int32_t *most;       /* [feeds] 1 to stride */
  const int32_t *end_counts; /* [feeds] */
  const int32_t *ends;       /* [sum of end_counts] */
  const double *reach;       /* [feeds] before the first choice */
  const double *miss_factor; /* [feeds] how many times as often as usual a choice misses */
  const double *bounds;      /* [spans - 1] rising */
  const double *usual;       /* [spans] */
  double least_chance;
  double least_reach;
  double least_sum;
  int32_t spans;
  int32_t stride;
  int32_t guess_room;
  int32_t *made;             /* out [feeds] how many choices there are */
  int32_t *chosen;           /* out [feeds, stride] */
  int32_t *runners_up;       /* out [feeds, stride] the tokens with the second best scores, -1 where there is none */
  double *margins;           /* out [feeds, stride] */
  int32_t *passes;           /* out [1] how many there were, at most stride */
  int32_t *going;            /* out [stride] the rows of each pass */
  double *seconds;           /* out [stride] of each pass */
  const int32_t *given;      /* [feeds] or NULL, of the first pass, as in a batch */
  const uint16_t *states_in; /* [sum of given, columns of TAKE_IN] bf16 */
} outrider_decode_batch;

typedef struct outrider_engine outrider_engine;

OUTRIDER_API int32_t outrider_abi_version(void);
/* Numbers that the binding has too, for it to compare, by name: "tile rows", "block channels", "super channels", and
 * "sizeof NAME" and "offset NAME.FIELD" of the structures outrider_NAME. -1 where there is none of that name. */
OUTRIDER_API int64_t outrider_number(const char *name);
/* What was wrong with this thread's last failed call. Valid until its next call. */
OUTRIDER_API const char *outrider_message(void);
/* The name of the instruction set in use, or NULL when OUTRIDER_ISA names one that is unknown or that this machine lacks
 * (outrider_message says which). Names: generic, avx2, avx512vnni, avx512bf16, avx512pairs, amx. */
OUTRIDER_API const char *outrider_isa(void);
/* The names of all that this machine can run, best first, separated by one space. */
OUTRIDER_API const char *outrider_isa_available(void);
/* From how many tokens of a pass on this machine multiplies codes of four bits with such scales (OUTRIDER_WORDS, in groups of 128, or
 * OUTRIDER_FACTORS) in pairs of channels, for which it keeps numbers beside them; 0: never. */
OUTRIDER_API int32_t outrider_fewest_in_pairs(int32_t scales);
/* A digest of the sources that this library was built from. */
OUTRIDER_API const char *outrider_sources(void);

/* Zeroed memory for packed weights or anything large: 2 MB aligned, huge pages asked for. NULL where there is none. */
OUTRIDER_API void *outrider_memory_allocate(int64_t bytes);
OUTRIDER_API void outrider_memory_free(void *memory, int64_t bytes);

/* Reads memory once, as one stream (`streams` is 1) or as two, and returns a sum over it: for measuring what the memory can do.
 * Threads may each read a part. */
OUTRIDER_API uint64_t outrider_stream_read(const void *data, int64_t bytes, int32_t streams);

/* Bytes that weight->data needs (data itself is not looked at); negative: -status. */
OUTRIDER_API int64_t outrider_packed_bytes(const outrider_weight *weight);
/* Packs `count` rows of a float matrix as rows first_row.. of the weight; weight->data must hold outrider_packed_bytes bytes, zeroed
 * before the first call. Threads may pack different rows of one weight at the same time if none shares a 16-row tile.
 * source: [count] rows of weight->columns values, `stride` values from one row to the next;
 * source_type: 0 fp32, 1 bf16 (uint16_t), 2 fp16 (uint16_t). Rounding is to nearest, ties to even. */
OUTRIDER_API int32_t outrider_pack_rows(const outrider_weight *weight, int32_t first_row, int32_t count, const void *source,
                                        int32_t source_type, int64_t stride);

/* Packs `count` rows of codes as rows first_row.. of the weight, as outrider_pack_rows does; every number is kept as it is, and
 * refused where its place cannot hold it. */
OUTRIDER_API int32_t outrider_pack_codes(const outrider_weight *weight, int32_t first_row, int32_t count,
                                         const outrider_quantised *source);
/* Packs the order of an ordered weight's columns: order is [columns], every input channel once. */
OUTRIDER_API int32_t outrider_pack_order(const outrider_weight *weight, const int32_t *order);

/* The program, its weights' descriptions and the options are copied; the packed data is not. */
OUTRIDER_API int32_t outrider_engine_create(const outrider_program *program, const outrider_options *options,
                                            outrider_engine **engine);
OUTRIDER_API void outrider_engine_destroy(outrider_engine *engine);
/* Go on with another number of threads, on other cores (NULL: unpinned). Not while a pass is under way; no bit changes. */
OUTRIDER_API int32_t outrider_engine_threads(outrider_engine *engine, int32_t threads, const int32_t *cores);
/* Takes memory now that passes of `tokens` tokens with `selected` choices would take in the middle of the work, and a cache for
 * `cache_tokens` tokens (of 2 GB at most). */
OUTRIDER_API int32_t outrider_engine_reserve(outrider_engine *engine, int32_t tokens, int32_t selected,
                                             int64_t cache_tokens);

/* Begins an empty row and writes its id. The first `prompt` tokens fed are its prompt, the rest counts as written (only penalties,
 * the least number of tokens and long rope care). The bias arrays are copied. */
OUTRIDER_API int32_t outrider_row_open(outrider_engine *engine, const outrider_sampling *sampling, int32_t prompt,
                                       int32_t *row);
/* Begins a row that starts with the first `length` tokens of another; the cache blocks are shared until one of them writes. */
OUTRIDER_API int32_t outrider_row_fork(outrider_engine *engine, int32_t source, int32_t length,
                                       const outrider_sampling *sampling, int32_t prompt, int32_t *row);
/* Appends tokens that are never computed: what is fed behind them does not see them, nor anything before them. */
OUTRIDER_API int32_t outrider_row_skip(outrider_engine *engine, int32_t row, const int32_t *tokens, int32_t count);
OUTRIDER_API int32_t outrider_row_truncate(outrider_engine *engine, int32_t row, int32_t length);
OUTRIDER_API int32_t outrider_row_close(outrider_engine *engine, int32_t row);
/* How many tokens the row's cache holds; negative: -status. */
OUTRIDER_API int32_t outrider_row_length(const outrider_engine *engine, int32_t row);
/* Bytes of cache memory the engine holds, and how many of its blocks are in use. */
OUTRIDER_API void outrider_cache_use(const outrider_engine *engine, int64_t *bytes, int64_t *blocks_used,
                                     int32_t *block_tokens);

/* One forward pass. On OUTRIDER_NOT_FINITE, and on OUTRIDER_NO_MEMORY where it is for a choice, the tokens have been fed and choices are
 * missing: truncate the rows. On any other status but OUTRIDER_OK nothing has been fed. */
OUTRIDER_API int32_t outrider_forward(outrider_engine *engine, const outrider_batch *batch);
/* Of the latest outrider_forward: how many experts' matrices it read, over all layers, each counted once; 0 of a model without
 * experts. What a pass costs depends on that. */
OUTRIDER_API int64_t outrider_experts_read(const outrider_engine *engine);
/* Of one of the choices of the latest outrider_forward, by its place in `chosen`: the `count` best tokens, 16 at most, best first, -1
 * where there are no more; with a mask (or NULL) those whose bits are set. Its row must still hold what stood before the choice.
 * Not of branches, nor of programs with other frequencies for long rows. */
OUTRIDER_API int32_t outrider_rank(outrider_engine *engine, int32_t choice, const uint32_t *mask, int32_t mask_words,
                                   int32_t count, int32_t *tokens);
/* From now on choices are corrected by what the engine is told of earlier ones (outrider_learn): for drafts, whose choices are
 * guesses. The scores of `tokens` tokens are corrected at most, those that were wrong last. Called again, it forgets what was learned. */
OUTRIDER_API int32_t outrider_correct(outrider_engine *engine, int32_t tokens);
/* From now on `tokens` tokens have scores, fewer than all (0: all again); others -1e30. For drafts: at first those with the lowest ids,
 * then what rows are fed or skip comes in, each token in the place of the one that came longest ago. Called again, it begins anew. Not
 * of programs with SPREAD. */
OUTRIDER_API int32_t outrider_shorten(outrider_engine *engine, int32_t tokens);
/* What in truth came behind the first `first` tokens of the row, behind first + 1 and so on. Looked at where the row's latest
 * choice there is still known, as the last 64 are. better, worse: out, how many of them corrections had made right, and wrong. */
OUTRIDER_API int32_t outrider_learn(outrider_engine *engine, int32_t row, int32_t first, const int32_t *tokens,
                                    int32_t count, int32_t *better, int32_t *worse);
/* As many passes as the rows want. On any status but OUTRIDER_OK some passes may have been made; the rows' lengths say. */
OUTRIDER_API int32_t outrider_decode(outrider_engine *engine, const outrider_decode_batch *batch);

/* The sampler alone, for tests: chooses after `history` (its first `prompt` tokens are the prompt; its length is the
 * position). mask: of the vocabulary, or NULL. runner_up: out, as in a batch, or NULL. scores: out [vocabulary], the scores before the
 * noise, or NULL. */
OUTRIDER_API int32_t outrider_choose(const float *logits, int32_t vocabulary, const outrider_sampling *sampling,
                                     const int32_t *history, int32_t length, int32_t prompt, const uint32_t *mask,
                                     int32_t *chosen, int32_t *runner_up, double *margin, double *scores);
/* Log-probabilities alone, for tests: of `chosen`, then of the `count` likeliest. tokens, values: out [1 + count]. */
OUTRIDER_API int32_t outrider_log_probabilities(const float *logits, int32_t vocabulary, int32_t chosen, int32_t count,
                                                int32_t *tokens, double *values);

#ifdef __cplusplus
}
#endif

#endif
