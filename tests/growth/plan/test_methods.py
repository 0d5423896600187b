"""AKI, the paper's scheme, DirectCopy, random and depth, against the formulas written out."""

import pytest
import torch

import growkern
from testbed.models import BERT, GPT2, LLAMA, random_model, relative_error

D, HEADS, FFN, HEAD_DIM, LAYERS = 12, 3, 20, 4, 3
GROWN = {"hidden_size": 20, "intermediate_size": 33, "scheme": "paper"}


def bert(**config):
    return random_model("BertForMaskedLM", {**BERT, "num_hidden_layers": LAYERS}, **config)


def paper_maps(grown, layer):
    """Residual map, attention-unit map and FFN map of a layer, with their counts."""
    layout = grown.growth_plan.layout
    found = []
    for name in ("stream", "attn", "ffn"):
        index = layout.space(name, layer).read_index
        found += [index, torch.bincount(index).double()[index]]
    return found


def expected_bert_layer(state, layer, upper, grown):
    """bert2BERT's rules for one layer, unit by unit: `upper` is the layer new units come from."""
    r, cr, h, ch, f, cf = paper_maps(grown, layer)
    p, q = (f"bert.encoder.layer.{i}." for i in (layer, upper))
    new_h, new_f = torch.arange(len(h)) >= D, torch.arange(len(f)) >= FFN

    def pick(name, new, dim, build):
        shape = [1, 1]
        shape[dim] = -1
        old, above = build(state[p + name].double()), build(state[q + name].double())
        return torch.where(new.reshape(shape[: old.ndim] if old.ndim == 2 else [-1]), above, old)

    out = {}
    for part in ("query", "key", "value"):
        name = f"attention.self.{part}"
        out[f"{name}.weight"] = pick(f"{name}.weight", new_h, 0, lambda w: w[h][:, r] / cr)
        out[f"{name}.bias"] = pick(f"{name}.bias", new_h, 0, lambda b: b[h])
    name = "attention.output.dense"
    out[f"{name}.weight"] = pick(f"{name}.weight", new_h, 1, lambda w: w[r][:, h] / ch)
    out[f"{name}.bias"] = state[p + f"{name}.bias"].double()[r]
    name = "intermediate.dense"
    out[f"{name}.weight"] = pick(f"{name}.weight", new_f, 0, lambda w: w[f][:, r] / cr)
    out[f"{name}.bias"] = pick(f"{name}.bias", new_f, 0, lambda b: b[f])
    name = "output.dense"
    out[f"{name}.weight"] = pick(f"{name}.weight", new_f, 1, lambda w: w[r][:, f] / cf)
    out[f"{name}.bias"] = state[p + f"{name}.bias"].double()[r]
    for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
        for kind in ("weight", "bias"):
            out[f"{norm}.{kind}"] = state[p + f"{norm}.{kind}"].double()[r]
    return out


