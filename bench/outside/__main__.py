"""Loads grown directories in software that does not share code with growkern, and compares them.

    python -m bench.outside --packages DIR

DIR holds transformers 4.57, ctranslate2, onnx and onnxruntime, which growkern does not need:

    pip install --target DIR "transformers==4.57.*" ctranslate2 onnx onnxscript onnxruntime

With `--runtime transformers`, DIR may hold any other version of transformers alone, such as the
lowest that growkern allows. `--runtime mlx` takes a DIR of its own, as mlx-lm needs transformers 5:

    pip install --target DIR --no-deps mlx mlx-cpu mlx-lm

A tiny source of each family is grown in several ways. A process that sees the packages of DIR
loads source and targets in each runtime, and compares the targets' outputs with the source's there.
The row of a source compares it with the transformers that growkern uses. Exit 1 if a target
differs, if a runtime that loads the source refuses a target, or if a runtime loads nothing at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from growkern.families.family import Family

TOKENS = 60
EXPECTED = "expected.pt"
# float32 through a few layers; a wrong theta, scale or window is off by 1e-2 and more
LARGEST = 1e-4
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
BOTH = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
MBART = {
    **{"vocab_size": TOKENS, "d_model": 32, "max_position_embeddings": 64},
    **{"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
TOWER = {
    **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "patch_size": 4},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "attention_factor": 1.3},
    **{"original_max_position_embeddings": 16},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
DENSE = {**GROUPED, **ROPE, "head_dim": 8}
EXPERTS = {**DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WHOLE = {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, **ROPE}
KINDS = {"layer_types": 2 * ["sliding_attention", "full_attention"], "sliding_window": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **{"q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 5, "num_key_value_heads": 4},
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
# label -> class, config
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**SIZES, "rope_parameters": PARTIAL}),
    "llama": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "mistral": ("MistralForCausalLM", {**GROUPED, **ROPE, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, **ROPE}),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, **ROPE, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, **ROPE, **GEMMA}),
    "gemma3_text": ("Gemma3ForCausalLM", {**GROUPED, **GEMMA, "rope_parameters": BOTH}),
    "olmo2": ("Olmo2ForCausalLM", {**GROUPED, **ROPE}),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "rope_parameters": PARTIAL}),
    "cohere2": ("Cohere2ForCausalLM", {**GROUPED, **ROPE, "sliding_window": 4}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**GROUPED, **ROPE, "head_dim": 8}),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 8, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4ForCausalLM", {**GROUPED, "head_dim": 8, "rope_parameters": PARTIAL}),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "olmo": ("OlmoForCausalLM", {**GROUPED, **ROPE}),
    "mbart": ("MBartForConditionalGeneration", MBART),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**GROUPED, **GEMMA, "rope_parameters": BOTH},
            "vision_config": {**TOWER, "image_size": 8},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**GROUPED, **ROPE, "sliding_window": None, "model_type": "mistral"},
            "vision_config": {**TOWER, "head_dim": 4, "image_size": 16},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**GROUPED, "rope_parameters": SECTIONS},
            "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 32},
        },
    ),
    "bert": ("BertForMaskedLM", SIZES),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "rope_parameters": BOTH},
    ),
    "granite": ("GraniteForCausalLM", {**GROUPED, **ROPE}),
    "exaone4": ("Exaone4ForCausalLM", {**DENSE, **KINDS}),
    "mixtral": ("MixtralForCausalLM", {**DENSE, "num_local_experts": 4, "sliding_window": None}),
    "granitemoe": ("GraniteMoeForCausalLM", {**GROUPED, **ROPE, "num_local_experts": 4}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **DENSE,
            **KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", WHOLE),
    "flex_olmo": ("FlexOlmoForCausalLM", WHOLE),
    "glm4_moe": ("Glm4MoeForCausalLM", {**EXPERTS, **GROUPS, "rope_parameters": PARTIAL}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**GROUPED, **ROPE, **GROUPS, **LATENT, "num_experts_per_tok": 2},
    ),
    "llama yarn": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "olmo2 yarn": ("Olmo2ForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {**GROUPED, "rope_parameters": LONG, "original_max_position_embeddings": 64},
    ),
    "glm4_moe yarn": (
        "Glm4MoeForCausalLM",
        {**EXPERTS, **GROUPS, "rope_parameters": {**YARN, "partial_rotary_factor": 1.0}},
    ),
}
GROWTHS: dict[str, dict[str, Any]] = {
    "even": {"width": 64, "portable": True},
    "uneven": {"width": 48, "portable": True},
    "depth": {"layers": 8, "portable": True},
    "experts": {"num_experts_per_tok": 2},
}
# of dense models: what their growth by experts makes
MIXTURES = {"mistral": "mixtral", "granite": "granitemoe", "qwen2": "qwen2_moe"}
MIXTURES |= {"qwen3": "qwen3_moe"}


# ----------------------------------------------------------------- directories


def make(place: Path) -> None:
    """Write the source and the targets of every family into FAMILY/GROWTH."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    import growkern
    from growkern.families.load import load_family
    from growkern.growth.disk.companions import complete_config

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    for name, (class_name, config) in FAMILIES.items():
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        source = place / name / "source"
        model.save_pretrained(source)
        # older software reads a source that an older version of transformers wrote
        complete_config(source)
        tokenizer.save_pretrained(source)
        file = source / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(settings))
        with torch.no_grad():
            torch.save(model.eval()(input_ids=_ids()).logits, place / name / EXPECTED)
        for growth, sizes in GROWTHS.items():
            if growth == "experts":
                if name not in MIXTURES:
                    continue
                field = load_family(MIXTURES[name]).config_field("experts")
                sizes = {**sizes, "to": MIXTURES[name], field: 4}
            how = _sizes(load_family(model.config.model_type), sizes)
            if name == "modernbert" and growth == "depth":
                how["num_hidden_layers"] = 7
            if name.startswith("gemma3") and growth == "depth":
                continue  # its period of 6 layers is longer than the source
            if name in ("olmo", "flex_olmo", "olmoe") and growth == "uneven":
                continue  # their norms have no weights, or go over all heads
            if growkern.plan(source, **how).exact:
                growkern.grow_checkpoint(source, place / name / growth, progress=False, **how)


