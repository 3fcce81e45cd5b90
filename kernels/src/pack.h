// Packed sizes and packing; kernels/packing.py is the definition.
#ifndef OUTRIDER_SRC_PACK_H
#define OUTRIDER_SRC_PACK_H

#include "kernels.h"

namespace outrider {

int32_t check_weight(const outrider_weight &weight);
int64_t packed_bytes(const outrider_weight &weight);
int tile_count(const outrider_weight &weight);
int32_t pack_rows(const outrider_weight &weight, int first_row, int count, const void *source, int source_type,
                  int64_t stride);

}  // namespace outrider

#endif
