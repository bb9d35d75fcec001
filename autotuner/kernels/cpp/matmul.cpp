// c = a * b in float32 for a batch of matrices, and what is done to each tile of c while it is in the first-level cache.
#include <omp.h>

#include <cstring>

#include "products.h"

constexpr int64_t DEPTH = 384;          // rows of a panel at most: a tile of the other factor stays in the first-level cache
constexpr int64_t PACKED = 64 * 1024;   // elements of panels that are there at once: a quarter of a megabyte of the second-level cache
constexpr int64_t TURNED_ROWS = 8 * TILE_ROWS;
constexpr int64_t ALONE = 1 << 15;       // multiplications below which other threads are not woken

enum Epilogue : int { NOTHING, GELU_ERF, GELU_TANH, GELU_ERF_GRAD, GELU_TANH_GRAD };

struct Matrix {
  float* data;
  int64_t batch, row, column;
};

struct Product {
  int64_t batch, m, n, k;
  Matrix a, b, c;
  Matrix added;  // to the product, before anything else; no data for none
  Matrix saved;  // what GELU reads: written by GELU where there is data, read by its gradient
  int32_t epilogue;
};

INLINE Vector applied(int epilogue, Vector x, Vector saved) {
  switch (epilogue) {
    case GELU_ERF: return gelu_erf(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU_ERF_GRAD: return x * gelu_erf_slope(saved);
    case GELU_TANH_GRAD: return x * gelu_tanh_slope(saved);
    default: return x;
  }
}

template <int EPILOGUE>
static void finish(const Product& of, int64_t g, int64_t i, int64_t j, int rows, int width) {
  const bool reads = EPILOGUE == GELU_ERF_GRAD || EPILOGUE == GELU_TANH_GRAD;
  for (int r = 0; r < rows; r++)
    for (int first = 0; first < width; first += LANES) {
      int count = width - first < LANES ? width - first : LANES;
      int64_t row = i + r, column = j + first;
      float* at = of.c.data + g * of.c.batch + row * of.c.row + column;
      Vector x = count == LANES ? load(at) : load_part(at, count);
      if (of.added.data) {
        const float* term = of.added.data + g * of.added.batch + row * of.added.row + column * of.added.column;
        if (of.added.column == 0)
          x += *term;
        else if (of.added.column == 1)
          x += count == LANES ? load(term) : load_part(term, count);
        else
          for (int l = 0; l < count; l++) x[l] += term[l * of.added.column];
      }
      float* beside = of.saved.data + g * of.saved.batch + row * of.saved.row + column;
      Vector saved = {};
      if (reads) {
        saved = count == LANES ? load(beside) : load_part(beside, count);
      } else if (EPILOGUE != NOTHING && of.saved.data) {
        if (count == LANES)
          store(beside, x);
        else
          store_part(beside, x, count);
      }
      x = applied(EPILOGUE, x, saved);
      if (count == LANES)
        store(at, x);
      else
        store_part(at, x, count);
    }
}

typedef void (*Finish)(const Product&, int64_t, int64_t, int64_t, int, int);

// Write rows of a as tiles, in which what one step of the product reads is side by side.
static void turn(const float* a, int64_t row, int64_t column, int rows, int64_t k, float* turned) {
  const int whole = row == 1 ? rows / TILE_ROWS * TILE_ROWS : 0;
  for (int64_t p = 0; p < k; p++) {
    for (int r = 0; r < whole; r += TILE_ROWS) memcpy(turned + r * k + p * TILE_ROWS, a + r + p * column, TILE_ROWS * sizeof(float));
    for (int r = whole; r < rows; r++) turned[r / TILE_ROWS * TILE_ROWS * k + p * TILE_ROWS + r % TILE_ROWS] = a[r * row + p * column];
  }
}

// Ask for what is beside a tile of c before the tile is computed.
INLINE void prefetch(const Matrix& of, int64_t g, int64_t i, int64_t j, int rows) {
  if (!of.data || !of.row) return;
  const float* at = of.data + g * of.batch + i * of.row + j * of.column;
  for (int r = 0; r < rows; r++) __builtin_prefetch(at + r * of.row), __builtin_prefetch(at + r * of.row + PANEL - 1);
}

// What is packed next comes into the second-level cache meanwhile, some lines of the cache at a time.
struct Ahead {
  const float* from;
  int64_t step, length, lines, line;  // `lines` pieces of `length` elements, `step` apart; `line` of the first piece's lines is next

  void fetch(int64_t count) {
    for (; lines > 0 && count > 0; count--) {
      __builtin_prefetch(from + line, 0, 2);
      line += 16;
      if (line >= length) from += step, lines--, line = 0;
    }
  }
};

INLINE Ahead ahead_of(const float* from, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  return column == 1 ? Ahead{from, row, columns, rows, 0} : Ahead{from, column, rows, row == 1 ? columns : 0, 0};
}

// Columns and rows of one matrix of the batch: panels of b are packed, then read by one tile of rows after the other.
static void multiply_part(const Product& of, Finish finish, int64_t g, int64_t from, int64_t to, int64_t start, int64_t stop) {
  const int64_t pieces = (of.k + DEPTH - 1) / DEPTH, deep = (of.k + pieces - 1) / pieces;
  const int64_t most = PACKED / deep / PANEL * PANEL, wide = most < to - from ? (most ? most : PANEL) : panels_of(to - from) * PANEL;
  const bool turns = of.a.column != 1 && to - from > PANEL;  // each panel would read what is scattered again
  const int64_t high = turns ? TURNED_ROWS : TILE_ROWS;
  float* panels = scratch(0, wide * deep + (turns ? TURNED_ROWS * deep : 0));
  float* turned = panels + wide * deep;
  const float *a = of.a.data + g * of.a.batch, *b = of.b.data + g * of.b.batch;
  float* c = of.c.data + g * of.c.batch;
  for (int64_t block = from; block < to; block += wide) {
    const int64_t end = block + wide < to ? block + wide : to;
    for (int64_t depth = 0; depth < of.k; depth += deep) {
      const int64_t k = part_of(of.k, depth, deep);
      const bool last = depth + deep >= of.k;
      for (int64_t j = block; j < end; j += PANEL)
        pack(b + depth * of.b.row + j * of.b.column, of.b.row, of.b.column, k, part_of(end, j, PANEL), panels + (j - block) * k);
      const bool further = !last || end < to;
      const int64_t next = last ? end : block, then = last ? 0 : depth + deep;
      Ahead ahead = ahead_of(b + then * of.b.row + next * of.b.column, of.b.row, of.b.column, further ? part_of(of.k, then, deep) : 0, part_of(to, next, wide));
      const int64_t products = ((stop - start + TILE_ROWS - 1) / TILE_ROWS) * panels_of(end - block);
      const int64_t each = deep * wide / 16 / products + 1, each_row = deep * TILE_ROWS / 16 / panels_of(end - block) + 1;
      for (int64_t i = start; i < stop; i += high) {
        const int64_t bottom = i + high < stop ? i + high : stop;
        Ahead rows_ahead = {};
        if (turns) {
          turn(a + i * of.a.row + depth * of.a.column, of.a.row, of.a.column, bottom - i, k, turned);
          const bool on = bottom < stop;
          const int64_t first = on ? bottom : start, step = on ? depth : then;
          if (on || !last) rows_ahead = ahead_of(a + first * of.a.row + step * of.a.column, of.a.row, of.a.column, part_of(stop, first, high), part_of(of.k, step, deep));
        }
        for (int64_t j = block; j < end; j += PANEL)
          for (int64_t r = i; r < bottom; r += TILE_ROWS) {
            const int rows = part_of(bottom, r, TILE_ROWS), width = part_of(end, j, PANEL);
            const float *panel = panels + (j - block) * k, *tile = a + r * of.a.row + depth * of.a.column;
            ahead.fetch(each);
            rows_ahead.fetch(each_row);
            if (finish && last) {
              prefetch(of.added, g, r, j, rows);
              prefetch(of.saved, g, r, j, rows);
            }
            if (turns)
              multiply(rows, turned + (r - i) * k, 1, TILE_ROWS, panel, k, c + r * of.c.row + j, of.c.row, width, depth > 0);
            else
              multiply(rows, tile, of.a.row, of.a.column, panel, k, c + r * of.c.row + j, of.c.row, width, depth > 0);
            if (finish && last) finish(of, g, r, j, rows, width);
          }
      }
    }
  }
}

extern "C" void matmul(const Product* product, int threads) {
  static constexpr Finish finishes[] = {finish<NOTHING>, finish<GELU_ERF>, finish<GELU_TANH>, finish<GELU_ERF_GRAD>, finish<GELU_TANH_GRAD>};
  const Product& of = *product;
  const Finish last = of.epilogue != NOTHING || of.added.data ? finishes[of.epilogue] : nullptr;
  const int64_t panels = panels_of(of.n), tiles = (of.m + TILE_ROWS - 1) / TILE_ROWS;
  if (of.batch * of.m * of.n * of.k < ALONE) threads = 1;
  // Parts of rows and of columns such that the thread with the most tiles has as few as can be; fewer rows are packed less often.
  int64_t across = 1, down = 1, least = INT64_MAX;
  for (int64_t x = 1; x <= threads && x <= panels; x++)
    for (int64_t y = 1; y <= threads && y <= tiles; y++) {
      const int64_t rounds = (of.batch * x * y + threads - 1) / threads;
      const int64_t cost = rounds * ((panels + x - 1) / x) * ((tiles + y - 1) / y + 1);
      if (cost < least) across = x, down = y, least = cost;
    }
  const int64_t wide = (panels + across - 1) / across * PANEL, high = (tiles + down - 1) / down * TILE_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t item = 0; item < of.batch * across * down; item++) {
    const int64_t g = item / (across * down), from = item / down % across * wide, start = item % down * high;
    if (from < of.n && start < of.m) multiply_part(of, last, g, from, from + wide < of.n ? from + wide : of.n, start, start + high < of.m ? start + high : of.m);
  }
}
