// The rows of the KL + MLM loss on a GPU with thread-block clusters (sm_90 and later).
//
// A cluster copies one row of the student and of its K teachers into the shared memory of its
// blocks. Sums and gradient are computed from there, so every logit is read from the device's
// memory once. Equations are numbered in growkern/ops/loss/kl_mlm_loss.py.
// Letters: N rows, V vocabulary, K teachers.
#include "kl_mlm_state.h"

namespace growkern {

// columns that a thread processes at a time: 16 bytes of float32
constexpr int QUAD = 4;

// e = exp(x - base), given exp((x - base) / T); at T = 2, the usual temperature, it is its square
__device__ inline void whole_exp(const float (&x)[QUAD], float base, const float (&e_t)[QUAD],
                                 float inv_t, float (&e)[QUAD]) {
    if (inv_t == 1.0f || inv_t == 0.5f)
#pragma unroll
        for (int i = 0; i < QUAD; ++i) e[i] = inv_t == 1.0f ? e_t[i] : e_t[i] * e_t[i];
    else
#pragma unroll
        for (int i = 0; i < QUAD; ++i) e[i] = __expf(x[i] - base);
}

// position of the label in the quad that begins at column v; QUAD or more if it is not there
__device__ inline u32 place_of(int label, int v) { return static_cast<u32>(label - v); }

// (exp(r) - 1) / r, good to 5e-8 below 0.25
__device__ inline float expm1_ratio(float r) {
    const float tail = 1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720));
    return 1 + r * (0.5f + r * (1.0f / 6 + r * tail));
}

// a quad; only its first `left` columns exist
template <class T>
__device__ inline void load_logits(const T* at, int left, float cap, float (&x)[QUAD]) {
    const Pack<T, QUAD> raw = *reinterpret_cast<const Pack<T, QUAD>*>(at);
#pragma unroll
    for (int i = 0; i < QUAD; ++i) {
        x[i] = to_float(raw.x[i]);
        if (CAPPED && cap != 0) x[i] = i < left ? cap * tanhf(x[i] / cap) : minus_inf();
    }
}

// copies a slice into shared memory and fills its last quad up with -inf
template <class T>
__device__ inline void fetch(T* to, const T* from, int n) {
    copy_row(to, from, n);
    if (!ALIGNED)
#pragma unroll 1
        for (int i = n + threadIdx.x; i < (n + QUAD - 1) / QUAD * QUAD; i += THREADS)
            to[i] = narrow<T>(minus_inf());
    commit_copies();
}

// adds the bias to a slice in shared memory; null: there is none. Every thread adds to the quads
// that it alone reads later
template <class T>
__device__ inline void add_bias(T* to, const void* from, int first, int n) {
    if (!BIASED || from == nullptr) return;
    const BIAS* bias = static_cast<const BIAS*>(from) + first;
    for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS)
#pragma unroll
        for (int i = 0; i < QUAD; ++i)
            if (v + i < n) to[v + i] = narrow<T>(to_float(to[v + i]) + to_float(bias[v + i]));
}

__device__ inline float max_of(const float (&x)[QUAD]) {
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}

__device__ inline int first_of(const float (&x)[QUAD], float top) {
    return x[0] == top ? 0 : x[1] == top ? 1 : x[2] == top ? 2 : 3;
}

// StudentSums of n columns, except `columns`. The first of them is column `first` of the row; the
// label is counted from there
__device__ inline void student_pass(const STUDENT* z, int first, int n, int label,
                                    const RowsArgs& a, Partial& p) {
    float &m = p.m[0], &rest = p.sums[Partial::REST], &d_t = p.sums[Partial::STUDENT_SUM_T];
    float &moment = p.sums[Partial::MOMENT], &total = p.sums[Partial::SUM_Z];
    for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS) {
        float x[QUAD], e[QUAD], e_t[QUAD];
        load_logits(z + v, n - v, a.softcap, x);
        const float top = max_of(x);
        if (top > m) {
            const float rescale = __expf(m - top);
            rest *= rescale;
            moment *= rescale;
            d_t *= __expf((m - top) * a.inv_t);
            m = top;
            if (PARTS) p.best[0] = first + v + first_of(x, top);
        }
        const float base = base_of(m);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            e_t[i] = __expf((x[i] - base) * a.inv_t);
            d_t += e_t[i];
        }
        whole_exp(x, base, e_t, a.inv_t, e);
        if (PARTS)
