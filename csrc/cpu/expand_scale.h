// Scales of expand: products of source elements with the factors of rows and columns.
//
// Included by expand_body.cpp, which is compiled once for each instruction set.
#pragma once
#include "expand_source.h"

namespace growkern {
namespace {

// Two bfloat16 that lie in one 32-bit word. As each is in its half already, vectors of them need no
// shuffles: half the instructions of widening and packing. Which one comes first does not matter.
struct Pair {
    float low, high;
};
inline Pair pair_at(const bf16* x) {
    uint32_t word;
    std::memcpy(&word, x, sizeof word);
    return {bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000)};
}

// `encode<bf16>`, as the float with the same value
inline float rounded(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sum = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return bit_cast<float>(x == x ? sum : 0x7fc00000);
}
inline void put_pair(float low, float high, bf16* y) {
    const uint32_t word = bit_cast<uint32_t>(low) >> 16 | bit_cast<uint32_t>(high);
    std::memcpy(y, &word, sizeof word);
}

// (1) in its order: element, row scale, column scale. `col` null: 1.
template <class In, class Out, class Acc>
void convert(const In* x, int64_t n, Acc row, const Acc* col, Out* y) {
    if constexpr (same<In, f16>) {
        float floats[MAX_COLUMNS];
        decode_halves(x, n, floats);
        return convert<float, Out, Acc>(floats, n, row, col, y);
    } else if constexpr (same<Out, f16> && same<Acc, float>) {
        float floats[MAX_COLUMNS];
        convert<In, float, Acc>(x, n, row, col, floats);
        return encode_halves(floats, n, y);
    }
    if (col) {
        for (int64_t j = 0; j < n; ++j) y[j] = encode<Out>(decode(x[j]) * row * col[j]);
    } else if constexpr (same<In, bf16> && same<Out, bf16>) {
        for (int64_t j = 0; j + 1 < n; j += 2) {
            const Pair pair = pair_at(x + j);
            put_pair(rounded(pair.low * row), rounded(pair.high * row), y + j);
        }
        if (n % 2) y[n - 1] = encode<Out>(decode(x[n - 1]) * row);
    } else {
        for (int64_t j = 0; j < n; ++j) y[j] = encode<Out>(decode(x[j]) * row);
    }
}

// `convert` for bfloat16 with a single factor 2**k: adds k to the exponents, in 16 bits instead of
// the 32 that products take. `row` and `col` are `power_step`s. Every number must be 0, or normal
// before and after. Otherwise the result is false and y is undefined: subnormal numbers, infinities
// and NaN need the product.
inline bool add_steps(const bf16* x, int64_t n, int16_t row, const int16_t* col, bf16* y) {
    uint16_t odd = 0;
    for (int64_t j = 0; j < n; ++j) {
        const uint16_t bits = x[j].bits, rest = bits & 0x7fff;
        const uint16_t step = static_cast<uint16_t>(col ? col[j] : row), moved = rest + step;
        const bool normal = (static_cast<uint16_t>(rest - 0x80) < 0x7f00) &
                            (static_cast<uint16_t>(moved - 0x80) < 0x7f00);
        y[j].bits = rest ? bits + step : bits;
        odd |= static_cast<uint16_t>(!normal & (rest != 0));
    }
    return !odd;
}
template <class In, class Out>
bool add_steps(const In*, int64_t, int16_t, const int16_t*, Out*) {
    return false;
}

// Scales the s-th source row by the factor that all its copies have, before columns are gathered:
// a product for each element of the source. `source` then reads `scaled`, of all virtual columns.
template <class In, class Acc>
void scale_source(const ExpandPlan& p, int64_t s, Source<In>& source, In* scaled) {
    const ExpandArgs& a = *p.args;
    const Acc row = static_cast<const Acc*>(a.row_scale)[p.target[p.first[s]]];
    int16_t step = 0;
    const bool has_step = power_step(row, step);
    for (int64_t c = 0; c < p.virtual_columns;) {
        const int64_t part_end = c < a.C ? smaller(a.C, p.virtual_columns) : p.virtual_columns;
        const int64_t n = smaller(MAX_COLUMNS, part_end - c);
        const In* x = source.at(c, a.C);
        if (!has_step || !add_steps(x, n, step, nullptr, scaled + c)) {
            convert<In, In, Acc>(x, n, row, nullptr, scaled + c);
        }
        c += n;
    }
    source.low = scaled, source.high = scaled + a.C;
}

}  // namespace
}  // namespace growkern
