"""The fused loss around a model: its options, rows and teachers, and losses beside it."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.loss.batch_rows import (as_known, count_kl_rows, DECODER_MASK,
        document_starts, examples_of, LossRows, real_rows, real_tokens, ROW_COUNTS, RowCounts,
        take_rows, TAUGHT_BY, taught_rows, TEACHER_IDS, teacher_rows)
    from growkern.train.loss.batches import (are_sent, Batches, stream_loader,
        unchanged_random_state)
    from growkern.train.loss.inheritance import (check_own_tokenizer, check_padding,
        check_same_objective, check_tokenizers, Teachers, TeachersOfSources, tokenizer_fingerprint)
    from growkern.train.loss.inherited import (check_model, check_prediction, count_tokens,
        EvaluationSums, inputs_of, is_two_stacks, router_inputs, router_term, router_weight)
# fmt: on

__getattr__ = opener(__name__, __file__)
