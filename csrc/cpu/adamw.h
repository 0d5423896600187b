// The arguments of a step of AdamW with factors for every row and column.
//
// The formulas are (1) and (2) of growkern/ops/adamw/step.py. A vector is a matrix of one row.
#pragma once
#include "native.h"

namespace growkern {

// the same fields in the same order as in growkern/ops/adamw/on_cpu.py. The first five pointers are
// of `type`, the vectors are double for F64 and float otherwise.
struct AdamwArgs {
    void* value;           // (M, N), contiguous, like the next four
    const void* gradient;
    void* mean;
    void* square;
    void* largest;         // null: no amsgrad
    const void* row_lr;    // (M,)
    const void* row_eps;   // (M,)
    const void* row_old;   // (M,) 1 or 0
    const void* col_lr;    // (N,), like the next three; null: all ones
    const void* col_eps;
    const void* col_old;   // 1 or 0
    const void* col_centre;  // null: zeros
    int64_t M, N;
    double lr, beta1, beta2, eps, weight_decay;
    double correction1, correction2;  // 1 - beta^step
    double ratio;                     // of entries that are not old
    int32_t type;  // F32, F64 or BF16
    int32_t threads;
    int32_t isa;
    bool maximize;
};

void adamw_portable(const AdamwArgs&);
void adamw_avx2(const AdamwArgs&);
void adamw_avx512(const AdamwArgs&);

}  // namespace growkern
