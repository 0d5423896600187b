"""Each table predicts every key and shape of the real model, with all sizes different."""

import dataclasses
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.families.spec import holds
from growkern.families.table_files import load_family, parse_family, supported_families
from growkern.files import parse_toml
from testbed.families import FAMILIES
from testbed.models import BERT
from testbed.relatives import RELATIVES

UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
LABELS = {"num_labels": 7}
# of families with tables of their own: flags that decide which tensors there are
FLAGS = {
    "bart": {"decoder_layers": 3, **UNTIED},
    "bert": {"type_vocab_size": 5, **UNTIED},
    "electra": {"embedding_size": 12, **UNTIED},
    "gemma2": BIASES,
    "gemma3_text": BIASES,
    "gpt2": {"n_inner": 33, **UNTIED},
    "gpt_neox": {"attention_bias": False, **TIED},
    "llama": {"attention_bias": False, "mlp_bias": False, **TIED},
    "mistral": BIASES,
    "modernbert": {**BIASES, "norm_bias": True, "classifier_bias": True, **UNTIED},
    "olmo2": {"head_dim": 4, **BIASES, **TIED},
    "phi3": {"head_dim": 4, **BIASES, **TIED},
    "qwen2": {"head_dim": 4, **BIASES, **TIED},
    "qwen3": {**BIASES, **TIED},
    "roberta": UNTIED,
    "t5": {
        **{"num_heads": 5, "num_decoder_layers": 3, "relative_attention_num_buckets": 9},
        **{"feed_forward_proj": "gated-gelu", **UNTIED},
    },
}
CASES = [
    *((m, {**LABELS, **sizes}, {}) for m, (_, sizes) in FAMILIES.items()),
    *((m, {**LABELS, **sizes}, FLAGS[m]) for m, (_, sizes) in FAMILIES.items()),
    *((m, {**LABELS, **sizes}, TIED) for m, (_, sizes, _) in RELATIVES.items()),
    *((m, {**LABELS, **sizes, **more}, UNTIED) for m, (_, sizes, more) in RELATIVES.items()),
]


@pytest.mark.parametrize("model_type, sizes, options", CASES)
def test_table_predicts_every_tensor_shape_and_tie(model_type, sizes, options):
    family = load_family(model_type)
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **options})
    for class_name in family.classes:
        with torch.device("meta"):
            model = getattr(transformers, class_name)(config)
        actual = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        spec = ModelSpec(family, config, class_name)
        assert spec.shapes == actual, class_name
        assert spec.ties == dict(model.all_tied_weights_keys), class_name


def test_every_table_is_covered():
    assert {case[0] for case in CASES} == set(supported_families())


# names of the base class that older versions used, and classes that number their layers
LEFT_OUT = {"BartPretrainedModel", "PretrainedBartModel"}
LEFT_OUT |= {"Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone"}
LEFT_OUT |= {"BeitBackbone", "BeitForSemanticSegmentation", "T5GemmaEncoderModel"}


@pytest.mark.parametrize("model_type", supported_families())
def test_every_class_of_a_family_has_its_row(model_type):
    config_class = type(transformers.AutoConfig.for_model(model_type))
    module = config_class.__module__.replace("configuration", "modeling")
    classes = inspect.getmembers(importlib.import_module(module), inspect.isclass)
    public = {
        name
        for name, model_class in classes
        if issubclass(model_class, transformers.PreTrainedModel)
        and model_class.config_class is config_class
        and hasattr(transformers, name)
        and not name.endswith("PreTrainedModel")
    }
    assert public - LEFT_OUT == load_family(model_type).classes.keys()


@pytest.mark.parametrize("model_type", supported_families())
def test_a_class_knows_the_sizes_its_tensors_have(model_type):
    """Each size alone, one more: shapes change if and only if the class has that size."""
    family = load_family(model_type)
    _, sizes, options = next(case for case in CASES if case[0] == model_type)
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **options})
    for class_name in family.classes:
        whole, own = ModelSpec(family, config, class_name), ModelSpec.of(config, class_name)
        assert own.shapes == whole.shapes
        # others are quotients by these, which a larger number may not divide
        below = {size.default.split()[2] for size in family.config.values() if "/" in size.factors}
        fields = {key: size.field for key, size in family.config.items() if size.field}
        for key in (key for key, field in fields.items() if field not in below):
            other = transformers.AutoConfig.for_model(model_type, **{**sizes, **options})
            field = family.config_field(key)
            place = other if field.startswith(".") else family.text(other)
            size = dataclasses.replace(family.config[key], field=field.removeprefix("."), plus=0)
            # a class that computes tensors must be built, so its heads must fit
            size.put(place, whole.size(key) + (whole.size(key) if family.computes else 4))
            moves = whole.with_config(other).shapes != whole.shapes
            # a head count that divides the stream changes no shape, nor do experts that are chosen
            used = own.family
            routed = (key for space in used.mixtures for key in (space.chosen, *space.groups))
            shapeless = {*used.query_heads, *routed}
            assert moves <= (key in used.config), (class_name, key)
            assert moves or key in shapeless or key not in used.growable, (class_name, key)


