"""Configs of public models, without weights: each plans, or is refused by a line that helps.

The sizes are in public.toml. A few of each kind are planned here, and all of them with `--walks 2`.
"""

import json
import re
from pathlib import Path

import pytest

import growkern
from growkern.families.load import load_family, supported_families
from growkern.package import parse_toml
from tests.shared import walks

PUBLIC = parse_toml(Path(__file__).with_name("public.toml").read_text())
ALL = {name: config for part in PUBLIC.values() for name, config in part.items()}
SOME = ALL if walks.times > 1 else [n for part in PUBLIC.values() for n in [*part][-1:]]
L70 = "meta-llama/Llama-3.1-70B"


@pytest.mark.parametrize("name", SOME)
def test_a_public_config_plans_or_is_refused_helpfully(name, tmp_path):
    config = dict(ALL[name])
    refused = config.pop("refused", None)
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds * (config["num_hidden_layers"] // len(kinds))
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = config["model_type"]
    is_known = kind in supported_families()
    field = load_family(kind).config_field("stream") if is_known else "hidden_size"
    try:
        plan = growkern.plan(tmp_path, **{field: 2 * config.get(field, 768)})
    except growkern.GrowthError as error:
        assert refused and re.search(refused, str(error)), error
    else:
        assert plan.parameters("target") > 2 * plan.parameters("source")


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
