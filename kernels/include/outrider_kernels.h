/* The C interface of outrider's native kernels.
 *
 * A model is a program: a flat list of operations over packed weights and numbered buffers. An engine runs a program for
 * ragged batches of rows; it owns the rows' KV caches and their token histories, and a pool of threads. One call of
 * outrider_forward is one whole forward pass, the choice of the tokens included.
 *
 * Functions that return int32_t return a status code unless their comment says otherwise; after any status but
 * OUTRIDER_OK, outrider_message() says in words what was wrong, for the calling thread. Only one thread at a time may
 * call an engine; another is refused. Every pointer's layout is given where the pointer is; sizes are in elements, or called bytes.
 */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include <stdint.h>

/* Raised whenever a signature or a layout changes; the binding refuses a library with another number. */
#define OUTRIDER_ABI 37

#define OUTRIDER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum outrider_status {
  OUTRIDER_OK = 0,
  OUTRIDER_INVALID = 1,     /* an argument or a program is invalid */
  OUTRIDER_NO_MEMORY = 2,   /* memory could not be allocated */
  OUTRIDER_CACHE_FULL = 3,  /* the cache's limit is reached: close or truncate rows, then feed again */
  OUTRIDER_NO_ROW = 4,      /* no open row has this id */
  OUTRIDER_CONTEXT = 5,     /* a row would grow beyond the program's context */
  OUTRIDER_UNSUPPORTED = 6, /* a format or an instruction set that is not available */
  OUTRIDER_NOT_FINITE = 7   /* a weight to pack, or a logit, is NaN or infinite */
};

/* How a matrix's weights are stored, and what its activations are converted to for the product. */
enum outrider_format {
  OUTRIDER_FP32 = 0,
  OUTRIDER_BF16 = 1,
  OUTRIDER_W4A8 = 2, /* codes with a scale for each group; activations int8, a scale for each token and block of channels */
  OUTRIDER_W8A8 = 3, /* likewise; the bits of a code are given by outrider_codes */
  OUTRIDER_W4ABF16 = 4, /* codes with a scale for each group, activations bf16 */
  OUTRIDER_W8AF32 = 5,  /* codes with a scale for each group, activations fp32 */
  OUTRIDER_FP16 = 6     /* activations fp32; for matrices that a quantised checkpoint keeps in fp16 */
};

/* The type of a quantised weight, in formats with scales. kernels/packing.py and kernels/storage.py define the layouts. */
enum outrider_codes {
  OUTRIDER_NO_CODES = 0, /* fp32 and bf16 */
  OUTRIDER_INT4 = 1,     /* unsigned integers; code - zero point is multiplied by the scale */
  OUTRIDER_INT5 = 2,
  OUTRIDER_INT6 = 3,
  OUTRIDER_INT8 = 4,
  OUTRIDER_E2M1 = 5, /* 4-bit floats: 0 .5 1 1.5 2 3 4 6, then the same with the sign set */
  OUTRIDER_E4M3 = 6, /* 8-bit floats. With OUTRIDER_BF16 the product uses value * scale, rounded to bf16; E4M3, NF4 and FP4
                        are allowed with OUTRIDER_BF16 only, integers are not */
  OUTRIDER_NF4 = 7,  /* bitsandbytes' tables of 16 floats */
  OUTRIDER_FP4 = 8,
  OUTRIDER_INT2 = 9,
  OUTRIDER_IQ4 = 10 /* 4-bit codes of llama.cpp's table of 16 integers, -127 to 113 */
};

/* How the scales of the groups are stored. */
enum outrider_scales {
  OUTRIDER_WORDS = 0,     /* before each group a word: the upper 24 bits of an fp32 scale, and an 8-bit zero point */
  OUTRIDER_SCALE_F32 = 1, /* a scale for each group; those of 128 channels are stored together */
  OUTRIDER_SCALE_F16 = 2,
  OUTRIDER_SCALE_BF16 = 3,
  OUTRIDER_SCALE_E8M0 = 4,  /* 2^(code - 127); groups of 32 */
  OUTRIDER_SIX_BITS = 5,    /* fp16 scale and minimum for 256 channels, and a 6-bit factor of each for every 32 */
  OUTRIDER_EIGHT_BITS = 6,  /* fp16 scale for 256 channels, and an int8 factor of it for every 16 */
  OUTRIDER_FACTORS = 7,     /* bf16 scale for 128 channels; for every 32 a factor of 2 to 17 and an 8-bit offset */
  OUTRIDER_HALF_MINIMA = 8, /* fp16 scale and minimum for each group; those of 128 channels are stored together */
  OUTRIDER_FOUR_BITS = 9    /* fp16 scale and minimum for 256 channels, and a 4-bit factor of each for every 16 */
};

