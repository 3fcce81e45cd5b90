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
#define OUTRIDER_ABI 8

#define OUTRIDER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum outrider_status {
  OUTRIDER_OK = 0,
  OUTRIDER_INVALID = 1,       /* an argument or a program that makes no sense */
  OUTRIDER_NO_MEMORY = 2,     /* the system has no memory left */
  OUTRIDER_CACHE_FULL = 3,    /* the cache's limit is reached: close or truncate rows, then feed again */
  OUTRIDER_NO_ROW = 4,        /* a row id that is not open */
  OUTRIDER_CONTEXT = 5,       /* a row would grow beyond the program's context */
  OUTRIDER_UNSUPPORTED = 6,   /* a format or an instruction set that is not there */
  OUTRIDER_NOT_FINITE = 7     /* a weight to pack, or a logit, is NaN or infinite */
};

/* How the weights of one matrix are stored; kernels/packing.py is the definition of each. */
enum outrider_format {
  OUTRIDER_FP32 = 0,
  OUTRIDER_BF16 = 1,
  OUTRIDER_W4A8 = 2,          /* int4 by group of channels, activations int8 by token and group */
  OUTRIDER_W8A8 = 3,          /* int8 by group of channels, activations likewise */
  OUTRIDER_W4ABF16 = 4,       /* reserved */
  OUTRIDER_W8AF32 = 5         /* reserved */
};

/* How the keys and values of rows are kept. */
enum outrider_cache {
  OUTRIDER_CACHE_BF16 = 0,
  OUTRIDER_CACHE_FP32 = 1,
  OUTRIDER_CACHE_INT8 = 2     /* one scale for each token and kv head, of its key and of its value; queries likewise int8 */
};

enum outrider_operation {
  OUTRIDER_EMBED = 0,         /* out = weight[token] */
  OUTRIDER_POSITION = 1,      /* out = in + weight[position + integer] */
  OUTRIDER_NORM = 2,          /* out = normalised in, per head of head_size (the whole width where heads is 1) */
  OUTRIDER_LINEAR = 3,        /* out = activation(in * weight^T + bias) + residual */
  OUTRIDER_ROPE = 4,          /* in place on in: heads of head_size, halves rotated; weight = inverse frequencies */
  OUTRIDER_ATTENTION = 5,     /* stores key and value in the cache of layer `integer`, out = attention of in over the cache */
  OUTRIDER_SELECT = 6,        /* out = the rows of in whose choice or logits are asked for; selects stand side by side, and what
                                 follows them has these rows only */
  OUTRIDER_CHOOSE = 7         /* in = logits; ends the program */
};

enum outrider_activation {
  OUTRIDER_NONE = 0,
  OUTRIDER_RELU = 1,
  OUTRIDER_GELU_ERF = 2,
  OUTRIDER_GELU_TANH = 3,
  OUTRIDER_SILU = 4
};

enum outrider_norm { OUTRIDER_RMS = 0, OUTRIDER_LAYER = 1 };

/* Columns offset .. offset + width of a buffer. A buffer is [tokens, buffer width] fp32, its width rounded up to 16.
 * buffer -1: absent. */
typedef struct outrider_slice {
  int32_t buffer;
  int32_t offset;
  int32_t width;
} outrider_slice;

/* One packed matrix [rows, columns], or a vector (rows 1, fp32, columns plain floats), or an embedding table (fp32 or
 * bf16, rows one after the other). `data` is 64-byte aligned and stays where it is while the engine lives.
 * gated: the matrix is two stacked ones, gate over up, whose 16-row tiles alternate; rows counts both. */
typedef struct outrider_weight {
  const void *data;
  int32_t format;
  int32_t rows;
  int32_t columns;
  int32_t group; /* channels per scale: 32, 64 or 128; 0 for float formats */
  int32_t gated;
  int32_t table; /* 1: embedding table or vector (row-major); 0: matrix in tiles */
} outrider_weight;

/* One operation. Fields that its kind does not name above or here are ignored; weight, bias: index into the weights or -1.
 *   NORM       integer = outrider_norm, epsilon, weight, bias, heads, head_size
 *   LINEAR     weight, bias, activation, residual; with a gated weight out = activation(gate) * up, bias has gate's, then up's
 *   ROPE       heads, head_size, weight; scale multiplies the sine and cosine (yarn's attention factor; else 1)
 *   ATTENTION  in = queries, key, value, heads, kv_heads, head_size, scale, window (0: all; else the last `window` tokens) */
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
  float epsilon;
  float scale;
} outrider_op;

