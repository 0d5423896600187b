// Building blocks of the kernels: conversions, stores past the caches, and the transposed gather.
//
// The file is compiled several times, for the instruction set of the including file each time.
// Nothing here has external linkage, so that code of one instruction set cannot end up in another.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// ------------------------------------------------------------- conversions

template <class To, class From>
inline To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float decode(float x) { return x; }
inline double decode(double x) { return x; }
inline float decode(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// the exponents differ by 112; the product with 2**112 is exact, for subnormal numbers too
inline float decode(f16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
    const float value = bit_cast<float>(rest) * 0x1p112f;
    const uint32_t special = rest >= 0x0f800000 ? 0x7f800000 | rest : bit_cast<uint32_t>(value);
    return bit_cast<float>(sign | special);
}

template <class Out>
inline Out encode(double x) {
    return static_cast<Out>(x);
}

// rounds to nearest even; a NaN stays a NaN although its low bits are cut off
template <>
inline bf16 encode<bf16>(double wide) {
    const float x = static_cast<float>(wide);
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0)};
}

template <>
inline f16 encode<f16>(double wide) {
    const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(wide));
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    // subnormal: adding 0.5 rounds, and leaves the wanted bits at the end of the mantissa
    const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000;
    const uint32_t normal = (rest + 0xfff + ((rest >> 13) & 1) - 0x38000000) >> 13;
    uint32_t half = rest < 0x38800000 ? small : normal;
    half = rest >= 0x477ff000 ? 0x7c00 : half;
    half = rest > 0x7f800000 ? 0x7e00 : half;
    return {static_cast<uint16_t>(sign | half)};
}

// float16 by the processor's own instructions, which compilers do not use by themselves
inline void decode_halves(const f16* x, int64_t n, float* y) {
    int64_t j = 0;
#if defined(__F16C__)
    for (; j + 8 <= n; j += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + j));
        _mm256_storeu_ps(y + j, _mm256_cvtph_ps(half));
    }
#endif
    for (; j < n; ++j) y[j] = decode(x[j]);
}

inline void encode_halves(const float* x, int64_t n, f16* y) {
    int64_t j = 0;
#if defined(__F16C__)
    for (; j + 8 <= n; j += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(y + j), half);
    }
#endif
    for (; j < n; ++j) y[j] = encode<f16>(x[j]);
}

// ------------------------------------------------------------------ stores

// copies to memory that is not read soon: whole, aligned lines of 64 bytes go past the caches
inline void stream_bytes(char* to, const char* from, int64_t n) {
#if defined(__SSE2__)
    const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
    if (n < head + 64) {
        std::memcpy(to, from, n);
        return;
    }
    std::memcpy(to, from, head);
    int64_t k = head;
    for (; k + 64 <= n; k += 64) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + k), _mm512_loadu_si512(from + k));
#elif defined(__AVX2__)
        for (int part = 0; part < 64; part += 32) {
            const auto* read = reinterpret_cast<const __m256i*>(from + k + part);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + k + part),
                                _mm256_loadu_si256(read));
        }
#else
        for (int part = 0; part < 64; part += 16) {
            const auto* read = reinterpret_cast<const __m128i*>(from + k + part);
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + k + part), _mm_loadu_si128(read));
        }
#endif
    }
    std::memcpy(to + k, from + k, n - k);
#else
    std::memcpy(to, from, n);
#endif
}

inline void end_of_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// ------------------------------------------------------- transposed gather

// Bits is the unsigned integer as wide as an element. A line holds one column of LINE rows.
constexpr int64_t LINE_BYTES = 64;

#if defined(__AVX2__)

inline void unpack(__m256i& a, __m256i& b, uint16_t) {
    const __m256i low = _mm256_unpacklo_epi16(a, b);
    b = _mm256_unpackhi_epi16(a, b);
    a = low;
}
inline void unpack(__m256i& a, __m256i& b, uint32_t) {
    const __m256i low = _mm256_unpacklo_epi32(a, b);
    b = _mm256_unpackhi_epi32(a, b);
    a = low;
}
inline void unpack(__m256i& a, __m256i& b, uint64_t) {
    const __m256i low = _mm256_unpacklo_epi64(a, b);
    b = _mm256_unpackhi_epi64(a, b);
    a = low;
}

// transposes K rows of K elements in each 128-bit lane, K = 16 / sizeof(Bits): interleaves row r
// with row r + K/2, log2(K) times
template <class Bits>
inline void transpose_lanes(__m256i* x) {
    constexpr int K = 16 / sizeof(Bits);
#pragma GCC unroll 4
    for (int step = 1; step < K; step *= 2) {
        __m256i y[K];
#pragma GCC unroll 8
        for (int r = 0; r < K / 2; ++r) {
            y[2 * r] = x[r];
            y[2 * r + 1] = x[r + K / 2];
            unpack(y[2 * r], y[2 * r + 1], Bits{});
        }
#pragma GCC unroll 8
        for (int r = 0; r < K; ++r) x[r] = y[r];
    }
}

// transposes 2K lines of K elements into K lines of 2K elements. The lower lane takes lines
// 0 .. K-1 and the upper lane lines K .. 2K-1, so that no instruction crosses lanes.
template <class Bits, class Read, class Write>
inline void transpose(Read read, Write write) {
    constexpr int K = 16 / sizeof(Bits);
    __m256i x[K];
#pragma GCC unroll 8
    for (int r = 0; r < K; ++r) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(read(r)));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(read(r + K)));
        x[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    transpose_lanes<Bits>(x);
#pragma GCC unroll 8
    for (int r = 0; r < K; ++r) _mm256_storeu_si256(reinterpret_cast<__m256i*>(write(r)), x[r]);
}

// packed[c * LINE + q] = row[q][c], c in [0, n)
template <class Bits>
void pack_lines(const Bits* const* row, int64_t n, Bits* packed) {
    constexpr int64_t LINE = LINE_BYTES / sizeof(Bits), K = 16 / sizeof(Bits);
    int64_t c = 0;
    for (; c + K <= n; c += K) {
        for (int64_t q = 0; q < LINE; q += 2 * K) {
            transpose<Bits>([&](int r) { return row[q + r] + c; },
                            [&](int r) { return packed + (c + r) * LINE + q; });
        }
    }
    for (; c < n; ++c) {
        for (int64_t q = 0; q < LINE; ++q) packed[c * LINE + q] = row[q][c];
    }
}

// tile[q * stride + j] = packed[cols[j] * LINE + q], j in [0, n rounded up to 16); reads cols up to
// n + 32
template <class Bits>
void gather_lines(const Bits* packed, const int32_t* cols, int64_t n, Bits* tile, int64_t stride) {
    constexpr int64_t LINE = LINE_BYTES / sizeof(Bits), K = 16 / sizeof(Bits);
    for (int64_t j = 0; j < n; j += 2 * K) {
        const Bits* line[2 * K];
        for (int64_t r = 0; r < 2 * K; ++r) {
            line[r] = packed + int64_t{cols[j + r]} * LINE;
            // the next lines come from the L2 cache meanwhile
            __builtin_prefetch(packed + int64_t{cols[j + 2 * K + r]} * LINE);
        }
        for (int64_t q = 0; q < LINE; q += K) {
            transpose<Bits>([&](int r) { return line[r] + q; },
                            [&](int r) { return tile + (q + r) * stride + j; });
        }
    }
}

#endif

}  // namespace
