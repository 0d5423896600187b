"""A table of one's own: torchtitan's names of Llama, a model without a class in transformers.

The truth is a plain PyTorch model with these names, which knows nothing of transformers.
"""

import copy
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import growkern
from growkern.errors import TableError
from growkern.families.table_files import load_family, own_family, read_family, shipped_table
from growkern.growth.own_table import check_table, growths_of
from testbed.families import FAMILIES
from testbed.models import GROUPED, LLAMA, random_model, relative_error
from testbed.relatives import GEMMA4_SMALL, RELATIVES
from tests.shared import walks

CONFIG = {
    **GROUPED,
    **{"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]},
    **{"hidden_size": 24, "intermediate_size": 20, "head_dim": 6, "dtype": "float64"},
    **{"rms_norm_eps": 1e-3, "rope_theta": 500.0, "tie_word_embeddings": False},
}
TRUNK = """
"embed_tokens.weight" = { stored = "tok_embeddings.weight" }
"layers.{l}.input_layernorm" = { stored = "layers.{l}.attention_norm" }
"layers.{l}.self_attn.q_proj.weight" = { stored = "layers.{l}.attention.wq.weight" }
"layers.{l}.self_attn.k_proj.weight" = { stored = "layers.{l}.attention.wk.weight" }
"layers.{l}.self_attn.v_proj.weight" = { stored = "layers.{l}.attention.wv.weight" }
"layers.{l}.self_attn.o_proj.weight" = { stored = "layers.{l}.attention.wo.weight" }
"layers.{l}.post_attention_layernorm" = { stored = "layers.{l}.ffn_norm" }
"layers.{l}.mlp.gate_proj.weight" = { stored = "layers.{l}.feed_forward.w1.weight" }
"layers.{l}.mlp.up_proj.weight" = { stored = "layers.{l}.feed_forward.w3.weight" }
"layers.{l}.mlp.down_proj.weight" = { stored = "layers.{l}.feed_forward.w2.weight" }
norm = { stored = "norm" }
"""
TABLE = f"""
extends = "ernie4_5"
model_type = "ernie4_5"
[tensors.trunk]{TRUNK}
[tensors.lm]
"lm_head.weight" = {{ stored = "output.weight" }}
"""


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.size, inner = c["head_dim"], c["num_attention_heads"] * c["head_dim"]
        kv = c["num_key_value_heads"] * c["head_dim"]
        self.wq = nn.Linear(c["hidden_size"], inner, False)
        self.wo = nn.Linear(inner, c["hidden_size"], False)
        self.wk, self.wv = (nn.Linear(c["hidden_size"], kv, False) for _ in range(2))

    def forward(self, x, turn):
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in self._inputs())
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for y in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def _inputs(self):
        return self.wq, self.wk, self.wv


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1 = nn.Linear(c["hidden_size"], c["intermediate_size"], False)
        self.w3 = nn.Linear(c["hidden_size"], c["intermediate_size"], False)
        self.w2 = nn.Linear(c["intermediate_size"], c["hidden_size"], False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.ffn_norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, turn):
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c["num_hidden_layers"])})
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.output = nn.Linear(c["hidden_size"], c["vocab_size"], False)

    def forward(self, tokens):
        size, theta = self.config["head_dim"], self.config["rope_theta"]
        angles = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        turn = torch.outer(torch.arange(tokens.shape[1]), angles)
        turn = torch.polar(torch.ones_like(turn), turn)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, turn)
        return self.output(self.norm(x))


def loaded(directory):
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    model = Titan(config).double()
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """small/, a model of random weights, table.toml, and large/, grown from it."""
    place = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    model = Titan(CONFIG).double()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.4 * noise if parameter.ndim == 1 else 0.3 * noise
    (place / "small").mkdir()
    save_file(model.state_dict(), place / "small" / "model.safetensors")
    config = {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    (place / "small" / "config.json").write_text(json.dumps(config))
    (place / "table.toml").write_text(TABLE)
    how = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12}
    how |= {"num_hidden_layers": 3, "intermediate_size": 33, "progress": False}
    growkern.grow_checkpoint(place / "small", place / "large", family=place / "table.toml", **how)
    # as on another machine
    (place / "table.toml").rename(place / "gone.toml")
    return place


def test_the_grown_files_have_the_models_own_names_and_function(place):
    tokens = torch.arange(24).reshape(2, 12) % 50
    small, large = loaded(place / "small")(tokens), loaded(place / "large")(tokens)
    assert (small - large).abs().max() < 1e-12 * small.abs().max()


def test_the_record_has_the_table(place):
    assert growkern.verify(place / "small", place / "large").ok
    # a grown model grows again, by its record
    assert growkern.plan(place / "large", num_hidden_layers=4).exact