#pragma unroll
            for (int i = 0; i < QUAD; ++i) moment += e[i] > 0 ? e[i] * x[i] : 0.0f;
        if (place_of(label, v) < QUAD)
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (i == place_of(label, v)) p.label_logit = x[i], e[i] = 0;
        rest += (e[0] + e[1]) + (e[2] + e[3]);
        if (a.label_smoothing != 0)
#pragma unroll
            for (int i = 0; i < QUAD; ++i) total += v + i < n ? x[i] : 0.0f;
    }
}

// TeacherSums, except centre and spread
__device__ inline void teacher_pass(const STUDENT* z, const TEACHER* u, int first, int n,
                                    const RowsArgs& a, int k, Partial& p) {
    float &m = p.m[1 + k], &d = p.sum_t(k), &cross = p.cross(k);
    for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS) {
        float x[QUAD], y[QUAD];
        load_logits(z + v, n - v, a.softcap, x);
        load_logits(u + v, n - v, a.teacher_softcap, y);
        const float top = max_of(y);
        if (top > m) {
            const float rescale = __expf((m - top) * a.inv_t);
            d *= rescale;
            cross *= rescale;
            m = top;
            if (PARTS) p.best[1 + k] = first + v + first_of(y, top);
        }
        const float base = base_of(m);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            const float w = __expf((y[i] - base) * a.inv_t);
            d += w;
            // 0 * (-inf - z) counts as 0, not NaN: a token of probability 0 costs nothing
            if (!(w <= 0)) cross += w * ((y[i] - x[i]) * a.inv_t);
        }
    }
}

// stores a quad in pieces as wide as the row's address allows
__device__ inline void store_quad(GRAD* to, const float (&g)[QUAD], int left) {
    Pack<GRAD, QUAD> quad;
#pragma unroll
    for (int i = 0; i < QUAD; ++i) quad.x[i] = narrow<GRAD>(g[i]);
    if ((ALIGNED || left >= QUAD) && is_aligned(to, sizeof(quad))) {
        *reinterpret_cast<Pack<GRAD, QUAD>*>(to) = quad;
    } else if (left >= QUAD && is_aligned(to, sizeof(quad) / 2)) {
        const auto* halves = reinterpret_cast<const Pack<GRAD, QUAD / 2>*>(&quad);
        for (int i = 0; i < 2; ++i) reinterpret_cast<Pack<GRAD, QUAD / 2>*>(to)[i] = halves[i];
    } else {
        for (int i = 0; i < QUAD && i < left; ++i) to[i] = quad.x[i];
    }
}

// the numbers of a row in (5): maxima, 1 / sums, and the constant part of log(q / p)
struct Softmaxes {
    float m, inv_d_t, m_u[1 + K], inv_d_u[1 + K], shift[1 + K];

    __device__ Softmaxes(const Partial& p, float inv_t) : m(base_of(p.m[0])) {
        const float d_t = p.sums[Partial::STUDENT_SUM_T];
        inv_d_t = 1 / d_t;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const float d_u = p.sum_t(k);
            m_u[k] = base_of(p.m[1 + k]);
            inv_d_u[k] = 1 / d_u;
            shift[k] = (m - m_u[k]) * inv_t + logf(d_t / d_u);
        }
    }
    // q - p of teacher k, where they are close as p * expm1(log q - log p)
    __device__ float difference(int k, float x, float y, float q, float inv_t) const {
        const float prob = __expf((y - m_u[k]) * inv_t) * inv_d_u[k];
        const float r = (x - y) * inv_t - shift[k];
        // false for NaN: both probabilities are 0
        return fabsf(r) < 0.25f ? prob * (r * expm1_ratio(r)) : q - prob;
    }
};

