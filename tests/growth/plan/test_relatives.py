"""Every family in every size that its table offers, alone and all at once.

Truth: the source in transformers, in float64, with every parameter random. CI grows families with a
table close to another's all at once, and in the width of their heads; `--walks 2` takes every size
of every family.
"""

import json
import re
from dataclasses import replace
from functools import reduce

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

import growkern
from growkern.families.family import inner
from growkern.families.model import ModelSpec
from growkern.families.table_files import load_family
from growkern.growth.plan.axes import axis_maps
from testbed import growths
from testbed.families import FAMILIES
from testbed.growths import (
    HEADS,
    alone,
    at_once,
    grown_by,
    head_counts,
    heads_grow,
    largest_error,
    more_experts,
)
from testbed.models import batches, random_model, run
from testbed.relatives import GEMMA4_SMALL, RELATIVES, with_sizes
from tests.growth.plan.test_matrix import EXACT, grown_on_disk
from tests.shared import walks

ALL = FAMILIES | {name: case[:2] for name, case in RELATIVES.items()}
SOME = ALL if walks.times > 1 else RELATIVES
# it reads and compares all of them by the plan, and the outputs are compared here
VERIFIED = SOME if walks.times > 1 else [*SOME][::4]


def described(model_type, class_name=None, **options):
    """A family's model without weights."""
    name, sizes = ALL[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **options})
    return ModelSpec.of(config, class_name or name)


def assert_exact(source, grown, plan):
    """The plan says exact, but for what new tokens cost, and old ones keep their logits."""
    found = [f for f in plan.findings if not f.what.startswith("vocab_size")]
    assert {f.level for f in found} <= {"exact"}, found
    assert largest_error(source, grown, plan) <= EXACT


@pytest.mark.parametrize("model_type", ALL)
def test_every_size_that_a_table_offers_has_a_case(model_type):
    """Heads most of all: rotary pairs may be wrong where all names and shapes are right."""
    model = described(model_type)
    offered = set(model.family.growable)
    cases = alone(model)
    offered |= {HEADS} if heads_grow(model.family) else set()
    assert cases.keys() - {"head_dim"} == offered - {"head_dim"}
    assert all(what == HEADS or sizes[what] > model.size(what) for what, sizes in cases.items())
    larger = {key for key, size in at_once(model).items() if size > model.size(key)}
    kept = set() if growths.is_exact_in_any_width(model.family) else head_counts(model).keys()
    assert larger == offered - {HEADS} - kept


@pytest.mark.parametrize("tied", [True, False] if walks.times > 1 else [True])
@pytest.mark.parametrize("model_type", SOME)
def test_all_sizes_at_once_are_exact_from_files_to_shards(model_type, tied, tmp_path):
    class_name, sizes, *options = SOME[model_type]
    sizes = {"tie_word_embeddings": tied, **sizes, **(options[0] if options else {})}
    source = random_model(class_name, sizes)
    model = ModelSpec.of(source.config, class_name)
    how = grown_by(model, at_once(model))
    grown = grown_on_disk(tmp_path, source, {**how, "max_shard_size": 4096})
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 1
    assert_exact(source, grown, grown.growth_plan)
    if model_type in VERIFIED:
        report = growkern.verify(tmp_path / "small", tmp_path / "large")
        assert report.ok, report.failure
    config = inner(json.loads((tmp_path / "large/config.json").read_text()), model.family.under)
    bases = [key for key in model.family.older if key.of.endswith(".rope_theta")]
    assert bases or not (model.family.older and config.get("rope_parameters"))
    for key in bases:
        # older software reads this name
        assert config[key.field] == reduce(dict.__getitem__, key.of.split("."), config)


ALONE = [(m, HEADS) for m in ALL if heads_grow(load_family(m))]
if walks.times > 1:
    ALONE = [(m, what) for m in ALL for what in alone(described(m))]


