// Vectors of the machine's width, through extensions of g++ and clang: nothing here names an instruction.
#pragma once

#include <cstdint>
#include <cstdlib>

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 12;  // 24 sums, 2 columns' vectors and a factor, of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_ROWS = 6;  // 12 sums of 16 registers
#else
constexpr int LANES = 4, TILE_ROWS = 6;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float Anywhere __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load(const float* at) { return (Vector) * (const Anywhere*)at; }
INLINE void store(float* at, Vector x) { *(Anywhere*)at = (Anywhere)x; }
INLINE Vector all(float x) { return Vector{} + x; }
INLINE Vector choose(Integers where, Vector yes, Vector no) { return where ? yes : no; }
INLINE Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }
INLINE Vector magnitude(Vector x) { return (Vector)((Integers)x & 0x7fffffff); }

// Lanes of two vectors, those of the second numbered on behind those of the first.
INLINE Vector shuffled(Vector a, Vector b, Integers lanes) {
#if defined(__clang__)  // which wants the numbers as constants
  Vector found;
  for (int i = 0; i < LANES; i++) found[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
  return found;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Lanes from 0.
INLINE Integers places() {
  Integers found;
  for (int i = 0; i < LANES; i++) found[i] = i;
  return found;
}

// Each lane meets the one that is half a vector, a quarter ... away: all lanes have the result.
INLINE float sum(Vector x) {
  for (int apart = LANES / 2; apart; apart /= 2) x += shuffled(x, x, places() ^ apart);
  return x[0];
}

INLINE float largest(Vector x) {
  for (int apart = LANES / 2; apart; apart /= 2) x = larger(x, shuffled(x, x, places() ^ apart));
  return x[0];
}

// The first `count` elements, zeros behind them.
INLINE Vector load_part(const float* at, int count) {
  Vector part = {};
  for (int i = 0; i < LANES; i++)
    if (i < count) part[i] = at[i];
  return part;
}

INLINE void store_part(float* at, Vector x, int count) {
  for (int i = 0; i < LANES; i++)
    if (i < count) at[i] = x[i];
}

template <int N>
INLINE Vector polynomial(Vector x, const float (&factors)[N]) {
  Vector found = all(factors[N - 1]);
  for (int i = N - 2; i >= 0; i--) found = found * x + factors[i];
  return found;
}

// exp to 2 ulp: 2^n times a Taylor polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below -87, 2^127 and more above 88.
INLINE Vector exponential(Vector x) {
  constexpr float taylor[] = {1, 1, 0.5f, 1.f / 6, 1.f / 24, 1.f / 120, 1.f / 720};
  Vector bound = choose(x > 88.f, all(88.f), x);
  bound = choose(bound < -87.f, all(-87.f), bound);
  Vector nearest = bound * 1.44269504f + 12582912.f;  // the sum has no digits behind the point
  Integers n = (Integers)nearest - 0x4b400000;
  nearest -= 12582912.f;
  Vector rest = bound - nearest * 0.693359375f;
  rest = rest + nearest * 2.12194440e-4f;
  Vector scale = (Vector)((n + 127) << 23);
  return choose(x < -87.f, Vector{}, polynomial(rest, taylor) * scale);
}

// Phi(x) - 1/2 for the normal distribution Phi, to 2e-7: x P(x^2) / Q(x^2) below 5.2, fitted by weighted least squares.
INLINE Vector normal_half(Vector x) {
  constexpr float p[] = {0.3989422619f, 0.03254414722f, 0.004608610645f, 0.0001568562730f, 6.407741238e-6f, 2.473071348e-8f};
  constexpr float q[] = {1, 0.2482424229f, 0.02792643197f, 0.001817172626f, 7.049382839e-5f, 1.258845714e-6f};
  Vector y = x * x;
  Vector inside = x * polynomial(y, p) / polynomial(y, q);
  return choose(magnitude(x) > 5.2f, choose(x > 0.f, all(0.5f), all(-0.5f)), inside);
}

// GELU'(x) - 1/2 = Phi(x) - 1/2 + x Phi'(x), to 3e-7, likewise.
INLINE Vector gelu_slope_half(Vector x) {
  constexpr float p[] = {0.7978852987f, -0.03094400093f, 0.01421905588f, 2.059102735e-5f, 3.580341217e-5f, 1.908750988e-7f};
  constexpr float q[] = {1, 0.2945586443f, 0.04098850116f, 0.003521821694f, 0.0001920602226f, 8.887212971e-6f};
  Vector y = x * x;
  Vector inside = x * polynomial(y, p) / polynomial(y, q);
  return choose(magnitude(x) > 5.5f, choose(x > 0.f, all(0.5f), all(-0.5f)), inside);
}

INLINE Vector gelu_erf(Vector x) { return x * (0.5f + normal_half(x)); }
INLINE Vector gelu_erf_slope(Vector x) { return 0.5f + gelu_slope_half(x); }

constexpr float TWICE_ROOT = 1.5957691216f, CUBIC = 0.044715f;  // 2 sqrt(2 / pi)

// 1 / (1 + e) of e = exp(-twice the argument of tanh); what is left to 1 is e times that.
INLINE Vector gelu_tanh_power(Vector x) { return exponential(-TWICE_ROOT * (x + CUBIC * x * x * x)); }
INLINE Vector gelu_tanh(Vector x) { return x / (1.f + gelu_tanh_power(x)); }
INLINE Vector gelu_tanh_slope(Vector x) {
  Vector e = gelu_tanh_power(x), s = 1.f / (1.f + e);
  return s + x * s * (e * s) * TWICE_ROOT * (1.f + 3 * CUBIC * x * x);
}

// Rows become columns: as many rounds of a perfect shuffle as the number of lanes has binary digits.
INLINE void transpose(Vector (&rows)[LANES]) {
  Integers low, high;
  for (int i = 0; i < LANES; i++) {
    low[i] = i / 2 + (i % 2) * LANES;
    high[i] = low[i] + LANES / 2;
  }
  for (int round = 1; round < LANES; round *= 2) {
    Vector next[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = shuffled(rows[i], rows[i + LANES / 2], low);
      next[2 * i + 1] = shuffled(rows[i], rows[i + LANES / 2], high);
    }
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

// Memory of a thread, which it keeps until it ends.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;

  ~Scratch() { free(data); }
};

// Memory of this thread, one for each place; what was in it before is gone where it grows.
INLINE float* scratch(int place, int64_t elements) {
  static thread_local Scratch kept[3];
  Scratch& own = kept[place];
  if (own.size < elements) {
    free(own.data);
    own.size = elements;
    own.data = (float*)aligned_alloc(64, (elements * sizeof(float) + 63) / 64 * 64);
    if (!own.data) abort();
  }
  return own.data;
}
