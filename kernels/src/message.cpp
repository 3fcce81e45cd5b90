#include "message.h"

#include <stdarg.h>
#include <stdio.h>

namespace outrider {
namespace {
thread_local char message[512] = "";
}

const char *last_message() { return message; }

int32_t fail(int32_t status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace outrider
