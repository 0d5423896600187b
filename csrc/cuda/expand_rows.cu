// expand on a GPU: a block of threads reads one row of the weight and writes all its copies.
//
// The row is copied into shared memory once. This matters most for a weight in pinned memory of the
// host, where the bus is slow. Columns are gathered from shared memory once for all output rows
// that read this row. The output is written 16 bytes at a time.
//
// (1) to (4) stand in growkern/ops/expand/expand_op.py. Letters: R, C rows and columns of the
// weight; M, N those of the output. "Virtual" rows and columns count on from the weight into
// `upper`: virtual rows are 0 .. 2R-1, virtual columns 0 .. 2C-1.
//
// Compile with --fmad=false: a fused product and sum would differ from the other backends.
#include "../line_hash.h"
#include "device.h"

// growkern/ops/expand/on_cuda.py defines these; the values here let the file compile by itself
#ifndef IN
#define IN bf16      // types of weight and output: float, bf16, f16, double
#define OUT bf16
#define ACC float    // what is computed with: IN if numbers are copied, double if one of them is
#define UPPER 0      // whether there is an `upper`
#define NOISE 0      // the kind of noise or routing, one of the numbers below
#define SHARE 1.f    // of routing: what the chosen copy gets
#define SCALED 1     // whether rows or columns are scaled
#define THREADS 256
#endif

namespace growkern {

// values of NOISE, the same as in growkern/ops/expand/call.py; 0: neither noise nor routing
constexpr int ROW_NOISE = 1, COL_NOISE = 2, ROW_ROUTING = 3, COL_ROUTING = 4;

// columns a thread takes at a time: 16 bytes of the output
constexpr int WIDTH = 16 / sizeof(OUT);

// the same fields in the same order as in growkern/ops/expand/on_cuda.py; strides are in elements
struct ExpandRowsArgs {
    const IN* weight;         // (R, C), columns contiguous; on the device or pinned on the host
    const IN* upper;          // (R, C), likewise
    OUT* out;                 // (M, N)  out, any strides
    const i64* rows;          // (M,) virtual rows; null, like the next two: 0 .. M-1
    i32* first;               // (2R,) at 2r and 2r + 1, an output row that reads row r of the
                              // weight and of `upper`; -1: there is none, as before `row_lists`
    i32* after;               // (M,) another output row that reads the same row; -1: no more
    const i32* cols;          // (N,) virtual columns; null: 0 .. N-1
    const ACC* row_scale;     // (M,); null: 1
    const ACC* col_scale;     // (N,)
    const ACC* noise;         // (M,) with noise on the rows, (N,) with noise on the columns
    const i32* copies;        // the same for routing; packed as in growkern/ops/expand/call.py
    const i32* line_key;      // (N,) with noise or routing on the rows, (M,) on the columns
    const i32* line_mult;     // like line_key
    i64 weight_stride, upper_stride, out_stride_m, out_stride_n;
    i32 R, C, M, N;
    i32 staged;               // whether a row of weight and upper fits into shared memory
};

constexpr bool NOISY = NOISE == ROW_NOISE || NOISE == COL_NOISE;

// Doubled sizes have two output rows for each source row. With noise, two rows that are stored in
// pieces need more than the 80 registers with which three blocks fit on a multiprocessor.
constexpr int ROWS_AT_ONCE = NOISY && !ALIGNED ? 1 : 2;

// loads WIDTH numbers from column j on. `other` replaces all of them if `from` is null, and those
// of columns from N on.
template <class T, class U>
__device__ inline void load_columns(const T* from, int j, int N, U other, U (&x)[WIDTH]) {
    if (from && (ALIGNED || j + WIDTH <= N) && is_aligned(from, alignof(Pack<T, WIDTH>))) {
        const Pack<T, WIDTH> pack = *reinterpret_cast<const Pack<T, WIDTH>*>(from + j);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) x[k] = pack.x[k];
    } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) x[k] = from && j + k < N ? from[j + k] : other;
    }
}

// what (3) of growkern/ops/expand/hashes.py needs of an entry of the noisy axis: 1 + |size|, or -1
// where the size is 0 and no sign counts; and its source, where 2^31 is added for a negative size
__device__ inline ACC factor_of(ACC size) { return size == 0 ? -1 : 1 + fabs(size); }
__device__ inline i32 source_of(ACC size, i32 source) {
    return size < 0 ? source ^ TOP_BIT : source;
}

