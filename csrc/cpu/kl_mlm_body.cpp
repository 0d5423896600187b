// The rows of the KL + MLM loss: compiled once for each instruction set, GROWKERN_ISA names which.
//
// A thread takes a row: it finds the maxima, then the sums, then writes the gradient. From the second
// time on the row comes out of the thread's cache.
#include "kl_mlm.h"

#include <cmath>
#include <limits>

#include "simd.h"

namespace growkern {
namespace {

constexpr int64_t BLOCK = 512;  // columns whose gradient is made before any is written
constexpr int32_t LABEL_COUNTS = 1, TEACHERS_COUNT = 2;
constexpr int STUDENT_NUMBERS = 8, TEACHER_NUMBERS = 6;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ------------------------------------------------------------- exponential

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, by a polynomial: within 1e-7, or 3e-16 of a double. Written
// without a branch, for compilers to vectorise. What is below 1e-38 (1e-307) is 0.
inline float exponential(float x) {
    // adding 1.5 * 2^23 leaves n at the end of the mantissa
    const float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    const uint32_t bits = bit_cast<uint32_t>(p) + (bit_cast<uint32_t>(shifted) << 23);
    const float y = bit_cast<float>(bits);
    return x < -87.0f ? 0 : x <= 88.0f ? y : x + std::numeric_limits<float>::infinity();
}

inline double exponential(double x) {
    const double shifted = x * 0x1.71547652b82fep0 + 0x1.8p52, n = shifted - 0x1.8p52;
    const double r = (x - n * 0x1.62e42fefa0000p-1) - n * 0x1.cf79abc9e3b3ap-40;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r * r + r + 1;
    const uint64_t bits = bit_cast<uint64_t>(p) + (bit_cast<uint64_t>(shifted) << 52);
    const double y = bit_cast<double>(bits);
    return x < -707.0 ? 0 : x <= 709.0 ? y : x + std::numeric_limits<double>::infinity();
}

// -------------------------------------------------------------------- sums

template <class T>
struct Two {
    T first = 0, second = 0;
};

// sums of what `terms(j, first, second)` sets, over columns from .. to - 1, block by block: a single
// sum of floats would lose the digits of what is added last
template <class T, class Terms>
Two<T> sum(int64_t from, int64_t to, Terms terms) {
    double first = 0, second = 0;
    for (int64_t j0 = from; j0 < to; j0 += BLOCK) {
        const int64_t end = smaller(to, j0 + BLOCK);
        T x = 0, y = 0;
#pragma omp simd reduction(+ : x, y)
        for (int64_t j = j0; j < end; ++j) {
            T a, b;
            terms(j, a, b);
            x += a;
            y += b;
        }
        first += x;
        second += y;
    }
    return {static_cast<T>(first), static_cast<T>(second)};
}

// the largest logit, 0 if none is finite
template <class T>
T top(const T* x, int64_t V) {
    T m = -std::numeric_limits<T>::infinity(), nan = 0;
#pragma omp simd reduction(max : m) reduction(+ : nan)
    for (int64_t j = 0; j < V; ++j) {
        m = x[j] > m ? x[j] : m;
        nan += x[j] == x[j] ? 0 : x[j];
    }
    return nan != nan ? nan : m == -std::numeric_limits<T>::infinity() ? 0 : m;
}

template <class T>
T column_of(const T* x, int64_t V, T value) {
    int64_t j = 0;
    while (j < V && x[j] != value) ++j;
    return static_cast<T>(j < V ? j : 0);
}

// -------------------------------------------------------------------- rows

template <class T>
struct Row {
    const KlMlmArgs& a;
    int64_t i;
    const T* z;
    bool mlm, kl;
    int64_t label;  // -1: none that counts, or on another slice of the vocabulary

