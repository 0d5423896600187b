"""The kinds of sources that growth knows and cannot grow, each with what to do instead.

A path is checked before PyTorch is imported, so that a wrong one is told at once.

A new kind is one more entry of `KINDS` or `UNDO`. Directories are told apart by the names of their
files, quantised checkpoints by their config and by the dtypes of their tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import read_json

ADAPTER_FILE, CONFIG_FILE = "adapter_config.json", "config.json"
# written by torch.distributed.checkpoint
METADATA_FILE = ".metadata"
# of a checkpoint of a sharded run, beside its config
WEIGHTS, OPTIMIZER = "weights", "optimizer"
# names of files that a loader may read as the model's weights, in formats that growth cannot open
OTHER_WEIGHTS = (
    *("pytorch_model*.bin*", "adapter_model*.bin", "tf_model*.h5*", "flax_model*.msgpack*"),
    *("consolidated*.pth", "*.gguf", "*.distcp"),
)
# weights that only other programs read
FOREIGN = ("*.h5", "*.msgpack", "*.onnx*", "*.ot")
# these, and the state of training
STATE_FILES = (
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt*", "*.distcp", "*.npy", "*.npz"),
    *FOREIGN,
    *("trainer_state.json", "log.jsonl", "*_results.json", "events.out.tfevents.*"),
)
# weights that growth opens
WHOLE = ("*.safetensors", "*.safetensors.index.json", METADATA_FILE)
WITHOUT_WEIGHTS = (
    "{}: a config without weights, which is enough for a plan alone: give its safetensors files too"
)
# a config is read for the name of a class; larger ones are refused elsewhere
MOST_BYTES = 4_000_000
# of models that the Hub once had without one, by how their names begin
ORGANISATIONS = {
    "gpt2": "openai-community",
    "bert-": "google-bert",
    "distil": "distilbert",
    "roberta-": "FacebookAI",
    "xlm-roberta-": "FacebookAI",
    "t5-": "google-t5",
}


QUANTISED = (
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    "quantization_config.json",
)
# refused beside whole weights too: transformers would load adapters and a model, and growth only
# one of them, and a config may not say that its weights are quantised
ALWAYS = (ADAPTER_FILE, *QUANTISED)
# patterns of names -> what a directory with such a file holds, {file}, and what to do instead
KINDS = {
    (ADAPTER_FILE,): (
        "adapters of PEFT, not a whole model: load them with peft, and save what "
        "merge_and_unload() returns"
    ),
    QUANTISED: (
        "quantised weights, by {file}: grow the checkpoint that they were made from, and quantise "
        "the result"
    ),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"): (
        "only pickled weights (*.bin): load them with transformers and use save_pretrained, which "
        "writes safetensors"
    ),
    ("optimizer_groups.pt",): (
        "only weights of a sharded run, in the parts of its processes: make a directory of them by "
        "`growkern export`, or grow them"
    ),
    ("*.distcp",): (
        "only parts of a checkpoint of torch.distributed.checkpoint, without its .metadata: copy "
        "that file too"
    ),
    ("*.gguf",): (
        "only weights in the format GGUF, which are usually quantised: grow the checkpoint that "
        "they were made from, or load them with from_pretrained(..., gguf_file={file!r}) and use "
        "save_pretrained"
    ),
    ("consolidated*.pth",): (
        "only weights in the original format of Meta (consolidated*.pth): grow the version of the "
        "model for transformers, whose weights are safetensors"
    ),
    ("tf_model*.h5", "flax_model*.msgpack"): (
        "only weights of TensorFlow or Flax: load them with transformers 4 (from_tf=True or "
        "from_flax=True) and use save_pretrained"
    ),
    ("*.onnx",): "only a model in the format ONNX: grow the checkpoint that it was exported from",
    ("modules.json",): (
        "a model of sentence-transformers whose weights lie in a folder: load it with a newer "
        "version of sentence-transformers and use save"
    ),
}

# methods that growkern undoes itself; growth, with dequantize=True
READ = ("fp8", "mxfp4")
# method of a quantised checkpoint -> how transformers undoes it
UNDO = {
    **dict.fromkeys(
        READ,
        "give dequantize=True (--dequantize), to grow the numbers in bfloat16 that its weights "
        "stand for",
    ),
    **dict.fromkeys(
        ("bitsandbytes", "higgs"), "load it with transformers, and save what dequantize() returns"
    ),
    # in its original format, transformers would quantise the weights again
    "compressed-tensors": "load it with quantization_config=CompressedTensorsConfig("
    "dequantize=True), and use save_pretrained(..., save_original_format=False)",
}
# keys under which configs say that weights are quantised; the second of older compressed-tensors
QUANTISATION = ("quantization_config", "compression_config")
# of a config that does not say how
UNNAMED = "its config names no quant_method"
# rows of a block are computed at once
MOST_BLOCK = 1024


def config_directory(directory: Path) -> Path:
    """The directory that holds the config and the companions of a checkpoint."""
    file = directory / CONFIG_FILE
    if not directory.is_dir():
        refuse_directory(directory)
        raise GrowthError(f"{directory}: no such directory{_meant(directory)}")
    if (directory / METADATA_FILE).is_file() and not file.is_file():
        # trainers save sharded weights in a subdirectory of the model's directory
        file = directory.parent / CONFIG_FILE
    if not file.is_file():
        refuse_directory(directory)
        raise GrowthError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    return file.parent


def _meant(directory: Path) -> str:
    """The end of a message about a name that is no directory: which model on the Hub it may be."""
    name, parts = str(directory), len(directory.parts)
    if parts == 1 and not directory.is_absolute():
        owner = next((x for start, x in ORGANISATIONS.items() if name.startswith(start)), "")
        known = f"; on the Hub it is {owner}/{name}"
        return known if owner else "; a model on the Hub is named ORGANISATION/NAME"
    if parts == 2 and not name.startswith(("/", "..")) and directory.parent.is_dir():
        return (
            f", while {directory.parent} is one; for a model on the Hub, run "
            f"`hf download {directory}` and give the directory that it prints"
        )
    return ""


def refuse_files(place: str, names: Collection[str]) -> None:
    """Refuse a source whose files show that it is of a kind that cannot be grown.

    `place` names it in the message: a directory, or an id on the Hub.
    """
    is_whole = any(fnmatch(name, pattern) for name in names for pattern in WHOLE)
    for patterns, what in KINDS.items():
        files = [n for n in sorted(names) for pattern in patterns if fnmatch(n, pattern)]
        if files and (files[0] in ALWAYS or not is_whole):
            raise GrowthError(f"{place} holds {what.format(file=files[0])}")


def refuse_directory(directory: Path) -> None:
    """`refuse_files` for a directory on this machine, or for a single file."""
    if directory.is_file():
        refuse_files(str(directory), [directory.name])
        raise GrowthError(f"{directory} is a file: give the directory of a checkpoint")
    names = [file.name for file in directory.iterdir()] if directory.is_dir() else []
    refuse_files(str(directory), names)


def is_bare(directory: Path, own: Collection[str] = (*WHOLE, *OTHER_WEIGHTS)) -> bool:
    """Whether a directory holds no weights: no files of these patterns, or of other programs."""
    names = (file.name for file in directory.iterdir())
    return not any(fnmatch(name, pattern) for name in names for pattern in (*own, *FOREIGN))


def pieces_in(directory: Path, folder: str = WEIGHTS) -> Path:
    """Where the files of a distributed checkpoint lie: in it or, of a sharded run, in a folder."""
    is_run = (directory / WEIGHTS / METADATA_FILE).is_file() and is_bare(directory)
    return directory / folder if is_run else directory


def refuse_bare(directory: Path) -> None:
    """Refuse a directory without weights. PyTorch is not needed to tell."""
    if is_bare(pieces_in(directory)):
        refuse_directory(directory)
        raise GrowthError(WITHOUT_WEIGHTS.format(directory))


def refuse_adapter_directory(directory: Path) -> None:
    """Refuse a directory that holds adapters, whatever else is in it."""
    if (directory / ADAPTER_FILE).is_file():
        refuse_files(str(directory), [ADAPTER_FILE])


def config_of(directory: Path) -> Mapping[str, Any]:
    """The JSON object of a checkpoint's config; empty if it cannot be read."""
    try:
        content = read_json(directory / CONFIG_FILE, MOST_BYTES, "config")
    except GrowthError:
        return {}
    return content if isinstance(content, dict) else {}


