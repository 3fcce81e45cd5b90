// Packs matrices that are quantised already: codes, scales and zero points are stored unchanged. kernels/storage.py is the definition.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "code_values.h"
#include "message.h"
#include "pack.h"

namespace outrider {
namespace {

uint32_t bits_of(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  return word;
}

float from_half(uint16_t half) {
  const uint32_t word = static_cast<uint32_t>(half & 0x7FFF) << 13, sign = static_cast<uint32_t>(half & 0x8000) << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  value *= 0x1p112f;
  return sign ? -value : value;
}

}  // namespace

bool exact_half(float value, uint16_t *half) {
  const uint32_t word = bits_of(value), sign = word >> 16 & 0x8000, magnitude = word & 0x7FFFFFFF;
  uint32_t result;
  if (magnitude == 0) {
    result = 0;
  } else if (magnitude >= (113u << 23)) {
    if (magnitude & 0x1FFF || magnitude >= (143u << 23)) return false;
    result = (magnitude - (112u << 23)) >> 13;
  } else {
    // Below 2^-14 fp16 has the multiples of 2^-24.
    const float scaled = fabsf(value) * 0x1p24f;
    result = static_cast<uint32_t>(scaled);
    if (static_cast<float>(result) != scaled) return false;
  }
  *half = static_cast<uint16_t>(sign | result);
  return true;
}

namespace {

// One row of the source, and where it goes.
struct Row {
  const outrider_weight &weight;
  const Geometry &shape;
  int number;  // of the row in the matrix, for error messages
  const uint8_t *codes;
  const float *scales;
  const uint8_t *zeros;
  const int16_t *sub_scales;
  const float *minima;
  const int16_t *sub_minima;
  int source_group;
  int lane;
};

int middle(int codes) {
  return codes >= OUTRIDER_E2M1   ? 0  // those without zero points
         : codes == OUTRIDER_INT8 ? 128
         : codes == OUTRIDER_INT6 ? 32
         : codes == OUTRIDER_INT5 ? 16
                                  : 8;
}
int most(int codes) {
  return codes == OUTRIDER_INT8 || codes == OUTRIDER_E4M3 ? 255
         : codes == OUTRIDER_INT6                         ? 63
         : codes == OUTRIDER_INT2                         ? 3
         : codes == OUTRIDER_INT5                         ? 31
                                                          : 15;
}

// The largest value of a code, 448, 6 or 1, times this is finite in bf16.
float largest_scale(int codes) {
  return codes == OUTRIDER_E4M3 ? 0x1p119f : codes == OUTRIDER_E2M1 ? 0x1p125f : 0x1.FEp127f;
}

int32_t inexact(const Row &row, int column, float scale, const char *type) {
  return fail(OUTRIDER_INVALID, "row %d, column %d: the scale %.9g is not exact in %s", row.number, column,
              static_cast<double>(scale), type);
}

// The bits of 2^-127.
constexpr uint32_t kLeastPower = 1u << 22;

// Whether these codes of E2M1 all stand for 0 or -0.
bool all_zeros(const Row &row, int column, int count) {
  return std::all_of(row.codes + column, row.codes + column + count, [](uint8_t code) { return (code & 7) == 0; });
}

void put(char *at, uint32_t word) { memcpy(at, &word, sizeof word); }
void put_half(char *at, uint16_t half) { memcpy(at, &half, sizeof half); }

// FACTORS: a scale for the block, and a factor and an offset for each group.
int32_t pack_factors(const Row &row, char *header, int start, int channels) {
  const int lane = row.lane, group = row.weight.group;
  const float scale = row.scales[start / kBlockChannels];
  if (!isfinite(scale) || bits_of(scale) & 0xFFFF) return inexact(row, start, scale, "bf16");
  uint32_t word = bits_of(scale), all_offsets = 0;
  for (int g = 0; g * group < channels; ++g) {
    const int factor = row.sub_scales[start / group + g] - kLeastFactor, offset = row.sub_minima[start / group + g];
    if (factor < 0 || factor > 15 || offset < 0 || offset > 255)
      return fail(OUTRIDER_INVALID, "row %d, column %d: a factor of %d and an offset of %d, at most 17 and 255 fit",
                  row.number, start + g * group, factor + kLeastFactor, offset);
    word |= static_cast<uint32_t>(factor) << 4 * g;
    all_offsets |= static_cast<uint32_t>(offset) << 8 * g;
  }
  put(header + 4 * lane, word);
  put(header + kTileBytes + 4 * lane, all_offsets);
  return OUTRIDER_OK;
}

// EIGHT_BITS: a scale for the super-block, and a factor for each group.
int32_t pack_eight_bits(const Row &row, char *header, int start, int channels) {
  const int lane = row.lane, group = row.weight.group;
  const float scale = row.scales[start / kSuperChannels];
  uint16_t half = 0;
  if (!exact_half(scale, &half)) return inexact(row, start, scale, "fp16");
  const int16_t *subs = row.sub_scales + start / group;
  for (int g = 0; g * group < channels; ++g) {
    if (subs[g] < -128 || subs[g] > 127)
      return fail(OUTRIDER_INVALID, "row %d, column %d: a factor of %d is not one of 8 bits", row.number, start + g * group,
                  subs[g]);
    header[g / 4 * kTileBytes + 4 * lane + g % 4] = static_cast<char>(subs[g]);
  }
  put_half(header + 4 * kTileBytes + 2 * lane, half);
  return OUTRIDER_OK;
}

// FOUR_BITS and SIX_BITS: a scale and a minimum for the super-block, and factors of both for each group, in so many `bits`.
int32_t factors_of(const Row &row, int start, int g, int bits, int *sub, int *low) {
  const int group = row.weight.group, most = (1 << bits) - 1;
  *sub = row.sub_scales[start / group + g];
  *low = row.sub_minima ? row.sub_minima[start / group + g] : 0;
  return *sub >= 0 && *sub <= most && *low >= 0 && *low <= most
             ? OUTRIDER_OK
             : fail(OUTRIDER_INVALID, "row %d, column %d: factors of %d and %d are not of %d bits", row.number,
                    start + g * group, *sub, *low, bits);
}

int32_t pack_factored_minima(const Row &row, char *header, int start, int channels) {
  const int lane = row.lane, group = row.weight.group, super = start / kSuperChannels;
  uint16_t scale = 0, minimum = 0;
  if (!exact_half(row.scales[super], &scale)) return inexact(row, start, row.scales[super], "fp16");
  if (row.minima && !exact_half(row.minima[super], &minimum)) return inexact(row, start, row.minima[super], "fp16");
  put(header + 4 * lane, scale | static_cast<uint32_t>(minimum) << 16);
  const bool four = row.weight.scales == OUTRIDER_FOUR_BITS;
  uint8_t words[12] = {};
  for (int g = 0; g * group < channels; ++g) {
    int sub, low;
    const int32_t status = factors_of(row, start, g, four ? 4 : 6, &sub, &low);
    if (status != OUTRIDER_OK) return status;
    if (four) {
      header[(1 + g / 4) * kTileBytes + 4 * lane + g % 4] = static_cast<char>(sub | low << 4);
      continue;
    }
    words[g] = static_cast<uint8_t>(words[g] | sub);
    if (g < 4) {
      words[8 + g] = static_cast<uint8_t>(words[8 + g] | low);
    } else {
      // The minimum's factors of groups 4 to 7 are in the upper two bits of the bytes of three words, two bits in each.
      for (int part = 0; part < 3; ++part)
        words[4 * part + g - 4] = static_cast<uint8_t>(words[4 * part + g - 4] | (low >> 2 * part & 3) << 6);
    }
  }
  for (int part = 0; part < 3 && !four; ++part) memcpy(header + (1 + part) * kTileBytes + 4 * lane, words + 4 * part, 4);
  return OUTRIDER_OK;
}

int32_t check_scale(const Row &row, int column, float scale, int zero) {
  if (!isfinite(scale))
    return fail(OUTRIDER_NOT_FINITE, "row %d, column %d: the scale is %f", row.number, column, static_cast<double>(scale));
  if (expands_codes(row.weight) && !(fabsf(scale) <= largest_scale(row.weight.codes)))
    return fail(OUTRIDER_NOT_FINITE, "row %d, column %d: the scale %.9g makes infinite numbers in bf16", row.number, column,
                static_cast<double>(scale));
  // AMX multiplies code - zero point as signed bytes.
  if (row.weight.codes == OUTRIDER_INT4 && zero > 128)
    return fail(OUTRIDER_INVALID, "row %d, column %d: a zero point of %d of codes of 4 bits, at most 128 fit", row.number,
                column, zero);
  return OUTRIDER_OK;
}

// Packs the scale of group g, which has `count` channels from `column` on.
int32_t pack_scale(const Row &row, char *header, int g, int column, float scale, int count) {
  const int lane = row.lane;
  const uint32_t word = bits_of(scale);
  uint16_t half = 0;
  switch (row.weight.scales) {
    case OUTRIDER_SCALE_F32:
      // Half of a scale of E2M1, since the kernels multiply twice the value.
      if (row.weight.codes == OUTRIDER_E2M1 && scale != 0.0f && !isnormal(scale * 0.5f))
        return inexact(row, column, scale, "half a normal fp32");
      put(header + g * kTileBytes + 4 * lane, row.weight.codes == OUTRIDER_E2M1 ? bits_of(scale * 0.5f) : word);
      return OUTRIDER_OK;
    case OUTRIDER_SCALE_F16:
    case OUTRIDER_HALF_MINIMA:
      if (!exact_half(scale, &half)) return inexact(row, column, scale, "fp16");
      put_half(header + g * kTileBytes / 2 + 2 * lane, half);
      return OUTRIDER_OK;
    case OUTRIDER_SCALE_BF16:
      if (word & 0xFFFF) return inexact(row, column, scale, "bf16");
      put_half(header + g * kTileBytes / 2 + 2 * lane, static_cast<uint16_t>(word >> 16));
      return OUTRIDER_OK;
    default:
      // E8M0: 2^(byte - 127). Byte 0, a subnormal fp32, is read as 0: that is right in a group of zeros, with which llama.cpp writes it.
      if (word == kLeastPower && all_zeros(row, column, count)) {
        header[4 * lane + g] = 0;
        return OUTRIDER_OK;
      }
      if (word & 0x807FFFFF || word >> 23 < 1) return inexact(row, column, scale, "e8m0 above 2^-127");
      header[4 * lane + g] = static_cast<char>(word >> 23);
      return OUTRIDER_OK;
  }
}

// A scale for each group; with it a minimum, or a zero point.
int32_t pack_scales(const Row &row, char *header, int start, int channels) {
  const outrider_weight &weight = row.weight;
  const int lane = row.lane, group = weight.group;
  // A row's zero points: a byte for each group, or two bytes for a single group.
  char *const zero_points = header + row.shape.scale_bytes + (kBlockChannels / group == 4 ? 4 : 2) * lane;
  for (int g = 0; g * group < channels; ++g) {
    const int column = start + g * group, source = column / row.source_group;
    const float scale = row.scales[source];
    const int zero = row.zeros ? row.zeros[source] : middle(weight.codes);
    int32_t status = check_scale(row, column, scale, zero);
    if (status != OUTRIDER_OK) return status;
    if (weight.scales == OUTRIDER_WORDS) {
      if (bits_of(scale) & 0xFF) return inexact(row, column, scale, "24 bits");
      put(header + 4 * lane, bits_of(scale) | static_cast<uint32_t>(zero));
      continue;
    }
    status = pack_scale(row, header, g, column, scale, std::min(group, channels - g * group));
    if (status != OUTRIDER_OK) return status;
    if (weight.scales == OUTRIDER_SCALE_E8M0) continue;
    if (weight.scales == OUTRIDER_HALF_MINIMA) {
      uint16_t half = 0;
      if (!exact_half(row.minima[source], &half)) return inexact(row, column, row.minima[source], "fp16");
      put_half(header + (kBlockChannels / group + g) * kTileBytes / 2 + 2 * lane, half);
    } else if (weight.zeros) {
      zero_points[g] = static_cast<char>(zero);
    } else if (zero != middle(weight.codes)) {
      return fail(OUTRIDER_INVALID, "row %d, column %d: a zero point of %d where all are %d", row.number, column, zero,
                  middle(weight.codes));
    }
  }
  return OUTRIDER_OK;
}

// Packs the scales, minima and zero points of the block whose first channel is `start`.
int32_t pack_header(const Row &row, char *header, int start, int channels) {
  if (row.weight.scales == OUTRIDER_FACTORS) return pack_factors(row, header, start, channels);
  if (row.weight.scales == OUTRIDER_EIGHT_BITS) return pack_eight_bits(row, header, start, channels);
  if (has_factored_minima(row.weight)) return pack_factored_minima(row, header, start, channels);
  return pack_scales(row, header, start, channels);
}

// Packs one unit, up to 32 channels that fill whole lines; missing channels are zero.
void pack_unit(const Row &row, const uint8_t *codes, char *at) {
  const int lane = row.lane;
  uint32_t words[9] = {};
  memcpy(words, codes, static_cast<size_t>(row.shape.unit));
  if (row.shape.unit_lines == 2) {
    put(at + 4 * lane, words[0]);
    put(at + kTileBytes + 4 * lane, words[1]);
    return;
  }
  if (row.weight.codes == OUTRIDER_INT2)
    return put(at + 4 * lane, words[0] | words[1] << 2 | words[2] << 4 | words[3] << 6);
  const int eights = row.shape.unit / 8;
  for (int eight = 0; eight < eights; ++eight)
    put(at + eight * kTileBytes + 4 * lane, (words[2 * eight] & 0x0F0F0F0F) | (words[2 * eight + 1] & 0x0F0F0F0F) << 4);
  if (eights == 1) return;
  // The last line has the upper bits: byte b those of channels b, b + 4, ..., the first channel's lowest.
  const int high = eights == 2 ? 2 : 1;
  uint32_t above = 0;
  for (int four = 0; four < 2 * eights; ++four)
    above |= (words[four] >> 4 & (high == 2 ? 0x03030303u : 0x01010101u)) << four * high;
  put(at + eights * kTileBytes + 4 * lane, above);
}

int32_t pack_row(const Row &row, char *tile) {
  const outrider_weight &weight = row.weight;
  const int highest = most(weight.codes), unit = row.shape.unit;
  for (int start = 0; start < weight.columns; start += row.shape.block) {
    const int channels = std::min(row.shape.block, weight.columns - start);
    const int32_t status = pack_header(row, tile, start, channels);
    if (status != OUTRIDER_OK) return status;
    tile += row.shape.header;
    for (int c = 0; c < channels; c += unit, tile += row.shape.unit_lines * kTileBytes) {
      uint8_t codes[32] = {};
      for (int i = 0; i < std::min(unit, channels - c); ++i) {
        codes[i] = row.codes[start + c + i];
        if (codes[i] > highest)
          return fail(OUTRIDER_INVALID, "row %d, column %d: a code of %d, at most %d fits", row.number, start + c + i,
                      codes[i], highest);
        if (weight.codes == OUTRIDER_E4M3 && (codes[i] & 127) == 127)
          return fail(OUTRIDER_NOT_FINITE, "row %d, column %d is nan", row.number, start + c + i);
      }
      pack_unit(row, codes, tile);
    }
  }
  return OUTRIDER_OK;
}

}  // namespace

int32_t pack_codes(const outrider_weight &weight, int first_row, int count, const outrider_quantised &source) {
  if (!has_codes(weight)) return fail(OUTRIDER_INVALID, "codes for a weight of format %d", weight.format);
  const int64_t end = int64_t{first_row} + count;
  if (first_row < 0 || count < 0 || end > weight.rows)
    return fail(OUTRIDER_INVALID, "rows %d..%lld of a weight that has %d", first_row, static_cast<long long>(end),
                weight.rows);
  const bool factors = weight.scales == OUTRIDER_FACTORS;
  const bool levels = factors || has_factored_minima(weight) || weight.scales == OUTRIDER_EIGHT_BITS;
  if (source.group < 1 || (source.group % weight.group && source.group < weight.columns))
    return fail(OUTRIDER_INVALID, "scales for groups of %d in a weight with groups of %d", source.group, weight.group);
  if (levels && (source.group != weight.group || !source.sub_scales || (factors && !source.sub_minima)))
    return fail(OUTRIDER_INVALID, "two levels of scales need a factor for every %d channels", weight.group);
  const bool minima = weight.scales == OUTRIDER_HALF_MINIMA;
  if (minima && (source.group != weight.group || !source.minima))
    return fail(OUTRIDER_INVALID, "a minimum is needed for every %d channels", weight.group);
  const Geometry shape = geometry(weight);
  const int64_t groups = (weight.columns + source.group - 1) / source.group;
  const int64_t supers = (weight.columns + shape.block - 1) / shape.block;
  char *data = static_cast<char *>(const_cast<void *>(weight.data));
  const int64_t size = tile_bytes(weight);
  for (int64_t i = 0; i < count; ++i) {
    const auto [tile, lane] = lane_of(weight, first_row + static_cast<int>(i));
    const auto part = [i](const auto *values, int64_t each) { return values ? values + i * each : nullptr; };
    const Row row{weight,
                  shape,
                  first_row + static_cast<int>(i),
                  source.codes + i * weight.columns,
                  source.scales + i * (levels ? supers : groups),
                  part(source.zeros, groups),
                  part(source.sub_scales, groups),
                  part(source.minima, minima ? groups : supers),
                  part(source.sub_minima, groups),
                  source.group,
                  lane};
    const int32_t status = pack_row(row, data + tile * size);
    if (status != OUTRIDER_OK) return status;
  }
  return OUTRIDER_OK;
}

int32_t pack_factors(const Kernels &kernels, const outrider_weight &weight, int number, const float *values, char *tile,
                     int lane) {
  constexpr int kGroup = 32, kTogether = kBlockChannels / kGroup;
  const int columns = weight.columns, blocks = (columns + kBlockChannels - 1) / kBlockChannels;
  const auto size = [](int count) { return static_cast<size_t>(count); };
  std::vector<uint8_t> codes(size(columns));
  std::vector<float> scales(size(blocks));
  std::vector<int16_t> factors(size(blocks * kTogether)), offsets(size(blocks * kTogether));
  for (int block = 0; block < blocks; ++block) {
    const int start = block * kBlockChannels, channels = std::min(kBlockChannels, columns - start);
    kernels.find_factors(values + start, channels, &scales[size(block)], &factors[size(block * kTogether)],
                         &offsets[size(block * kTogether)], &codes[size(start)]);
  }
  const Row row{weight,         geometry(weight), number,         codes.data(), scales.data(), nullptr,
                factors.data(), nullptr,          offsets.data(), kGroup,       lane};
  return pack_row(row, tile);
}

namespace {

uint32_t word_at(const char *at) {
  uint32_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

uint16_t half_at(const char *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return half;
}

// One row's scales, zero points and minima for the groups of a block.
struct Groups {
  float scales[kSuperChannels / 16], zeros[kSuperChannels / 16], minima[kSuperChannels / 16];
};

// Reads the header of the block at `at`, for one lane.
Groups read_groups(const outrider_weight &weight, const Geometry &shape, const char *at, int lane) {
  Groups found = {};
  const int count = shape.block / weight.group;
  const char *const word = at + 4 * lane, *const half = at + 2 * lane;
  const auto byte = [&](int line, int index) { return static_cast<uint8_t>(word[line * kTileBytes + index]); };
  for (int g = 0; g < count; ++g) {
    found.zeros[g] = static_cast<float>(middle(weight.codes));
    switch (weight.scales) {
      case OUTRIDER_WORDS: {
        const uint32_t both = word_at(word), scale = both & 0xFFFFFF00;
        memcpy(&found.scales[g], &scale, sizeof scale);
        found.zeros[g] = static_cast<float>(both & 0xFF);
        continue;
      }
      case OUTRIDER_FACTORS: {
        const uint32_t both = word_at(word), upper = both & 0xFFFF0000;
        float scale;
        memcpy(&scale, &upper, sizeof scale);
        found.scales[g] = scale * static_cast<float>((both >> 4 * g & 15) + kLeastFactor);
        found.minima[g] = scale * static_cast<float>(byte(1, g));
        found.zeros[g] = 0.0f;
        continue;
      }
      case OUTRIDER_SIX_BITS: {
        const uint32_t pair = word_at(word);
        const int index = g % 4;
        const int upper = byte(1, index) >> 6 | byte(2, index) >> 6 << 2 | byte(3, index) >> 6 << 4;
        found.scales[g] = from_half(static_cast<uint16_t>(pair)) * static_cast<float>(byte(g < 4 ? 1 : 2, index) & 63);
        found.minima[g] =
            from_half(static_cast<uint16_t>(pair >> 16)) * static_cast<float>(g < 4 ? byte(3, index) & 63 : upper);
        found.zeros[g] = 0.0f;
        continue;
      }
      case OUTRIDER_FOUR_BITS: {
        const uint32_t pair = word_at(word);
        const int factors = byte(1 + g / 4, g % 4);
        found.scales[g] = from_half(static_cast<uint16_t>(pair)) * static_cast<float>(factors & 15);
        found.minima[g] = from_half(static_cast<uint16_t>(pair >> 16)) * static_cast<float>(factors >> 4);
        found.zeros[g] = 0.0f;
        continue;
      }
      case OUTRIDER_EIGHT_BITS:
        found.scales[g] =
            from_half(half_at(half + 4 * kTileBytes)) * static_cast<float>(static_cast<int8_t>(byte(g / 4, g % 4)));
        continue;
      case OUTRIDER_SCALE_E8M0: {
        const uint32_t scale = static_cast<uint32_t>(byte(0, g)) << 23;
        memcpy(&found.scales[g], &scale, sizeof scale);
        found.zeros[g] = 0.0f;
        continue;
      }
      case OUTRIDER_SCALE_F32: {
        const uint32_t scale = word_at(word + g * kTileBytes);
        memcpy(&found.scales[g], &scale, sizeof scale);
        if (weight.codes == OUTRIDER_E2M1) found.scales[g] *= 2.0f;
        break;
      }
      case OUTRIDER_SCALE_BF16: {
        const uint32_t scale = static_cast<uint32_t>(half_at(half + g * kTileBytes / 2)) << 16;
        memcpy(&found.scales[g], &scale, sizeof scale);
        break;
      }
      default:
        found.scales[g] = from_half(half_at(half + g * kTileBytes / 2));
        break;
    }
    if (weight.scales == OUTRIDER_HALF_MINIMA) {
      found.minima[g] = from_half(half_at(half + (count + g) * kTileBytes / 2));
      found.zeros[g] = 0.0f;
    } else if (weight.zeros) {
      found.zeros[g] = static_cast<float>(static_cast<uint8_t>(at[shape.scale_bytes + (count == 4 ? 4 : 2) * lane + g]));
    }
  }
  return found;
}

// Reads the codes of one unit, which pack_unit has packed.
void read_unit(const outrider_weight &weight, const Geometry &shape, const char *at, int lane, uint8_t codes[32]) {
  uint32_t words[8] = {};
  at += 4 * lane;
  if (weight.codes == OUTRIDER_INT8) {
    words[0] = word_at(at);
    words[1] = word_at(at + kTileBytes);
  } else if (weight.codes == OUTRIDER_INT2) {
    for (int four = 0; four < 4; ++four) words[four] = word_at(at) >> 2 * four & 0x03030303u;
  } else {
    const int eights = shape.unit / 8, high = eights == 2 ? 2 : 1;
    const uint32_t above = eights == 1 ? 0 : word_at(at + eights * kTileBytes),
                   mask = high == 2 ? 0x03030303u : 0x01010101u;
    for (int four = 0; four < 2 * eights; ++four) {
      const uint32_t line = word_at(at + four / 2 * kTileBytes);
      words[four] = (line >> 4 * (four % 2) & 0x0F0F0F0Fu) | (above >> four * high & mask) << 4;
    }
  }
  memcpy(codes, words, sizeof words);
}

}  // namespace

void unpack_row(const outrider_weight &weight, int row, float *out) {
  const float *const table = weight.codes == OUTRIDER_E2M1  ? kE2M1Values
                             : weight.codes == OUTRIDER_IQ4 ? kIq4Values
                                                            : nullptr;
  const Geometry shape = geometry(weight);
  const auto [tile, lane] = lane_of(weight, row);
  const char *at = static_cast<const char *>(weight.data) + tile * tile_bytes(weight);
  const bool minima =
      has_factored_minima(weight) || weight.scales == OUTRIDER_FACTORS || weight.scales == OUTRIDER_HALF_MINIMA;
  for (int start = 0; start < weight.columns; start += shape.block) {
    const int channels = std::min(shape.block, weight.columns - start);
    const Groups groups = read_groups(weight, shape, at, lane);
    at += shape.header;
    for (int c = 0; c < channels; c += shape.unit, at += shape.unit_lines * kTileBytes) {
      uint8_t codes[32];
      read_unit(weight, shape, at, lane, codes);
      for (int i = 0; i < std::min(shape.unit, channels - c); ++i) {
        const int g = (c + i) / weight.group;
        const float code = table ? table[codes[i]] : static_cast<float>(codes[i]) - groups.zeros[g];
        const float value = code * groups.scales[g];
        out[start + c + i] = minima ? value - groups.minima[g] : value;
      }
    }
  }
}

int32_t pack_order(const outrider_weight &weight, const int32_t *order) {
  if (!weight.ordered) return fail(OUTRIDER_INVALID, "an order for a weight whose columns have none");
  std::vector<bool> seen(static_cast<size_t>(weight.columns));
  for (int i = 0; i < weight.columns; ++i) {
    if (order[i] < 0 || order[i] >= weight.columns || seen[static_cast<size_t>(order[i])])
      return fail(OUTRIDER_INVALID, "the order of %d columns has %d at place %d, twice or out of range", weight.columns,
                  order[i], i);
    seen[static_cast<size_t>(order[i])] = true;
  }
  memcpy(static_cast<char *>(const_cast<void *>(weight.data)) + order_offset(weight), order,
         sizeof(int32_t) * static_cast<size_t>(weight.columns));
  return OUTRIDER_OK;
}

}  // namespace outrider
