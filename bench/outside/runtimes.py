"""What each runtime computes of a directory. None of them shares code with growkern."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from bench.outside.models import ids


def _model(directory: Path) -> Any:
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    load = getattr(transformers, name).from_pretrained
    return _eager(load(directory, attn_implementation="eager"))


def _eager(model: Any) -> Any:
    if getattr(model, "_can_set_experts_implementation", bool)():
        # grouped products want sizes that tiny models do not have
        model.set_experts_implementation("eager")
    return model.eval()


def other_transformers(directory: Path) -> torch.Tensor:
    """Logits of the transformers of DIR; version 4 does not know `rope_parameters`."""
    with torch.no_grad():
        return _model(directory)(input_ids=ids()).logits


def ctranslate2(directory: Path) -> torch.Tensor:
    """Logits of ctranslate2; it has no heads of masked models."""
    import ctranslate2 as runtime
    from ctranslate2.converters import TransformersConverter

    if "Masked" in (directory / "config.json").read_text():
        raise NotImplementedError("no head for masked tokens")
    with tempfile.TemporaryDirectory() as place:
        TransformersConverter(str(directory)).convert(place, force=True)
        tokens = [[f"w{i}" for i in row] for row in ids().tolist()]
        return torch.tensor(numpy.array(runtime.Generator(place).forward_batch(tokens)))


def onnxruntime(directory: Path) -> torch.Tensor:
    """Logits of onnxruntime, by the exporter of PyTorch."""
    import onnxruntime as runtime

    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            kept = {} if "Masked" in type(self.model).__name__ else {"use_cache": False}
            logits: torch.Tensor = self.model(input_ids=ids, **kept).logits
            return logits

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.onnx"
        torch.onnx.export(Logits(_model(directory)), (ids(),), file, dynamo=True, verbose=False)
        session = runtime.InferenceSession(str(file))
        (outputs,) = session.run(None, {session.get_inputs()[0].name: ids().numpy()})
    return torch.from_numpy(outputs)


def mlx(directory: Path) -> torch.Tensor:
    """Logits of mlx-lm, on the CPU; it has decoders alone."""
    import mlx.core as runtime
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(directory)
    except SystemExit as stop:
        # it ends the process where the package of a family is missing
        raise NotImplementedError("a package of this family is missing") from stop
    return torch.from_numpy(numpy.array(model(runtime.array(ids().numpy()))))


def torchtitan(directory: Path) -> torch.Tensor:
    """Logits of torchtitan."""
    with torch.no_grad():
        return titan_logits(titan_model(directory)[0])


def titan_logits(model: Any) -> torch.Tensor:
    """Its experts multiply in bfloat16, which would hide small differences; here in float32."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        logits: torch.Tensor = model(ids(), torch.arange(ids().shape[1]).expand(ids().shape))
    return logits


def titan_model(directory: Path) -> tuple[Any, Any]:
    """The model of torchtitan, and its adapter, which maps the names of the Hugging Face model.

    Its attention needs a GPU or a compiler, so PyTorch's takes its place.
    """
    import torch.distributed.checkpoint as dcp
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = json.loads((directory / "config.json").read_text())
    kind, rotary = config["model_type"], config.get("rope_parameters", {})
    known = {"llama": ("default", "llama3"), "qwen3": ("default",), "qwen3_moe": ("default",)}
    if rotary.get("rope_type") not in known.get(kind, ()):
        raise NotImplementedError("only Llama 3, Qwen3 and Qwen3-MoE are built here")
    room = llama3 if kind == "llama" else qwen3
    model_class, adapter_class, build = {
        "llama": ("Llama3Model", "Llama3StateDictAdapter", "_build_llama3_layers"),
        "qwen3": ("Qwen3Model", "Qwen3StateDictAdapter", "_build_qwen3_layers"),
        "qwen3_moe": ("Qwen3Model", "Qwen3StateDictAdapter", "_build_qwen3_moe_layers"),
    }[kind]
    plain = {"get_attention_config": lambda backend: ScaledDotProductAttention.Config()}
    with mock.patch.multiple(room, **plain):
        layers = getattr(room, build)(
            **_titan_sizes(config), fuse_qkv=True, attn_backend="PyTorch's, see above"
        )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = config["rms_norm_eps"]
    width, words = config["hidden_size"], config["vocab_size"]
    made = getattr(room, model_class).Config(
        **{"dim": width, "vocab_size": words, "layers": layers, "norm": layers[0].ffn_norm},
        tok_embeddings=Embedding.Config(num_embeddings=words, embedding_dim=width),
        lm_head=Linear.Config(in_features=width, out_features=words),
        enable_weight_tying=config["tie_word_embeddings"],
    )
    model, adapter = made.build(), getattr(room, adapter_class)(made, str(directory))
    # as `checkpoint.initial_load_in_hf` does: a name or shape that is missing is an error
    state = adapter.to_hf(model.state_dict())
    dcp.load(state, storage_reader=adapter.get_hf_storage_reader(str(directory)))
    lost = model.load_state_dict(adapter.from_hf(state), strict=False).missing_keys
    if lost := sorted({*lost} & {*dict(model.named_parameters())}):
        raise ValueError(f"parameters without a value: {lost}")
    return model, adapter


