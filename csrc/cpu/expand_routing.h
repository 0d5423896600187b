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

// An output row that is routed with amplitude 1, the virtual row that it reads, and the n elements
// of that row which it shares with other copies.
template <class Out>
struct RowToRoute {
    int64_t row, source;
    const Out* whole;
};

// One of the rows that are routed together. Element j is kept if
// factor number[j] + shift -+ offset[j] <= last: this is (4) of hashes.py.
template <class Out>
struct KeptRow {
    const Out* whole;
    Out* to;
    uint32_t factor, shift, last;
};

// The part of the condition that depends on the column. With routing on the columns (by_column),
// the offset is subtracted and every column has its own `last`; else the row has.
struct KeptColumns {
    const uint32_t *number, *offset, *last;
};

template <bool by_column, class Out>
inline bool is_kept(const KeptRow<Out>& row, const KeptColumns& of, int64_t j) {
    const uint32_t x = row.factor * of.number[j] + row.shift;
    return by_column ? x - of.offset[j] <= of.last[j] : x + of.offset[j] <= row.last;
}

#if defined(__AVX512F__)
// `is_kept` of rows for 16 columns, of which `some` exist. The columns' numbers are loaded once for
// all rows: loads are the limit.
template <bool by_column, int rows>
inline void keep_lanes(const __m512i* factor, const __m512i* shift, const __m512i* last,
                       const KeptColumns& of, int64_t j, __mmask16 some, __mmask16* kept) {
    const __m512i number = _mm512_maskz_loadu_epi32(some, of.number + j);
    const __m512i offset = _mm512_maskz_loadu_epi32(some, of.offset + j);
    const __m512i end = by_column ? _mm512_maskz_loadu_epi32(some, of.last + j) : offset;
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        const __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(number, factor[r]), shift[r]);
        kept[r] = by_column ? _mm512_cmple_epu32_mask(_mm512_sub_epi32(x, offset), end)
                            : _mm512_cmple_epu32_mask(_mm512_add_epi32(x, offset), last[r]);
    }
}
#endif

// Writes lines of 64 bytes of kept elements past the caches, from column j to at most n; returns
// the first column that is not written. The elements do not pass through memory: a load from a
// fresh store would have to wait for the stores before it.
template <bool by_column, int rows, class Out>
int64_t stream_kept_lines(const KeptRow<Out>* row, const KeptColumns& of, int64_t j, int64_t n) {
    constexpr int64_t N = LINE_BYTES / sizeof(Out);
#if defined(__AVX512F__)
    __m512i factor[rows], shift[rows], last[rows];
    const Out* whole[rows];
    Out* to[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        factor[r] = _mm512_set1_epi32(row[r].factor);
        shift[r] = _mm512_set1_epi32(row[r].shift);
        last[r] = _mm512_set1_epi32(row[r].last);
        whole[r] = row[r].whole, to[r] = row[r].to;
    }
    for (; j + N <= n; j += N) {
        __mmask16 low[rows], high[rows];
        keep_lanes<by_column, rows>(factor, shift, last, of, j, N < 16 ? 0xff : 0xffff, low);
        if constexpr (N == 32) {
            keep_lanes<by_column, rows>(factor, shift, last, of, j + 16, 0xffff, high);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            __m512i x;
            if constexpr (N == 16) {
                x = _mm512_maskz_loadu_epi32(low[r], whole[r] + j);
            } else if constexpr (N == 32) {
                x = _mm512_maskz_loadu_epi16(_mm512_kunpackw(high[r], low[r]), whole[r] + j);
            } else {
                x = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(low[r]), whole[r] + j);
            }
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to[r] + j), x);
        }
    }
#else
    for (; j + N <= n; j += N) {
        for (int r = 0; r < rows; ++r) {
            alignas(64) Out share[N];
            for (int64_t k = 0; k < N; ++k) {
                share[k] = kept(row[r].whole[j + k], is_kept<by_column>(row[r], of, j + k));
            }
            stream_bytes(reinterpret_cast<char*>(row[r].to + j),
                         reinterpret_cast<const char*>(share), LINE_BYTES);
        }
    }
#endif
    return j;
}

// Routes n elements to several rows in memory. Stores go on while the next lines are computed: a
// long burst of stores would wait for memory. All rows begin at the same place of a line.
template <bool by_column, int rows, class Out>
void stream_kept(const KeptRow<Out>* row, const KeptColumns& of, int64_t n) {
    const auto some = [&](int64_t from, int64_t end) {
        for (int r = 0; r < rows; ++r) {
            for (int64_t j = from; j < end; ++j) {
                row[r].to[j] = kept(row[r].whole[j], is_kept<by_column>(row[r], of, j));
            }
        }
    };
    const int64_t head = (-reinterpret_cast<intptr_t>(row->to) & (LINE_BYTES - 1)) / sizeof(Out);
    const int64_t j = smaller(head, n);
    some(0, j);
    some(stream_kept_lines<by_column, rows>(row, of, j, n), n);
}

template <bool by_column, class Out>
void stream_kept(int rows, const KeptRow<Out>* row, const KeptColumns& of, int64_t n) {
    for (; rows >= 4; rows -= 4, row += 4) stream_kept<by_column, 4>(row, of, n);
    for (; rows >= 2; rows -= 2, row += 2) stream_kept<by_column, 2>(row, of, n);
    for (; rows; --rows, ++row) stream_kept<by_column, 1>(row, of, n);
}

// `route` with amplitude 1, to columns j0 .. j0 + n - 1 of some output rows in memory
template <class Out>
void route_past_caches(const ExpandPlan& p, const RowToRoute<Out>* rows, int64_t n_rows,
                       int64_t j0, int64_t n) {
    const ExpandArgs& a = *p.args;
    const bool by_column = a.col_copies;
    const auto unsigned_from = [&](const int32_t* x) {
        return reinterpret_cast<const uint32_t*>(x) + j0;
    };
    const KeptColumns of =
        by_column ? KeptColumns{unsigned_from(p.cols), p.chosen_first + j0, p.chosen_last + j0}
                  : KeptColumns{unsigned_from(a.line_mult), unsigned_from(a.line_key), nullptr};
    constexpr int MOST = 4;
    KeptRow<Out> kept[MOST];
    const auto place = [](const KeptRow<Out>& row) {
        return reinterpret_cast<uintptr_t>(row.to) % LINE_BYTES;
    };
    int held = 0;
    const auto write = [&] {
        if (by_column) {
            stream_kept<true>(held, kept, of, n);
        } else {
            stream_kept<false>(held, kept, of, n);
        }
        held = 0;
    };
    for (const RowToRoute<Out>* row = rows; row < rows + n_rows; ++row) {
        const int64_t i = row->row;
        Out* to = static_cast<Out*>(a.out) + i * a.out_stride_m + j0;
        KeptRow<Out> next = {row->whole, to, 0, 0, 0};
        if (by_column) {
            next.factor = a.line_mult[i], next.shift = a.line_key[i];
        } else {
            const Interval chosen = chosen_interval(a.row_copies[i]);
            next.factor = row->source, next.shift = -chosen.first, next.last = chosen.last;
        }
        if (held == MOST || (held && place(next) != place(kept[0]))) write();
        kept[held++] = next;
    }
    write();
}

}  // namespace
}  // namespace growkern