def bert_table():
    from importlib import resources

    return parse_toml((resources.files("growkern.families") / "bert.toml").read_text())


def bert_with(path, value):
    """The table of BERT with another value at this path."""
    table = inner = bert_table()
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
    return table


@pytest.mark.parametrize(
    "path, message",
    [
        (("tensorz",), "unknown key 'tensorz'; did you mean 'tensors'"),
        (("norm", "epsilon"), "epsilon"),
        (("spaces", "stream", "kinds"), "kinds"),
        (("tensors", "trunk", "pooler", "axis"), "axis"),
        (("classes", "BertModel", "bodies"), "bodies"),
    ],
)
def test_unknown_keys_are_refused(path, message):
    with pytest.raises(GrowthError, match=message):
        parse_family("bert.toml", bert_with(path, 1))


@pytest.mark.parametrize(
    "path",
    [
        *(("model_type",), ("norm",), ("norm", "kind"), ("classes",), ("config",), ("depth",)),
        *(("attention",), ("spaces", "ffn", "kind"), ("classes", "BertModel")),
    ],
    ids=".".join,
)
def test_an_empty_list_removes_no_part_that_a_family_needs(path):
    with pytest.raises(GrowthError, match=rf"bert.toml.{'.'.join(path)}: \[\] must be a t"):
        parse_family("bert.toml", bert_with(path, []))


@pytest.mark.parametrize(
    "path, value",
    [
        (("norm", "kind"), "batchnorm"),
        (("norm", "placement"), "middle"),
        (("spaces", "ffn", "kind"), "unit"),
        (("spaces", "q", "part"), "keys"),
        (("attention", "positions"), "rotory"),
        (("tensors", "trunk", "embeddings.LayerNorm", "extra"), "cary"),
    ],
)
def test_unknown_values_are_refused(path, value):
    with pytest.raises(GrowthError, match=f"'{value}'; (did you mean|allowed)"):
        parse_family("bert.toml", bert_with(path, value))


def test_a_head_has_parts_one_after_another():
    table = bert_table()
    table["spaces"]["q"]["part"] = "query|keys"
    with pytest.raises(GrowthError, match="'keys'; did you mean 'key'"):
        parse_family("bert.toml", table)
    table["spaces"]["q"]["part"] = "query|key"
    family = parse_family("bert.toml", table)
    model = ModelSpec(family, transformers.BertConfig(**BERT), "BertModel")
    assert model.space_size("q") == 24


def test_undefined_stack_is_refused():
    with pytest.raises(GrowthError, match="BertModel uses 'decoder'"):
        parse_family("bert.toml", bert_with(("classes", "BertModel", "stacks"), ["decoder"]))


def test_undefined_space_is_refused():
    path = ("tensors", "trunk", "embeddings.word_embeddings.weight", "axes")
    with pytest.raises(GrowthError, match="did you mean 'stream'"):
        parse_family("bert.toml", bert_with(path, ["vocab", "write:strem"]))


def test_an_unknown_family_is_told_the_nearest_name():
    with pytest.raises(GrowthError, match=r"'mamba' .*'mamba2'"):
        load_family("mamba")


def test_unknown_class_and_refused_config():
    config = transformers.BertConfig(**BERT)
    with pytest.raises(GrowthError, match="BertForMaskedLM"):
        ModelSpec.of(config, "BertForSpeech")
    config.add_cross_attention = True
    with pytest.raises(GrowthError, match="cross-attention"):
        ModelSpec.of(config, "BertForMaskedLM")


def test_a_flag_may_hold_where_a_config_has_none():
    flags = [SimpleNamespace(), SimpleNamespace(flag=False), SimpleNamespace(flag=True)]
    assert [holds("?flag", config) for config in flags] == [True, False, True]
    assert [holds("flag", config) for config in flags] == [False, False, True]
    assert [holds("!flag", config) for config in flags] == [True, True, False]


@pytest.mark.parametrize("name", [n for n in supported_families() if load_family(n).texts])
def test_a_text_of_another_model_is_refused(name):
    family = load_family(name)
    for kind in ("opt", *family.texts):
        config = SimpleNamespace(model_type=kind)
        whole = SimpleNamespace(model_type=name, **{family.under: config})
        model = ModelSpec(family, whole, [*family.classes][-1])
        if kind == "opt":
            with pytest.raises(GrowthError, match="covers a text of"):
                model.check_text()
        else:
            model.check_text()