/* The element type of the KV cache. */
enum outrider_cache {
  OUTRIDER_CACHE_BF16 = 0,
  OUTRIDER_CACHE_FP32 = 1,
  OUTRIDER_CACHE_INT8 = 2 /* a scale for each token and kv head, one for the key, one for the value; queries are int8 too */
};

enum outrider_operation {
  OUTRIDER_EMBED = 0,     /* out = weight[token] * scale */
  OUTRIDER_POSITION = 1,  /* out = in + weight[position + integer] */
  OUTRIDER_NORM = 2,      /* out = norm(in) + residual, for each head of head_size columns (heads 1: the whole width) */
  OUTRIDER_LINEAR = 3,    /* out = cap(activation(in * weight^T + bias)) * scale + residual */
  OUTRIDER_ROPE = 4,      /* in place: rotates the first `rotated` columns of each head of in, column i with column
                                 i + rotated / 2; weight = inverse frequencies */
  OUTRIDER_ATTENTION = 5, /* stores key and value in the cache of layer `integer`; out = attention of in over the cache */
  OUTRIDER_SELECT = 6,    /* out = in at the tokens whose choice or logits are asked for. All SELECTs are consecutive.
                             The operations after them process these tokens only; attention, whose cache is
                             filled before, has only their queries there */
  OUTRIDER_CHOOSE = 7,    /* in = logits; ends the program */
  OUTRIDER_ROUTE = 8,   /* MoE router: in = scores of experts; out = the indices of the kv_heads best, then their weights */
  OUTRIDER_EXPERTS = 9, /* out = for each expert of a token, LINEAR with that expert's matrix */
  OUTRIDER_MIX = 10,    /* out = sum over a token's experts of their products (integer 0: times their weights) + residual */
  OUTRIDER_GATE = 11,   /* out = in * g + residual, g = activation(key); key has one column or as many as in */
  OUTRIDER_HIDDEN_OUT = 12,   /* in = columns integer.. of the hidden states that a batch asks for; before SELECT */
  OUTRIDER_HIDDEN_IN = 13,    /* out = the hidden state that was given with the token; a LOAD_HIDDEN follows */
  OUTRIDER_LOAD_HIDDEN = 14,  /* out = in for a token that was given a state, else what the row's last token stored */
  OUTRIDER_STORE_HIDDEN = 15, /* stores in of a row's last token, for the token that is fed after it; after SELECT */
  OUTRIDER_SCATTER = 16,      /* out = logits of the whole vocabulary: column j of in is the logit of token weight[j] */
  OUTRIDER_CONVOLVE = 17,     /* causal: in = in * key; out = activation(sum over taps of in * weight + bias) * value */
  OUTRIDER_DELTA = 18,        /* the gated delta rule: in = queries, key, value, residual = gates; overwrites all of them */
  OUTRIDER_SCALE = 19,        /* out = in * one element of weight, or column by column in * weight, + residual */
  OUTRIDER_XIELU = 20, /* out = p * in^2 + beta * in where in > 0, else (e^min(in, epsilon) - 1 - in) * n + beta * in */
  OUTRIDER_HEADS = 21, /* out = for each head: its first columns of in, then its last columns times the head's own matrix */
  OUTRIDER_GAUSSIAN_TOP_K = 22, /* out = max(0, in - (mean(in) + scale * standard deviation of in)) */
  OUTRIDER_BLEND = 23, /* out = linear combinations of in's vectors, with the token's own coefficients key, + residual */
  OUTRIDER_MATCH_RMS = 24, /* out = in's vectors, each scaled to the root mean square of key, + residual */
  OUTRIDER_SCAN =
      25, /* the scan of Mamba 1 and 2: in = C, key = B, value = x, residual = dt; overwrites value and residual */
  OUTRIDER_CONNECT =
      26 /* the weights of hyper-connections, by which streams are read, written and mixed: from their logits, in */
};

