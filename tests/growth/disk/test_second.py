"""Layers that predict a second token: transformers' classes lack them, and files have them.

Truth: the forward pass of vLLM, in float64, with a layer of transformers' class.
"""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.families.table_files import load_family
from testbed.growths import at_once, grown_by
from testbed.models import Float64Everywhere, eager, random_model
from testbed.relatives import RELATIVES

# how a layer begins in files, and the norms and matrix before it, with the norm behind it
BEHIND = "model.layers.{n}."
DEEPSEEK = (BEHIND, *(BEHIND + x for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
QWEN = ("mtp.layers.{k}.", *(f"mtp.{name}" for name in QWEN))
COUNT = "num_nextn_predict_layers"
# family -> names, a layer of the same kind, the field that counts them, and how many there are
CASES = {
    "deepseek_v3": (DEEPSEEK, 1, COUNT, 2),
    "deepseek_v32": (DEEPSEEK, 1, COUNT, 1),
    "glm4_moe": (DEEPSEEK, 1, COUNT, 1),
    "glm4_moe_lite": (DEEPSEEK, 1, COUNT, 1),
    "glm_moe_dsa": (DEEPSEEK, 1, COUNT, 1),
    "qwen3_next": (QWEN, 0, COUNT, 1),
    "qwen3_5": (QWEN, 0, "mtp_num_hidden_layers", 1),
    "qwen3_5_moe_text": (QWEN, 0, "mtp_num_hidden_layers", 1),
}


def renamed(tensors, old, new):
    own = {name: x for name, x in tensors.items() if name.startswith(old)}
    return {new + name.removeprefix(old): x.clone() for name, x in own.items()}


def beginning(tensors, layer):
    name = next(n for n in tensors if f"model.layers.{layer}." in n.replace("language_", ""))
    return name[: name.index(f"layers.{layer}.")] + f"layers.{layer}."


def saved(model, directory, names, layer, count):
    """A directory of the model with such layers, and with a copy of the head beside each."""
    text, tensors = model.config.get_text_config(), {}
    for k in range(count):
        other = random_model(type(model).__name__, model.config.to_dict(), seed=2 + k)
        other.save_pretrained(directory)
        own = load_file(directory / "model.safetensors")
        at = [name.format(n=text.num_hidden_layers + k, k=k) for name in names]
        tensors |= renamed(own, beginning(own, layer), at[0])
        wide, *norms = (torch.randn(n, text.hidden_size).double() for n in (24, 1, 1, 1))
        tensors |= {f"{n}.weight": x[0] for n, x in zip((*at[1:3], at[4]), norms, strict=True)}
        tensors[f"{at[3]}.weight"] = wide.view(text.hidden_size, -1)
        if names == DEEPSEEK:
            tensors[f"{at[0]}shared_head.head.weight"] = own["lm_head.weight"]
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


@torch.no_grad()
def drafts(directory, names, layer, count):
    """The logits of a model, and of every layer that predicts a token after the next."""
    tensors = {n: x for f in directory.glob("*.safetensors") for n, x in load_file(f).items()}
    config = json.loads((directory / "config.json").read_text())
    load = getattr(transformers, config["architectures"][0]).from_pretrained
    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    main, where, found = eager(load(directory, **how)), directory.parent / "one", []
    text, plus_one = main.config.get_text_config(), load_family(config["model_type"]).norm.plus_one

    def norm(name, x):
        size = (x.square().mean(-1, keepdim=True) + text.rms_norm_eps).rsqrt()
        return x * size * (tensors[f"{name}.weight"] + plus_one)

    ids = torch.randint(3, 46, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.full((1, 1, 9, 9), -torch.inf, dtype=torch.float64).triu(1)
    with Float64Everywhere():
        hidden = main(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        for k in range(count):
            at = [name.format(n=text.num_hidden_layers + k, k=k) for name in names]
            found.append(main.lm_head(hidden))
            main.config.save_pretrained(where)
            moved = tensors | renamed(tensors, at[0], beginning(tensors, layer))
            save_file(moved, where / "model.safetensors", {"format": "pt"})
            block = eager(load(where, **how)).get_decoder().layers[layer]
            ids, place = ids.roll(-1, 1), torch.arange(9)[None]
            both = norm(at[1], main.get_input_embeddings()(ids)), norm(at[2], hidden)
            x = torch.cat(both, -1) @ tensors[f"{at[3]}.weight"].T
            turns = main.get_decoder().rotary_emb(x, place)
            x = block(x, attention_mask=mask, position_ids=place, position_embeddings=turns)
            hidden = norm(at[4], x[0] if isinstance(x, tuple) else x)
    return [*found, main.lm_head(hidden)]


@pytest.mark.parametrize("family", CASES)
def test_they_grow_exactly_from_files_to_files(family, tmp_path):
    (names, layer, field, count), (kind, sizes, *_) = CASES[family], RELATIVES[family]
    more = {field: count, **({"mlp_only_layers": []} if "mlp_only_layers" in sizes else {})}
    more = {"text_config": sizes["text_config"] | more} if "text_config" in sizes else more
    model = random_model(kind, {**sizes, **more, "tie_word_embeddings": False})
    small, large = tmp_path / "small", tmp_path / "large"
    saved(model, small, names, layer, count)
    spec = growkern.plan(small, num_hidden_layers=4).small
    # in a larger vocabulary, other tokens would be compared
    how = {**grown_by(spec, at_once(spec) | {"vocab": 50}), "progress": False}
    for sizes in ({"hidden_size": 24, "progress": False}, how):
        shutil.rmtree(large, ignore_errors=True)
        plan = growkern.grow_checkpoint(small, large, **sizes).plan
        grown = drafts(large, names, plan.layer_maps[""].index(layer), count)
        for old, new in zip(drafts(small, names, layer, count), grown, strict=True):
            assert (old - new).abs().max() <= 1e-12 * old.abs().max()
    assert plan.exact and growkern.verify(small, large).ok
    assert any(f"second token grow in files ({count})" in line for line in plan.portability())
    config = growkern.grow(small, hidden_size=24).config.get_text_config()
    assert getattr(config, field) == 0
