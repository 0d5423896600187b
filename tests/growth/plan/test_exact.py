"""The grown model computes what the source computes: float64, against Hugging Face itself."""

import pytest
import torch

import growkern
from testbed.families import T5
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model, relative_error

EXACT = 1e-12

GQA = {"num_attention_heads": 10, "num_key_value_heads": 5}


@pytest.mark.parametrize(
    "class_name, sizes, growth",
    [
        ("BertForMaskedLM", BERT, {"hidden_size": 24}),
        ("GPT2LMHeadModel", GPT2, {"n_embd": 24}),
        ("LlamaForCausalLM", LLAMA, {"hidden_size": 20, **GQA}),
    ],
)
def test_random_balanced_maps_are_exact_too(class_name, sizes, growth):
    source = random_model(class_name, sizes)
    grown = growkern.grow(source, maps="balanced", seed=3, **growth)
    assert relative_error(source, grown) <= EXACT


def test_identity_blocks_of_a_post_norm_model_with_a_large_eps_are_called_approximate():
    source = random_model("BertForMaskedLM", BERT, layer_norm_eps=1e-9)
    assert not growkern.plan(source, depth="identity", num_hidden_layers=4).exact
    source = random_model("BertForMaskedLM", BERT, layer_norm_eps=1e-5)
    grown = growkern.grow(source, depth="identity", num_hidden_layers=4)
    assert not grown.growth_plan.exact
    # eps (1/var - 1) per norm
    assert 1e-8 < relative_error(source, grown) < 1e-3


@pytest.mark.parametrize("eps", [1e-12, 1e-7, 1e-5])
def test_a_small_gain_takes_the_eps_out_of_post_norm_identity_blocks(eps):
    source = random_model("BertForMaskedLM", BERT, layer_norm_eps=eps)
    how = {"depth": "identity", "num_hidden_layers": 5, "hidden_size": 24, "identity_gain": 1e-8}
    grown = growkern.grow(source, **how)
    assert grown.growth_plan.exact, grown.growth_plan.findings
    assert relative_error(source, grown) <= EXACT
    for gain in (0.0, 1.5, float("nan")):
        with pytest.raises(growkern.GrowthError, match="identity_gain"):
            growkern.plan(source, **{**how, "identity_gain": gain})


def test_carry_error_is_quadratic_and_naive_padding_is_far_worse():
    source = random_model("BertModel", BERT)
    sizes = {"hidden_size": 20, "intermediate_size": 40}
    coarse, fine, none = (
        relative_error(source, growkern.grow(source, carry=carry, **sizes))
        for carry in (1e-1, 1e-2, 0.0)
    )
    assert 80 < coarse / fine < 125
    assert none > 1e3 * coarse


@pytest.mark.parametrize(
    "config, growth, why",
    [
        ({}, {"intermediate_size": 22}, "must grow by at least 4"),
        ({"hidden_act": "tanh"}, {"intermediate_size": 40}, "'tanh'"),
        ({}, {"intermediate_size": 40, "carry": 0.0}, "carry=0"),
    ],
)
def test_where_the_mean_cannot_be_carried_the_plan_says_so(config, growth, why):
    source = random_model("BertModel", BERT, **config)
    grown = growkern.grow(source, hidden_size=20, **growth)
    assert any(why in finding.why for finding in grown.growth_plan.findings)
    # the mean of the biases only: visible, not catastrophic
    assert 1e-4 < relative_error(source, grown) < 0.6


def test_uneven_mlm_head_is_called_changed_and_its_encoder_is_not():
    source = random_model("BertForMaskedLM", BERT)
    grown = growkern.grow(source, hidden_size=20, intermediate_size=40, carry=1e-2)
    assert {f.what: f.level for f in grown.growth_plan.findings} == {
        "hidden_size 12 -> 20": "approximate",
        "MLM head": "changed",
    }
    assert relative_error(source, grown) > 1e-3
    source.bert.growth_plan = None
    hidden = outputs(source.bert)["last_hidden_state"]
    stream = grown.growth_plan.layout.space("stream")
    wide = outputs(grown.bert)["last_hidden_state"][..., :12] / stream.write[:12]
    assert ((wide - hidden).abs().max() / hidden.abs().max()).item() <= 1e-6


def test_same_seed_same_model_other_seed_other_noise():
    source = random_model("GPT2LMHeadModel", GPT2)
    a, b, c = (growkern.grow(source, n_embd=24, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(
        a["transformer.h.0.mlp.c_fc.weight"], c["transformer.h.0.mlp.c_fc.weight"]
    )


@pytest.mark.parametrize("symmetry", ["routing", "noise", "split", "none"])
def test_copies_separate_in_training_only_when_symmetry_is_broken(symmetry):
    """FFN copies that start equal stay equal under AdamW; broken symmetry drives them apart."""
    source = random_model("GPT2LMHeadModel", GPT2, std=0.1, resid_pdrop=0.0, embd_pdrop=0.0)
    model = growkern.grow(source, n_embd=24, symmetry=symmetry).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
    start = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    for _ in range(10):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    # columns j and j + 48 are the two copies of FFN unit j
    moved = model.transformer.h[0].mlp.c_fc.weight.detach() - start
    apart = ((moved[:, :48] - moved[:, 48:]).norm() / moved.norm()).item()
    if symmetry == "none":
        assert apart < 1e-9
    else:
        assert apart > 0.05


@pytest.mark.parametrize("head_dim", [6, 10])
def test_pairs_that_turn_below_a_norm_keep_one_scale(head_dim):
    """Hunyuan turns queries before their norm, at a theta that is rounded to float32."""
    sizes = {k: v for k, v in LLAMA.items() if k != "mlp_bias"}
    source = random_model("HunYuanDenseV1ForCausalLM", sizes)
    grown = growkern.grow(source, head_dim=head_dim)
    assert relative_error(source, grown) < 1e-7


@pytest.mark.parametrize("symmetry", ["none", "split"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_t5_divides_the_input_of_an_untied_head_too(is_shared, symmetry, tmp_path):
    """An edit of the config of a tied T5 unties its head, but leaves `scale_decoder_outputs`."""
    source = random_model("T5ForConditionalGeneration", T5)
    source.config.tie_word_embeddings = False
    if not is_shared:
        rows = torch.randn(source.lm_head.weight.shape, dtype=torch.float64)
        source.lm_head.weight = torch.nn.Parameter(rows)
    assert source.config.scale_decoder_outputs
    for size in (2 * T5["d_model"], T5["d_model"] + 7):
        grown = growkern.grow(source, d_model=size, symmetry=symmetry)
        assert grown.growth_plan.exact and relative_error(source, grown) < EXACT
        # folded weights too
        report = growkern.verify(source, grown)
        assert report.ok and report.level == "exact", report.failure
        # a file says that the head is tied, and has its weights
        grown.save_pretrained(tmp_path / str(size))
        loaded = type(source).from_pretrained(tmp_path / str(size), dtype=torch.float64)
        assert relative_error(source, loaded) < EXACT
