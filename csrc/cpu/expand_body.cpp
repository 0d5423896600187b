// The kernels of expand, compiled once for each instruction set; GROWKERN_ISA is its name.
//
// Threads take blocks of source rows. For each source row they go through the output columns, 256
// or 1024 at a time: find the source elements, convert and scale them once, and write them to every
// output row that reads this source row. The source elements are runs in the weight itself, or are
// gathered into a tile that stays in the L1 cache.
#include "expand_noise.h"
#include "expand_routing.h"
#include "expand_scale.h"
#include "expand_source.h"
#include "expand_stream.h"

namespace growkern {
namespace {

// ------------------------------------------------------------------- output

template <class Out> GROWKERN_ONCE
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

// whether elements with noise, or routed with amplitude 1, are written as they are chosen
inline bool writes_past_caches(const ExpandPlan& p) {
    const ExpandArgs& a = *p.args;
    const bool chosen = a.row_factor || a.col_factor || a.row_copies || a.col_copies;
    return chosen && a.larger_share == 1 && p.streaming && a.out_stride_n == 1;
}

// whether output elements are source elements, or 0
template <class In, class Out>
inline bool copies_elements(const ExpandArgs& a) {
    return same<In, Out> && !a.row_scale && !a.col_scale && !a.row_factor && !a.col_factor;
}

// What output columns j0 .. j0 + n - 1 of a source row's copies are chosen from: `y`, or `larger`
// and `rest`
template <class Out>
struct Values {
    alignas(64) Out y[MAX_COLUMNS], larger[MAX_COLUMNS], rest[MAX_COLUMNS];
};

// computes the products, and the results of both signs, of output row i
template <class In, class Out, class Acc> GROWKERN_ONCE
void find_values(const ExpandPlan& p, int64_t i, int64_t j0, int64_t n, const Piece<In>* pieces,
                 int64_t n_pieces, const SignSteps& signs, Values<Out>& values) {
    const ExpandArgs& a = *p.args;
    const bool noisy = a.row_factor || a.col_factor;
    const Acc row = a.row_scale ? static_cast<const Acc*>(a.row_scale)[i] : 1;
    const Acc* col_scale = static_cast<const Acc*>(a.col_scale);
    const Acc* col_factor = static_cast<const Acc*>(a.col_factor);
    const Acc row_factor = a.row_factor ? static_cast<const Acc*>(a.row_factor)[i] : 0;
    if constexpr (same<In, Out> && (same<In, bf16> || same<In, float>)) {
        if (noisy && p.alike_columns && (row == 1 || !col_scale)) {
            const float scale = col_scale ? *col_scale : row;
            const float factor = col_factor ? *col_factor : row_factor;
            for (const Piece<In>* q = pieces; q < pieces + n_pieces; ++q) {
                Out *above = values.larger + (q->from - j0), *below = values.rest + (q->from - j0);
                if (add_steps(q->x, q->n, signs, above, below)) continue;
                add_noise(q->x, q->n, scale, factor, above, below);
            }
            return;
        }
    }
    int16_t step = 0;
    const bool one_factor = p.col_steps ? row == 1 : !col_scale && power_step(row, step);
    const bool stepped = one_factor && !noisy;
    alignas(64) Acc product[MAX_COLUMNS], of_row[MAX_COLUMNS];
    for (const Piece<In>* q = pieces; q < pieces + n_pieces; ++q) {
        const int64_t at = q->from - j0;
        const int16_t* steps = p.col_steps ? p.col_steps + q->from : nullptr;
        const Acc* col = col_scale ? col_scale + q->from : nullptr;
        if (stepped && add_steps(q->x, q->n, step, steps, values.y + at)) continue;
        if (noisy) {
            convert<In, Acc, Acc>(q->x, q->n, row, col, product + at);
        } else {
            convert<In, Out, Acc>(q->x, q->n, row, col, values.y + at);
        }
    }
    if (!noisy) return;
    for (int64_t j = 0; j < n && !col_factor; ++j) of_row[j] = row_factor;
    add_noise(product, n, col_factor ? col_factor + j0 : of_row, values.larger, values.rest);
}

// the steps of noise on columns that are all alike
inline SignSteps find_signs(const ExpandPlan& p) {
    const ExpandArgs& a = *p.args;
    if (a.in_type != BF16 || !p.alike_columns || !a.col_factor || a.row_scale) {
        return SignSteps(0, 0);
    }
    const float* scale = static_cast<const float*>(a.col_scale);
    return SignSteps(scale ? *scale : 1, *static_cast<const float*>(a.col_factor));
}

// Computes output columns j0 .. j0 + n - 1 from `pieces` and writes them to every output row that
// reads the s-th source row. With `copies` output elements are elements of the pieces, or 0.
template <class In, class Out, class Acc> GROWKERN_ONCE
void emit(const ExpandPlan& p, int64_t s, int64_t j0, int64_t n, const Piece<In>* pieces,
          int64_t n_pieces, const SignSteps& signs, bool copies) {
    const ExpandArgs& a = *p.args;
    const Acc* row_scale = static_cast<const Acc*>(a.row_scale);
    const Acc* row_factor = static_cast<const Acc*>(a.row_factor);
    const bool noisy = a.row_factor || a.col_factor, routed = a.row_copies || a.col_copies;
    const bool halves = routed && a.larger_share != 1, is_run = p.runs && n_pieces == 1;
    Values<Out> values;
    alignas(64) Out share[MAX_COLUMNS];
    const Out* y = values.y;
    for (int64_t k = p.first[s], end; k < p.first[s + 1]; k = end) {
        const int64_t i = p.target[k];
        const auto is_alike = [&](int64_t other) {
            return (copies || !row_scale || row_scale[i] == row_scale[other]) &&
                   (!row_factor || row_factor[i] == row_factor[other]);
        };
        // rows with the same factors have the same values: convert them once
        for (end = k + 1; end < p.first[s + 1] && is_alike(p.target[end]);) ++end;
        if (copies && !routed) {
            for (; k < end; ++k) {
                for (const Piece<In>* q = pieces; q < pieces + n_pieces; ++q) {
                    put(p, p.target[k], q->from, q->n, reinterpret_cast<const Out*>(q->x));
                }
            }
            continue;
        }
        if (copies && n_pieces == 1) {
            y = reinterpret_cast<const Out*>(pieces->x);
        } else if (copies) {
            for (const Piece<In>* q = pieces; q < pieces + n_pieces; ++q) {
                std::memcpy(values.y + (q->from - j0), q->x, q->n * sizeof(Out));
            }
        } else {
            find_values<In, Out, Acc>(p, i, j0, n, pieces, n_pieces, signs, values);
        }
        if (writes_past_caches(p)) {
            const Out *whole = noisy ? values.larger : y, *other = noisy ? values.rest : nullptr;
            constexpr int64_t MOST = 4;
            RowToWrite<Out> rows[MOST];
            while (k < end) {
                const int64_t held = smaller(MOST, end - k);
                for (int64_t r = 0; r < held; ++r) {
                    rows[r] = {p.target[k + r], p.source[s], whole, other};
                }
                write_past_caches(p, rows, held, j0, n, is_run);
                k += held;
            }
            continue;
        }
        if (halves) find_shares<Out, Acc>(y, n, a.larger_share, values.larger, values.rest);
        const Shares<Out> shares = {y, halves ? values.larger : nullptr, values.rest};
        for (; k < end; ++k) {
            const int64_t target = p.target[k];
            const bool by_runs = p.runs && a.col_copies && !halves;
            for (const Piece<In>* q = pieces; by_runs && q < pieces + n_pieces; ++q) {
                const int64_t at = q->from - j0;
                route_run(p, target, q->from, q->n, y + at, share + at);
            }
            if (noisy) {
                choose_signs(a, target, j0, n, values.larger, values.rest, share);
            } else if (routed && !by_runs) {
                route(p, target, p.source[s], j0, n, shares, share);
            }
            put(p, target, j0, n, noisy || routed ? share : y);
        }
    }
}

// -------------------------------------------------------------------- rows

template <class In, class Out, class Acc>
void expand_runs(const ExpandPlan& p, int64_t s, const SignSteps& signs, Scratch<In>& scratch) {
    const ExpandArgs& a = *p.args;
    Source<In> source(a, p.source[s]);
    if (scratch.scaled) scale_source<In, Acc>(p, s, source, scratch.scaled);
    const bool copies = scratch.scaled || copies_elements<In, Out>(a);
    const bool has_next = s + 1 < p.n_sources;
    const Source<In> next(a, p.source[s + has_next]);
    constexpr int64_t LINE = Scratch<In>::LINE;
    Piece<In>* pieces = scratch.pieces;
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
        // the next source row comes from memory while this one is written
        const int64_t columns = p.virtual_columns;
        for (int64_t c = j0 * columns / a.N; has_next && c < end * columns / a.N; c += LINE) {
            __builtin_prefetch(next.at(c, a.C), 0, 2);
        }
        emit<In, Out, Acc>(p, s, j0, end - j0, pieces, n_pieces, signs, copies);
    }
}

// routes columns j0 .. j0 + n - 1 of source rows s .. s + n_rows - 1, which are gathered in `tile`
template <class Out>
void route_tile(const ExpandPlan& p, int64_t s, int64_t n_rows, int64_t j0, int64_t n,
                const Out* tile) {
    constexpr int64_t MOST = 64;
    RowToWrite<Out> rows[MOST];
    int64_t held = 0;
    for (int64_t q = 0; q < n_rows; ++q) {
        for (int64_t k = p.first[s + q]; k < p.first[s + q + 1]; ++k) {
            const Out* whole = tile + q * GATHERED_COLUMNS;
            rows[held++] = {p.target[k], p.source[s + q], whole, nullptr};
            if (held < MOST) continue;
            write_past_caches(p, rows, held, j0, n, false);
            held = 0;
        }
    }
    write_past_caches(p, rows, held, j0, n, false);
}

// computes source rows s .. s + n_rows - 1; there are at most LINE of them
template <class In, class Out, class Acc>
void expand_gathered(const ExpandPlan& p, int64_t s, int64_t n_rows, const SignSteps& signs,
                     Scratch<In>& scratch) {
    using Bits = typename Scratch<In>::Bits;
    constexpr int64_t LINE = Scratch<In>::LINE;
    const ExpandArgs& a = *p.args;
    const Bits* low[LINE];
    const Bits* high[LINE];
    for (int64_t q = 0; q < LINE; ++q) {
        const int64_t of = s + smaller(q, n_rows - 1);
        Source<In> source(a, p.source[of]);
        if (scratch.scaled) {
            In* scaled = scratch.scaled + smaller(q, n_rows - 1) * p.virtual_columns;
            scale_source<In, Acc>(p, of, source, scaled);
        }
        low[q] = reinterpret_cast<const Bits*>(source.low);
        high[q] = reinterpret_cast<const Bits*>(source.high);
    }
    const bool copies = scratch.scaled || copies_elements<In, Out>(a);
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
        if (copies && writes_past_caches(p)) {
            route_tile(p, s, n_rows, j0, n, reinterpret_cast<const Out*>(scratch.tile));
            continue;
        }
        for (int64_t q = 0; q < n_rows; ++q) {
            const Bits* tile = scratch.tile + q * GATHERED_COLUMNS;
            const Piece<In> piece = {reinterpret_cast<const In*>(tile), j0, n};
            emit<In, Out, Acc>(p, s + q, j0, n, &piece, 1, signs, copies);
        }
    }
}

template <class In, class Out, class Acc>
void expand_typed(const ExpandPlan& p) {
    constexpr int64_t LINE = Scratch<In>::LINE;
    const int64_t step = p.runs ? 4 : LINE;
    const int64_t n_blocks = (p.n_sources + step - 1) / step;
    const SignSteps signs = find_signs(p);
#pragma omp parallel num_threads(p.args->threads)
    {
        Scratch<In> scratch(p);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < n_blocks; ++block) {
            const int64_t s = block * step, n_rows = smaller(step, p.n_sources - s);
            if (!p.runs) expand_gathered<In, Out, Acc>(p, s, n_rows, signs, scratch);
            for (int64_t q = 0; q < n_rows && p.runs; ++q) {
                expand_runs<In, Out, Acc>(p, s + q, signs, scratch);
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