@pytest.mark.parametrize("model_type, what", ALONE)
def test_a_size_alone_is_exact(model_type, what):
    source = random_model(*ALL[model_type], tie_word_embeddings=False)
    model = ModelSpec.of(source.config, type(source).__name__)
    grown = growkern.grow(source, **grown_by(model, alone(model)[what]))
    plan = grown.growth_plan
    spaces = [s for s in plan.small.family.spaces.values() if {*s.parts} & {"key", "before_norm"}]
    old, new = (sum(map(m.width, spaces)) for m in (plan.small, plan.large))
    # where the keys' part is fixed, only that of the values grows
    entries = [s for s in plan.small.family.config.values() if "head_dim" in str(s.field)]
    is_fixed = any(size.fixed for size in entries)
    assert what != HEADS or is_fixed or old < new
    assert_exact(source, grown, plan)


CLASSES = [(m, name) for m in RELATIVES for name in load_family(m).classes if name != ALL[m][0]]


@pytest.mark.parametrize("model_type, class_name", CLASSES)
def test_every_class_is_exact(model_type, class_name):
    """In one layer, as the others are the same in all classes."""
    sizes, family = ALL[model_type][1], load_family(model_type)
    layers = {family.config_field(key): 1 for key in family.stacks.values()}
    layers |= dict.fromkeys(family.conditional("last"), 0)
    own = inner(sizes, family.under)
    lists = {k: v[:1] for k, v in own.items() if isinstance(v, list) and type(v[0]) is not float}
    source = random_model(class_name, with_sizes(family, sizes, {**layers, **lists}))
    model = ModelSpec.of(source.config, class_name)
    same = {"vocab", *family.stacks.values()}
    larger = {key: size for key, size in at_once(model).items() if key not in same}
    grown = growkern.grow(source, **grown_by(model, larger))
    assert_exact(source, grown, grown.growth_plan)


@pytest.mark.parametrize(
    "model_type, config, growth, why",
    [
        ("phi", {}, {"head_dim": 6}, "head_dim=6: rotary positions turn 3 entries"),
        ("stablelm", {}, {"hidden_size": 36, "num_attention_heads": 6}, "turn 3 entries of a head"),
        ("phi", {"qk_layernorm": True}, {"hidden_size": 24}, "qk_layernorm=True: norms of queries"),
        ("stablelm", {"qk_layernorm": True}, {"hidden_size": 48}, "qk_layernorm=True: norms of"),
        ("olmo", {}, {"hidden_size": 20}, "no weight that can scale extra entries: give a mul"),
        ("nanochat", {}, {"hidden_size": 20}, "extra entries: give a multiple of 12"),
        ("olmo", {}, {"hidden_size": 24, "stream": "padded"}, "entries that are not copied"),
        ("olmo", {"tie_word_embeddings": True}, {"hidden_size": 24}, "input of a tied head"),
        ("olmo", {"clip_qkv": 1.0}, {"head_dim": 8}, "clip_qkv=1.0 clips them"),
        ("opt", {"do_layer_norm_before": False}, {"hidden_size": 24}, "norms behind the blocks"),
        ("opt", {"word_embed_proj_dim": 8}, {"hidden_size": 24}, "word_embed_proj_dim=8: embed"),
        ("dinov2", {"use_swiglu_ffn": True}, {"hidden_size": 24}, "of the gated FFN as one"),
        ("qwen3_vl", {}, {"head_dim": 16}, "this qwen3_vl has no size 'head_dim' to grow"),
        ("qwen3_vl_moe", {}, {"moe_intermediate_size": 12}, "equal axes do not tell"),
        ("roformer", {}, {"hidden_size": 18, "num_attention_heads": 3}, "head_dim=6 has no rotary"),
        ("albert", {}, {"num_hidden_layers": 8}, "this albert has no size .num_hidden_layers. to"),
        ("bloom", {}, {"n_head": 6}, "this bloom has no size 'n_head' to grow"),
        ("mpt", {}, {"d_model": 20}, "d_model=20 is not a multiple of n_heads=3"),
        ("mpt", {"attn_config": {"clip_qkv": 4.0}}, {"d_model": 24}, "attn_config.clip_qkv=4.0"),
        ("whisper", {}, {"d_model": 24}, "this whisper has no size 'd_model' to grow"),
        (
            *("whisper", {"use_weighted_layer_sum": True}, {"encoder_layers": 3}),
            "adds up the outputs of all layers",
        ),
        ("vit", {}, {"patch_size": 8}, "this vit has no size 'patch_size' to grow"),
        ("vit", {}, {"image_size": 16}, "this vit has no size 'image_size' to grow"),
        ("vit", {}, {"num_channels": 4}, "this vit has no size 'num_channels' to grow"),
        ("vit", {}, {"pad_vocab_to_multiple_of": 8}, "no size 'pad_vocab_to_multiple_of'"),
    ],
)
def test_what_a_table_does_not_cover_is_refused(model_type, config, growth, why):
    class_name, sizes = ALL[model_type]
    source = random_model(class_name, {**sizes, **config})
    with pytest.raises(growkern.GrowthError, match=why):
        growkern.plan(source, **growth)


