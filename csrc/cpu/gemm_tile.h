// The arithmetic of the GEMM, its packed factors, and the sums of one tile.
//
// Registers hold a tile of the output, 16 to 24 of 32: enough to hide an addition's latency. A
// "step" of bfloat16 is two numbers: its instruction adds two products.
#pragma once
#include <type_traits>

#include "gemm.h"
#include "simd.h"

namespace growkern {
namespace {

inline int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// --------------------------------------------------------------- arithmetic

// STEPS of LINES lines of b stay in L1. A block of the output has BLOCK_ROWS rows and BLOCK_LINES
// lines: with its packed factors it fits into an L2 of 1 MiB. A tile has ROWS rows and LINES lines.
struct Floats {
    using Step = float;  // what is packed
    using Sum = float;
    using Bits = uint32_t;
    using Vector = __m512;
    static constexpr int64_t PER_STEP = 1;
    static constexpr int64_t STEPS = 128, BLOCK_ROWS = 192, BLOCK_LINES = 24;
    static constexpr int ROWS = 8, LINES = 3, RUN = 0;
    static Vector zero() { return _mm512_setzero_ps(); }
    static Vector load(const Sum* x) { return _mm512_loadu_ps(x); }
    static void store(Sum* x, Vector v) { _mm512_storeu_ps(x, v); }
    static Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
    static Vector step(const Step* x) { return _mm512_load_ps(x); }
    static Vector multiply_add(Step a, Vector b, Vector sum) {
        return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum);
    }
};

struct Doubles {
    using Step = double;
    using Sum = double;
    using Bits = uint64_t;
    using Vector = __m512d;
    static constexpr int64_t PER_STEP = 1;
    static constexpr int64_t STEPS = 128, BLOCK_ROWS = 192, BLOCK_LINES = 24;
    static constexpr int ROWS = 8, LINES = 3, RUN = 0;
    static Vector zero() { return _mm512_setzero_pd(); }
    static Vector load(const Sum* x) { return _mm512_loadu_pd(x); }
    static void store(Sum* x, Vector v) { _mm512_storeu_pd(x, v); }
    static Vector add(Vector x, Vector y) { return _mm512_add_pd(x, y); }
    static Vector step(const Step* x) { return _mm512_load_pd(x); }
    static Vector multiply_add(Step a, Vector b, Vector sum) {
        return _mm512_fmadd_pd(_mm512_set1_pd(a), b, sum);
    }
};

// Factors and products of floats, sums of doubles. RUN products are added up as floats, so that a
// rounding error is that of a sum of RUN terms and not of all k. A run is then added to two floats,
// `high` and the rounding errors `low`: no multiplier takes part, and no number is converted. Tiles
// have few rows, because on Zen 4 a broadcast of a takes half an addition's time in the same unit.
struct FloatsInDoubles {
    using Step = float;
    using Sum = double;
    using Bits = uint32_t;
    static constexpr int64_t PER_STEP = 1;
    static constexpr int64_t STEPS = 256, BLOCK_ROWS = 256, BLOCK_LINES = 12;
    static constexpr int ROWS = 2, LINES = 4, RUN = 4;
    using Vector = __m512d;
    static Vector load(const Sum* x) { return _mm512_loadu_pd(x); }
    static void store(Sum* x, Vector v) { _mm512_storeu_pd(x, v); }
    static Vector add(Vector x, Vector y) { return _mm512_add_pd(x, y); }
};

#if defined(__AVX512BF16__)
struct Pairs {
    using Step = uint32_t;  // two neighbours along k
    using Sum = float;
    using Bits = uint32_t;
    using Vector = __m512;
    static constexpr int64_t PER_STEP = 2;
    static constexpr int64_t STEPS = 128, BLOCK_ROWS = 256, BLOCK_LINES = 12;
    static constexpr int ROWS = 8, LINES = 3, RUN = 0;
    static Vector zero() { return _mm512_setzero_ps(); }
    static Vector load(const Sum* x) { return _mm512_loadu_ps(x); }
    static void store(Sum* x, Vector v) { _mm512_storeu_ps(x, v); }
    static Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
    static __m512i step(const Step* x) { return _mm512_load_si512(x); }
    static Vector multiply_add(Step a, __m512i b, Vector sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(a));
    }
};
#endif

template <class P>
constexpr int64_t LINE = LINE_BYTES / sizeof(typename P::Step);

// ------------------------------------------------------------------ packing

