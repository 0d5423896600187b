// The hash that gives `expand` its noise, for CPUs and GPUs: (3) of growkern/ops/expand/hashes.py.
//
// It includes nothing, so that NVRTC can compile it.
#pragma once

#if defined(__CUDACC__)
#define GROWKERN_INLINE __device__ inline
#else
// static: the library compiles this once for each instruction set, and they must stay apart
#define GROWKERN_INLINE static inline
#endif

namespace growkern {

// xi = hash_noise(..) * NOISE_UNIT is in [-1, 1]
constexpr float NOISE_UNIT = 0x1p-31f;

// xi without its last factor; `key` and `mult` belong to the line, `source` to the element
GROWKERN_INLINE float hash_noise(unsigned key, unsigned mult, unsigned source) {
    unsigned x = key + source * mult;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return static_cast<float>(static_cast<int>(x));
}

}  // namespace growkern