def _titan_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of torchtitan's builders of layers."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    rotary, kind = config["rope_parameters"], config["model_type"]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    rope = {"dim": head_dim, "theta": rotary["rope_theta"]}
    rope |= {"max_seq_len": config["max_position_embeddings"]}
    sizes = {"n_layers": config["num_hidden_layers"], "dim": config["hidden_size"]}
    sizes |= {"n_heads": heads, "n_kv_heads": config["num_key_value_heads"]}
    if kind == "llama":
        if head_dim * heads != config["hidden_size"]:
            raise NotImplementedError("its Llama computes head_dim")
        if rotary["rope_type"] == "llama3":
            same = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            rope |= {key: rotary[key] for key in same}
            rope |= {"scaling": "llama", "scaling_factor": rotary["factor"]}
        rope_config = ComplexRoPE.Config(**rope)
    else:
        sizes["head_dim"], rope_config = head_dim, CosSinRoPE.Config(**rope)
    sizes["rope"] = rope_config
    if kind != "qwen3_moe":
        return sizes | {"hidden_dim": config["intermediate_size"]}
    if not config["norm_topk_prob"]:
        raise NotImplementedError("it divides the weights of experts by their sum")
    sizes |= {"moe_hidden_dim": config["moe_intermediate_size"], "moe_comm_backend": "standard"}
    sizes["num_experts"] = config.get("num_experts") or config["num_local_experts"]
    return sizes | {"top_k": config["num_experts_per_tok"]}


def llama_cpp(directory: Path) -> torch.Tensor:
    """Logits of llama.cpp, of the file of its converter.

    The converter knows tokenizers by their hash, so none is written.
    """
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    def no_words(self: Any) -> None:
        self._set_vocab_none()
        if not any(key.endswith(".vocab_size") for key in self.gguf_writer.kv_data[0]):
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    fields = ModelBase.load_hparams(directory, False)
    converter = get_model_class(get_model_architecture(fields, ModelType.TEXT))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.gguf"
        with mock.patch.object(converter, "set_vocab", no_words):
            converter(directory, gguf.LlamaFileType.ALL_F32, file).write()
        # a model that does not suit it ends the process
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return torch.stack([*pool.map(_of_llama_cpp, repeat(str(file)), ids().tolist())])


def _of_llama_cpp(file: str, row: list[int]) -> torch.Tensor:
    import llama_cpp as runtime

    # a cache in 16 bits would hide small differences
    exact = {"type_k": runtime.GGML_TYPE_F32, "type_v": runtime.GGML_TYPE_F32, "n_threads": 1}
    model = runtime.Llama(file, logits_all=True, verbose=False, n_ctx=64, **exact)
    model.eval(row)
    return torch.tensor(model.scores[: len(row)])


RUNTIMES: dict[str, Callable[[Path], torch.Tensor]] = {
    "transformers": other_transformers,
    "ctranslate2": ctranslate2,
    "onnxruntime": onnxruntime,
    "mlx": mlx,
    "torchtitan": torchtitan,
    "llama.cpp": llama_cpp,
}
# the packages whose names differ from the runtimes'
PACKAGES = {"mlx": "mlx-lm", "llama.cpp": "llama_cpp_python"}
