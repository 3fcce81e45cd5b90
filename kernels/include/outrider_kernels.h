/* The C interface of outrider's native kernels.
 *
 * Every function returns a status code (0 is success) unless its comment says otherwise; the Python binding turns
 * codes into sentences. Every pointer's layout is given where the pointer is.
 */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include <stdint.h>

/* Raised whenever a signature or a layout changes; the binding refuses a library of another number. */
#define OUTRIDER_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

__attribute__((visibility("default"))) int32_t outrider_abi_version(void);

#ifdef __cplusplus
}
#endif

#endif