// Corrects `shift`, which is good to 1e-7 like the sums: that is 1e-5 of a gradient at 1 % drift.
// The sum of q - p should be 0, so it is the error. All threads of the cluster get the same
// correction. The caller must then wait at the cluster's barrier
__device__ inline void correct(Softmaxes& row, const STUDENT* z, const TEACHER* u, int n,
                               const RowsArgs& a, Scratch& scratch) {
    float error[1 + K] = {};
    for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS) {
        float x[QUAD], y[QUAD];
        load_logits(z + v, n - v, a.softcap, x);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            load_logits(u + k * a.span + v, n - v, a.teacher_softcap, y);
#pragma unroll
            for (int i = 0; i < QUAD; ++i) {
                const float q = __expf((x[i] - row.m) * a.inv_t) * row.inv_d_t;
                error[k] += row.difference(k, x[i], y[i], q, a.inv_t);
            }
        }
    }
    reduce_block<Sum>(error, scratch.reduce);
    if (threadIdx.x == 0)
#pragma unroll
        for (int k = 0; k < K; ++k) scratch.slice.sums[k] = error[k];
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int k = 0; k < K; ++k)
        error[k] = threadIdx.x % 32 < CLUSTER
                       ? load_of_block(&scratch.slice.sums[k], threadIdx.x % 32) : 0.0f;
    reduce_warp<Sum>(error);
#pragma unroll
    for (int k = 0; k < K; ++k) row.shift[k] += error[k];
    cluster_arrive();
}

// (4) to (6) and (9) of n columns; the label is counted from the first of them
__device__ inline void gradient_pass(const STUDENT* z, const TEACHER* u, int n, int label, int kind,
                                     const Partial& p, const Softmaxes& row, const RowsArgs& a,
                                     const float* drows, float count, GRAD* dstudent) {
    const float rest = p.sums[Partial::REST];
    const float m = row.m, e_y = __expf(p.label_logit - m), d = rest + e_y;
    const float dmlm = kind & MLM_ROW ? drows[0] : 0.0f;
    const float pull = dmlm * 2 * a.z_loss * (logf(d) + m), smooth = dmlm * a.label_smoothing;
    const float at_y = (pull * e_y - dmlm * rest) / d + smooth - smooth / count;
    const float per_e = (dmlm + pull) / d, everywhere = smooth / count;
    float dkl[1 + K];
#pragma unroll
    for (int k = 0; k < K; ++k) dkl[k] = kind & KL_ROW ? drows[(1 + k) * a.N] * a.inv_t : 0.0f;
    for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS) {
        float x[QUAD], y[QUAD], g[QUAD], q[QUAD];
        load_logits(z + v, n - v, a.softcap, x);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) q[i] = __expf((x[i] - m) * a.inv_t);
        whole_exp(x, m, q, a.inv_t, g);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) g[i] = per_e * g[i] - everywhere;  // (4), (9)
        if (place_of(label, v) < QUAD)
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (i == place_of(label, v)) g[i] = at_y;
#pragma unroll
        for (int i = 0; i < QUAD; ++i) q[i] *= row.inv_d_t;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            load_logits(u + k * a.span + v, n - v, a.teacher_softcap, y);
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (kind & KL_ROW)
                    g[i] += dkl[k] * row.difference(k, x[i], y[i], q[i], a.inv_t);  // (5)
        }
        if (CAPPED && a.softcap != 0)
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                g[i] *= 1 - (x[i] / a.softcap) * (x[i] / a.softcap);  // (6)
        store_quad(dstudent + v, g, n - v);
    }
}

