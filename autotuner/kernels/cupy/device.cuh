// What the prelude asks of a device of compute capability 8.0 or more.

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define THREADS_AT_MOST(threads) __launch_bounds__(threads)
#define SHARED __shared__

DEVICE float float_of_bits(unsigned int x) { return __uint_as_float(x); }
DEVICE float float_of_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE unsigned short half_bits(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
DEVICE unsigned short bfloat16_bits(float x) {
    unsigned int y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
    return (unsigned short)y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float shuffled(float x, int step) { return __shfl_xor_sync(0xFFFFFFFFu, x, step); }

// Threads of one row wait for each other; those of other rows in the block do not.
template <int THREADS>
DEVICE void row_barrier(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS) : "memory");
}
DEVICE void block_barrier() { __syncthreads(); }
