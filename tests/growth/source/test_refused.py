"""Sources that cannot be grown: one line, with what to do."""

import copy
import json
import re

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import growkern
from growkern.growth.source.loading import load_model
from growkern.growth.source.refused import KINDS, UNDO, refuse_files
from testbed.models import GPT2, LLAMA, random_model


def advice_of(source, **sizes):
    with pytest.raises(growkern.GrowthError) as refused:
        growkern.grow(source, **sizes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_adapters_beside_a_whole_model_are_refused_too(tmp_path):
    random_model("GPT2LMHeadModel", GPT2).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds adapters of PEFT" in advice_of(tmp_path, n_embd=24)


ADVICE = r"(lora_|_layer|_module|_to_save).*merge_and_unload\(\)"


def injected(model):
    """With adapters inside, and no note of PEFT on the model."""
    config = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_1"], r=2)
    model = peft.inject_adapter_in_model(config, model)
    vars(model).pop("peft_config", None)
    return model


def beside(model):
    """Adapters as loralib names them: all weights of the model are there too."""
    down = torch.nn.Parameter(torch.zeros(2, 8))
    model.transformer.h[0].attn.c_attn.register_parameter("lora_A", down)
    return model


@pytest.mark.parametrize("change", [injected, beside])
def test_adapters_that_are_not_merged_are_named(change, tmp_path):
    """In memory, and wherever such a directory is read."""
    base = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    changed = change(copy.deepcopy(base))
    base.save_pretrained(tmp_path)
    tensors = {name: x.clone() for name, x in changed.state_dict().items() if "lm_head" not in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = transformers.GPT2LMHeadModel(growkern.plan(base, n_embd=24).target_config)
    for work in (
        lambda: growkern.plan(changed, n_embd=24),
        lambda: growkern.plan(tmp_path, n_embd=24),
        lambda: load_model(tmp_path),
        lambda: growkern.grow_into(change(target), base),
    ):
        with pytest.raises(growkern.GrowthError, match=ADVICE):
            work()


@pytest.mark.parametrize(
    "name, match",
    [
        ("pytorch_model.bin", "pickled weights .*: load them with transformers"),
        ("model-q4_k_m.gguf", r"GGUF.*gguf_file='model-q4_k_m.gguf'"),
        ("tf_model.h5", "TensorFlow or Flax: .* transformers 4"),
        ("flax_model.msgpack", "TensorFlow or Flax"),
        ("consolidated.00.pth", "original format of Meta"),
        ("__0_0.distcp", "without its .metadata: copy that"),
        ("model.onnx", "ONNX: grow the checkpoint that it was exported from"),
    ],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_directories_of_other_formats(tmp_path, name, match, with_config):
    if with_config:
        random_model("GPT2LMHeadModel", GPT2).config.save_pretrained(tmp_path)
        config = transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"])
        config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"not read")
    text = advice_of(tmp_path, n_embd=24)
    assert re.search(match, text) and text.startswith(f"{tmp_path} holds only")
    random_model("GPT2LMHeadModel", GPT2).save_pretrained(tmp_path)
    growkern.plan(tmp_path, n_embd=24)


def test_a_file_in_place_of_a_directory(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not read")
    assert "GGUF" in advice_of(file, n_embd=24)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not read")
    assert "is a file: give the directory" in advice_of(file, n_embd=24)


def test_every_kind_is_refused_by_its_files():
    for patterns, what in KINDS.items():
        for name in (pattern.replace("*", "x") for pattern in patterns):
            message = re.escape(f"acme holds {what.format(file=name)}")
            with pytest.raises(growkern.GrowthError, match=message):
                refuse_files("acme", [name])


@pytest.mark.parametrize("method", [*UNDO, "gptq", "awq", "of-tomorrow"])
def test_quantised_checkpoints(tmp_path, method):
    model = random_model("GPT2LMHeadModel", GPT2)
    model.save_pretrained(tmp_path)
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.quantization_config = {"quant_method": method}
    model.config.save_pretrained(tmp_path)
    text = advice_of(tmp_path, n_embd=24)
    assert f"{tmp_path} is quantised ({method}): use the full-precision checkpoint" in text
    assert text.endswith(UNDO.get(method, "quantise the result"))
    assert all(hasattr(transformers, name) for name in re.findall(r"=(\w+Config)\(", text))
    assert f"the model is quantised ({method})" in advice_of(model, n_embd=24)


@pytest.mark.parametrize(
    "settings, method", [({"quant_algo": "NVFP4"}, "NVFP4"), ({"bits": 4}, "quant_method")]
)
def test_a_checkpoint_that_names_no_method_is_quantised_too(tmp_path, settings, method):
    names = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    config = {**names, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(growkern.GrowthError, match=rf"quantised \([\w ]*{method}\)"):
        growkern.grow(tmp_path, n_embd=1536)


def test_a_model_in_memory_with_quantised_weights():
    model = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    weight = model.transformer.h[0].attn.c_attn.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    text = advice_of(model, n_embd=24)
    assert "transformer.h.0.attn.c_attn.weight has dtype torch.float8_e4m3fn" in text
    assert "full-precision" in text


def test_quantised_weights_whose_config_says_nothing(tmp_path):
    # transformers would ignore their scales
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert "has dtype F8_E4M3, as in a quantised checkpoint" in advice_of(tmp_path, hidden_size=24)
