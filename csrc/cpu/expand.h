// The arguments of expand on a CPU, and the plan that its kernels follow.
//
// The formulas are (1) to (4) of growkern/ops/expand/expand_op.py. Letters: R, C rows and columns
// of the weight; M, N those of the output. "Virtual" rows and columns count on from the weight into
// `upper`: virtual rows are 0 .. 2R-1, virtual columns 0 .. 2C-1.
#pragma once
#include <cmath>

#include "../line_hash.h"
#include "native.h"

// compiled once for each type, not again in every kernel that calls it: these kernels have 16 pairs
// of types, and every call is about hundreds of columns
#define GROWKERN_ONCE __attribute__((noinline))

namespace growkern {

// the same fields in the same order as in growkern/ops/expand/on_cpu.py
struct ExpandArgs {
    const void* weight;        // (R, C), columns contiguous
    const void* upper;         // (R, C), columns contiguous; null: no index passes the end
    void* out;                 // (M, N)  out, any strides
    const int64_t* rows;       // (M,); null: 0 .. M-1
    const int64_t* cols;       // (N,); null: 0 .. N-1
    const void* row_scale;     // (M,) float, double if weight or output is; null: 1
    const void* col_scale;     // (N,)
    const void* row_factor;    // (M,) `noise_of_entries` of growkern/ops/expand/hashes.py; null: no
    const void* col_factor;    // (N,) noise on this axis
    const int32_t* noise_source;  // (M,) with noise on the rows, (N,) on the columns
    const int32_t* row_copies; // (M,) packed as in growkern/ops/expand/call.py; null: no routing
    const int32_t* col_copies; // (N,)
    const int32_t* line_key;   // (M,) with noise or routing on the columns, (N,) on the rows
    const int32_t* line_mult;  // like line_key
    int64_t R, C, M, N;
    int64_t weight_stride, upper_stride, out_stride_m, out_stride_n;  // in elements
    int32_t in_type, out_type;
    int32_t threads;
    int32_t isa;
    float larger_share;        // of routing
};

// columns from .. from + n - 1 of the output read virtual columns source, source + 1, ...
struct Run {
    int64_t from, n, source;
};

// the numbers h of hashes.py for which (4) chooses a copy: first .. first + last
struct Interval {
    uint32_t first, last;
};

struct ExpandPlan {
    const ExpandArgs* args;
    int64_t n_sources;        // how many virtual rows are read
    const int64_t* source;    // (n_sources,) which ones, ascending
    const int64_t* first;     // (n_sources + 1,) where the output rows of each begin in `target`
    const int64_t* target;    // (M,) output rows, grouped by source
    const int32_t* cols;      // (N + 32,) virtual columns, padded with 0
    const Run* runs;          // (n_runs,) by `from`; null: gather the columns one by one
    int64_t n_runs;
    int64_t virtual_columns;  // 1 + the largest virtual column that is read
    const int16_t* col_steps;  // (N,) `power_step` of the column scales; null: some have none
    const uint32_t* chosen_first; // (N,) `Interval` of every column, with routing on the columns
    const uint32_t* chosen_last;
    bool streaming;           // write past the caches
    bool scales_sources;      // no factors but a row scale, alike for all copies of a row
    bool alike_columns;       // bfloat16 or float32: all have one column scale and noise factor
    bool signs_in_runs;       // `noise_source` counts on with the columns of a run
};

// without external linkage: every instruction set gets its own copy
namespace {

// floor(h count / 2**32) = number if and only if h is at least number 2**32 / count, and below
// (number + 1) 2**32 / count
inline Interval chosen_interval(int32_t packed) {
    const uint64_t number = number_of(packed), count = count_of(packed), all = uint64_t{1} << 32;
    const uint64_t first = (number * all + count - 1) / count;
    const uint64_t end = ((number + 1) * all + count - 1) / count;
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(end - 1 - first)};
}

// sets `step` to what a scale of 2**k adds to the bits of a bfloat16, k * 2**7; false if the scale
// is no such power of 2
inline bool power_step(double scale, int16_t& step) {
    int exponent;
    if (std::frexp(scale, &exponent) != 0.5 || exponent < -125 || exponent > 127) return false;
    step = static_cast<int16_t>((exponent - 1) * 128);
    return true;
}

}  // namespace

void expand_portable(const ExpandPlan&);
void expand_avx2(const ExpandPlan&);
void expand_avx512(const ExpandPlan&);

}  // namespace growkern