// the state and the gradient of a row without a term; its logits are not read
__device__ inline void pass_over(const RowsArgs& a, i64 row, int first, int n) {
    constexpr u32 label_logit = static_cast<u32>(StudentSums::label_logit);
    if (a.sums && first == 0 && threadIdx.x < STUDENT_SUMS + TEACHER_SUMS * K)
        a.state[threadIdx.x * a.N + row] = threadIdx.x == label_logit ? minus_inf() : 0.0f;
    const float zeros[QUAD] = {};
    if (a.grad)
        for (int v = QUAD * threadIdx.x; v < n; v += QUAD * THREADS)
            store_quad(a.dstudent + row * a.dstudent_stride + first + v, zeros, n - v);
}

}  // namespace growkern

// a grid of N * CLUSTER blocks
extern "C" __global__ void __launch_bounds__(THREADS, 2) __cluster_dims__(CLUSTER)
kl_mlm_rows(const __grid_constant__ growkern::RowsArgs a) {
    using namespace growkern;
    const i64 row = blockIdx.x / CLUSTER;
    const int first = blockIdx.x % CLUSTER * a.span, n = max(0, min(a.span, a.V - first));
    const int kind = a.kind[row];
    if (kind == 0) return pass_over(a, row, first, n);

    STUDENT* z = static_cast<STUDENT*>(dynamic_shared());  // (span,)
    TEACHER* u = reinterpret_cast<TEACHER*>(z + a.span);   // (K, span)
    Scratch& scratch = *reinterpret_cast<Scratch*>(u + K * a.span);
    fetch(z, a.student + row * a.student_stride + first, n);
#pragma unroll
    for (int k = 0; k < K; ++k)
        fetch(u + k * a.span, a.teacher[k] + row * a.teacher_stride[k] + first, n);
    // int64: a label on another slice of the vocabulary may be any number
    const i64 given = kind & MLM_ROW ? a.labels[row] : -1;
    // counted from this block's first column, as in the passes; negative if it is not in the row
    const int label = given >= 0 && given < a.V ? static_cast<int>(given) - first : -1;

    Partial p = nothing_seen(a.V);
    if (a.sums) {
        // the student is summed while the teachers' rows are being copied
        wait_copies(K);
        __syncthreads();
        add_bias(z, a.student_bias, first, n);
        student_pass(z, first, n, label, a, p);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            wait_copies(K - 1 - k);
            __syncthreads();
            add_bias(u + k * a.span, a.teacher_bias[k], first, n);
            teacher_pass(z, u + k * a.span, first, n, a, k, p);
        }
        merge(p, a.inv_t, a.V, OverBlock{scratch.reduce});
        merge_cluster(p, a, scratch);
        if (first == 0 && threadIdx.x == 0) store_state(p, a, a.state + row);
    } else {
        p = load_state(a, a.state + row);
        wait_copies(0);
        __syncthreads();
        add_bias(z, a.student_bias, first, n);
#pragma unroll
        for (int k = 0; k < K; ++k) add_bias(u + k * a.span, a.teacher_bias[k], first, n);
        cluster_arrive();
    }
    // the gradient may overwrite logits of other blocks: after this all have copied theirs
    cluster_wait();
    if (!a.grad) return;
    Softmaxes both(p, a.inv_t);
    const float count = a.sums ? a.V : number(a.state + row, StudentSums::columns, a.N);
    // a narrower gradient lacks those digits; over a slice of the vocabulary the sum is not 0
    const bool corrects = K > 0 && sizeof(GRAD) == 4 && count == a.V;
    if (corrects) correct(both, z, u, n, a, scratch);
    gradient_pass(z, u, n, label, kind, p, both, a, a.drows + row, count,
                  a.dstudent + row * a.dstudent_stride + first);
    // no block may end while others read its sums
    if (corrects) cluster_wait();
}
