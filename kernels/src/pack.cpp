#include "pack.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "message.h"

namespace outrider {
namespace {

bool integer_format(int format) { return format == OUTRIDER_W4A8 || format == OUTRIDER_W8A8; }

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t word = sign | (exponent == 31 ? 0x7F800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13);
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

void read_row(const void *source, int type, int64_t at, int columns, float *row) {
  if (type == 0) {
    memcpy(row, static_cast<const float *>(source) + at, sizeof(float) * static_cast<size_t>(columns));
    return;
  }
  const uint16_t *halves = static_cast<const uint16_t *>(source) + at;
  for (int i = 0; i < columns; ++i) {
    if (type == 2) {
      row[i] = half_to_float(halves[i]);
      continue;
    }
    const uint32_t word = static_cast<uint32_t>(halves[i]) << 16;
    memcpy(row + i, &word, sizeof word);
  }
}

uint16_t to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  return static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

// One row into its lane of a tile: every lane owns 32-bit words of its own, 128 bytes apart.
void pack_integer(const Kernels &kernels, const outrider_weight &weight, const float *row, char *tile, int lane) {
  char *at = tile + 4 * lane;
  for (int start = 0; start < weight.columns; start += weight.group) {
    const int channels = std::min(weight.group, weight.columns - start);
    uint32_t header = 0;
    alignas(64) uint8_t values[128];
    kernels.quantise(row + start, channels, weight.format, &header, values);
    memcpy(at, &header, sizeof header);
    at += kTileBytes;
    for (int c = 0; c < channels; c += 8) {
      uint32_t words[2];
      memcpy(words, values + c, sizeof words);
      if (weight.format == OUTRIDER_W4A8) {
        const uint32_t both = words[0] | words[1] << 4;
        memcpy(at, &both, sizeof both);
        at += kTileBytes;
      } else {
        memcpy(at, &words[0], sizeof words[0]);
        memcpy(at + kTileBytes, &words[1], sizeof words[1]);
        at += 2 * kTileBytes;
      }
    }
  }
}

void pack_float(const outrider_weight &weight, const float *row, char *tile, int lane) {
  char *at = tile + 4 * lane;
  if (weight.format == OUTRIDER_FP32) {
    for (int c = 0; c < weight.columns; ++c, at += kTileBytes) memcpy(at, row + c, sizeof(float));
    return;
  }
  for (int c = 0; c < weight.columns; c += 2, at += kTileBytes) {
    const uint32_t second = c + 1 < weight.columns ? to_bf16(row[c + 1]) : 0u;
    const uint32_t word = to_bf16(row[c]) | second << 16;
    memcpy(at, &word, sizeof word);
  }
}

int64_t bytes_per_tile(const outrider_weight &weight) {
  const int64_t columns = weight.columns, steps = (columns + 7) / 8;
  const int64_t groups = weight.group > 0 ? (columns + weight.group - 1) / weight.group : 0;
  switch (weight.format) {
    case OUTRIDER_FP32: return columns * kTileBytes;
    case OUTRIDER_BF16: return (columns + 1) / 2 * kTileBytes;
    case OUTRIDER_W4A8: return (groups + steps) * kTileBytes;
    default: return (groups + 2 * steps) * kTileBytes;
  }
}

}  // namespace

int tile_count(const outrider_weight &weight) {
  return weight.gated ? (weight.rows / 2 + kLanes - 1) / kLanes : (weight.rows + kTileRows - 1) / kTileRows;
}

int32_t check_weight(const outrider_weight &weight) {
  if (weight.rows < 1 || weight.columns < 1)
    return fail(OUTRIDER_INVALID, "a weight of %d rows and %d columns", weight.rows, weight.columns);
  if (weight.format != OUTRIDER_FP32 && weight.format != OUTRIDER_BF16 && !integer_format(weight.format))
    return fail(OUTRIDER_UNSUPPORTED, "weight format %d is not built into these kernels", weight.format);
  if (weight.table && integer_format(weight.format))
    return fail(OUTRIDER_INVALID, "a table or vector is fp32 or bf16, not format %d", weight.format);
  if (integer_format(weight.format) && weight.group != 32 && weight.group != 64 && weight.group != 128)
    return fail(OUTRIDER_INVALID, "a group of %d channels: it must be 32, 64 or 128", weight.group);
  if (weight.gated && (weight.table || weight.rows % 2))
    return fail(OUTRIDER_INVALID, "a gated weight of %d rows: gate and up must be equally many", weight.rows);
  return OUTRIDER_OK;
}

int64_t packed_bytes(const outrider_weight &weight) {
  if (weight.table)
    return round_up(static_cast<int64_t>(weight.rows) * weight.columns * (weight.format == OUTRIDER_FP32 ? 4 : 2), 64);
  return tile_count(weight) * bytes_per_tile(weight);
}

int32_t pack_rows(const outrider_weight &weight, int first_row, int count, const void *source, int source_type,
                  int64_t stride) {
  if (first_row < 0 || count < 0 || first_row + count > weight.rows)
    return fail(OUTRIDER_INVALID, "rows %d..%d of a weight that has %d", first_row, first_row + count, weight.rows);
  if (source_type < 0 || source_type > 2) return fail(OUTRIDER_INVALID, "source type %d", source_type);
  const char *message = nullptr;
  const Kernels *kernels = choose_kernels(&message);
  if (!kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
  std::vector<float> row(static_cast<size_t>(weight.columns));
  char *data = static_cast<char *>(const_cast<void *>(weight.data));
  const int64_t tile_size = bytes_per_tile(weight);
  for (int i = 0; i < count; ++i) {
    read_row(source, source_type, i * stride, weight.columns, row.data());
    float probe = 0.0f;
    for (const float value : row) probe += value - value;
    // Zero unless some value is not finite; only then is it looked for.
    for (int c = 0; !(probe == 0.0f) && c < weight.columns; ++c)
      if (!isfinite(row[static_cast<size_t>(c)]))
        return fail(OUTRIDER_NOT_FINITE, "row %d, column %d is %f", first_row + i, c,
                    static_cast<double>(row[static_cast<size_t>(c)]));
    int lane_row = first_row + i;
    if (weight.table) {
      const int64_t at = static_cast<int64_t>(lane_row) * weight.columns;
      for (int c = 0; c < weight.columns; ++c) {
        if (weight.format == OUTRIDER_FP32) memcpy(data + (at + c) * 4, &row[static_cast<size_t>(c)], 4);
        else reinterpret_cast<uint16_t *>(data)[at + c] = to_bf16(row[static_cast<size_t>(c)]);
      }
      continue;
    }
    int tile = lane_row / kTileRows, lane = lane_row % kTileRows;
    if (weight.gated) {
      const int half = weight.rows / 2, upper = lane_row >= half;
      lane_row -= upper ? half : 0;
      tile = lane_row / kLanes;
      lane = lane_row % kLanes + (upper ? kLanes : 0);
    }
    if (integer_format(weight.format)) pack_integer(*kernels, weight, row.data(), data + tile * tile_size, lane);
    else pack_float(weight, row.data(), data + tile * tile_size, lane);
  }
  return OUTRIDER_OK;
}

}  // namespace outrider
