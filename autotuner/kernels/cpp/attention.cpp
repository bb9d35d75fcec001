// Attention of float32 heads, forward and backward: a few rows of scores at a time, which stay in a cache of their own.
#include <omp.h>

#include <cmath>
#include <cstring>

#include "products.h"

struct Heads {
  float* data;
  int64_t batch, head, row;  // features are contiguous
};

struct Attention {
  int64_t batch, heads, shared, rows, columns, features;  // `shared` heads of queries have one head of keys and values
  int32_t causal;
  float scale;
  Heads query, key, value, out, grad, grad_query, grad_key, grad_value;
  float* log_sum_exp;  // batch, heads, rows; no data where nobody reads it
};

static float* head(const Heads& of, int64_t b, int64_t h) { return of.data + b * of.batch + h * of.head; }

// Write all panels of a matrix.
static void pack_all(const float* b, int64_t b_row, int64_t b_column, int64_t k, int64_t n, float* panels) {
  for (int64_t j = 0; j < n; j += PANEL) pack(b + j * b_column, b_row, b_column, k, part_of(n, j, PANEL), panels + j * k);
}

// c (+)= a * b for all panels of b, up to `n` columns, in tiles of rows.
static void multiply_all(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* panels, int64_t depth,
                         float* c, int64_t c_row, bool padded, bool onto) {
  for (int64_t i = 0; i < m; i += TILE_ROWS)
    for (int64_t j = 0; j < n; j += PANEL)
      multiply(part_of(m, i, TILE_ROWS), a + i * a_row, a_row, a_column, panels + j * depth, k, c + i * c_row + j, c_row,
               padded ? PANEL : part_of(n, j, PANEL), onto);
}

// Keys that the queries before a row see.
INLINE int64_t seen(const Attention& of, int64_t behind) { return of.causal && behind < of.columns ? behind : of.columns; }

static void forward_rows(const Attention& of, int64_t b, int64_t h, int64_t start, int64_t stop) {
  const int64_t wide = panels_of(of.columns) * PANEL, deep = panels_of(of.features) * PANEL, keys = seen(of, stop);
  float* keys_across = scratch(1, wide * of.features + keys * deep + TILE_ROWS * wide);
  float* values = keys_across + wide * of.features;
  float* scores = values + keys * deep;
  pack_all(head(of.key, b, h / of.shared), 1, of.key.row, of.features, keys, keys_across);
  pack_all(head(of.value, b, h / of.shared), of.value.row, 1, keys, of.features, values);
  for (int64_t i = start; i < stop; i += TILE_ROWS) {
    const int rows = part_of(stop, i, TILE_ROWS);
    const int64_t visible = seen(of, i + rows), padded = panels_of(visible) * PANEL;
    multiply_all(rows, visible, of.features, head(of.query, b, h) + i * of.query.row, of.query.row, 1, keys_across, of.features, scores, wide,
                 true, false);
    for (int r = 0; r < rows; r++) {
      float* row = scores + r * wide;
      const int64_t own = seen(of, i + r + 1);
      Vector most = all(-INFINITY), total = {};
      for (int64_t k = 0; k < padded; k += LANES) {
        const Vector x = choose(places() < (int32_t)(own - k), load(row + k) * of.scale, all(-INFINITY));
        store(row + k, x);
        most = larger(x, most);
      }
      const float top = largest(most);
      for (int64_t k = 0; k < padded; k += LANES) {
        const Vector x = exponential(load(row + k) - top);
        store(row + k, x);
        total += x;
      }
      const float whole = sum(total);
      for (int64_t k = 0; k < padded; k += LANES) store(row + k, load(row + k) * (1 / whole));
      if (of.log_sum_exp) of.log_sum_exp[(b * of.heads + h) * of.rows + i + r] = top + std::log(whole);
    }
    multiply_all(rows, of.features, visible, scores, wide, 1, values, keys, head(of.out, b, h) + i * of.out.row, of.out.row, false, false);
  }
}

extern "C" void attention(const Attention* attention, int threads) {
  const Attention& of = *attention;
  const int64_t heads = of.batch * of.heads, most = of.rows / (4 * TILE_ROWS), wanted = (2 * threads + heads - 1) / heads;
  const int64_t parts = heads >= 2 * threads || most < 2 ? 1 : wanted < most ? wanted : most;
  const int64_t step = ((of.rows + parts - 1) / parts + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t item = 0; item < heads * parts; item++) {
    const int64_t start = item % parts * step, stop = start + step < of.rows ? start + step : of.rows;
    if (start < stop) forward_rows(of, item / parts / of.heads, item / parts % of.heads, start, stop);
  }
}

static float product_of_rows(const float* a, const float* b, int64_t count) {
  Vector total = {};
  for (int64_t p = 0; p < count; p += LANES) {
    const int left = count - p < LANES ? count - p : LANES;
    total += left == LANES ? load(a + p) * load(b + p) : load_part(a + p, left) * load_part(b + p, left);
  }
  return sum(total);
}