@pytest.mark.parametrize("method", ["fpi", "aki"])
def test_paper_scheme_follows_its_equations(method):
    source = bert()
    grown = growkern.grow(source, method=method, **GROWN)
    state, new = source.state_dict(), grown.state_dict()
    for layer in range(LAYERS):
        upper = min(layer + 1, LAYERS - 1) if method == "aki" else layer
        for name, expected in expected_bert_layer(state, layer, upper, grown).items():
            actual = new[f"bert.encoder.layer.{layer}.{name}"]
            assert torch.allclose(actual, expected, rtol=1e-14, atol=0), (layer, name)
    r, cr, *_ = paper_maps(grown, 0)
    embedding = state["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(new["bert.embeddings.word_embeddings.weight"], embedding[:, r])
    head = "cls.predictions.transform."
    assert torch.allclose(
        new[head + "dense.weight"], state[head + "dense.weight"][r][:, r] / cr, rtol=1e-14
    )
    for kind in ("weight", "bias"):
        assert torch.allclose(
            new[f"{head}LayerNorm.{kind}"], state[f"{head}LayerNorm.{kind}"][r] / cr, rtol=1e-14
        )


def test_paper_scheme_draws_heads_per_layer_and_the_residual_once():
    grown = growkern.grow(bert(), **{**GROWN, "hidden_size": 24, "intermediate_size": 60})
    layout = grown.growth_plan.layout
    ffn = [layout.space("ffn", layer).read_index for layer in range(LAYERS)]
    assert not torch.equal(ffn[0], ffn[1])
    stream = [layout.space("stream", layer).read_index for layer in range(LAYERS)]
    assert torch.equal(stream[0], stream[1])


def test_paper_scheme_is_not_called_exact_where_counts_differ():
    source = bert()
    grown = growkern.grow(source, **GROWN)
    assert not grown.growth_plan.exact
    assert relative_error(source, grown) > 1e-3


def test_last_layer_of_aki_is_fpi_and_the_others_differ():
    source = bert()
    options = {"hidden_size": 24, "symmetry": "none"}
    aki = growkern.grow(source, method="aki", **options).state_dict()
    fpi = growkern.grow(source, method="fpi", **options).state_dict()
    last = f"encoder.layer.{LAYERS - 1}."
    for name, tensor in aki.items():
        if last in name or "encoder" not in name:
            assert torch.equal(tensor, fpi[name]), name
    mixed = "bert.encoder.layer.0.attention.output.dense.weight"
    assert torch.equal(aki[mixed][:, :D], fpi[mixed][:, :D])
    assert not torch.equal(aki[mixed][:, D:], fpi[mixed][:, D:])


def test_aki_keeps_residual_copies_equal():
    """Units are mixed, residual coordinates never: h[i] == h[i + D] after every layer."""
    source = bert()
    grown = growkern.grow(source, method="aki", hidden_size=24, symmetry="none")
    from testbed.models import outputs

    hidden = outputs(grown.bert)["last_hidden_state"]
    assert torch.allclose(hidden[:, :D], hidden[:, D:], rtol=0, atol=1e-12)
    eq16 = growkern.grow(source, method="aki", aki="eq16", hidden_size=24, symmetry="none")
    hidden = outputs(eq16.bert)["last_hidden_state"]
    assert (hidden[:, :D] - hidden[:, D:]).abs().max() > 1e-3


def test_eq16_takes_output_rows_of_every_matrix_from_above():
    source = bert()
    grown = growkern.grow(source, method="aki", aki="eq16", hidden_size=24, symmetry="none")
    state, new = source.state_dict(), grown.state_dict()
    for name in ("attention.output.dense", "output.dense", "attention.self.value"):
        at = "bert.encoder.layer.{}.{}.weight"
        actual = new[at.format(0, name)]
        below, above = state[at.format(0, name)], state[at.format(1, name)]
        rows = below.shape[0]
        half = actual[:, : below.shape[1]] + actual[:, below.shape[1] :]
        assert torch.allclose(half[:rows], below, rtol=1e-14)
        assert torch.allclose(half[rows:], above, rtol=1e-14)


def test_aki_moves_query_groups_as_one():
    source = random_model("LlamaForCausalLM", LLAMA)
    # twice the key heads: groups 2 and 3 are new; 6 -> 12 query heads in groups of 3
    how = {"method": "aki", "symmetry": "none", "stream": "copies"}
    grown = growkern.grow(source, hidden_size=24, **how)
    state, new = source.state_dict(), grown.state_dict()
    at = "model.layers.{}.self_attn.{}.weight"
    for part, old_rows in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8)):
        wide = new[at.format(0, part)]
        folded = wide[:, :12] + wide[:, 12:]
        assert torch.allclose(folded[:old_rows], state[at.format(0, part)], rtol=1e-14)
        assert torch.allclose(folded[old_rows:], state[at.format(1, part)], rtol=1e-14)
    # no new key heads: new query heads would meet the wrong layer's keys, so none is taken
    sizes = {"hidden_size": 24, "num_key_value_heads": 2, "intermediate_size": 20}
    grown = growkern.grow(source, method="aki", num_attention_heads=12, symmetry="none", **sizes)
    assert relative_error(source, grown) <= 1e-12
    assert grown.growth_plan.exact


