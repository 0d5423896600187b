"""Configs of public models, without weights: each plans, or is refused by a line that helps.

The sizes are in public.toml. newest.jsonl has the forty models that aiconfigurator keeps and that
were published last, each once, without the lists of their unquantised modules. A few of each kind
are planned here, and all of them with `--walks 2`.
"""

import json
import re
from pathlib import Path

import pytest

import growkern
from growkern.families.family import inner
from growkern.families.table_files import load_family, supported_families
from growkern.files import parse_toml
from tests.shared import walks

PUBLIC = parse_toml(Path(__file__).with_name("public.toml").read_text())
NEWEST = Path(__file__).with_name("newest.jsonl").read_text().splitlines()
PUBLIC["newest"] = {
    row["model"]: row["config"] | {"refused": row.get("refused")} for row in map(json.loads, NEWEST)
}
ALL = {name: config for part in PUBLIC.values() for name, config in part.items()}
SOME = ALL if walks.times > 1 else [n for part in PUBLIC.values() for n in [*part][:1]]
L70 = "meta-llama/Llama-3.1-70B"


@pytest.mark.parametrize("name", SOME)
def test_a_public_config_plans_or_is_refused_helpfully(name, tmp_path):
    config = dict(ALL[name])
    refused = config.pop("refused", None)
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds * (config["num_hidden_layers"] // len(kinds))
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = config["model_type"]
    family = load_family(kind) if kind in supported_families() else None
    field = family.config_field("stream") if family else "hidden_size"
    own = config | inner(config, family.under) if family else config
    try:
        plan = growkern.plan(
            tmp_path, **{field: 2 * own.get(field, 768)}, dequantize="quantization_config" in own
        )
    except growkern.GrowthError as error:
        assert refused and re.search(refused, str(error)), error
    else:
        assert not refused and plan.parameters("target") > plan.parameters("source")


# as published, in billions: of all experts, and of those that a token uses
MIXTURES = {
    "mistralai/Mixtral-8x7B-v0.1": (46.7, 12.9),
    "allenai/OLMoE-1B-7B-0924": (6.92, 1.28),
    "Qwen/Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "deepseek-ai/DeepSeek-V3": (671, 37.4),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3.9),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235.1, 22.2),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
}


@pytest.mark.parametrize("name", MIXTURES if walks.times > 1 else [*MIXTURES][:1])
def test_a_mixture_has_the_parameters_that_its_makers_say(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ALL[name]))
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    field = next(field for field in counts if field in ALL[name])
    is_quantised = "quantization_config" in ALL[name]
    plan = growkern.plan(tmp_path, **{field: 2 * ALL[name][field]}, dequantize=is_quantised)
    assert plan.exact
    total, active = (plan.parameters("source", active=active) for active in (False, True))
    assert (total / 1e9, active / 1e9) == pytest.approx(MIXTURES[name], rel=0.02)


def test_a_config_without_weights_is_enough_for_a_plan_alone(tmp_path):
    source, target = tmp_path / "small", tmp_path / "large"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(ALL[L70]))
    plan = growkern.plan(source / "config.json", num_hidden_layers=96)
    assert plan.exact
    # as published, and 16 layers more
    assert plan.parameters("source") == 70_553_706_496
    with pytest.raises(growkern.GrowthError, match="a config without weights"):
        growkern.grow_checkpoint(source, target, num_hidden_layers=96)
    with pytest.raises(growkern.GrowthError, match="a config without weights"):
        growkern.grow(source, num_hidden_layers=96)
