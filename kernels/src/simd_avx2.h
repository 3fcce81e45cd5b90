// Sixteen lanes in two AVX2 registers. The three simd_*.h define the same functions, with the same results bit for bit. Products of bytes
// with 16-bit sums (absolute_bytes, dot_signed, add_short_products, positive_bytes) exist only here.
#include <immintrin.h>
#include <stdint.h>

namespace {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
// The number of accumulators that fit into registers beside the operands.
constexpr int kSumsKept = 6;
// Tokens whose int8 values are interleaved in the KV cache.
constexpr int kValuesTogether = 2;
using Mask = F;

inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F load_n(const float *p, int n) {
  if (n >= 16) return load(p);
  float copy[16] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
inline void store_n(float *p, F x, int n) {
  if (n >= 16) return store(p, x);
  float copy[16];
  store(copy, x);
  for (int i = 0; i < n; ++i) p[i] = copy[i];
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F square_root(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F maximum(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F minimum(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Mask less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline F select(Mask m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }

inline I set_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I load_i(const void *p) {
  const __m256i *q = static_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I load_i_n(const void *p, int n) {
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const int *q = static_cast<const int *>(p);
  return {_mm256_maskload_epi32(q, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)),
          _mm256_maskload_epi32(q + 8, _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane))};
}
inline void store_i(void *p, I x) {
  __m256i *q = static_cast<__m256i *>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I sub_i(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I and_i(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I or_i(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I xor_i(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
// The low and high 32 bits of x * y, for unsigned lanes.
inline void whole_product(__m256i x, __m256i y, __m256i *low, __m256i *high) {
  const __m256i even = _mm256_mul_epu32(x, y);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
inline void whole_product(I x, I y, I *low, I *high) {
  whole_product(x.a, y.a, &low->a, &high->a);
  whole_product(x.b, y.b, &low->b, &high->b);
}
// x | (y & z)
inline I or_and(I x, I y, I z) { return or_i(x, and_i(y, z)); }
template <int N> inline I shl(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline I shr(I x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> inline I sar(I x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

inline Mask lanes_between(int low, int high) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  const __m256i below = _mm256_set1_epi32(low - 1), above = _mm256_set1_epi32(high);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(first, below), _mm256_cmpgt_epi32(above, first))),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(second, below), _mm256_cmpgt_epi32(above, second)))};
}

// The lanes whose bits are set.
inline Mask lanes_of(uint32_t bits) {
  const __m256i of_a = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), of_b = _mm256_slli_epi32(of_a, 8);
  const __m256i all = _mm256_set1_epi32(static_cast<int32_t>(bits));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, of_a), of_a)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, of_b), of_b))};
}

template <int BITS> inline __m256i dot_bytes_half(__m256i acc, __m256i u8, __m256i s8) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (BITS == 4) return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), ones));
  // vpmaddubsw saturates for 8 by 8 bits, so the unsigned operand is split into two nibbles, whose products are exact.
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(u8, nibble), s8);
  const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(u8, 4), nibble), s8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, ones));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}
