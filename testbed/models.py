"""Tiny models with every parameter random, and float64 forward passes through Hugging Face code."""

import inspect
import math
import re
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from growkern.families import ModelSpec
from growkern.growth.models import restore_buffers
from growkern.growth.outputs import input_names
from growkern.growth.plan import kind_of

transformers.logging.set_verbosity_error()

BERT = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 18,
}
GPT2 = {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 50, "n_positions": 16}
LLAMA = {
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    # large enough that a forgotten eps shows
    "rms_norm_eps": 1e-2,
    "attention_bias": True,
    "mlp_bias": True,
}
# a decoder without biases, with heads of keys for two of queries each
GROUPED = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Float64Everywhere(TorchFunctionMode):
    """Hugging Face casts to float32 inside norms, rotary tables and softmax: stay in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].to(torch.float64, copy=True)
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def random_model(class_name, sizes, *, seed=1, std=0.3, dtype=torch.float64, **config):
    """A model of this class whose norms, biases and weights are all away from their defaults."""
    model_class = getattr(transformers, class_name)
    model = model_class._from_config(model_class.config_class(**{**sizes, **config}), dtype=dtype)
    # as transformers does when it loads a model: it computes tables of angles in float32
    restore_buffers(model)
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            # the class computes it
            continue
        noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        value = 1 + 0.4 * noise if is_gain else std * noise
        parameter.data = value.to(dtype)
    for name, x in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            x.data += 0.2 * torch.randn(x.shape, generator=rng, dtype=torch.float64)
    model.tie_weights()
    return eager(model.eval())


def eager(model):
    """The model with experts that run in float64 and at every width, if it has any."""
    # a whole with a tower may have them in its text alone
    parts = (part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
    if any(part._can_set_experts_implementation() for part in parts):
        model.set_experts_implementation("eager")
    return model


def as_stored(model, directory):
    """The loaded model, with the values of its files where its class rounds them."""
    for file in Path(directory).glob("*.safetensors"):
        for name, value in load_file(file).items():
            own = dict(model.named_parameters()).get(name)
            if own is not None and own.dtype.itemsize < value.dtype.itemsize:
                own.data = value
    return model


def fold_back(plan, task, grown):
    """One grown tensor in the source's shape again, float64."""
    return kind_of(plan, task).inverse(grown)


# the token that stands for a patch of an image, and inputs of an image of four patches, or of two
IMAGE = 49
GRID = torch.tensor([[1, 4, 4]])
CORNERS = torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])
IMAGES = {
    "cohere2_vision": (1, (1, 3, 8, 8), {}),
    "exaone4_5": (4, (16, 96), {"image_grid_thw": GRID}),
    "gemma3": (4, (1, 3, 8, 8), {}),
    "gemma4": (1, (1, 4, 48), {"image_position_ids": CORNERS}),
    "kimi_k25": (1, (4, 3, 2, 2), {"image_grid_thw": torch.tensor([[1, 2, 2]])}),
    "lfm2_vl": (
        *(1, (1, 4, 48)),
        {"spatial_shapes": torch.tensor([[2, 2]]), "pixel_attention_mask": torch.ones(1, 4).int()},
    ),
    "llama4": (1, (1, 3, 8, 8), {}),
    "mistral3": (2, (1, 3, 8, 16), {"image_sizes": torch.tensor([[8, 16]])}),
    "qwen2_vl": (4, (16, 96), {"image_grid_thw": GRID}),
    "qwen2_5_vl": (4, (16, 96), {"image_grid_thw": GRID}),
    "qwen3_vl": (4, (16, 96), {"image_grid_thw": GRID}),
    "qwen3_vl_moe": (4, (16, 96), {"image_grid_thw": GRID}),
    "qwen3_5": (4, (16, 96), {"image_grid_thw": GRID}),
    "qwen3_5_moe": (4, (16, 96), {"image_grid_thw": GRID}),
    "voxtral": (2, (1, 5, 8), {}),
}


