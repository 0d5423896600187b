"""Language models: loading, output projections, sub-models, and FLOPs."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.model.flops import is_experts, ModelCost, TokenCounts
    from growkern.train.model.forward import (check_causal, document_starts, head_inputs,
        inside_ddp, run_model, teacher_inputs)
    from growkern.train.model.head import (align_labels, align_rows, check_head, head_options,
        head_swap, HeadInputs, IGNORE_INDEX, is_linear, projected, softcap_of, take_logits,
        teacher_options)
    from growkern.train.model.language_model import (CAUSAL, check_directory, check_fits,
        evaluating, has_tokenizer, head_of, is_causal, load_language_model, load_tokenizer,
        PRETRAINING, probe_inputs, probing, separator_of, setting)
    from growkern.train.model.sub_model import (find_stacks, layer_stacks, model_depth, ModelPart,
        text_model)
    from growkern.train.model.two_stage import TwoStageConfig
# fmt: on

__getattr__ = opener(__name__, __file__)
