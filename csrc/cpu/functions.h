// Elementary functions for vectors of numbers: exp, exp - 1, log(1 + y) and tanh.
//
// All are written without branches, so that compilers vectorise them, and let NaN through.
#pragma once
#include <cmath>
#include <limits>

#include "simd.h"

namespace growkern {
namespace {

template <class T>
constexpr T INF = std::numeric_limits<T>::infinity();

template <class T>
struct Float;
template <>
struct Float<float> {
    using Bits = uint32_t;
    static constexpr int MANTISSA = 23, LOG_TERMS = 4;
    static constexpr Bits BIAS = 127, SQRT_HALF = 0x3f3504f3;
    static constexpr float ROUND = 0x1.8p23f, LEAST = -87.0f, MOST = 88.0f;
};
template <>
struct Float<double> {
    using Bits = uint64_t;
    static constexpr int MANTISSA = 52, LOG_TERMS = 10;
    static constexpr Bits BIAS = 1023, SQRT_HALF = 0x3fe6a09e667f3bcd;
    static constexpr double ROUND = 0x1.8p52, LEAST = -707.0, MOST = 709.0;
};

// exp(r) - 1 for |r| <= ln(2) / 2, good to 1e-7 (a double: 3e-16) of exp(r)
inline float exponential_series(float r) {
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r;
}

inline double exponential_series(double r) {
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    return p * r * r + r;
}

// x = n ln(2) + r with |r| <= ln(2) / 2. Returns exp(r) - 1; sets `n` to the bits of ROUND + n,
// which end with those of the integer n
inline float reduced_exponential(float x, uint32_t& n) {
    const float shifted = x * 1.44269504f + Float<float>::ROUND;
    const float whole = shifted - Float<float>::ROUND;
    const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    n = bit_cast<uint32_t>(shifted);
    return exponential_series(r);
}

inline double reduced_exponential(double x, uint64_t& n) {
    const double shifted = x * 0x1.71547652b82fep0 + Float<double>::ROUND;
    const double whole = shifted - Float<double>::ROUND;
    const double r = (x - whole * 0x1.62e42fefa0000p-1) - whole * 0x1.cf79abc9e3b3ap-40;
    n = bit_cast<uint64_t>(shifted);
    return exponential_series(r);
}

// exp(x); results below 1e-38 (a double: 1e-307) are 0
template <class T>
inline T exponential(T x) {
    typename Float<T>::Bits n;
    const T p = reduced_exponential(x, n) + 1;
    const T y = bit_cast<T>(bit_cast<decltype(n)>(p) + (n << Float<T>::MANTISSA));
    return x < Float<T>::LEAST ? 0 : x <= Float<T>::MOST ? y : x + INF<T>;
}

// exp(x) - 1 for x <= 88 (a double: 709); near 0 it keeps its digits
template <class T>
inline T exponential_minus_1(T x) {
    typename Float<T>::Bits n;
    const T p = reduced_exponential(x, n);
    const T power = bit_cast<T>((n + Float<T>::BIAS) << Float<T>::MANTISSA);
    return x < Float<T>::LEAST ? -1 : p * power + (power - 1);
}

// log(1 + y) for -1 < y <= 0; near 0 it keeps its digits
template <class T>
inline T log_1_plus(T y) {
    using F = Float<T>;
    using Bits = typename F::Bits;
    constexpr Bits ONE = F::BIAS << F::MANTISSA, MASK = (Bits{1} << F::MANTISSA) - 1;
    // 1 + y = 2^-n (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    const Bits bits = bit_cast<Bits>(1 + y) + (ONE - F::SQRT_HALF);
    const Bits n = F::BIAS - (bits >> F::MANTISSA);
    const T f = n == 0 ? y : bit_cast<T>((bits & MASK) + F::SQRT_HALF) - 1;
    const T whole = bit_cast<T>(bit_cast<Bits>(F::ROUND) + n) - F::ROUND;
    // log(1 + f) = 2 atanh(s)
    const T s = f / (2 + f), s2 = s * s;
    T p = T{1} / (2 * F::LOG_TERMS + 1);
#pragma GCC unroll 10
    for (int i = 2 * F::LOG_TERMS - 1; i >= 1; i -= 2) p = p * s2 + T{1} / i;
    return 2 * s * p - whole * static_cast<T>(0.693147180559945309417);
}

template <class T>
inline T hyperbolic_tangent(T x) {
    const T e = exponential_minus_1(-2 * std::abs(x)), y = -e / (2 + e);
    return x < 0 ? -y : y;
}

}  // namespace
}  // namespace growkern