enum outrider_activation {
  OUTRIDER_NONE = 0,
  OUTRIDER_RELU = 1,
  OUTRIDER_GELU_ERF = 2,
  OUTRIDER_GELU_TANH = 3,
  OUTRIDER_SILU = 4,
  OUTRIDER_SIGMOID = 6,
  OUTRIDER_RELU_SQUARED = 7,
  OUTRIDER_SOFTPLUS = 9,      /* log(1 + e^x) */
  OUTRIDER_CLIP = 8,          /* clamp(x, -cap, cap), without the soft cap; only of LINEAR with an ungated weight */
  OUTRIDER_BOUNDED_SILU = 10, /* gated, with a cap: min(silu(gate), cap) * clamp(up, -cap, cap) */
  OUTRIDER_RETAINED = 11,     /* sqrt(max(1e-3, sigmoid(-x) * (1 + sigmoid(x)))) = sqrt(1 - sigmoid(x)^2), beside SIGMOID */
  OUTRIDER_CLAMPED_SWIGLU = 5 /* gated: g = min(gate, cap), u = clamp(up, -cap, cap); g * sigmoid(scale * g) * (u + 1) */
};

/* How the weights of a token's experts follow from the router's scores. */
enum outrider_route {
  OUTRIDER_SOFTMAX = 0,        /* softmax over all experts */
  OUTRIDER_SOFTMAX_CHOSEN = 1, /* softmax over the chosen experts */
  OUTRIDER_SIGMOID_EACH = 2,   /* the sigmoid of each score */
  OUTRIDER_SIGMOID_SHARE = 3,  /* sigmoid / (sum of the chosen experts' sigmoids + epsilon) */
  OUTRIDER_SOFTMAX_SHARE = 4,  /* p = softmax over all experts; p / max(epsilon, sum of the chosen experts' p) */
  OUTRIDER_SPARSE_MIXER = 5,   /* two experts: softmax over the scores near the best, then over those near the second */
  OUTRIDER_SOFTMAX_GROUPS = 6, /* softmax over all experts; groups are chosen by their best expert */
  OUTRIDER_SIGMOID_EACH_BY_SCORE =
      7, /* as SIGMOID_EACH and SIGMOID_SHARE, but corrections are added to scores, not to sigmoids */
  OUTRIDER_SIGMOID_SHARE_BY_SCORE = 8
};

enum outrider_norm { OUTRIDER_RMS = 0, OUTRIDER_LAYER = 1 };

/* Columns offset .. offset + width of a buffer. A buffer is [tokens, buffer width] fp32, its rows padded.
 * buffer -1: absent. */
typedef struct outrider_slice {
  int32_t buffer;
  int32_t offset;
  int32_t width;
} outrider_slice;

/* One packed matrix [rows, columns], or a vector (rows 1, fp32, columns plain floats), or an embedding table (fp32, bf16
 * or fp16, row-major; a packed matrix of codes can serve as a table too). `data` is 64-byte aligned and must stay valid and unmoved
 * while the engine lives.
 * gated: the matrix is two stacked ones, gate over up, whose 16-row tiles alternate; rows counts both. */
typedef struct outrider_weight {
  const void *data;
  int32_t format;
  int32_t rows;
  int32_t columns;
  int32_t group; /* channels per scale: 16, 32, 64 or 128; 0 for float formats */
  int32_t gated;
  int32_t table;   /* 1: embedding table or vector (row-major); 0: matrix in tiles */
  int32_t codes;   /* outrider_codes */
  int32_t scales;  /* outrider_scales */
  int32_t zeros;   /* 1: every group has its own zero point; 0: the zero point is the middle of the codes' range */
  int32_t ordered; /* 1: channel j of the matrix is channel order[j] of its input; int32 order[columns] follows the tiles */
} outrider_weight;

/* Rows of a matrix that is already quantised. A row has one element of `scales`, `zeros` and `sub_*` for every `group` columns; the
 * last group may be shorter. With SIX_BITS, FOUR_BITS and EIGHT_BITS, `scales` and `minima` have one for every 256 columns; with
 * FACTORS, `scales` has one for every 128. A weight is
 *   (code - zero) * scale
 *   SIX_BITS, FOUR_BITS  code * scale * sub_scale - minimum * sub_minimum
 *   EIGHT_BITS   (code - zero) * scale * sub_scale
 *   FACTORS      (code * sub_scale - sub_minimum) * scale
 *   HALF_MINIMA  code * scale - minimum, with one of each for every group */
