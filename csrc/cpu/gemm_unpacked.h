// The GEMM of few rows of a and a long b whose columns are contiguous, as those of a head are.
//
// The lines of a tile are 16 rows of a, packed once for all of b. The numbers that an instruction
// broadcasts come from b as it lies in memory: b is read once and never packed. A block of the
// transposed output stays in the cache until it is written.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "gemm_tile.h"

namespace growkern {
namespace {

// tiles of 8 columns and 32 rows: whole for every multiple of 32 rows
template <class P>
struct TwoLines : P {
    static constexpr int LINES = 2;
};

// steps along k that one register adds up. A sum of 64 products, and sums of 12 such sums, round
// less than one sum of 768: errors are a third. Others are exact enough, or have rounded factors.
template <class P>
constexpr int64_t STEPS_OF_SUM = std::is_same_v<P, TwoLines<Floats>> ? 64 : INT64_MAX;

// `columns` points at the first column of a tile, `next` at that of the tile after it, or is null
template <class P>
struct Unpacked {
    using Step = typename P::Step;
    const char *columns, *next;
    int64_t stride;  // from column to column, in bytes
    const Step* lines;
    int64_t room;  // steps of a line in memory

    Step number(int i, int64_t s) const {
        Step x;  // two numbers of bfloat16 are no Step in memory
        std::memcpy(&x, columns + i * stride + s * sizeof(Step), sizeof x);
        return x;
    }
    const Step* line(int j, int64_t s) const { return lines + (j * room + s) * LINE<P>; }
    // the same from step s on
    Unpacked from(int64_t s) const {
        const int64_t skip = s * static_cast<int64_t>(sizeof(Step));
        return {columns + skip, next ? next + skip : nullptr, stride, lines + s * LINE<P>, room};
    }
    void fetch_next(int64_t s) const {
        if (!next) return;
#pragma GCC unroll 8
        for (int i = 0; i < P::ROWS; ++i) {
            __builtin_prefetch(next + i * stride + s * sizeof(Step));
        }
    }
};

constexpr int64_t BLOCK_COLUMNS = 96;        // a multiple of those of each tile
constexpr int64_t PACKED_BYTES = 512 << 10;  // of rows of a: half of an L2 of 1 MiB
constexpr int64_t MOST_ROWS = 256, LEAST_ROWS = 64;

// rows of a that are packed at a time, in whole tiles
template <class P>
int64_t rows_at_a_time(int64_t k) {
    constexpr int64_t TILE = P::LINES * LINE<P>, BYTES = sizeof(typename P::Step) / P::PER_STEP;
    return smaller(MOST_ROWS, PACKED_BYTES / (k * BYTES)) / TILE * TILE;
}

// Whether b may stay where it is. Long columns leave room for so few rows of a that b would be read
// too often.
template <class P>
bool is_unpacked(const GemmArgs& g) {
    const int32_t type = P::PER_STEP == 2 ? BF16 : F32;
    const bool whole = g.k > 0 && g.k % P::PER_STEP == 0;
    return whole && !g.add && g.a_type == type && g.b_type == type && g.b_k == 1 &&
           g.m >= LINE<P> && rows_at_a_time<P>(g.k) >= LEAST_ROWS;
}

inline void unpack_pairs(__m512& a, __m512& b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    a = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
    b = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}

// transposes the numbers within each 128 bits of 4 (or, of doubles, 2) rows
inline void transpose_numbers(__m512* x, float) {
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    x[1] = _mm512_unpacklo_ps(x[2], x[3]);
    x[3] = _mm512_unpackhi_ps(x[2], x[3]);
    x[0] = a, x[2] = b;
    unpack_pairs(x[0], x[1]);
    unpack_pairs(x[2], x[3]);
}
inline void transpose_numbers(__m512* x, double) { unpack_pairs(x[0], x[1]); }

// transposes a square of 64 bytes: rows `stride` apart at `from`, `to_stride` apart at `to`
template <class Sum>
inline void transpose_square(const Sum* from, int64_t stride, Sum* to, int64_t to_stride) {
    constexpr int E = 16 / sizeof(Sum);
    __m512 x[4 * E];
#pragma GCC unroll 16
    for (int r = 0; r < 4 * E; ++r) x[r] = _mm512_loadu_ps(from + r * stride);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) transpose_numbers(x + g * E, Sum{});
#pragma GCC unroll 4
    for (int e = 0; e < E; ++e) {
        // then the 16 128-bit blocks of 4 registers
        const __m512 a = _mm512_shuffle_f32x4(x[e], x[e + E], 0x44);
        const __m512 b = _mm512_shuffle_f32x4(x[e], x[e + E], 0xee);
        const __m512 c = _mm512_shuffle_f32x4(x[e + 2 * E], x[e + 3 * E], 0x44);
        const __m512 d = _mm512_shuffle_f32x4(x[e + 2 * E], x[e + 3 * E], 0xee);
        _mm512_storeu_ps(to + e * to_stride, _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_storeu_ps(to + (e + E) * to_stride, _mm512_shuffle_f32x4(a, c, 0xdd));
        _mm512_storeu_ps(to + (e + 2 * E) * to_stride, _mm512_shuffle_f32x4(b, d, 0x88));
        _mm512_storeu_ps(to + (e + 3 * E) * to_stride, _mm512_shuffle_f32x4(b, d, 0xdd));
    }
}

// writes the transpose of `from`, whose rows are columns of c
template <class Sum>
void write_transposed(const Sum* from, int64_t stride, int64_t rows, int64_t columns, Sum* c,
                      int64_t c_stride) {
    constexpr int64_t K = LINE_BYTES / sizeof(Sum);
    const auto copy = [&](int64_t i0, int64_t i1, int64_t j0) {
        for (int64_t i = i0; i < i1; ++i) {
            for (int64_t j = j0; j < columns; ++j) c[i * c_stride + j] = from[j * stride + i];
        }
    };
    int64_t i = 0;
    for (; i + K <= rows; i += K) {
        int64_t j = 0;
        for (; j + K <= columns; j += K) {
            transpose_square(from + j * stride + i, stride, c + i * c_stride + j, c_stride);
        }
        copy(i, i + K, j);
    }
    copy(i, rows, 0);
}

// The memory of one thread, and its work on one block.
template <class P>
class UnpackedBlock {
    using Step = typename P::Step;
    using Sum = typename P::Sum;
    static constexpr int64_t L = LINE<P>;
    const GemmArgs& g;
    // 1: lines at a multiple of 4 KiB would share their places in the cache; so would sums
    const int64_t most, steps = g.k / P::PER_STEP, room = steps + 1, stride = most + 16;
    char* memory;
    Step* packed;     // (most / LINE, room, LINE)
    Step* tail;       // (P::ROWS, steps): the columns of a tile that has fewer
    Sum* transposed;  // (BLOCK_COLUMNS, stride)