def _sizes(family: Family, sizes: dict[str, Any]) -> dict[str, Any]:
    """A growth's `width` and `layers` by the names of the config."""
    keys = {"width": ["stream"], "layers": family.stacks.values()}
    how = {key: value for key, value in sizes.items() if key not in keys}
    named = [(key, value) for name, value in sizes.items() for key in keys.get(name, ())]
    return how | {family.config_field(key): value for key, value in named}


# -------------------------------------------------------------------- runtimes


def _model(directory: Path) -> Any:
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    load = getattr(transformers, name).from_pretrained
    return load(directory, attn_implementation="eager").eval()


def _ids() -> torch.Tensor:
    return torch.randint(3, TOKENS, (2, 16), generator=torch.Generator().manual_seed(1))


def other_transformers(directory: Path) -> torch.Tensor:
    """Logits of the transformers of DIR; version 4 does not know `rope_parameters`."""
    with torch.no_grad():
        return _model(directory)(input_ids=_ids()).logits


def ctranslate2(directory: Path) -> torch.Tensor:
    """Logits of ctranslate2; it has no heads of masked models."""
    import ctranslate2 as runtime
    from ctranslate2.converters import TransformersConverter

    if "Masked" in (directory / "config.json").read_text():
        raise NotImplementedError("no head for masked tokens")
    with tempfile.TemporaryDirectory() as place:
        TransformersConverter(str(directory)).convert(place, force=True)
        tokens = [[f"w{i}" for i in row] for row in _ids().tolist()]
        return torch.tensor(numpy.array(runtime.Generator(place).forward_batch(tokens)))


