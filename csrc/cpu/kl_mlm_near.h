// A row of the forward KL beside its only teacher, in two exponentials per number where both are
// near: r = (z - u - shift) / T is small.
//
//     w = exp((u - m_u) / T),    d = w (exp(r) - 1),    w + d = exp((z - m_u - shift) / T)
//
// The student's exponentials are thus sums of w and d, and at temperature 1 their squares or fourth
// powers. So are its sums and the gradient. A call that computes both keeps w and d. Blocks that
// are not near are computed as in kl_mlm_narrow.h.
#pragma once
#include <cmath>
#include <cstdlib>

#include "kl_mlm_narrow.h"

namespace growkern {
namespace {

// w + d loses digits where exp(r) is small, and w underflows where exp(r) is large
constexpr float NEAR = 8;

// w and d of the columns of a block
struct NearBlock {
    float *w, *d;
    bool is_near;
};

// Memory of one thread for the exponentials of a row. Without memory nothing is kept.
class Kept {
    float* memory = nullptr;
    NearBlock* blocks = nullptr;

public:
    Kept(int64_t V, bool wanted) {
        if (!wanted) return;
        const int64_t n = (V + BLOCK - 1) / BLOCK, numbers = 2 * n * BLOCK;
        const int64_t of_numbers = numbers * sizeof(float), of_blocks = n * sizeof(NearBlock);
        memory = static_cast<float*>(std::aligned_alloc(64, (of_numbers + of_blocks + 63) & ~63));
        blocks = reinterpret_cast<NearBlock*>(memory + numbers);
    }
    ~Kept() { std::free(memory); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

    explicit operator bool() const { return memory; }
    float* numbers(int64_t j0) const { return memory + 2 * j0; }
    NearBlock& block(int64_t j0) const { return blocks[j0 / BLOCK]; }
};

// how often e is squared to give exp at temperature 1; -1: that needs exponentials of its own
inline int squares_of(double inv_t) {
    return inv_t == 1 ? 0 : inv_t == 0.5 ? 1 : inv_t == 0.25 ? 2 : -1;
}

inline bool has_near_blocks(const KlMlmArgs& a) {
    return a.K == 1 && squares_of(a.inv_t) >= 0 && !sums_logits(a);
}

// exp(r) - 1 for |r| <= NEAR
inline float near_exponential_minus_1(float r) {
    uint32_t n;
    const float p = reduced_exponential(r, n);
    const float power = bit_cast<float>((n + Float<float>::BIAS) << Float<float>::MANTISSA);
    return p * power + (power - 1);
}

// Fills w and d of n columns; adds w, w r and d to `sums`. Returns whether all are near: else
// nothing of this may be used.
template <class In>
bool near_terms(const In* z, const In* u, int64_t n, float inv_t, In shift, const Softmax<In>& of,
                float* w, float* d, NarrowSums& sums) {
    float first = 0, second = 0, third = 0;
    int32_t far = 0;
#pragma omp simd reduction(+ : first, second, third) reduction(| : far)
    for (int64_t j = 0; j < n; ++j) {
        const float r = static_cast<float>((z[j] - u[j]) - shift) * inv_t;
        far |= !(std::abs(r) < NEAR);  // of NaN, too
        w[j] = of(u[j]);
        d[j] = w[j] * near_exponential_minus_1(r);
        first += w[j];
        second += w[j] * r;
        third += d[j];
    }
    sums.first += first;
    sums.second += second;
    sums.third += third;
    return !far;
}

// e^(2^squares)
template <int squares>
inline float power_of(float e) {
#pragma GCC unroll 2
    for (int i = 0; i < squares; ++i) e *= e;
    return e;
}

// Adds e^(2^squares) and, with `moments`, its products with z. In double: beside one large number a
// sum of floats loses digits of all others, and these sums scale the whole gradient.
template <int squares, bool moments, class In>
void sum_near(const In* z, const NearBlock& of, int64_t from, int64_t to, double& e_1,
              double& e_z) {
    // compilers do not vectorise a loop over members
    const float *w = of.w, *d = of.d;
    double first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t j = from; j < to; ++j) {
        const float e = power_of<squares>(w[j] + d[j]);
        first += e;
        if (moments) second += e * static_cast<float>(z[j]);
    }
    e_1 += first;
    e_z += second;
}

// calls use(j0, n) for the blocks of V columns
template <class Use>
inline void each_block(int64_t V, Use use) {
    for (int64_t j0 = 0; j0 < V; j0 += BLOCK) use(j0, smaller(BLOCK, V - j0));
}

// One row of both. Its maxima are found before anything else, and r is 0 at the teacher's: rounding
// errors of r matter most there.
template <class In>
struct NearRow {
    const Columns<In>&z_columns, &u_columns;
    StudentNarrow<In> student;
    TeacherNarrow<In> teacher;
    double exponent;  // exp((z - m) / T) is w + d times exp of this
    alignas(64) In room_z[BLOCK], room_u[BLOCK];