typedef struct outrider_program {
  const outrider_op *ops;          /* [op_count] */
  const outrider_weight *weights;  /* [weight_count] */
  const int32_t *buffers;          /* [buffer_count] the widths of the buffers */
  int32_t op_count;
  int32_t weight_count;
  int32_t buffer_count;
  int32_t layers;                  /* attention layers, that is caches */
  int32_t vocabulary;
  int32_t context;                 /* the longest row */
  int32_t cache;                   /* outrider_cache */
} outrider_program;

typedef struct outrider_options {
  const int32_t *cores; /* [threads] the core of each thread, or NULL: not pinned. The calling thread is thread 0 and is
                         * never pinned by the pool. */
  int32_t threads;      /* at least 1 */
  int32_t spin_microseconds; /* how long a waiting thread spins before it sleeps; -1: the default (50) */
  int64_t cache_bytes;  /* the most memory the cache may take; 0: no limit but the machine's */
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
  const int32_t *end_tokens;  /* [end_count] */
  int32_t end_count;
} outrider_sampling;

/* One ragged batch: feed i appends counts[i] tokens to row rows[i] (a row at most once a batch).
 * choose[i] choices are wanted, after the last choose[i] tokens fed; logits[i] likewise for logits. Either may be 0.
 * logprobs[i] of 0 or more: beside each choice of feed i, its log-probability and those of the logprobs[i] likeliest tokens.
 * branches[i] tokens are tried in place of tokens of feed i: each comes after the feed's first branch_after tokens instead of the
 * next one. A choice after each of them follows the feed's own choices (-1 where a
 * logit is not a finite number). Neither row nor cache know of a branch afterwards. */
typedef struct outrider_batch {
  int32_t feeds;
  const int32_t *rows;    /* [feeds] */
  const int32_t *counts;  /* [feeds] at least 1 */
  const int32_t *tokens;  /* [sum of counts] */
  const int32_t *choose;  /* [feeds] */
  const int32_t *logits;  /* [feeds], or NULL: none */
  const int32_t *branches;      /* [feeds] or NULL: none */
  const int32_t *branch_after;  /* [sum of branches] at least 1, less than the feed's count */
  const int32_t *branch_tokens; /* [sum of branches] */
  int32_t *chosen;        /* out [sum of choose and branches] */
  int32_t *runners_up;    /* out, likewise: the tokens with the second best scores, -1 where there is none; or NULL */
  double *margins;        /* out, likewise: the leads over the second best scores; or NULL */
  float *logits_out;      /* out [sum of logits, vocabulary], or NULL */
  const int32_t *logprobs; /* [feeds] -1: none wanted; or NULL: none */
  int32_t *logprob_tokens; /* out [sum of (choose + branches) * (1 + logprobs)] for each choice itself, then the likeliest, best first */
  double *logprob_values;  /* out, likewise: log-probabilities by the raw logits */
} outrider_batch;

/* Rows that go on by themselves: feed i appends counts[i] tokens to row rows[i], then again and again what the row chose last.
 * It stops after most[i] choices, after one that is among its ends, or when its reach falls below least_reach. Each choice
 * multiplies reach by max(least_chance, 1 - (1 - usual[span]) * doubt[i]); span is the number of bounds that its margin reaches.
 * All stop where the reaches of those that go on, each less least_reach, come to less than least_sum. */
typedef struct outrider_run {
  int32_t feeds;
  const int32_t *rows;       /* [feeds] */
  const int32_t *counts;     /* [feeds] at least 1 */
  const int32_t *tokens;     /* [sum of counts] */
  const int32_t *most;       /* [feeds] 1 to stride */
  const int32_t *end_counts; /* [feeds] */
  const int32_t *ends;       /* [sum of end_counts] */
  const double *reach;       /* [feeds] before the first choice */
  const double *doubt;       /* [feeds] */
  const double *bounds;      /* [spans - 1] rising */
  const double *usual;       /* [spans] */
  double least_chance;
  double least_reach;
  double least_sum;
  int32_t spans;
  int32_t stride;
  int32_t *made;             /* out [feeds] how many choices there are */
  int32_t *chosen;           /* out [feeds, stride] */
  int32_t *runners_up;       /* out [feeds, stride] the tokens with the second best scores, -1 where there is none */
  double *margins;           /* out [feeds, stride] */
  double *seconds;           /* out [stride] of each pass; the rows in pass p are those with more than p choices */
} outrider_run;

