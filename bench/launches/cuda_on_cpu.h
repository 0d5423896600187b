// Runs a CUDA kernel on a CPU: every CUDA thread is a fibre, and fibres take turns at barriers.
//
// Faults that a GPU may hide by luck are caught here: shared memory starts as NaN, asynchronous
// copies arrive as late or as early as they may, threads run first to last in step, or last to
// first with one warp, and one block, as far ahead of the others as barriers let them. Errors are
// a wide copy that is not aligned, a barrier that not everybody reaches, and reading the shared
// memory of a block that has ended. Nothing is said about speed or registers.
#pragma once
//
// It is compiled once per variant of a kernel, so it includes little: <functional> and <algorithm>
// would take more time than all the rest.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define threadIdx (growkern::emulation::here->thread)
#define blockIdx (growkern::emulation::here->block)
#define blockDim (growkern::emulation::launch.block_dim)
#define gridDim (growkern::emulation::launch.grid_dim)

namespace growkern::emulation {

struct Index {
    unsigned x;
};

struct Barrier {
    unsigned members = 0, arrived = 0, generation = 0;
};

struct alignas(16) Chunk {
    unsigned char bytes[16];
};

struct Block {
    std::vector<Chunk> shared;
    Barrier all, warp[32];
    u64 lanes[32][2][32];  // what shuffles exchange, by warp; two in turn
    unsigned running = 0;
};

struct Copy {
    void* to;
    const void* from;
    int bytes, group;
};

struct Fibre {
    ucontext_t context;  // where it starts; later `place` is where it resumes
    jmp_buf place;
    bool started;
    std::vector<char> stack;
    Index thread, block;
    Block* mine;
    unsigned cluster_generation, n_shuffles;
    std::vector<Copy> copies;
    int group;
    bool done;
};

struct Launch {
    Index grid_dim, block_dim;
    unsigned shared_bytes;
    bool eager;  // copies arrive at once, warps and blocks run ahead, the last ones first
    void (*kernel)(const void* args);
    const void* args;
};

inline Launch launch;
inline Fibre* here;
inline jmp_buf scheduler;
inline Barrier cluster_barrier;
inline std::vector<Block> blocks;  // of the cluster that runs
inline const char* error;
inline unsigned steps;  // barriers reached and threads ended so far
constexpr size_t STACK = 64 << 10;

inline void fail(const char* message) {
    if (!error) error = message;
}

// A jump leaves the signal mask alone, which swapcontext asks the system for twice
inline void give_way() {
    if (!_setjmp(here->place)) _longjmp(scheduler, 1);
}

inline void go_on() {
    if (_setjmp(scheduler)) return;
    if (here->started) _longjmp(here->place, 1);
    here->started = true;
    setcontext(&here->context);
}

inline unsigned arrive(Barrier& barrier) {
    const unsigned generation = barrier.generation;
    ++steps;
    if (++barrier.arrived == barrier.members) barrier.arrived = 0, ++barrier.generation;
    return generation;
}

inline void wait(const Barrier& barrier, unsigned generation) {
    while (barrier.generation == generation) give_way();
}

inline void run_fibre() {
    launch.kernel(launch.args);
    if (!here->copies.empty()) fail("a thread ended before its copies arrived");
    here->done = true;
    ++steps;
    --here->mine->running;
    give_way();
}

inline void start(Fibre& fibre, unsigned index, unsigned first_block) {
    const unsigned threads = launch.block_dim.x, block = index / threads;
    fibre.thread = {index % threads};
    fibre.block = {first_block + block};
    fibre.mine = &blocks[block];
    fibre.group = fibre.n_shuffles = 0;
    fibre.copies.clear();
    fibre.done = false;
    fibre.started = false;
    fibre.stack.resize(STACK);
    getcontext(&fibre.context);
    fibre.context.uc_stack = {fibre.stack.data(), 0, STACK};
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, run_fibre, 0);
}

// every lane runs to where it has to wait; an eager warp until no lane gets further. Returns how
// many have ended
inline unsigned run_warp(Fibre* lanes) {
    unsigned ended = 0, before;
    do {
        before = steps;
        for (unsigned i = 0; i < 32 && !error; ++i) {
            here = &lanes[launch.eager ? 31 - i : i];
            if (here->done) continue;
            go_on();
            ended += here->done;
        }
    } while (launch.eager && steps != before && !error);
    return ended;
}

inline unsigned run_block(Fibre* threads, unsigned warps) {
    unsigned ended = 0, before;
    do {
        before = steps;
        for (unsigned i = 0; i < warps; ++i)
            ended += run_warp(&threads[32 * (launch.eager ? warps - 1 - i : i)]);
    } while (launch.eager && steps != before && !error);
    return ended;
}

