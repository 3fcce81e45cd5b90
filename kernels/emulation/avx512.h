// The intrinsics of AVX-512 that the kernels use, computed by AVX2 or in plain C++: with -DOUTRIDER_EMULATE=ON the units of AVX-512 include
// this first, so that their code runs, and can be tested, on a machine without. They give the bits that the instructions give; only which
// NaN comes out is not looked after. An intrinsic that is not here does not compile: add it.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define OUTRIDER_EMULATED
#ifdef OUTRIDER_EMULATED_BF16  // with the instructions that a unit asks for by these names
  #define __AVX512BF16__ 1
  #define __AVX512VBMI__ 1
#endif

namespace outrider_emulated {

// Sixty-four bytes as lanes of T, to be read and written one by one.
template <class T> struct Lanes {
  static constexpr int kCount = 64 / sizeof(T);
  T of[kCount];
};

template <class T, class V> inline Lanes<T> lanes(const V &x) {
  static_assert(sizeof(V) == 64, "a whole register");
  Lanes<T> out;
  memcpy(&out, &x, 64);
  return out;
}

template <class V, class T> inline V packed(const Lanes<T> &x) {
  V out;
  memcpy(&out, &x, 64);
  return out;
}

template <class T, class Each> inline __m512i each(Each value) {
  Lanes<T> out;
  for (int i = 0; i < Lanes<T>::kCount; ++i) out.of[i] = static_cast<T>(value(i));
  return packed<__m512i>(out);
}

// Half 0 or 1 of a register; and a register of two halves.
template <class Half, class V> inline Half half(const V &x, int which) {
  Half out;
  memcpy(&out, reinterpret_cast<const char *>(&x) + 32 * which, 32);
  return out;
}

template <class V, class Half> inline V joined(Half low, Half high) {
  V out;
  memcpy(&out, &low, 32);
  memcpy(reinterpret_cast<char *>(&out) + 32, &high, 32);
  return out;
}

// What an instruction leaves undefined, so that nobody relies on its being zero.
inline __m512i undefined() {
  return each<uint8_t>([](int) { return 0xA5; });
}

template <class V> inline V load(const void *p) {
  V out;
  memcpy(&out, p, sizeof out);
  return out;
}

// Reads the chosen lanes alone; the others are zero.
template <class V> inline V load_some(__mmask16 mask, const void *p) {
  Lanes<uint32_t> out = {};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) memcpy(&out.of[i], static_cast<const char *>(p) + 4 * i, 4);
  return packed<V>(out);
}

template <class V> inline void store_some(void *p, __mmask16 mask, const V &x) {
  const auto from = lanes<uint32_t>(x);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) memcpy(static_cast<char *>(p) + 4 * i, &from.of[i], 4);
}

// The compiler's operators on whole registers, of which it makes two of AVX2's; the others are functions, or a unit would take a quarter of
// an hour to compile.
#define OUTRIDER_INLINE __attribute__((always_inline)) inline
#define OUTRIDER_CALLED __attribute__((noinline)) inline
using Bytes = uint8_t __attribute__((vector_size(64)));
using Words16 = uint16_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using SignedWords = int32_t __attribute__((vector_size(64)));
using Longs = uint64_t __attribute__((vector_size(64)));

#define OUTRIDER_OPERATOR(NAME, REGISTER, LANES, OPERATOR) \
  OUTRIDER_INLINE REGISTER NAME(REGISTER a, REGISTER b) { return (REGISTER)((LANES)a OPERATOR(LANES) b); }
#define OUTRIDER_SHIFT(NAME, LANES, OPERATOR) \
  template <int BY> OUTRIDER_INLINE __m512i NAME(__m512i a) { return (__m512i)((LANES)a OPERATOR BY); }
#define OUTRIDER_BY_HALVES(NAME, AVX2)                                                                                 \
  OUTRIDER_INLINE __m512 NAME(__m512 a, __m512 b) {                                                                    \
    return joined<__m512>(AVX2(half<__m256>(a, 0), half<__m256>(b, 0)), AVX2(half<__m256>(a, 1), half<__m256>(b, 1))); \
  }

