// Signed routing of `expand`, for CPUs and GPUs: (4) of growkern/ops/expand/hashes.py.
//
// It includes nothing but the hash, so that NVRTC can compile it.
#pragma once
#include "hash_noise.h"

namespace growkern {

// floor(a b / 2**32)
GROWKERN_INLINE unsigned high_product(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
    return __umulhi(a, b);
#else
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
#endif
}

// number and count of a copy, as growkern/ops/expand/call.py packs them
GROWKERN_INLINE unsigned number_of(int packed) { return packed & 0xffff; }
GROWKERN_INLINE unsigned count_of(int packed) { return static_cast<unsigned>(packed) >> 16; }

// the chosen copy p; `key` and `mult` belong to the line, `source` to the element
GROWKERN_INLINE unsigned first_choice(unsigned key, unsigned mult, unsigned source,
                                      unsigned count) {
    return high_product(key + source * mult, count);
}

// the copy q that has the rest
GROWKERN_INLINE unsigned second_choice(unsigned first, unsigned mult, unsigned count) {
    const unsigned next = first + 1 + high_product(mult, count - 1);
    return next < count ? next : next - count;
}

}  // namespace growkern
