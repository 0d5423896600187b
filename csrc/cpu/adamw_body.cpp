// A step of AdamW with factors for every row and column, compiled once per instruction set.
//
// Memory bounds it: every entry is read and written once. The inner loop has no branch, so that
// compilers vectorise it.
#include <cmath>

#include "adamw.h"

namespace growkern {
namespace {

// columns of a piece of a row: pieces are what threads share out
constexpr int64_t PIECE = 8192;

template <class T>
struct Numbers {
    T lr, keep1, keep2, add1, add2, eps, weight_decay, inverse1, inverse2, more, sign;

    explicit Numbers(const AdamwArgs& a)
        : lr(static_cast<T>(a.lr)),
          keep1(static_cast<T>(a.beta1)),
          keep2(static_cast<T>(a.beta2)),
          add1(static_cast<T>(1 - a.beta1)),
          add2(static_cast<T>(1 - a.beta2)),
          eps(static_cast<T>(a.eps)),
          weight_decay(static_cast<T>(a.weight_decay)),
          inverse1(static_cast<T>(1 / a.correction1)),
          inverse2(static_cast<T>(1 / a.correction2)),
          more(static_cast<T>(a.ratio - 1)),
          sign(a.maximize ? T{-1} : T{1}) {}
};

template <class T, bool AMSGRAD>
void step_piece(const AdamwArgs& a, const Numbers<T>& x, int64_t row, int64_t from, int64_t n) {
    const int64_t at = row * a.N + from;
    T* __restrict value = static_cast<T*>(a.value) + at;
    const T* __restrict gradient = static_cast<const T*>(a.gradient) + at;
    T* __restrict mean = static_cast<T*>(a.mean) + at;
    T* __restrict square = static_cast<T*>(a.square) + at;
    T* __restrict largest = AMSGRAD ? static_cast<T*>(a.largest) + at : nullptr;
    const T* __restrict col_lr = static_cast<const T*>(a.col_lr) + from;
    const T* __restrict col_eps = static_cast<const T*>(a.col_eps) + from;
    const T* __restrict col_old = static_cast<const T*>(a.col_old) + from;
    const T* __restrict centre = static_cast<const T*>(a.col_centre) + from;
    const T rate = static_cast<const T*>(a.row_lr)[row] * x.inverse1;
    const T eps = static_cast<const T*>(a.row_eps)[row] * x.eps;
    const T is_old = static_cast<const T*>(a.row_old)[row];
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
        const T g = x.sign * gradient[j];
        const T m = x.keep1 * mean[j] + x.add1 * g;
        const T v = x.keep2 * square[j] + x.add2 * g * g;
        T top = v;
        if (AMSGRAD) {
            top = largest[j] > v ? largest[j] : v;
            largest[j] = top;
        }
        const T root = std::sqrt(top * x.inverse2) + eps * col_eps[j];
        const T step = rate * col_lr[j] * m / root + x.weight_decay * (value[j] - centre[j]);
        const T share = 1 + x.more * (1 - is_old * col_old[j]);
        mean[j] = m;
        square[j] = v;
        value[j] -= x.lr * share * step;
    }
}

template <class T, bool AMSGRAD>
void step_all(const AdamwArgs& a) {
    const Numbers<T> numbers(a);
    const int64_t pieces = (a.N + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t i = 0; i < a.M * pieces; ++i) {
        const int64_t from = i % pieces * PIECE;
        step_piece<T, AMSGRAD>(a, numbers, i / pieces, from, smaller(PIECE, a.N - from));
    }
}

template <class T>
void step_typed(const AdamwArgs& a) {
    a.largest ? step_all<T, true>(a) : step_all<T, false>(a);
}

}  // namespace

#define NAME_OF(isa) adamw_##isa
#define NAME(isa) NAME_OF(isa)

void NAME(GROWKERN_ISA)(const AdamwArgs& a) {
    a.type == F64 ? step_typed<double>(a) : step_typed<float>(a);
}

}  // namespace growkern