@pytest.mark.parametrize(
    "class_name, sizes", [("BertForMaskedLM", BERT), ("GPT2LMHeadModel", GPT2)]
)
def test_direct_copy_keeps_the_old_block(class_name, sizes):
    source = random_model(class_name, sizes)
    width = {"n_embd": 20} if class_name.startswith("GPT2") else {"hidden_size": 20}
    grown = growkern.grow(source, method="direct_copy", **width)
    state, new = source.state_dict(), grown.state_dict()
    for task in grown.growth_plan.tasks:
        old, wide = state[task.name], new[task.name]
        if "c_attn" in task.name:
            # q, k and v each keep their own leading block
            wide = torch.cat([part[..., :12] for part in wide.split(20, -1)], -1)
        assert torch.equal(wide[tuple(slice(n) for n in old.shape)], old), task.name
    random = new[grown.growth_plan.tasks[0].name][:, 12:]
    assert 0.5 < random.std() / grown.config.initializer_range < 2


# -------------------------------------------------------------------- depth


@pytest.mark.parametrize(
    "depth, layers", [("stack", [0, 1, 2, 1, 2]), ("interleave", [0, 0, 1, 1, 2])]
)
def test_depth_repeats_whole_layers(depth, layers):
    source = bert()
    grown = growkern.grow(source, depth=depth, num_hidden_layers=5, symmetry="none")
    state, new = source.state_dict(), grown.state_dict()
    for name, tensor in new.items():
        if ".layer." in name:
            head, _, rest = name.partition(".layer.")
            layer, _, tail = rest.partition(".")
            assert torch.equal(tensor, state[f"{head}.layer.{layers[int(layer)]}.{tail}"]), name
    assert grown.config.num_hidden_layers == 5


def test_width_comes_before_depth():
    """Stacked copies are widened layers; under AKI the copy of the last layer stays FPI."""
    grown = growkern.grow(
        bert(), method="aki", hidden_size=24, num_hidden_layers=6, depth="stack", symmetry="none"
    )
    state = grown.state_dict()
    for name in ("attention.output.dense.weight", "intermediate.dense.bias"):
        for layer in range(LAYERS):
            below = state[f"bert.encoder.layer.{layer}.{name}"]
            assert torch.equal(below, state[f"bert.encoder.layer.{layer + LAYERS}.{name}"])


def test_stacked_copies_get_their_own_noise():
    state = growkern.grow(bert(), hidden_size=24, num_hidden_layers=6).state_dict()
    at = "bert.encoder.layer.{}.intermediate.dense.weight"
    assert not torch.equal(state[at.format(0)], state[at.format(3)])


@pytest.mark.parametrize(
    "class_name, sizes, kept",
    [
        ("BertForMaskedLM", BERT, {0: 0, 3: 1}),
        # its config has a list with the kind of every layer
        ("Qwen3ForCausalLM", {**LLAMA, "num_hidden_layers": 0}, {}),
    ],
)
def test_random_depth_keeps_the_layers_and_begins_new_ones_untrained(class_name, sizes, kept):
    """New ones have the numbers of `method="random"`, see `tensors/test_random_tensors.py`."""
    source, how = random_model(class_name, sizes), {"num_hidden_layers": 5, "seed": 4}
    grown = growkern.grow(source, depth="random", **how)
    plan, old, new = grown.growth_plan, source.state_dict(), grown.state_dict()
    untrained = growkern.grow(source, method="random", depth="random", **how).state_dict()
    for name, tensor in new.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is None or layer in kept:
            before = name if layer is None else name.replace(f".{layer}.", f".{kept[layer]}.")
            assert torch.equal(tensor, old[before]), name
        else:
            assert torch.equal(tensor, untrained[name]), name
    assert {layer for _, layer in plan.inserted} == set(range(5)) - set(kept)
    assert [(one.level, one.asked) for one in plan.findings] == [("changed", True)]
    assert "the new layers begin untrained" in plan.findings[0].why
    assert growkern.verify(source, grown).ok
    tokens = torch.arange(12).reshape(2, 6)
    assert grown(input_ids=tokens).logits.isfinite().all()