typedef struct outrider_engine outrider_engine;

OUTRIDER_API int32_t outrider_abi_version(void);
/* What was wrong with this thread's last failed call. Valid until its next call. */
OUTRIDER_API const char *outrider_message(void);
/* The name of the instruction set in use, or NULL when OUTRIDER_ISA names one that is unknown or that this machine lacks
 * (outrider_message says which). Names: generic, avx2, avx512vnni, avx512bf16, amx. */
OUTRIDER_API const char *outrider_isa(void);
/* The names of all that this machine can run, best first, separated by one space. */
OUTRIDER_API const char *outrider_isa_available(void);

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
OUTRIDER_API int32_t outrider_pack_rows(const outrider_weight *weight, int32_t first_row, int32_t count,
                                        const void *source, int32_t source_type, int64_t stride);

/* The program, its weights' descriptions and the options are copied; the packed data is not. */
OUTRIDER_API int32_t outrider_engine_create(const outrider_program *program, const outrider_options *options,
                                            outrider_engine **engine);
OUTRIDER_API void outrider_engine_destroy(outrider_engine *engine);
/* Go on with another number of threads, on other cores (NULL: unpinned). Not while a pass is under way; no bit changes. */
OUTRIDER_API int32_t outrider_engine_threads(outrider_engine *engine, int32_t threads, const int32_t *cores);
/* Takes memory now that passes of `tokens` tokens with `selected` choices would take in the middle of the work, and a cache for
 * `cache_tokens` tokens (of 256 MB at most). */
OUTRIDER_API int32_t outrider_engine_reserve(outrider_engine *engine, int32_t tokens, int32_t selected, int64_t cache_tokens);

/* Begins an empty row and writes its id. The first `prompt` tokens fed are its prompt, the rest counts as written (only penalties
 * care). The bias arrays are copied. */
OUTRIDER_API int32_t outrider_row_open(outrider_engine *engine, const outrider_sampling *sampling, int32_t prompt,
                                       int32_t *row);
/* Begins a row that starts with the first `length` tokens of another; the cache blocks are shared until one of them writes. */
OUTRIDER_API int32_t outrider_row_fork(outrider_engine *engine, int32_t source, int32_t length,
                                       const outrider_sampling *sampling, int32_t prompt, int32_t *row);
OUTRIDER_API int32_t outrider_row_truncate(outrider_engine *engine, int32_t row, int32_t length);
OUTRIDER_API int32_t outrider_row_close(outrider_engine *engine, int32_t row);
/* How many tokens the row's cache holds; negative: -status. */
OUTRIDER_API int32_t outrider_row_length(const outrider_engine *engine, int32_t row);
/* Bytes of cache memory the engine holds, and how many of its blocks are in use. */
OUTRIDER_API void outrider_cache_use(const outrider_engine *engine, int64_t *bytes, int64_t *blocks_used,
                                     int32_t *block_tokens);

/* One forward pass. On any status but OUTRIDER_OK and OUTRIDER_NOT_FINITE nothing has been fed. */
OUTRIDER_API int32_t outrider_forward(outrider_engine *engine, const outrider_batch *batch);
/* As many passes as the rows want. On any status but OUTRIDER_OK some passes may have been made; the rows' lengths say. */
OUTRIDER_API int32_t outrider_run_on(outrider_engine *engine, const outrider_run *run);

/* The sampler alone, for tests: chooses after `history` (its first `prompt` tokens are the prompt; its length is the
 * position). runner_up: out, as in a batch, or NULL. scores: out [vocabulary], the scores before the noise, or NULL. */
OUTRIDER_API int32_t outrider_choose(const float *logits, int32_t vocabulary, const outrider_sampling *sampling,
                                     const int32_t *history, int32_t length, int32_t prompt, int32_t *chosen,
                                     int32_t *runner_up, double *margin, double *scores);
/* Log-probabilities alone, for tests: of `chosen`, then of the `count` likeliest. tokens, values: out [1 + count]. */
OUTRIDER_API int32_t outrider_log_probabilities(const float *logits, int32_t vocabulary, int32_t chosen, int32_t count,
                                                int32_t *tokens, double *values);

#ifdef __cplusplus
}
#endif

#endif
