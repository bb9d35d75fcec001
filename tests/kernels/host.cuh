// What the prelude asks of a device, on a host: a block's threads are threads of this process, blocks run in turn.
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define DEVICE inline
#define KERNEL extern "C"
#define THREADS_AT_MOST(threads)
#define SHARED static

struct Index {
    int x;
};
thread_local Index threadIdx, blockIdx;
static std::unique_ptr<std::barrier<>> whole_block;
static std::vector<std::unique_ptr<std::barrier<>>> row_groups, warps;
static float exchanged[1024];

inline float float_of_bits(unsigned int x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float float_of_half(unsigned short x) {
    _Float16 y;
    std::memcpy(&y, &x, 2);
    return (float)y;
}
inline unsigned short half_bits(float x) {
    _Float16 y = (_Float16)x;
    unsigned short z;
    std::memcpy(&z, &y, 2);
    return z;
}
inline unsigned short bfloat16_bits(float x) {
    unsigned int y;
    std::memcpy(&y, &x, 4);
    if (x != x) return 0x7FFF;
    return (unsigned short)((y + 0x7FFF + (y >> 16 & 1)) >> 16);
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float shuffled(float x, int step) {
    std::barrier<>& warp = *warps[threadIdx.x / 32];
    exchanged[threadIdx.x] = x;
    warp.arrive_and_wait();
    float y = exchanged[threadIdx.x ^ step];
    warp.arrive_and_wait();
    return y;
}
template <int THREADS>
inline void row_barrier(int group) {
    row_groups[group]->arrive_and_wait();
}
inline void block_barrier() { whole_block->arrive_and_wait(); }

// Run a kernel of up to 20 pointers; `shared` threads wait at each row's barrier.
extern "C" void run_on_host(void* kernel, int blocks, int threads, int shared, void** a) {
    whole_block = std::make_unique<std::barrier<>>(threads);
    row_groups.clear();
    warps.clear();
    for (int i = 0; i < threads / shared; ++i) row_groups.push_back(std::make_unique<std::barrier<>>(shared));
    for (int i = 0; i * 32 < threads; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
        running.emplace_back([=] {
            threadIdx.x = t;
            for (int b = 0; b < blocks; ++b) {
                blockIdx.x = b;
                ((void (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                           void*, void*, void*, void*, void*, void*, void*))kernel)(
                    a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                    a[15], a[16], a[17], a[18], a[19]);
                whole_block->arrive_and_wait();
            }
        });
    }
    for (auto& thread : running) thread.join();
}