typedef struct outrider_quantised {
  const uint8_t *codes;      /* [count, columns] */
  const float *scales;       /* [count, groups], representable in the type that stores them */
  const uint8_t *zeros;      /* [count, groups] or NULL: the middle of the codes' range */
  const int16_t *sub_scales; /* [count, groups] or NULL */
  const float *minima;       /* [count, columns / 256] or NULL */
  const int16_t *sub_minima; /* [count, groups] or NULL */
  int32_t group;             /* a multiple of the weight's group */
} outrider_quantised;

/* One operation. Fields that are named neither above nor here for its kind are ignored; weight, bias: index into the weights or -1.
 * cap: 0 is none, else cap(x) = cap * tanh(x / cap).
 *   EMBED      scale
 *   NORM       integer = outrider_norm, epsilon, weight, bias, heads, head_size, residual
 *   LINEAR     weight, bias, activation, cap, scale, residual; with a gated weight out = activation(gate) * up, and bias
 *              holds that of gate, then that of up. There cap > 0 is a bound: gate = min(gate, cap), up = clamp(up, -cap, cap)
 *              (BOUNDED_SILU: the bound of gate follows its activation)
 *   ROPE       heads, head_size, rotated, weight; scale multiplies the sine and cosine (yarn's attention factor; else 1);
 *              longest: 0, or the longest row that uses the frequencies `weight`; longer rows use those of `bias`. All ROPEs of a
 *              program that have it must have the same. When a row grows beyond it, all of its keys and values are recomputed.
 *              Exception: where a token fed differs from the choice before it (a rejected candidate), the choices of the long row
 *              are -1 instead, unless logits are wanted
 *   ROUTE      heads = number of experts, kv_heads = experts of each token, best first, ties by index; integer = outrider_route;
 *              scale multiplies the weights; bias: -1 or a factor for each expert, which multiplies its weight.
 *              All SIGMOID kinds, SOFTMAX_SHARE, SOFTMAX_GROUPS: epsilon; weight: -1 or a correction for each expert, which is
 *              added to its score for the choice only; head_size: 0, or experts in a group: then experts are chosen from the `window`
 *              best groups, by the sum of a group's best two experts (SOFTMAX_GROUPS: by its best expert; BY_SCORE: no groups).
 *              SPARSE_MIXER: a score s is near the best one b if (b - s) / max(|s|, b) <= epsilon
 *   EXPERTS    key = ROUTE's output, kv_heads as in ROUTE, heads: at most its; weight, bias: those of the first expert, the others' follow, all
 *              with the same shape and storage; activation, cap, scale; integer 0: in holds the tokens' vectors, 1: in is the output of
 *              another EXPERTS; out is a whole buffer of kv_heads * (columns of a product, rounded up to 16), in an order that only
 *              EXPERTS and MIX know
 *   MIX        in = EXPERTS' output, key = ROUTE's, kv_heads, residual, integer; value: absent, or the vector that stands for the product
 *              of an expert whose index is `heads` or more: ROUTE may choose among more experts than EXPERTS has. weight: -1, or a
 *              vector by which each product is multiplied, before its RMS norm (epsilon, with the weights `bias`). Overwrites in then
 *   GATE       in, key, residual, activation
 *   HIDDEN_OUT in, integer
 *   HIDDEN_IN  out, with as many columns as a given state. The operations between it and LOAD_HIDDEN are skipped in passes in which no token
 *              came with a state
 *   LOAD_HIDDEN  in, out, as wide as STORE_HIDDEN's in
 *   SCATTER    in, out, weight: a vector of distinct token ids. The logits of all other tokens are -1e30
 *   CONVOLVE   in, out, weight: [columns, taps] an fp32 table, the last tap is the token's own; key, value (absent: 1), bias,
 *              activation
 *   DELTA      in, key [kv_heads, head_size], value, out [heads, columns: a multiple of 16]; residual: b of all heads, then a;
 *              heads / kv_heads heads share a key head. Queries and keys are normalised to unit vectors (epsilon), and queries are
 *              multiplied by scale. Each head has a state [head_size, columns], which is updated by every token:
 *                decay = exp(-exp(weight) * softplus(a + bias)), beta = sigmoid(b) (times cap, unless cap is 0)
 *                state = state * decay; state += key ((value - state^T key) * beta)^T; out = state^T query
 *              a and bias have one number for each head, or one for each row of its state (residual [heads, 1 + head_size]).
 *              window 1: decay = exp(-cap * sigmoid(exp(weight) * (a + bias))), beta = sigmoid(b)
 *   SCAN       in, key [kv_heads, head_size], value, out [heads, columns: a multiple of 16]; residual [heads]; weight: A_log of all
 *              heads, then D; bias: one for each head. Heads share key heads as in DELTA:
 *                step = softplus(residual + bias), decay = exp(-exp(A_log) * step)
 *                state = state * decay + key (value * step)^T; out = state^T in + D * value
 *              Mamba 1: residual [heads, columns], a step for each column; weight: A_log, an fp32 table [heads * columns, head_size], so
 *              that each element of a state has its own decay; bias: that of all steps, then D of all columns
 *   ATTENTION  in = queries, key, value, heads, kv_heads, head_size, scale, cap (of scores); window: 0: a token attends to all tokens
 *              before it, w > 0: to the last w, -w: to those of its own chunk of w tokens; weight: the score of an attention sink for
 *              each head, or -1; bias: ALiBi's slope of each head, or -1: score = in . key * scale + slope * (key's position - query's),
 *              or with rotated = 1 (in . key + b(key's position) - b(query's)) * scale, b(p) = bf16(slope * bf16(p)). Several
 *              operations may share the cache of one layer, with the same key, value, kv_heads and head_size. The heads of value
 *              and out may have another size than head_size, a multiple of 8
 *   SCALE      in, out, residual, weight: a vector. integer 1, window 0: column c is multiplied by element c; integer 0, window 0: all by
 *              the first element. window > 0: all by element min((position + integer) / window, last); only before SELECT
 *   XIELU      in, out, weight: a vector w of four: p = softplus(w[0]), beta = w[2], n = beta + softplus(w[1]), epsilon = w[3]
 *   HEADS      in, out [heads, columns], weight: that of the first head, the others' follow, all with the same shape [rows, columns]
 *              and storage. The last `columns` columns of a head are multiplied; the columns before them are copied to out, before
 *              the product
 *   GAUSSIAN_TOP_K  in, out, scale. The standard deviation is that of the population (divided by the number of columns)
 *   BLEND      in [heads, columns], key [vectors of out, heads], out [.., columns], residual (as wide as out):
 *              out[v] = sum over h of key[v][h] * in[h] + residual[v]
 *   MATCH_RMS  in [heads, columns], key [columns], out and residual as wide as in, epsilon:
 *              out[h] = in[h] * sqrt(mean(key^2) / max(mean(in[h]^2), epsilon)) + residual[h]
 *   CONNECT    in and out, as wide: n = heads columns for reads, then (or not) n for writes, then (or not) n^2 for mixes; weight: a vector of
 *              a factor for each of these parts, then a bias for each column. With x = in * factor + bias and at most 16 streams
 *                reads   sigmoid(x) + epsilon
 *                writes  scale * sigmoid(x) + cap
 *                mixes   m = softmax of each row of x [n, n], + epsilon, whose columns, then (`integer` - 1) times rows and columns, are
 *                        divided by their sums + epsilon; out holds the transpose, BLEND's key that makes stream j sum_i m[i][j] in[i] */
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
  int32_t layers; /* attention layers that have a cache of their own */
  int32_t vocabulary;
  int32_t context; /* the longest row */
  int32_t cache;   /* outrider_cache */
} outrider_program;