def onnxruntime(directory: Path) -> torch.Tensor:
    """Logits of onnxruntime, by the exporter of PyTorch."""
    import onnxruntime as runtime

    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            kept = {} if "Masked" in type(self.model).__name__ else {"use_cache": False}
            logits: torch.Tensor = self.model(input_ids=ids, **kept).logits
            return logits

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.onnx"
        torch.onnx.export(Logits(_model(directory)), (_ids(),), file, dynamo=True, verbose=False)
        session = runtime.InferenceSession(str(file))
        (outputs,) = session.run(None, {session.get_inputs()[0].name: _ids().numpy()})
    return torch.from_numpy(outputs)


def mlx(directory: Path) -> torch.Tensor:
    """Logits of mlx-lm, on the CPU; it has decoders alone."""
    import mlx.core as runtime
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(directory)
    except SystemExit as stop:
        # it ends the process where the package of a family is missing
        raise NotImplementedError("a package of this family is missing") from stop
    return torch.from_numpy(numpy.array(model(runtime.array(_ids().numpy()))))


RUNTIMES: dict[str, Callable[[Path], torch.Tensor]] = {
    "transformers": other_transformers,
    "ctranslate2": ctranslate2,
    "onnxruntime": onnxruntime,
    "mlx": mlx,
}
# Differences that the plan names: MLX does not divide the weights of experts by their sum there
SAID = {("qwen2", "experts", "mlx")}
# it needs transformers 5, as growkern does, and so a DIR of its own
APART = "mlx"


def read(place: Path) -> Iterator[dict[str, Any]]:
    """What each runtime makes of each directory: `off` by the largest output, or `why` not."""
    for family in sorted(place.iterdir()):
        made = [growth for growth in GROWTHS if (family / growth).is_dir()]
        for runtime, run in RUNTIMES.items():
            expected = torch.load(family / EXPECTED)
            for growth in ("source", *made):
                try:
                    outputs = run(family / growth)
                    off = (outputs - expected).abs().max() / expected.abs().max()
                    yield _row(family.name, growth, runtime, off=off.item())
                except Exception as error:
                    yield _row(family.name, growth, runtime, why=_line(error))
                    if growth == "source":
                        break
                else:
                    # a runtime may compute something else of the source: targets must do the same
                    expected = outputs if growth == "source" else expected


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def _row(family: str, growth: str, runtime: str, **more: Any) -> dict[str, Any]:
    return {"family": family, "growth": growth, "runtime": runtime, **more}


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows, one sentence each. A runtime may lack a family altogether."""
    wrong = [
        f"{row['family']}, {row['growth']}, {row['runtime']}: {row.get('why') or row['off']}"
        for row in rows
        if not row.get("off", 1.0) < LARGEST and row["growth"] != "source"
        if (row["family"], row["growth"], row["runtime"]) not in SAID
    ]
    loaded = {row["runtime"] for row in rows if "off" in row}
    return wrong + [f"{name} loaded nothing" for name in RUNTIMES if name not in loaded]


def _table_line(row: dict[str, Any]) -> str:
    seen = f"{row['off']:.1e}" if "off" in row else f"refused: {row['why']}"
    return f"| {row['family']} | {row['growth']} | {row['runtime']} | {seen} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runtime", choices=[*RUNTIMES], help="only this one")
    given = parser.parse_args()
    wanted = {given.runtime} if given.runtime else RUNTIMES.keys() - {APART}
    for name in RUNTIMES.keys() - wanted:
        del RUNTIMES[name]
    if given.read is not None:
        for row in read(given.read):
            print("ROW", json.dumps(row), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        command = [sys.executable, "-m", "bench.outside", "--packages", str(given.packages)]
        command += ["--runtime", given.runtime] if given.runtime else []
        with subprocess.Popen(
            [*command, "--read", place],
            env={**os.environ, "PYTHONPATH": str(given.packages.resolve())},
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            for line in reader.stdout or ():
                if line.startswith("ROW "):
                    rows.append(json.loads(line.removeprefix("ROW ")))
                    print(_table_line(rows[-1]), flush=True)
        if reader.returncode:
            sys.exit(f"the process that loads the directories ended with {reader.returncode}")
    wrong = failures(rows)
    print("\n".join(["", *wrong]) if wrong else "all agree")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
