// What this processor's units can do when nothing but arithmetic is asked of them: loops over registers, compiled for the machine
// at hand by peaks.py. Each returns how many products it has added up, so that the caller divides by the time that it took.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// Enough sums that none waits for the one before it, each in a register of its own: an array of them would go through memory.
#define SUMS 12
#define OF_EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
// FUNCTION(turns, out): turns times each sum = OPERATION(sum, factor).
#define PEAK(FUNCTION, TYPE, ONES, PRODUCTS, OPERATION)                       \
  int64_t FUNCTION(int64_t turns, void *out) {                                \
    const words ones = SET_WORDS(ONES);                                       \
    TYPE factor;                                                              \
    memcpy(&factor, &ones, sizeof factor);                                    \
    TYPE OF_EACH(DECLARE) last;                                               \
    OF_EACH(BEGIN)                                                            \
    for (int64_t turn = 0; turn < turns; ++turn) { OF_EACH(OPERATION) }       \
    OF_EACH(FINISH)                                                           \
    memcpy(out, &last, sizeof last);                                          \
    return turns * SUMS * (PRODUCTS);                                         \
  }
#define DECLARE(i) sum##i,
#define BEGIN(i) sum##i = factor;
// What the compiler cannot see through it neither hoists nor drops.
#define KEEP(i) __asm__ volatile("" : "+v"(sum##i));
#define FINISH(i) last = sum##i;

#if defined(__AVX512F__)
typedef __m512 floats;
typedef __m512i words;
#define SET_WORDS _mm512_set1_epi32
#define FMA(i) sum##i = _mm512_fmadd_ps(factor, factor, sum##i); KEEP(i)
#else
typedef __m256 floats;
typedef __m256i words;
#define SET_WORDS _mm256_set1_epi32
#define FMA(i) sum##i = _mm256_fmadd_ps(factor, factor, sum##i); KEEP(i)
#endif

PEAK(fma_products, floats, 0x3f800000, sizeof(floats) / 4, FMA)

// int8 in vectors; without instructions for it as the AVX2 unit multiplies codes of four bits, summed up in 16 bits.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define DOT(i) sum##i = _mm512_dpbusd_epi32(sum##i, factor, factor); KEEP(i)
PEAK(int8_products, words, 0x01010101, sizeof(words), DOT)
#elif defined(__AVXVNNI__)
#define DOT(i) sum##i = _mm256_dpbusd_avx_epi32(sum##i, factor, factor); KEEP(i)
PEAK(int8_products, words, 0x01010101, sizeof(words), DOT)
#else
// Of a factor that may have changed: else the product would be made once, before the loop.
#define DOT(i) __asm__ volatile("" : "+v"(factor)); \
  sum##i = _mm256_add_epi16(sum##i, _mm256_maddubs_epi16(factor, factor)); KEEP(i)
PEAK(int8_products, __m256i, 0x01010101, sizeof(__m256i), DOT)
#endif

#if defined(__AVX512BF16__)
#define DOT_BF16(i) sum##i = (__m512)_mm512_dpbf16_ps((__m512)sum##i, (__m512bh)factor, (__m512bh)factor); KEEP(i)
PEAK(bf16_products, floats, 0x3f803f80, 32, DOT_BF16)
#else
int64_t bf16_products(int64_t turns, void *out) { return fma_products(turns, out); }
#endif

#if defined(__AMX_INT8__)
// int8 in tiles, or (half as many) bf16; none where the system does not let this process have them.
int64_t amx_products(int64_t turns, void *out) {
  (void)out;
  const int request_permission = 0x1023, tile_data = 18;
  if (syscall(SYS_arch_prctl, request_permission, tile_data)) return 0;
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; ++i) config.columns[i] = 64, config.rows[i] = 16;
  // GCC's intrinsic says that it reads eight bytes of these 64, and the stores of the others would be left out.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  for (int64_t turn = 0; turn < turns; ++turn) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
  return turns * 4 * 16 * 16 * 64;
}
#else
int64_t amx_products(int64_t turns, void *out) {
  (void)turns;
  (void)out;
  return 0;
}
#endif