typedef struct outrider_options {
  const int32_t *cores; /* [threads] the core of each thread, or NULL: not pinned. The calling thread is thread 0, and is
                              * pinned as well at its first call; a later change to NULL does not unpin it. */
  int32_t threads;      /* at least 1 */
  int32_t spin_microseconds; /* how long a waiting thread spins before it sleeps; -1: the default (50) */
  int64_t cache_bytes;       /* the most memory that the KV cache may take, without recurrent states; 0: no limit */
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
 * choose[i] choices are wanted, after each of the last choose[i] tokens fed; logits[i] likewise for logits. Either may be 0.
 * logprobs[i] >= 0: with each choice of feed i, its log-probability and those of the logprobs[i] likeliest tokens.
 * branches[i] branches: branch b is fed after the feed's first branch_after[b] tokens, in place of the next one. The choices after the
 * branches follow the feed's own choices (-1 where a logit is not finite). Row and cache keep nothing of a branch.
 * A choice with a mask is made among the tokens whose bits are set (token t: bit t % 32 of word t / 32); -1 where none is set. Masks may
 * be computed while the pass runs: another thread sets *masks_ready to 1 when they are complete, and choices wait for that.
 * A program with HIDDEN_OUT returns the hidden states of all tokens of the feeds that ask. To a program with HIDDEN_IN a state is given with
 * each token of a feed, or with none of them: then the feed must be one token, and the choice after the row's last token must have
 * been asked for. */
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
  int32_t *runners_up;          /* out, likewise: the tokens with the second-best scores, -1 where there is none; or NULL */
  double *margins;              /* out, likewise: the best score minus the second-best; or NULL */
  float *logits_out;            /* out [sum of logits, vocabulary], or NULL */
  const int32_t *logprobs;      /* [feeds] -1: none wanted; or NULL: none wanted */
  /* For each choice the token itself, then the likeliest, best first; and their log-probabilities by the raw logits. */
  int32_t *logprob_tokens;    /* out [sum of (choose + branches) * (1 + logprobs)] */
  double *logprob_values;     /* out, likewise */
  const uint32_t *masks;      /* [.., mask_words] or NULL: none */
  const int32_t *mask_of;     /* [sum of choose and branches] the index of each choice's mask; -1: none. Or NULL: none */
  const int32_t *masks_ready; /* or NULL: the masks are complete */
  int32_t mask_words;         /* words of one mask, at least ceil(vocabulary / 32) */
  const int32_t *states;      /* [feeds] 1: states are wanted; or NULL: none wanted */
  uint16_t *states_out;       /* out [tokens of those feeds, columns of all HIDDEN_OUTs] bf16 */
  const int32_t *given;       /* [feeds] how many of the feed's tokens come with a state, all or 0; or NULL: 0 */
  const uint16_t *states_in;  /* [sum of given, columns of HIDDEN_IN] bf16 */
} outrider_batch;

