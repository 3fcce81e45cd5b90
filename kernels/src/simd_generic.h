// Sixteen lanes in four of the compiler's own vectors, on any machine. The three simd_*.h define the same functions, with the same results
// bit for bit.
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
  #include <emmintrin.h>
#elif defined(__aarch64__)
  #include <arm_neon.h>
#endif

namespace {

// A cast between two of these types of the same size keeps the bits.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));
using Words = int16_t __attribute__((vector_size(16)));
using FourWords = uint16_t __attribute__((vector_size(8)));
using EightBytes = int8_t __attribute__((vector_size(8)));

struct F {
  Floats x[4];
};
struct I {
  Ints x[4];
};
// The number of accumulators that fit into registers beside the operands.
constexpr int kSumsKept = 16;
// Tokens whose int8 values are interleaved in the KV cache.
constexpr int kValuesTogether = 2;
using Mask = I;

// Without a loop: to unroll loops over sixteen lanes took the compiler minutes.
template <typename Result, typename Function> inline Result each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline F set(float x) {
  return each<F>([=](int) { return Floats{x, x, x, x}; });
}
inline F load(const float *p) {
  F r;
  memcpy(r.x, p, sizeof r.x);
  return r;
}
inline void store(float *p, F x) { memcpy(p, x.x, sizeof x.x); }
inline F load_n(const float *p, int n) {
  if (n >= 16) return load(p);
  float copy[16] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
inline void store_n(float *p, F x, int n) { memcpy(p, x.x, sizeof(float) * static_cast<size_t>(n < 16 ? n : 16)); }
inline F add(F a, F b) {
  return each<F>([&](int i) { return a.x[i] + b.x[i]; });
}
inline F sub(F a, F b) {
  return each<F>([&](int i) { return a.x[i] - b.x[i]; });
}
inline F mul(F a, F b) {
  return each<F>([&](int i) { return a.x[i] * b.x[i]; });
}
inline F div(F a, F b) {
  return each<F>([&](int i) { return a.x[i] / b.x[i]; });
}
inline Floats fma4(Floats a, Floats b, Floats c) {
#if defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return Floats{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                __builtin_fmaf(a[3], b[3], c[3])};
#endif
}
inline F fma(F a, F b, F c) {
  return each<F>([&](int i) { return fma4(a.x[i], b.x[i], c.x[i]); });
}
inline F fnma(F a, F b, F c) {
  return each<F>([&](int i) { return fma4(-a.x[i], b.x[i], c.x[i]); });
}
inline F square_root(F a) {
  return each<F>([&](int i) {
    const Floats x = a.x[i];
    return Floats{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
  });
}
inline F maximum(F a, F b) {
  return each<F>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline F minimum(F a, F b) {
  return each<F>([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline Mask less(F a, F b) {
  return each<Mask>([&](int i) { return a.x[i] < b.x[i]; });
}
inline F select(Mask m, F yes, F no) {
  return each<F>([&](int i) { return m.x[i] ? yes.x[i] : no.x[i]; });
}
inline Mask lanes_between(int low, int high) {
  return each<Mask>([=](int i) {
    const Ints lane = Ints{0, 1, 2, 3} + 4 * i;
    return (lane >= low) & (lane < high);
  });
}

// The lanes whose bits are set.
inline Mask lanes_of(uint32_t bits) {
  return each<Mask>([=](int i) { return (Ints{1, 2, 4, 8} & static_cast<int32_t>(bits >> 4 * i)) != 0; });
}

inline I set_i(int32_t x) {
  return each<I>([=](int) { return Ints{x, x, x, x}; });
}
inline I load_i(const void *p) {
  I r;
  memcpy(r.x, p, sizeof r.x);
  return r;
}
inline I load_i_n(const void *p, int n) {
  I r = {};
  memcpy(r.x, p, sizeof(int32_t) * static_cast<size_t>(n < 16 ? n : 16));
  return r;
}
inline void store_i(void *p, I x) { memcpy(p, x.x, sizeof x.x); }
inline I add_i(I a, I b) {
  return each<I>([&](int i) { return (Ints)((Bits)a.x[i] + (Bits)b.x[i]); });
}
inline I sub_i(I a, I b) {
  return each<I>([&](int i) { return (Ints)((Bits)a.x[i] - (Bits)b.x[i]); });
}
inline I and_i(I a, I b) {
  return each<I>([&](int i) { return a.x[i] & b.x[i]; });
}
inline I or_i(I a, I b) {
  return each<I>([&](int i) { return a.x[i] | b.x[i]; });
}
inline I xor_i(I a, I b) {
  return each<I>([&](int i) { return a.x[i] ^ b.x[i]; });
}
// The low and high 32 bits of a * b, for unsigned lanes.
inline void whole_product(I a, I b, I *low, I *high) {
  for (int lane = 0; lane < 16; ++lane) {
    const uint64_t product =
        uint64_t{static_cast<uint32_t>(a.x[lane / 4][lane % 4])} * static_cast<uint32_t>(b.x[lane / 4][lane % 4]);
    low->x[lane / 4][lane % 4] = static_cast<int32_t>(product);
    high->x[lane / 4][lane % 4] = static_cast<int32_t>(product >> 32);
  }
}
// a | (b & c)
inline I or_and(I a, I b, I c) { return or_i(a, and_i(b, c)); }
template <int N> inline I shl(I a) {
  return each<I>([&](int i) { return (Ints)((Bits)a.x[i] << N); });
}
template <int N> inline I shr(I a) {
  return each<I>([&](int i) { return (Ints)((Bits)a.x[i] >> N); });
}
template <int N> inline I sar(I a) {
  return each<I>([&](int i) { return a.x[i] >> N; });
}
// Rounds to nearest, ties to even; INT32_MIN where the result does not fit, as on x86.
inline I to_int(F a) {
  return each<I>([&](int i) {
    const Floats x = a.x[i];
#if defined(__SSE2__)
    return (Ints)_mm_cvtps_epi32(x);
#else
    const auto one = [](float value) {
      return value >= -2147483648.0f && value < 2147483648.0f ? static_cast<int32_t>(__builtin_rintf(value)) : INT32_MIN;
    };
    return Ints{one(x[0]), one(x[1]), one(x[2]), one(x[3])};
#endif
  });
}
inline F to_float(I a) {
  return each<F>([&](int i) { return __builtin_convertvector(a.x[i], Floats); });
}
inline I as_int(F a) {
  return each<I>([&](int i) { return (Ints)a.x[i]; });
}
inline F as_float(I a) {
  return each<F>([&](int i) { return (Floats)a.x[i]; });
}

// The sums of every two neighbouring products, in 32 bits.
inline Bits multiply_pairs(Words a, Words b) {
#if defined(__SSE2__)
  return (Bits)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (Bits)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
  const Ints x = (Ints)a, y = (Ints)b;
  const Ints low = ((Ints)((Bits)x << 16) >> 16) * ((Ints)((Bits)y << 16) >> 16);
  return (Bits)low + (Bits)((x >> 16) * (y >> 16));
#endif
}
// acc + the sum over each lane's two int16 of a * b
inline I dot_words(I acc, I a, I b) {
  return each<I>([&](int i) { return (Ints)((Bits)acc.x[i] + multiply_pairs((Words)a.x[i], (Words)b.x[i])); });
}
// acc + the sum over each lane's four bytes of u8 * s8
template <int BITS> inline I dot_bytes(I acc, I u8, I s8) {
  return each<I>([&](int i) {
    const Bits u = (Bits)u8.x[i];
    const Words s = (Words)s8.x[i];
    const Bits even = multiply_pairs((Words)(u & 0x00FF00FFu), (s << 8) >> 8);
    const Bits odd = multiply_pairs((Words)(u >> 8 & 0x00FF00FFu), s >> 8);
    return (Ints)((Bits)acc.x[i] + even + odd);
  });
}
// The dot product of 4-bit codes with s8, times a factor of up to 17, which is in both 16-bit halves of each lane: `times_factor` once for
// all rows, then `dot_products` for each.
inline I times_factor(I codes, I factor) {
  return each<I>([&](int i) { return (Ints)((Bits)codes.x[i] * ((Bits)factor.x[i] & 0xFFFFu)); });
}
inline I dot_products(I acc, I products, I s8, I) { return dot_bytes<8>(acc, products, s8); }
inline void store_bytes(int8_t *p, I x) {
  int32_t copy[16];
  store_i(copy, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(copy[i]);
}

inline F load_bf16(const uint16_t *p) {
  return each<F>([=](int i) {
    FourWords words;
    memcpy(&words, p + 4 * i, sizeof words);
    return (Floats)(__builtin_convertvector(words, Bits) << 16);
  });
}
// 32 signed bytes as 16-bit words
inline I words_of(const int8_t *p) {
  return each<I>([=](int i) {
    EightBytes bytes;
    memcpy(&bytes, p + 8 * i, sizeof bytes);
    return (Ints) __builtin_convertvector(bytes, Words);
  });
}
// The fp16 numbers in the low halves of the lanes, which must be finite.
inline F from_half(I x) {
  return each<F>([&](int i) {
    const Bits half = (Bits)x.x[i], magnitude = (half & 0x7FFFu) << 13;
    // Exact, also for subnormal numbers: 2^112 corrects the difference of the exponents' biases.
    const Floats value = (Floats)magnitude * 0x1p112f;
    return (Floats)((Bits)value | (half & 0x8000u) << 16);
  });
}
inline F load_half(const uint16_t *p) { return from_half(shr<16>(as_int(load_bf16(p)))); }
// For every byte, table[its lower four bits].
inline I look_up(const uint8_t *table, I x) {
  uint8_t bytes[64];
  store_i(bytes, x);
  for (uint8_t &byte : bytes) byte = table[byte & 15];
  return load_i(bytes);
}
// Sixteen floats, and for every lane the one that its lower four bits name.
struct FloatTable {
  float of[16];
};
inline FloatTable load_table(const float *p) {
  FloatTable table;
  memcpy(table.of, p, sizeof table.of);
  return table;
}
inline F look_up_floats(const FloatTable &table, I x) {
  return each<F>([&](int i) {
    const Ints at = x.x[i] & 15;
    return Floats{table.of[at[0]], table.of[at[1]], table.of[at[2]], table.of[at[3]]};
  });
}
// Whether some byte of x has none of the bits of the same byte of `bits`.
inline bool some_byte_lacks(I x, I bits) {
  uint8_t bytes[64], wanted[64];
  store_i(bytes, x);
  store_i(wanted, bits);
  bool lacks = false;
  for (int i = 0; i < 64; ++i) lacks = lacks || (bytes[i] & wanted[i]) == 0;
  return lacks;
}
inline void store_low_words(uint16_t *p, I x) {
  int32_t copy[16];
  store_i(copy, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(copy[i]);
}
// acc + the two bf16 products of each lane
inline F dot_bf16(F acc, I a, I b) {
  const I high = set_i(static_cast<int32_t>(0xFFFF0000u));
  acc = fma(as_float(shl<16>(a)), as_float(shl<16>(b)), acc);
  return fma(as_float(and_i(a, high)), as_float(and_i(b, high)), acc);
}
inline void prefetch(const void *) {}
inline void prefetch_to_l2(const void *) {}
inline void prefetch_to_write(const void *) {}

}  // namespace
