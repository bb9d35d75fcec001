// Element types, vectors of them, sums over a row, and functions of one element, for the kernels of this folder.
// Without nvcc's types: no header is included, so that a kernel compiles in tenths of a second.

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct bfloat16 {
    unsigned short bits;
};
struct float16 {
    unsigned short bits;
};

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T at[N];
};

DEVICE float widened(float x) { return x; }
DEVICE float widened(bfloat16 x) { return float_of_bits((uint32)x.bits << 16); }
DEVICE float widened(float16 x) { return float_of_half(x.bits); }

template <typename T>
struct Narrow;
template <>
struct Narrow<float> {
    static DEVICE float of(float x) { return x; }
};
template <>
struct Narrow<bfloat16> {
    static DEVICE bfloat16 of(float x) { return bfloat16{bfloat16_bits(x)}; }
};
template <>
struct Narrow<float16> {
    static DEVICE float16 of(float x) { return float16{half_bits(x)}; }
};

template <typename T, int N>
DEVICE void load(float (&to)[N], const Vector<T, N>& from) {
#pragma unroll
    for (int v = 0; v < N; ++v) to[v] = widened(from.at[v]);
}

template <typename T, int N>
DEVICE void store(T* to, const float (&from)[N]) {
    Vector<T, N> packed;
#pragma unroll
    for (int v = 0; v < N; ++v) packed.at[v] = Narrow<T>::of(from[v]);
    *reinterpret_cast<Vector<T, N>*>(to) = packed;
}

// Write which of some elements are above 0, or no number, as bits from a place on. Where threads have fewer than eight
// elements each, those of one byte join theirs; all threads of a warp call this, and `inside` says whose bits count.
template <int N>
DEVICE void store_signs(uint8* to, long long place, const float (&from)[N], bool inside) {
    uint32 bits = 0;
#pragma unroll
    for (int v = 0; v < N; ++v) bits |= (uint32)!(from[v] <= 0) << v;
    bits <<= place & 7;
#pragma unroll
    for (int step = 1; step < 8 / N; step *= 2) bits |= (uint32)shuffled((float)bits, step);
    if (inside && (place & 7) == 0) to[place >> 3] = (uint8)bits;
}

// The standard normal distribution below -|x|, and exp(-x^2 / 2), which GELU's gradient needs too. The first is
// t P(t) exp(-x^2 / 2) with t = 1 / (1 + a |x|), P fitted to a relative error of 1.2e-6.
DEVICE void normal_tail(float x, float& tail, float& bell) {
    float t = reciprocal(fmaf(0.35355339f, fabsf(x), 1.0f));
    float p = 0.044751768f;
    p = fmaf(p, t, -0.180662012f);
    p = fmaf(p, t, 0.197832262f);
    p = fmaf(p, t, 0.0166565547f);
    p = fmaf(p, t, 0.141614796f);
    p = fmaf(p, t, 0.138628428f);
    p = fmaf(p, t, 0.141177614f);
    bell = exp2_fast(-0.72134752f * x * x);
    tail = p * t * bell;
}

DEVICE float gelu_erf(float x) {
    float tail, bell;
    normal_tail(x, tail, bell);
    return x * (x < 0 ? tail : 1.0f - tail);
}

DEVICE float gelu_erf_slope(float x) {
    float tail, bell;
    normal_tail(x, tail, bell);
    return fmaf(0.39894228f * bell, x, x < 0 ? tail : 1.0f - tail);
}

DEVICE float gelu_erf_exact(float x) { return 0.5f * x * (1.0f + erff(0.70710678f * x)); }
DEVICE float gelu_erf_slope_exact(float x) {
    return 0.5f * (1.0f + erff(0.70710678f * x)) + 0.39894228f * x * expf(-0.5f * x * x);
}

// tanh(u) = 1 - 2 / (1 + exp(2 u)), and GELU by it is x / (1 + exp(-2 u)).
DEVICE float gelu_tanh_share(float x) {
    float u = 0.79788456f * x * fmaf(0.044715f * x, x, 1.0f);
    return reciprocal(1.0f + exp2_fast(-2.88539008f * u));
}
DEVICE float gelu_tanh(float x) { return x * gelu_tanh_share(x); }
DEVICE float gelu_tanh_slope(float x) {
    float share = gelu_tanh_share(x);
    float inner = 0.79788456f * fmaf(0.134145f * x, x, 1.0f);
    return fmaf(2.0f * x * share * (1.0f - share), inner, share);
}

// SiLU is x / (1 + exp(-x)).
DEVICE float silu_share(float x) { return reciprocal(1.0f + exp2_fast(-1.44269504f * x)); }
DEVICE float silu(float x) { return x * silu_share(x); }
DEVICE float silu_slope(float x) {
    float share = silu_share(x);
    return share * fmaf(x, 1.0f - share, 1.0f);
}

// At most so many sums at once.
constexpr int SUMS = 2;

// Sums over the threads of a row: within a warp by shuffles, between warps through shared memory, of which each row of
// the block has a place of its own: its neighbours may be at other sums, of another number.
template <int THREADS, int COUNT>
DEVICE void row_sums(float (&x)[COUNT], float* between, int group, int lane) {
    const int width = THREADS < 32 ? THREADS : 32;
#pragma unroll
    for (int step = width / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] += shuffled(x[i], step);
    }
    static_assert(COUNT <= SUMS, "more sums than there is place for");
    if (THREADS > 32) {
        const int warps = THREADS / 32;
        float* own = between + group * warps * SUMS;
        row_barrier<THREADS>(group);
        if (lane % 32 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) own[lane / 32 * COUNT + i] = x[i];
        }
        row_barrier<THREADS>(group);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            x[i] = 0;
#pragma unroll
            for (int w = 0; w < warps; ++w) x[i] += own[w * COUNT + i];
        }
    }
}

// Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).
DEVICE void philox(uint32 (&x)[4], uint32 key0, uint32 key1) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        uint64 a = (uint64)0xD2511F53u * x[0], b = (uint64)0xCD9E8D57u * x[2];
        x[0] = (uint32)(b >> 32) ^ x[1] ^ key0;
        x[2] = (uint32)(a >> 32) ^ x[3] ^ key1;
        x[1] = (uint32)b;
        x[3] = (uint32)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// 32 bits, each 0 with a probability of THRESHOLD / 65536: 32 random numbers of 16 bits are compared with it at once, one
// binary place after the other from the highest, until all are decided; that takes 9 of the 16 on average.
template <uint32 THRESHOLD>
DEVICE uint32 keep_word(uint64 word, uint32 mask, uint64 seed) {
    if (THRESHOLD == 65536) return 0;
    uint32 dropped = 0, open = ~0u;
#pragma unroll
    for (int call = 0; call < 4; ++call) {
        if ((THRESHOLD & ((1u << (16 - 4 * call)) - 1)) == 0 || open == 0) break;
        uint32 x[4] = {(uint32)word, (uint32)(word >> 32), (uint32)call, mask};
        philox(x, (uint32)seed, (uint32)(seed >> 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (THRESHOLD >> (15 - 4 * call - i) & 1) {
                dropped |= open & ~x[i];
                open &= x[i];
            } else {
                open &= ~x[i];
            }
        }
    }
    return ~dropped;
}
