// Hashes of what each operation of one simd_*.h (SIMD_HEADER) makes of random vectors, extremes among them.
#include SIMD_HEADER

#include <stdio.h>

namespace {

uint64_t hash = 1469598103934665603u;

void mix(const void *p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char *>(p)[i]) * 1099511628211u;
}
void mix(F x) {
  float lanes[16];
  store(lanes, x);
  // Which NaN it is, no result depends on.
  for (float &lane : lanes) lane = lane == lane ? lane : 1e30f;
  mix(lanes, sizeof lanes);
}
void mix_i(I x) {
  int32_t lanes[16];
  store_i(lanes, x);
  mix(lanes, sizeof lanes);
}

uint64_t state = 7;
uint32_t draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}
#if defined(__AVX512F__) || defined(OUTRIDER_EMULATED) || !defined(__AVX2__)
// What simd_avx2.h alone has.
I absolute_bytes(I x) {
  int8_t bytes[64];
  store_i(bytes, x);
  for (int8_t &byte : bytes) byte = static_cast<int8_t>(byte < 0 ? -byte : byte);
  return load_i(bytes);
}
I dot_signed(I acc, I, I x, I y) {
  int32_t lanes[16];
  int8_t left[64], right[64];
  store_i(lanes, acc), store_i(left, x), store_i(right, y);
  for (int i = 0; i < 64; ++i) lanes[i / 4] += left[i] * right[i];
  return load_i(lanes);
}
I add_short_products(I sums, I u8, I s8) {
  int16_t words[32];
  uint8_t left[64];
  int8_t right[64];
  store_i(words, sums), store_i(left, u8), store_i(right, s8);
  for (int i = 0; i < 64; ++i) words[i / 2] = static_cast<int16_t>(words[i / 2] + left[i] * right[i]);
  return load_i(words);
}
I positive_bytes(I x) {
  int8_t bytes[64];
  store_i(bytes, x);
  for (int8_t &byte : bytes) byte = byte < 0 ? int8_t{0} : byte;
  return load_i(bytes);
}
#endif
float draw_float(float scale) { return static_cast<float>(static_cast<int32_t>(draw())) * scale; }

}  // namespace

int main() {
  const float extremes[16] = {2147483648.0f, -2147483648.0f, 2147483520.0f, 0.5f, 1.5f, -0.5f, 2.5f, -0.0f};
  for (int round = 0; round < 2000; ++round) {
    uint32_t a[16], b[16], c[16], nibbles[16];
    float x[16], y[16], z[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = round == 0 ? 0x80008000u : draw();
      b[i] = round == 0 ? 0x80008000u : round == 1 ? 0xFFFFFFFFu : draw();
      c[i] = round == 1 ? 0x80808080u : draw();
      nibbles[i] = b[i] & 0x0F0F0F0Fu;
      x[i] = round == 0 ? extremes[i] : draw_float(round % 3 ? 1e-6f : 2.5f);
      y[i] = draw_float(1e-7f);
      z[i] = draw_float(1e-3f);
    }
    const I ia = load_i(a), ib = load_i(b), ic = load_i(c);
    const F fx = load(x), fy = load(y), fz = load(z);
    const int n = 1 + round % 16;

    I low, high;
    whole_product(ia, ib, &low, &high);
    mix_i(low);
    mix_i(high);
    mix_i(xor_i(ia, ib));
    mix_i(dot_words(ia, ib, ic));
    mix_i(dot_words(ic, ia, ib));
    mix_i(dot_bytes<8>(ia, ib, ic));
    mix_i(dot_bytes<4>(ia, load_i(nibbles), ic));
    const I factor = set_i((2 + round % 16) * 0x10001);
    mix_i(dot_products(ia, times_factor(load_i(nibbles), factor), ic, factor));
    mix(dot_bf16(fx, ia, ib));
    // Of eight pairs the most that is added up, and bytes other than -128.
    I sums = set_i(0);
    for (int i = 0; i < 8; ++i) sums = add_short_products(sums, load_i(nibbles), i % 2 ? ia : ic);
    mix_i(sums);
    mix_i(positive_bytes(ia));
    mix_i(dot_signed(ia, absolute_bytes(ic), ic, xor_i(and_i(ib, set_i(0x7E7E7E7E)), set_i(0x00FF00FF))));

    mix(add(fx, fy)), mix(sub(fx, fy)), mix(mul(fx, fy)), mix(div(fx, fy));
    mix(fma(fx, fy, fz)), mix(fnma(fx, fy, fz));
    mix(square_root(mul(fx, fx)));
    mix(maximum(fx, fy)), mix(minimum(fx, fz));
    mix(select(less(fx, fy), fx, fy)), mix(select(lanes_between(round % 5, n), fx, fy));

    mix_i(to_int(fx)), mix_i(to_int(mul(fx, fx)));
    mix(to_float(ia)), mix(as_float(as_int(fx)));
    mix_i(add_i(ia, ib)), mix_i(sub_i(ia, ib)), mix_i(and_i(ia, ib)), mix_i(or_i(ia, ib));
    mix_i(shl<5>(ia)), mix_i(shr<5>(ia)), mix_i(set_i(round)), mix(set(x[0]));

    mix(load_bf16(reinterpret_cast<const uint16_t *>(a)));
    mix_i(words_of(reinterpret_cast<const int8_t *>(a)));
    mix(load_n(x, n));
    float floats[16] = {};
    int8_t bytes[16];
    uint16_t words[16];
    store_n(floats, fx, n);
    store_bytes(bytes, ia);
    store_low_words(words, ia);
    mix(floats, sizeof floats), mix(bytes, sizeof bytes), mix(words, sizeof words);
  }
  printf("%016llx\n", static_cast<unsigned long long>(hash));
}