def test_what_is_called_exact_depends_on_a_given_table(place):
    condition = "if the given table is right"
    plan = growkern.plan(place / "small", family=place / "gone.toml", hidden_size=48)
    record = json.loads((place / "large" / "lineage.json").read_text())
    card = re.findall("^- exact: .*", (place / "large" / "README.md").read_text(), re.M)
    assert str(plan).startswith(f"exact {condition}: ") and "draft SRC --table" in str(plan)
    assert plan.condition == record["condition"] == condition
    said = [*plan.to_dict()["findings"], *record["findings"]]
    assert all(condition in line for line in [*card, *(f["why"] for f in said)]) and card
    shipped = random_model("LlamaForCausalLM", LLAMA)
    assert not growkern.plan(shipped, num_hidden_layers=4).condition


def test_a_changed_table_in_a_record_is_refused(place, tmp_path):
    shutil.copytree(place / "large", tmp_path / "large")
    file = tmp_path / "large" / "lineage.json"
    file.write_text(file.read_text().replace('"adjacent"', '"halves"'))
    with pytest.raises(growkern.GrowthError, match="family_table was changed since the growth"):
        growkern.plan(tmp_path / "large", num_hidden_layers=4)


def test_a_model_in_memory_takes_a_table_too(place):
    grown = growkern.grow(place / "small", family=place / "gone.toml", hidden_size=48)
    assert growkern.verify(place / "small", grown).ok
    # the next growth knows it
    assert growkern.plan(grown, num_hidden_layers=3).small.family.table


def test_distributed_checkpoints_have_the_names_of_the_table(place, tmp_path):
    from torch.distributed import checkpoint

    state = load_file(place / "small" / "model.safetensors")
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copy(place / "small" / "config.json", tmp_path / "dcp")
    how = {"family": place / "gone.toml", "hidden_size": 48}
    one, other = (growkern.grow(d, **how) for d in (place / "small", tmp_path / "dcp"))
    other = other.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in one.state_dict().items())


def test_check_finds_a_table_with_the_wrong_pairs(place, tmp_path):
    table = tmp_path / "table.toml"
    attention = '[attention]\npositions = "rotary"\nscale = "head_dim"\n[tensors.trunk]'
    table.write_text(TABLE.replace("[tensors.trunk]", attention))
    report = check_table(table, place / "small")
    assert not report.verified and not report.faults
    wrong = [growth.sizes for growth in report.growths if growth.verdict == "wrong"]
    assert wrong == ["head_dim 6 -> 12"]
    exact = " ".join(growth.sizes for growth in report.growths if growth.verdict == "exact")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        assert name in exact


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (
            'embed_tokens.weight"',
            'embed.weight"',
            r"gives model.embed.* = \[\]\).*'model.embed_tok",
        ),
        (
            'norm = { stored = "norm" }',
            "norm = []",
            r'to \[tensors.trunk\], .*: "norm" = { norm = "stream>normed" }$',
        ),
        (
            '{ stored = "layers.{l}.attention.wk.weight" }',
            '{ axes = ["write:q", "read:normed"] }',
            r"k_proj.weight', axes \[write:q, read:normed\], gives \[24, 24\], but .* \[12, 24\]",
        ),
        (
            '"layers.{l}.self_attn.k_proj.weight" = { stored',
            '"layers.{l}.self_attn.k_proj.weight" = []\nx = { stored',
            r': "layers.{l}.self_attn.k_proj.weight" = { axes = \["write:k", "read:normed"\] }$',
        ),
        ("wv.weight", "wV.weight", "v_proj.weight, .*wV.weight in files, is missing"),
        (
            "[tensors.trunk]",
            '[config]\nffn = "ffn_size"\n[tensors.trunk]',
            "config.ffn: a ernie4_5 has no field 'ffn_size'; did you mean",
        ),
        (
            "[tensors.trunk]",
            '[config]\nffn = "to_dict"\n[tensors.trunk]',
            "config.ffn: to_dict=<.*> of a ernie4_5 is no size: name another field",
        ),
    ],
)
def test_check_names_what_differs_from_the_model(place, tmp_path, before, after, fault):
    table = tmp_path / "table.toml"
    table.write_text(TABLE.replace(before, after, 1))
    found = check_table(table, place / "small").faults
    assert any(re.search(fault, line) for line in found), found
    with pytest.raises(growkern.GrowthError):
        growkern.plan(place / "small", family=table, hidden_size=48)


def test_a_tensor_of_the_last_layer_alone_gets_such_a_row(tmp_path):
    config = transformers.GPTNeoXJapaneseConfig(num_hidden_layers=3)
    table = shipped_table("gpt_neox") | {"model_type": config.model_type}
    table |= {"config": {**table["config"], "ffn": 10240}, "classes": {}}
    table["classes"]["GPTNeoXJapaneseForCausalLM"] = {
        "body": ["trunk"],
        "prefix": "gpt_neox_japanese.",
    }
    config.save_pretrained(tmp_path)
    found = check_table(own_family("mine", table), tmp_path).faults
    assert any('dense_bias" = { axes = ["write:stream"], only = "last" }' in x for x in found)


