// Asks the system for pages of 2 MiB under fresh memory. Touching 256 MiB first takes 127 ms with
// pages of 4 KiB, and 30 ms with these.
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(MADV_HUGEPAGE)
#include <atomic>
#include <cstdio>
#include <ctime>

namespace {

constexpr uintptr_t PAGE = 2 << 20;
// so long do the 512 small pages take that a large one replaces; a large one takes 0.2 ms
constexpr double SLOW_SECONDS = 1e-3;

// Whether this is a virtual machine that returns its free large pages to the host ("free page
// reporting"). The host then finds and clears memory again at the first touch: 4 ms per large page,
// while small pages come from memory that is not returned. -1 in this file: no.
bool returns_free_pages() {
    std::FILE* file = std::fopen("/sys/module/page_reporting/parameters/page_reporting_order", "r");
    if (!file) return false;
    long long order = -1;
    const bool read = std::fscanf(file, "%lld", &order) == 1;
    std::fclose(file);
    return read && 0 <= order && order < 64;
}

// of this thread: waiting for a processor does not count, a fault does
double processor_seconds() {
    timespec time;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)) return 0;
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Touches large pages until one is slow. The rest gets small pages. The system is asked once for
// all: each call has the lock that the faults of other threads wait for, and would look slow.
void touch_while_fast(uintptr_t low, uintptr_t high, int32_t threads) {
    const int64_t pages = static_cast<int64_t>((high - low) / PAGE);
    std::atomic<bool> slow{false};
    madvise(reinterpret_cast<void*>(low), high - low, MADV_HUGEPAGE);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < pages; ++i) {
        if (slow) continue;
        const double start = processor_seconds();
        *reinterpret_cast<volatile char*>(low + i * PAGE) = 0;
        if (processor_seconds() - start > SLOW_SECONDS) slow = true;
    }
    // large pages that are touched stay
    if (slow) madvise(reinterpret_cast<void*>(low), high - low, MADV_NOHUGEPAGE);
}

}  // namespace
#endif

extern "C" {

// The memory must be fresh: a byte of each page may be overwritten.
__attribute__((visibility("default"))) void growkern_advise_huge(void* start, int64_t bytes,
                                                                 int32_t threads) {
#if defined(MADV_HUGEPAGE)
    static const bool may_be_slow = returns_free_pages();
    const uintptr_t low = (reinterpret_cast<uintptr_t>(start) + PAGE - 1) & ~(PAGE - 1);
    const uintptr_t high = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(PAGE - 1);
    if (high <= low) return;
    if (may_be_slow) return touch_while_fast(low, high, threads);
    madvise(reinterpret_cast<void*>(low), high - low, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes, (void)threads;
#endif
}
}
