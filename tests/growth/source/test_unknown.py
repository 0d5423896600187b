"""A refusal of a model without a table says what the model is. Truth: what its makers call it."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.families.table_files import supported_families
from growkern.growth.source.unknown import refuse_unknown
from testbed.families import FAMILIES
from testbed.models import random_model
from testbed.relatives import RELATIVES
from tests.shared import walks

NAS = {
    **{"architectures": ["DeciLMForCausalLM"], "block_configs": [{}], "hidden_size": 8},
    **{"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "vocab_size": 128256},
    **{"num_key_value_heads": None, "rms_norm_eps": 1e-5, "num_attention_heads": 4},
    **{"intermediate_size": None, "max_position_embeddings": 9, "num_hidden_layers": 2},
    **{"attention_dropout": 0.0, "pretraining_tp": 1},
}
HYBRID = {"hidden_size": 8, "num_attention_heads": 2, "mamba_d_state": 16}
QWEN = transformers.Qwen3Config().to_dict() | {"rope_scaling": None}
WRAPPED = {"text_config": {"model_type": "mistral"}, "vision_config": {}, "quantization_config": {}}

OTHERS = sorted({*transformers.CONFIG_MAPPING} - {*supported_families()})
LEADS_ON = r"it has [^;\n]+; nearest: \w[^;\n]* \([^;\n]+; growkern[. ][^\n]*$"


@pytest.mark.parametrize(
    ("model_type", "config", "clause"),
    [
        # other prefixes, BioGPT's blocks
        ("xglm", {}, r"nearest: biogpt \(\d+% of its tensor names\)"),
        ("persimmon", {}, r"nearest: \w+ \(\d+% .*\); growkern family draft /"),
        # sizes of a damaged file are not built
        ("xglm", {"num_layers": 10**9, "d_model": 10**12}, "nearest: biogpt"),
        ("longcat_flash", {"n_routed_experts": 4}, r"it has .*; nearest: deepseek_v2 \("),
        # experts, too, but another family has these
        ("jamba", {"num_experts": 4}, r"it has state-space layers .*\(Mamba 1\); .*nearest: "),
        # a class that may have experts, of which this model has none
        ("xglm", {"num_experts": 0}, "nearest: biogpt"),
        (
            "llava",
            WRAPPED,
            r"it has vision_config beside its text; nearest: mistral \(.*growkern\.grow",
        ),
        ("mamba", {}, r"it has state-space layers .*\(Mamba 1\); .*growkern family draft"),
        ("kimi_linear", {}, "table; it has layers of gated delta attention; nearest: "),
        ("deepseek_v4", {}, r"it has several residual streams .*nearest: deepseek_v3"),
        ("step3p7", {}, r"it has a gate on every attention head; .*nearest: "),
        # none of these: a tensor without a rule
        ("minimax", {}, r"it has self_attn\.diagonal_decay and \d+ others, which mixtral"),
        # no class for text: by its config's keys
        ("vitpose_backbone", {}, r"it has experts; nearest: \w+ \(.*of its config's keys\); growk"),
        ("qwen3_omni_moe", {"thinker_config": {"text_config": QWEN}}, "nearest: qwen3 .its text"),
        # no class: by the keys of the file
        ("nobody", HYBRID, r"it has state-space layers \(Mamba\); .*nearest: .* growkern.widen"),
        # as nemotron-nas: a decoder, whose config has most keys of an encoder
        ("nobody", NAS, "it has blocks of their own sizes; nearest: llama "),
        ("nobody", QWEN, r"nearest: qwen3 \(9\d% of its config's keys\); .*growkern plan /"),
    ],
)
def test_a_model_without_a_table_is_described(model_type, config, clause, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(growkern.GrowthError, match=clause) as refused:
        growkern.plan(tmp_path, hidden_size=64)
    assert f"model_type '{model_type}' has no family table" in str(refused.value)


@pytest.mark.parametrize("kind", OTHERS if walks.times > 1 else OTHERS[::60])
def test_every_refusal_names_an_obstacle_a_family_and_a_command(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(growkern.GrowthError, match=LEADS_ON):
        growkern.plan(tmp_path, hidden_size=64)


def test_the_names_in_files_tell_what_a_model_without_a_class_is(tmp_path):
    random_model(*RELATIVES["qwen3_moe"][:2]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody", "sizes": [1, 2]}))
    with pytest.raises(growkern.GrowthError, match=r"nearest: \w+ \(100% of its tensor names"):
        growkern.plan(tmp_path, hidden_size=64)


def test_what_its_class_may_have_and_a_model_has_not_is_no_obstacle():
    gate = "a gate on every attention head"
    with pytest.raises(growkern.GrowthError, match=gate):
        refuse_unknown("lfm3", {})
    with pytest.raises(growkern.GrowthError, match="nearest: ") as refused:
        refuse_unknown("lfm3", {"use_attention_gate": False})
    assert gate not in str(refused.value)


def test_a_model_in_memory_is_described_too():
    sizes = {"vocab_size": 50, "d_model": 12, "num_layers": 2, "attention_heads": 3, "ffn_dim": 20}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes))
    with pytest.raises(growkern.GrowthError, match=r"nearest: biogpt .*growkern.draft_family"):
        growkern.plan(model, d_model=24)


@pytest.mark.parametrize(
    ("class_name", "sizes", "own"),
    [
        (*RELATIVES["deepseek_v3"][:2], {"model_type": "kimi_k2"}),
        (
            *FAMILIES["qwen2"],
            {
                "model_type": "mimo",
                "architectures": ["MiMoForCausalLM"],
                "num_nextn_predict_layers": 1,
            },
        ),
    ],
)
def test_such_a_model_grows_like_its_class_and_keeps_its_own_name(class_name, sizes, own, tmp_path):
    random_model(class_name, sizes).save_pretrained(tmp_path / "known")
    shutil.copytree(tmp_path / "known", tmp_path / "other")
    file, weights = (tmp_path / "other" / name for name in ("config.json", "model.safetensors"))
    known_type = json.loads(file.read_text())["model_type"]
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    if "architectures" in own:
        second = {"model.mtp_layers.0.input_proj.weight": torch.randn(12, 24)}
        save_file({**load_file(weights), **second}, weights, {"format": "pt"})
    for name in ("known", "other"):
        where = tmp_path / name, tmp_path / f"{name}-grown"
        growkern.grow_checkpoint(*where, hidden_size=sizes["hidden_size"] * 2, progress=False)
    known, other = (
        load_file(tmp_path / f"{name}-grown" / "model.safetensors") for name in ("known", "other")
    )
    assert known.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in known.items())
    grown = tmp_path / "other-grown"
    kind = json.loads(file.read_text())["model_type"]
    (line, *_) = growkern.plan(file.parent, num_hidden_layers=4).portability()
    assert line.startswith(f"model_type {kind} is unknown: read as {known_type} by its class")
    # other software would look for weights that are left out
    expected = {**own, "num_nextn_predict_layers": 0} if "architectures" in own else own
    assert expected.items() <= json.loads((grown / "config.json").read_text()).items()
    assert growkern.verify(tmp_path / "other", grown).ok
    assert growkern.plan(grown, num_hidden_layers=4).small.config.model_type == known_type
