// A row of the forward KL in float32, with sums in float64: for logits without a cap.
//
// Three things keep the digits that plain float32 loses beside a close teacher:
// - q - p is p (q / p - 1), where log(q / p) comes from the exact difference of the logits,
// - the teacher's sum is corrected by the sum of p (q / p - 1), which must be 0 (`corrected`),
// - arguments of exp keep the rounding error of their subtraction.
#pragma once
#include <cmath>

#include "kl_mlm_row.h"

namespace growkern {
namespace {

// columns of a row as In: those in memory, or converted ones in `room`. In is double if any logits
// are, else float.
template <class In>
const In* block_of(const void* x, int32_t type, int64_t at, int64_t n, In* room) {
    if (type == (sizeof(In) == 8 ? F64 : F32)) return static_cast<const In*>(x) + at;
    if (type == F32) widen(static_cast<const float*>(x) + at, n, room);
    if (type == BF16) widen(static_cast<const bf16*>(x) + at, n, room);
    if (type == F16) widen(static_cast<const f16*>(x) + at, n, room);
    return room;
}

template <class In>
struct Columns {
    const void* x;
    int32_t type;
    int64_t offset;
    const In* block(int64_t j0, int64_t n, In* room) const {
        return block_of(x, type, offset + j0, n, room);
    }
};

// 2^n (1 + p), for the n of `reduced_exponential`
inline float scaled(float p, uint32_t n) {
    return bit_cast<float>(bit_cast<uint32_t>(p + 1) + (n << 23));
}

// exp((z - m) / T) for z <= m; results below 1e-38 are 0
template <class In>
struct Softmax;

template <>
struct Softmax<float> {
    float m, inv_t, scale, least, high, low;

    Softmax(double maximum, double inverse_t)
        : m(static_cast<float>(maximum)), inv_t(static_cast<float>(inverse_t)),
          scale(static_cast<float>(1.4426950408889634 * inverse_t)),
          least(static_cast<float>(Float<float>::LEAST / inverse_t)) {
        const double step = 0.69314718055994531 / inverse_t;
        // 16 bits: their product with n is exact
        high = bit_cast<float>(bit_cast<uint32_t>(static_cast<float>(step)) & 0xffffff00u);
        low = static_cast<float>(step - high);
    }
    float operator()(float z) const {
        const float x = z - m, back = x - z;
        const float lost = (z - (x - back)) - (m + back);
        const float shifted = x * scale + Float<float>::ROUND;
        const float n = shifted - Float<float>::ROUND;
        const float r = ((x - n * high) + (lost - n * low)) * inv_t;
        const float y = scaled(exponential_series(r), bit_cast<uint32_t>(shifted));
        return x < least ? 0 : y;
    }
};

template <>
struct Softmax<double> {
    double m, inv_t, step;
    float scale, least;

    Softmax(double maximum, double inverse_t)
        : m(maximum), inv_t(inverse_t), step(0.69314718055994531 / inverse_t),
          scale(static_cast<float>(1.4426950408889634 * inverse_t)),
          least(static_cast<float>(Float<float>::LEAST / inverse_t)) {}
    float operator()(double z) const {
        const double x = z - m;
        const float narrow = static_cast<float>(x);
        const float shifted = narrow * scale + Float<float>::ROUND;
        const float n = shifted - Float<float>::ROUND;
        const float r = static_cast<float>((x - n * step) * inv_t);
        const float y = scaled(exponential_series(r), bit_cast<uint32_t>(shifted));
        return narrow < least ? 0 : y;
    }
};

template <class In>
In block_top(const In* x, int64_t n) {
    In m = -INF<In>;
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < n; ++j) m = x[j] > m ? x[j] : m;
    return m;
}

// ------------------------------------------------------------------ student

struct NarrowSums {
    double maximum = -INF<double>;
    double first = 0, second = 0, third = 0;

