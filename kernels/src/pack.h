// Packed sizes and packing; kernels/packing.py is the definition.
#ifndef OUTRIDER_SRC_PACK_H
#define OUTRIDER_SRC_PACK_H

#include "kernels.h"

namespace outrider {

int32_t check_weight(const outrider_weight &weight);
int64_t packed_bytes(const outrider_weight &weight);
int32_t pack_rows(const outrider_weight &weight, int first_row, int count, const void *source, int source_type,
                  int64_t stride);
int32_t pack_codes(const outrider_weight &weight, int first_row, int count, const outrider_quantised &source);
// Rounds one row of floats to FACTORS.
int32_t pack_factors(const Kernels &kernels, const outrider_weight &weight, int row, const float *values, char *tile,
                     int lane);
// The fp16 number that equals the value; false if there is none.
bool exact_half(float value, uint16_t *half);
int32_t pack_order(const outrider_weight &weight, const int32_t *order);

// Dequantises one row of a matrix of codes, as storage.py's unpack does.
void unpack_row(const outrider_weight &weight, int row, float *out);

// The position of a row in a packed matrix.
struct Lane {
  int tile, lane;
};
Lane lane_of(const outrider_weight &weight, int row);
// Copies a row between matrices that differ only in their number of rows.
void copy_row(const outrider_weight &from, int from_row, const outrider_weight &to, int to_row);
// Copies the order of the columns, if the matrices have one.
void copy_order(const outrider_weight &from, const outrider_weight &to);
// The offset in bytes of the column order in an ordered weight's data.
int64_t order_offset(const outrider_weight &weight);

}  // namespace outrider

#endif