def test_a_class_of_ones_own_is_sent_to_widen(place, tmp_path):
    table = tmp_path / "table.toml"
    table.write_text(TABLE + '[classes]\nOwnModel = { body = ["trunk"] }\n')
    (fault,) = check_table(table, place / "small").faults
    assert re.search("classes.OwnModel: no class of .*widen", fault)

    own = type("OwnConfig", (transformers.LlamaConfig,), {"model_type": "own"})
    own().save_pretrained(tmp_path)
    for given, fault in [
        (own(architectures=["OwnModel"]), r"^OwnModel is no class .*; growkern\.widen"),
        (tmp_path, r"has no model_type 'own'.*growkern\.widen"),
        (3, "config is an int: give a config of transformers"),
    ]:
        with pytest.raises(growkern.GrowthError, match=fault):
            growkern.draft_family(given)


def test_a_wrong_table_gets_one_line_per_fault(tmp_path):
    table = tmp_path / "table.toml"
    wrong = '[norm]\nkind = "rms"\n[spaces]\nq = { kind = "heads", haeds = "x" }\n[tensors.trunk]'
    table.write_text(TABLE.replace("[tensors.trunk]", wrong).replace('"tok_em', '3 # "tok_em'))
    with pytest.raises(growkern.GrowthError, match="no TOML"):
        read_family(table)
    wrong = wrong.replace("[spaces]", "[refuse]\nx = true\n[spaces]")
    table.write_text(TABLE.replace("[tensors.trunk]", wrong).replace('"norm" }', "3 }"))
    with pytest.raises(TableError) as refused:
        read_family(table)
    lines = "\n".join(refused.value.faults).replace(str(table), "T")
    assert lines.splitlines() == [
        "T.norm.kind: 'rms'; did you mean 'rmsnorm'?",
        "T.norm: no 'placement': add it, one of pre, post, sandwich, output",
        "T.norm: no 'eps': add it",
        "T.spaces.q: unknown key 'haeds'; did you mean 'heads'?",
        "T.tensors.trunk.norm.stored: 3 must be a text",
        'T.refuse.x: True must be a table, such as { value = V, why = "..." }',
    ]


def test_a_table_of_a_config_within_another(tmp_path):
    class_name, sizes, _ = RELATIVES["mistral3"]
    config = transformers.Mistral3Config(**sizes, architectures=[class_name])
    config.save_pretrained(tmp_path)
    table = tmp_path / "table.toml"
    table.write_text('extends = "mistral3"\nmodel_type = "mistral3"\n')
    plan = growkern.plan(tmp_path, num_hidden_layers=6, family=table)
    assert plan.large.shapes == growkern.plan(tmp_path, num_hidden_layers=6).large.shapes
    table.write_text(table.read_text() + 'under = "txt_config"\n')
    with pytest.raises(TableError, match=r"a mistral3 has no field 'txt_config'.*text_config"):
        growkern.plan(tmp_path, num_hidden_layers=6, family=table)


def checked(model_type, break_it, tmp_path):
    """The report on a shipped table, as a table of one's own, that was broken."""
    class_name, sizes = {**FAMILIES, **RELATIVES}[model_type][:2]
    config = getattr(transformers, class_name).config_class(**sizes, architectures=[class_name])
    config.save_pretrained(tmp_path)
    table = copy.deepcopy(shipped_table(model_type))
    break_it(table)
    return check_table(own_family("mine.toml", table), tmp_path)


def test_a_right_table_of_a_mixture_with_groups_is_right(tmp_path):
    report = checked("glm4_moe", lambda table: None, tmp_path)
    assert report.verified and not report.faults
    assert sum(growth.verdict == "exact" for growth in report.growths) > 12