    // makes `top` the maximum, if it is larger: the sums are of exp((x - maximum) inv_t)
    void raise(double top, double inv_t) {
        if (!(top > maximum)) return;
        const double factor = std::exp((maximum - top) * inv_t);
        first *= factor, second *= factor, third *= factor;
        maximum = top;
    }
    // sums of nothing but -inf have no maximum: 0 stands for it
    double reference() const { return maximum == -INF<double> ? 0 : maximum; }
};

// adds exp((z - m) / T) of n columns, and with `moments` its product with z
template <bool moments, class In>
void add_exponentials(const In* z, int64_t n, const Softmax<In>& of, NarrowSums& sums) {
    double first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t j = 0; j < n; ++j) {
        const float e = of(z[j]);
        first += e;
        // a weight of 0 silences even an infinity
        if (moments) second += e == 0 ? 0 : e * static_cast<float>(z[j]);
    }
    sums.first += first;
    sums.second += second;
}

// The student's sums of one row, block by block.
template <class In>
struct StudentNarrow {
    const KlMlmArgs& a;
    int64_t label;
    NarrowSums one, at_t;  // of all columns but the label, and of all of them at the temperature
    double sum_z = 0, best = 0;

    // moves on to columns j0 .. j0 + n - 1
    void begin(const In* z, int64_t j0, int64_t n) {
        const In top = block_top(z, n);
        if (!(top > one.maximum)) return;
        best = static_cast<double>(j0 + column_of(z, n, top));
        one.raise(top, 1);
        at_t.raise(top, a.inv_t);
    }
    // Calls add(from, to) for the columns without the label. 1 - q[y] would lose all digits when
    // q[y] is near 1.
    template <class Add>
    void without_label(int64_t j0, int64_t n, Add add) const {
        const int64_t y = label - j0;
        const bool here = y >= 0 && y < n;
        add(0, here ? y : n);
        if (here) add(y + 1, n);
    }
    void add(const In* z, int64_t j0, int64_t n) {
        const Softmax<In> of(one.reference(), 1);
        without_label(j0, n, [&](int64_t from, int64_t to) {
            a.parts ? add_exponentials<true>(z + from, to - from, of, one)
                    : add_exponentials<false>(z + from, to - from, of, one);
        });
        if (a.inv_t != 1) {
            add_exponentials<false>(z, n, Softmax<In>(one.reference(), a.inv_t), at_t);
        }
        for (int64_t j = 0; j < n && sums_logits(a); ++j) sum_z += z[j];
    }
    // `z_y` is the label's logit, if there is one
    template <class T>
    void store(const Row<T>& row, double z_y) const {
        using S = StudentSums;
        const double m = one.reference(), e_y = label >= 0 ? std::exp(z_y - m) : 0;
        row.sums(S::maximum) = static_cast<T>(m);
        row.sums(S::rest) = static_cast<T>(one.first);
        row.sums(S::sum_t) = static_cast<T>(a.inv_t != 1 ? at_t.first : one.first + e_y);
        row.sums(S::label_logit) = static_cast<T>(label >= 0 ? z_y : -INF<double>);
        if (a.parts) {
            row.sums(S::moment) = static_cast<T>(one.second + (e_y == 0 ? 0 : e_y * z_y));
            row.sums(S::best) = static_cast<T>(best);
        }
        if (sums_logits(a)) row.sums(S::sum_z) = static_cast<T>(sum_z);
        row.sums(S::columns) = static_cast<T>(a.V);
    }
};

template <class In>
In logit_at(const Columns<In>& columns, int64_t j) {
    In room;
    return j >= 0 ? *columns.block(j, 1, &room) : 0;
}

template <class In, class T>
void sum_student_narrow(const Row<T>& row, const Columns<In>& student) {
    StudentNarrow<In> sums{row.a, row.label, {}, {}};
    alignas(64) In room[BLOCK];
    for (int64_t j0 = 0; j0 < row.a.V; j0 += BLOCK) {
        const int64_t n = smaller(BLOCK, row.a.V - j0);
        const In* z = student.block(j0, n, room);
        sums.begin(z, j0, n);
        sums.add(z, j0, n);
    }
    sums.store(row, logit_at(student, row.label));
}