/* Autoregressive decoding, several passes in one call: feed i appends counts[i] tokens to row rows[i], then each choice in turn.
 * A row stops after most[i] choices, after one of its `ends`, or when its reach falls below least_reach. Each choice multiplies reach
 * by max(least_chance, 1 - (1 - usual[span]) * miss_factor[i]), where span is the number of bounds that its margin reaches.
 * All rows stop when sum(reach - least_reach) over the rows that have not stopped is less than least_sum.
 *
 * Guesses: where a row's last tokens have occurred in it before, the tokens that followed them there are fed after them, up to
 * guess_room tokens of all rows in one pass. A pass makes several choices where the row chooses what was guessed. Guesses do not change
 * choices, runners-up and margins; but least_sum is checked only after a pass, so less often. Programs with HIDDEN_IN or recurrent states
 * make no guesses. */
typedef struct outrider_decode_batch {
  int32_t feeds;
  const int32_t *rows;       /* [feeds] */
  const int32_t *counts;     /* [feeds] at least 1 */
  const int32_t *tokens;     /* [sum of counts] */
  const int32_t *most;       /* [feeds] 1 to stride */
  const int32_t *end_counts; /* [feeds] */
  const int32_t *ends;       /* [sum of end_counts] */
  const double *reach;       /* [feeds] before the first choice */
  const double *miss_factor; /* [feeds] the row's rate of misses relative to the usual one */
  const double *bounds;      /* [spans - 1] of margins, rising */
  const double *usual;       /* [spans] the probability that a choice with such a margin is accepted */
  double least_chance;
  double least_reach;
  double least_sum;
  int32_t spans;
  int32_t stride;
  int32_t guess_room;
  int32_t *made;             /* out [feeds] the number of choices */
  int32_t *chosen;           /* out [feeds, stride] */
  int32_t *runners_up;       /* out [feeds, stride] the tokens with the second-best scores, -1 where there is none */
  double *margins;           /* out [feeds, stride] */
  int32_t *passes;           /* out [1] the number of passes, at most stride */
  int32_t *going;            /* out [stride] the number of rows in each pass */
  double *seconds;           /* out [stride] of each pass */
  const int32_t *given;      /* [feeds] or NULL, for the first pass, as in a batch */
  const uint16_t *states_in; /* [sum of given, columns of HIDDEN_IN] bf16 */
} outrider_decode_batch;

typedef struct outrider_engine outrider_engine;

OUTRIDER_API int32_t outrider_abi_version(void);
/* A constant by its name, for the binding to check its own against: "tile rows", "block channels", "super channels", and
 * "sizeof NAME" and "offset NAME.FIELD" of the structures outrider_NAME. -1 if the name is unknown. */
