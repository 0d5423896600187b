"""transformers reads a grown config.json as it was planned, with every kind of rotary positions.

Truth: the source's outputs in float64, and the plan's config. CI takes one kind of positions for
every fourth family without images; `--walks 2` takes every kind of every family.
"""

import copy
import json

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError

import growkern
from growkern.families.model import ModelSpec
from growkern.families.table_files import load_family
from growkern.growth.source.config import refuse_misread
from testbed.families import FAMILIES, GROUPED
from testbed.models import random_model, relative_error
from testbed.relatives import KINDS, LOCAL, RELATIVES, ROTARY, WIDTHS
from tests.growth.plan.test_matrix import EXACT, grown_on_disk
from tests.shared import walks

ALL = FAMILIES | {name: case[:2] for name, case in RELATIVES.items()}
# rotary positions without options
FIXED = ("gptj", "esm", "roformer", "dinov3_vit")
TURNING = [m for m in ALL if load_family(m).attention.positions == "rotary" and m not in FIXED]
BEFORE = {"original_max_position_embeddings": 16}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BEFORE}
SCALED = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, **BEFORE},
    "longrope": {"factor": 2.0, "attention_factor": 1.2, **BEFORE},
    "llama3": LLAMA3,
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.5},
}


def scaled(model_type, kind):
    """The config of a family with positions of this kind; None where transformers has none."""
    class_name, sizes = ALL[model_type]
    family, sizes = load_family(model_type), copy.deepcopy(sizes)
    try:
        model = ModelSpec.of(transformers.AutoConfig.for_model(model_type, **sizes), class_name)
    except StrictDataclassClassValidationError:
        # the lowest version knows fewer kinds of layers
        return None
    part = sizes if family.under is None else sizes[family.under]

    def one(rope):
        rope = {**rope, "rope_type": kind, "rope_theta": 5e4, **SCALED[kind]}
        keeps = kind == "proportional" or "mrope_section" in rope
        if "partial_rotary_factor" in rope and not keeps:
            # no family's default
            rope["partial_rotary_factor"] = 1.0
        pairs = int(model.head_dim() * rope.get("partial_rotary_factor", 1.0)) // 2
        if kind == "longrope":
            rope["short_factor"] = [1.0 + 0.1 * i for i in range(pairs)]
            rope["long_factor"] = [2.0 + i for i in range(pairs)]
        return rope

    if kind == "dynamic" and model.turning == 2:
        # divides by the number of entries but two
        return None
    rope = model.text.rope_parameters
    by_kind = "rope_type" not in rope
    part["rope_parameters"] = {k: one(v) for k, v in rope.items()} if by_kind else one(rope)
    try:
        transformers.AutoConfig.for_model(model_type, **copy.deepcopy(sizes))
    except Exception:
        return None
    return sizes


def sample():
    every = [(m, kind) for m in TURNING for kind in SCALED]
    if walks.times > 1:
        return every
    kinds, fast = [*SCALED], [m for m in TURNING if load_family(m).under is None]
    chosen = {(m, kinds[i % len(kinds)]) for i, m in enumerate(fast[::4])}
    # whose older tables hold less than the new ones
    return sorted({*chosen, ("phi3", "longrope"), ("olmo2", "llama3"), ("olmo2", "yarn")})


def twice_as_wide(model_type):
    class_name, sizes = ALL[model_type]
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(sizes))
    model = ModelSpec.of(config, class_name)
    return {model.family.config_field("stream"): 2 * model.size("stream")}


def text(config):
    """The fields of the text of a config, and the old name of `rope_type` left out."""
    part = load_family(config.model_type).text(config).to_dict()
    rope = part.get("rope_parameters") or {}
    for table in (rope, *(x for x in rope.values() if isinstance(x, dict))):
        table.pop("type", None)
    return part