// Floats
OUTRIDER_OPERATOR(add_ps, __m512, __m512, +)
OUTRIDER_OPERATOR(sub_ps, __m512, __m512, -)
OUTRIDER_OPERATOR(mul_ps, __m512, __m512, *)
OUTRIDER_OPERATOR(div_ps, __m512, __m512, /)
OUTRIDER_BY_HALVES(max_ps, _mm256_max_ps)
OUTRIDER_BY_HALVES(min_ps, _mm256_min_ps)
OUTRIDER_INLINE __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return joined<__m512>(_mm256_fmadd_ps(half<__m256>(a, 0), half<__m256>(b, 0), half<__m256>(c, 0)),
                        _mm256_fmadd_ps(half<__m256>(a, 1), half<__m256>(b, 1), half<__m256>(c, 1)));
}
OUTRIDER_INLINE __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return joined<__m512>(_mm256_fnmadd_ps(half<__m256>(a, 0), half<__m256>(b, 0), half<__m256>(c, 0)),
                        _mm256_fnmadd_ps(half<__m256>(a, 1), half<__m256>(b, 1), half<__m256>(c, 1)));
}
OUTRIDER_INLINE __m512 sqrt_ps(__m512 a) {
  return joined<__m512>(_mm256_sqrt_ps(half<__m256>(a, 0)), _mm256_sqrt_ps(half<__m256>(a, 1)));
}
OUTRIDER_INLINE __m512 set1_ps(float x) { return joined<__m512>(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
template <int HOW> OUTRIDER_CALLED __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(half<__m256>(a, 0), half<__m256>(b, 0), HOW));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(half<__m256>(a, 1), half<__m256>(b, 1), HOW));
  return static_cast<__mmask16>(low | high << 8);
}
OUTRIDER_CALLED __m512 mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
  const auto a = lanes<float>(no), b = lanes<float>(yes);
  Lanes<float> out;
  for (int i = 0; i < 16; ++i) out.of[i] = mask >> i & 1 ? b.of[i] : a.of[i];
  return packed<__m512>(out);
}
template <int WHICH> OUTRIDER_CALLED __m256 extractf32x8_ps(__m512 a) { return half<__m256>(a, WHICH); }
OUTRIDER_INLINE __m256 castps512_ps256(__m512 a) { return half<__m256>(a, 0); }
OUTRIDER_INLINE __m512i castps_si512(__m512 a) { return (__m512i)a; }
OUTRIDER_INLINE __m512 castsi512_ps(__m512i a) { return (__m512)a; }