// ------------------------------------------------------------------ teacher

// adds w = exp((u - m_u) / T), and the products of w with r = (z - u - shift) / T and exp(r) - 1
template <class In>
void add_teacher_sums(const In* z, const In* u, int64_t n, float inv_t, In shift,
                      const Softmax<In>& of, NarrowSums& sums) {
    double first = 0, second = 0, third = 0;
#pragma omp simd reduction(+ : first, second, third)
    for (int64_t j = 0; j < n; ++j) {
        const float w = of(u[j]);
        const float r = static_cast<float>((z[j] - u[j]) - shift) * inv_t;
        first += w;
        second += w == 0 ? 0 : w * r;
        third += w == 0 ? 0 : w * exponential_minus_1(r);
    }
    sums.first += first;
    sums.second += second;
    sums.third += third;
}

// The teacher's sum, such that the student's one is exp(shift) (sum + `excess`): both come from
// exponentials good to 6e-8, and beside a close teacher their quotient needs more. The excess is a
// sum of small numbers, each good to 1e-7 of itself.
inline double corrected(double sum, double sum_z, double excess, double shift) {
    const double better = sum_z * std::exp(-shift) - excess;
    // also false if either overflowed
    return std::abs(better - sum) <= 1e-6 * sum ? better : sum;
}

// A teacher's sums of one row, block by block.
template <class In>
struct TeacherNarrow {
    double inv_t;
    NarrowSums all;
    double best = 0;
    In shift = 0;  // how far the student's logits lie above, in general

    // moves on to columns j0 .. j0 + n - 1; `shift` is set before anything is added
    void begin(const In* z, const In* u, int64_t j0, int64_t n) {
        const In top = block_top(u, n);
        if (!(top > all.maximum)) return;
        const int64_t j = static_cast<int64_t>(column_of(u, n, top));
        best = static_cast<double>(j0 + j);
        if (all.maximum == -INF<double>) set_shift(z[j] - u[j]);
        all.raise(top, inv_t);
    }
    void set_shift(In difference) {
        if (std::abs(difference) < 1e4) shift = difference;
    }
    void add(const In* z, const In* u, int64_t n) {
        const Softmax<In> of(all.reference(), inv_t);
        add_teacher_sums(z, u, n, static_cast<float>(inv_t), shift, of, all);
    }
    // after the student's sums
    template <class T>
    void store(const Row<T>& row, int64_t k) const {
        using S = TeacherSums;
        const double m = row.sums(StudentSums::maximum), m_u = all.reference();
        const double from_u = (m_u - m + shift) * inv_t, sum_z = row.sums(StudentSums::sum_t);
        const double sum = corrected(all.first, sum_z, all.third, from_u);
        row.sums(k, S::maximum) = static_cast<T>(m_u);
        row.sums(k, S::sum_t) = static_cast<T>(sum);
        row.sums(k, S::cross) = static_cast<T>(-(all.second + shift * inv_t * sum));
        if (row.a.parts) row.sums(k, S::best) = static_cast<T>(best);
    }
};

template <class In, class T>
void sum_teacher_narrow(const Row<T>& row, int64_t k, const Columns<In>& student,
                        const Columns<In>& teacher) {
    TeacherNarrow<In> sums{row.a.inv_t, {}};
    alignas(64) In room_z[BLOCK], room_u[BLOCK];
    for (int64_t j0 = 0; j0 < row.a.V; j0 += BLOCK) {
        const int64_t n = smaller(BLOCK, row.a.V - j0);
        const In *z = student.block(j0, n, room_z), *u = teacher.block(j0, n, room_u);
        sums.begin(z, u, j0, n);
        sums.add(z, u, n);
    }
    sums.store(row, k);
}

// ----------------------------------------------------------------- gradient

