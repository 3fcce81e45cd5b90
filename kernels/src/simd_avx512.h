// Sixteen lanes in one AVX-512 register. The three simd_*.h define the same functions, with the same results bit for bit.
#include <immintrin.h>
#include <stdint.h>

namespace {

using F = __m512;
using I = __m512i;
// The number of accumulators that fit into registers beside the operands.
constexpr int kSumsKept = 16;
// Tokens whose int8 values are interleaved in the KV cache, so that one instruction multiplies all of them by their weights.
constexpr int kValuesTogether = 4;
using Mask = __mmask16;

inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F load_n(const float *p, int n) { return n >= 16 ? load(p) : _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline void store_n(float *p, F x, int n) {
  if (n >= 16) store(p, x);
  else _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F square_root(F a) { return _mm512_sqrt_ps(a); }
inline F maximum(F a, F b) { return _mm512_max_ps(a, b); }
inline F minimum(F a, F b) { return _mm512_min_ps(a, b); }
inline Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask lanes_between(int low, int high) {
  return static_cast<__mmask16>((high >= 16 ? 0xFFFFu : (1u << high) - 1) & ~((1u << low) - 1));
}

// The lanes whose bits are set.
inline Mask lanes_of(uint32_t bits) { return static_cast<__mmask16>(bits); }

inline I set_i(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_i(const void *p) { return _mm512_loadu_si512(p); }
inline I load_i_n(const void *p, int n) { return n >= 16 ? load_i(p) : _mm512_maskz_loadu_epi32(first_lanes(n), p); }
inline void store_i(void *p, I x) { _mm512_storeu_si512(p, x); }
inline void store_i_n(void *p, I x, int n) { _mm512_mask_storeu_epi32(p, first_lanes(n), x); }
inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
inline I add_bytes(I a, I b) { return _mm512_add_epi8(a, b); }
inline I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I and_i(I a, I b) { return _mm512_and_si512(a, b); }
inline I or_i(I a, I b) { return _mm512_or_si512(a, b); }
inline I xor_i(I a, I b) { return _mm512_xor_si512(a, b); }
// The low and high 32 bits of a * b, for unsigned lanes.
inline void whole_product(I a, I b, I *low, I *high) {
  const __m512i even = _mm512_mul_epu32(a, b);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
  *high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
}
// a | (b & c)
inline I or_and(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0xF8); }
template <int N> inline I shl(I a) { return _mm512_slli_epi32(a, N); }
template <int N> inline I shr(I a) { return _mm512_srli_epi32(a, N); }
template <int N> inline I sar(I a) { return _mm512_srai_epi32(a, N); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I as_int(F a) { return _mm512_castps_si512(a); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }

// dot_bytes and dot_words are inline assembly, which accumulates in place: around the intrinsics GCC 12 copies every accumulator of a loop
// and spills some, which took a fifth of the time of eight rows. OUTRIDER_EMULATED: see kernels/emulation.

// acc + the sum over each lane's four bytes of u8 * s8
template <int BITS> inline I dot_bytes(I acc, I u8, I s8) {
#ifdef OUTRIDER_EMULATED
  return _mm512_dpbusd_epi32(acc, u8, s8);
#else
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
  return acc;
#endif
}
// The dot product of 4-bit codes with s8, times a factor of up to 17, which is in both 16-bit halves of each lane: `times_factor` once for
// all rows, then `dot_products` for each.
inline I times_factor(I codes, I factor) { return _mm512_mullo_epi16(codes, factor); }
inline I dot_products(I acc, I products, I s8, I) { return dot_bytes<8>(acc, products, s8); }
// acc + the sum over each lane's two int16 of a * b
inline I dot_words(I acc, I a, I b) {
#ifdef OUTRIDER_EMULATED
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#endif
}
inline void store_bytes(int8_t *p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(x)); }

inline F load_bf16(const uint16_t *p) {
  return as_float(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))));
}
// 32 signed bytes as 16-bit words
inline I words_of(const int8_t *p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
// Folds sixteen lanes in halves, in the same order as math.inc does for the other units.
#define OUTRIDER_FOLDS
inline float fold_add(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float fold_max(F x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// Not _mm512_reduce_add_epi32: in GCC's headers sums beyond 32 bits, as of NaNs converted to integers, are undefined.
inline int32_t fold_add_i(I x) {
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
// The sums of the quarters of x[0], x[1], x[2] and x[3], in this order.
inline I fold_quarters(const I *x) {
  const auto halves = [](I a, I b) { return add_i(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE)); };
  const I a = halves(x[0], x[1]), b = halves(x[2], x[3]);
  return add_i(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}
// Transposes the bytes of every four words: their first bytes, then their second bytes, and so on.
#define OUTRIDER_TURNS_FOURS
inline I turn_fours(I x) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
}
// Each of the four words at p, four times.
inline I each_four_times(const char *p) {
  const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

// The fp16 numbers in the low halves of the lanes.
inline F from_half(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
inline F load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
// For every byte, table[its lower four bits].
inline I look_up(const uint8_t *table, I x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), x);
}
// Sixteen floats, and for every lane the one that its lower four bits name.
using FloatTable = __m512i;
inline FloatTable load_table(const float *p) { return _mm512_loadu_si512(p); }
inline F look_up_floats(FloatTable table, I x) { return _mm512_castsi512_ps(_mm512_permutexvar_epi32(x, table)); }
// Whether some byte of x has none of the bits of the same byte of `bits`.
inline bool some_byte_lacks(I x, I bits) { return _mm512_testn_epi8_mask(x, bits) != 0; }
inline void store_low_words(uint16_t *p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(x));
}
// acc + the two bf16 products of each lane
inline F dot_bf16(F acc, I a, I b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const I high = set_i(static_cast<int32_t>(0xFFFF0000u));
  acc = _mm512_fmadd_ps(as_float(shl<16>(a)), as_float(shl<16>(b)), acc);
  return _mm512_fmadd_ps(as_float(and_i(a, high)), as_float(and_i(b, high)), acc);
#endif
}
#ifdef __AVX512BF16__
// Rounds to bf16, to nearest, ties to even: `lower` into the lower half of each lane, `upper` into the upper one. Only for normal numbers
// and zeros.
inline I nearest_bf16(F lower, F upper) {
  const I words = (I)_mm512_cvtne2ps_pbh(upper, lower);
  const I upper_words = _mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
  const I lower_words = sub_i(upper_words, set_i(16));
  return _mm512_permutexvar_epi16(or_i(lower_words, shl<16>(upper_words)), words);
}
#endif
inline void prefetch(const void *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }
inline void prefetch_to_l2(const void *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }
// Prefetches a line for writing. Without -mprfchw GCC turns __builtin_prefetch(p, 1) into a prefetch for reading.
inline void prefetch_to_write(const void *p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char *>(p))); }

}  // namespace
