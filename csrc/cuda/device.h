// Building blocks of CUDA kernels: types, and copies into shared memory.
//
// It includes nothing, so that NVRTC can compile it. On a CPU the functions that need PTX come from
// testbed/cuda_on_cpu.h instead, so that tests run the source that GPUs run.
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

// waits until this thread's copies have arrived
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// whether the launch promised alignment; a device checks nothing, the emulation on a CPU does
__device__ inline constexpr bool promised_aligned(const void*, int) { return ALIGNED; }

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

}  // namespace growkern
