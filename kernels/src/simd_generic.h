// Sixteen lanes in plain C++, right on any machine. The three simd_*.h offer the same names and the same results, bit for bit.
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F { float x[16]; };
struct I { int32_t x[16]; };
struct Mask { bool x[16]; };

template <typename Result, typename Function> inline Result each(Function function) {
  Result result;
  for (int i = 0; i < 16; ++i) result.x[i] = function(i);
  return result;
}
inline uint32_t bits(int32_t x) { return static_cast<uint32_t>(x); }

inline F set(float x) { return each<F>([=](int) { return x; }); }
inline F load(const float *p) { return each<F>([=](int i) { return p[i]; }); }
inline F load_n(const float *p, int n) { return each<F>([=](int i) { return i < n ? p[i] : 0.0f; }); }
inline void store(float *p, F x) { memcpy(p, x.x, sizeof x.x); }
inline void store_n(float *p, F x, int n) { memcpy(p, x.x, sizeof(float) * static_cast<size_t>(n < 16 ? n : 16)); }
inline F add(F a, F b) { return each<F>([&](int i) { return a.x[i] + b.x[i]; }); }
inline F sub(F a, F b) { return each<F>([&](int i) { return a.x[i] - b.x[i]; }); }
inline F mul(F a, F b) { return each<F>([&](int i) { return a.x[i] * b.x[i]; }); }
inline F div(F a, F b) { return each<F>([&](int i) { return a.x[i] / b.x[i]; }); }
inline F fma(F a, F b, F c) { return each<F>([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); }); }
inline F fnma(F a, F b, F c) { return each<F>([&](int i) { return __builtin_fmaf(-a.x[i], b.x[i], c.x[i]); }); }
inline F square_root(F a) { return each<F>([&](int i) { return __builtin_sqrtf(a.x[i]); }); }
inline F maximum(F a, F b) { return each<F>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
inline F minimum(F a, F b) { return each<F>([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
inline Mask less(F a, F b) { return each<Mask>([&](int i) { return a.x[i] < b.x[i]; }); }
inline F select(Mask m, F yes, F no) { return each<F>([&](int i) { return m.x[i] ? yes.x[i] : no.x[i]; }); }
inline Mask lanes_between(int low, int high) { return each<Mask>([=](int i) { return i >= low && i < high; }); }

inline I set_i(int32_t x) { return each<I>([=](int) { return x; }); }
inline I load_i(const void *p) { I r; memcpy(r.x, p, sizeof r.x); return r; }
inline void store_i(void *p, I x) { memcpy(p, x.x, sizeof x.x); }
inline I add_i(I a, I b) { return each<I>([&](int i) { return static_cast<int32_t>(bits(a.x[i]) + bits(b.x[i])); }); }
inline I sub_i(I a, I b) { return each<I>([&](int i) { return static_cast<int32_t>(bits(a.x[i]) - bits(b.x[i])); }); }
inline I and_i(I a, I b) { return each<I>([&](int i) { return a.x[i] & b.x[i]; }); }
inline I or_i(I a, I b) { return each<I>([&](int i) { return a.x[i] | b.x[i]; }); }
template <int N> inline I shl(I a) { return each<I>([&](int i) { return static_cast<int32_t>(bits(a.x[i]) << N); }); }
template <int N> inline I shr(I a) { return each<I>([&](int i) { return static_cast<int32_t>(bits(a.x[i]) >> N); }); }
// To nearest, ties to even, and the same answer as the vector instruction where the result does not fit.
inline I to_int(F a) {
  return each<I>([&](int i) {
    const float x = a.x[i];
    return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(__builtin_rintf(x)) : INT32_MIN;
  });
}
inline F to_float(I a) { return each<F>([&](int i) { return static_cast<float>(a.x[i]); }); }
inline I as_int(F a) { I r; memcpy(r.x, a.x, sizeof r.x); return r; }
inline F as_float(I a) { F r; memcpy(r.x, a.x, sizeof r.x); return r; }

// acc + the sum over each lane's four bytes of u8 * s8
template <int BITS> inline I dot_bytes(I acc, I u8, I s8) {
  return each<I>([&](int i) {
    int32_t sum = acc.x[i];
    for (int shift = 0; shift < 32; shift += 8) {
      const int32_t unsigned_byte = static_cast<int32_t>((bits(u8.x[i]) >> shift) & 255u);
      sum += unsigned_byte * static_cast<int8_t>((bits(s8.x[i]) >> shift) & 255u);
    }
    return sum;
  });
}
// acc + the sum over each lane's two int16 of a * b
inline I dot_words(I acc, I a, I b) {
  return each<I>([&](int i) {
    const int32_t low = static_cast<int16_t>(bits(a.x[i]) & 0xFFFFu) * static_cast<int16_t>(bits(b.x[i]) & 0xFFFFu);
    const int32_t high = static_cast<int16_t>(bits(a.x[i]) >> 16) * static_cast<int16_t>(bits(b.x[i]) >> 16);
    return acc.x[i] + low + high;
  });
}
inline void store_bytes(int8_t *p, I x) { for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.x[i]); }

inline F load_bf16(const uint16_t *p) {
  return as_float(each<I>([=](int i) { return static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16); }));
}
inline F load_bytes(const int8_t *p) { return each<F>([=](int i) { return static_cast<float>(p[i]); }); }
inline void store_low_words(uint16_t *p, I x) { for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(x.x[i]); }
// acc + the two bf16 products of each lane
inline F dot_bf16(F acc, I a, I b) {
  const I high = set_i(static_cast<int32_t>(0xFFFF0000u));
  acc = fma(as_float(shl<16>(a)), as_float(shl<16>(b)), acc);
  return fma(as_float(and_i(a, high)), as_float(and_i(b, high)), acc);
}
inline void prefetch(const void *) {}
inline void prefetch_second(const void *) {}

}  // namespace
