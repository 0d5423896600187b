// The rows of the KL + MLM loss on a CPU. Compiled once per instruction set, named by GROWKERN_ISA.
//
// A thread takes one row at a time: it finds the maxima, then the sums, then writes the gradient.
// After the first reading the row comes from the thread's cache. Logits that are capped, or of
// another type than the sums, are converted once per row into the thread's scratch memory
// (kl_mlm_row.h).
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kl_mlm_near.h"
#include "kl_mlm_row.h"

namespace growkern {
namespace {

// -------------------------------------------------------------------- sums

template <class T>
struct Two {
    T first = 0, second = 0;
};

// the sums of both values that `terms(j, first, second)` sets, over columns from .. to - 1. Blocks
// are added up in double: a single sum of floats would lose the digits of the last columns
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

// the largest logit; 0 if all are -inf, NaN if any is NaN
template <class T>
T top(const T* x, int64_t V) {
    T m = -INF<T>, nan = 0;
#pragma omp simd reduction(max : m) reduction(+ : nan)
    for (int64_t j = 0; j < V; ++j) {
        m = x[j] > m ? x[j] : m;
        nan += x[j] == x[j] ? 0 : x[j];
    }
    return nan != nan ? nan : m == -INF<T> ? 0 : m;
}

template <class T>
void sum_student(const Row<T>& row) {
    using S = StudentSums;
    const KlMlmArgs& a = row.a;
    const T* z = row.student().values();
    const T m = top(z, a.V), inv_t = static_cast<T>(a.inv_t);
    // a weight of 0 silences even an infinity
    const auto moments = [=](int64_t j, T& e, T& ez) {
        e = exponential(z[j] - m);
        ez = e == 0 ? 0 : e * z[j];
    };
    // the label is left out of the sum: 1 - q[y] would lose all digits when q[y] is near 1
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
    row.sums(S::maximum) = m;
    row.sums(S::rest) = rest;
    row.sums(S::sum_t) = at_t;
    row.sums(S::label_logit) = row.label < 0 ? -INF<T> : z[y];
    if (a.parts) {
        row.sums(S::moment) = before.second + after.second + moment_y;
        row.sums(S::best) = column_of(z, a.V, m);
    }
    if (sums_logits(a)) {
        row.sums(S::sum_z) = sum<T>(0, a.V, [=](int64_t j, T& x, T& none) {
                                 x = z[j];
                                 none = 0;
                             }).first;
    }
    row.sums(S::columns) = static_cast<T>(a.V);
}

template <class T>
void sum_teacher(const Row<T>& row, int64_t k) {
    using S = TeacherSums;
    const KlMlmArgs& a = row.a;
    const T *z = row.student().values(), *u = row.teacher(k).values();
    const T m = top(u, a.V), inv_t = static_cast<T>(a.inv_t);
    const Two<T> sums = sum<T>(0, a.V, [=](int64_t j, T& w, T& cross) {
        w = exponential((u[j] - m) * inv_t);
        // as in `Ratio::log_q_p`, no maximum is subtracted yet
        cross = w == 0 ? 0 : w * ((u[j] - z[j]) * inv_t);
    });
    row.sums(k, S::maximum) = m;
    row.sums(k, S::sum_t) = sums.first;
    row.sums(k, S::cross) = sums.second;
    if (a.parts) row.sums(k, S::best) = column_of(u, a.V, m);
}

// -------------------------------------------------------------- divergences

// q and p of a column at the temperature, and log(q / p)
template <class T>
struct Ratio {
    const T *z, *u;
    T inv_t, m, m_u, inv_sum, inv_sum_u, shift;

