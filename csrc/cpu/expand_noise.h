// Noise of expand: the results of both signs, and which one an element gets.
//
// Included by expand_body.cpp, which is compiled once for each instruction set.
#pragma once
#include "expand_scale.h"

namespace growkern {
namespace {

// x with its sign turned round if the top bit of `sign` is set
inline float turned(float x, uint32_t sign) {
    return bit_cast<float>(bit_cast<uint32_t>(x) ^ (sign & TOP_BIT));
}
inline double turned(double x, uint32_t sign) {
    return bit_cast<double>(bit_cast<uint64_t>(x) ^ static_cast<uint64_t>(sign & TOP_BIT) << 32);
}
inline uint32_t top_word(float x) { return bit_cast<uint32_t>(x); }
inline uint32_t top_word(double x) { return bit_cast<uint64_t>(x) >> 32; }

// (4) for n products x and both signs, which are alike where noise has size 0: a negative factor
template <class Out, class Acc>
void add_noise(const Acc* x, int64_t n, const Acc* factor, Out* above, Out* below) {
    if constexpr (same<Out, Acc>) {  // nothing is rounded to a narrower type
        for (int64_t j = 0; j < n; ++j) {
            const Acc rest = x[j] * std::fabs(factor[j]) - x[j];
            above[j] = x[j] + rest;
            below[j] = x[j] + turned(rest, ~top_word(factor[j]));
        }
        return;
    }
    Acc larger[MAX_COLUMNS];
    for (int64_t j = 0; j < n; ++j) larger[j] = x[j] * std::fabs(factor[j]);
    if constexpr (same<Out, f16> && same<Acc, float>) {
        float sum[MAX_COLUMNS];
        encode_halves(larger, n, above);
        decode_halves(above, n, larger);
        for (int64_t j = 0; j < n; ++j) sum[j] = x[j] + (larger[j] - x[j]);
        encode_halves(sum, n, above);
        for (int64_t j = 0; j < n; ++j) {
            sum[j] = x[j] + turned(larger[j] - x[j], ~top_word(factor[j]));
        }
        return encode_halves(sum, n, below);
    }
    for (int64_t j = 0; j < n; ++j) {
        const Acc rest = static_cast<Acc>(decode(encode<Out>(larger[j]))) - x[j];
        above[j] = encode<Out>(x[j] + rest);
        below[j] = encode<Out>(x[j] + turned(rest, ~top_word(factor[j])));
    }
}

// `convert` and `add_noise` from one dtype to itself, with one scale and one factor for all
inline void add_noise(const bf16* x, int64_t n, float scale, float factor, bf16* above,
                      bf16* below) {
    const float size = std::fabs(factor);
    const uint32_t sign = ~top_word(factor);
    for (int64_t j = 0; j + 1 < n; j += 2) {
        const Pair pair = pair_at(x + j);
        const float low = pair.low * scale, high = pair.high * scale;
        const float low_rest = rounded(low * size) - low, high_rest = rounded(high * size) - high;
        put_pair(rounded(low + low_rest), rounded(high + high_rest), above + j);
        put_pair(rounded(low + turned(low_rest, sign)), rounded(high + turned(high_rest, sign)),
                 below + j);
    }
    if (n % 2) {
        const float product = decode(x[n - 1]) * scale;
        add_noise(&product, 1, &factor, above + n - 1, below + n - 1);
    }
}

inline void add_noise(const float* x, int64_t n, float scale, float factor, float* above,
                      float* below) {
    const float size = std::fabs(factor);
    const uint32_t sign = ~top_word(factor);
    for (int64_t j = 0; j < n; ++j) {
        const float product = x[j] * scale, rest = product * size - product;
        above[j] = product + rest;
        below[j] = product + turned(rest, sign);
    }
}

// `add_noise` of bfloat16 with one scale and one factor, as integers that are added to the bits. As
// long as nothing overflows or gets subnormal, (4) for 2**k x is 2**k times that for x, so they
// depend on the 7 bits of the mantissa only. Random signs, +-x and at most a bit, need few steps:
//     result = bits + base + (mantissa >= at[0] ? add[0] : 0) + (mantissa >= at[1] ? add[1] : 0)
struct SignSteps {
    struct Steps {
        uint16_t base, add[2];
        int16_t at[2];
    };
    static constexpr int COUNT = 128;
    Steps above, below;
    bool exist;