inline void run_cluster(std::vector<Fibre>& fibres, unsigned first_block) {
    const unsigned threads = launch.block_dim.x;
    for (Block& block : blocks) {
        block.shared.resize((launch.shared_bytes + 15) / 16);
        std::memset(block.shared.data(), 0xff, sizeof(Chunk) * block.shared.size());
        block.all = {threads};
        block.running = threads;
        for (Barrier& warp : block.warp) warp = {32};
    }
    cluster_barrier = {static_cast<unsigned>(fibres.size())};
    for (unsigned i = 0; i < fibres.size(); ++i) start(fibres[i], i, first_block);
    unsigned running = fibres.size();
    while (running && !error) {
        const unsigned before = steps;
        for (unsigned i = 0; i < blocks.size(); ++i) {
            const unsigned block = launch.eager ? blocks.size() - 1 - i : i;
            running -= run_block(&fibres[block * threads], threads / 32);
        }
        if (running && steps == before) fail("threads wait at a barrier that others never reach");
    }
}

// null, or what is wrong with the kernel
inline const char* run(void (*kernel)(const void*), const void* args, unsigned grid,
                       unsigned threads, unsigned shared_bytes, unsigned cluster, bool eager) {
    launch = {{grid}, {threads}, shared_bytes, eager, kernel, args};
    error = nullptr;
    blocks = std::vector<Block>(cluster);
    std::vector<Fibre> fibres(cluster * threads);
    for (unsigned first = 0; first < grid && !error; first += cluster) run_cluster(fibres, first);
    return error;
}

inline void arrive_early(const Copy& copy) { std::memcpy(copy.to, copy.from, copy.bytes); }

}  // namespace growkern::emulation

// ------------------------------------------------------------ built in to CUDA

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}

// as a GPU does it: the rounding of the product is most of the error
inline float __expf(float x) { return exp2f(x * 1.4426950408889634f); }

inline void __syncthreads() {
    using namespace growkern::emulation;
    Barrier& barrier = here->mine->all;
    wait(barrier, arrive(barrier));
}

template <class T>
T __shfl_xor_sync(unsigned, T x, int lane_mask) {
    using namespace growkern::emulation;
    const unsigned warp = here->thread.x / 32, lane = here->thread.x % 32;
    auto& slots = here->mine->lanes[warp][here->n_shuffles++ % 2];
    std::memcpy(&slots[lane], &x, sizeof(T));
    Barrier& barrier = here->mine->warp[warp];
    wait(barrier, arrive(barrier));
    std::memcpy(&x, &slots[lane ^ lane_mask], sizeof(T));
    return x;
}

// ------------------------------------------------- the twins of device.h

namespace growkern {

// to nearest, ties to even; NaN stays NaN
inline u16 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 bf16_bits_of_two(float low, float high) {
    return bf16_bits(low) | static_cast<u32>(bf16_bits(high)) << 16;
}
inline u16 f16_bits(float x) {
    const _Float16 y = static_cast<_Float16>(x);
    u16 bits;
    std::memcpy(&bits, &y, 2);
    return bits;
}
inline float f16_value(u16 bits) {
    _Float16 y;
    std::memcpy(&y, &bits, 2);
    return static_cast<float>(y);
}

inline void* dynamic_shared() { return emulation::here->mine->shared.data(); }

template <int BYTES>
void copy_async(void* shared, const void* global) {
    using namespace emulation;
    if (reinterpret_cast<u64>(shared) % BYTES || reinterpret_cast<u64>(global) % BYTES)
        fail("an asynchronous copy is not aligned");
    const Copy copy = {shared, global, BYTES, here->group};
    if (launch.eager)
        arrive_early(copy);
    else
        here->copies.push_back(copy);
}

inline bool promised_aligned(const void* pointer, int bytes) {
    if (ALIGNED && reinterpret_cast<u64>(pointer) % bytes)
        emulation::fail("what the launch promised to be aligned is not");
    return ALIGNED;
}

inline void commit_copies() { ++emulation::here->group; }

inline void wait_copies(int pending) {
    using namespace emulation;
    auto& copies = here->copies;
    size_t kept = 0;
    for (const Copy& copy : copies) {
        if (copy.group < here->group - pending)
            arrive_early(copy);
        else
            copies[kept++] = copy;
    }
    copies.resize(kept);
}

inline void cluster_arrive() {
    using namespace emulation;
    here->cluster_generation = arrive(cluster_barrier);
}
inline void cluster_wait() {
    using namespace emulation;
    wait(cluster_barrier, here->cluster_generation);
}

inline float load_of_block(const float* mine, int rank) {
    using namespace emulation;
    Block& other = blocks[rank];
    if (!other.running) fail("a block reads the shared memory of one that has ended");
    const auto offset = mine - reinterpret_cast<const float*>(here->mine->shared.data());
    float x;
    std::memcpy(&x, reinterpret_cast<const float*>(other.shared.data()) + offset, 4);
    return x;
}

}  // namespace growkern
