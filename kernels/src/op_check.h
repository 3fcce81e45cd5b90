// Checks one operation of a program: its weights, the columns that it reads and writes, and its place before or behind a SELECT.
#ifndef OUTRIDER_SRC_OP_CHECK_H
#define OUTRIDER_SRC_OP_CHECK_H

#include <vector>

#include "engine.h"

namespace outrider {

// selected [buffers]: whether a buffer holds only selected tokens, as none does before the first SELECT; what the operation makes of
// them is added. selecting: whether the previous operation is a SELECT. Sets engine.longest where rope names it.
int32_t check_op(Engine &engine, const outrider_op &op, bool selecting, std::vector<bool> *selected);

}  // namespace outrider

#endif