def test_the_tiny_model_has_layers_of_every_kind_and_what_they_borrow():
    """Kinds that do not repeat, as the defaults of 35 layers of Gemma 4, whose last one is full."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    sizes = {**GEMMA4_SMALL, "num_hidden_layers": 8, "layer_types": [*kinds, *kinds, *kinds[1:]]}
    config = transformers.Gemma4TextConfig(**sizes | {"num_kv_shared_layers": 5})
    family = load_family("gemma4_text")
    [growth] = growths_of(family, config, "Gemma4ForCausalLM", ["num_hidden_layers"])
    assert (growth.sizes, growth.verdict) == ("num_hidden_layers 6 -> 7", "exact")


def of(part, name, axes):
    return lambda table: table["tensors"][part].update({name: {"axes": axes}})


@pytest.mark.parametrize(
    ("model_type", "break_it"),
    [
        # head_dim has no field: heads stay in place
        ("gpt_neox", lambda table: table["attention"].update(pairs="adjacent")),
        # angles that are stored, and that a class computes for heads of another size
        ("esm", lambda table: table["attention"].update(pairs="adjacent")),
        ("roformer", lambda table: table["attention"].update(pairs="halves")),
        # uneven sizes of a LayerNorm behind an embedding change the outputs anyway
        ("modernbert", of("trunk", "layers.{l}.attn.Wqkv.weight", ["write:q|k|v", "read:stream"])),
        # a norm that no growth makes exact
        ("gemma2", lambda table: table["norm"].update(kind="layernorm_without_bias")),
        # another class than that of the config
        ("llama", of("classifier", "score.weight", ["labels", "read:stream"])),
    ],
)
def test_check_finds_what_an_even_growth_hides(model_type, break_it, tmp_path):
    report = checked(model_type, break_it, tmp_path)
    assert not report.verified and not report.faults


# tiny models of these once did not run: a share of a head turns, a config lies within another,
# sizes of layers follow from the hidden size, and a class takes a number in place of a list
ODD = ("mistral4", "kimi_k25", "bamba", "mamba2", "longformer", "deepseek_v32")
SOME = [*RELATIVES] if walks.times > 1 else [*dict.fromkeys([*ODD, *[*RELATIVES][::20]])]


@pytest.mark.parametrize("model_type", SOME)
def test_check_calls_no_shipped_table_wrong(model_type):
    kind, sizes, _ = RELATIVES[model_type]
    family, config = load_family(model_type), random_model(kind, sizes).config
    growths = [*growths_of(family, config, kind, [family.config_field("stream")])]
    wrong = [growth for growth in growths if growth.verdict == "wrong"]
    assert not wrong and (growths or "stream" not in family.growable)


def test_check_names_a_list_with_an_entry_for_each_layer(tmp_path):
    report = checked("cohere2", lambda table: table.pop("per_layer"), tmp_path)
    assert any("layer_types" in fault and "per_layer" in fault for fault in report.faults)


def test_a_table_may_call_the_size_of_its_ffn_by_any_name(tmp_path):
    def rename(table):
        table["config"]["units"] = table["config"].pop("ffn")
        table["spaces"]["ffn"]["size"] = "units"

    assert checked("bert", rename, tmp_path).verified


def test_names_of_experts_in_files_begin_as_the_table_says(tmp_path):
    class_name, sizes, _ = RELATIVES["qwen3_5_moe_text"]
    (tmp_path / "mine.toml").write_text(
        'extends = "qwen3_5_moe_text"\nmodel_type = "qwen3_5_moe_text"\n[classes]\n'
        f'{class_name} = {{ prefix = "model.", body = ["trunk"], heads = ["lm"], '
        'files = { "model.language_model." = "model." } }\n'
    )
    random_model(class_name, sizes, dtype=torch.float32).save_pretrained(tmp_path / "small")
    how = {"family": tmp_path / "mine.toml", "hidden_size": 24, "progress": False}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", **how)
    body = {n for n in load_file(tmp_path / "large" / "model.safetensors") if "lm_head" not in n}
    assert any(".experts.0." in name for name in body)
    assert all(name.startswith("model.language_model.") for name in body)


def test_numbers_and_names_that_end_in_beta_are_copied(tmp_path):
    (tmp_path / "mine.toml").write_text("""extends = "qwen3"
model_type = "apertus"
per_layer = []
[config]
one = 1
head_dim = []
[older]
max_window_layers = []
[classes]
ApertusForCausalLM = { prefix = "model.", body = ["trunk"], heads = ["lm"] }
[tensors.trunk]
"layers.{l}.input_layernorm" = []
"layers.{l}.post_attention_layernorm" = []
"layers.{l}.mlp.gate_proj.weight" = []
"layers.{l}.attention_layernorm" = { norm = "stream>normed" }
"layers.{l}.feedforward_layernorm" = { norm = "stream>normed" }
"layers.{l}.mlp.act_fn.alpha_p" = { axes = ["one"] }
"layers.{l}.mlp.act_fn.alpha_n" = { axes = ["one"] }
"layers.{l}.mlp.act_fn.beta" = { axes = [] }
"layers.{l}.mlp.act_fn.eps" = { axes = [] }
""")
    sizes = {k: v for k, v in LLAMA.items() if not k.endswith("_bias")} | {"hidden_act": "xielu"}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3}
    model = random_model("ApertusForCausalLM", sizes, pad_token_id=0)
    model.save_pretrained(tmp_path / "small")
    how = {"family": tmp_path / "mine.toml", "hidden_size": 24, "num_hidden_layers": 3}
    grown = growkern.grow(tmp_path / "small", **how)
    assert relative_error(model, grown) < 1e-12
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", progress=False, **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok
