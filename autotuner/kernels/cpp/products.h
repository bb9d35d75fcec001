// Products of small tiles, which all kernels here are made of: a few rows of one factor times a panel of the other.
#pragma once

#include "vectors.h"

constexpr int PANEL_VECTORS = 2, PANEL = LANES * PANEL_VECTORS;  // columns of a panel

// c (+)= a * panel for `R` rows and one panel; a panel is k rows of PANEL columns, dense, zeros behind the last column.
template <int R>
static __attribute__((noinline)) void tile(const float* a, int64_t a_row, int64_t a_column, const float* panel, int64_t k, float* c,
                                           int64_t c_row, int width, bool onto) {
  for (int i = 0; i < R; i++) __builtin_prefetch(c + i * c_row, 1), __builtin_prefetch(c + i * c_row + PANEL - 1, 1);
  Vector sums[R][PANEL_VECTORS];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < PANEL_VECTORS; j++) sums[i][j] = Vector{};
  for (int64_t p = 0; p < k; p++) {
    Vector b[PANEL_VECTORS];
    for (int j = 0; j < PANEL_VECTORS; j++) b[j] = *(const Vector*)(panel + p * PANEL + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int j = 0; j < PANEL_VECTORS; j++) sums[i][j] += a[i * a_row + p * a_column] * b[j];
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < PANEL_VECTORS; j++) {
      float* at = c + i * c_row + j * LANES;
      int left = width - j * LANES;
      if (left >= LANES)
        store(at, onto ? load(at) + sums[i][j] : sums[i][j]);
      else if (left > 0)
        store_part(at, onto ? load_part(at, left) + sums[i][j] : sums[i][j], left);
    }
}

typedef void (*Tile)(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t, int, bool);

// c (+)= a * panel for up to TILE_ROWS rows.
INLINE void multiply(int rows, const float* a, int64_t a_row, int64_t a_column, const float* panel, int64_t k, float* c, int64_t c_row,
                     int width, bool onto) {
#if defined(__AVX512F__)
  static constexpr Tile tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
#else
  static constexpr Tile tiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
#endif
  static_assert(sizeof(tiles) / sizeof(Tile) == TILE_ROWS, "a tile for each number of rows");
  tiles[rows - 1](a, a_row, a_column, panel, k, c, c_row, width, onto);
}

// Write a panel: `k` rows and `width` columns of b, by strides.
INLINE void pack(const float* b, int64_t b_row, int64_t b_column, int64_t k, int width, float* panel) {
  if (b_column == 1) {
    for (int64_t p = 0; p < k; p++)
      for (int j = 0; j < PANEL_VECTORS; j++) {
        int left = width - j * LANES;
        const float* from = b + p * b_row + j * LANES;
        store(panel + p * PANEL + j * LANES, left >= LANES ? load(from) : left > 0 ? load_part(from, left) : Vector{});
      }
    return;
  }
  int64_t whole = b_row == 1 ? k / LANES * LANES : 0;
  for (int j = 0; j < PANEL_VECTORS; j++) {
    int left = width - j * LANES;
    for (int64_t p = 0; p < whole; p += LANES) {
      Vector square[LANES];
#pragma GCC unroll 16
      for (int x = 0; x < LANES; x++) square[x] = x < left ? load(b + p + (j * LANES + x) * b_column) : Vector{};
      transpose(square);
#pragma GCC unroll 16
      for (int x = 0; x < LANES; x++) store(panel + (p + x) * PANEL + j * LANES, square[x]);
    }
  }
  for (int64_t p = whole; p < k; p++)
    for (int x = 0; x < PANEL; x++) panel[p * PANEL + x] = x < width ? b[p * b_row + x * b_column] : 0;
}

INLINE int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
INLINE int part_of(int64_t extent, int64_t start, int64_t step) { return extent - start < step ? extent - start : step; }
