"""method="fresh": the source's function stays, and what is new is as its class initialises it."""

import pytest
import torch

import growkern
from testbed.models import BERT, GPT2, LLAMA, random_model, relative_error

GQA = {"num_attention_heads": 8, "num_key_value_heads": 4}
UNTIED = {"tie_word_embeddings": False}
HEAVY = {"intermediate_size": 41}
# class, sizes, config, growth
CASES = {
    "llama": ("LlamaForCausalLM", LLAMA, UNTIED, {"hidden_size": 24, **GQA, **HEAVY}),
    # one key head becomes two, and each of them serves queries of the source
    "llama, more groups": (
        "LlamaForCausalLM",
        LLAMA,
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 2, **HEAVY},
    ),
    "llama, larger heads": (
        "LlamaForCausalLM",
        LLAMA,
        {},
        {**GQA, "head_dim": 8, "hidden_size": 24},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 4}, {}, {"hidden_size": 24, **GQA}),
    # a norm over all heads sees new ones, so they are copies
    "olmo2": ("Olmo2ForCausalLM", LLAMA, UNTIED, {"hidden_size": 24, **GQA, **HEAVY}),
    "gpt2": ("GPT2LMHeadModel", GPT2, {}, {"n_embd": 20}),
    "bert": ("BertForMaskedLM", BERT, {}, {"hidden_size": 24, "intermediate_size": 40}),
    # units that carry a mean through the FFN lie behind the new ones
    "bert, a width between": (
        "BertModel",
        BERT,
        {"attention_probs_dropout_prob": 0.0, "layer_norm_eps": 0.0},
        {"hidden_size": 20, "intermediate_size": 40, "carry": 1e-3},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4},
        {},
        {"hidden_size": 24, **GQA, **HEAVY},
    ),
}


def fresh(name):
    class_name, sizes, config, how = CASES[name]
    source = random_model(class_name, sizes, **config)
    return source, growkern.grow(source, method="fresh", **how)


@pytest.mark.parametrize("name", CASES)
def test_the_function_stays(name):
    source, grown = fresh(name)
    # the mean of a stream is carried up to the square of `carry`
    assert relative_error(source, grown) < (1e-7 if "between" in name else 1e-12)
    assert {finding.level for finding in grown.growth_plan.findings} <= {"exact", "approximate"}


def test_new_heads_and_units_are_as_their_class_initialises_them():
    """Rows of another source are the same, so nothing of the source is in them."""
    sizes = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    how = {"hidden_size": 160, "intermediate_size": 320, "method": "fresh", **GQA}
    one, other = (
        growkern.grow(random_model("LlamaForCausalLM", sizes, seed=seed), **how) for seed in (1, 2)
    )
    layer, same = one.model.layers[1], other.model.layers[1]
    heads, keys, units = 4 * 16, 2 * 16, 96
    old = {"q_proj": heads, "k_proj": keys, "v_proj": keys, "gate_proj": units, "up_proj": units}
    for name, count in old.items():
        part = "mlp" if name in ("gate_proj", "up_proj") else "self_attn"
        new, also = (getattr(getattr(x, part), name).weight.detach() for x in (layer, same))
        assert torch.equal(new[count:], also[count:])
        # and what reads the padded entries of the hidden state
        assert torch.equal(new[:, 64:], also[:, 64:])
        assert not torch.equal(new[:count, :64], also[:count, :64])
        assert new[count:].std().item() == pytest.approx(0.02, rel=0.05)
        assert new[count:].mean().abs().item() < 0.001
        assert torch.linalg.matrix_rank(new).item() == min(new.shape)
    down, out = layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight
    assert not down[:, units:].any() and not out[:, heads:].any()
    assert not down[64:].any() and not one.model.embed_tokens.weight[:, 64:].any()


def test_biases_begin_as_their_class_initialises_them():
    source, grown = fresh("gpt2")
    units = source.config.n_embd * 4
    block, old = grown.transformer.h[0], source.transformer.h[0]
    assert not block.mlp.c_fc.bias[units:].any()
    assert torch.equal(block.mlp.c_fc.bias[:units], old.mlp.c_fc.bias)


@pytest.mark.parametrize("name", ["llama", "llama, more groups", "gpt2", "bert", "mixtral"])
def test_every_entry_learns_within_two_steps(name):
    """The first step makes readers of what is new, the second one teaches it."""
    _, grown = fresh(name)
    grown.train()
    optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.arange(48).view(4, 12)
    start = {key: p.detach().clone() for key, p in grown.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        grown(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for key, p in grown.named_parameters():
        # the same number added to all keys changes no softmax: its gradient is rounding, or 0
        if key.endswith(("c_attn.bias", "key.bias")):
            continue
        still = (p.detach() == start[key]).double().mean().item()
        # tokens, positions and experts that no text of four lines asks for
        assert still == 0 or any(x in key for x in ("emb", "wte", "wpe", "lm_head", "experts")), key


def test_moments_of_what_is_new_are_zero():
    source, grown = fresh("llama")
    old = torch.optim.AdamW(source.named_parameters())
    ids = torch.arange(48).view(4, 12)
    source(input_ids=ids, labels=ids).loss.backward()
    old.step()
    plan = grown.growth_plan
    state = growkern.grow_optimizer(old.state_dict(), plan)["state"]
    moments = {name: state[i] for i, (name, _) in enumerate(grown.named_parameters())}
    layer = "model.layers.0.mlp."
    for name, new in {"gate_proj": (slice(20, None),), "down_proj": (..., slice(20, None))}.items():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = moments[f"{layer}{name}.weight"][key]
            assert not moment[new].any()
            assert moment[:12, :12].all()
    # and the optimizer of grown models takes plain steps on new entries
    rates = growkern.growth_lr_multipliers(plan)[f"{layer}down_proj.weight"]
    assert all(bool((x == x.flatten()[0]).all()) for x in rates.lr)
    assert not rates.old[1].flatten()[20:].any()