def quantised_advice(method: str = "") -> str:
    """What to do with a quantised checkpoint, as the end of an error message.

    `method` is how it was quantised, by its config: "gptq".
    """
    advice = "use the full-precision checkpoint that it was made from, and quantise the result"
    return f"{advice}; or {UNDO[method]}" if method in UNDO else advice


def _where_quantised(config: Any) -> tuple[Any, str] | None:
    """The config, or that of its text model, which says that it is quantised, and the key."""
    owners = config, config.get_text_config()
    return next(
        ((x, name) for name in QUANTISATION for x in owners if getattr(x, name, None) is not None),
        None,
    )


def quantisation_of(config: Any) -> tuple[str, dict[str, Any]]:
    """The method by which a model was quantised, and its settings; "" if it was not."""
    where = _where_quantised(config)
    if where is None:
        return "", {}
    settings = getattr(*where)
    values = settings if isinstance(settings, dict) else vars(settings)
    method, own = (values.get(name) for name in ("quant_method", "quant_algo"))
    # files with an algorithm of its own differ from others of the method
    names = [str(getattr(name, "value", name)) for name in (method, own) if name]
    return " ".join(names) or UNNAMED, values


def refuse_quantised(config: Any, place: str = "") -> None:
    """Refuse the config of a quantised model."""
    method, _ = quantisation_of(config)
    if not method:
        return
    where, advice = (f"{place} is", method) if place else ("the model is", "")
    raise GrowthError(f"{where} quantised ({method}): {quantised_advice(advice)}")