    NearRow(const KlMlmArgs& a, int64_t label, const Columns<In>& zs, const Columns<In>& us)
        : z_columns(zs), u_columns(us), student{a, label, {}, {}}, teacher{a.inv_t, {}} {
        each_block(a.V, [&](int64_t j0, int64_t n) {
            student.begin(z(j0, n), j0, n);
            teacher.begin(z(j0, n), u(j0, n), j0, n);
        });
        const int64_t top = static_cast<int64_t>(teacher.best);
        teacher.set_shift(logit_at(zs, top) - logit_at(us, top));
        const double below = student.one.reference() - teacher.shift;
        exponent = (teacher.all.reference() - below) * a.inv_t;
    }
    const In* z(int64_t j0, int64_t n) { return z_columns.block(j0, n, room_z); }
    const In* u(int64_t j0, int64_t n) { return u_columns.block(j0, n, room_u); }

    // w and d of a block, in the memory given
    NearBlock terms(int64_t j0, int64_t n, float* w, float* d, NarrowSums& sums) {
        const Softmax<In> of(teacher.all.reference(), teacher.inv_t);
        const float inv_t = static_cast<float>(teacher.inv_t);
        // a student's maximum far from the teacher's may make w underflow where w + d does not
        const bool is_near = exponent < NEAR && near_terms(z(j0, n), u(j0, n), n, inv_t,
                                                           teacher.shift, of, w, d, sums);
        return {w, d, is_near};
    }
    template <int squares>
    void add_student(const NearBlock& of, int64_t j0, int64_t n) {
        double e_1 = 0, e_z = 0, e_t = 0, none = 0;
        const In* zs = student.a.parts ? z(j0, n) : nullptr;
        student.without_label(j0, n, [&](int64_t from, int64_t to) {
            student.a.parts ? sum_near<squares, true>(zs, of, from, to, e_1, e_z)
                            : sum_near<squares, false>(zs, of, from, to, e_1, e_z);
        });
        const double at_1 = std::exp(exponent / teacher.inv_t);
        student.one.first += at_1 * e_1;
        student.one.second += at_1 * e_z;
        if (squares == 0) return;
        sum_near<0, false>(zs, of, 0, n, e_t, none);
        student.at_t.first += std::exp(exponent) * e_t;
    }
    NearBlock add(int64_t j0, int64_t n, float* w, float* d) {
        NarrowSums sums;
        const NearBlock found = terms(j0, n, w, d, sums);
        if (!found.is_near) {
            const In* zs = z(j0, n);
            student.add(zs, j0, n);
            teacher.add(zs, u(j0, n), n);
            return found;
        }
        teacher.all.first += sums.first;
        teacher.all.second += sums.second;
        teacher.all.third += sums.third;
        switch (squares_of(teacher.inv_t)) {
            case 0: add_student<0>(found, j0, n); break;
            case 1: add_student<1>(found, j0, n); break;
            default: add_student<2>(found, j0, n);
        }
        return found;
    }
};

// w, d -> the gradient: softmax e^(2^squares) + by_d d + by_w w, with e = (w + d) scale
struct NearFactors {
    float scale, softmax, by_d, by_w;
};

// `top_u` is the teacher's maximum of these columns, to which w refers; that of the state may lie
// in columns of other calls
template <class T>
NearFactors near_factors(const Row<T>& row, double softmax, double shift, double top_u) {
    const double inv_t = row.a.inv_t, weight = static_cast<double>(row.drow(1)) * inv_t;
    const double m = row.sums(StudentSums::maximum), m_u = row.sums(0, TeacherSums::maximum);
    const double sum = row.sums(StudentSums::sum_t), sum_u = row.sums(0, TeacherSums::sum_t);
    // log(q / p) is r without this
    const double rest = (m - m_u - shift) * inv_t + std::log(sum / sum_u);
    const double of_p = weight / sum_u * std::exp((top_u - m_u) * inv_t);
    return {static_cast<float>(std::exp((top_u + shift - m) * inv_t)), static_cast<float>(softmax),
            static_cast<float>(of_p * std::exp(-rest)),
            static_cast<float>(of_p * std::expm1(-rest))};
}

template <int squares>
void write_near(const NearBlock& of, int64_t n, const NearFactors& f, float* grad) {
    const float *w = of.w, *d = of.d;
    const auto [scale, softmax, by_d, by_w] = f;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
        const float e = power_of<squares>((w[j] + d[j]) * scale);
        grad[j] = e * softmax + (d[j] * by_d + w[j] * by_w);
    }
}

// the gradient of a block, without `everywhere`
template <class T>
void write_near_block(const Row<T>& row, const NearBlock& of, const NearFactors& f, double at_label,
                      int64_t j0, int64_t n, float* grad) {
    switch (squares_of(row.a.inv_t)) {
        case 0: write_near<0>(of, n, f, grad); break;
        case 1: write_near<1>(of, n, f, grad); break;
        default: write_near<2>(of, n, f, grad);
    }
    const int64_t y = row.label - j0;
    if (y < 0 || y >= n) return;
    grad[y] = static_cast<float>(at_label) + (of.d[y] * f.by_d + of.w[y] * f.by_w);
}

// the steps that `row.a` asks for
template <class In, class T>
void take_near_row(const Row<T>& row, const Columns<In>& student, const Columns<In>& teacher,
                   const Kept& kept) {
    const KlMlmArgs& a = row.a;
    alignas(64) float numbers[2 * BLOCK], grad[BLOCK];
    NearRow<In> both(a, row.label, student, teacher);
    if (a.sums) {
        each_block(a.V, [&](int64_t j0, int64_t n) {
            float* w = kept ? kept.numbers(j0) : numbers;
            const NearBlock of = both.add(j0, n, w, w + BLOCK);
            if (kept) kept.block(j0) = of;
        });
        both.student.store(row, logit_at(student, row.label));
        both.teacher.store(row, 0);
    }
    if (!a.grad) return;
    const GradientNarrow<In, T> gradient{row};
    const NearFactors f = near_factors(row, gradient.f.softmax, both.teacher.shift,
                                       both.teacher.all.reference());
    each_block(a.V, [&](int64_t j0, int64_t n) {
        NarrowSums none;
        const NearBlock of = kept ? kept.block(j0)
                                  : both.terms(j0, n, numbers, numbers + BLOCK, none);
        if (of.is_near) {
            write_near_block(row, of, f, gradient.f.at_label, j0, n, grad);
        } else {
            const auto u = [&](int64_t) { return both.u(j0, n); };
            gradient.block(both.z(j0, n), j0, n, u, grad);
        }
        gradient.store(j0, n, grad);
    });
}

}  // namespace
}  // namespace growkern