def assert_read_back(plan, *places):
    planned = text(plan.large.config)
    # of older software, beside the new fields
    older = {key.field for key in plan.small.family.older}
    for place in places:
        read = text(transformers.AutoConfig.from_pretrained(place))
        for name in planned.keys() - {"_name_or_path", "architectures", "dtype"} - older:
            assert read.get(name) == planned[name], (place, name)


@pytest.mark.parametrize("model_type, kind", sample())
def test_scaled_positions_are_read_back_as_planned(model_type, kind, tmp_path):
    sizes = scaled(model_type, kind)
    if sizes is None:
        pytest.skip("no model of this family has such positions")
    source = random_model(ALL[model_type][0], sizes)
    try:
        relative_error(source, source)
    except RuntimeError:
        pytest.skip("transformers cannot run such a model")
    how = twice_as_wide(model_type)
    grown = grown_on_disk(tmp_path, source, how)
    growkern.grow(source, **how).save_pretrained(tmp_path / "memory")
    assert_read_back(grown.growth_plan, tmp_path / "large", tmp_path / "memory")
    assert grown.growth_plan.exact
    assert relative_error(source, grown) <= EXACT


PLAIN = [m for m in ALL if m not in TURNING]


@pytest.mark.parametrize("model_type", PLAIN if walks.times > 1 else PLAIN[:1])
def test_configs_without_such_positions_are_read_back_as_planned(model_type, tmp_path):
    class_name, sizes = ALL[model_type]
    source, how = random_model(class_name, sizes), twice_as_wide(model_type)
    grown = grown_on_disk(tmp_path, source, how)
    growkern.grow(source, **how).save_pretrained(tmp_path / "memory")
    assert_read_back(grown.growth_plan, tmp_path / "large", tmp_path / "memory")


IN_PARTS = [m for m in ALL if load_family(m).under is not None]


@pytest.mark.parametrize("model_type", IN_PARTS if walks.times > 1 else IN_PARTS[::4])
def test_every_part_of_a_config_has_the_dtype_of_the_target(model_type, tmp_path):
    """Whatever dtypes the parts of the source's config have: transformers builds all in one."""
    class_name, sizes = ALL[model_type]
    source, small = random_model(class_name, sizes, dtype=torch.bfloat16), tmp_path / "small"
    source.save_pretrained(small)
    written = json.loads((small / "config.json").read_text())
    others = {"dtype": "float32"}, {"torch_dtype": "float16"}
    # Gemma 4 may have no part for sounds
    names = [name for name in source.config.sub_configs if written.get(name)]
    for name, other in zip(names, others, strict=True):
        del written[name]["dtype"]
        written[name] |= other
    (small / "config.json").write_text(json.dumps(written))
    how = twice_as_wide(model_type)
    for dtype in (torch.bfloat16, torch.float32):
        large = tmp_path / str(dtype)
        plan = growkern.grow_checkpoint(small, large, progress=False, dtype=dtype, **how).plan
        growkern.grow(source, dtype=dtype, **how).save_pretrained(tmp_path / "memory")
        read = [transformers.AutoConfig.from_pretrained(x) for x in (large, tmp_path / "memory")]
        for config in (plan.large.config, *read):
            parts = [config, *(getattr(config, name) for name in names)]
            assert [part.dtype for part in parts] == [dtype] * 3


