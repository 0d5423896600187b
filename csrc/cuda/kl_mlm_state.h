// Arguments of the loss's row kernel on a GPU, and the sums it keeps of a row.
//
// growkern/ops/loss/rows/state.py explains the numbers of a row; a test compares the names below
// with those there. Letters: N rows, V vocabulary, K teachers, S numbers of a row.
#pragma once
#include "../maths.h"
#include "device.h"

// set by the launch (growkern/ops/loss/rows/on_cuda.py); with these values the file compiles alone
#ifndef TEACHERS
#define TEACHERS 1      // K
#define STUDENT float   // types of the logits and of the gradient: float, bf16, f16
#define TEACHER float
#define GRAD float
#define CLUSTER 8       // blocks that share a row
#define THREADS 256     // of a block
#define CAPPED 0        // whether any logits are capped
#define BIASED 0        // whether any logits get a bias here
#define BIAS float      // type of the biases
#define PARTS 0         // whether entropy and top-1 agreement are wanted
#endif

namespace growkern {

constexpr int K = TEACHERS, MAX_TEACHERS = 4;
static_assert(K <= MAX_TEACHERS && CLUSTER <= 32 && THREADS % 32 == 0, "see rows/on_cuda.py");

// the rows of the state: StudentSums, then TeacherSums of each teacher
enum class StudentSums { maximum, rest, sum_t, label_logit, moment, best, sum_z, columns };
enum class TeacherSums { maximum, sum_t, cross, best, centre, spread };
constexpr int STUDENT_SUMS = 8, TEACHER_SUMS = 6;

// bits of `kind`: which terms a row has
constexpr i32 MLM_ROW = 1, KL_ROW = 2;

// mirrored in growkern/ops/loss/rows/on_cuda.py; strides are in elements
struct RowsArgs : Maths<float> {
    const STUDENT* student;                // (N, V)
    const TEACHER* teacher[MAX_TEACHERS];  // (N, V) each
    const void* student_bias;              // (V,) BIAS each; null: there is none
    const void* teacher_bias[MAX_TEACHERS];
    const i64* labels;                     // (N,)
    const i32* kind;                       // (N,)
    const float* drows;                    // (1 + K, N) with `grad`
    float* state;                          // (S, N)  out with `sums`, else in
    GRAD* dstudent;                        // (N, V)  out with `grad`; may begin where student does
    i64 student_stride, dstudent_stride, teacher_stride[MAX_TEACHERS];
    i64 N;
    i32 V;
    i32 span;  // columns of a block, a multiple of 8: of 16 bytes in every type
    bool sums, grad;  // `Steps` of rows/state.py
};

// a number of a row's state; `state` points to the row's first number
__device__ inline float& number(float* state, StudentSums s, i64 N) {
    return state[static_cast<int>(s) * N];
}
__device__ inline float& number(float* state, int k, TeacherSums s, i64 N) {
    return state[(STUDENT_SUMS + TEACHER_SUMS * k + static_cast<int>(s)) * N];
}

// sums over some columns of a row: of a thread, then of a block, then of the cluster
struct Partial {
    // in `sums`: those of the student, then OF_TEACHER of each teacher
    enum { REST, STUDENT_SUM_T, MOMENT, SUM_Z, OF_STUDENT };
    enum { SUM_T, CROSS, OF_TEACHER };
    static constexpr int N_SUMS = OF_STUDENT + OF_TEACHER * K;

    float m[1 + K], best[1 + K];  // of the student, then of the teachers; m is -inf at the start
    float label_logit;
    float sums[N_SUMS];