// n numbers to steps, the rest of `room` steps to 0
template <class P, class In>
inline void convert(const In* x, int64_t n, int64_t room, typename P::Step* y) {
    int64_t j = 0;
    if constexpr (P::PER_STEP == 1) {
        for (; j < n; ++j) y[j] = decode(x[j]);
    } else {
        for (; j < n / 2; ++j) {
            y[j] = x[2 * j].bits | static_cast<uint32_t>(x[2 * j + 1].bits) << 16;
        }
        if (n % 2) y[j++] = x[n - 1].bits;
    }
    for (; j < room; ++j) y[j] = 0;
}

// n numbers of step s, from row 2 s and, if there is one, row 2 s + 1 of a pair
template <class P, class In>
inline void convert_line(const In* x, const In* next, int64_t n, typename P::Step* line) {
    if constexpr (P::PER_STEP == 1) {
        for (int64_t q = 0; q < n; ++q) line[q] = decode(x[q]);
    } else if (next) {
        for (int64_t q = 0; q < n; ++q) {
            line[q] = x[q].bits | static_cast<uint32_t>(next[q].bits) << 16;
        }
    } else {
        for (int64_t q = 0; q < n; ++q) line[q] = x[q].bits;
    }
    for (int64_t q = n; q < LINE<P>; ++q) line[q] = 0;
}

// packed[(group * room + s) * LINE + q]: step s of the number q of a group, 0 past either end.
// `n` numbers `stride` apart, each of k numbers `k_stride` apart. At most P::STEPS steps.
template <class P, class In>
void pack(const In* x, int64_t n, int64_t stride, int64_t k, int64_t k_stride, int64_t room,
          typename P::Step* packed) {
    using Step = typename P::Step;
    using Bits = typename P::Bits;
    constexpr int64_t L = LINE<P>;
    const int64_t steps = blocks_of(k, P::PER_STEP);
    for (int64_t group = 0; group < n; group += L, packed += room * L) {
        const int64_t here = smaller(L, n - group);
        if (k_stride != 1) {
            for (int64_t s = 0; s < steps; ++s) {
                const In* row = x + group + s * P::PER_STEP * k_stride;
                const bool pair = (s + 1) * P::PER_STEP <= k;
                convert_line<P>(row, pair ? row + k_stride : nullptr, here, packed + s * L);
            }
            continue;
        }
        alignas(64) Step rows[L][P::STEPS];
        const Bits* row[L];
        for (int64_t q = 0; q < L; ++q) {
            const In* from = x + (group + q) * stride;
            if (std::is_same_v<In, Step> && q < here) {
                row[q] = reinterpret_cast<const Bits*>(from);
                continue;
            }
            convert<P>(from, q < here ? k : 0, steps, rows[q]);
            row[q] = reinterpret_cast<const Bits*>(rows[q]);
        }
        pack_lines(row, steps, reinterpret_cast<Bits*>(packed));
    }
}

template <class P>
void pack(const void* x, int32_t type, int64_t first, int64_t n, int64_t stride, int64_t k0,
          int64_t k, int64_t k_stride, int64_t room, typename P::Step* packed) {
    const int64_t skip = first * stride + k0 * k_stride;
    if constexpr (P::PER_STEP == 2) {
        pack<P>(static_cast<const bf16*>(x) + skip, n, stride, k, k_stride, room, packed);
    } else if (type == F32) {
        pack<P>(static_cast<const float*>(x) + skip, n, stride, k, k_stride, room, packed);
    } else if (type == BF16) {
        pack<P>(static_cast<const bf16*>(x) + skip, n, stride, k, k_stride, room, packed);
    } else {
        pack<P>(static_cast<const f16*>(x) + skip, n, stride, k, k_stride, room, packed);
    }
}

// --------------------------------------------------------------- one tile

// Both factors of a tile are packed: `a` at its first row, `b` at its first line.
template <class P>
struct Packed {
    using Step = typename P::Step;
    const Step *a, *b;
    Step number(int i, int64_t s) const { return a[s * LINE<P> + i]; }
    const Step* line(int j, int64_t s) const { return b + (j * P::STEPS + s) * LINE<P>; }
    // called once in LINE steps
    void fetch_next(int64_t) const {}
};

