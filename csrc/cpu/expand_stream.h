// Writes of expand past the caches: a hash chooses every element while it is stored.
//
// Included by expand_body.cpp, which is compiled once for each instruction set.
#pragma once
#include "expand_source.h"

namespace growkern {
namespace {

// An output row, the virtual row that it reads, and the two arrays that its elements are chosen
// from. With routing of amplitude 1 they are the source's elements and `other` null, for 0. With
// noise they are the results of both signs. Other copies of the source share them.
template <class Out>
struct RowToWrite {
    int64_t row, source;
    const Out *whole, *other;
};

// How the hash of element j is found. All compare it with a bound, and choose `whole` up to it.
enum HashKind {
    RUN,       // factor (number[0] + j) + shift: the numbers are consecutive
    NUMBERS,   // factor number[j] + shift
    COPIES,    // factor number[j] + shift - offset[j], and the bound is last[j]: (4) of hashes.py
    COLUMNS,   // factor number[j] + shift + offset[j]: lines are columns
};

// what routing of amplitude 1 chooses from, where an element is not the source's
template <class Out>
alignas(64) constexpr Out ZEROS[MAX_COLUMNS] = {};

// one of the rows that are written together
template <class Out>
struct ChosenRow {
    const Out *whole, *other;
    Out* to;
    uint32_t factor, shift, last;
};

// the part of the hash that depends on the column
struct ChosenColumns {
    const uint32_t *number, *offset, *last;
};

template <HashKind kind, class Out>
inline Out chosen_element(const ChosenRow<Out>& row, const ChosenColumns& of, int64_t j) {
    const uint32_t number = kind == RUN ? of.number[0] + static_cast<uint32_t>(j) : of.number[j];
    uint32_t x = row.factor * number + row.shift;
    if (kind == COPIES) x -= of.offset[j];
    if (kind == COLUMNS) x += of.offset[j];
    const bool is_whole = x <= (kind == COPIES ? of.last[j] : row.last);
    return one_of(row.whole[j], row.other[j], is_whole);
}

#if defined(__AVX512F__)
// The masks of rows for the next 16 columns, of which `some` exist. The columns' numbers are loaded
// once for all rows: loads are the limit.
template <HashKind kind, int rows>
struct ChosenLanes {
    __m512i factor[rows], shift[rows], last[rows];

    template <class Out>
    ChosenLanes(const ChosenRow<Out>* row, const ChosenColumns& of, int64_t j, int lanes) {
        const __m512i lane =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            factor[r] = _mm512_set1_epi32(row[r].factor);
            shift[r] = _mm512_set1_epi32(row[r].shift);
            last[r] = _mm512_set1_epi32(row[r].last);
            if (kind == RUN) {  // shift is the hash itself, and factor its step
                const auto number = of.number[0] + static_cast<uint32_t>(j);
                const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(number), lane);
                shift[r] = _mm512_add_epi32(_mm512_mullo_epi32(numbers, factor[r]), shift[r]);
                factor[r] = _mm512_set1_epi32(row[r].factor * lanes);
            }
        }
    }

    void next(const ChosenColumns& of, int64_t j, __mmask16 some, __mmask16* chosen) {
        if constexpr (kind == RUN) {
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                chosen[r] = _mm512_cmple_epu32_mask(shift[r], last[r]);
                shift[r] = _mm512_add_epi32(shift[r], factor[r]);
            }
            return;
        }
        const __m512i number = _mm512_maskz_loadu_epi32(some, of.number + j);
        const bool has_offset = kind != NUMBERS;
        const __m512i offset = has_offset ? _mm512_maskz_loadu_epi32(some, of.offset + j) : number;
        const __m512i end = kind == COPIES ? _mm512_maskz_loadu_epi32(some, of.last + j) : number;
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(number, factor[r]), shift[r]);
            if (kind == COPIES) x = _mm512_sub_epi32(x, offset);
            if (kind == COLUMNS) x = _mm512_add_epi32(x, offset);
            chosen[r] = _mm512_cmple_epu32_mask(x, kind == COPIES ? end : last[r]);
        }
    }
};

// one line: elements j .. of `whole` where chosen, and of `other` elsewhere
template <bool has_other, class Out>
inline __m512i chosen_line(const Out* whole, const Out* other, __mmask32 chosen) {
    constexpr size_t size = sizeof(Out);
    const __m512i rest = has_other ? _mm512_loadu_si512(other) : _mm512_setzero_si512();
    if constexpr (size == 2) return _mm512_mask_loadu_epi16(rest, chosen, whole);
    if constexpr (size == 4) return _mm512_mask_loadu_epi32(rest, chosen, whole);
    if constexpr (size == 8) return _mm512_mask_loadu_epi64(rest, chosen, whole);
}
#endif

// writes columns from .. end - 1 of some rows
template <HashKind kind, class Out> GROWKERN_ONCE
void choose(int rows, const ChosenRow<Out>* row, const ChosenColumns& of, int64_t from,
            int64_t end) {
    for (int r = 0; r < rows; ++r) {
        for (int64_t j = from; j < end; ++j) row[r].to[j] = chosen_element<kind>(row[r], of, j);
    }
}