def image_inputs(model_type, rng):
    """A text with an image."""
    tokens, shape, inputs = IMAGES[model_type]
    ids = torch.randint(3, 46, (1, 9), generator=rng)
    ids[:, 2 : 2 + tokens] = IMAGE
    kinds = dict.fromkeys(["token_type_ids", "mm_token_type_ids"], (ids == IMAGE).int())
    kinds.pop("mm_token_type_ids" if model_type == "gemma3" else "token_type_ids")
    pixels = torch.randn(shape, generator=rng, dtype=torch.float64)
    if model_type == "voxtral":
        return {"input_ids": ids, "input_features": pixels}
    return {"input_ids": ids, "pixel_values": pixels, **inputs, **kinds}


def outputs(model, seed=0):
    """Outputs at the unmasked positions of a padded batch, float64: {name: (positions, width)}.

    Of a model that reads images, those of a text with an image too.
    """
    found = {}
    for label, inputs in batches(model, seed).items():
        mask = inputs.get("attention_mask")
        at = torch.ones(0) if mask is None else mask.view(-1, mask.shape[-1]).bool()
        with torch.no_grad():
            result = run(model, inputs)
        of = {n: x[at] if x.shape[:2] == at.shape else x for n, x in result.items()}
        found |= {label + name: x for name, x in of.items()}
    return found


def batches(model, seed=0):
    """Inputs that reach all of a model: what their outputs' names begin with -> keywords."""
    if takes_images(model):
        return {"": images(model, seed)}
    found = {"": text_inputs(model, seed)}
    if model.config.model_type in IMAGES:
        rng = torch.Generator().manual_seed(seed)
        found["image "] = image_inputs(model.config.model_type, rng)
    return found


def run(model, inputs):
    """The outputs of a model in float64, by their names."""
    with Float64Everywhere():
        result = model(**inputs)
    if getattr(result, "logits_per_image", None) is not None:
        # those of SigLIP have the width of the stream
        return {"logits_per_image": result.logits_per_image}
    names = ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")
    names += ("mc_logits", "reconstruction", "text_embeds", "image_embeds")
    found = {n: getattr(result, n) for n in names if getattr(result, n, None) is not None}
    return found or {"last_hidden_state": result.last_hidden_state}


def takes_images(model):
    """Whether it reads no text, or compares images with one."""
    compares = hasattr(model, "logit_scale") and hasattr(model.config, "vision_config")
    return model.main_input_name != "input_ids" or compares


def images(model, seed=0):
    """Random images or sound for a model, with patches masked if it can mask."""
    rng = torch.Generator().manual_seed(seed)
    shape = ModelSpec.of(model.config, type(model).__name__).input_shape
    name, text = input_names(model)
    inputs = {name: torch.randn(3, *shape, generator=rng, dtype=torch.float64)}
    names, takes = dict(model.named_parameters()), inspect.signature(model.forward).parameters
    patches = math.prod(shape[1:]) // getattr(model.config, "patch_size", 1) ** 2
    if "bool_masked_pos" in takes and any("mask_token" in name for name in names):
        inputs["bool_masked_pos"] = torch.rand(3, patches, generator=rng) < 0.5
    if text:
        inputs[text] = torch.randint(3, 50, (3, 9), generator=rng)
    if "noise" in takes:
        inputs["noise"] = torch.rand(3, patches, generator=rng)
    return inputs


def text_inputs(model, seed=0):
    """A padded batch of random text."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (3, 9), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if hasattr(model, "classification_head"):
        # an encoder-decoder that classifies looks for the end of the text
        ids[:, 5] = model.config.eos_token_id
    elif model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
        inputs["decoder_input_ids"] = torch.randint(3, 50, (3, 9), generator=rng)
    if re.match("Longformer.*(Question|Choice)", type(model).__name__):
        # tokens before the second separator attend to all others
        ids[:, 2:5] = model.config.sep_token_id
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: x[None] for name, x in inputs.items()}
    return inputs


def relative_error(source, grown):
    """Largest output difference over the largest output; hidden states read back through copies."""
    old, new = outputs(source), outputs(grown)
    assert old.keys() == new.keys()
    errors = []
    for name, x in old.items():
        y = new[name]
        if name.endswith("last_hidden_state"):
            plan = grown.growth_plan
            name = plan.small.output_space
            space = plan.layout.space(name)
            copy = ~space.is_extra
            y, x = y[..., copy] / space.write[copy], x[..., space.read_index[copy]]
        errors.append(((x - y).abs().max() / x.abs().max()).item())
    return max(errors)
