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

// starts a copy of 16 bytes, aligned to as many at both ends; it arrives by `wait_copies`
__device__ inline void copy_async(void* shared, const void* global) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// waits until this thread's copies have arrived
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// whether the launch promised alignment; a device checks nothing, the emulation on a CPU does
__device__ inline constexpr bool promised_aligned(const void*, int) { return ALIGNED; }

}  // namespace growkern
#endif

namespace growkern {

// Numbers are computed with as float and rounded to nearest. A double becomes a float first, as in
// PyTorch.
struct bf16 {
    u16 bits;
    bf16() = default;
    __device__ bf16(float x) : bits(bf16_bits(x)) {}
    __device__ operator float() const { return __uint_as_float(static_cast<u32>(bits) << 16); }
};
struct f16 {
    u16 bits;
    f16() = default;
    __device__ f16(float x) : bits(f16_bits(x)) {}
    __device__ operator float() const { return f16_value(bits); }
};

// n values that are loaded and stored together
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
    T x[n];
};

template <class T>
__device__ inline bool is_aligned(const T* pointer, int bytes) {
    return promised_aligned(pointer, bytes) || reinterpret_cast<u64>(pointer) % bytes == 0;
}

// Starts copying n values to shared memory, by all threads of the block; they arrive by
// `wait_copies`. Returns where they begin, up to 14 bytes past `to`: there a piece of 16 bytes
// begins where one of `from` does, although a row of BERT's 30522 columns may begin anywhere.
template <class T>
__device__ inline const T* copy_row(T* to, const T* from, int n) {
    constexpr int step = 16 / sizeof(T);
    const int skip = ALIGNED ? 0 : reinterpret_cast<u64>(from) / sizeof(T) % step;
    to += skip;
    for (int i = step * threadIdx.x - skip; i < n; i += step * blockDim.x)
        if (ALIGNED || (i >= 0 && i + step <= n))
            copy_async(to + i, from + i);
        else
            for (int k = i; k < i + step; ++k)
                if (k >= 0 && k < n) to[k] = from[k];
    return to;
}

}  // namespace growkern
