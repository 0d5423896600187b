// A step of AdamW with factors for every row and column, compiled once per instruction set.
//
// Memory bounds it: every entry is read and written once. The inner loop has no branch, so that
// compilers vectorise it.
#include <cmath>

#include "adamw.h"
#include "simd.h"

namespace growkern {
namespace {

// columns of a piece of a row: pieces are what threads share out. They go along the rows, because
// memory is read fastest in its own order
constexpr int64_t PIECE = 8192;

template <class A>
struct Numbers {
    A lr, keep1, keep2, add1, add2, eps, weight_decay, inverse1, inverse2, more, sign;

    explicit Numbers(const AdamwArgs& a)
        : lr(static_cast<A>(a.lr)),
          keep1(static_cast<A>(a.beta1)),
          keep2(static_cast<A>(a.beta2)),
          add1(static_cast<A>(1 - a.beta1)),
          add2(static_cast<A>(1 - a.beta2)),
          eps(static_cast<A>(a.eps)),
          weight_decay(static_cast<A>(a.weight_decay)),
          inverse1(static_cast<A>(1 / a.correction1)),
          inverse2(static_cast<A>(1 / a.correction2)),
          more(static_cast<A>(a.ratio - 1)),
          sign(a.maximize ? A{-1} : A{1}) {}
};

// The factors of a row's columns. One whose pointer is null is a number in the vector of the rows.
template <class A>
struct Columns {
    const A *lr, *eps, *old, *centre;

    Columns(const AdamwArgs& a, int64_t from)
        : lr(at(a.col_lr, from)),
          eps(at(a.col_eps, from)),
          old(at(a.col_old, from)),
          centre(at(a.col_centre, from)) {}

    static const A* at(const void* vector, int64_t from) {
        return vector ? static_cast<const A*>(vector) + from : nullptr;
    }
};

// T: of the tensors. A: of the vectors and of the arithmetic. The flags say which vectors exist:
// the loop is bound by memory, and reads no vector that it can do without.
template <class T, class A, bool AMSGRAD, bool LR, bool EPS, bool OLD, bool CENTRED>
void step_piece(const AdamwArgs& a, const Numbers<A>& x, int64_t row, int64_t from, int64_t n) {
    const int64_t at = row * a.N + from;
    T* __restrict value = static_cast<T*>(a.value) + at;
    const T* __restrict gradient = static_cast<const T*>(a.gradient) + at;
    T* __restrict mean = static_cast<T*>(a.mean) + at;
    T* __restrict square = static_cast<T*>(a.square) + at;
    T* __restrict largest = AMSGRAD ? static_cast<T*>(a.largest) + at : nullptr;
    const Columns<A> col(a, from);
    const A* __restrict col_lr = col.lr;
    const A* __restrict col_eps = col.eps;
    const A* __restrict col_old = col.old;
    const A* __restrict centre = col.centre;
    const A rate = static_cast<const A*>(a.row_lr)[row] * x.inverse1;
    const A eps = static_cast<const A*>(a.row_eps)[row] * x.eps;
    const A is_old = static_cast<const A*>(a.row_old)[row];
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
        const A g = x.sign * decode(gradient[j]);
        const A w = decode(value[j]);
        const A m = x.keep1 * decode(mean[j]) + x.add1 * g;
        const A v = x.keep2 * decode(square[j]) + x.add2 * g * g;
        A top = v;
        if (AMSGRAD) {
            const A before = decode(largest[j]);
            top = before > v ? before : v;
            largest[j] = encode<T>(top);
        }
        const A root = std::sqrt(top * x.inverse2) + (EPS ? eps * col_eps[j] : eps);
        const A decayed = CENTRED ? w - centre[j] : w;
        const A step = (LR ? rate * col_lr[j] : rate) * m / root + x.weight_decay * decayed;
        const A share = 1 + x.more * (1 - (OLD ? is_old * col_old[j] : is_old));
        mean[j] = encode<T>(m);
        square[j] = encode<T>(v);
        value[j] = encode<T>(w - x.lr * share * step);
    }
}

template <class T, class A, bool... FLAGS>
void step_all(const AdamwArgs& a) {
    const Numbers<A> numbers(a);
    const int64_t pieces = (a.N + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t i = 0; i < a.M * pieces; ++i) {
        const int64_t from = i % pieces * PIECE;
        const int64_t n = smaller(PIECE, a.N - from);
        step_piece<T, A, FLAGS...>(a, numbers, i / pieces, from, n);
    }
}

// the flags, one after the other, from what the arguments have
template <class T, class A, bool... FLAGS>
void choose(const AdamwArgs& a) {
    constexpr int done = sizeof...(FLAGS);
    if constexpr (done == 5) {
        step_all<T, A, FLAGS...>(a);
    } else {
        const void* has[] = {a.largest, a.col_lr, a.col_eps, a.ratio == 1 ? nullptr : a.col_old,
                             a.col_centre};
        has[done] ? choose<T, A, FLAGS..., true>(a) : choose<T, A, FLAGS..., false>(a);
    }
}

}  // namespace

#define NAME_OF(isa) adamw_##isa
#define NAME(isa) NAME_OF(isa)

void NAME(GROWKERN_ISA)(const AdamwArgs& a) {
    if (a.type == F64) return choose<double, double>(a);
    if (a.type == BF16) return choose<bf16, float>(a);
    choose<float, float>(a);
}

}  // namespace growkern