def test_layers_that_take_the_keys_of_others_have_heads_in_their_order():
    """Of random maps, each layer draws its own otherwise."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    source = random_model("Gemma4ForCausalLM", {**GEMMA4_SMALL, **heads})
    grown = growkern.grow(source, num_attention_heads=9, num_key_value_heads=9, scheme="paper")
    assert_exact(source, grown, grown.growth_plan)


CHOICES = {"indexer_types": ["full", "shared"] * 2, "index_topk": 3, "num_hidden_layers": 4}
CHOICES |= {"layer_types": None, "mlp_layer_types": ["dense", *["sparse"] * 3]}
GEMMA4 = "Gemma4ForCausalLM", GEMMA4_SMALL
GLM = "GlmMoeDsaForCausalLM", {**ALL["glm_moe_dsa"][1], **CHOICES}


@pytest.mark.parametrize(
    "model, rule, without",
    [(GEMMA4, "one", ()), (GEMMA4, "ahead", None), (GLM, "ahead", None)],
)
def test_a_rule_of_new_layers_is_needed(model, rule, without):
    source = random_model(*model)
    family = load_family(source.config.model_type)
    for table in (family, replace(family, depth=replace(family.depth, **{rule: without}))):
        grown = growkern.grow(source, num_hidden_layers=6, depth="identity", family=table)
        error = largest_error(source, grown, grown.growth_plan)
        assert (error <= EXACT) if table is family else (error > 0.1)


def test_an_indexer_that_chose_more_tokens_would_change_the_outputs():
    source, other = (random_model(*ALL["deepseek_v32"], index_topk=n) for n in (3, 4))
    with pytest.raises(growkern.GrowthError, match="no size 'index_topk' to grow"):
        growkern.plan(source, index_topk=4)
    assert all(map(torch.equal, source.parameters(), other.parameters()))
    old, new = (run(model, batches(model)[""])["logits"] for model in (source, other))
    assert (new - old).abs().max() > 0.1 * old.abs().max()


class Chosen(TorchFunctionMode):
    """The ids that `topk` chooses, sorted."""

    def __init__(self):
        super().__init__()
        self.ids = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self.ids.append(result[1].sort(-1)[0])
        return result


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "qwen3_moe", "gpt_oss"])
def test_indexers_and_routers_choose_the_same_ids(model_type):
    source = random_model(*ALL[model_type])
    model = ModelSpec.of(source.config, type(source).__name__)
    same = {"vocab", *model.family.stacks.values(), *more_experts(model, 2)}
    larger = {key: size for key, size in at_once(model).items() if key not in same}
    chosen = []
    for each in (source, growkern.grow(source, **grown_by(model, larger))):
        with Chosen() as mode:
            run(each, batches(each)[""])
        chosen.append(mode.ids)
    assert chosen[0] and all(map(torch.equal, *chosen))


def test_a_backbone_is_refused_and_grows_as_its_model(tmp_path):
    source = random_model("Dinov2Backbone", ALL["dinov2"][1])
    with pytest.raises(growkern.GrowthError, match="weights of a Dinov2Model: load it as one"):
        growkern.plan(source, hidden_size=24)
    source.save_pretrained(tmp_path / "small")
    model = transformers.Dinov2Model.from_pretrained(tmp_path / "small", dtype=torch.float64)
    growkern.grow(model, hidden_size=24).save_pretrained(tmp_path / "large")
    grown = type(source).from_pretrained(tmp_path / "large", dtype=torch.float64).eval()
    shape = ModelSpec.of(source.config, "Dinov2Model").input_shape
    images = torch.randn(2, *shape, dtype=torch.float64)
    (small,), (large,) = (m(images).feature_maps for m in (source, grown))
    assert (large[:, :12] - small).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "model_type, growth, shape, why",
    [
        ("vit", {"intermediate_size": 30}, (2, 2, 8, 4), r"images, \(batch, 2, 8, 8\)"),
        ("whisper", {"encoder_layers": 3}, (2, 5, 11), r"spectrograms, \(batch, 5, 12\)"),
    ],
)
def test_inputs_of_another_shape_are_refused(model_type, growth, shape, why):
    source = random_model(*ALL[model_type])
    found = re.escape(f"{list(shape)}; expected ") + why
    with pytest.raises(growkern.GrowthError, match=found):
        growkern.verify(source, growkern.grow(source, **growth), tokens=torch.zeros(shape))


def gradients(model):
    """Of a random sum of all outputs, by the parameters' names."""
    model.requires_grad_(True).zero_grad()
    for inputs in (x for seed in range(2) for x in batches(model, seed).values()):
        inputs.pop("attention_mask", None)
        for x in run(model, inputs).values():
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            (x * weights.double()).mean().backward(retain_graph=True)
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def rows(x, axis):
    return x.movedim(axis, 0).reshape(x.shape[axis], -1).abs().sum(1)


