"""The kinds of sources that growth knows and cannot grow, each with the command that fixes it.

A path is checked before PyTorch is imported, so that a wrong one is told at once.

A new kind is one more entry of `KINDS` or `UNDO`. Directories are told apart by the names of their
files, quantised checkpoints by their config and by the dtypes of their tensors.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

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
    *("consolidated*.pth", "*.gguf"),
)
# weights that only other programs read
FOREIGN = ("*.h5", "*.msgpack", "*.onnx*", "*.ot")
# these, and the state of training
STATE_FILES = (
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt*", "*.distcp", "*.npy", "*.npz"),
    *FOREIGN,
    *("trainer_state.json", "*_results.json", "events.out.tfevents.*"),
)
# weights that growth opens
WHOLE = ("*.safetensors", "*.safetensors.index.json", METADATA_FILE)
WITHOUT_WEIGHTS = (
    "{}: a config without weights, which is enough for a plan alone: give its safetensors files too"
)
# a config is read for the name of a class; larger ones are refused elsewhere
MOST_BYTES = 4_000_000
# task_type of an adapter -> the class that loads it with its model
PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}

# the end of a message about a name that is no directory
ON_THE_HUB = "; a model on the Hub is named ORGANISATION/NAME"
# of models that the Hub once had without one, by how their names begin
ORGANISATIONS = {
    "gpt2": "openai-community",
    "bert-": "google-bert",
    "distil": "distilbert",
    "roberta-": "FacebookAI",
    "xlm-roberta-": "FacebookAI",
    "t5-": "google-t5",
}


class Kind(NamedTuple):
    """A kind of directory that cannot be grown."""

    what: str  # completes "DIRECTORY holds ..."; may use {file}
    files: tuple[str, ...]  # patterns of names: a directory with such a file is of this kind
    always: bool  # also if whole weights lie beside the file
    advice: str  # what to do, before the code
    # Python that makes a directory to grow, if there is any. It may use {place}, {new},
    # {model_class}, {peft_class} and {file}
    code: str = ""
    here: str = ""  # the same where it can be done inside a directory on this machine
    model_class: str = "AutoModel"


QUANTISED = Kind(
    "quantised weights, by {file}",
    (
        *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
        "quantization_config.json",
    ),
    True,  # config.json may say nothing of it
    "grow the checkpoint that they were made from, and quantise the result",
)
KINDS = (
    Kind(
        "adapters of PEFT, not a whole model",
        (ADAPTER_FILE,),
        True,  # transformers would load both, and growth only one of them
        "merge them into their model",
        "from peft import {peft_class} as M; "
        "M.from_pretrained({place!r}).merge_and_unload().save_pretrained({new!r})",
    ),
    QUANTISED,
    Kind(
        "only pickled weights (*.bin)",
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
        False,
        "save them as safetensors",
        "import transformers as t; [c.from_pretrained({place!r}).save_pretrained({new!r}) "
        "for c in (t.{model_class}, t.AutoTokenizer)]",
        # the tokenizer and all other files stay beside the weights
        "import transformers as t; "
        "t.{model_class}.from_pretrained({place!r}).save_pretrained({place!r})",
    ),
    Kind(
        "only weights of a sharded run, in the parts of its processes",
        ("optimizer_groups.pt",),
        False,
        "make a directory of them by `growkern export`, or grow them",
    ),
    Kind(
        "only weights in the format GGUF, which are usually quantised",
        ("*.gguf",),
        False,
        "grow the checkpoint that they were made from, or convert them (needs: pip install gguf)",
        "import transformers as t; [c.from_pretrained({place!r}, gguf_file={file!r})"
        ".save_pretrained({new!r}) for c in (t.{model_class}, t.AutoTokenizer)]",
        model_class="AutoModelForCausalLM",
    ),
    Kind(
        "only weights in the original format of Meta (consolidated*.pth)",
        ("consolidated*.pth",),
        False,
        "grow the version of the model for transformers, whose weights are safetensors",
    ),
    Kind(
        "only weights of TensorFlow or Flax",
        ("tf_model*.h5", "flax_model*.msgpack"),
        False,
        "load them with transformers 4 (from_tf=True or from_flax=True) and use save_pretrained",
    ),
    Kind(
        "only a model in the format ONNX",
        ("*.onnx",),
        False,
        "grow the checkpoint that it was exported from",
    ),
    Kind(
        "a model of sentence-transformers whose weights lie in a folder",
        ("modules.json",),
        False,
        "save it with a newer version of sentence-transformers",
        "from sentence_transformers import SentenceTransformer as S; S({place!r}).save({new!r})",
    ),
)

# method of a quantised checkpoint -> arguments of `from_pretrained` and the method that undo it.
# Methods that are not listed cannot be undone by transformers
UNDO = {
    "bitsandbytes": ("", ".dequantize()"),
    "higgs": ("", ".dequantize()"),
    "compressed-tensors": (", quantization_config=t.CompressedTensorsConfig(dequantize=True)", ""),
}
# keys under which configs say that weights are quantised; the second of older compressed-tensors
QUANTISATION = ("quantization_config", "compression_config")
# of a config that does not say how
UNNAMED = "its config names no quant_method"
# methods that growkern undoes itself; growth, with dequantize=True
READ = ("fp8", "mxfp4")
# rows of a block are computed at once
MOST_BLOCK = 1024


def config_directory(directory: Path) -> Path:
    """The directory that holds the config and the companions of a checkpoint."""
    file = directory / CONFIG_FILE
    if not directory.is_dir():
        refuse_directory(directory)
        named = "" if directory.is_absolute() or len(directory.parts) > 1 else ON_THE_HUB
        owners = (
            owner for start, owner in ORGANISATIONS.items() if str(directory).startswith(start)
        )
        if named and (owner := next(owners, None)):
            named = f"; on the Hub it is {owner}/{directory}"
        is_name = len(directory.parts) == 2 and not str(directory).startswith(("/", ".."))
        if is_name and directory.parent.is_dir():
            named = (
                f", while {directory.parent} is one; for a model on the Hub, run "
                f"`hf download {directory}` and give the directory that it prints"
            )
        raise GrowthError(f"{directory}: no such directory{named}")
    if (directory / METADATA_FILE).is_file() and not file.is_file():
        # trainers save sharded weights in a subdirectory of the model's directory
        file = directory.parent / CONFIG_FILE
    if not file.is_file():
        refuse_directory(directory)
        raise GrowthError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    return file.parent


def refuse_files(
    place: str,
    names: Collection[str],
    directory: Path | None = None,
    kinds: Iterable[Kind] = KINDS,
) -> None:
    """Refuse a source whose files show that it is of a kind that cannot be grown.

    `place` names it in the message: a directory, or an id on the Hub. In `directory` its configs
    can be read, if it is here.
    """
    is_whole = any(fnmatch(name, pattern) for name in names for pattern in WHOLE)
    for kind in kinds:
        files = [n for n in sorted(names) for pattern in kind.files if fnmatch(n, pattern)]
        if not files or (is_whole and not kind.always):
            continue
        code = ((directory and kind.here) or kind.code).format(
            place=place,
            new=f"{Path(place).name}-whole",
            file=files[0],
            model_class=_class_of(directory, kind.model_class),
            peft_class=_peft_class(directory),
        )
        what = kind.what.format(file=files[0])
        raise GrowthError(f"{place} holds {what}: {kind.advice}{_as_command(code)}")


def refuse_directory(directory: Path) -> None:
    """`refuse_files` for a directory on this machine, or for a single file."""
    if directory.is_file():
        refuse_files(str(directory), [directory.name])
        raise GrowthError(f"{directory} is a file: give the directory of a checkpoint")
    names = [file.name for file in directory.iterdir()] if directory.is_dir() else []
    refuse_files(str(directory), names, directory)


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
        refuse_files(str(directory), [ADAPTER_FILE], directory)


def _as_command(code: str) -> str:
    """The code as the end of a message, quoted for a shell."""
    # double quotes keep the single ones of Python readable
    is_plain = not set(code) & set('"$`\\!')
    quoted = f'"{code}"' if is_plain else shlex.quote(code)
    return f": python -c {quoted}" if code else ""


def _read(file: Path) -> Mapping[str, Any]:
    """A small JSON file; empty if it cannot be read, as only a name for a message is wanted."""
    try:
        content = read_json(file, MOST_BYTES, "config")
    except GrowthError:
        return {}
    return content if isinstance(content, dict) else {}


def config_of(directory: Path) -> Mapping[str, Any]:
    """The JSON object of a checkpoint's config; empty if it cannot be read."""
    return _read(directory / CONFIG_FILE)