// Conversions
OUTRIDER_INLINE __m512i cvtps_epi32(__m512 a) {
  return joined<__m512i>(_mm256_cvtps_epi32(half<__m256>(a, 0)), _mm256_cvtps_epi32(half<__m256>(a, 1)));
}
OUTRIDER_INLINE __m512 cvtepi32_ps(__m512i a) {
  return joined<__m512>(_mm256_cvtepi32_ps(half<__m256i>(a, 0)), _mm256_cvtepi32_ps(half<__m256i>(a, 1)));
}
OUTRIDER_CALLED __m512 cvtph_ps(__m256i a) {
  return joined<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
OUTRIDER_CALLED __m512i cvtepi8_epi16(__m256i a) {
  return joined<__m512i>(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)),
                         _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1)));
}
OUTRIDER_CALLED __m512i cvtepu16_epi32(__m256i a) {
  return joined<__m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                         _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
OUTRIDER_CALLED __m256i cvtepi32_epi16(__m512i a) {
  const auto from = lanes<int32_t>(a);
  int16_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int16_t>(from.of[i]);
  return load<__m256i>(out);
}
OUTRIDER_CALLED __m128i cvtepi32_epi8(__m512i a) {
  const auto from = lanes<int32_t>(a);
  int8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(from.of[i]);
  return load<__m128i>(out);
}

// Integers
OUTRIDER_OPERATOR(add_epi8, __m512i, Bytes, +)
OUTRIDER_OPERATOR(sub_epi8, __m512i, Bytes, -)
OUTRIDER_OPERATOR(add_epi16, __m512i, Words16, +)
OUTRIDER_OPERATOR(mullo_epi16, __m512i, Words16, *)
OUTRIDER_OPERATOR(add_epi32, __m512i, Words, +)
OUTRIDER_OPERATOR(sub_epi32, __m512i, Words, -)
OUTRIDER_OPERATOR(mullo_epi32, __m512i, Words, *)
OUTRIDER_INLINE __m512i mul_epu32(__m512i a, __m512i b) {
  return (__m512i)(((Longs)a & 0xFFFFFFFFu) * ((Longs)b & 0xFFFFFFFFu));
}
OUTRIDER_OPERATOR(and_si512, __m512i, Longs, &)
OUTRIDER_OPERATOR(or_si512, __m512i, Longs, |)
OUTRIDER_OPERATOR(xor_si512, __m512i, Longs, ^)
OUTRIDER_CALLED __m512i ternarylogic_epi32(__m512i first, __m512i second, __m512i third, int table) {
  const auto a = lanes<uint64_t>(first), b = lanes<uint64_t>(second), c = lanes<uint64_t>(third);
  return each<uint64_t>([&](int i) {
    uint64_t out = 0;
    for (int which = 0; which < 8; ++which) {
      if (!(table >> which & 1)) continue;
      out |= (which & 4 ? a.of[i] : ~a.of[i]) & (which & 2 ? b.of[i] : ~b.of[i]) & (which & 1 ? c.of[i] : ~c.of[i]);
    }
    return out;
  });
}
OUTRIDER_SHIFT(slli_epi32, Words, <<)
OUTRIDER_SHIFT(srli_epi32, Words, >>)
OUTRIDER_SHIFT(srai_epi32, SignedWords, >>)
OUTRIDER_CALLED __m512i srai_epi16(__m512i x, unsigned by) {
  const auto a = lanes<int16_t>(x);
  return each<int16_t>([&](int i) { return a.of[i] >> (by > 15 ? 15 : by); });
}
OUTRIDER_SHIFT(srli_epi64, Longs, >>)
OUTRIDER_INLINE __m256i castsi512_si256(__m512i a) { return half<__m256i>(a, 0); }
template <int WHICH> OUTRIDER_CALLED __m256i extracti64x4_epi64(__m512i a) { return half<__m256i>(a, WHICH); }
OUTRIDER_CALLED __mmask16 cmpeq_epi32_mask(__m512i first, __m512i second) {
  const auto a = lanes<uint32_t>(first), b = lanes<uint32_t>(second);
  unsigned out = 0;
  for (int i = 0; i < 16; ++i) out |= unsigned{a.of[i] == b.of[i]} << i;
  return static_cast<__mmask16>(out);
}
OUTRIDER_CALLED __mmask64 testn_epi8_mask(__m512i first, __m512i second) {
  const auto a = lanes<uint8_t>(first), b = lanes<uint8_t>(second);
  uint64_t out = 0;
  for (int i = 0; i < 64; ++i) out |= uint64_t{(a.of[i] & b.of[i]) == 0} << i;
  return out;
}

// Setting
OUTRIDER_INLINE __m512i set1_epi8(char x) { return (__m512i)(Bytes{} + static_cast<uint8_t>(x)); }
OUTRIDER_INLINE __m512i set1_epi16(short x) { return (__m512i)(Words16{} + static_cast<uint16_t>(x)); }
OUTRIDER_INLINE __m512i set1_epi32(int x) { return (__m512i)(Words{} + static_cast<uint32_t>(x)); }
template <class... Rest> OUTRIDER_CALLED __m512i setr_epi32(Rest... values) {
  static_assert(sizeof...(values) == 16, "one for each lane");
  const Lanes<int32_t> out = {{values...}};
  return packed<__m512i>(out);
}
template <class... Rest> OUTRIDER_CALLED __m512i set_epi32(Rest... values) {
  static_assert(sizeof...(values) == 16, "one for each lane");
  const int32_t last_first[16] = {values...};
  return each<int32_t>([&](int i) { return last_first[15 - i]; });
}
OUTRIDER_CALLED __m512i set4_epi32(int d, int c, int b, int a) {
  return setr_epi32(a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d);
}
OUTRIDER_CALLED __m512i broadcast_i32x4(__m128i x) {
  int32_t four[4];
  memcpy(four, &x, 16);
  return each<int32_t>([&](int i) { return four[i % 4]; });
}
OUTRIDER_INLINE __m512i castsi128_si512(__m128i x) {
  __m512i out = undefined();
  memcpy(&out, &x, 16);
  return out;
}

// Memory
OUTRIDER_INLINE __m512 loadu_ps(const void *p) { return load<__m512>(p); }
OUTRIDER_INLINE __m512i loadu_si512(const void *p) { return load<__m512i>(p); }
OUTRIDER_CALLED __m512 maskz_loadu_ps(__mmask16 mask, const void *p) { return load_some<__m512>(mask, p); }
OUTRIDER_CALLED __m512i maskz_loadu_epi32(__mmask16 mask, const void *p) { return load_some<__m512i>(mask, p); }
OUTRIDER_INLINE void storeu_ps(void *p, __m512 x) { memcpy(p, &x, 64); }
OUTRIDER_INLINE void storeu_si512(void *p, __m512i x) { memcpy(p, &x, 64); }
OUTRIDER_CALLED void mask_storeu_ps(void *p, __mmask16 mask, __m512 x) { store_some(p, mask, x); }
OUTRIDER_CALLED void mask_storeu_epi32(void *p, __mmask16 mask, __m512i x) { store_some(p, mask, x); }

// Places
OUTRIDER_CALLED __m512i mask_mov_epi8(__m512i source, __mmask64 mask, __m512i x) {
  const auto no = lanes<uint8_t>(source), yes = lanes<uint8_t>(x);
  return each<uint8_t>([&](int i) { return mask >> i & 1 ? yes.of[i] : no.of[i]; });
}
OUTRIDER_CALLED __m512i shuffle_epi8(__m512i x, __m512i order) {
  const auto a = lanes<uint8_t>(x), at = lanes<uint8_t>(order);
  return each<uint8_t>([&](int i) { return at.of[i] & 0x80 ? 0 : a.of[i / 16 * 16 + (at.of[i] & 15)]; });
}
OUTRIDER_CALLED __m512i mask_shuffle_epi8(__m512i source, __mmask64 mask, __m512i x, __m512i order) {
  return mask_mov_epi8(source, mask, shuffle_epi8(x, order));
}
OUTRIDER_CALLED __m512i maskz_shuffle_epi8(__mmask64 mask, __m512i x, __m512i order) {
  return mask_mov_epi8(each<uint8_t>([](int) { return 0; }), mask, shuffle_epi8(x, order));
}
OUTRIDER_CALLED __m512i mask_shuffle_epi32(__m512i source, __mmask16 mask, __m512i x, int order) {
  const auto no = lanes<uint32_t>(source), yes = lanes<uint32_t>(x);
  return each<uint32_t>([&](int i) { return mask >> i & 1 ? yes.of[i / 4 * 4 + (order >> 2 * (i % 4) & 3)] : no.of[i]; });
}
// Two quarters of the first, then two of the second.
OUTRIDER_CALLED __m512i shuffle_i32x4(__m512i first, __m512i second, int order) {
  const auto a = lanes<uint32_t>(first), b = lanes<uint32_t>(second);
  return each<uint32_t>([&](int i) { return (i < 8 ? a : b).of[(order >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
OUTRIDER_CALLED __m512i permutexvar_epi32(__m512i order, __m512i x) {
  const auto a = lanes<uint32_t>(x), at = lanes<uint32_t>(order);
  return each<uint32_t>([&](int i) { return a.of[at.of[i] & 15]; });
}
OUTRIDER_CALLED __m512i permutexvar_epi16(__m512i order, __m512i x) {
  const auto a = lanes<uint16_t>(x), at = lanes<uint16_t>(order);
  return each<uint16_t>([&](int i) { return a.of[at.of[i] & 31]; });
}
OUTRIDER_CALLED __m512i permutex2var_epi8(__m512i first, __m512i order, __m512i second) {
  const auto a = lanes<uint8_t>(first), b = lanes<uint8_t>(second), at = lanes<uint8_t>(order);
  return each<uint8_t>([&](int i) { return (at.of[i] & 64 ? b : a).of[at.of[i] & 63]; });
}
OUTRIDER_CALLED __m512i unpacklo_epi8(__m512i first, __m512i second) {
  const auto a = lanes<uint8_t>(first), b = lanes<uint8_t>(second);
  return each<uint8_t>([&](int i) { return (i % 2 ? b : a).of[i / 16 * 16 + i % 16 / 2]; });
}
OUTRIDER_CALLED __m512i unpackhi_epi8(__m512i first, __m512i second) {
  const auto a = lanes<uint8_t>(first), b = lanes<uint8_t>(second);
  return each<uint8_t>([&](int i) { return (i % 2 ? b : a).of[i / 16 * 16 + 8 + i % 16 / 2]; });
}

// VNNI
OUTRIDER_CALLED __m512i dpbusd_epi32(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  const auto acc = lanes<uint32_t>(sums);
  const auto a = lanes<uint8_t>(unsigned_bytes);
  const auto b = lanes<int8_t>(signed_bytes);
  return each<uint32_t>([&](int i) {
    int32_t sum = 0;
    for (int k = 4 * i; k < 4 * i + 4; ++k) sum += a.of[k] * b.of[k];
    return acc.of[i] + static_cast<uint32_t>(sum);
  });
}
OUTRIDER_CALLED __m512i dpwssd_epi32(__m512i sums, __m512i first, __m512i second) {
  const auto acc = lanes<uint32_t>(sums);
  const auto a = lanes<int16_t>(first), b = lanes<int16_t>(second);
  return each<uint32_t>([&](int i) {
    return acc.of[i] + static_cast<uint32_t>(a.of[2 * i] * b.of[2 * i]) +
           static_cast<uint32_t>(a.of[2 * i + 1] * b.of[2 * i + 1]);
  });
}

// BF16. These instructions round to nearest and take subnormal numbers for zeros, whatever the control register says.
struct NearestWithoutSubnormals {
  NearestWithoutSubnormals() { _mm_setcsr((before & ~0x6000u) | 0x8040u); }
  ~NearestWithoutSubnormals() { _mm_setcsr(before); }
  NearestWithoutSubnormals(const NearestWithoutSubnormals &) = delete;
  NearestWithoutSubnormals &operator=(const NearestWithoutSubnormals &) = delete;
  const unsigned before = _mm_getcsr();
};
// The same number, which the compiler takes from memory: so the operations on it stay between the changes of the control register.
OUTRIDER_CALLED __m512 seen(__m512 x) {
  volatile float of[16];
  for (int i = 0; i < 16; ++i) of[i] = lanes<float>(x).of[i];
  Lanes<float> out;
  for (int i = 0; i < 16; ++i) out.of[i] = of[i];
  return packed<__m512>(out);
}
OUTRIDER_CALLED __m512 upper_halves(__m512 pairs) {
  return castsi512_ps(and_si512(castps_si512(pairs), set1_epi32(static_cast<int>(0xFFFF0000u))));
}
OUTRIDER_CALLED __m512 lower_halves(__m512 pairs) { return castsi512_ps(slli_epi32<16>(castps_si512(pairs))); }
// The odd products first, as the manual has it.
OUTRIDER_CALLED __m512 dpbf16_ps(__m512 sums, __m512bh first, __m512bh second) {
  const __m512 a = load<__m512>(&first), b = load<__m512>(&second);
  const NearestWithoutSubnormals mode;
  const __m512 odd = seen(fmadd_ps(upper_halves(a), upper_halves(b), seen(sums)));
  return seen(fmadd_ps(lower_halves(a), lower_halves(b), odd));
}
OUTRIDER_CALLED uint16_t nearest_bf16_of(uint32_t bits) {
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude < 0x00800000) return static_cast<uint16_t>(sign);
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
OUTRIDER_CALLED __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  const auto high = lanes<uint32_t>(upper), low = lanes<uint32_t>(lower);
  const __m512i out = each<uint16_t>([&](int i) { return nearest_bf16_of(i < 16 ? low.of[i] : high.of[i - 16]); });
  return load<__m512bh>(&out);
}

#undef OUTRIDER_BY_HALVES
#undef OUTRIDER_OPERATOR
#undef OUTRIDER_SHIFT

}  // namespace outrider_emulated

// GCC's headers, without optimisation, have these as macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_mask_shuffle_epi32
#undef _mm512_set4_epi32
#undef _mm512_set_epi32
#undef _mm512_setr_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_srai_epi16
#undef _mm512_srai_epi32
#undef _mm512_srli_epi32
#undef _mm512_srli_epi64
#undef _mm512_ternarylogic_epi32
#define _mm512_add_epi16 outrider_emulated::add_epi16
#define _mm512_add_epi32 outrider_emulated::add_epi32
#define _mm512_add_epi8 outrider_emulated::add_epi8
#define _mm512_add_ps outrider_emulated::add_ps
#define _mm512_and_si512 outrider_emulated::and_si512
#define _mm512_broadcast_i32x4 outrider_emulated::broadcast_i32x4
#define _mm512_castps512_ps256 outrider_emulated::castps512_ps256
#define _mm512_castps_si512 outrider_emulated::castps_si512
#define _mm512_castsi128_si512 outrider_emulated::castsi128_si512
#define _mm512_castsi512_ps outrider_emulated::castsi512_ps
#define _mm512_castsi512_si256 outrider_emulated::castsi512_si256
#define _mm512_cmp_ps_mask(A, B, HOW) outrider_emulated::cmp_ps_mask<HOW>(A, B)
#define _mm512_cmpeq_epi32_mask outrider_emulated::cmpeq_epi32_mask
#define _mm512_cvtepi32_epi16 outrider_emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 outrider_emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps outrider_emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi16 outrider_emulated::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 outrider_emulated::cvtepu16_epi32
#define _mm512_cvtne2ps_pbh outrider_emulated::cvtne2ps_pbh
#define _mm512_cvtph_ps outrider_emulated::cvtph_ps
#define _mm512_cvtps_epi32 outrider_emulated::cvtps_epi32
#define _mm512_div_ps outrider_emulated::div_ps
#define _mm512_dpbf16_ps outrider_emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 outrider_emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 outrider_emulated::dpwssd_epi32
#define _mm512_extractf32x8_ps(A, WHICH) outrider_emulated::extractf32x8_ps<WHICH>(A)
#define _mm512_extracti64x4_epi64(A, WHICH) outrider_emulated::extracti64x4_epi64<WHICH>(A)
#define _mm512_fmadd_ps outrider_emulated::fmadd_ps
#define _mm512_fnmadd_ps outrider_emulated::fnmadd_ps
#define _mm512_loadu_ps outrider_emulated::loadu_ps
#define _mm512_loadu_si512 outrider_emulated::loadu_si512
#define _mm512_mask_blend_ps outrider_emulated::mask_blend_ps
#define _mm512_mask_mov_epi8 outrider_emulated::mask_mov_epi8
#define _mm512_mask_shuffle_epi32 outrider_emulated::mask_shuffle_epi32
#define _mm512_mask_shuffle_epi8 outrider_emulated::mask_shuffle_epi8
#define _mm512_mask_storeu_epi32 outrider_emulated::mask_storeu_epi32
#define _mm512_mask_storeu_ps outrider_emulated::mask_storeu_ps
#define _mm512_maskz_loadu_epi32 outrider_emulated::maskz_loadu_epi32
#define _mm512_maskz_loadu_ps outrider_emulated::maskz_loadu_ps
#define _mm512_maskz_shuffle_epi8 outrider_emulated::maskz_shuffle_epi8
#define _mm512_max_ps outrider_emulated::max_ps
#define _mm512_min_ps outrider_emulated::min_ps
#define _mm512_mul_epu32 outrider_emulated::mul_epu32
#define _mm512_mul_ps outrider_emulated::mul_ps
#define _mm512_mullo_epi16 outrider_emulated::mullo_epi16
#define _mm512_mullo_epi32 outrider_emulated::mullo_epi32
#define _mm512_or_si512 outrider_emulated::or_si512
#define _mm512_permutex2var_epi8 outrider_emulated::permutex2var_epi8
#define _mm512_permutexvar_epi16 outrider_emulated::permutexvar_epi16
#define _mm512_permutexvar_epi32 outrider_emulated::permutexvar_epi32
#define _mm512_set1_epi16 outrider_emulated::set1_epi16
#define _mm512_set1_epi32 outrider_emulated::set1_epi32
#define _mm512_set1_epi8 outrider_emulated::set1_epi8
#define _mm512_set1_ps outrider_emulated::set1_ps
#define _mm512_set4_epi32 outrider_emulated::set4_epi32
#define _mm512_set_epi32 outrider_emulated::set_epi32
#define _mm512_setr_epi32 outrider_emulated::setr_epi32
#define _mm512_shuffle_epi8 outrider_emulated::shuffle_epi8
#define _mm512_shuffle_i32x4 outrider_emulated::shuffle_i32x4
#define _mm512_slli_epi32(A, BY) outrider_emulated::slli_epi32<BY>(A)
#define _mm512_sqrt_ps outrider_emulated::sqrt_ps
#define _mm512_srai_epi16 outrider_emulated::srai_epi16
#define _mm512_srai_epi32(A, BY) outrider_emulated::srai_epi32<BY>(A)
#define _mm512_srli_epi32(A, BY) outrider_emulated::srli_epi32<BY>(A)
#define _mm512_srli_epi64(A, BY) outrider_emulated::srli_epi64<BY>(A)
#define _mm512_storeu_ps outrider_emulated::storeu_ps
#define _mm512_storeu_si512 outrider_emulated::storeu_si512
#define _mm512_sub_epi32 outrider_emulated::sub_epi32
#define _mm512_sub_epi8 outrider_emulated::sub_epi8
#define _mm512_sub_ps outrider_emulated::sub_ps
#define _mm512_ternarylogic_epi32 outrider_emulated::ternarylogic_epi32
#define _mm512_testn_epi8_mask outrider_emulated::testn_epi8_mask
#define _mm512_unpackhi_epi8 outrider_emulated::unpackhi_epi8
#define _mm512_unpacklo_epi8 outrider_emulated::unpacklo_epi8
#define _mm512_xor_si512 outrider_emulated::xor_si512