    __device__ float& sum_t(int k) { return sums[OF_STUDENT + OF_TEACHER * k + SUM_T]; }
    __device__ float& cross(int k) { return sums[OF_STUDENT + OF_TEACHER * k + CROSS]; }
    __device__ float sum_t(int k) const { return sums[OF_STUDENT + OF_TEACHER * k + SUM_T]; }
    __device__ float cross(int k) const { return sums[OF_STUDENT + OF_TEACHER * k + CROSS]; }
};
constexpr int PARTIAL_FLOATS = sizeof(Partial) / sizeof(float);

struct Scratch {
    float reduce[THREADS / 32 * Partial::N_SUMS];
    Partial slice, row;
};
#ifdef SCRATCH_BYTES
static_assert(sizeof(Scratch) == SCRATCH_BYTES, "see rows/on_cuda.py");
#endif

// a base with which exp(-inf - base) is 0 while there is no finite logit
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

// merges the sums of the threads of a block, or the lanes of a warp; all of them get the result
template <class Threads>
__device__ inline void merge(Partial& p, float inv_t, int V, const Threads& threads) {
    float top[2 + K] = {p.label_logit}, best[1 + K];
#pragma unroll
    for (int j = 0; j <= K; ++j) top[1 + j] = p.m[j];
    threads.template reduce<Max>(top);
#pragma unroll
    for (int j = 0; j <= K; ++j) {
        const float below = p.m[j] - base_of(top[1 + j]);
        const float near_t = __expf(below * inv_t);
        if (j == 0) {
            const float near = __expf(below);
            p.sums[Partial::REST] *= near;
            p.sums[Partial::STUDENT_SUM_T] *= near_t;
            p.sums[Partial::MOMENT] *= near;
        } else {
            p.sum_t(j - 1) *= near_t;
            p.cross(j - 1) *= near_t;
        }
        best[j] = p.m[j] == top[1 + j] ? p.best[j] : V;
        p.m[j] = top[1 + j];
    }
    threads.template reduce<Sum>(p.sums);
    p.label_logit = top[0];
    if (PARTS) {
        threads.template reduce<Min>(best);
#pragma unroll
        for (int j = 0; j <= K; ++j) p.best[j] = best[j];
    }
}

// the sums of no columns
__device__ inline Partial nothing_seen(int V) {
    Partial p;
#pragma unroll
    for (int j = 0; j <= K; ++j) p.m[j] = minus_inf(), p.best[j] = V;
    p.label_logit = minus_inf();
#pragma unroll
    for (int i = 0; i < Partial::N_SUMS; ++i) p.sums[i] = 0;
    return p;
}

// merges the sums of the cluster's blocks. The caller must then wait at the cluster's barrier
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
    // no block may end while others read its slice: all have done so when the caller has waited
    cluster_arrive();
    __syncthreads();
    p = scratch.row;
}

__device__ inline void store_state(const Partial& p, const RowsArgs& a, float* state) {
    using S = StudentSums;
    number(state, S::maximum, a.N) = base_of(p.m[0]);
    number(state, S::rest, a.N) = p.sums[Partial::REST];
    number(state, S::sum_t, a.N) = p.sums[Partial::STUDENT_SUM_T];
    number(state, S::label_logit, a.N) = p.label_logit;
    number(state, S::moment, a.N) = p.sums[Partial::MOMENT];
    number(state, S::best, a.N) = p.best[0];
    number(state, S::sum_z, a.N) = p.sums[Partial::SUM_Z];
    number(state, S::columns, a.N) = static_cast<float>(a.V);
    for (int k = 0; k < K; ++k) {
        using T = TeacherSums;
        number(state, k, T::maximum, a.N) = base_of(p.m[1 + k]);
        number(state, k, T::sum_t, a.N) = p.sum_t(k);
        number(state, k, T::cross, a.N) = p.cross(k);
        number(state, k, T::best, a.N) = p.best[1 + k];
        number(state, k, T::centre, a.N) = 0;
        number(state, k, T::spread, a.N) = 0;
    }
}

// the sums of a stored state that the gradient needs
__device__ inline Partial load_state(const RowsArgs& a, float* state) {
    Partial p = nothing_seen(a.V);
    p.m[0] = number(state, StudentSums::maximum, a.N);
    p.sums[Partial::REST] = number(state, StudentSums::rest, a.N);
    p.sums[Partial::STUDENT_SUM_T] = number(state, StudentSums::sum_t, a.N);
    p.label_logit = number(state, StudentSums::label_logit, a.N);
    for (int k = 0; k < K; ++k) {
        p.m[1 + k] = number(state, k, TeacherSums::maximum, a.N);
        p.sum_t(k) = number(state, k, TeacherSums::sum_t, a.N);
    }
    return p;
}

}  // namespace growkern