    SignSteps(float scale, float factor) : exist(true) {
        const auto is_medium = [](float x) { return x >= 0x1p-32f && x <= 0x1p32f; };
        exist &= is_medium(std::fabs(scale)) && is_medium(std::fabs(factor));
        bf16 x[COUNT], results[2][COUNT];
        for (int k = 0; k < COUNT; ++k) x[k].bits = 0x3f80 + k;  // from 1 to 2
        add_noise(x, COUNT, scale, factor, results[0], results[1]);
        find(x, results[0], above);
        find(x, results[1], below);
    }
    // reads the steps from the results for every mantissa
    void find(const bf16* x, const bf16* result, Steps& steps) {
        const auto added = [=](int k) { return static_cast<uint16_t>(result[k].bits - x[k].bits); };
        steps = {added(0), {0, 0}, {COUNT, COUNT}};
        int n = 0;
        for (int k = 0; k < COUNT; ++k) {
            if (!k || added(k) == added(k - 1)) continue;
            if (n == 2) {
                exist = false;
                return;
            }
            steps.at[n] = static_cast<int16_t>(k);
            steps.add[n++] = static_cast<uint16_t>(added(k) - added(k - 1));
        }
    }
};

inline uint16_t moved(uint16_t bits, const SignSteps::Steps& steps) {
    const int16_t mantissa = bits & 0x7f;
    const uint16_t first = mantissa >= steps.at[0] ? steps.add[0] : 0;
    const uint16_t second = mantissa >= steps.at[1] ? steps.add[1] : 0;
    return bits + steps.base + first + second;
}

// `add_noise` by steps; false if some element is 0, or too large or small for them
inline bool add_steps(const bf16* x, int64_t n, const SignSteps& steps, bf16* above, bf16* below) {
    if (!steps.exist) return false;
    // with both factors from 2**-32 to 2**32, products of 2**-60 to 2**60 stay normal
    constexpr uint16_t SMALLEST = (127 - 60) << 7, COUNT = 120 << 7;
    uint16_t odd = 0;
    const auto of_above = steps.above, of_below = steps.below;
    for (int64_t j = 0; j < n; ++j) {
        const uint16_t bits = x[j].bits;
        above[j].bits = moved(bits, of_above);
        below[j].bits = moved(bits, of_below);
        odd |= static_cast<uint16_t>(static_cast<uint16_t>((bits & 0x7fff) - SMALLEST) >= COUNT);
    }
    return !odd;
}
inline bool add_steps(const float*, int64_t, const SignSteps&, float*, float*) { return false; }

// calls f(j, h) with h of hashes.py for output row i and column j0 + j, for j in [0, n)
template <class F>
inline void for_hashes(const ExpandArgs& a, int64_t i, int64_t j0, int64_t n, F f) {
    if (a.col_factor) {
        const int32_t* source = a.noise_source + j0;
        const uint32_t key = a.line_key[i], mult = a.line_mult[i];
        for (int64_t j = 0; j < n; ++j) f(j, line_hash(key, mult, source[j]));
    } else {
        const int32_t* key = a.line_key + j0;
        const int32_t* mult = a.line_mult + j0;
        const uint32_t source = a.noise_source[i];
        for (int64_t j = 0; j < n; ++j) f(j, line_hash(key[j], mult[j], source));
    }
}

// chooses by (3) for output row i, columns j0 .. j0 + n - 1
template <class Out> GROWKERN_ONCE
void choose_signs(const ExpandArgs& a, int64_t i, int64_t j0, int64_t n, const Out* above,
                  const Out* below, Out* __restrict y) {
    for_hashes(a, i, j0, n, [=](int64_t j, uint32_t hash) {
        y[j] = one_of(below[j], above[j], hash >= TOP_BIT);
    });
}

}  // namespace
}  // namespace growkern
