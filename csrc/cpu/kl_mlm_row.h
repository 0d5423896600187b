// One row of the KL + MLM loss: its logits as numbers that can be summed, its place in the
// arguments, and the parts of its gradient that do not depend on a teacher.
#pragma once
#include <cstring>

#include "functions.h"
#include "kl_mlm.h"

namespace growkern {
namespace {

constexpr int64_t BLOCK = 512;  // columns whose gradient is complete before any is written

// whether the label's term needs the sum of the logits of a row
inline bool sums_logits(const KlMlmArgs& a) { return a.label_smoothing != 0; }

inline void widen(const f16* x, int64_t n, float* y) { decode_halves(x, n, y); }
inline void widen(const f16* x, int64_t n, double* y) {
    float block[BLOCK];
    for (int64_t j0 = 0; j0 < n; j0 += BLOCK) {
        const int64_t m = smaller(BLOCK, n - j0);
        decode_halves(x + j0, m, block);
        for (int64_t j = 0; j < m; ++j) y[j0 + j] = block[j];
    }
}
template <class From, class T>
inline void widen(const From* x, int64_t n, T* y) {
    for (int64_t j = 0; j < n; ++j) y[j] = decode(x[j]);
}

// logits of one row: in memory, and as capped numbers of type T
template <class T>
struct Logits {
    const void* x;
    int32_t type;
    int64_t offset, V;
    double cap;
    T* copy;  // (V,) memory for them if those of x cannot be used as they are

    const T* values() const {
        const bool usable = type == (sizeof(T) == 8 ? F64 : F32) && !cap;
        return usable ? static_cast<const T*>(x) + offset : copy;
    }
    void read() const {
        if (values() != copy) return;
        if (type == F64) return convert<double>();
        if (type == BF16) return convert<bf16>();
        if (type == F16) return convert<f16>();
        convert<float>();
    }

private:
    template <class From>
    void convert() const {
        widen(static_cast<const From*>(x) + offset, V, copy);
        const T c = static_cast<T>(cap);
        if (cap) {
            for (int64_t j = 0; j < V; ++j) copy[j] = c * hyperbolic_tangent(copy[j] / c);
        }
    }
};

template <class T>
struct Row {
    const KlMlmArgs& a;
    int64_t i;
    bool mlm, kl;
    int64_t label;  // -1: none that counts, or on another slice of the vocabulary
    T* scratch;     // (1 + K, V)

    Row(const KlMlmArgs& args, int64_t row, T* memory) : a(args), i(row), scratch(memory) {
        mlm = a.kind[i] & MLM_ROW;
        kl = a.kind[i] & KL_ROW;
        label = mlm && a.labels[i] >= 0 && a.labels[i] < a.V ? a.labels[i] : -1;
    }
    // a tail's logits are capped by the caller: the cap of -inf would be a finite number
    Logits<T> student() const {
        const double cap = a.tail ? 0 : a.softcap;
        return {a.student, a.student_type, i * a.student_stride, a.V, cap, scratch};
    }
    Logits<T> teacher(int64_t k) const {
        return {a.teachers[k], a.teacher_types[k], i * a.teacher_strides[k], a.V,
                a.teacher_softcap, scratch + (1 + k) * a.V};
    }
    T& state(int64_t s) const { return static_cast<T*>(a.state)[s * a.N + i]; }
    T& sums(StudentSums s) const { return state(static_cast<int64_t>(s)); }
    T& sums(int64_t k, TeacherSums s) const {
        return state(STUDENT_SUMS + TEACHER_SUMS * k + static_cast<int64_t>(s));
    }
    T drow(int64_t term) const { return static_cast<const T*>(a.drows)[term * a.N + i]; }
    T tail(TailFactors f) const {
        return static_cast<const T*>(a.tail)[static_cast<int64_t>(f) * a.N + i];
    }
};

template <class T>
T column_of(const T* x, int64_t V, T value) {
    int64_t j = 0;
    while (j < V && x[j] != value) ++j;
    return static_cast<T>(j < V ? j : 0);
}

// ----------------------------------------------------------------- gradient

// A row's gradient without its teachers' part: softmax exp(z - m) + softmax_t exp((z - m) / T) -
// everywhere. At the label `at_label` replaces the first of the three.
template <class T>
struct Factors {
    T m, softmax, softmax_t, at_label, everywhere;
};

template <class T>
Factors<T> tail_factors(const Row<T>& row) {
    using F = TailFactors;
    return {row.tail(F::maximum), row.tail(F::softmax), row.tail(F::softmax_t),
            row.tail(F::at_label), row.tail(F::everywhere)};
}

// (4) and (9)
template <class T>
Factors<T> label_factors(const Row<T>& row) {
    using S = StudentSums;
    const KlMlmArgs& a = row.a;
    const T m = row.sums(S::maximum), rest = row.sums(S::rest);
    const T e_y = std::exp(row.sums(S::label_logit) - m), d = rest + e_y;
    const T dmlm = row.mlm ? row.drow(0) : 0;
    const T from_z_loss = a.z_loss ? dmlm * 2 * static_cast<T>(a.z_loss) * (std::log(d) + m) : 0;
    const T smooth = dmlm * static_cast<T>(a.label_smoothing);
    const T count = sums_logits(a) ? row.sums(S::columns) : 1;
    return {m, row.mlm ? (dmlm + from_z_loss) / d : 0, 0,
            (from_z_loss * e_y - dmlm * rest) / d + smooth, smooth / count};
}

// (6): the gradient before the cap, from that of n capped logits
template <class T>
void undo_cap(const KlMlmArgs& a, const T* z, int64_t n, T* grad) {
    const T cap = static_cast<T>(a.softcap);
    for (int64_t j = 0; j < n && cap != 0; ++j) grad[j] *= 1 - (z[j] / cap) * (z[j] / cap);
}

// rounds n numbers to Out; `out` may be memory that held logits
template <class Out, class T>
void store_as(const T* x, int64_t n, Out* out) {
    alignas(64) Out rounded[BLOCK];
    for (int64_t j = 0; j < n; ++j) rounded[j] = encode<Out>(x[j]);
    std::memcpy(out, rounded, n * sizeof(Out));
}

template <class T>
void store_halves(const T* x, int64_t n, f16* out) {
    alignas(64) float narrow[BLOCK];
    for (int64_t j = 0; j < n; ++j) narrow[j] = static_cast<float>(x[j]);
    encode_halves(narrow, n, out);
}

template <class T>
void store(const KlMlmArgs& a, int64_t offset, const T* x, int64_t n) {
    if (a.grad_type == F64) return store_as(x, n, static_cast<double*>(a.dstudent) + offset);
    if (a.grad_type == BF16) return store_as(x, n, static_cast<bf16*>(a.dstudent) + offset);
    if (a.grad_type == F16) return store_halves(x, n, static_cast<f16*>(a.dstudent) + offset);
    store_as(x, n, static_cast<float*>(a.dstudent) + offset);
}

}  // namespace
}  // namespace growkern
