// Plans an expansion, which rows and runs of columns read what, and calls the kernels for this
// processor.
#include "expand.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace growkern {
namespace {

// with shorter runs, columns are gathered: each run costs a call of a few tens of cycles
constexpr int64_t MIN_MEAN_RUN = 64;
// an output this large does not stay in the caches until it is read
constexpr int64_t STREAMING_BYTES = 8 << 20;
constexpr int64_t TYPE_BYTES[] = {4, 2, 2, 8};

// memory at the beginning of a line: vectors of numbers per column would else straddle lines
template <class T>
struct Lines {
    using value_type = T;
    Lines() = default;
    template <class U>
    Lines(const Lines<U>&) {}
    T* allocate(size_t n) {
        void* x = std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
        if (!x) throw std::bad_alloc();
        return static_cast<T*>(x);
    }
    void deallocate(T* x, size_t) { std::free(x); }
    template <class U>
    bool operator==(const Lines<U>&) const { return true; }
    template <class U>
    bool operator!=(const Lines<U>&) const { return false; }
};

struct Storage {
    std::vector<int64_t> source, first, target;
    std::vector<int32_t, Lines<int32_t>> cols;
    std::vector<Run> runs;
    std::vector<int16_t> col_steps;
    std::vector<uint32_t, Lines<uint32_t>> chosen_first, chosen_last;
};

// groups the output rows by the virtual row they read, so that each source row is gathered once
void group_rows(const ExpandArgs& a, Storage& s) {
    std::vector<int64_t> start(2 * a.R + 1, 0);
    auto row = [&](int64_t i) { return a.rows ? a.rows[i] : i; };
    for (int64_t i = 0; i < a.M; ++i) ++start[row(i) + 1];
    for (int64_t r = 0; r < 2 * a.R; ++r) {
        if (start[r + 1]) {
            s.source.push_back(r);
            s.first.push_back(start[r]);
        }
        start[r + 1] += start[r];
    }
    s.first.push_back(a.M);
    s.target.resize(a.M);
    for (int64_t i = 0; i < a.M; ++i) s.target[start[row(i)]++] = i;
}

// finds runs of consecutive virtual columns. A run also ends where the weight does, at column C,
// and where the copy changes: all columns of a run are the same copy of their source.
void find_runs(const ExpandArgs& a, Storage& s) {
    for (int64_t j = 0; j < a.N; ++j) {
        const int64_t c = s.cols[j];
        const bool is_same_copy = !a.col_copies || (j && a.col_copies[j] == a.col_copies[j - 1]);
        if (j && c == s.cols[j - 1] + 1 && c != a.C && is_same_copy) {
            ++s.runs.back().n;
        } else {
            s.runs.push_back({j, 1, c});
        }
    }
}

// stores `power_step` of every column scale; false if one has none, or the types are not bfloat16
bool find_steps(const ExpandArgs& a, Storage& s) {
    if (!a.col_scale || a.in_type != BF16 || a.out_type != BF16) return false;
    s.col_steps.resize(a.N);
    const float* scale = static_cast<const float*>(a.col_scale);
    for (int64_t j = 0; j < a.N; ++j) {
        if (!power_step(scale[j], s.col_steps[j])) return false;
    }
    return true;
}

void find_intervals(const ExpandArgs& a, Storage& s) {
    s.chosen_first.reserve(a.col_copies ? a.N : 0);
    s.chosen_last.reserve(a.col_copies ? a.N : 0);
    for (int64_t j = 0; j < a.N && a.col_copies; ++j) {
        const Interval chosen = chosen_interval(a.col_copies[j]);
        s.chosen_first.push_back(chosen.first);
        s.chosen_last.push_back(chosen.last);
    }
}

template <class Acc>
bool has_alike_scales(const ExpandArgs& a, const Storage& s) {
    const Acc* scale = static_cast<const Acc*>(a.row_scale);
    for (size_t k = 0; k + 1 < s.first.size(); ++k) {
        const int64_t first = s.target[s.first[k]];
        for (int64_t at = s.first[k]; at < s.first[k + 1]; ++at) {
            if (scale[s.target[at]] != scale[first]) return false;
        }
    }
    return true;
}

// Whether products are taken once for each element of the source: the only factors are those of
// rows, and all copies of a row have the same. With few columns most of a row is not read.
bool scales_sources(const ExpandArgs& a, const Storage& s, int64_t virtual_columns) {
    if (!a.row_scale || a.col_scale || a.row_factor || a.col_factor) return false;
    if (a.in_type != a.out_type || a.N < virtual_columns) return false;
    return a.in_type == F64 ? has_alike_scales<double>(a, s) : has_alike_scales<float>(a, s);
}

bool has_alike_columns(const ExpandArgs& a) {
    if (a.in_type != a.out_type || (a.in_type != BF16 && a.in_type != F32)) return false;
    for (const void* factors : {a.col_scale, a.col_factor}) {
        const float* x = static_cast<const float*>(factors);
        for (int64_t j = 1; x && j < a.N; ++j) {
            if (x[j] != x[0]) return false;
        }
    }
    return true;
}

bool has_signs_in_runs(const ExpandArgs& a, const Storage& s) {
    for (const Run& run : s.runs) {
        const int32_t* source = a.noise_source + run.from;
        for (int64_t j = 1; j < run.n; ++j) {
            if (source[j] != source[j - 1] + 1) return false;
        }
    }
    return true;
}

void run(const ExpandPlan& plan, int isa) {
#if defined(GROWKERN_X86)
    if (isa >= AVX512) return expand_avx512(plan);
    if (isa == AVX2) return expand_avx2(plan);
#endif
    expand_portable(plan);
}

int expand(const ExpandArgs& a) {
    if (!supports(a.isa)) return 2;
    if (!a.M || !a.N) return 0;
    Storage s;
    group_rows(a, s);
    s.cols.assign(a.N + 32, 0);
    for (int64_t j = 0; j < a.N; ++j) s.cols[j] = static_cast<int32_t>(a.cols ? a.cols[j] : j);
    find_runs(a, s);
    find_intervals(a, s);
    const bool by_runs = a.N >= MIN_MEAN_RUN * static_cast<int64_t>(s.runs.size());
    const bool streaming = a.M * a.N * TYPE_BYTES[a.out_type] >= STREAMING_BYTES;
    const int64_t read = 1 + *std::max_element(s.cols.begin(), s.cols.begin() + a.N);
    run({&a, static_cast<int64_t>(s.source.size()), s.source.data(), s.first.data(),
         s.target.data(), s.cols.data(), by_runs ? s.runs.data() : nullptr,
         static_cast<int64_t>(s.runs.size()), read,
         find_steps(a, s) ? s.col_steps.data() : nullptr,
         s.chosen_first.data(), s.chosen_last.data(), streaming, scales_sources(a, s, read),
         has_alike_columns(a), a.col_factor && has_signs_in_runs(a, s)},
        a.isa);
    return 0;
}

}  // namespace
}  // namespace growkern

extern "C" {

// 0: done; 1: out of memory; 2: this processor lacks the instruction set `isa`
__attribute__((visibility("default"))) int growkern_expand(const growkern::ExpandArgs* args) {
    try {
        return growkern::expand(*args);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
}
