// Arguments of the loss's row kernel on a CPU, and the numbers it keeps of each row.
//
// The equations are numbered in growkern/ops/loss/kl_mlm_loss.py. growkern/ops/loss/rows/state.py
// explains the numbers of a row; a test compares the names below with those there.
// Letters: N rows, V vocabulary, K teachers, S numbers of a row.
#pragma once
#include "../maths.h"
#include "native.h"

namespace growkern {

// the rows of the state: StudentSums, then TeacherSums of each teacher
enum class StudentSums { maximum, rest, sum_t, label_logit, moment, best, sum_z, columns };
enum class TeacherSums { maximum, sum_t, cross, best, centre, spread };
constexpr int64_t STUDENT_SUMS = 8, TEACHER_SUMS = 6;

// the rows of `tail`: the gradient of a top-k loss outside the teachers' tokens
enum class TailFactors { maximum, softmax, softmax_t, at_label, everywhere };

// bits of `kind`: which terms a row has
constexpr int32_t MLM_ROW = 1, KL_ROW = 2;

// mirrored in growkern/ops/loss/rows/on_cpu.py; strides are in elements, columns are contiguous
struct KlMlmArgs : Maths<double> {
    const void* student;             // (N, V) of `student_type`
    const void* const* teachers;     // K times (N, V) of `teacher_types`
    const int64_t* teacher_strides;  // (K,)
    const int32_t* teacher_types;    // (K,)
    const int64_t* labels;           // (N,)
    const int32_t* kind;             // (N,)
    const void* drows;               // (1 + K, N) of `type`, with `grad` and without `tail`
    const void* tail;                // (5, N) of `type`: the gradient is that of a tail; or null
    void* state;                     // (S, N) of `type`  out with `sums` and `diverge`, else in
    void* dstudent;                  // (N, V) of `grad_type`  out; may begin where student does
    void* scratch;                   // (threads, 1 + K, V) of `type`; null: no row is converted
    int64_t student_stride, dstudent_stride, N, V, K;
    int32_t type;                    // F32 or F64: of sums, and of what is computed
    int32_t student_type, grad_type;
    int32_t narrow;                  // F32: compute as kl_mlm_narrow.h, from logits as float; F64:
                                     // from logits as double; -1: compute in `type`
    int32_t threads, isa;
    bool sums, diverge, grad;        // `Steps` of rows/state.py
    bool parts;                      // whether `sums` includes the entropy and the top-1 token
};

void kl_mlm_portable(const KlMlmArgs&);
void kl_mlm_avx2(const KlMlmArgs&);
void kl_mlm_avx512(const KlMlmArgs&);

}  // namespace growkern
