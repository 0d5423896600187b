"""Tables that derive themselves. Truth: the check, and the tables that were written by hand."""

from contextlib import nullcontext

import pytest
import transformers
from typer.testing import CliRunner

import bench.drafts
import growkern
from growkern.cli.commands import app
from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.families.table_files import load_family, parse_family
from growkern.files import parse_toml
from growkern.growth.draft.family import DraftedFamily
from growkern.growth.own_table import SizeCheck, TableReport, check_table
from tests.shared import walks

# norms behind a block; and norms before it, with what a search finds
SOME = ("bert", "gpt_neox")
T5 = transformers.T5Config(architectures=["T5ForConditionalGeneration"])
# what only a search finds: in BLOOM, ERNIE's mixture, Nomic BERT and RoFormer
MORE = (
    *("biogpt", "gemma2", "helium", "glm4_moe", "llama", "gpt2", "phi3", "olmo2", "electra"),
    *("gpt_oss", "qwen3_moe", "cohere2", "opt", "bloom", "ernie4_5_moe", "nomic_bert", "roformer"),
    *("bert-generation", "deepseek_v3", "deepseek_v32", "esm", "gpt_neo", "longformer"),
)
# the first or last layer has a row of its own
ROWS = transformers.OpenAIGPTConfig, transformers.ModernBertConfig, transformers.OPTConfig


@pytest.mark.parametrize("model_type", SOME + MORE if walks.times > 1 else SOME)
def test_a_draft_has_the_axes_of_the_table_by_hand(model_type):
    config = transformers.CONFIG_MAPPING[model_type](**bench.drafts.OWN.get(model_type, {}))
    drafted = growkern.draft_family(config)
    assert drafted.verified, drafted.toml
    name = next(reversed(drafted.content["classes"]))
    # of the sizes that models have
    specs = [
        ModelSpec.of(config, name, family)
        for family in (parse_family("draft", drafted.content), load_family(model_type))
    ]
    mine, theirs = ({t.name: t for t in spec.tensors} for spec in specs)
    assert mine.keys() == theirs.keys()
    assert specs[0].shapes == specs[1].shapes
    # whether a model rounds its own factor counts in 16 bits alone, where no check runs
    assert {n: t.row.scale for n, t in mine.items()} == {n: t.row.scale for n, t in theirs.items()}
    assert {n: t.tied for n, t in mine.items()} == {n: t.tied for n, t in theirs.items()}


@pytest.mark.parametrize("config", [transformers.AXK1Config(), transformers.MiniCPM3Config()])
def test_norms_behind_some_blocks_and_factors_that_follow_sizes_are_drafted(config):
    drafted = growkern.draft_family(config)
    assert drafted.verified and {"hidden_size", "num_hidden_layers"}.isdisjoint(drafted.refused)


def test_a_value_of_what_the_config_left_out_is_refused():
    family = parse_family("draft", growkern.draft_family(transformers.OlmoConfig()).content)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    for clip in (None, 0.3):
        config = transformers.OlmoConfig(
            **sizes, intermediate_size=48, vocab_size=64, clip_qkv=clip
        )
        source = transformers.OlmoForCausalLM(config)
        with pytest.raises(GrowthError, match=r"clip_qkv=0\.3") if clip else nullcontext():
            growkern.plan(source, hidden_size=64, family=family)


