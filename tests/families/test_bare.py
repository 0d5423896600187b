"""A plan of config.json alone. Truth: the plan of the same config with its weights beside it."""

import json
import shutil

import pytest
import torch

import growkern
from testbed.models import random_model
from testbed.relatives import KINDS, LOCAL, RELATIVES
from tests.families.test_quantised import make_mxfp4


def same_plan(full, bare, *, sizes=("disk_bytes", "read_bytes"), **how):
    bare.mkdir()
    shutil.copy(full / "config.json", bare)
    with_weights, alone = growkern.plan(full, **how), growkern.plan(bare, **how)
    assert alone.dtype == with_weights.dtype
    levels = [[(f.level, f.what) for f in plan.findings] for plan in (with_weights, alone)]
    assert levels[0] == levels[1]
    for size in sizes:
        assert alone.estimate()[size] == with_weights.estimate()[size]
    return alone


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_dtype_that_only_the_config_of_the_text_names(family, name, tmp_path):
    class_name, sizes, _ = RELATIVES[family]
    model = random_model(class_name, sizes, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "full")
    file = tmp_path / "full" / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    for part in ("text_config", "vision_config"):
        config[part].pop("dtype", None)
    config["text_config"][name] = "bfloat16"
    file.write_text(json.dumps(config))
    alone = same_plan(tmp_path / "full", tmp_path / "bare", hidden_size=24)
    assert alone.dtype == torch.bfloat16


def test_a_quantised_config_that_names_no_dtype(tmp_path):
    make_mxfp4(tmp_path / "whole", tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    file.write_text(json.dumps(config))
    # the bytes that packed weights take are known from the files alone
    how = {"hidden_size": 64, "dequantize": True, "sizes": ["disk_bytes"]}
    assert same_plan(tmp_path / "packed", tmp_path / "bare", **how).dtype == torch.bfloat16


def test_a_config_that_names_no_dtype_is_planned_in_float32(tmp_path):
    model = random_model("GptOssForCausalLM", {**LOCAL, **KINDS}, dtype=torch.float32)
    config = json.loads(model.config.to_json_string())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "dtype": None, "architectures": ["GptOssForCausalLM"]})
    )
    assert growkern.plan(tmp_path, hidden_size=24).dtype == torch.float32
