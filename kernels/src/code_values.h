// The values of four-bit codes that index a table, from which every kernel makes its own form at compile time.
#ifndef OUTRIDER_SRC_CODE_VALUES_H
#define OUTRIDER_SRC_CODE_VALUES_H

#include <stdint.h>

namespace {

// 4-bit floats: a sign, two bits of exponent, one of mantissa.
constexpr float kE2M1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
// llama.cpp's table of IQ4_NL and IQ4_XS.
constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct ByteTable {
  uint8_t of[16];
};

// The bytes factor * value + middle; a negative one in two's complement.
constexpr ByteTable bytes_of_values(const float (&values)[16], int factor, int middle) {
  ByteTable result{};
  for (int i = 0; i < 16; ++i)
    result.of[i] = static_cast<uint8_t>(static_cast<int>(static_cast<float>(factor) * values[i]) + middle);
  return result;
}

}  // namespace

#endif
