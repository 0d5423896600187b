// Runs a CUDA kernel on a CPU: every CUDA thread is a fibre, and fibres take turns at barriers.
//
// Faults that a GPU may hide by luck are caught here: shared memory starts as NaN, asynchronous
// copies arrive as late or as early as they may, and threads run first to last or last to first.
// Errors are a wide copy that is not aligned, and a barrier that not everybody reaches. Nothing is
// said about speed or registers.
#pragma once
//
// It is compiled once per variant of a kernel, so it includes headers of C only: <vector> alone
// would take as much time as the kernel.
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (growkern::emulation::here->thread)
#define blockIdx (growkern::emulation::block)
#define blockDim (growkern::emulation::launch.block_dim)

namespace growkern::emulation {

struct Index {
    unsigned x;
};

struct alignas(16) Chunk {
    unsigned char bytes[16];
};

struct Copy {
    void* to;
    const void* from;
};

constexpr unsigned STACK = 64 << 10, MOST_COPIES = 256;

struct Fibre {
    ucontext_t context;  // where it starts; later `place` is where it resumes
    jmp_buf place;
    alignas(16) char stack[STACK];
    Index thread;
    Copy copies[MOST_COPIES];
    unsigned n_copies;
    bool started, done;
};

struct Launch {
    Index block_dim;
    bool eager;  // copies arrive at once, and the last thread runs first
    void (*kernel)(const void* args);
    const void* args;
};

inline Launch launch;
inline Index block;
inline Chunk* shared;
inline Fibre* here;
inline jmp_buf scheduler;
inline const char* error;

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

inline void run_fibre() {
    launch.kernel(launch.args);
    if (here->n_copies) fail("a thread ended before its copies arrived");
    here->done = true;
    give_way();
}

inline void start(Fibre& fibre, unsigned thread) {
    fibre.thread = {thread};
    fibre.n_copies = 0;
    fibre.started = fibre.done = false;
    getcontext(&fibre.context);
    fibre.context.uc_stack = {fibre.stack, 0, STACK};
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, run_fibre, 0);
}

// every thread runs to the next barrier, until all have ended
inline void run_block(Fibre* fibres, unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) start(fibres[i], i);
    for (unsigned ended = 0; ended < threads && !error;) {
        if (ended) return fail("threads wait at a barrier that others never reach");
        for (unsigned i = 0; i < threads && !error; ++i) {
            here = &fibres[launch.eager ? threads - 1 - i : i];
            go_on();
            ended += here->done;
        }
    }
}

// null, or what is wrong with the kernel
inline const char* run(void (*kernel)(const void*), const void* args, unsigned grid,
                       unsigned threads, unsigned shared_bytes, bool eager) {
    launch = {{threads}, eager, kernel, args};
    error = nullptr;
    const unsigned chunks = (shared_bytes + 15) / 16;
    shared = new Chunk[chunks];
    Fibre* fibres = new Fibre[threads];
    for (block = {0}; block.x < grid && !error; ++block.x) {
        memset(shared, 0xff, sizeof(Chunk) * chunks);
        run_block(fibres, threads);
    }
    delete[] fibres;
    delete[] shared;
    return error;
}

inline void arrive(const Copy& copy) { memcpy(copy.to, copy.from, 16); }

}  // namespace growkern::emulation

// ------------------------------------------------------------ built in to CUDA

inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}

inline float fabs(float x) { return __builtin_fabsf(x); }
inline double fabs(double x) { return __builtin_fabs(x); }

// threads take turns only where they wait
inline int atomicExch(int* to, int x) {
    const int before = *to;
    *to = x;
    return before;
}

inline void __syncthreads() { growkern::emulation::give_way(); }

// ------------------------------------------------- the twins of device.h

namespace growkern {

// to nearest, ties to even; NaN stays NaN
inline u16 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u16 f16_bits(float x) {
    const _Float16 y = static_cast<_Float16>(x);
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
}
inline float f16_value(u16 bits) {
    _Float16 y;
    memcpy(&y, &bits, 2);
    return static_cast<float>(y);
}

inline void* dynamic_shared() { return emulation::shared; }

inline void copy_async(void* shared, const void* global) {
    using namespace emulation;
    if (reinterpret_cast<u64>(shared) % 16 || reinterpret_cast<u64>(global) % 16)
        fail("an asynchronous copy is not aligned");
    const Copy copy = {shared, global};
    if (launch.eager)
        arrive(copy);
    else if (here->n_copies == MOST_COPIES)
        fail("a thread has more copies than there is room for");
    else
        here->copies[here->n_copies++] = copy;
}

inline bool promised_aligned(const void* pointer, int bytes) {
    if (ALIGNED && reinterpret_cast<u64>(pointer) % bytes)
        emulation::fail("what the launch promised to be aligned is not");
    return ALIGNED;
}

inline void wait_copies() {
    using namespace emulation;
    for (unsigned i = 0; i < here->n_copies; ++i) arrive(here->copies[i]);
    here->n_copies = 0;
}

}  // namespace growkern
