// The error message that goes with a status code; each thread has its own.
#ifndef OUTRIDER_SRC_MESSAGE_H
#define OUTRIDER_SRC_MESSAGE_H

#include <stdint.h>

namespace outrider {

const char *last_message();
__attribute__((format(printf, 2, 3))) int32_t fail(int32_t status, const char *format, ...);

}  // namespace outrider

#endif