// acc + the sum over each lane's four bytes of u8 * s8
template <int BITS> inline I dot_bytes(I acc, I u8, I s8) {
  return {dot_bytes_half<BITS>(acc.a, u8.a, s8.a), dot_bytes_half<BITS>(acc.b, u8.b, s8.b)};
}
// The dot product of 4-bit codes with s8, times a factor of up to 17, which is in both 16-bit halves of each lane: `times_factor` once for
// all rows, then `dot_products` for each. Here the sums of two products fit into 16 bits, and vpmaddwd multiplies them by the factor as it
// adds them.
inline I times_factor(I codes, I) { return codes; }
inline __m256i dot_products_half(__m256i acc, __m256i codes, __m256i s8, __m256i factor) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, s8), factor));
}
inline I dot_products(I acc, I codes, I s8, I factor) {
  return {dot_products_half(acc.a, codes.a, s8.a, factor.a), dot_products_half(acc.b, codes.b, s8.b, factor.b)};
}
// acc + the sum over each lane's four signed bytes of x * y; magnitude is absolute_bytes(x). No y is -128, so the sum of two products fits
// into 16 bits.
inline I absolute_bytes(I x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
inline __m256i dot_signed_half(__m256i acc, __m256i magnitude, __m256i x, __m256i y) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(y, x));
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  asm("" : "+x"(acc));  // forces the addition now: GCC would keep several products in registers and spill the sums
  return acc;
}
inline I dot_signed(I acc, I magnitude, I x, I y) {
  return {dot_signed_half(acc.a, magnitude.a, x.a, y.a), dot_signed_half(acc.b, magnitude.b, x.b, y.b)};
}
// acc + the sum over each lane's two int16 of a * b
inline I dot_words(I acc, I x, I y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}
// For each 16-bit word: sums + u8 * s8 + u8 * s8. Without the asm GCC adds many of them as a tree, for which there are too few registers.
inline __m256i add_short_half(__m256i sums, __m256i u8, __m256i s8) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(u8, s8));
  asm("" : "+x"(sums));
  return sums;
}
inline I add_short_products(I sums, I u8, I s8) {
  return {add_short_half(sums.a, u8.a, s8.a), add_short_half(sums.b, u8.b, s8.b)};
}
// max(0, x) of signed bytes.
inline I positive_bytes(I x) {
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_max_epi8(x.a, zero), _mm256_max_epi8(x.b, zero)};
}
inline void store_bytes(int8_t *p, I x) {
  int32_t copy[16];
  store_i(copy, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(copy[i]);
}

inline F load_bf16(const uint16_t *p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return as_float(shl<16>(
      {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1))}));
}
// 32 signed bytes as 16-bit words
inline I words_of(const int8_t *p) {
  const __m128i *const halves = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
// The fp16 numbers in the low halves of the lanes.
inline F from_half(I x) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i ordered = _mm256_permute4x64_epi64(halves, 0xD8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(ordered)), _mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1))};
}
inline F load_half(const uint16_t *p) {
  const __m128i *q = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
// For every byte, table[its lower four bits].
inline I look_up(const uint8_t *table, I x) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
  return {_mm256_shuffle_epi8(bytes, x.a), _mm256_shuffle_epi8(bytes, x.b)};
}
// Sixteen floats, and for every lane the one that its lower four bits name.
struct FloatTable {
  __m256 low, high;
};
inline FloatTable load_table(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 look_up_floats(const FloatTable &table, __m256i x) {
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(x, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, x), _mm256_permutevar8x32_ps(table.high, x), upper);
}
inline F look_up_floats(const FloatTable &table, I x) { return {look_up_floats(table, x.a), look_up_floats(table, x.b)}; }
// Whether some byte of x has none of the bits of the same byte of `bits`.
inline bool some_byte_lacks(I x, I bits) {
  const __m256i none = _mm256_setzero_si256();
  const __m256i first = _mm256_cmpeq_epi8(_mm256_and_si256(x.a, bits.a), none),
                second = _mm256_cmpeq_epi8(_mm256_and_si256(x.b, bits.b), none);
  return _mm256_movemask_epi8(_mm256_or_si256(first, second)) != 0;
}
inline void store_low_words(uint16_t *p, I x) {
  int32_t copy[16];
  store_i(copy, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(copy[i]);
}
// acc + the two bf16 products of each lane
inline F dot_bf16(F acc, I x, I y) {
  const I high = set_i(static_cast<int32_t>(0xFFFF0000u));
  acc = fma(as_float(shl<16>(x)), as_float(shl<16>(y)), acc);
  return fma(as_float(and_i(x, high)), as_float(and_i(y, high)), acc);
}
inline void prefetch(const void *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }
inline void prefetch_to_l2(const void *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }
// Prefetches a line for writing. Without -mprfchw GCC turns __builtin_prefetch(p, 1) into a prefetch for reading.
inline void prefetch_to_write(const void *p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char *>(p))); }

}  // namespace
