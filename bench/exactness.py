"""Measures how exact grown models and losses are. The README and the log quote these figures.

    python -m bench.exactness

Models: random weights on a CPU, with no norm or bias at its default. The error is the largest
difference of the outputs over the largest output.

Losses: the error of the KL gradient (alpha 1, temperature 1) against float64, on 64 rows of a
student that has drifted from its teacher.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import growkern
from bench.shared import loss_measure
from bench.shared.harness import measure_all, name_of
from growkern.families import ModelSpec
from testbed.growths import alone, at_once, grown_by, largest_error
from testbed.models import BERT, GPT2, LLAMA, random_model, relative_error
from testbed.relatives import RELATIVES

# hidden size and heads of the source, hidden size of the target, feed-forward sizes of both
WIDTHS = ((384, 6, 512), (96, 6, 144), (12, 3, 20))
# class, sizes, growth
EXACT = (
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 24}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 20}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24}),
)
# With no whole multiple of head_dim `rope_theta` changes, and its frequencies are float32.
ROTARY = ("LlamaForCausalLM", LLAMA, {"head_dim": 6})
DRIFTS = (0.01, 0.05, 0.2)
# vocabulary, widths of student and teacher; rows of a step whose memory is measured
LOSS_SIZES, LOSS_ROWS = (30_522, 768, 512), 2048


def carried() -> Iterator[dict[str, Any]]:
    """BERT encoders grown to widths that are not whole multiples, in float64."""
    for width, heads, wide in WIDTHS:
        sizes = BERT | {"hidden_size": width, "num_attention_heads": heads}
        sizes |= {"intermediate_size": 2 * width}
        source = random_model("BertModel", sizes, std=min(0.3, 1 / width**0.5))
        for carry in (1.0, 0.01):
            how = {"hidden_size": wide, "intermediate_size": 2 * wide, "carry": carry}
            error = relative_error(source, growkern.grow(source, **how))
            row = {"what": "BERT's encoder", "sizes": f"{width} -> {wide}", "carry": carry}
            yield row | {"dtype": "float64", "error": error}


def exact() -> Iterator[dict[str, Any]]:
    """Growths that the README calls exact, in float64 and float32."""
    for name, sizes, how in (*EXACT, ROTARY):
        for dtype in (torch.float64, torch.float32):
            source = random_model(name, sizes, dtype=dtype)
            grown = growkern.grow(source, **how)
            compare = relative_error if dtype == torch.float64 else _logits_error
            error = compare(source, grown)
            words = ", ".join(f"{key} {value}" for key, value in how.items())
            yield {"what": name, "sizes": words, "dtype": name_of(dtype), "error": error}


@torch.no_grad()
def _logits_error(source: Any, grown: Any) -> float:
    """The error in the models' own dtype. `relative_error` computes all in float64."""
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    z, grown_z = (model.eval()(input_ids=tokens).logits for model in (source, grown))
    return ((z - grown_z).abs().max() / z.abs().max()).item()


def asleep(model: ModelSpec) -> dict[str, dict[str, int]]:
    """New experts that sleep: one in each group of the source, and in as many groups again.

    A router without groups has all in one.
    """
    result = {}
    for space in (space for space in model.family.mixtures if space.asleep):
        experts, old = str(space.size), model.size(str(space.size))
        result["asleep"] = {experts: old + (model.size(space.groups[0]) if space.groups else 1)}
        for groups in space.groups[:1]:
            result["asleep in groups"] = {experts: 2 * old, groups: 2 * model.size(groups)}
    return result


def mixtures() -> Iterator[dict[str, Any]]:
    """Mixtures of experts, in every size alone and in all at once, in float64."""
    for model_type, case in RELATIVES.items():
        source = random_model(*case[:2], tie_word_embeddings=False)
        model = ModelSpec.of(source.config, case[0])
        growths = alone(model) | {"all at once": at_once(model)} if model.family.mixtures else {}
        growths |= asleep(model)
        for what, sizes in growths.items():
            grown = growkern.grow(source, **grown_by(model, sizes))
            error = largest_error(source, grown, grown.growth_plan)
            # new tokens take a share of every output, which the error leaves out
            findings = (
                f for f in grown.growth_plan.findings if not f.what.startswith("vocab_size")
            )
            said = " and ".join(sorted({f.level for f in findings})) or "exact"
            row = {"what": model_type, "sizes": what, "said": said, "dtype": "float64"}
            yield row | {"error": error}


def losses() -> Iterator[dict[str, Any]]:
    """The gradient errors of the linear loss and of plain PyTorch at several drifts.

    In bfloat16 plain PyTorch rounds the logits, and widens them before the softmax. Beside it
    stands one whose logits are made in float32. "extra MiB" is the peak of a step on `LOSS_ROWS`.
    """
    for drift in DRIFTS:
        for dtype in (torch.float32, torch.bfloat16):
            wide = ("plain_float32",) if dtype == torch.bfloat16 else ()
            for name in ("growkern", "plain", *wide):
                fn, sizes = getattr(loss_measure, name), (*LOSS_SIZES, dtype)
                error = loss_measure.error_of(fn, 1.0, *sizes, drift=drift)
                row = {"what": f"linear loss, {name}", "drift": drift, "dtype": name_of(dtype)}
                if drift == loss_measure.DRIFT and dtype == torch.bfloat16:
                    given = loss_measure.make_inputs(LOSS_ROWS, *sizes, drift)
                    step = partial(loss_measure.run_step, fn, *given, 0.5)
                    row["extra MiB"] = loss_measure.measure(step, 1)["extra MiB"]
                yield row | {"error": error}


def main() -> int:
    parts = (carried, exact, mixtures, losses)
    measure_all("exactness", (row for part in parts for row in part()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
