// Reports what this processor can do, and picks the kernel of each call.
#include "native.h"

#include "adamw.h"
#include "gemm.h"
#include "kl_mlm.h"

namespace growkern {

bool supports(int32_t isa) {
#if defined(GROWKERN_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("fma");
    if (isa == AVX2) return avx2;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    if (isa == AVX512) return avx512;
#if defined(GROWKERN_BF16)
    if (isa == AVX512BF16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return isa == PORTABLE;
}

}  // namespace growkern

extern "C" {

// a checksum of the sources, by CMakeLists.txt: growkern/ops/backend/native.py compares it with
// those beside the package, so that no function is called with the arguments of another version
__attribute__((visibility("default"))) const char* growkern_sources() { return GROWKERN_SOURCES; }

// the best instruction set for this processor
__attribute__((visibility("default"))) int growkern_best_isa() {
    int isa = growkern::AVX512BF16;
    while (!growkern::supports(isa)) --isa;
    return isa;
}

// 1 if built with OpenMP
__attribute__((visibility("default"))) int growkern_has_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// 0: done; 1: out of memory; 2: no such product on this processor
__attribute__((visibility("default"))) int growkern_gemm(const growkern::GemmArgs* args) {
    if (!growkern::supports(args->isa)) return 2;
#if defined(GROWKERN_BF16)
    if (args->isa == growkern::AVX512BF16) return growkern::gemm_avx512bf16(*args);
#endif
#if defined(GROWKERN_X86)
    if (args->isa == growkern::AVX512) return growkern::gemm_avx512(*args);
#endif
    return 2;
}

// 0: done; 2: this processor lacks the instruction set `isa`
__attribute__((visibility("default"))) int growkern_kl_mlm(const growkern::KlMlmArgs* args) {
    if (!growkern::supports(args->isa)) return 2;
#if defined(GROWKERN_X86)
    if (args->isa >= growkern::AVX512) {
        growkern::kl_mlm_avx512(*args);
        return 0;
    }
    if (args->isa == growkern::AVX2) {
        growkern::kl_mlm_avx2(*args);
        return 0;
    }
#endif
    growkern::kl_mlm_portable(*args);
    return 0;
}

// 0: done; 2: this processor lacks the instruction set `isa`
__attribute__((visibility("default"))) int growkern_adamw(const growkern::AdamwArgs* args) {
    if (!growkern::supports(args->isa)) return 2;
#if defined(GROWKERN_X86)
    if (args->isa >= growkern::AVX512) {
        growkern::adamw_avx512(*args);
        return 0;
    }
    if (args->isa == growkern::AVX2) {
        growkern::adamw_avx2(*args);
        return 0;
    }
#endif
    growkern::adamw_portable(*args);
    return 0;
}
}
