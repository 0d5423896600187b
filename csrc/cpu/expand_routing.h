// Routing of expand: which copies keep a weight, and their shares of it.
//
// Included by expand_body.cpp, which is compiled once for each instruction set.
#pragma once
#include "expand_source.h"

namespace growkern {
namespace {

// the shares of (5) in hashes.py that copies of x may have. `larger` is null if it is x itself and
// the rest is 0.
template <class Out>
struct Shares {
    const Out *whole, *larger, *rest;
};

inline float kept(float x, bool is_kept) { return is_kept ? x : 0; }
inline double kept(double x, bool is_kept) { return is_kept ? x : 0; }
template <class Out>
inline Out kept(Out x, bool is_kept) {
    return {static_cast<uint16_t>(is_kept ? x.bits : 0)};
}

// every part is computed for every element, so that the loop has no branch and can use vectors
template <class Out>
inline Out share_of(const Shares<Out>& x, int64_t j, uint32_t hash, uint32_t mult, int32_t copy) {
    const uint32_t number = number_of(copy), count = count_of(copy);
    const uint32_t first = high_product(hash, count), second = second_choice(first, mult, count);
    const Out one = one_of(x.larger[j], kept(x.rest[j], second == number), first == number);
    return one_of(x.whole[j], one, count == 1);
}

// the shares with amplitude 1 of output row i, columns j .. j + n - 1, which belong to one run
template <class Out> GROWKERN_ONCE
void route_run(const ExpandPlan& p, int64_t i, int64_t j, int64_t n, const Out* whole,
               Out* __restrict y) {
    const uint32_t mult = p.args->line_mult[i], last = p.chosen_last[j];
    uint32_t hash = p.args->line_key[i] + p.cols[j] * mult - p.chosen_first[j];
    for (int64_t k = 0; k < n; ++k, hash += mult) y[k] = kept(whole[k], hash <= last);
}

// the shares of output row i, columns j0 .. j0 + n - 1; src is the virtual row that row i reads
template <class Out> GROWKERN_ONCE
void route(const ExpandPlan& p, int64_t i, int64_t src, int64_t j0, int64_t n,
           const Shares<Out>& x, Out* __restrict y) {
    const ExpandArgs& a = *p.args;
    const int32_t* cols = p.cols + j0;
    const Out* whole = x.whole;
    if (a.col_copies) {
        const uint32_t key = a.line_key[i], mult = a.line_mult[i];
        const int32_t* copies = a.col_copies + j0;
        const uint32_t *first = p.chosen_first + j0, *last = p.chosen_last + j0;
        if (x.larger) {
            for (int64_t j = 0; j < n; ++j) {
                y[j] = share_of(x, j, key + cols[j] * mult, mult, copies[j]);
            }
        } else {
            for (int64_t j = 0; j < n; ++j) {
                y[j] = kept(whole[j], key + cols[j] * mult - first[j] <= last[j]);
            }
        }
        return;
    }
    const uint32_t row = static_cast<uint32_t>(src);
    const auto* key = reinterpret_cast<const uint32_t*>(a.line_key) + j0;
    const auto* mult = reinterpret_cast<const uint32_t*>(a.line_mult) + j0;
    const int32_t copy = a.row_copies[i];
    const Interval chosen = chosen_interval(copy);
    if (x.larger) {
        for (int64_t j = 0; j < n; ++j) {
            y[j] = share_of(x, j, key[j] + row * mult[j], mult[j], copy);
        }
    } else {
        for (int64_t j = 0; j < n; ++j) {
            y[j] = kept(whole[j], key[j] + row * mult[j] - chosen.first <= chosen.last);
        }
    }
}

// (5) of hashes.py for n elements x
template <class Out, class Acc> GROWKERN_ONCE
void find_shares(const Out* x, int64_t n, Acc share, Out* larger, Out* rest) {
    for (int64_t j = 0; j < n; ++j) {
        const Acc whole = static_cast<Acc>(decode(x[j]));
        larger[j] = encode<Out>(whole * share);
        rest[j] = encode<Out>(whole - static_cast<Acc>(decode(larger[j])));
    }
}

}  // namespace
}  // namespace growkern
