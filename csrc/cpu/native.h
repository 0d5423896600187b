// Types and instruction sets, shared by all parts of the library.
#pragma once
#include <cstdint>

namespace growkern {

// the same numbers as in growkern/ops/backend/native.py
enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2, F64 = 3 };
enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512BF16 = 3 };

// without external linkage, which std::min has: every instruction set gets its own copy
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// whether the library has code for the instruction set, and this processor can run it
bool supports(int32_t isa);

}  // namespace growkern
