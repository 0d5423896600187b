// What the row kernel is told, and what it knows of a row: sums that merge, in the order of
// growkern/ops/loss/rows/state.py. Letters: N rows, V vocabulary, K teachers, S = 8 + 6 K numbers.
#pragma once
#include "device.h"

// what the launch decides (growkern/ops/loss/rows/on_cuda.py); these let the file compile by itself
#ifndef TEACHERS
#define TEACHERS 1      // K
#define STUDENT float   // types of the logits and of the gradient: float, bf16, f16
#define TEACHER float
#define GRAD float
#define CLUSTER 8       // blocks that share a row
#define THREADS 256     // of a block
#define CAPPED 0        // whether any logits are
#define PARTS 0         // whether entropy and top-1 agreement are wanted
#endif

namespace growkern {

constexpr int K = TEACHERS, MAX_TEACHERS = 4;
static_assert(K <= MAX_TEACHERS && CLUSTER <= 32 && THREADS % 32 == 0, "see rows/on_cuda.py");

// mirrored field by field in growkern/ops/loss/rows/on_cuda.py; strides are in elements
struct RowsArgs {
    const STUDENT* student;                // (N, V)
    const TEACHER* teacher[MAX_TEACHERS];  // (N, V) each
    const i64* labels;                     // (N,)
    const i32* kind;                       // (N,) bits: 1 the label counts, 2 the teachers do
    const float* drows;                    // (1 + K, N) with `grad`
    float* state;                          // (S, N)  out with `sums`, else in
    GRAD* dstudent;                        // (N, V)  out with `grad`; may begin where student does
    i64 student_stride, dstudent_stride, teacher_stride[MAX_TEACHERS];
    i64 N;
    i32 V;
    i32 span;  // columns of a block, a multiple of 8: of 16 bytes in every type
    i32 sums, grad;
    float inv_t, cap, teacher_cap, smoothing, z_loss;  // caps of 0: none
};

// sums over some columns of a row, first of a thread, then of a block, at last of the cluster
struct Partial {
    float m[1 + K], best[1 + K];  // of the student, then of the teachers; m = -inf: none seen yet
    float z_y;
    float sums[4 + 2 * K];  // rest, d_t, moment, sum_z, then d and cross of each teacher
};
constexpr int PARTIAL_FLOATS = sizeof(Partial) / sizeof(float);

struct Scratch {
    float reduce[THREADS / 32 * (4 + 2 * K)];
    Partial slice, row;
};

// so that exp(-inf - base) is 0 where there is no finite logit yet
__device__ inline float base_of(float m) { return m == minus_inf() ? 0.0f : m; }

struct OverBlock {
    float* scratch;
    template <class Op, int n>
    __device__ void reduce(float (&x)[n]) const { reduce_block<Op>(x, scratch); }
};
struct OverWarp {
    template <class Op, int n>
    __device__ void reduce(float (&x)[n]) const { reduce_warp<Op>(x); }
};

// what the threads of a block, or the lanes of a warp, have seen together: all of them get it
template <class Threads>
__device__ inline void merge(Partial& p, float inv_t, int V, const Threads& threads) {
    float top[2 + K] = {p.z_y}, best[1 + K];
#pragma unroll
    for (int j = 0; j <= K; ++j) top[1 + j] = p.m[j];
    threads.template reduce<Max>(top);
#pragma unroll
    for (int j = 0; j <= K; ++j) {
        const float below = p.m[j] - base_of(top[1 + j]);
        const float near_t = __expf(below * inv_t);
        if (j == 0) {
            const float near = __expf(below);
            p.sums[0] *= near;
            p.sums[1] *= near_t;
            p.sums[2] *= near;
        } else {
            p.sums[2 + 2 * j] *= near_t;
            p.sums[3 + 2 * j] *= near_t;
        }
        best[j] = p.m[j] == top[1 + j] ? p.best[j] : V;
        p.m[j] = top[1 + j];
    }
    threads.template reduce<Sum>(p.sums);
    p.z_y = top[0];
    if (PARTS) {
        threads.template reduce<Min>(best);
#pragma unroll
        for (int j = 0; j <= K; ++j) p.best[j] = best[j];
    }
}

// a part that has seen nothing
__device__ inline Partial nothing_seen(int V) {
    Partial p;
#pragma unroll
    for (int j = 0; j <= K; ++j) p.m[j] = minus_inf(), p.best[j] = V;
    p.z_y = minus_inf();
#pragma unroll
    for (int i = 0; i < 4 + 2 * K; ++i) p.sums[i] = 0;
    return p;
}

// merges the blocks' parts; leaves the cluster's barrier half passed, for the caller to wait
__device__ inline void merge_cluster(Partial& p, const RowsArgs& a, Scratch& scratch) {
    if (threadIdx.x == 0) scratch.slice = p;
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x < 32) {
        p = nothing_seen(a.V);
        float* mine = reinterpret_cast<float*>(&p);
        const float* slice = reinterpret_cast<const float*>(&scratch.slice);
        if (threadIdx.x < CLUSTER)
#pragma unroll
            for (int i = 0; i < PARTIAL_FLOATS; ++i)
                mine[i] = load_of_block(slice + i, threadIdx.x);
        merge(p, a.inv_t, a.V, OverWarp{});
        if (threadIdx.x == 0) scratch.row = p;
    }
    // no block may end while others read its slice: all have once the second half is passed
    cluster_arrive();
    __syncthreads();
    p = scratch.row;
}

__device__ inline void store_state(const Partial& p, const RowsArgs& a, float* state) {
    const float student[8] = {base_of(p.m[0]), p.sums[0], p.sums[1], p.z_y,
                              p.sums[2],       p.best[0], p.sums[3], static_cast<float>(a.V)};
    for (int j = 0; j < 8; ++j) state[j * a.N] = student[j];
    for (int k = 0; k < K; ++k) {
        const float teacher[6] = {base_of(p.m[1 + k]), p.sums[4 + 2 * k], p.sums[5 + 2 * k],
                                  p.best[1 + k],       0,                 0};
        for (int j = 0; j < 6; ++j) state[(8 + 6 * k + j) * a.N] = teacher[j];
    }
}

// what the gradient needs of a state
__device__ inline Partial load_state(const RowsArgs& a, const float* state) {
    Partial p = nothing_seen(a.V);
    p.m[0] = state[0];
    p.sums[0] = state[a.N];
    p.sums[1] = state[2 * a.N];
    p.z_y = state[3 * a.N];
    for (int k = 0; k < K; ++k) {
        p.m[1 + k] = state[(8 + 6 * k) * a.N];
        p.sums[4 + 2 * k] = state[(9 + 6 * k) * a.N];
    }
    return p;
}

}  // namespace growkern
