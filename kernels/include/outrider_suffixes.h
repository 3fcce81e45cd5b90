/* The C interface of what finds repetitions in texts. It needs no engine, and has the number of the interface (OUTRIDER_ABI) and the
 * status codes of outrider_kernels.h.
 */
#ifndef OUTRIDER_SUFFIXES_H
#define OUTRIDER_SUFFIXES_H

#include "outrider_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows whose texts have grown, and what texts like them went on with. */
typedef struct outrider_suffix_rows {
  int32_t count;
  const int64_t *keys;    /* [count] a number of each row's own; one that is not known begins a row */
  const int32_t *prompts; /* [count] of a row that begins, how many of its tokens nobody wrote */
  const int32_t *gained;  /* [count] the tokens that each row has gained; those of a row that begins are all */
  const int32_t *tokens;  /* [sum of gained] */
  const int32_t *most;    /* [count] how many candidates are wanted, at most stride */
  int32_t stride;
  double least_reach;   /* candidates are left out from the first on whose reach is lower */
  int32_t *made;        /* out [count] how many candidates there are */
  int32_t *candidates;  /* out [count, stride] */
  double *reaches;      /* out [count, stride] the chance that a candidate and all before it hold; falling */
  uint8_t *from_others; /* out [count, stride] whether the longest match behind it is one of another row's answer */
} outrider_suffix_rows;

typedef struct outrider_suffixes outrider_suffixes;

/* Texts that repeat themselves (suffixes.cpp): the longest matches of a row's end in its own text, and in what the last
 * `tokens` tokens of all rows' answers hold, vote for what comes next; what became of earlier votes says with which chance. For
 * one thread at a time. */
OUTRIDER_API int32_t outrider_suffixes_create(int64_t tokens, outrider_suffixes **suffixes);
OUTRIDER_API void outrider_suffixes_destroy(outrider_suffixes *suffixes);
/* What the answers take at most; rows under way take some 45 to 85 bytes a token beside that. */
OUTRIDER_API int64_t outrider_suffixes_bytes(const outrider_suffixes *suffixes);
OUTRIDER_API int32_t outrider_suffixes_advance(outrider_suffixes *suffixes, const outrider_suffix_rows *rows);
/* A row ends with these last tokens. A key that is not known is no matter. */
OUTRIDER_API int32_t outrider_suffixes_end(outrider_suffixes *suffixes, int64_t key, const int32_t *tokens, int32_t count);
/* An answer that was written elsewhere. */
OUTRIDER_API int32_t outrider_suffixes_learn(outrider_suffixes *suffixes, const int32_t *tokens, int32_t count);

#ifdef __cplusplus
}
#endif

#endif