template <class P, int lines, class Factors>
inline void add_products(int64_t steps, const Factors& of,
                         typename P::Vector (&sum)[P::ROWS][lines]) {
    const auto add = [&](int64_t s) {
        decltype(P::step(of.line(0, s))) line[lines];
#pragma GCC unroll 3
        for (int j = 0; j < lines; ++j) line[j] = P::step(of.line(j, s));
#pragma GCC unroll 8
        for (int i = 0; i < P::ROWS; ++i)
#pragma GCC unroll 3
            for (int j = 0; j < lines; ++j) {
                sum[i][j] = P::multiply_add(of.number(i, s), line[j], sum[i][j]);
            }
    };
    int64_t s = 0;
    for (; s + LINE<P> <= steps; s += LINE<P>) {
        of.fetch_next(s);
#pragma GCC unroll 4
        for (int64_t t = 0; t < LINE<P>; ++t) add(s + t);
    }
    for (; s < steps; ++s) add(s);
}

// x + y; its rounding error is added to `low` (Dekker). Where y is larger than x, a rounding error
// of y remains, as of one more product
inline __m512 add_exactly(__m512 x, __m512 y, __m512& low) {
    const __m512 sum = _mm512_add_ps(x, y);
    low = _mm512_add_ps(low, _mm512_sub_ps(y, _mm512_sub_ps(sum, x)));
    return sum;
}

// Runs end in different steps, so that their additions overlap with products of the others.
template <int rows, int lines, class Factors>
inline void add_runs(int64_t steps, const Factors& of, __m512 (&high)[rows * lines],
                     __m512 (&low)[rows * lines]) {
    using P = FloatsInDoubles;
    __m512 run[rows * lines];
#pragma GCC unroll 8
    for (int t = 0; t < rows * lines; ++t) run[t] = _mm512_setzero_ps();
    const auto add = [&](int64_t at) {
        __m512 line[lines];
#pragma GCC unroll 4
        for (int j = 0; j < lines; ++j) line[j] = _mm512_load_ps(of.line(j, at));
#pragma GCC unroll 8
        for (int t = 0; t < rows * lines; ++t) {
            const __m512 a = _mm512_set1_ps(of.number(t / lines, at));
            run[t] = _mm512_fmadd_ps(a, line[t % lines], run[t]);
        }
    };
    const auto end = [&](int t) {
        high[t] = add_exactly(high[t], run[t], low[t]);
        run[t] = _mm512_setzero_ps();
    };
    int64_t s = 0;
    for (; s + P::RUN <= steps; s += P::RUN) {
        if (s % LINE<P> == 0) of.fetch_next(s);
#pragma GCC unroll 8
        for (int k = 0; k < P::RUN; ++k) {
            add(s + k);
#pragma GCC unroll 8
            for (int t = 0; t < rows * lines; ++t) {
                if (t % P::RUN == k) end(t);
            }
        }
    }
    for (; s < steps; ++s) add(s);
#pragma GCC unroll 8
    for (int t = 0; t < rows * lines; ++t) end(t);
}

inline __m512d sum_of(__m256 high, __m256 low) {
    return _mm512_add_pd(_mm512_cvtps_pd(high), _mm512_cvtps_pd(low));
}

// calls put(i, j, sum) for vector j of row i of a tile
template <class P, int lines, class Factors, class Put>
inline void for_each_sum(int64_t steps, const Factors& of, Put put) {
    if constexpr (P::RUN > 0) {
        __m512 high[P::ROWS * lines], low[P::ROWS * lines];
#pragma GCC unroll 8
        for (int t = 0; t < P::ROWS * lines; ++t) high[t] = low[t] = _mm512_setzero_ps();
        add_runs<P::ROWS, lines>(steps, of, high, low);
#pragma GCC unroll 8
        for (int t = 0; t < P::ROWS * lines; ++t) {
            const int i = t / lines, j = t % lines * 2;
            put(i, j, sum_of(_mm512_castps512_ps256(high[t]), _mm512_castps512_ps256(low[t])));
            put(i, j + 1, sum_of(_mm512_extractf32x8_ps(high[t], 1),
                                 _mm512_extractf32x8_ps(low[t], 1)));
        }
    } else {
        typename P::Vector sum[P::ROWS][lines];
#pragma GCC unroll 8
        for (int i = 0; i < P::ROWS; ++i)
#pragma GCC unroll 3
            for (int j = 0; j < lines; ++j) sum[i][j] = P::zero();
        add_products<P, lines>(steps, of, sum);
#pragma GCC unroll 8
        for (int i = 0; i < P::ROWS; ++i)
#pragma GCC unroll 3
            for (int j = 0; j < lines; ++j) put(i, j, sum[i][j]);
    }
}

}  // namespace
}  // namespace growkern
