// What the caller passes to the rows of the KL + MLM loss on a CPU.
//
// Equations are those of growkern/ops/loss/kl_mlm_loss.py, numbers of a row those of rows/state.py.
// Letters: N rows, V vocabulary, K teachers, S = 8 + 6 K numbers of a row.
#pragma once
#include "native.h"

namespace growkern {

// mirrored field by field in growkern/ops/loss/rows/on_cpu_compiled.py; strides are in elements, columns
// contiguous
struct KlMlmArgs {
    const void* student;             // (N, V) of `type`
    const void* const* teachers;     // K times (N, V) of `type`
    const int64_t* teacher_strides;  // (K,)
    const int64_t* labels;           // (N,)
    const int32_t* kind;             // (N,) bits: 1 the label counts, 2 the teachers do
    const void* drows;               // (1 + K, N) of `type`; null: no gradient
    void* state;                     // (S, N) of `type`  out with `sums`, else in
    void* dstudent;                  // (N, V) of `grad_type`  out; may begin where student does
    int64_t student_stride, dstudent_stride, N, V, K;
    double inv_t, smoothing, z_loss;
    int32_t type;                    // F32 or F64
    int32_t grad_type;               // F32, of F64 rows F64 as well, of F32 rows BF16
    int32_t sums, parts;             // whether to fill the state; with entropy and top-1
    int32_t threads, isa;
};

void kl_mlm_portable(const KlMlmArgs&);
void kl_mlm_avx2(const KlMlmArgs&);
void kl_mlm_avx512(const KlMlmArgs&);

}  // namespace growkern
