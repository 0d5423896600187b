"""Layers that predict a second token: transformers' classes lack them, and files have them.

Truth: the forward pass of vLLM, in float64, with a layer of transformers' class.
"""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.families.table_files import load_family
from testbed.families import FAMILIES
from testbed.growths import at_once, grown_by
from testbed.models import Float64Everywhere, eager, random_model
from testbed.relatives import RELATIVES

# how a layer begins in files, the norms and matrix before it, and the norm behind it
BEHIND = "model.layers.{n}."
NORMS = ("enorm", "hnorm", "eh_proj")
DEEPSEEK = (BEHIND, *(BEHIND + x for x in (*NORMS, "shared_head.norm")))
FINAL = (BEHIND, *(BEHIND + x for x in (*NORMS, "final_layernorm")))
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
QWEN = ("mtp.layers.{k}.", *(f"mtp.{name}" for name in QWEN))
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MIMO = ("model.mtp_layers.{k}.", *("model.mtp_layers.{k}." + name for name in MIMO))
ERNIE = ("emb_norm", "hidden_norm", "linear_proj")
# the head reads the layer itself
ERNIE = ("model.mtp_block.{k}.", *(f"model.mtp_{name}.{{k}}" for name in ERNIE), None)
# of two layers, the first has what comes before them, and the last the norm behind them
NEMOTRON = (
    "mtp.layers.{k}.",
    *("mtp.layers.{b}." + x for x in NORMS),
    "mtp.layers.{e}.final_layernorm",
)
COUNT = "num_nextn_predict_layers"
# family -> names, layers of the same kinds, the field that counts them, and how many there are
CASES = {
    "deepseek_v3": (DEEPSEEK, [1], COUNT, 2),
    "deepseek_v32": (DEEPSEEK, [1], COUNT, 1),
    "ernie4_5_moe": (ERNIE, [0], COUNT, 1),
    "exaone_moe": (QWEN, [0], COUNT, 1),
    "glm4_moe": (DEEPSEEK, [1], COUNT, 1),
    "glm4_moe_lite": (DEEPSEEK, [1], COUNT, 1),
    "glm_moe_dsa": (DEEPSEEK, [1], COUNT, 1),
    "hy_v3": (FINAL, [1], COUNT, 1),
    "kimi_k25": (tuple(f"language_model.{name}" for name in DEEPSEEK), [1], COUNT, 1),
    "mellum": (QWEN, [1], COUNT, 1),
    # the files alone say how many
    "mimo_v2_flash": (
        tuple(n.replace("model.layers.{n}", "model.mtp.layers.{k}") for n in FINAL),
        [0],
        None,
        3,
    ),
    "nemotron_h": (NEMOTRON, [0, 2], COUNT, 2),
    "qwen2": (MIMO, [0], COUNT, 1),
    "qwen3_next": (QWEN, [0], COUNT, 1),
    "qwen3_5": (QWEN, [0], "mtp_num_hidden_layers", 1),
    "qwen3_5_moe_text": (QWEN, [0], "mtp_num_hidden_layers", 1),
}
# norms of a layer that have other names in one that predicts a second token
OTHER = {"mimo_v2_flash": ("post_attention_layernorm", "pre_mlp_layernorm")}


def renamed(tensors, old, new):
    own = {name: x for name, x in tensors.items() if name.startswith(old)}
    return {new + name.removeprefix(old): x.clone() for name, x in own.items()}


def beginning(tensors, layer):
    return next(
        m[0]
        for n in tensors
        if (m := re.match(rf".*(model|backbone)\.(layers|blocks)\.{layer}\.", n))
    )


def placed(names, first, layers, number):
    """The names of the layers that predict one token, and of what is beside them."""
    begins = [number * len(layers) + i for i in range(len(layers))]
    how = {"n": first + begins[0], "k": begins[0], "b": begins[0], "e": begins[-1]}
    rest = [name and name.format(**how) for name in names[1:]]
    return [names[0].format(n=first + k, k=k) for k in begins], *rest


def saved(model, directory, names, layers, count):
    """A directory of the model with such layers, and with a copy of the head beside each."""
    text, tensors = model.config.get_text_config(), {}
    old, new = OTHER.get(text.model_type, ("", ""))
    for number in range(count):
        other = random_model(type(model).__name__, model.config.to_dict(), seed=2 + number)
        other.save_pretrained(directory)
        own = load_file(directory / "model.safetensors")
        places, *around, matrix, last = placed(names, text.num_hidden_layers, layers, number)
        for layer, place in zip(layers, places, strict=True):
            moved = renamed(own, beginning(own, layer), place)
            tensors |= {name.replace(old, new): x for name, x in moved.items()}
        wide = torch.randn(27, text.hidden_size).double()
        tensors |= {f"{n}.weight": x for n, x in zip((*around, last), wide[24:], strict=True) if n}
        tensors[f"{matrix}.weight"] = wide[:24].view(text.hidden_size, -1)
        if last and "shared_head" in last:
            head = next(x for n, x in own.items() if n.endswith("lm_head.weight"))
            tensors[f"{places[0]}shared_head.head.weight"] = head
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


