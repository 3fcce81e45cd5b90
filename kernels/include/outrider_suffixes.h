/* The C interface of suffix decoding: candidates from repetitions in texts. It needs no engine, and shares OUTRIDER_ABI and the status
 * codes with outrider_kernels.h.
 */
#ifndef OUTRIDER_SUFFIXES_H
#define OUTRIDER_SUFFIXES_H

#include "outrider_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows that have gained tokens, and the candidates for what comes next. */
typedef struct outrider_suffix_rows {
  int32_t count;
  const int64_t *keys;    /* [count] the id of each row; an unknown one begins a row */
  const int32_t *prompts; /* [count] for a new row the length of its prompt */
  const int32_t *gained;  /* [count] how many tokens each row has gained; for a new row the whole text */
  const int32_t *tokens;  /* [sum of gained] */
  const int32_t *most;    /* [count] the most candidates wanted, at most stride */
  int32_t stride;
  double least_reach;   /* the candidates end before the first one with a lower reach */
  int32_t *made;        /* out [count] the number of candidates */
  int32_t *candidates;  /* out [count, stride] */
  double *reaches;      /* out [count, stride] the probability that a candidate and all before it are accepted; falling */
  uint8_t *from_others; /* out [count, stride] whether the longest match that votes for it is in another row's answer */
} outrider_suffix_rows;

typedef struct outrider_suffixes outrider_suffixes;

/* Suffix decoding (suffixes.cpp): the longest matches of a row's end, in its own text and in the last `tokens` tokens of all rows'
 * answers, vote for the next token. Its probability is learned from the outcomes of earlier votes. One thread at a time. */
OUTRIDER_API int32_t outrider_suffixes_create(int64_t tokens, outrider_suffixes **suffixes);
OUTRIDER_API void outrider_suffixes_destroy(outrider_suffixes *suffixes);
/* The most bytes that the answers take; in addition, each row in progress takes some 45 to 85 bytes a token. */
OUTRIDER_API int64_t outrider_suffixes_bytes(const outrider_suffixes *suffixes);
OUTRIDER_API int32_t outrider_suffixes_advance(outrider_suffixes *suffixes, const outrider_suffix_rows *rows);
/* Ends a row, whose last tokens are these. An unknown key is ignored. */
OUTRIDER_API int32_t outrider_suffixes_end(outrider_suffixes *suffixes, int64_t key, const int32_t *tokens, int32_t count);
/* Adds an answer that was written elsewhere. */
OUTRIDER_API int32_t outrider_suffixes_learn(outrider_suffixes *suffixes, const int32_t *tokens, int32_t count);

#ifdef __cplusplus
}
#endif

#endif
