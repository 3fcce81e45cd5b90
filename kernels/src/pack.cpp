#include "pack.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "message.h"

namespace outrider {
namespace {

// The most rows or columns of a matrix: rounded up they still fit into 32 bits.
constexpr int32_t kMostSide = 1 << 30;

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

// Whether floats are rounded to int4 in groups of 32, with bf16 scales and zero points in the block's header.
bool by_small_groups(const outrider_weight &weight) {
  return weight.codes == OUTRIDER_INT4 && weight.scales == OUTRIDER_SCALE_BF16 && weight.zeros && weight.group == 32;
}

// Quantises a row and packs it into its lane of a tile: a lane is one 32-bit word of each line of 128 bytes.
void pack_integer(const Kernels &kernels, const outrider_weight &weight, const float *row, char *tile, int lane) {
  const Geometry shape = geometry(weight);
  const bool in_words = weight.scales == OUTRIDER_WORDS;
  char *block = tile;
  for (int start = 0; start < weight.columns; start += shape.block) {
    const int channels = std::min(shape.block, weight.columns - start);
    alignas(64) uint8_t values[kBlockChannels];
    for (int g = 0; g * weight.group < channels; ++g) {
      const int first = g * weight.group;
      uint32_t header = 0;
      kernels.quantise(row + start + first, std::min(weight.group, channels - first), weight.codes,
                       in_words ? 0xFF : 0xFFFF, &header, values + first);
      if (in_words) {
        memcpy(block + 4 * lane, &header, sizeof header);
        continue;
      }
      const uint16_t scale = static_cast<uint16_t>(header >> 16);
      memcpy(block + g * kTileBytes / 2 + 2 * lane, &scale, sizeof scale);
      block[shape.scale_bytes + 4 * lane + g] = static_cast<char>(header & 0xFF);
    }
    char *at = block + shape.header + 4 * lane;
    for (int c = 0; c < channels; c += 8) {
      uint32_t words[2];
      memcpy(words, values + c, sizeof words);
      if (weight.codes == OUTRIDER_INT4) {
        const uint32_t both = words[0] | words[1] << 4;
        memcpy(at, &both, sizeof both);
        at += kTileBytes;
      } else {
        memcpy(at, &words[0], sizeof words[0]);
        memcpy(at + kTileBytes, &words[1], sizeof words[1]);
        at += 2 * kTileBytes;
      }
    }
    block += shape.header + code_bytes(shape, channels);
  }
}

// Converts a row to the weight's format of 16 bits; false if a number is infinite in bf16, or not exact in fp16. A source in fp16 always
// is.
bool to_halves(const outrider_weight &weight, const std::vector<float> &row, std::vector<uint16_t> *halves) {
  bool all = true;
  for (size_t c = 0; weight.format == OUTRIDER_BF16 && c < row.size(); ++c) {
    (*halves)[c] = to_bf16(row[c]);
    all &= ((*halves)[c] & 0x7F80) != 0x7F80;
  }
  for (size_t c = 0; all && weight.format == OUTRIDER_FP16 && c < row.size(); ++c) all = exact_half(row[c], &(*halves)[c]);
  return all;
}

void pack_float(const outrider_weight &weight, const float *row, const uint16_t *halves, char *tile, int lane) {
  char *at = tile + 4 * lane;
  if (weight.format == OUTRIDER_FP32) {
    for (int c = 0; c < weight.columns; ++c, at += kTileBytes) memcpy(at, row + c, sizeof(float));
    return;
  }
  for (int c = 0; c < weight.columns; c += 2, at += kTileBytes) {
    const uint32_t second = c + 1 < weight.columns ? halves[c + 1] : 0u;
    const uint32_t word = halves[c] | second << 16;
    memcpy(at, &word, sizeof word);
  }
}

// Whether there is storage for integer or E2M1 codes with these scales and groups.
bool known_storage(const outrider_weight &weight) {
  const int codes = weight.codes, group = weight.group;
  const bool plain = group == 32 || group == 64 || group == 128;
  const bool sixteen = group == kSmallGroup && !weight.zeros;
  switch (weight.scales) {
    case OUTRIDER_WORDS:
      return plain && weight.zeros && (codes == OUTRIDER_INT4 || codes == OUTRIDER_INT8);
    case OUTRIDER_SCALE_F32:
      if (codes == OUTRIDER_E2M1) return sixteen;
      [[fallthrough]];
    case OUTRIDER_SCALE_F16:
    case OUTRIDER_SCALE_BF16:
      if (codes == OUTRIDER_INT5) return plain && !weight.zeros;
      if (codes == OUTRIDER_IQ4) return group == 32 && !weight.zeros && weight.scales != OUTRIDER_SCALE_BF16;
      return (plain || sixteen) && (codes == OUTRIDER_INT4 || codes == OUTRIDER_INT8);
    case OUTRIDER_HALF_MINIMA:
      return plain && !weight.zeros &&
             (codes == OUTRIDER_INT4 || codes == OUTRIDER_INT5 || codes == OUTRIDER_INT6 || codes == OUTRIDER_INT8);
    case OUTRIDER_SCALE_E8M0:
      return group == 32 && codes == OUTRIDER_E2M1 && !weight.zeros;
    case OUTRIDER_SIX_BITS:
      return group == 32 && (codes == OUTRIDER_INT4 || codes == OUTRIDER_INT5) && !weight.zeros;
    case OUTRIDER_FOUR_BITS:
      return group == 16 && codes == OUTRIDER_INT2 && !weight.zeros;
    case OUTRIDER_FACTORS:
      return group == 32 && codes == OUTRIDER_INT4 && !weight.zeros;
    case OUTRIDER_EIGHT_BITS:
      return group == 16 && codes == OUTRIDER_INT6 && !weight.zeros;
    default:
      return false;
  }
}

// Whether there is storage for float codes that are expanded to bf16, with these scales and groups.
bool known_floats(const outrider_weight &weight) {
  if (weight.format != OUTRIDER_BF16 || weight.table || weight.zeros || weight.ordered) return false;
  const bool plain = weight.group == 32 || weight.group == 64 || weight.group == 128;
  switch (weight.codes) {
    case OUTRIDER_E4M3:
      return plain && (weight.scales == OUTRIDER_SCALE_F32 || weight.scales == OUTRIDER_SCALE_F16 ||
                       weight.scales == OUTRIDER_SCALE_BF16);
    case OUTRIDER_NF4:
    case OUTRIDER_FP4:
      return plain && weight.scales == OUTRIDER_SCALE_F32;
    case OUTRIDER_E2M1:
      return known_storage(weight);
    default:
      return false;
  }
}

}  // namespace

int32_t check_weight(const outrider_weight &weight) {
  if (weight.rows < 1 || weight.columns < 1 || weight.rows > kMostSide || weight.columns > kMostSide)
    return fail(OUTRIDER_INVALID, "a weight of %d rows and %d columns", weight.rows, weight.columns);
  if (weight.format < OUTRIDER_FP32 || weight.format > OUTRIDER_FP16)
    return fail(OUTRIDER_UNSUPPORTED, "weight format %d is not built into these kernels", weight.format);
  const bool integer = integer_format(weight.format);
  if (weight.table && integer)
    return fail(OUTRIDER_INVALID, "a table or vector is fp32, bf16 or fp16, not format %d", weight.format);
  if (integer && weight.scales == OUTRIDER_WORDS && weight.group != 32 && weight.group != 64 && weight.group != 128)
    return fail(OUTRIDER_INVALID, "a group of %d channels: it must be 32, 64 or 128", weight.group);
  if (integer ? !known_storage(weight) : weight.codes != OUTRIDER_NO_CODES && !known_floats(weight))
    return fail(OUTRIDER_UNSUPPORTED,
                "codes of kind %d with scales of kind %d%s by groups of %d are not built into these kernels", weight.codes,
                weight.scales, weight.zeros ? " and zero points" : "", weight.group);
  if (weight.gated && (weight.table || weight.rows % 2))
    return fail(OUTRIDER_INVALID, "a gated weight of %d rows: gate and up must be equally many", weight.rows);
  if (weight.ordered && !integer)
    return fail(OUTRIDER_INVALID, "only matrices of codes have their columns in an order of their own");
  return OUTRIDER_OK;
}

Lane lane_of(const outrider_weight &weight, int row) {
  if (!weight.gated) return {row / kTileRows, row % kTileRows};
  const int half = weight.rows / 2, upper = row >= half, within = row - (upper ? half : 0);
  return {within / kLanes, within % kLanes + (upper ? kLanes : 0)};
}

void copy_row(const outrider_weight &from, int from_row, const outrider_weight &to, int to_row) {
  const auto [from_tile, from_lane] = lane_of(from, from_row);
  const auto [to_tile, to_lane] = lane_of(to, to_row);
  const char *source = static_cast<const char *>(from.data) + from_tile * tile_bytes(from);
  char *target = static_cast<char *>(const_cast<void *>(to.data)) + to_tile * tile_bytes(to);
  // A lane has four bytes of each line, or two of half a line.
  const auto copy = [&, from_lane = from_lane, to_lane = to_lane](int64_t bytes, int line) {
    const int each = line / kTileRows;
    for (int64_t done = 0; done < bytes; done += line, source += line, target += line)
      memcpy(target + each * to_lane, source + each * from_lane, static_cast<size_t>(each));
  };
  const auto copy_lines = [&](int64_t bytes) {
    copy(bytes / kTileBytes * kTileBytes, kTileBytes);
    copy(bytes % kTileBytes, kTileBytes / 2);
  };
  if (!has_codes(from)) return copy(tile_bytes(from), kTileBytes);
  const Geometry shape = geometry(from);
  const bool in_halves =
      from.scales == OUTRIDER_SCALE_F16 || from.scales == OUTRIDER_SCALE_BF16 || from.scales == OUTRIDER_HALF_MINIMA;
  for (int start = 0; start < from.columns; start += shape.block) {
    if (in_halves) copy(shape.scale_bytes, kTileBytes / 2);
    else copy_lines(shape.scale_bytes);
    copy_lines(shape.header - shape.scale_bytes);
    copy_lines(code_bytes(shape, std::min(shape.block, from.columns - start)));
  }
}

void copy_order(const outrider_weight &from, const outrider_weight &to) {
  if (!from.ordered) return;
  memcpy(static_cast<char *>(const_cast<void *>(to.data)) + order_offset(to),
         static_cast<const char *>(from.data) + order_offset(from), sizeof(int32_t) * static_cast<size_t>(from.columns));
}

int64_t order_offset(const outrider_weight &weight) { return tile_count(weight) * tile_bytes(weight); }

int64_t packed_bytes(const outrider_weight &weight) {
  if (weight.table)
    return round_up(static_cast<int64_t>(weight.rows) * weight.columns * (weight.format == OUTRIDER_FP32 ? 4 : 2), 64);
  return order_offset(weight) + (weight.ordered ? round_up(int64_t{4} * weight.columns, 64) : 0);
}

int32_t pack_rows(const outrider_weight &weight, int first_row, int count, const void *source, int source_type,
                  int64_t stride) {
  const int64_t end = int64_t{first_row} + count;
  if (first_row < 0 || count < 0 || end > weight.rows)
    return fail(OUTRIDER_INVALID, "rows %d..%lld of a weight that has %d", first_row, static_cast<long long>(end),
                weight.rows);
  const bool factors = weight.scales == OUTRIDER_FACTORS;
  if (has_codes(weight) && weight.scales != OUTRIDER_WORDS && !factors && !by_small_groups(weight))
    return fail(
        OUTRIDER_UNSUPPORTED,
        "floats are rounded to codes of 4 or 8 bits with scales in words, or of 4 by factors or in groups of 32 with "
        "scales of bf16; this takes codes");
  if (source_type < 0 || source_type > 2) return fail(OUTRIDER_INVALID, "source type %d", source_type);
  const char *message = nullptr;
  const Kernels *kernels = choose_kernels(&message);
  if (!kernels) return fail(OUTRIDER_UNSUPPORTED, "%s", message);
  std::vector<float> row(static_cast<size_t>(weight.columns));
  const bool in_halves = weight.format == OUTRIDER_BF16 || weight.format == OUTRIDER_FP16;
  std::vector<uint16_t> halves(in_halves ? row.size() : 0);
  char *data = static_cast<char *>(const_cast<void *>(weight.data));
  const int64_t tile_size = tile_bytes(weight);
  // For codes max - min must be finite, which may be twice the largest |value|.
  const float stretch = has_codes(weight) ? 2.0f : 1.0f;
  for (int i = 0; i < count; ++i) {
    read_row(source, source_type, i * stride, weight.columns, row.data());
    float probe = 0.0f;
    for (const float value : row) probe += value * stretch - value * stretch;
    // The probe is 0 unless some value is not finite or too large; only then is that value searched for.
    for (int c = 0; !(probe == 0.0f) && c < weight.columns; ++c) {
      const float value = row[static_cast<size_t>(c)];
      if (!isfinite(value * stretch))
        return fail(OUTRIDER_NOT_FINITE, "row %d, column %d is %g%s", first_row + i, c, static_cast<double>(value),
                    isfinite(value) ? ", too large for codes" : "");
    }
    if (in_halves && !to_halves(weight, row, &halves))
      return weight.format == OUTRIDER_BF16
                 ? fail(OUTRIDER_NOT_FINITE, "row %d holds a number that is infinite in bf16", first_row + i)
                 : fail(OUTRIDER_INVALID, "row %d holds a number that is not exact in fp16", first_row + i);
    if (weight.table) {
      const int64_t at = static_cast<int64_t>(first_row + i) * weight.columns;
      for (int c = 0; c < weight.columns; ++c) {
        if (weight.format == OUTRIDER_FP32) memcpy(data + (at + c) * 4, &row[static_cast<size_t>(c)], 4);
        else reinterpret_cast<uint16_t *>(data)[at + c] = halves[static_cast<size_t>(c)];
      }
      continue;
    }
    const auto [tile, lane] = lane_of(weight, first_row + i);
    if (factors) {
      const int32_t status = pack_factors(*kernels, weight, first_row + i, row.data(), data + tile * tile_size, lane);
      if (status != OUTRIDER_OK) return status;
      continue;
    }
    if (integer_format(weight.format)) pack_integer(*kernels, weight, row.data(), data + tile * tile_size, lane);
    else pack_float(weight, row.data(), halves.data(), data + tile * tile_size, lane);
  }
  return OUTRIDER_OK;
}

}  // namespace outrider