OUTRIDER_API int64_t outrider_number(const char *name);
/* What was wrong with this thread's last failed call. Valid until its next call. */
OUTRIDER_API const char *outrider_message(void);
/* The name of the instruction set in use, or NULL if OUTRIDER_ISA names one that is unknown or that this machine lacks
 * (outrider_message says which). Names: generic, avx2, avx512vnni, avx512bf16, avx512pairs, amx. */
OUTRIDER_API const char *outrider_isa(void);
/* The names of all instruction sets that this machine can run, best first, separated by one space. */
OUTRIDER_API const char *outrider_isa_available(void);
/* The fewest tokens of a pass (half as many in OUTRIDER_W4ABF16) for which this machine multiplies 4-bit codes with these scales
 * (OUTRIDER_WORDS, in groups of 128, or OUTRIDER_FACTORS) in pairs of channels; 0: never. The engine stores constants for that beside the codes. */
OUTRIDER_API int32_t outrider_fewest_in_pairs(int32_t scales);
/* A digest of the sources that this library was built from. */
OUTRIDER_API const char *outrider_sources(void);

/* Zeroed memory for packed weights or anything large: aligned to 2 MB, with huge pages requested. NULL on failure. */
OUTRIDER_API void *outrider_memory_allocate(int64_t bytes);
OUTRIDER_API void outrider_memory_free(void *memory, int64_t bytes);

/* Reads memory once, as one stream (`streams` is 1) or as two, and returns a sum over it: for measuring memory bandwidth.
 * Threads may each read a part. */
OUTRIDER_API uint64_t outrider_stream_read(const void *data, int64_t bytes, int32_t streams);

/* Bytes that weight->data needs (data itself is not read); negative: -status. */
OUTRIDER_API int64_t outrider_packed_bytes(const outrider_weight *weight);
/* Packs `count` rows of a float matrix as rows first_row.. of the weight; weight->data must hold outrider_packed_bytes bytes, zeroed
 * before the first call. Threads may pack different rows of one weight at the same time if none shares a 16-row tile.
 * source: [count] rows of weight->columns values, `stride` values from one row to the next;
 * source_type: 0 fp32, 1 bf16 (uint16_t), 2 fp16 (uint16_t). Rounding is to nearest, ties to even. */
OUTRIDER_API int32_t outrider_pack_rows(const outrider_weight *weight, int32_t first_row, int32_t count, const void *source,
                                        int32_t source_type, int64_t stride);

/* Packs `count` rows of codes as rows first_row.. of the weight, as outrider_pack_rows does. Every number is stored exactly; one that
 * its type cannot represent is refused. */
OUTRIDER_API int32_t outrider_pack_codes(const outrider_weight *weight, int32_t first_row, int32_t count,
                                         const outrider_quantised *source);
/* Packs the column order of an `ordered` weight: order is [columns], a permutation of the input channels. */
OUTRIDER_API int32_t outrider_pack_order(const outrider_weight *weight, const int32_t *order);

/* The program, its weights' descriptions and the options are copied; the packed data is not. */
OUTRIDER_API int32_t outrider_engine_create(const outrider_program *program, const outrider_options *options,
                                            outrider_engine **engine);
OUTRIDER_API void outrider_engine_destroy(outrider_engine *engine);
/* Changes the number of threads and their cores (NULL: unpinned). A fork, which has no threads, needs it. The bits stay the same. */
OUTRIDER_API int32_t outrider_engine_threads(outrider_engine *engine, int32_t threads, const int32_t *cores);
/* Allocates and touches the memory for passes of `tokens` tokens with `selected` choices, and the KV cache for `cache_tokens` tokens
 * (2 GB at most), so that the first passes do not have to. */
OUTRIDER_API int32_t outrider_engine_reserve(outrider_engine *engine, int32_t tokens, int32_t selected,
                                             int64_t cache_tokens);

/* Begins an empty row and writes its id. The first `prompt` tokens fed are its prompt, later ones count as written (that matters only
 * to penalties, min_tokens and long rope). The bias arrays are copied. */
OUTRIDER_API int32_t outrider_row_open(outrider_engine *engine, const outrider_sampling *sampling, int32_t prompt,
                                       int32_t *row);
