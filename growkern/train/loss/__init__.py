"""The fused loss around a model: its options, rows and teachers, and losses beside it."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.loss.batches import Batches, LabelledSteps, unchanged_random_state
    from growkern.train.loss.inheritance import check_same_objective, Teachers
    from growkern.train.loss.inheritance import TeachersOfSources
    from growkern.train.loss.inherited import check_model, check_prediction, inputs_of
    from growkern.train.loss.inherited import is_two_stacks
    from growkern.train.loss.options import InheritanceSchedule, LossOptions, Taught
    from growkern.train.loss.passes import are_sent, stream_loader
    from growkern.train.loss.rows import as_known, count_kl_rows, DECODER_MASK, document_starts
    from growkern.train.loss.rows import examples_of, LossRows, real_rows, real_tokens, ROW_COUNTS
    from growkern.train.loss.rows import RowCounts, take_rows, TAUGHT_BY, taught_rows, TEACHER_IDS
    from growkern.train.loss.rows import teacher_rows
    from growkern.train.loss.side import count_tokens, EvaluationSums, router_inputs, router_term
    from growkern.train.loss.side import router_weight
    from growkern.train.loss.vocabulary import check_own_tokenizer, check_padding, check_tokenizers
    from growkern.train.loss.vocabulary import tokenizer_fingerprint
# fmt: on

__getattr__ = opener(__name__, __file__)
