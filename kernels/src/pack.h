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
// The fp16 number that equals the value; false where there is none.
bool exact_half(float value, uint16_t *half);
int32_t pack_order(const outrider_weight &weight, const int32_t *order);

// The numbers that one row of a matrix of codes stands for, as storage.py's unpack has them.
void unpack_row(const outrider_weight &weight, int row, float *out);

// Where a row of a matrix lies: in this tile, at this lane.
struct Lane {
  int tile, lane;
};
Lane lane_of(const outrider_weight &weight, int row);
// Copies a row between matrices that differ by the number of their rows alone.
void copy_row(const outrider_weight &from, int from_row, const outrider_weight &to, int to_row);
// Likewise the order of their columns, where they have one.
void copy_order(const outrider_weight &from, const outrider_weight &to);
// Where the order of an ordered weight's columns lies.
int64_t order_offset(const outrider_weight &weight);

}  // namespace outrider

#endif
