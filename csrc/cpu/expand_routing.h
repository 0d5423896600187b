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
template <class Out>
inline Out one_of(Out x, Out y, bool is_x) {
    using Bits = typename BitsOf<Out>::type;
    const Bits a = bit_cast<Bits>(x), b = bit_cast<Bits>(y);
    return bit_cast<Out>(static_cast<Bits>(is_x ? a : b));
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
template <class Out>
void route_run(const ExpandPlan& p, int64_t i, int64_t j, int64_t n, const Out* whole,
               Out* __restrict y) {
    const uint32_t mult = p.args->line_mult[i], last = p.chosen_last[j];
    uint32_t hash = p.args->line_key[i] + p.cols[j] * mult - p.chosen_first[j];
    for (int64_t k = 0; k < n; ++k, hash += mult) y[k] = kept(whole[k], hash <= last);
}

// the shares of output row i, columns j0 .. j0 + n - 1; src is the virtual row that row i reads
template <class Out>
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
template <class Out, class Acc>
void find_shares(const Out* x, int64_t n, Acc share, Out* larger, Out* rest) {
    for (int64_t j = 0; j < n; ++j) {
        const Acc whole = static_cast<Acc>(decode(x[j]));
        larger[j] = encode<Out>(whole * share);
        rest[j] = encode<Out>(whole - static_cast<Acc>(decode(larger[j])));
    }
}

// Which elements are kept with amplitude 1: `hash - first <= last` is (4) of hashes.py. Each has an
// operator for one element, and `lanes` for 16 of them, of which the first n exist.

// one output row, with routing on the columns. Rows that read the same source share the loads of
// `first`, `last` and the columns
struct KeptColumns {
    uint32_t key, mult;
    const int32_t* cols;
    const uint32_t *first, *last;

    bool operator()(int64_t j) const { return key + cols[j] * mult - first[j] <= last[j]; }
#if defined(__AVX512F__)
    __mmask16 lanes(int64_t j, __mmask16 some) const {
        const __m512i at = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(some, cols + j),
                                              _mm512_set1_epi32(mult));
        const __m512i from = _mm512_sub_epi32(_mm512_set1_epi32(key),
                                              _mm512_maskz_loadu_epi32(some, first + j));
        return _mm512_cmple_epu32_mask(_mm512_add_epi32(at, from),
                                       _mm512_maskz_loadu_epi32(some, last + j));
    }
#endif
};

// one output row, with routing on the rows
struct KeptRow {
    uint32_t row;
    const int32_t *key, *mult;
    Interval chosen;

    bool operator()(int64_t j) const {
        const uint32_t hash = static_cast<uint32_t>(key[j]) + row * static_cast<uint32_t>(mult[j]);
        return hash - chosen.first <= chosen.last;
    }
#if defined(__AVX512F__)
    __mmask16 lanes(int64_t j, __mmask16 some) const {
        const __m512i at = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(some, mult + j),
                                              _mm512_set1_epi32(row));
        const __m512i from = _mm512_sub_epi32(_mm512_maskz_loadu_epi32(some, key + j),
                                              _mm512_set1_epi32(chosen.first));
        return _mm512_cmple_epu32_mask(_mm512_add_epi32(at, from),
                                       _mm512_set1_epi32(chosen.last));
    }
#endif
};

// Writes 64 bytes of kept elements past the caches. They do not pass through memory: a load from a
// fresh store would have to wait for the stores before it.
template <class Out, class Keeps>
inline void stream_kept_line(const Out* whole, int64_t j, const Keeps& keeps, Out* to) {
#if defined(__AVX512F__)
    __m512i x;
    if constexpr (sizeof(Out) == 4) {
        x = _mm512_maskz_loadu_epi32(keeps.lanes(j, 0xffff), whole);
    } else if constexpr (sizeof(Out) == 2) {
        const __mmask16 low = keeps.lanes(j, 0xffff), high = keeps.lanes(j + 16, 0xffff);
        x = _mm512_maskz_loadu_epi16(_mm512_kunpackw(high, low), whole);
    } else {
        x = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(keeps.lanes(j, 0xff)), whole);
    }
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), x);
#else
    constexpr int64_t N = LINE_BYTES / sizeof(Out);
    alignas(64) Out share[N];
    for (int64_t k = 0; k < N; ++k) share[k] = kept(whole[k], keeps(j + k));
    stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(share), LINE_BYTES);
#endif
}

// Routes n elements with amplitude 1 to several rows in memory, past the caches. Stores go on while
// the next lines are computed, where a long burst of stores would wait for memory. All `to` begin
// at the same place of a line.
template <int rows, class Out, class Keeps>
void stream_kept(const Out* whole, int64_t n, const Keeps* keeps, Out* const* to) {
    constexpr int64_t N = LINE_BYTES / sizeof(Out);
    const int64_t head = (-reinterpret_cast<intptr_t>(*to) & (LINE_BYTES - 1)) / sizeof(Out);
    const auto some = [&](int64_t from, int64_t end) {
        for (int r = 0; r < rows; ++r) {
            for (int64_t j = from; j < end; ++j) to[r][j] = kept(whole[j], keeps[r](j));
        }
    };
    int64_t j = smaller(head, n);
    some(0, j);
    for (; j + N <= n; j += N) {
#pragma GCC unroll 2
        for (int r = 0; r < rows; ++r) stream_kept_line(whole + j, j, keeps[r], to[r] + j);
    }
    some(j, n);
}

// `route` with amplitude 1, to columns j0 .. j0 + n - 1 of n_rows output rows in memory; they read
// the virtual row src
template <class Out>
void route_past_caches(const ExpandPlan& p, const int64_t* row, int64_t n_rows, int64_t src,
                       int64_t j0, int64_t n, const Out* whole) {
    const ExpandArgs& a = *p.args;
    for (int64_t k = 0; k < n_rows;) {
        Out* to[2] = {};
        KeptColumns columns[2];
        int rows = 0;
        for (; rows < 2 && k + rows < n_rows; ++rows) {
            const int64_t i = row[k + rows];
            to[rows] = static_cast<Out*>(a.out) + i * a.out_stride_m + j0;
            if ((reinterpret_cast<intptr_t>(to[rows]) - reinterpret_cast<intptr_t>(to[0])) %
                LINE_BYTES) {
                break;
            }
            if (!a.col_copies) continue;
            columns[rows] = {static_cast<uint32_t>(a.line_key[i]),
                             static_cast<uint32_t>(a.line_mult[i]), p.cols + j0,
                             p.chosen_first + j0, p.chosen_last + j0};
        }
        if (a.col_copies) {
            const auto stream = rows == 2 ? stream_kept<2, Out, KeptColumns>
                                          : stream_kept<1, Out, KeptColumns>;
            stream(whole, n, columns, to);
            k += rows;
        } else {
            const KeptRow keeps{static_cast<uint32_t>(src), a.line_key + j0, a.line_mult + j0,
                                chosen_interval(a.row_copies[row[k]])};
            stream_kept<1>(whole, n, &keeps, to);
            ++k;
        }
    }
}

}  // namespace
}  // namespace growkern
