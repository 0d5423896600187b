// Arguments of the GEMM: c = a b or c += a b, with a (m, k), b (k, n), c (m, n).
//
// BLAS has no products of bfloat16 with float32 results, and none of float32 factors in float64.
// This GEMM has both, without a copy of a factor in the other type.
#pragma once
#include "native.h"

namespace growkern {

// mirrored in growkern/ops/loss/linear/gemm.py; strides are in elements
struct GemmArgs {
    const void* a;
    const void* b;
    void* c;  // columns contiguous
    int64_t m, n, k;
    int64_t a_m, a_k;  // strides; one of the two is 1
    int64_t b_k, b_n;
    int64_t c_m;
    int32_t a_type, b_type;
    int32_t c_type;   // F32, or F64 with products in F64 or F32
    int32_t product;  // F32, F64, or BF16 (of factors in bfloat16)
    int32_t threads, isa;
    bool add;         // else c is overwritten
};

// 0: done; 1: out of memory; 2: no such product here
int gemm_avx512(const GemmArgs&);
int gemm_avx512bf16(const GemmArgs&);

}  // namespace growkern
