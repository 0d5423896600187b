// Where expand reads: addresses of a source row, and a thread's memory for gathered columns.
//
// Included by expand_body.cpp, which is compiled once for each instruction set.
#pragma once
#include <cstdlib>

#include "expand.h"
#include "simd.h"

namespace growkern {
namespace {

constexpr int64_t GATHERED_COLUMNS = 256;  // a tile of 64-byte lines: 16 KiB, half of an L1 cache
constexpr int64_t RUN_COLUMNS = 1024;
constexpr int64_t MAX_COLUMNS = RUN_COLUMNS;

template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
    using type = uint32_t;
};
template <>
struct BitsOf<double> {
    using type = uint64_t;
};
template <>
struct BitsOf<bf16> {
    using type = uint16_t;
};
template <>
struct BitsOf<f16> {
    using type = uint16_t;
};

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class Out>
inline Out one_of(Out x, Out y, bool is_x) {
    using Bits = typename BitsOf<Out>::type;
    const Bits a = bit_cast<Bits>(x), b = bit_cast<Bits>(y);
    return bit_cast<Out>(static_cast<Bits>(is_x ? a : b));
}

// n source elements that lie together in memory and go to output columns from .. from + n - 1
template <class In>
struct Piece {
    const In* x;
    int64_t from, n;
};

// addresses of a virtual row: `low` has virtual columns 0 .. C-1, `high` has C .. 2C-1
template <class In>
struct Source {
    const In *low, *high;

    Source(const ExpandArgs& a, int64_t row) {
        const In* weight = static_cast<const In*>(a.weight);
        const In* upper = static_cast<const In*>(a.upper);
        const int64_t r = row < a.R ? row : row - a.R;
        high = upper ? upper + r * a.upper_stride : nullptr;
        low = row < a.R ? weight + r * a.weight_stride : high;
    }
    const In* at(int64_t col, int64_t C) const { return col < C ? low + col : high + (col - C); }
};

template <class In>
struct Scratch {
    using Bits = typename BitsOf<In>::type;
    static constexpr int64_t LINE = LINE_BYTES / sizeof(In);
    alignas(64) Bits tile[LINE * GATHERED_COLUMNS];
    Piece<In> pieces[MAX_COLUMNS];
    Bits* packed;  // (virtual columns, LINE); null (no AVX2, no memory): gather one by one
    In* scaled;    // (rows, virtual columns), rows read together; null: scale gathered columns

    explicit Scratch(const ExpandPlan& p) : packed(nullptr), scaled(nullptr) {
        if (p.scales_sources) {
            const size_t row = sizeof(In) * p.virtual_columns, rows = p.runs ? 1 : LINE;
            const size_t all = (row * rows + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
            scaled = static_cast<In*>(std::aligned_alloc(LINE_BYTES, all));
        }
#if defined(__AVX2__)
        const size_t bytes = LINE_BYTES * p.virtual_columns;
        if (!p.runs) packed = static_cast<Bits*>(std::aligned_alloc(LINE_BYTES, bytes));
#endif
    }
    ~Scratch() {
        std::free(packed);
        std::free(scaled);
    }
};

#if defined(__AVX2__)
// `pack_lines` of rows that may lie a power of two apart: they would push each other out of the L1
// cache, so a few columns of all rows are copied together first
template <class Bits>
void pack_rows(const Bits* const* row, int64_t n, Bits* packed) {
    constexpr int64_t LINE = LINE_BYTES / sizeof(Bits), STAGED = 4 * LINE;
    alignas(64) Bits stage[LINE][STAGED];
    const Bits* staged[LINE];
    for (int64_t q = 0; q < LINE; ++q) staged[q] = stage[q];
    int64_t c = 0;
    for (; c + STAGED <= n; c += STAGED) {
        for (int64_t q = 0; q < LINE; ++q) std::memcpy(stage[q], row[q] + c, sizeof stage[q]);
        pack_lines(staged, STAGED, packed + c * LINE);
    }
    for (int64_t q = 0; q < LINE; ++q) staged[q] = row[q] + c;
    pack_lines(staged, n - c, packed + c * LINE);
}
#endif

}  // namespace
}  // namespace growkern