// Writes lines of 64 bytes past the caches, from column j to at most n; returns the first column
// that is not written. The elements do not pass through memory: a load from a fresh store would
// have to wait for the stores before it.
#if defined(__AVX512F__)
template <HashKind kind, bool has_other, int rows, class Out>
int64_t stream_lines(const ChosenRow<Out>* row, const ChosenColumns& of, int64_t j, int64_t n) {
    constexpr int64_t N = LINE_BYTES / sizeof(Out);
    const Out *whole[rows], *other[rows];
    Out* to[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        whole[r] = row[r].whole, other[r] = row[r].other, to[r] = row[r].to;
    }
    ChosenLanes<kind, rows> lanes(row, of, j, N < 16 ? 8 : 16);
    for (; j + N <= n; j += N) {
        __mmask16 low[rows], high[rows];
        lanes.next(of, j, N < 16 ? 0xff : 0xffff, low);
        if constexpr (N == 32) lanes.next(of, j + 16, 0xffff, high);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            __mmask32 chosen = low[r];
            if constexpr (N == 32) chosen = _mm512_kunpackw(high[r], low[r]);
            const __m512i x = chosen_line<has_other>(whole[r] + j, other[r] + j, chosen);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to[r] + j), x);
        }
    }
    return j;
}
#else
template <HashKind kind, class Out>
int64_t stream_lines(int rows, const ChosenRow<Out>* row, const ChosenColumns& of, int64_t j,
                     int64_t n) {
    constexpr int64_t N = LINE_BYTES / sizeof(Out);
    for (; j + N <= n; j += N) {
        for (int r = 0; r < rows; ++r) {
            alignas(64) Out line[N];
            for (int64_t k = 0; k < N; ++k) line[k] = chosen_element<kind>(row[r], of, j + k);
            stream_bytes(reinterpret_cast<char*>(row[r].to + j),
                         reinterpret_cast<const char*>(line), LINE_BYTES);
        }
    }
    return j;
}
#endif

// Writes n elements of 1 to 4 rows. Stores go on while the next lines are computed: a long burst
// of stores would wait for memory. All rows begin at the same place of a line.
template <HashKind kind, bool has_other, class Out>
void stream_rows(int rows, const ChosenRow<Out>* row, const ChosenColumns& of, int64_t n) {
    const int64_t head = (-reinterpret_cast<intptr_t>(row->to) & (LINE_BYTES - 1)) / sizeof(Out);
    const int64_t j = smaller(head, n);
    choose<kind>(rows, row, of, 0, j);
    int64_t end = j;
#if defined(__AVX512F__)
    if (rows == 4) end = stream_lines<kind, has_other, 4>(row, of, j, n);
    if (rows == 2 || rows == 3) end = stream_lines<kind, has_other, 2>(row, of, j, n);
    if (rows % 2) end = stream_lines<kind, has_other, 1>(row + rows - 1, of, j, n);
#else
    end = stream_lines<kind>(rows, row, of, j, n);
#endif
    choose<kind>(rows, row, of, end, n);
}

template <class Out>
void stream_rows(HashKind kind, bool has_other, int rows, const ChosenRow<Out>* row,
                 const ChosenColumns& of, int64_t n) {
    if (has_other) {
        if (kind == RUN) return stream_rows<RUN, true>(rows, row, of, n);
        if (kind == NUMBERS) return stream_rows<NUMBERS, true>(rows, row, of, n);
        return stream_rows<COLUMNS, true>(rows, row, of, n);
    }
    if (kind == RUN) return stream_rows<RUN, false>(rows, row, of, n);
    if (kind == COPIES) return stream_rows<COPIES, false>(rows, row, of, n);
    return stream_rows<COLUMNS, false>(rows, row, of, n);
}

// Writes columns j0 .. j0 + n - 1 of output rows in memory, with noise or routed with amplitude 1.
// With `is_run` these columns belong to one run.
template <class Out> GROWKERN_ONCE
void write_past_caches(const ExpandPlan& p, const RowToWrite<Out>* rows, int64_t n_rows,
                       int64_t j0, int64_t n, bool is_run) {
    const ExpandArgs& a = *p.args;
    const bool noisy = a.row_factor || a.col_factor, by_row = a.col_copies || a.col_factor;
    const auto from = [&](const int32_t* x) { return reinterpret_cast<const uint32_t*>(x) + j0; };
    HashKind kind = COLUMNS;
    ChosenColumns of = {from(a.line_mult), from(a.line_key), nullptr};
    if (by_row && noisy) {
        kind = is_run && p.signs_in_runs ? RUN : NUMBERS;
        of = {from(a.noise_source), nullptr, nullptr};
    } else if (by_row) {
        kind = is_run ? RUN : COPIES;
        of = {from(p.cols), p.chosen_first + j0, p.chosen_last + j0};
    }
    constexpr int MOST = 4;
    ChosenRow<Out> held[MOST];
    int n_held = 0;
    const auto place = [](const ChosenRow<Out>& row) {
        return reinterpret_cast<uintptr_t>(row.to) % LINE_BYTES;
    };
    for (const RowToWrite<Out>* row = rows; row < rows + n_rows; ++row) {
        const int64_t i = row->row;
        Out* to = static_cast<Out*>(a.out) + i * a.out_stride_m + j0;
        const Out* other = noisy ? row->other : ZEROS<Out>;
        ChosenRow<Out> next = {row->whole, other, to, 0, 0, TOP_BIT - 1};
        if (by_row) {
            next.factor = a.line_mult[i], next.shift = a.line_key[i];
            if (kind == RUN && !noisy) next.shift -= *of.offset, next.last = *of.last;
        } else if (noisy) {
            next.factor = a.noise_source[i];
        } else {
            const Interval chosen = chosen_interval(a.row_copies[i]);
            next.factor = row->source, next.shift = -chosen.first, next.last = chosen.last;
        }
        if (n_held == MOST || (n_held && place(next) != place(held[0]))) {
            stream_rows(kind, noisy, n_held, held, of, n);
            n_held = 0;
        }
        held[n_held++] = next;
    }
    if (n_held) stream_rows(kind, noisy, n_held, held, of, n);
}

}  // namespace
}  // namespace growkern