def scale_block(config: Any, directory: Path, *, dequantize: bool) -> tuple[int, ...] | None:
    """Take the quantisation out of the config of a source whose weights are to be dequantised.

    Returns the rows and columns that share a scale; (0, 0) where each tensor has one scale, ()
    where the weights have 4 bits, and None without quantisation. Other ways to quantise are
    refused, and all of them without `dequantize`.
    """
    method, values = quantisation_of(config)
    if not method:
        # a second file may say it
        beside = config_directory(directory)
        names = [name for name in QUANTISED if (beside / name).is_file()]
        refuse_files(str(directory), names)
        return None
    block = _block_of(values, str(directory)) if method == "fp8" else ()
    if not dequantize or method not in READ:
        refuse_quantised(config, str(directory))
    leave_out_quantisation(config)
    return block


def leave_out_quantisation(config: Any) -> None:
    """Turn the config of a quantised model into that of the numbers its weights stand for."""
    where = _where_quantised(config)
    if where is None:
        return
    import torch

    delattr(*where)
    # a config may name none
    config.dtype = config.dtype or torch.bfloat16


def _block_of(values: Mapping[str, Any], place: str) -> tuple[int, int]:
    """The rows and columns that share a scale of fp8."""
    block = values.get("weight_block_size")
    if block is None:
        return 0, 0
    sizes = list(block) if isinstance(block, (list, tuple)) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= MOST_BLOCK for n in sizes):
        raise GrowthError(
            f"{place}: weight_block_size is {block!r} in its quantization_config: growkern reads "
            "weights with a scale for every block, such as [128, 128], or for every tensor"
        )
    return sizes[0], sizes[1]


def refuse_adapters(model: Any, role: str) -> None:
    """Refuse a model with adapters, as a small model computes the sum of both; for its `role`."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise GrowthError(
            f"the {role} ({type(model).__name__}) has adapters of PEFT, which belong to the small "
            "weights they were trained beside: use merge_and_unload().requires_grad_()"
        )