    template <int lines>
    void multiply(const Unpacked<P>& of, Sum* out) const {
        constexpr int64_t LANES = LINE_BYTES / sizeof(Sum);
        const int64_t once = smaller(steps, STEPS_OF_SUM<P>);
        for_each_sum<P, lines>(once, of, [&](int i, int j, typename P::Vector sum) {
            P::store(out + i * stride + j * LANES, sum);
        });
        for (int64_t s = once; s < steps; s += once) {
            for_each_sum<P, lines>(smaller(once, steps - s), of.from(s),
                                   [&](int i, int j, typename P::Vector sum) {
                Sum* at = out + i * stride + j * LANES;
                P::store(at, P::add(P::load(at), sum));
            });
        }
    }

public:
    explicit UnpackedBlock(const GemmArgs& args)
        : g(args), most(rows_at_a_time<P>(args.k)) {
        const int64_t of_a = most * room * sizeof(Step);
        const int64_t of_b = blocks_of(P::ROWS * steps, L) * LINE_BYTES;
        const int64_t of_c = BLOCK_COLUMNS * stride * sizeof(Sum);
        memory = static_cast<char*>(std::aligned_alloc(64, of_a + of_b + of_c));
        packed = reinterpret_cast<Step*>(memory);
        tail = reinterpret_cast<Step*>(memory + of_a);
        transposed = reinterpret_cast<Sum*>(memory + of_a + of_b);
    }
    ~UnpackedBlock() { std::free(memory); }
    UnpackedBlock(const UnpackedBlock&) = delete;
    UnpackedBlock& operator=(const UnpackedBlock&) = delete;