constexpr int64_t BLOCK = 4 * TILE_ROWS;  // queries of which all weights and their gradients are there at once

// All gradients of a head of keys and values; those of its queries one head after the other.
static void backward_head(const Attention& of, int64_t b, int64_t kv) {
  const int64_t wide = panels_of(of.columns) * PANEL, deep = panels_of(of.features) * PANEL;
  float* keys_across = scratch(2, 2 * wide * of.features + of.columns * deep + 2 * BLOCK * deep + 2 * BLOCK * wide);
  float* values_across = keys_across + wide * of.features;
  float* keys = values_across + wide * of.features;
  float* queries = keys + of.columns * deep;
  float* grads = queries + BLOCK * deep;
  float* weights = grads + BLOCK * deep;
  float* slopes = weights + BLOCK * wide;
  const float* key = head(of.key, b, kv);
  pack_all(key, 1, of.key.row, of.features, of.columns, keys_across);
  pack_all(head(of.value, b, kv), 1, of.value.row, of.features, of.columns, values_across);
  pack_all(key, of.key.row, 1, of.columns, of.features, keys);
  float *grad_key = head(of.grad_key, b, kv), *grad_value = head(of.grad_value, b, kv);
  for (int64_t k = 0; k < of.columns; k++) {
    memset(grad_key + k * of.grad_key.row, 0, of.features * sizeof(float));
    memset(grad_value + k * of.grad_value.row, 0, of.features * sizeof(float));
  }
  for (int64_t h = kv * of.shared; h < (kv + 1) * of.shared; h++)
    for (int64_t start = 0; start < of.rows; start += BLOCK) {
      const int64_t rows = part_of(of.rows, start, BLOCK), visible = seen(of, start + rows);
      const float* query = head(of.query, b, h) + start * of.query.row;
      const float* grad = head(of.grad, b, h) + start * of.grad.row;
      const float* out = head(of.out, b, h) + start * of.out.row;
      const float* log_sum_exp = of.log_sum_exp + (b * of.heads + h) * of.rows + start;
      pack_all(query, of.query.row, 1, rows, of.features, queries);
      pack_all(grad, of.grad.row, 1, rows, of.features, grads);
      for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        const int few = part_of(rows, i, TILE_ROWS);
        const int64_t keys_seen = seen(of, start + i + few), padded = panels_of(keys_seen) * PANEL;
        multiply_all(few, keys_seen, of.features, query + i * of.query.row, of.query.row, 1, keys_across, of.features, weights + i * wide, wide,
                     true, false);
        multiply_all(few, keys_seen, of.features, grad + i * of.grad.row, of.grad.row, 1, values_across, of.features, slopes + i * wide, wide,
                     true, false);
        for (int64_t r = i; r < i + few; r++) {
          float *weight = weights + r * wide, *slope = slopes + r * wide;
          const float shift = product_of_rows(grad + r * of.grad.row, out + r * of.out.row, of.features);
          const int64_t own = seen(of, start + r + 1);
          for (int64_t k = 0; k < padded; k += LANES) {
            const Integers hidden = places() >= (int32_t)(own - k);
            const Vector x = choose(hidden, Vector{}, exponential(load(weight + k) * of.scale - log_sum_exp[r]));
            store(weight + k, x);
            store(slope + k, choose(hidden, Vector{}, x * (load(slope + k) - shift) * of.scale));
          }
          for (int64_t k = padded; k < visible; k += LANES) {
            store(weight + k, Vector{});
            store(slope + k, Vector{});
          }
        }
        multiply_all(few, of.features, keys_seen, slopes + i * wide, wide, 1, keys, of.columns,
                     head(of.grad_query, b, h) + (start + i) * of.grad_query.row, of.grad_query.row, false, false);
      }
      // Keys of a tile are seen by none of the queries before its first one.
      for (int64_t k = 0; k < visible; k += TILE_ROWS) {
        const int few = part_of(visible, k, TILE_ROWS);
        const int64_t first = of.causal && k > start ? k - start : 0;
        for (int64_t p = 0; p < of.features; p += PANEL) {
          const int width = part_of(of.features, p, PANEL);
          multiply(few, weights + first * wide + k, 1, wide, grads + p * rows + first * PANEL, rows - first, grad_value + k * of.grad_value.row + p,
                   of.grad_value.row, width, true);
          multiply(few, slopes + first * wide + k, 1, wide, queries + p * rows + first * PANEL, rows - first, grad_key + k * of.grad_key.row + p,
                   of.grad_key.row, width, true);
        }
      }
    }
}

extern "C" void attention_grad(const Attention* attention, int threads) {
  const Attention& of = *attention;
  const int64_t shared_heads = of.heads / of.shared;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t item = 0; item < of.batch * shared_heads; item++) backward_head(of, item / shared_heads, item % shared_heads);
}
