// The tile registers of AMX, a set for each thread, and the intrinsics on them that the kernels use, in plain C++. What the processor refuses
// (a tile that is not configured, shapes that do not fit) ends the process with a sentence. See avx512.h.
#pragma once
#include "avx512.h"

#include <stdio.h>
#include <stdlib.h>

namespace outrider_emulated {

struct Tile {
  int rows, row_bytes;
  uint8_t of[16][64];

  template <class T> T at(int row, int column) const {
    T out;
    memcpy(&out, of[row] + column * sizeof(T), sizeof out);
    return out;
  }
  template <class T> void set(int row, int column, T value) { memcpy(of[row] + column * sizeof(T), &value, sizeof value); }
};

struct Tiles {
  bool configured;
  Tile of[8];
};

inline thread_local Tiles tiles = {};

inline void require(bool right, const char *what) {
  if (right) return;
  fprintf(stderr, "AMX, emulated: %s\n", what);
  abort();
}

inline Tile &tile(int which) {
  require(tiles.configured, "tiles are used before they are configured");
  require(which >= 0 && which < 8, "there are eight tiles");
  Tile &out = tiles.of[which];
  require(out.rows > 0 && out.row_bytes > 0, "a tile without rows is used");
  return out;
}

inline void clear(Tile *of) { memset(of->of, 0, sizeof of->of); }

inline void tile_loadconfig(const void *configuration) {
  uint8_t bytes[64];
  memcpy(bytes, configuration, 64);
  require(bytes[0] == 1 && bytes[1] == 0, "palette 1 and row 0 are expected");
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "a reserved byte is set");
  tiles.configured = true;
  for (int i = 0; i < 16; ++i) {
    const int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
    require(row_bytes <= (i < 8 ? 64 : 0) && rows <= (i < 8 ? 16 : 0), "a tile has up to 16 rows of up to 64 bytes");
    require((row_bytes == 0) == (rows == 0), "a tile has rows without bytes, or bytes without rows");
    if (i >= 8) continue;
    tiles.of[i].rows = rows;
    tiles.of[i].row_bytes = row_bytes;
    clear(&tiles.of[i]);
  }
}

inline void tile_release() { tiles = {}; }
inline void tile_zero(int which) { clear(&tile(which)); }

inline void tile_loadd(int which, const void *base, int64_t stride) {
  Tile &to = tile(which);
  clear(&to);
  for (int row = 0; row < to.rows; ++row) memcpy(to.of[row], static_cast<const char *>(base) + row * stride, to.row_bytes);
}

inline void tile_stored(int which, void *base, int64_t stride) {
  const Tile &from = tile(which);
  for (int row = 0; row < from.rows; ++row) memcpy(static_cast<char *>(base) + row * stride, from.of[row], from.row_bytes);
}

inline void require_shapes(const Tile &sums, const Tile &a, const Tile &b) {
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows,
          "the shapes of three tiles do not fit one another");
  require(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0, "a tile's rows are no whole words");
}

template <class A, class B> inline void dot_bytes_of_tiles(int which_sums, int which_a, int which_b) {
  Tile &sums = tile(which_sums);
  const Tile &a = tile(which_a), &b = tile(which_b);
  require_shapes(sums, a, b);
  for (int row = 0; row < sums.rows; ++row) {
    for (int column = 0; column < sums.row_bytes / 4; ++column) {
      uint32_t sum = sums.at<uint32_t>(row, column);
      for (int k = 0; k < a.row_bytes; ++k)
        sum += static_cast<uint32_t>(a.at<A>(row, k) * b.at<B>(k / 4, 4 * column + k % 4));
      sums.set(row, column, sum);
    }
  }
}

inline void tile_dpbssd(int sums, int a, int b) { dot_bytes_of_tiles<int8_t, int8_t>(sums, a, b); }
inline void tile_dpbsud(int sums, int a, int b) { dot_bytes_of_tiles<int8_t, uint8_t>(sums, a, b); }

// In a product the even and the odd channels are summed separately by fused multiply-adds, from zero; the two sums are added, and the result
// is added to what was there.
inline void tile_dpbf16ps(int which_sums, int which_a, int which_b) {
  Tile &sums = tile(which_sums);
  const Tile &a = tile(which_a), &b = tile(which_b);
  require_shapes(sums, a, b);
  const NearestWithoutSubnormals mode;
  for (int row = 0; row < sums.rows; ++row) {
    __m512 even = seen(set1_ps(0.0f)), odd = seen(set1_ps(0.0f));
    for (int k = 0; k < b.rows; ++k) {
      const __m512 pair = castsi512_ps(set1_epi32(a.at<int32_t>(row, k))), line = seen(load<__m512>(b.of[k]));
      even = fmadd_ps(lower_halves(pair), lower_halves(line), even);
      odd = fmadd_ps(upper_halves(pair), upper_halves(line), odd);
    }
    const __m512 whole = seen(add_ps(load<__m512>(sums.of[row]), add_ps(even, odd)));
    memcpy(sums.of[row], &whole, sums.row_bytes);
  }
}

}  // namespace outrider_emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig outrider_emulated::tile_loadconfig
#define _tile_release outrider_emulated::tile_release
#define _tile_zero outrider_emulated::tile_zero
#define _tile_loadd outrider_emulated::tile_loadd
#define _tile_stored outrider_emulated::tile_stored
#define _tile_dpbssd outrider_emulated::tile_dpbssd
#define _tile_dpbsud outrider_emulated::tile_dpbsud
#define _tile_dpbf16ps outrider_emulated::tile_dpbf16ps
