// One row of the KL + MLM loss: its logits as numbers that can be summed, and its place in the
// arguments.
#pragma once
#include "functions.h"
#include "kl_mlm.h"

namespace growkern {
namespace {

constexpr int64_t BLOCK = 512;  // columns whose gradient is complete before any is written

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

}  // namespace
}  // namespace growkern