def idle_tensors(plan, learnt, old):
    """The tasks with entries of an axis that learnt nothing, though their originals in `old` do.

    Originals are idle that no token reaches, or whose gradient is 0 for every input, as that of a
    bias of keys. No text has new tokens.
    """
    least = 1e-13 * max(x.abs().max() for x in old.values())
    for task in (t for t in plan.tasks if t.name in learnt and t.source in old):
        for axis, own in enumerate(axis_maps(plan, task)):
            excused = (rows(old[task.source], axis) <= least)[own.index]
            excused[len(excused) - own.extra :] = task.tensor.axes[axis] == "vocab"
            if ((rows(learnt[task.name], axis) == 0) & ~excused).any():
                yield task
                break


@pytest.mark.parametrize("model_type", ALL)
def test_every_row_learns(model_type):
    """A gradient of 0 before and after one step would leave a row as it is."""
    # an added layer's input differs from that of its original, and leaves a unit of ReLU idle
    smooth = {"feed_forward_proj": "gelu"} if model_type == "t5" else {}
    source = random_model(*ALL[model_type], **smooth)
    model = ModelSpec.of(source.config, type(source).__name__)
    how = grown_by(model, at_once(model))
    # at a smaller gain activations are so large that half of them are 0
    how |= {"identity_gain": 1.0} if "identity_gain" in how else {}
    grown = growkern.grow(source, **how)
    plan, old, learnt = grown.growth_plan, gradients(source), {}
    for step in range(3):
        for name, x in gradients(grown).items():
            learnt[name] = learnt.get(name, 0) + x.abs()
            grown.get_parameter(name).data -= 0.1 * x
        idle = [*idle_tensors(plan, learnt, old)] if step else []
        if step == 1:
            # an added layer's keys follow its outputs, and its queries the keys. A gain follows the
            # matrix below, which follows the rows of a tied head
            idle = [t for t in idle if (t.tensor.stack, t.tensor.layer) not in plan.inserted]
            idle = [t for t in idle if not t.tensor.norm or t.tensor.norm[1] != "stream"]
        assert not idle, [task.name for task in idle]