    bool has_memory() const { return memory; }

    void pack_rows(int64_t first, int64_t n) const {
        constexpr int64_t K = P::STEPS * P::PER_STEP;
        for (int64_t k = 0; k < g.k; k += K) {
            pack<P>(g.a, g.a_type, first, n, g.a_m, k, smaller(K, g.k - k), g.a_k, room,
                    packed + k / P::PER_STEP * L);
        }
    }

    // columns j .. j + P::ROWS - 1 of the packed rows; `column` counts within the block
    void multiply_columns(int64_t j, int64_t column, int64_t rows) const {
        const int64_t bytes = g.k * sizeof(Step) / P::PER_STEP;
        const int64_t apart = g.b_n * sizeof(Step) / P::PER_STEP, here = g.n - j;
        Unpacked<P> of = {static_cast<const char*>(g.b) + j * apart, nullptr, apart, packed, room};
        if (here < P::ROWS) {
            for (int64_t i = 0; i < P::ROWS; ++i) {
                // those that do not exist repeat the last one, and are not written
                std::memcpy(tail + i * steps, of.columns + smaller(i, here - 1) * apart, bytes);
            }
            of.columns = reinterpret_cast<const char*>(tail);
            of.stride = bytes;
        } else if (here >= 2 * P::ROWS) {
            of.next = of.columns + P::ROWS * apart;
        }
        Sum* out = transposed + column * stride;
        for (int64_t i = 0; i < rows; i += P::LINES * L) {
            of.lines = packed + i * room;
            // a line more than exists does no harm: its rows are not written
            if (blocks_of(rows - i, L) * 2 > P::LINES) {
                multiply<P::LINES>(of, out + i);
            } else {
                multiply<P::LINES / 2>(of, out + i);
            }
            of.next = nullptr;
        }
    }

    void write(int64_t i, int64_t rows, int64_t j, int64_t columns) const {
        write_transposed(transposed, stride, rows, columns,
                         static_cast<Sum*>(g.c) + i * g.c_m + j, g.c_m);
    }
};

template <class P>
int multiply_unpacked(const GemmArgs& g) {
    const int64_t most = rows_at_a_time<P>(g.k);
    const int64_t n_blocks = blocks_of(g.n, BLOCK_COLUMNS), all = blocks_of(g.m, most) * n_blocks;
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(g.threads)
    {
        const UnpackedBlock<P> block(g);
        if (!block.has_memory()) failed = true;
        int64_t packed = -1;
#pragma omp for schedule(dynamic)
        for (int64_t at = 0; at < all; ++at) {
            if (!block.has_memory()) continue;
            const int64_t i = at / n_blocks * most, j = at % n_blocks * BLOCK_COLUMNS;
            const int64_t rows = smaller(most, g.m - i), columns = smaller(BLOCK_COLUMNS, g.n - j);
            if (packed != i) block.pack_rows(i, rows);
            packed = i;
            for (int64_t c = 0; c < columns; c += P::ROWS) block.multiply_columns(j + c, c, rows);
            block.write(i, rows, j, columns);
        }
    }
    return failed;
}

}  // namespace
}  // namespace growkern
