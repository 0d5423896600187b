"""The plan's words where they were once wrong: each case is compared with Hugging Face itself."""

import pytest
import torch
import transformers

import growkern
from tests.growth.models import BERT, GPT2, LLAMA, random_model, relative_error
from tests.growth.plan.test_families import T5

EXACT = 1e-12


@pytest.mark.parametrize("heads", [6, 7])
def test_layers_that_share_a_relative_bias_share_the_paper_s_head_map(heads):
    source = random_model("T5ForConditionalGeneration", T5, num_layers=3)
    grown = growkern.grow(source, num_heads=heads, scheme="paper", seed=1)
    assert grown.growth_plan.exact
    assert relative_error(source, grown) <= EXACT
    # units that no tensor shares are still drawn per layer
    wider = growkern.plan(source, d_ff=60, scheme="paper", seed=1)
    first, second = (wider.layout.space("ffn", f"encoder.{layer}").read_index for layer in (0, 1))
    assert not first.equal(second)


@pytest.mark.parametrize("class_name", ["ElectraModel", "ElectraForMaskedLM"])
def test_a_target_without_a_tensor_of_the_source_is_refused(class_name):
    sizes = {**BERT, "hidden_size": 8, "num_attention_heads": 2, "embedding_size": 16}
    source = random_model(class_name, sizes)
    with pytest.raises(growkern.GrowthError, match=r"no .*embeddings_project\.weight: it exists"):
        growkern.plan(source, hidden_size=16)
    grown = growkern.grow(source, hidden_size=24)
    assert grown.growth_plan.exact and relative_error(source, grown) <= EXACT
    # random weights take nothing over
    growkern.plan(source, hidden_size=16, method="random")


def test_a_class_with_other_tensors_than_the_table_is_refused(monkeypatch):
    source = random_model("BertModel", BERT)
    attention = transformers.models.bert.modeling_bert.BertSelfAttention
    init = attention.__init__

    def with_one_more(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.num_attention_heads > BERT["num_attention_heads"]:
            self.gate = torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(attention, "__init__", with_one_more)
    with pytest.raises(growkern.GrowthError, match=r"BertModel: no rule for tensor .*gate"):
        growkern.grow(source, hidden_size=24)


GENERATING = [
    ("GPT2LMHeadModel", GPT2, {"n_embd": 20}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 24, "symmetry": "split"}),
    ("T5ForConditionalGeneration", T5, {"d_model": 20}),
    ("BertModel", BERT, {"hidden_size": 24}),
]


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("class_name, sizes, how", GENERATING)
def test_both_ways_to_grow_write_the_same_bytes(class_name, sizes, how, has_own, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    source = random_model(class_name, sizes, dtype=torch.float32)
    if has_own and source.can_generate():
        source.generation_config.update(
            repetition_penalty=1.3, eos_token_id=[1, 2], suppress_tokens=[7], max_new_tokens=5
        )
    source.save_pretrained(small)
    if not has_own:
        (small / "generation_config.json").unlink(missing_ok=True)
    growkern.grow_checkpoint(small, large, progress=False, **how)
    written = {file.name: file.read_bytes() for file in large.iterdir()}
    for name, given in (("model", type(source).from_pretrained(small)), ("directory", small)):
        growkern.grow(given, **how).save_pretrained(tmp_path / name)
        saved = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        assert written.keys() - saved.keys() == {"lineage.json", "checksums.json"}
        assert saved == {file: written[file] for file in saved}
    if has_own and source.can_generate():
        assert b'"repetition_penalty": 1.3' in written["generation_config.json"]