// (5) of n columns: adds (q - p) / T times the gradient of the term; e_t is exp((z - m) / T)
template <class In, class T>
void add_difference(const Row<T>& row, int64_t k, const In* z, const In* u, int64_t n,
                    const float* e_t, float* grad) {
    const double weight = static_cast<double>(row.drow(1 + k)) * row.a.inv_t;
    if (weight == 0) return;  // not a factor: 0 times a NaN of this row is NaN
    const double m = row.sums(StudentSums::maximum), m_u = row.sums(k, TeacherSums::maximum);
    const double sum = row.sums(StudentSums::sum_t), sum_u = row.sums(k, TeacherSums::sum_t);
    const Softmax<In> of(m_u, row.a.inv_t);
    const float inv_t = static_cast<float>(row.a.inv_t);
    const float of_q = static_cast<float>(weight / sum), of_p = static_cast<float>(weight / sum_u);
    // T log(q / p) is z - u without this, which takes two floats
    const double shift = m - m_u + std::log(sum / sum_u) / row.a.inv_t;
    const In high = static_cast<In>(shift), low = static_cast<In>(shift - high);
    for (int64_t j = 0; j < n; ++j) {
        const float w = of(u[j]);
        const float r = static_cast<float>((z[j] - u[j]) - high - low) * inv_t;
        const float near = w * exponential_minus_1(r) * of_p;
        const float apart = e_t[j] * of_q - w * of_p;
        // far apart exp(r) may overflow, or p be 0 where q is not
        grad[j] += std::abs(r) < 8 ? near : apart;
    }
}

// The parts of a row's gradient that all of its blocks share.
template <class In, class T>
struct GradientNarrow {
    const Row<T>& row;
    const Factors<T> f = label_factors(row);
    const Softmax<In> at_1{static_cast<double>(f.m), 1};
    const Softmax<In> at_t{static_cast<double>(f.m), row.a.inv_t};

    // columns j0 .. j0 + n - 1 to `grad`, without `everywhere`; `teacher(k)` gives teacher k's
    template <class Teachers>
    void block(const In* z, int64_t j0, int64_t n, Teachers teacher, float* grad) const {
        const bool is_kl = row.kl && row.a.K > 0, two = row.a.inv_t != 1 && is_kl;
        const float softmax = static_cast<float>(f.softmax);
        alignas(64) float e[BLOCK];
        if (two && softmax == 0) {
            for (int64_t j = 0; j < n; ++j) grad[j] = 0;
        } else {
            for (int64_t j = 0; j < n; ++j) {
                e[j] = at_1(z[j]);
                grad[j] = e[j] * softmax;
            }
        }
        if (row.label >= j0 && row.label < j0 + n) {
            grad[row.label - j0] = static_cast<float>(f.at_label);
        }
        if (two) {
            for (int64_t j = 0; j < n; ++j) e[j] = at_t(z[j]);
        }
        for (int64_t k = 0; k < row.a.K && row.kl; ++k) {
            add_difference(row, k, z, teacher(k), n, e, grad);
        }
    }
    void store(int64_t j0, int64_t n, float* grad) const {
        const float everywhere = static_cast<float>(f.everywhere);
        if (everywhere != 0) {
            for (int64_t j = 0; j < n; ++j) grad[j] -= everywhere;
        }
        growkern::store(row.a, row.i * row.a.dstudent_stride + j0, grad, n);
    }
};

// `teacher(k)` is the Columns of teacher k
template <class In, class T, class Teachers>
void write_gradient_narrow(const Row<T>& row, const Columns<In>& student, Teachers teacher) {
    const GradientNarrow<In, T> gradient{row};
    alignas(64) In room_z[BLOCK], room_u[BLOCK];
    alignas(64) float grad[BLOCK];
    for (int64_t j0 = 0; j0 < row.a.V; j0 += BLOCK) {
        const int64_t n = smaller(BLOCK, row.a.V - j0);
        const auto block_of_teacher = [&](int64_t k) { return teacher(k).block(j0, n, room_u); };
        gradient.block(student.block(j0, n, room_z), j0, n, block_of_teacher, grad);
        gradient.store(j0, n, grad);
    }
}

}  // namespace
}  // namespace growkern