def test_optimizers_treat_new_random_layers_like_any_others():
    """Of a grown source too, whose own layers have factors from both growths."""
    wide = growkern.grow(bert(), hidden_size=24)
    deep = growkern.grow(wide, hidden_size=36, num_hidden_layers=5, depth="random")
    factors = growkern.growth_lr_multipliers(deep.growth_plan)
    name = "bert.encoder.layer.{}.attention.self.query.weight".format
    for layer in (1, 3):
        found = factors[name(layer)]
        assert all((one == 1).all() for one in (*found.lr, *found.eps))
        assert not any(one.any() for one in found.old) and set(found.muon.values()) == {1.0}
    assert (factors[name(0)].lr[1] != 1).all()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "how, message",
    [
        ({"hidden_size": 8}, "hidden_size=8 is smaller than the source's 12"),
        ({"hidden_size": 22}, "nearest sizes that fit: hidden_size=20 or 24"),
        ({"num_attention_heads": 4}, "4 or more as in the source; sizes that fit: hidden_size=16$"),
        ({"hidden_size": 12}, "nothing grows: give a larger hidden_size, "),
        ({"seed": 1}, "nothing grows"),
        ({"hiden_size": 24}, "did you mean 'hidden_size'"),
        ({"hidden_size": 24.0}, "whole number"),
        ({"hidden_size": 99999999999996}, "larger than in any model"),
        ({"num_hidden_layers": 0}, "positive"),
        ({"num_hidden_layers": 10**9}, "larger than in any model; at most 16384"),
        ({"method": "fpl"}, "did you mean 'fpi'"),
        ({"depth": "up"}, "depth is .up.; allowed: auto, identity"),
        ({"noise": 1.5}, "it must lie in .0, 1."),
    ],
)
def test_bad_requests_name_the_fix(how, message):
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.plan(bert(), **how)


def test_sizes_the_config_class_refuses_are_refused():
    source = random_model("LlamaForCausalLM", LLAMA)
    with pytest.raises(growkern.GrowthError, match=r"llama cannot have hidden_size=20, inter"):
        growkern.plan(source, hidden_size=20, num_attention_heads=6)


def test_target_config_must_differ_in_sizes_only():
    source = bert()
    target = type(source.config)(**{**source.config.to_dict(), "hidden_size": 24})
    target.num_attention_heads = 6
    grown = growkern.grow(source, target_config=target)
    assert relative_error(source, grown) <= 1e-12
    target.tie_word_embeddings = False
    with pytest.raises(growkern.GrowthError, match="unties"):
        growkern.plan(source, target_config=target)
    for other in (target.to_dict(), "bert-large"):
        with pytest.raises(growkern.GrowthError, match=f"a {type(other).__name__}, but"):
            growkern.plan(source, target_config=other)
    target.tie_word_embeddings, target.type_vocab_size = True, 51
    with pytest.raises(growkern.GrowthError, match=r"target_config\.type_vocab_size=51"):
        growkern.plan(source, target_config=target)
    with pytest.raises(growkern.GrowthError, match="not both"):
        growkern.plan(source, target_config=target, hidden_size=24)


def test_layer_index_scaling_blocks_depth_but_not_width():
    source = random_model("GPT2LMHeadModel", GPT2, scale_attn_by_inverse_layer_idx=True)
    assert relative_error(source, growkern.grow(source, n_embd=24)) <= 1e-12
    with pytest.raises(growkern.GrowthError, match="layer's index"):
        growkern.plan(source, n_layer=4)
