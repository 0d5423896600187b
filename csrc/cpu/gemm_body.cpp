// The GEMM: compiled for AVX-512 with and without bfloat16 products, GROWKERN_ISA names which.
//
// The output is dealt out in blocks. For some steps along k at a time, both factors are converted
// and packed into lines: 64 bytes are one step along k of the 16 (or, of doubles, 8) neighbouring
// rows of a or columns of b.
#include <atomic>
#include <cstdlib>

#include "gemm_tile.h"
#include "gemm_unpacked.h"

namespace growkern {
namespace {

// rows and columns of c that exist; the packed factors are 0 beyond
template <class P>
struct Tile {
    typename P::Sum* c;
    int64_t stride, rows, columns;
    bool add;
};

template <class P, int lines>
void multiply(int64_t steps, const typename P::Step* a, const typename P::Step* b,
              const Tile<P>& tile) {
    using Sum = typename P::Sum;
    constexpr int64_t L = LINE<P>, LANES = LINE_BYTES / sizeof(Sum);
    if (tile.columns == lines * L && tile.rows == P::ROWS) {
        for_each_sum<P, lines>(steps, Packed<P>{a, b}, [&](int i, int j, typename P::Vector sum) {
            Sum* c = tile.c + i * tile.stride + j * LANES;
            P::store(c, tile.add ? P::add(P::load(c), sum) : sum);
        });
        return;
    }
    alignas(64) Sum all[P::ROWS][lines * L];
    for_each_sum<P, lines>(steps, Packed<P>{a, b}, [&](int i, int j, typename P::Vector sum) {
        P::store(&all[i][j * LANES], sum);
    });
    for (int64_t i = 0; i < tile.rows; ++i) {
        Sum* c = tile.c + i * tile.stride;
        for (int64_t j = 0; j < tile.columns; ++j) c[j] = tile.add ? c[j] + all[i][j] : all[i][j];
    }
}

template <class P>
void multiply_block(int64_t steps, const typename P::Step* a, const typename P::Step* b,
                    const Tile<P>& block) {
    constexpr int64_t L = LINE<P>;
    for (int64_t j = 0; j < block.columns; j += P::LINES * L) {
        const int64_t columns = smaller(P::LINES * L, block.columns - j);
        const auto* b_lines = b + j * P::STEPS;
        for (int64_t i = 0; i < block.rows; i += P::ROWS) {
            const auto* a_rows = a + i / L * L * P::STEPS + i % L;
            const Tile<P> tile = {block.c + i * block.stride + j, block.stride,
                                  smaller(P::ROWS, block.rows - i), columns, block.add};
            switch (P::LINES - blocks_of(columns, L)) {
                case 0: multiply<P, P::LINES>(steps, a_rows, b_lines, tile); break;
                case 1: multiply<P, P::LINES - 1>(steps, a_rows, b_lines, tile); break;
                case 2: multiply<P, P::LINES - 2>(steps, a_rows, b_lines, tile); break;
                default: multiply<P, 1>(steps, a_rows, b_lines, tile);
            }
        }
    }
}

template <class P>
int multiply_all(const GemmArgs& g) {
    using Step = typename P::Step;
    constexpr int64_t L = LINE<P>, K = P::STEPS * P::PER_STEP;
    int64_t width = P::BLOCK_LINES * L;
    const int64_t m_blocks = blocks_of(g.m, P::BLOCK_ROWS);
    // narrow outputs too give every thread a block
    while (m_blocks * blocks_of(g.n, width) < g.threads && width > P::LINES * L) {
        width = blocks_of(width / 2, L) * L;
    }
    const int64_t n_blocks = blocks_of(g.n, width);
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(g.threads)
    {
        // a whole number of lines, as LINE divides BLOCK_ROWS and width
        void* room = std::aligned_alloc(64, (P::BLOCK_ROWS + width) * P::STEPS * sizeof(Step));
        if (!room) failed = true;
        Step* a = static_cast<Step*>(room);
        Step* b = a + P::BLOCK_ROWS * P::STEPS;
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < m_blocks * n_blocks; ++block) {
            const int64_t i = block / n_blocks * P::BLOCK_ROWS, j = block % n_blocks * width;
            const int64_t rows = smaller(P::BLOCK_ROWS, g.m - i), columns = smaller(width, g.n - j);
            for (int64_t k = 0; k < g.k && room; k += K) {
                const int64_t depth = smaller(K, g.k - k);
                pack<P>(g.a, g.a_type, i, rows, g.a_m, k, depth, g.a_k, P::STEPS, a);
                pack<P>(g.b, g.b_type, j, columns, g.b_n, k, depth, g.b_k, P::STEPS, b);
                multiply_block<P>(blocks_of(depth, P::PER_STEP), a, b,
                                  {static_cast<typename P::Sum*>(g.c) + i * g.c_m + j, g.c_m, rows,
                                   columns, g.add || k > 0});
            }
        }
        std::free(room);
    }
    return failed;
}

}  // namespace

#define NAME_OF(isa) gemm_##isa
#define NAME(isa) NAME_OF(isa)

// `Few` has the tiles of a b that is not packed
template <class P, class Few = TwoLines<P>>
int multiply_either(const GemmArgs& g) {
    return is_unpacked<Few>(g) ? multiply_unpacked<Few>(g) : multiply_all<P>(g);
}

int NAME(GROWKERN_ISA)(const GemmArgs& g) {
    using Exact = FloatsInDoubles;
    if (g.product == F32 && g.c_type == F64) return multiply_either<Exact, Exact>(g);
    if (g.product == F32) return multiply_either<Floats>(g);
    if (g.product == F64) return multiply_all<Doubles>(g);
#if defined(__AVX512BF16__)
    if (g.product == BF16) return multiply_either<Pairs>(g);
#endif
    return 2;
}

}  // namespace growkern