// the maps and factors of columns j .. j + WIDTH - 1, which are the same for all output rows
struct Columns {
    i32 source[WIDTH];  // virtual columns; with COL_NOISE `source_of`
    ACC scale[WIDTH];
    i32 key[WIDTH], mult[WIDTH];
    ACC factor[WIDTH];  // `factor_of`
    u32 number[WIDTH], count[WIDTH];  // of copies

    __device__ i32 index(int k) const {
        return NOISE == COL_NOISE ? source[k] & ~TOP_BIT : source[k];
    }

    __device__ Columns(const ExpandRowsArgs& a, int j) {
        load_columns(a.cols, j, a.N, 0, source);
        if (!a.cols)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) source[k] = j + k < a.N ? j + k : 0;
        if (SCALED) load_columns(a.col_scale, j, a.N, ACC(1), scale);
        if (NOISE == ROW_NOISE || NOISE == ROW_ROUTING) {
            load_columns(a.line_key, j, a.N, 0, key);
            load_columns(a.line_mult, j, a.N, 0, mult);
        }
        if (NOISE == COL_ROUTING) {
            i32 copies[WIDTH];
            load_columns(a.copies, j, a.N, 1 << 16, copies);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                number[k] = number_of(copies[k]);
                count[k] = count_of(copies[k]);
            }
        }
        if (NOISE == COL_NOISE) {
            load_columns(a.noise, j, a.N, ACC(0), factor);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                source[k] = source_of(factor[k], source[k]);
                factor[k] = factor_of(factor[k]);
            }
        }
    }
};

// whether the columns lie together in the weight, at an address that one load can read. ALIGNED
// does not tell, because the map decides it.
__device__ inline bool is_run(const IN* weight, const Columns& columns) {
    const i32 first = columns.index(0);
    bool together = reinterpret_cast<u64>(weight + first) % alignof(Pack<IN, WIDTH>) == 0;
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) together &= columns.index(k) == first + k;
    return together;
}

// (2) for one row. Virtual columns below C read `left`, the others read `right`.
__device__ inline void gather(const ExpandRowsArgs& a, const IN* left, const IN* right,
                              const Columns& columns, ACC (&x)[WIDTH]) {
    if (!UPPER && is_run(left, columns)) {
        // one wide load: single elements, 16 bytes apart, would cause bank conflicts
        const auto pack = *reinterpret_cast<const Pack<IN, WIDTH>*>(left + columns.index(0));
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) x[k] = pack.x[k];
        return;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const int c = columns.index(k);
        x[k] = !UPPER || c < a.C ? left[c] : right[c - a.C];
    }
}

// x with its sign turned round if the top bit of `sign` is set
__device__ inline float turned(float x, u32 sign) {
    return __uint_as_float(__float_as_uint(x) ^ sign);
}
__device__ inline double turned(double x, u32 sign) { return sign ? -x : x; }

// (3) and (4) without its last rounding, for output row i, which reads virtual row r
__device__ inline void add_noise(const ExpandRowsArgs& a, const Columns& columns, int i, int r,
                                 ACC (&x)[WIDTH]) {
    constexpr bool by_row = NOISE == ROW_NOISE;
    const ACC size = by_row ? a.noise[i] : ACC(0), factor = factor_of(size);
    const u32 row = source_of(size, r);
    const u32 key = by_row ? 0 : a.line_key[i], mult = by_row ? 0 : a.line_mult[i];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const ACC of_entry = by_row ? factor : columns.factor[k];
        const u32 hash = by_row ? line_hash(columns.key[k], columns.mult[k], row)
                                : line_hash(key, mult, columns.source[k]);
        const u32 sign = hash & ~__float_as_uint(of_entry) & TOP_BIT;
        const ACC larger = OUT(x[k] * fabs(of_entry));
        x[k] = x[k] + turned(larger - x[k], sign);
    }
}

// (5) of hashes.py, for copy `number` of `count`
__device__ inline ACC routed(ACC x, u32 key, u32 mult, u32 source, u32 number, u32 count) {
    const u32 first = first_choice(key, mult, source, count);
    const ACC none = 0;
    if (SHARE == 1.f) return first == number ? x : none;
    if (count == 1) return x;
    const ACC whole = OUT(x), larger = OUT(whole * ACC(SHARE)), rest = whole - larger;
    return first == number ? larger : second_choice(first, mult, count) == number ? rest : none;
}