/* Begins a row with the first `length` tokens of another one; the two share cache blocks, which are copied on write. */
OUTRIDER_API int32_t outrider_row_fork(outrider_engine *engine, int32_t source, int32_t length,
                                       const outrider_sampling *sampling, int32_t prompt, int32_t *row);
/* Appends tokens without computing them: tokens fed after them attend neither to them nor to anything before them. */
OUTRIDER_API int32_t outrider_row_skip(outrider_engine *engine, int32_t row, const int32_t *tokens, int32_t count);
OUTRIDER_API int32_t outrider_row_truncate(outrider_engine *engine, int32_t row, int32_t length);
OUTRIDER_API int32_t outrider_row_close(outrider_engine *engine, int32_t row);
/* The row's length in tokens; negative: -status. */
OUTRIDER_API int32_t outrider_row_length(const outrider_engine *engine, int32_t row);
/* Bytes of cache memory that the engine holds, the number of its blocks in use, and the tokens of a block. */
OUTRIDER_API void outrider_cache_use(const outrider_engine *engine, int64_t *bytes, int64_t *blocks_used,
                                     int32_t *block_tokens);

/* One forward pass. After OUTRIDER_NOT_FINITE, and after OUTRIDER_NO_MEMORY in the choice of a token, the tokens have been fed and some
 * choices are missing: truncate the rows. After any other status but OUTRIDER_OK nothing has been fed. */
OUTRIDER_API int32_t outrider_forward(outrider_engine *engine, const outrider_batch *batch);
/* The number of distinct experts that the latest outrider_forward used, summed over all layers; 0 for a model without experts. The
 * time of a pass depends on it. */
OUTRIDER_API int64_t outrider_experts_read(const outrider_engine *engine);
/* The `count` (at most 16) best tokens for one of the choices of the latest outrider_forward, given by its index in `chosen`; best
 * first, -1 where there are no more. With a mask (or NULL) only tokens whose bits are set. The row must still hold the tokens before the
 * choice. Not for choices after branches, nor for programs with other rope frequencies for long rows. */
OUTRIDER_API int32_t outrider_rank(outrider_engine *engine, int32_t choice, const uint32_t *mask, int32_t mask_words,
                                   int32_t count, int32_t *tokens);
/* From now on the engine corrects its scores by what it learns through outrider_learn: for drafts, whose choices are guesses. At most
 * `tokens` tokens have corrections: those for which something was learned most recently. Another call forgets what was learned. */
OUTRIDER_API int32_t outrider_correct(outrider_engine *engine, int32_t tokens);
/* A shortlist: from now on only `tokens` tokens have logits (0: all again); the others have -1e30. For drafts. The list starts with the
 * lowest ids; each token that a row is fed or skips is added, and replaces the least recently used one. Another call starts anew. Not
 * for programs with SCATTER. */
OUTRIDER_API int32_t outrider_shorten(outrider_engine *engine, int32_t tokens);
/* Teaches the corrections: tokens[i] is the target's token after the row's first `first` + i tokens. Only the row's last 64 choices are
 * remembered; other tokens are ignored. better, worse: out, the number of choices that the corrections had made right, or wrong. */
OUTRIDER_API int32_t outrider_learn(outrider_engine *engine, int32_t row, int32_t first, const int32_t *tokens,
                                    int32_t count, int32_t *better, int32_t *worse);
/* Decodes (outrider_decode_batch). After any status but OUTRIDER_OK some passes may have been made, as the rows' lengths show. */
OUTRIDER_API int32_t outrider_decode(outrider_engine *engine, const outrider_decode_batch *batch);

/* The sampler alone, for tests: the choice after `history` (its first `prompt` tokens are the prompt; its length is the position).
 * mask: one bit for each token, or NULL. runner_up: out, as in a batch, or NULL. scores: out [vocabulary], the scores without the noise,
 * or NULL. */
OUTRIDER_API int32_t outrider_choose(const float *logits, int32_t vocabulary, const outrider_sampling *sampling,
                                     const int32_t *history, int32_t length, int32_t prompt, const uint32_t *mask,
                                     int32_t *chosen, int32_t *runner_up, double *margin, double *scores);
/* Log-probabilities alone, for tests: that of `chosen`, then those of the `count` likeliest. tokens, values: out [1 + count]. */
OUTRIDER_API int32_t outrider_log_probabilities(const float *logits, int32_t vocabulary, int32_t chosen, int32_t count,
                                                int32_t *tokens, double *values);

#ifdef __cplusplus
}
#endif

#endif
