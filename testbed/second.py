"""Layers that predict a second token: transformers' classes lack them, and files have them.

Truth: the forward pass of vLLM, in float64, with a layer of transformers' class.
"""

import json
import re

import torch
import transformers
from safetensors.torch import load_file, save_file

from growkern.families import load_family
from testbed.families import FAMILIES
from testbed.models import Float64Everywhere, eager, random_model
from testbed.relatives import RELATIVES, with_sizes

# how a layer begins in files (~), the norms and matrix before it, and the norm behind it
DEEPSEEK = "model.layers.{n}. ~enorm ~hnorm ~eh_proj ~shared_head.norm"
QWEN = "mtp.layers.{k}. mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.fc mtp.norm"
# the head reads the layer itself
ERNIE = ("block.{k}.", "emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}")
ERNIE = " ".join(f"model.mtp_{name}" for name in ERNIE)
MIMO = "model.mtp_layers.{k}. ~token_layernorm ~hidden_layernorm ~input_proj ~final_layernorm"
# the experts of these layers are one tensor; all lies in a distributed checkpoint
FUSED, DISTRIBUTED = "qwen3_5_moe_text", "glm4_moe"
COUNT = "num_nextn_predict_layers"
# family -> names, layers of the same kinds, and how many tokens are predicted
CASES = {
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), (DEEPSEEK, [1], 1)),
    **dict.fromkeys(("exaone_moe", "qwen3_next", "qwen3_5", FUSED), (QWEN, [0], 1)),
    "deepseek_v3": (DEEPSEEK, [1], 2),
    "ernie4_5_moe": (ERNIE, [0], 1),
    DISTRIBUTED: (DEEPSEEK, [1], 1),
    "hy_v3": (DEEPSEEK.replace("shared_head.norm", "final_layernorm"), [1], 1),
    "kimi_k25": (f"language_model.{DEEPSEEK}", [1], 1),
    "mellum": (QWEN, [1], 1),
    "mimo_v2_flash": ("model.mtp.layers.{k}. ~enorm ~hnorm ~eh_proj ~final_layernorm", [0], 3),
    # the norm is behind the last of two layers
    "nemotron_h": ("mtp.layers.{k}. ~enorm ~hnorm ~eh_proj ^final_layernorm", [0, 2], 2),
    "qwen2": (MIMO, [0], 1),
}
# what counts them, if that is not COUNT: for MiMo-V2, the files
COUNTS = {**dict.fromkeys(("qwen3_5", FUSED), "mtp_num_hidden_layers"), "mimo_v2_flash": None}
# a norm that has another name in a layer that predicts a second token
OTHER = {"mimo_v2_flash": ("post_attention_layernorm", "pre_mlp_layernorm")}


def renamed(tensors, old, new):
    own = {name: x for name, x in tensors.items() if name.startswith(old)}
    return {new + name.removeprefix(old): x.clone() for name, x in own.items()}


def beginning(tensors, layer):
    pattern = re.compile(rf".*(model|backbone)\.(layers|blocks)\.{layer}\.")
    return next(filter(None, map(pattern.match, tensors)))[0]


def placed(names, first, layers, number):
    """The beginnings of the layers that predict one token, and the names beside them."""
    begin, *rest = names.split()
    ks = [number * len(layers) + i for i in range(len(layers))]
    places = [begin.format(n=first + k, k=k) for k in ks]
    rest = [x.replace("~", places[0]).replace("^", places[-1]).format(k=ks[0]) for x in rest]
    return places, *rest, *[None] * (4 - len(rest))


def saved(model, directory, family):
    """A directory of the model with such layers, and with a copy of the head beside each."""
    (names, layers, count), text, tensors = CASES[family], model.config.get_text_config(), {}
    old, new = OTHER.get(text.model_type, ("", ""))
    for number in range(count):
        other = random_model(type(model).__name__, model.config.to_dict(), seed=2 + number)
        other.save_pretrained(directory)
        own = load_file(directory / "model.safetensors")
        own = other.state_dict() if text.model_type in (FUSED, DISTRIBUTED) else own
        places, *around, matrix, last = placed(names, text.num_hidden_layers, layers, number)
        for layer, place in zip(layers, places, strict=True):
            moved = renamed(own, beginning(own, layer), place)
            tensors |= {name.replace(old, new): x for name, x in moved.items()}
        width, rng = text.hidden_size, torch.Generator().manual_seed(number)
        wide = torch.randn(2 * width + 3, width, generator=rng, dtype=torch.float64)
        tensors |= {f"{n}.weight": x for n, x in zip((*around, last), wide[-3:], strict=True) if n}
        tensors[f"{matrix}.weight"] = wide[:-3].view(width, -1)
        if last and "shared_head" in last:
            # of tied models, in memory
            head = other.get_output_embeddings().weight.data.clone()
            tensors[f"{places[0]}shared_head.head.weight"] = head
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


@torch.no_grad()
def drafts(directory, family, layer_map=(0, 1, 2)):
    """The logits of a model, and of every layer that predicts a token after the next."""
    names, layers, count = CASES[family]
    layers = [*map(layer_map.index, layers)]
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
    called = {
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
                begin = beginning(tensors, layer)
                moved = {n: x for n, x in moved.items() if not n.startswith(begin)}
                moved |= renamed(tensors, place, begin)
            save_file(moved, where / "model.safetensors", {"format": "pt"})
            decoder, ids = eager(load(where, **how)).get_decoder(), ids.roll(-1, 1)
            both = norm(before[0], main.get_input_embeddings()(ids)), norm(before[1], hidden)
            x = torch.cat(both, -1) @ tensors[f"{before[2]}.weight"].T
            for layer in layers:
                if rotary := getattr(decoder, "rotary_emb", None):
                    kind = text.layer_types[layer:][:1] if hasattr(rotary, "layer_types") else ()
                    called["position_embeddings"] = rotary(x, called["position_ids"], *kind)
                x = decoder.layers[layer](x, **called)
                x = x[0] if isinstance(x, tuple) else x
            hidden = norm(last, x) if last else x
    return [*found, main.lm_head(hidden)]


def sized(family, own, tied=False):
    """The class and the sizes of a family's tiny model, with others of its own."""
    class_name, sizes, *_ = {**FAMILIES, **RELATIVES}[family]
    field = COUNTS.get(family, COUNT)
    own = {**own, "mlp_only_layers": []} | ({field: CASES[family][2]} if field else {})
    return class_name, {**with_sizes(load_family(family), sizes, own), "tie_word_embeddings": tied}