    Row(const KlMlmArgs& args, int64_t row)
        : a(args), i(row), z(static_cast<const T*>(args.student) + row * args.student_stride) {
        mlm = a.kind[i] & LABEL_COUNTS;
        kl = a.kind[i] & TEACHERS_COUNT;
        label = mlm && a.labels[i] >= 0 && a.labels[i] < a.V ? a.labels[i] : -1;
    }
    const T* teacher(int64_t k) const {
        return static_cast<const T*>(a.teachers[k]) + i * a.teacher_strides[k];
    }
    T& number(int64_t s) const { return static_cast<T*>(a.state)[s * a.N + i]; }
    T& number(int64_t k, int64_t s) const {
        return number(STUDENT_NUMBERS + TEACHER_NUMBERS * k + s);
    }
    T weight(int64_t w) const { return static_cast<const T*>(a.drows)[w * a.N + i]; }
};

template <class T>
void sum_student(const Row<T>& row) {
    const KlMlmArgs& a = row.a;
    const T* z = row.z;
    const T m = top(z, a.V), inv_t = static_cast<T>(a.inv_t);
    // a weight of 0 silences even an infinity
    const auto moments = [=](int64_t j, T& e, T& ez) {
        e = exponential(z[j] - m);
        ez = e == 0 ? 0 : e * z[j];
    };
    // the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
    const int64_t y = row.label < 0 ? a.V : row.label;
    const Two<T> before = sum<T>(0, y, moments), after = sum<T>(y + 1, a.V, moments);
    T e_y = 0, moment_y = 0;
    if (row.label >= 0) moments(y, e_y, moment_y);
    const T rest = before.first + after.first;
    T at_t = rest + e_y;
    if (inv_t != 1) {
        at_t = sum<T>(0, a.V, [=](int64_t j, T& e, T& none) {
                   e = exponential((z[j] - m) * inv_t);
                   none = 0;
               }).first;
    }
    row.number(0) = m;
    row.number(1) = rest;
    row.number(2) = at_t;
    row.number(3) = row.label < 0 ? -std::numeric_limits<T>::infinity() : z[y];
    if (a.parts) {
        row.number(4) = before.second + after.second + moment_y;
        row.number(5) = column_of(z, a.V, m);
    }
    if (a.smoothing) {
        row.number(6) = sum<T>(0, a.V, [=](int64_t j, T& x, T& none) {
                            x = z[j];
                            none = 0;
                        }).first;
    }
    row.number(7) = static_cast<T>(a.V);
}

template <class T>
void sum_teacher(const Row<T>& row, int64_t k) {
    const KlMlmArgs& a = row.a;
    const T *z = row.z, *u = row.teacher(k);
    const T m = top(u, a.V), inv_t = static_cast<T>(a.inv_t);
    const Two<T> sums = sum<T>(0, a.V, [=](int64_t j, T& w, T& cross) {
        w = exponential((u[j] - m) * inv_t);
        // before any maximum is taken off: beside a close teacher this difference is exact
        cross = w == 0 ? 0 : w * ((u[j] - z[j]) * inv_t);
    });
    row.number(k, 0) = m;
    row.number(k, 1) = sums.first;
    row.number(k, 2) = sums.second;
    if (a.parts) row.number(k, 3) = column_of(u, a.V, m);
}

// what the columns of a row are multiplied with
template <class T>
struct Factors {
    T m, own;            // the student's maximum; (4) is exp(z - m) times this
    T at_label, smooth;  // but at the label; what (8) takes off everywhere
};

template <class T>
Factors<T> label_factors(const Row<T>& row) {
    const KlMlmArgs& a = row.a;
    const T m = row.number(0), rest = row.number(1), e_y = std::exp(row.number(3) - m);
    const T d = rest + e_y, weight = row.mlm ? row.weight(0) : 0;
    const T pull = a.z_loss ? weight * 2 * static_cast<T>(a.z_loss) * (std::log(d) + m) : 0;
    const T smooth = weight * static_cast<T>(a.smoothing);
    const T count = a.smoothing ? row.number(7) : 1;
    return {m, row.mlm ? (weight + pull) / d : 0, (pull * e_y - weight * rest) / d + smooth,
            smooth / count};
}

template <class T, class Grad>
void write_gradient(const Row<T>& row) {
    const KlMlmArgs& a = row.a;
    const T inv_t = static_cast<T>(a.inv_t);
    const Factors<T> f = label_factors(row);
    auto* out = static_cast<Grad*>(a.dstudent) + row.i * a.dstudent_stride;
    alignas(64) T e[BLOCK], grad[BLOCK];
    alignas(64) Grad rounded[BLOCK];
    for (int64_t j0 = 0; j0 < a.V; j0 += BLOCK) {
        const int64_t n = smaller(BLOCK, a.V - j0);
        const T* z = row.z + j0;
        for (int64_t j = 0; j < n; ++j) e[j] = exponential(z[j] - f.m);
        for (int64_t j = 0; j < n; ++j) grad[j] = e[j] * f.own;
        if (row.label >= j0 && row.label < j0 + n) grad[row.label - j0] = f.at_label;
        if (row.kl && inv_t != 1) {
            for (int64_t j = 0; j < n; ++j) e[j] = exponential((z[j] - f.m) * inv_t);
        }
        for (int64_t k = 0; k < a.K && row.kl; ++k) {
            const T* u = row.teacher(k) + j0;
            const T m = row.number(k, 0), weight = row.weight(1 + k) * inv_t;
            const T q = 1 / row.number(2), p = 1 / row.number(k, 1);
            for (int64_t j = 0; j < n; ++j) {
                grad[j] += (e[j] * q - exponential((u[j] - m) * inv_t) * p) * weight;  // (5)
            }
        }
        for (int64_t j = 0; j < n; ++j) rounded[j] = encode<Grad>(grad[j] - f.smooth);
        std::memcpy(out + j0, rounded, n * sizeof(Grad));
    }
}

template <class T, class Grad>
void rows_typed(const KlMlmArgs& a) {
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
    for (int64_t i = 0; i < a.N; ++i) {
        const Row<T> row(a, i);
        if (a.sums && (row.mlm || row.kl)) {
            sum_student(row);
            for (int64_t k = 0; k < a.K; ++k) sum_teacher(row, k);
        }
        if (!a.drows) continue;
        if (row.mlm || row.kl) {
            write_gradient<T, Grad>(row);
        } else {
            std::memset(static_cast<Grad*>(a.dstudent) + i * a.dstudent_stride, 0,
                        a.V * sizeof(Grad));
        }
    }
}

}  // namespace

#define NAME_OF(isa) kl_mlm_##isa
#define NAME(isa) NAME_OF(isa)

void NAME(GROWKERN_ISA)(const KlMlmArgs& a) {
    if (a.type == F64 && a.grad_type == F64) return rows_typed<double, double>(a);
    if (a.type == F64) return rows_typed<double, float>(a);
    if (a.grad_type == BF16) return rows_typed<float, bf16>(a);
    rows_typed<float, float>(a);
}

}  // namespace growkern