@torch.no_grad()
def drafts(directory, names, layers, count):
    """The logits of a model, and of every layer that predicts a token after the next."""
    tensors = {n: x for f in directory.glob("*.safetensors") for n, x in load_file(f).items()}
    for old, new in OTHER.values():
        tensors = {n.replace(new, old): x for n, x in tensors.items()}
    config = json.loads((directory / "config.json").read_text())
    load = getattr(transformers, config["architectures"][0]).from_pretrained
    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    main, where, found = eager(load(directory, **how)), directory.parent / "one", []
    text, rule = main.config.get_text_config(), load_family(config["model_type"]).norm

    def norm(name, x):
        size = (x.square().mean(-1, keepdim=True) + getattr(text, str(rule.eps))).rsqrt()
        return x * size * (tensors[f"{name}.weight"] + rule.plus_one)

    ids = torch.randint(3, 46, (1, 9), generator=torch.Generator().manual_seed(0))
    how_called = {
        "attention_mask": torch.full((1, 1, 9, 9), -torch.inf, dtype=torch.float64).triu(1),
        "position_ids": torch.arange(9)[None],
    }
    with Float64Everywhere():
        hidden = main(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        for number in range(count):
            places, *before, last = placed(names, text.num_hidden_layers, layers, number)
            found.append(main.lm_head(hidden))
            main.config.save_pretrained(where)
            moved = dict(tensors)
            for layer, place in zip(layers, places, strict=True):
                moved |= renamed(tensors, place, beginning(tensors, layer))
            save_file(moved, where / "model.safetensors", {"format": "pt"})
            decoder, ids = eager(load(where, **how)).get_decoder(), ids.roll(-1, 1)
            both = norm(before[0], main.get_input_embeddings()(ids)), norm(before[1], hidden)
            x = torch.cat(both, -1) @ tensors[f"{before[2]}.weight"].T
            for layer in layers:
                if rotary := getattr(decoder, "rotary_emb", None):
                    kinds = (
                        text.layer_types[layer : layer + 1]
                        if hasattr(rotary, "layer_types")
                        else ()
                    )
                    how_called["position_embeddings"] = rotary(
                        x, how_called["position_ids"], *kinds
                    )
                x = decoder.layers[layer](x, **how_called)
                x = x[0] if isinstance(x, tuple) else x
            hidden = norm(last, x) if last else x
    return [*found, main.lm_head(hidden)]


@pytest.mark.parametrize("family", CASES)
def test_they_grow_exactly_from_files_to_files(family, tmp_path):
    (names, layers, field, count), (kind, sizes, *_) = (
        CASES[family],
        {**FAMILIES, **RELATIVES}[family],
    )
    more = {field: count} if field else {}
    more |= {"mlp_only_layers": []} if "mlp_only_layers" in sizes else {}
    more = {"text_config": sizes["text_config"] | more} if "text_config" in sizes else more
    model = random_model(kind, {**sizes, **more, "tie_word_embeddings": False})
    small, large = tmp_path / "small", tmp_path / "large"
    saved(model, small, names, layers, count)
    spec = growkern.plan(small, hidden_size=24).small
    # in a larger vocabulary, other tokens would be compared
    how = {**grown_by(spec, at_once(spec) | {"vocab": 50}), "progress": False}
    for sizes in ({"hidden_size": 24, "progress": False}, how):
        shutil.rmtree(large, ignore_errors=True)
        plan = growkern.grow_checkpoint(small, large, **sizes).plan
        grown = drafts(large, names, [*map(plan.layer_maps[""].index, layers)], count)
        for old, new in zip(drafts(small, names, layers, count), grown, strict=True):
            assert (old - new).abs().max() <= 1e-12 * old.abs().max()
    assert plan.exact and growkern.verify(small, large).ok
    number = count * len(layers)
    assert any(f"second token grow in files ({number})" in line for line in plan.portability())
    # transformers makes other tensors of Kimi's tower, so a model in memory grows
    one = small if family != "kimi_k25" else model
    config = growkern.grow(one, hidden_size=24).config.get_text_config()
    assert not field or getattr(config, field) == 0