def test_the_command_writes_a_table_that_grows_the_model(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    table = tmp_path / "my.toml"
    done = CliRunner().invoke(app, ["family", "draft", str(tmp_path), "-o", str(table)])
    assert done.exit_code == 0, done.output
    # a config without weights, and without "architectures"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert growkern.plan(tmp_path, family=table, hidden_size=48, num_hidden_layers=3).exact


@pytest.mark.parametrize(
    "config",
    [
        # its class computes a size that is null; the others have no tensors of a size that is 0
        transformers.GPT2Config(),
        transformers.DebertaV2Config(type_vocab_size=0),
        transformers.GraniteMoeSharedConfig(shared_intermediate_size=0),
        # growth reads the values that its weights stand for
        transformers.LlamaConfig(quantization_config={"quant_method": "fp8"}),
    ],
)
def test_whoever_drafts_a_table_can_plan_at_once(config, tmp_path):
    drafted = growkern.draft_family(config)
    config.architectures = [next(reversed(drafted.content["classes"]))]
    config.save_pretrained(tmp_path)
    (tmp_path / "my.toml").write_text(drafted.toml)
    plan = growkern.plan(tmp_path, family=tmp_path / "my.toml", num_hidden_layers=40)
    assert drafted.verified
    assert ("fp8" in drafted.toml) is ("fp8" in plan.needs)
    assert "fp8" not in plan.needs or check_table(tmp_path / "my.toml", tmp_path).verified


@pytest.mark.parametrize("kind", ROWS)
def test_the_table_that_was_checked_is_the_one_in_the_file(kind, tmp_path):
    drafted = growkern.draft_family(config := kind(do_layer_norm_before=False))
    assert any(isinstance(row, list) for row in drafted.content["tensors"]["trunk"].values())
    config.architectures = [next(reversed(drafted.content["classes"]))]
    config.save_pretrained(tmp_path)
    (tmp_path / "my.toml").write_text(drafted.toml)
    assert growkern.plan(tmp_path, family=tmp_path / "my.toml", vocab_size=64_000)
    assert drafted.verified and parse_toml(drafted.toml) == drafted.content


def test_a_flag_that_the_draft_does_not_cover_is_refused():
    # its gated FFN needs tensors that this config does not have
    drafted = growkern.draft_family(transformers.StableLmConfig(qk_layernorm=False))
    assert drafted.verified
    assert drafted.content["refuse"]["qk_layernorm"]["value"] is True


def test_a_draft_says_which_sizes_it_grew_and_which_it_refused():
    """A size that grew evenly alone counts as grown; one that never grew does not."""
    said = (
        ("width 4 -> 8", "exact", ""),
        ("width 4 -> 6", "approximate", ""),
        ("width 4 -> 8, heads 2", "refused", "of both"),
        ("keys 2 -> 4", "exact", ""),
        ("keys 2 -> 3", "refused", "no multiple"),
        ("heads 4 -> 8", "refused", "shape [4]"),
        ("heads 4 -> 6", "refused", "shape\n\x1b[4]"),
    )
    checks = tuple(SizeCheck(n, v, why=why) for n, v, why in said)
    report = TableReport((), checks)
    assert not TableReport((), checks[1:3]).verified
    drafted = DraftedFamily({"classes": {"A": {}}, "tensors": {"lm": {}}}, report, ())
    assert drafted.verified and drafted.refused == {"heads": "shape \x1b[4]"}
    assert parse_toml(drafted.toml) == drafted.content
    notes = ("# exact in: keys", "# approximate in: width", "# refused: heads: shape [4]")
    assert {*notes} < {*drafted.toml.splitlines()}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            transformers.MambaConfig(),
            r"\(Mamba 1\) \(.*x_proj.* \[80, 1536\]\); nearest: .* --table",
        ),
        (T5, "t5 has a table: it needs no draft: growkern plan"),
        # several texts
        (transformers.MusicgenConfig(), "holds others, text_encoder, .* nearest: "),
        (transformers.TapasConfig(), r"small models fail: .*, in `.*embeddings_0\.weight \[3, "),
        (transformers.MvpConfig(), r"k_proj\.weight \[.*: 0 lists of layers.* nearest: bart"),
        # towers for images are not near
        (transformers.FlaubertConfig(), r"layer_norm1.*\[2048\].* nearest: distilbert"),
        # the class's own error, and the line of its code
        (transformers.Qwen4ExpTextConfig(), "its config makes no .*, in `self.block_topk"),
        (transformers.GotOcr2Config(), r"pos_embed \[.* nearest: qwen2 .*get_decoder"),
        (transformers.HYV4Config(), r"input_norm \[\]: HYV4.* computes none of .* nearest: "),
        (transformers.DiffLlamaConfig(), r"groupnorm \[\]: a norm .*lambda_k1 \(.* nearest: "),
        (transformers.MraConfig(), r"positions.* has \[514, 768\]; .* nearest: "),
        (transformers.OPTConfig(word_embed_proj_dim=512), r"proj_dim=512: not .*: opt .*--table"),
        (transformers.RemBertConfig(), r"word_embeddings\.weight \[100, 256\]: .* nearest: bert"),
    ],
)
def test_what_fits_no_rule_is_named_with_the_nearest_table(config, what):
    with pytest.raises(growkern.GrowthError, match=what):
        growkern.draft_family(config)