# class, its config, keys of its config.json, growth, keys of the grown one
DENSE = {**ROTARY, "attention_bias": False}
OTHER_KEYS = {
    "gpt-oss, both names": (
        "GptOssForCausalLM",
        {**LOCAL, **KINDS},
        {"experts_per_token": 2},
        {"num_local_experts": 8, "num_experts_per_tok": 4},
        {"experts_per_token": 4, "num_experts_per_tok": 4},
    ),
    "exaone4, a text that repeats": (
        "Exaone4ForCausalLM",
        {**ROTARY, "num_hidden_layers": 4, "sliding_window": 4},
        {"sliding_window_pattern": "LLLG"},
        {"num_hidden_layers": 8},
        {"sliding_window_pattern": "LLLG"},
    ),
    "exaone4, a text that no longer repeats": (
        "Exaone4ForCausalLM",
        {**ROTARY, "num_hidden_layers": 4, "sliding_window": 4},
        {"sliding_window_pattern": "LLLG"},
        {"num_hidden_layers": 5},
        {"sliding_window_pattern": "LLLLG"},
    ),
    "qwen3, upcycled": (
        "Qwen3ForCausalLM",
        DENSE,
        {},
        {"to": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 4, "num_local_experts": 4},
    ),
    "qwen3_moe, as transformers 5 saves it": (
        "Qwen3MoeForCausalLM",
        {**LOCAL, **WIDTHS},
        {},
        {"hidden_size": 24},
        {"num_experts": 4},
    ),
    "qwen3_moe, as it is published": (
        "Qwen3MoeForCausalLM",
        {**LOCAL, **WIDTHS},
        {"num_experts": 4, "num_local_experts": None},
        {"num_experts": 8, "num_experts_per_tok": 4},
        {"num_experts": 8, "num_local_experts": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_KEYS)
def test_keys_that_other_software_reads_follow(case, tmp_path):
    class_name, config, keys, how, expected = OTHER_KEYS[case]
    small = tmp_path / "small"
    random_model(class_name, config, dtype=torch.float32).save_pretrained(small)
    written = json.loads((small / "config.json").read_text()) | keys
    written = {key: value for key, value in written.items() if value is not None}
    (small / "config.json").write_text(json.dumps(written))
    growkern.grow_checkpoint(small, tmp_path / "disk", progress=False, **how)
    # a model that was loaded, as one that is only a directory
    model = getattr(transformers, class_name).from_pretrained(small)
    for source, name in ((small, "memory"), (model, "loaded")):
        growkern.grow(source, **how).save_pretrained(tmp_path / name)
    for name in ("disk", "memory", "loaded"):
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert {key: found.get(key) for key in expected} == expected, name


def test_a_config_that_would_be_read_otherwise_is_refused(tmp_path):
    """Of a table of one's own that writes a key which transformers reads, with a wrong value."""
    table = tmp_path / "own.toml"
    table.write_text('extends = "llama"\n[older]\nhead_dim = { of = "num_attention_heads" }\n')
    small, how = tmp_path / "small", {"hidden_size": 24, "family": table}
    random_model("LlamaForCausalLM", {**GROUPED, "head_dim": 4}).save_pretrained(small)
    with pytest.raises(growkern.GrowthError, match="head_dim=12"):
        growkern.grow_checkpoint(small, tmp_path / "large", progress=False, **how)
    assert not (tmp_path / "large").exists()
    model = growkern.grow(small, **how)
    with pytest.raises(growkern.GrowthError, match="head_dim=12"):
        model.save_pretrained(tmp_path / "memory")
    # and of a config that was edited since
    model.config.use_cache = False
    with pytest.raises(growkern.GrowthError, match="head_dim=12"):
        model.save_pretrained(tmp_path / "memory")


class Forgets(transformers.LlamaConfig):
    """A class that reads one field always alike, as T5's once did with tied heads."""

    def __post_init__(self, **options):
        super().__post_init__(**options)
        self.attention_bias = True


def test_only_what_its_class_does_not_keep_of_the_source_may_differ():
    source = Forgets()
    source.attention_bias = False
    planned, read = copy.deepcopy(source), copy.deepcopy(source)
    read.attention_bias = True
    family = load_family("llama")
    refuse_misread("config.json", family, planned, read, source)
    with pytest.raises(growkern.GrowthError, match="attention_bias=True"):
        refuse_misread("config.json", family, planned, read)
    read.rope_parameters["attention_factor"] = 2.0
    with pytest.raises(growkern.GrowthError, match="attention_factor=2"):
        refuse_misread("config.json", family, planned, read, source)
    del read.rope_parameters["attention_factor"]
    read.intermediate_size += 1
    with pytest.raises(growkern.GrowthError, match=f"intermediate_size={read.intermediate_size}"):
        refuse_misread("config.json", family, planned, read, source)
