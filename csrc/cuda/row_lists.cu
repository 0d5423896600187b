// Lists of the output rows that read each row of the weight, for expand_rows.cu.
//
// A list has any order: each output row is written by itself. So nothing has to be sorted.
#include "device.h"

// growkern/ops/expand/on_cuda.py defines it; the value here lets the file compile by itself
#ifndef THREADS
#define THREADS 256
#endif

namespace growkern {

// the same fields in the same order as in growkern/ops/expand/on_cuda.py
struct RowListsArgs {
    const i64* rows;  // (M,) virtual rows
    i32* first;       // (2R,) in: -1; out: at 2r and 2r + 1, the first of the output rows that read
                      // row r of the weight and of `upper`
    i32* after;       // (M,) out: the next one in the list of this output row; -1: none
    i32 R, M;
};

}  // namespace growkern

// a grid of at least M threads
extern "C" __global__ void __launch_bounds__(THREADS)
row_lists(const __grid_constant__ growkern::RowListsArgs a) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.M) return;
    const growkern::i64 row = a.rows[i];
    const bool in_upper = row >= a.R;
    a.after[i] = atomicExch(a.first + 2 * (row - (in_upper ? a.R : 0)) + in_upper, i);
}
