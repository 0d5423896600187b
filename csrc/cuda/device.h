// Building blocks of the CUDA kernels: types, copies into shared memory, sums over warps and
// blocks.
//
// It includes nothing, so that NVRTC can compile it. On a CPU the functions that need PTX come from
// bench/launches/cuda_on_cpu.h instead, so that tests run the source that GPUs run.
#pragma once

// 1 if all rows begin and end at multiples of 16 bytes, which the launch has checked
#ifndef ALIGNED
#define ALIGNED 0
#endif

namespace growkern {

using i32 = int;
using i64 = long long;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

}  // namespace growkern

#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#else
namespace growkern {

__device__ inline u16 bf16_bits(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// those of `low` in the lower half
__device__ inline u32 bf16_bits_of_two(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ inline u16 f16_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline float f16_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// the shared memory of the block, as large as the launch asked for
__device__ inline void* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char memory[];
    return memory;
}

// starts a copy of 4, 8 or 16 bytes, aligned to as many at both ends; it arrives by `wait_copies`
template <int BYTES>
__device__ inline void copy_async(void* shared, const void* global) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16)  // .cg bypasses the L1 cache, and exists for 16 bytes only
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES)
                     : "memory");
}

// ends a group of this thread's copies
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// waits until all but the last `pending` groups of this thread have arrived
__device__ inline void wait_copies(int pending) {
    switch (pending) {
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); return;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); return;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); return;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); return;
        default: asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

// whether the launch promised alignment; a device checks nothing, the emulation on a CPU does
__device__ inline constexpr bool promised_aligned(const void*, int) { return ALIGNED; }

// the two halves of a barrier of all threads of a cluster of blocks
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// reads the shared memory of another block of the cluster, at the address that `mine` has here
__device__ inline float load_of_block(const float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
    u32 at = static_cast<u32>(__cvta_generic_to_shared(mine));
    float x;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
#else
    return *mine;
#endif
}

}  // namespace growkern
#endif

namespace growkern {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ inline float to_float(f16 x) { return f16_value(x.bits); }

// rounds x to nearest
template <class T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) { return x; }
template <>
__device__ inline bf16 narrow<bf16>(float x) { return {bf16_bits(x)}; }
template <>
__device__ inline f16 narrow<f16>(float x) { return {f16_bits(x)}; }

// a double becomes a float first, as in PyTorch
template <class T>
__device__ inline T from_acc(double x) { return narrow<T>(static_cast<float>(x)); }
template <>
__device__ inline double from_acc<double>(double x) { return x; }

__device__ inline float minus_inf() { return __uint_as_float(0xff800000u); }

// n values that are loaded and stored together
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
    T x[n];
};

template <class T>
__device__ inline bool is_aligned(const T* pointer, int bytes) {
    return promised_aligned(pointer, bytes) || reinterpret_cast<u64>(pointer) % bytes == 0;
}

template <class T>
__device__ inline void copy_scalars(T* to, const T* from, int begin, int end) {
#pragma unroll 1
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
}

template <class T, int BYTES>
__device__ inline void copy_chunks(T* to, const T* from, int n) {
    constexpr int step = BYTES / sizeof(T);
    for (int i = step * threadIdx.x; i + step <= n; i += step * blockDim.x)
        copy_async<BYTES>(to + i, from + i);
    if (!ALIGNED) copy_scalars(to, from, n / step * step, n);
}

// starts copying n values to shared memory at a multiple of 16 bytes, by all threads of the block;
// they arrive by `wait_copies`. Pieces are as wide as the address allows: a row of BERT's 30522
// columns may begin anywhere.
template <class T>
__device__ inline void copy_row(T* to, const T* from, int n) {
    if (is_aligned(from, 16))
        copy_chunks<T, 16>(to, from, n);
    else if (is_aligned(from, 8))
        copy_chunks<T, 8>(to, from, n);
    else if (sizeof(T) <= 4 && is_aligned(from, 4))
        copy_chunks<T, sizeof(T) <= 4 ? 4 : 8>(to, from, n);
    else
        copy_scalars(to, from, 0, n);
}

struct Sum {
    __device__ static float neutral() { return 0; }
    __device__ static float of(float a, float b) { return a + b; }
};
struct Max {
    __device__ static float neutral() { return minus_inf(); }
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};
struct Min {
    __device__ static float neutral() { return -minus_inf(); }
    __device__ static float of(float a, float b) { return fminf(a, b); }
};

// every thread of the warp gets the n results
template <class Op, int n>
__device__ inline void reduce_warp(float (&x)[n]) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] = Op::of(x[i], __shfl_xor_sync(0xffffffffu, x[i], step));
}

// every thread of the block gets the n results; `scratch` has room for n floats of each warp
template <class Op, int n>
__device__ inline void reduce_block(float (&x)[n], float* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    reduce_warp<Op>(x);
    for (int i = 0; i < n; ++i)
        if (lane == 0) scratch[warp * n + i] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = lane < warps ? scratch[lane * n + i] : Op::neutral();
    // the caller may write to `scratch` again at once
    __syncthreads();
    reduce_warp<Op>(x);
}

}  // namespace growkern
