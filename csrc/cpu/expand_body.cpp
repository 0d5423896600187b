// The kernels of expand, compiled once for each instruction set; GROWKERN_ISA is its name.
//
// Threads take blocks of source rows. For each source row they go through the output columns, 256
// or 1024 at a time: find the source elements, convert and scale them once, and write them to every
// output row that reads this source row. The source elements are runs in the weight itself, or are
// gathered into a tile that stays in the L1 cache.
#include "expand_routing.h"
#include "expand_source.h"

namespace growkern {
namespace {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// ----------------------------------------------------------------- scaling

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

// ------------------------------------------------------------------- noise

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
template <class Out>
void choose_signs(const ExpandArgs& a, int64_t i, int64_t j0, int64_t n, const Out* above,
                  const Out* below, Out* __restrict y) {
    for_hashes(a, i, j0, n, [=](int64_t j, uint32_t hash) {
        y[j] = one_of(below[j], above[j], hash >= TOP_BIT);
    });
}

// `add_noise` and `choose_signs` in one pass, where nothing is rounded to a narrower type
template <class Acc>
void add_wide_noise(const ExpandArgs& a, int64_t i, int64_t j0, int64_t n, const Acc* x,
                    const Acc* factor, Acc* __restrict y) {
    for_hashes(a, i, j0, n, [=](int64_t j, uint32_t hash) {
        const Acc rest = x[j] * std::fabs(factor[j]) - x[j];
        y[j] = x[j] + turned(rest, hash & ~top_word(factor[j]));
    });
}

// ------------------------------------------------------------------- output

template <class Out>
void put(const ExpandPlan& p, int64_t i, int64_t j0, int64_t n, const Out* from) {
    const ExpandArgs& a = *p.args;
    Out* to = static_cast<Out*>(a.out) + i * a.out_stride_m + j0 * a.out_stride_n;
    if (a.out_stride_n != 1) {
        for (int64_t j = 0; j < n; ++j) to[j * a.out_stride_n] = from[j];
    } else if (p.streaming) {
        stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
                     n * static_cast<int64_t>(sizeof(Out)));
    } else {
        std::memcpy(to, from, n * sizeof(Out));
    }
}

// Whether routed elements are written as they are computed. Runs route with fewer loads.
inline bool routes_past_caches(const ExpandPlan& p) {
    const ExpandArgs& a = *p.args;
    const bool whole = (a.row_copies || a.col_copies) && a.larger_share == 1;
    return whole && p.streaming && a.out_stride_n == 1 && !p.runs;
}

// whether output elements are source elements, or 0
template <class In, class Out>
inline bool copies_elements(const ExpandArgs& a) {
    return same<In, Out> && !a.row_scale && !a.col_scale && !a.row_factor && !a.col_factor;
}

// computes output columns j0 .. j0 + n - 1 from `pieces` and writes them to every output row that
// reads the s-th source row
template <class In, class Out, class Acc>
void emit(const ExpandPlan& p, int64_t s, int64_t j0, int64_t n, const Piece<In>* pieces,
          int64_t n_pieces) {
    const ExpandArgs& a = *p.args;
    const Acc* row_scale = static_cast<const Acc*>(a.row_scale);
    const Acc* col_scale = static_cast<const Acc*>(a.col_scale);
    const bool noisy = a.row_factor || a.col_factor, routed = a.row_copies || a.col_copies;
    const bool copies = copies_elements<In, Out>(a);
    const bool halves = routed && a.larger_share != 1;
    const bool past_caches = routes_past_caches(p);
    alignas(64) Out y[MAX_COLUMNS], larger[MAX_COLUMNS], rest[MAX_COLUMNS], share[MAX_COLUMNS];
    const Shares<Out> shares = {y, halves ? larger : nullptr, rest};
    const Acc* row_factor = static_cast<const Acc*>(a.row_factor);
    alignas(64) Acc product[MAX_COLUMNS], of_row[MAX_COLUMNS];
    const Acc* factor = a.col_factor ? static_cast<const Acc*>(a.col_factor) + j0 : of_row;
    for (int64_t k = p.first[s]; k < p.first[s + 1]; ++k) {
        const int64_t i = p.target[k];
        if (copies && !routed) {
            for (const Piece<In>* q = pieces; q < pieces + n_pieces; ++q) {
                put(p, i, q->from, q->n, reinterpret_cast<const Out*>(q->x));
            }
            continue;
        }
        const Acc row = row_scale ? row_scale[i] : 1;
        int16_t step = 0;
        const bool one_factor = p.col_steps ? row == 1 : !col_scale && power_step(row, step);
        const bool stepped = one_factor && !noisy;
        // copies with the same factors have the same values: convert them once
        const int64_t before = k > p.first[s] ? p.target[k - 1] : i;
        const bool repeated = before != i && (!row_scale || row == row_scale[before]) &&
                              (!row_factor || row_factor[i] == row_factor[before]);
        for (const Piece<In>* q = pieces; q < pieces + n_pieces && !repeated; ++q) {
            const int64_t at = q->from - j0;
            const int16_t* steps = p.col_steps ? p.col_steps + q->from : nullptr;
            if (copies) {
                std::memcpy(y + at, q->x, q->n * sizeof(Out));
                continue;
            }
            if (stepped && add_steps(q->x, q->n, step, steps, y + at)) continue;
            const Acc* col = col_scale ? col_scale + q->from : nullptr;
            if (noisy) {
                convert<In, Acc, Acc>(q->x, q->n, row, col, product + at);
            } else {
                convert<In, Out, Acc>(q->x, q->n, row, col, y + at);
            }
        }
        if (noisy) {
            for (int64_t j = 0; j < n && row_factor; ++j) of_row[j] = row_factor[i];
            if constexpr (same<Out, Acc>) {
                add_wide_noise(a, i, j0, n, product, factor, y);
            } else {
                if (!repeated) add_noise(product, n, factor, larger, rest);
                choose_signs(a, i, j0, n, larger, rest, y);
            }
        }
        if (past_caches) {
            const RowToRoute<Out> one = {i, p.source[s], y};
            route_past_caches(p, &one, 1, j0, n);
            continue;
        }
        if (routed) {
            if (halves && !repeated) find_shares<Out, Acc>(y, n, a.larger_share, larger, rest);
            const bool by_runs = p.runs && a.col_copies && !halves;
            for (const Piece<In>* q = pieces; by_runs && q < pieces + n_pieces; ++q) {
                route_run(p, i, q->from, q->n, y + (q->from - j0), share + (q->from - j0));
            }
            if (!by_runs) route(p, i, p.source[s], j0, n, shares, share);
        }
        put(p, i, j0, n, routed ? share : y);
    }
}

// -------------------------------------------------------------------- rows

template <class In, class Out, class Acc>
void expand_runs(const ExpandPlan& p, int64_t s, Piece<In>* pieces) {
    const ExpandArgs& a = *p.args;
    const Source<In> source(a, p.source[s]);
    int64_t run = 0;
    for (int64_t j0 = 0; j0 < a.N; j0 += RUN_COLUMNS) {
        const int64_t end = smaller(a.N, j0 + RUN_COLUMNS);
        int64_t n_pieces = 0;
        for (int64_t j = j0; j < end;) {
            const Run& r = p.runs[run];
            const int64_t n = smaller(r.from + r.n, end) - j;
            pieces[n_pieces++] = {source.at(r.source + j - r.from, a.C), j, n};
            j += n;
            if (j == r.from + r.n) ++run;
        }
        emit<In, Out, Acc>(p, s, j0, end - j0, pieces, n_pieces);
    }
}

// routes columns j0 .. j0 + n - 1 of source rows s .. s + n_rows - 1, which are gathered in `tile`
template <class Out>
void route_tile(const ExpandPlan& p, int64_t s, int64_t n_rows, int64_t j0, int64_t n,
                const Out* tile) {
    constexpr int64_t MOST = 64;
    RowToRoute<Out> rows[MOST];
    int64_t held = 0;
    for (int64_t q = 0; q < n_rows; ++q) {
        for (int64_t k = p.first[s + q]; k < p.first[s + q + 1]; ++k) {
            rows[held++] = {p.target[k], p.source[s + q], tile + q * GATHERED_COLUMNS};
            if (held < MOST) continue;
            route_past_caches(p, rows, held, j0, n);
            held = 0;
        }
    }
    route_past_caches(p, rows, held, j0, n);
}

// computes source rows s .. s + n_rows - 1; there are at most LINE of them
template <class In, class Out, class Acc>
void expand_gathered(const ExpandPlan& p, int64_t s, int64_t n_rows, Scratch<In>& scratch) {
    using Bits = typename Scratch<In>::Bits;
    constexpr int64_t LINE = Scratch<In>::LINE;
    const ExpandArgs& a = *p.args;
    const Bits* low[LINE];
    const Bits* high[LINE];
    for (int64_t q = 0; q < LINE; ++q) {
        const Source<In> source(a, p.source[s + smaller(q, n_rows - 1)]);
        low[q] = reinterpret_cast<const Bits*>(source.low);
        high[q] = reinterpret_cast<const Bits*>(source.high);
    }
    bool packed = false;
#if defined(__AVX2__)
    // packing takes as long for one row as for LINE rows
    packed = scratch.packed && 4 * n_rows >= LINE;
    if (packed) {
        const int64_t in_weight = smaller(a.C, p.virtual_columns);
        pack_rows(low, in_weight, scratch.packed);
        pack_rows(high, p.virtual_columns - in_weight, scratch.packed + in_weight * LINE);
    }
#endif
    for (int64_t j0 = 0; j0 < a.N; j0 += GATHERED_COLUMNS) {
        const int64_t n = smaller(GATHERED_COLUMNS, a.N - j0);
        const int32_t* cols = p.cols + j0;
#if defined(__AVX2__)
        if (packed) gather_lines(scratch.packed, cols, n, scratch.tile, GATHERED_COLUMNS);
#endif
        for (int64_t q = 0; q < n_rows; ++q) {
            Bits* tile = scratch.tile + q * GATHERED_COLUMNS;
            for (int64_t j = 0; j < n && !packed; ++j) {
                const int64_t c = cols[j];
                tile[j] = c < a.C ? low[q][c] : high[q][c - a.C];
            }
        }
        if (copies_elements<In, Out>(a) && routes_past_caches(p)) {
            route_tile(p, s, n_rows, j0, n, reinterpret_cast<const Out*>(scratch.tile));
            continue;
        }
        for (int64_t q = 0; q < n_rows; ++q) {
            const Bits* tile = scratch.tile + q * GATHERED_COLUMNS;
            const Piece<In> piece = {reinterpret_cast<const In*>(tile), j0, n};
            emit<In, Out, Acc>(p, s + q, j0, n, &piece, 1);
        }
    }
}

template <class In, class Out, class Acc>
void expand_typed(const ExpandPlan& p) {
    constexpr int64_t LINE = Scratch<In>::LINE;
    const int64_t step = p.runs ? 4 : LINE;
    const int64_t n_blocks = (p.n_sources + step - 1) / step;
#pragma omp parallel num_threads(p.args->threads)
    {
        Scratch<In> scratch(p);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < n_blocks; ++block) {
            const int64_t s = block * step, n_rows = smaller(step, p.n_sources - s);
            if (!p.runs) expand_gathered<In, Out, Acc>(p, s, n_rows, scratch);
            for (int64_t q = 0; q < n_rows && p.runs; ++q) {
                expand_runs<In, Out, Acc>(p, s + q, scratch.pieces);
            }
        }
        if (p.streaming) end_of_streaming();
    }
}

template <class In, class Acc>
void expand_from(const ExpandPlan& p) {
    switch (p.args->out_type) {
        case F32: return expand_typed<In, float, Acc>(p);
        case BF16: return expand_typed<In, bf16, Acc>(p);
        case F16: return expand_typed<In, f16, Acc>(p);
        default: return expand_typed<In, double, double>(p);
    }
}

}  // namespace

#define NAME_OF(isa) expand_##isa
#define NAME(isa) NAME_OF(isa)

void NAME(GROWKERN_ISA)(const ExpandPlan& p) {
    switch (p.args->in_type) {
        case F32: return expand_from<float, float>(p);
        case BF16: return expand_from<bf16, float>(p);
        case F16: return expand_from<f16, float>(p);
        default: return expand_from<double, double>(p);
    }
}

}  // namespace growkern