def _class_of(directory: Path | None, default: str) -> str:
    names = config_of(directory).get("architectures") if directory else None
    name = names[0] if isinstance(names, list) and names else default
    return name if isinstance(name, str) and name.isidentifier() else default


def _peft_class(directory: Path | None) -> str:
    task = _read(directory / ADAPTER_FILE).get("task_type") if directory else None
    return PEFT_CLASSES.get(str(task), "AutoPeftModel")


def quantised_advice(method: str = "", place: str = "", model_class: str = "") -> str:
    """What to do with a quantised checkpoint, as the end of an error message.

    `method` is how it was quantised, by its config: "gptq". Without one, transformers cannot undo
    it.
    """
    advice = "use the full-precision checkpoint that it was made from, and quantise the result"
    if place and method in READ:
        return (
            f"{advice}; or give dequantize=True (--dequantize), to grow the numbers in bfloat16 "
            "that its weights stand for"
        )
    if not place or method not in UNDO:
        return advice
    arguments, undo = UNDO[method]
    # in its original format, transformers would quantise the weights again
    code = (
        f"import transformers as t; t.{model_class}.from_pretrained({place!r}{arguments}, "
        f"dtype='bfloat16'){undo}"
        f".save_pretrained({Path(place).name + '-whole'!r}, save_original_format=False)"
    )
    return f"{advice}; or undo the quantisation{_as_command(code)}"


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
    where = f"{place} is" if place else "the model is"
    names = getattr(config, "architectures", None) or ("AutoModel",)
    raise GrowthError(
        f"{where} quantised ({method}): {quantised_advice(method, place, str(names[0]))}"
    )


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
        names = [name for name in QUANTISED.files if (beside / name).is_file()]
        refuse_files(str(directory), names, beside)
        return None
    block = _block_of(values, str(directory)) if method == "fp8" else ()
    if not dequantize or method not in READ:
        refuse_quantised(config, str(directory))
    leave_out_quantisation(config)
    return block


def way_around(config: Any, directory: Path) -> str:
    """Which weights growth cannot read as they are, and what it can instead, in a few words."""
    method, _ = quantisation_of(config)
    kind = method if method and method != UNNAMED else "quantised"
    try:
        readable = scale_block(copy.deepcopy(config), directory, dequantize=True) is not None
    except GrowthError:
        readable = False
    way = "with --dequantize" if readable else "from the full-precision checkpoint"
    return f"{kind} weights; {way}"


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