// (1) in its order, for output row i, which reads virtual row r
__device__ inline void scale(const ExpandRowsArgs& a, const Columns& columns, int i, int r,
                             ACC (&x)[WIDTH]) {
    const ACC row_scale = SCALED && a.row_scale ? a.row_scale[i] : ACC(1);
    const u32 key = NOISE == COL_ROUTING ? a.line_key[i] : 0;
    const u32 mult = NOISE == COL_ROUTING ? a.line_mult[i] : 0;
    const i32 copy = NOISE == ROW_ROUTING ? a.copies[i] : 0;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        // a scale that is null is 1: asking for each element takes as long as the product
        if (SCALED) x[k] = x[k] * row_scale * columns.scale[k];
        if (NOISE == ROW_ROUTING)
            x[k] =
                routed(x[k], columns.key[k], columns.mult[k], r, number_of(copy), count_of(copy));
        if (NOISE == COL_ROUTING)
            x[k] = routed(x[k], key, mult, columns.source[k], columns.number[k], columns.count[k]);
    }
    if (NOISY) add_noise(a, columns, i, r, x);
}

__device__ inline void store(const ExpandRowsArgs& a, int i, int j, const ACC (&x)[WIDTH]) {
    OUT* to = a.out + i * a.out_stride_m + j * a.out_stride_n;
    Pack<OUT, WIDTH> pack;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) pack.x[k] = x[k];
    if (ALIGNED || (a.out_stride_n == 1 && j + WIDTH <= a.N && is_aligned(to, 16)))
        *reinterpret_cast<Pack<OUT, WIDTH>*>(to) = pack;
    else
#pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            if (j + k < a.N) to[k * a.out_stride_n] = pack.x[k];
}

}  // namespace growkern

// Lists the output rows that read each row of the weight, by a grid of at least M threads. A list
// has any order, as each output row is written by itself: nothing has to be sorted.
extern "C" __global__ void __launch_bounds__(THREADS)
row_lists(const __grid_constant__ growkern::ExpandRowsArgs a) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.M) return;
    const growkern::i64 row = a.rows[i];
    const bool in_upper = row >= a.R;
    a.after[i] = atomicExch(a.first + 2 * (row - (in_upper ? a.R : 0)) + in_upper, i);
}

// a grid of R blocks
extern "C" __global__ void __launch_bounds__(THREADS, NOISE ? 3 : 4)
expand_rows(const __grid_constant__ growkern::ExpandRowsArgs a) {
    using namespace growkern;
    const int row = blockIdx.x;
    // without `upper`, all output rows read the weight
    const int below = a.first ? a.first[2 * i64(row)] : row;
    const int above = UPPER && a.first ? a.first[2 * i64(row) + 1] : -1;
    if (below < 0 && above < 0) return;

    const IN* weight = below >= 0 ? a.weight + row * a.weight_stride : nullptr;
    // columns may read `upper` too
    const IN* upper = UPPER && (above >= 0 || a.cols) ? a.upper + row * a.upper_stride : nullptr;
    if (a.staged) {
        IN* shared = static_cast<IN*>(dynamic_shared());
        if (weight) weight = copy_row(shared, weight, a.C);
        if (upper) upper = copy_row(shared + (a.C + 15) / 8 * 8, upper, a.C);
        wait_copies();
        __syncthreads();
    }
    for (int j = WIDTH * threadIdx.x; j < a.N; j += WIDTH * THREADS) {
        const Columns columns(a, j);
#pragma unroll 1
        for (int side = 0; side <= UPPER; ++side) {
            int i = side ? above : below;
            if (i < 0) continue;
            ACC found[WIDTH];
            gather(a, side ? upper : weight, upper, columns, found);
#pragma unroll ROWS_AT_ONCE
            while (i >= 0) {
                const int next = a.first ? a.after[i] : -1;
                ACC x[WIDTH];
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) x[k] = found[k];
                scale(a, columns, i, side ? a.R + row : row, x);
                store(a, i, j, x);
                i = next;
            }
        }
    }
}