    Ratio(const Row<T>& row, int64_t k)
        : z(row.student().values()), u(row.teacher(k).values()),
          inv_t(static_cast<T>(row.a.inv_t)) {
        m = row.sums(StudentSums::maximum);
        m_u = row.sums(k, TeacherSums::maximum);
        const T sum = row.sums(StudentSums::sum_t), sum_u = row.sums(k, TeacherSums::sum_t);
        inv_sum = 1 / sum;
        inv_sum_u = 1 / sum_u;
        // (5) does not use it
        shift = row.a.beta ? (m - m_u) * inv_t + std::log(sum / sum_u) : 0;
    }
    T q(int64_t j) const { return exponential((z[j] - m) * inv_t) * inv_sum; }
    T p(int64_t j) const { return exponential((u[j] - m_u) * inv_t) * inv_sum_u; }
    // before any maximum is subtracted: beside a close teacher this difference is exact
    T log_q_p(int64_t j) const { return (z[j] - u[j]) * inv_t - shift; }
};

// log(q / m) and log(p / m) of (7) from r = log(q / p)
template <class T>
struct Mixture {
    T beta;
    T share() const { return 1 - beta; }
    void operator()(T r, T& log_q_m, T& log_p_m) const {
        // of the larger of q and p, so that nothing overflows; exact where both are close
        const T gap = exponential_minus_1(-std::abs(r));
        const T above = -log_1_plus(gap * (r < 0 ? 1 - beta : beta));
        log_q_m = r < 0 ? above + r : above;
        log_p_m = r < 0 ? above : above - r;
    }
};

// the reverse KL: m is p
template <class T>
struct TeacherAlone {
    T share() const { return 1; }
    void operator()(T r, T& log_q_m, T& log_p_m) const {
        log_q_m = r;
        log_p_m = 0;
    }
};

template <class T, class Use>
void with_mixture(const KlMlmArgs& a, Use use) {
    if (a.beta == 1) {
        use(TeacherAlone<T>{});
    } else {
        use(Mixture<T>{static_cast<T>(a.beta)});
    }
}

// the sums of (7)
template <class T>
void sum_divergence(const Row<T>& row, int64_t k) {
    const Ratio<T> ratio(row, k);
    with_mixture<T>(row.a, [&](auto mixture) {
        const Two<T> sums = sum<T>(0, row.a.V, [=](int64_t j, T& centre, T& spread) {
            T log_q_m, log_p_m;
            mixture(ratio.log_q_p(j), log_q_m, log_p_m);
            const T q = ratio.q(j), p = ratio.p(j);
            centre = q == 0 ? 0 : q * log_q_m;
            spread = p == 0 ? 0 : p * log_p_m;
        });
        row.sums(k, TeacherSums::centre) = sums.first;
        row.sums(k, TeacherSums::spread) = sums.second;
    });
}

// ----------------------------------------------------------------- gradient

// adds teacher k's part of columns j0 .. j0 + n - 1; e_t is exp((z - m) / T) of them
template <class T>
void add_teacher(const Row<T>& row, int64_t k, int64_t j0, int64_t n, const T* e_t, T* grad) {
    const Ratio<T> ratio(row, k);
    const T weight = row.drow(1 + k) * ratio.inv_t;
    if (weight == 0) return;  // not a factor: 0 times a NaN of this row is NaN
    if (row.a.beta == 0) {
        for (int64_t j = 0; j < n; ++j) {
            grad[j] += (e_t[j] * ratio.inv_sum - ratio.p(j0 + j)) * weight;  // (5)
        }
        return;
    }
    with_mixture<T>(row.a, [&](auto mixture) {
        const T centre = row.sums(k, TeacherSums::centre), scale = weight * mixture.share();
        for (int64_t j = 0; j < n; ++j) {
            T log_q_m, log_p_m;
            mixture(ratio.log_q_p(j0 + j), log_q_m, log_p_m);
            const T q = e_t[j] * ratio.inv_sum;
            grad[j] += q == 0 ? 0 : scale * q * (log_q_m - centre);  // (8)
        }
    });
}

template <class T>
void write_gradient(const Row<T>& row) {
    const KlMlmArgs& a = row.a;
    const T inv_t = static_cast<T>(a.inv_t);
    const Factors<T> f = a.tail ? tail_factors(row) : label_factors(row);
    const bool at_t = a.tail || row.kl;
    alignas(64) T e[BLOCK], grad[BLOCK];
    for (int64_t j0 = 0; j0 < a.V; j0 += BLOCK) {
        const int64_t n = smaller(BLOCK, a.V - j0);
        const T* z = row.student().values() + j0;
        for (int64_t j = 0; j < n; ++j) e[j] = exponential(z[j] - f.m);
        for (int64_t j = 0; j < n; ++j) grad[j] = e[j] * f.softmax;
        if (row.label >= j0 && row.label < j0 + n) grad[row.label - j0] = f.at_label;
        if (at_t && inv_t != 1) {
            for (int64_t j = 0; j < n; ++j) e[j] = exponential((z[j] - f.m) * inv_t);
        }
        if (a.tail) {
            for (int64_t j = 0; j < n; ++j) grad[j] += e[j] * f.softmax_t;
        }
        for (int64_t k = 0; k < a.K && row.kl; ++k) {
            add_teacher(row, k, j0, n, e, grad);
        }
        if (f.everywhere != 0) {
            for (int64_t j = 0; j < n; ++j) grad[j] -= f.everywhere;
        }
        undo_cap(a, z, n, grad);
        store(a, row.i * a.dstudent_stride + j0, grad, n);
    }
}

// ---------------------------------------------------------------------- all

template <class In, class T>
void take_row_narrow(const Row<T>& row, const Kept& kept) {
    const KlMlmArgs& a = row.a;
    const Columns<In> student{a.student, a.student_type, row.i * a.student_stride};
    const auto teacher = [&](int64_t k) {
        return Columns<In>{a.teachers[k], a.teacher_types[k], row.i * a.teacher_strides[k]};
    };
    if (row.kl && has_near_blocks(a)) return take_near_row(row, student, teacher(0), kept);
    if (a.sums) {
        sum_student_narrow(row, student);
        for (int64_t k = 0; k < a.K && row.kl; ++k) {
            sum_teacher_narrow(row, k, student, teacher(k));
        }
    }
    if (a.grad) write_gradient_narrow(row, student, teacher);
}

template <class T>
void take_row(const Row<T>& row, const Kept& kept) {
    const KlMlmArgs& a = row.a;
    if (a.narrow == F32) return take_row_narrow<float>(row, kept);
    if (a.narrow == F64) return take_row_narrow<double>(row, kept);
    row.student().read();
    if (a.sums) sum_student(row);
    for (int64_t k = 0; k < a.K && row.kl; ++k) {
        row.teacher(k).read();
        if (a.sums) sum_teacher(row, k);
        if (a.diverge) sum_divergence(row, k);
    }
    if (a.grad) write_gradient(row);
}

int64_t bytes_of(int32_t type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

template <class T>
void rows_typed(const KlMlmArgs& a) {
    // neighbouring rows write to the same lines of the sums, so a thread takes several
    const int64_t together = 1 + smaller(7, a.N / (8 * a.threads));
#pragma omp parallel num_threads(a.threads)
    {
#if defined(_OPENMP)
        const int64_t thread = omp_get_thread_num();
#else
        const int64_t thread = 0;
#endif
        T* scratch = static_cast<T*>(a.scratch) + thread * (1 + a.K) * a.V;
        const Kept kept(a.V, a.sums && a.grad && a.narrow >= 0 && has_near_blocks(a));
#pragma omp for schedule(dynamic, together)
        for (int64_t i = 0; i < a.N; ++i) {
            const Row<T> row(a, i, scratch);
            if (row.mlm || row.kl) {
                take_row(row, kept);
            } else if (a.grad) {
                const int64_t size = bytes_of(a.grad_type);
                std::memset(static_cast<char*>(a.dstudent) + i * a.dstudent_stride * size, 0,
                            a.V * size);
            }
        }
    }
}

}  // namespace

#define NAME_OF(isa) kl_mlm_##isa
#define NAME(isa) NAME_OF(isa)

void NAME(GROWKERN_ISA)(const KlMlmArgs& a) {
    if (a.type == F64) return rows_typed<double>(a);
    rows_typed<float>(a);
}

}  // namespace growkern
