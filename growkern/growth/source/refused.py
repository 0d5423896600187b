"""The kinds of sources that growth knows and cannot grow, each with the command that fixes it.

A path is checked before PyTorch is imported, so that a wrong one is told at once.

A new kind is one more entry of `KINDS` or `UNDO`. Directories are told apart by the names of their
files, quantised checkpoints by their config and by the dtypes of their tensors.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from growkern.errors import GrowthError
from growkern.families import load_family, shipped_table, supported_families
from growkern.files import read_json
from growkern.package import DOCS

ADAPTER_FILE, CONFIG_FILE = "adapter_config.json", "config.json"
# written by torch.distributed.checkpoint
METADATA_FILE = ".metadata"
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
# what the tensors of a model are, by a part of the names that its nearest family lacks
OBSTACLES = (
    ("state-space layers (Mamba)", "mixer.A_log"),
    ("state-space layers (Mamba)", "mamba.A_log"),
    # of the first version, whose steps come from it
    ("state-space layers (Mamba)", ".x_proj"),
    ("layers of gated delta attention", "gate.A_log"),
    ("an indexer that chooses which tokens a layer attends to", "indexer."),
    ("keys and values compressed over several tokens", "compressor."),
    ("several residual streams (hyper-connections)", "_hc."),
    ("experts chosen by a token's number", "tid2eid"),
    ("a gate on every attention head", "self_attn.g_proj"),
    ("short convolutions", "conv."),
    ("inputs of its own for each layer", "per_layer"),
    ("latent attention", "kv_a_"),
    ("experts", "experts."),
    ("cross-attention", "cross_attn"),
    ("cross-attention", "encoder_attn"),
)
# of a model's layers; more of them add no names and no kinds of layers
FEW_LAYERS = 8
# name -> shape of a model's tensors
Shapes = dict[str, tuple[int, ...]]
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


def refuse_bare(directory: Path) -> None:
    """Refuse a directory without weights. PyTorch is not needed to tell."""
    if is_bare(directory):
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


def known_type(data: Mapping[str, Any]) -> Any:
    """The model_type of a config's JSON; of its class, where transformers knows that alone.

    Kimi K2 is such a model: a `DeepseekV3ForCausalLM` of the type "kimi_k2". MiMo-7B is another,
    whose class is one of a table by the key `also`.
    """
    import transformers

    kind, names = data.get("model_type"), data.get("architectures")
    if kind in transformers.CONFIG_MAPPING or not (names and isinstance(names, list)):
        return kind
    cls = getattr(transformers, str(known_class(names[0])), None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    own = getattr(cls, "config_class", None) if is_model else None
    return getattr(own, "model_type", kind)


def known_class(name: Any) -> Any:
    """The name that transformers has for a class of `architectures`; the name itself if none.

    Either they differ by underscores and case alone, as KimiK25ForConditionalGeneration of Kimi
    K2.5's own code and Kimi_K25ForConditionalGeneration, or a table has the name in `also`.
    """
    import transformers

    def bare(name: str) -> str:
        return name.replace("_", "").lower()

    # `hasattr` would import the class and its modelling code, and `dir` takes 0.3 s
    known = [*vars(transformers), *transformers.__all__]
    if not isinstance(name, str) or name in known:
        return name
    also = (shipped_table(kind).get("also", {}).get(name) for kind in supported_families())
    return next(chain((own for own in known if bare(own) == bare(name)), filter(None, also)), name)


def refuse_unknown(model_type: str, data: Mapping[str, Any], place: str = "") -> NoReturn:
    """Refuse the JSON of a config without a table; the error says what is known of such a model.

    `place` is the directory with that config; "": the model is in memory.
    """
    raise GrowthError(
        f"model_type {model_type!r} has no family table; {_what_it_is(model_type, data, place)}"
    )


def _what_it_is(model_type: str, config: Mapping[str, Any], place: str) -> str:
    """Clauses about a model without a table: what is in the way, and what may help."""
    within = config.get("text_config")
    kind = known_type(within) if isinstance(within, Mapping) else None
    if kind in supported_families():
        return f"its text_config is a {kind}, which has a table: grow that part by itself"
    shapes = _shapes_of(model_type, config)
    if not shapes and isinstance(kind, str) and (shapes := _shapes_of(kind, within or {})):
        return f"its text_config is a {kind}; {_described(shapes, place)}"
    if shapes:
        return _described(shapes, place)
    import transformers

    # its class may have no default for a size
    is_known = model_type in transformers.CONFIG_MAPPING
    tried = f"{_draft(place)} names its nearest family: {DOCS}/add_model.md; " if is_known else ""
    return (
        f"transformers {transformers.__version__} cannot build it from its config class alone; "
        f"{tried}growkern.widen grows models of any class: {DOCS}/own_models.md"
    )


def _draft(place: str) -> str:
    """The call that drafts a table for the model in a directory, or in memory."""
    command = f"growkern family draft {shlex.quote(place)}"
    return command if place else "growkern.draft_family(model.config)"


def _described(shapes: Shapes, place: str) -> str:
    """What stands in the way of a model with these tensors, its nearest family, what may help."""
    unknown, likest, nearest = _compared(_short(shapes))
    found = [what for what, part in OBSTACLES if any(part in name for name in unknown)]
    obstacles = list(dict.fromkeys(found))
    obstacles = obstacles or _uneven(shapes)
    if not obstacles and unknown:
        others = f" and {len(unknown) - 1} other tensors" if len(unknown) > 1 else ""
        obstacles = [f"{unknown[0]}{others}, which {likest} lacks"]
    clauses = [
        *(f"it has {what}" for what in obstacles),
        nearest,
        f"{_draft(place)} writes a table of your own and checks it: {DOCS}/add_model.md",
    ]
    return "; ".join(clauses)


def _uneven(shapes: Shapes) -> list[str]:
    """The tensor of attention, if any, whose shape differs between layers."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(re.sub(r"\.\d+\.", ".{l}.", name), set()).add(shape)
    uneven = sorted(name for name, own in found.items() if len(own) > 1 and "attn." in name)
    names = [".".join(name.split(".")[-3:]) for name in uneven]
    return [f"layers whose {names[0]} differ in shape"] if names else []


def nearest_family(names: Iterable[str]) -> str:
    """A clause that names the family with the most of a model's tensors."""
    return _compared(_short(names))[2]


def _compared(names: set[str]) -> tuple[list[str], str, str]:
    """The names that the nearest family lacks, that family, and a clause that names it."""
    # of families with equally many of its names, the one with the fewest others
    known = {kind: _names_in_table(kind) for kind in supported_families()}
    likest = max(known, key=lambda kind: (len(names & known[kind]), -len(known[kind])))
    share = len(names & known[likest]) / len(names)
    nearest = f"nearest: {likest} ({share:.0%} of its tensor names)"
    return sorted(names - known[likest]), likest, nearest


def _shapes_of(model_type: str, data: Mapping[str, Any]) -> Shapes:
    """Name -> shape of the tensors of such a model, with the flags of its config.

    Sizes are those of its class, and layers are few. Empty if transformers has no such model.
    """
    import torch
    import transformers

    for flags, layers in (
        (_flags(data, on=True), FEW_LAYERS),
        (_flags(data, on=False), FEW_LAYERS),
        ({}, FEW_LAYERS),
        ({}, None),
    ):
        try:
            # the sizes of a file that is refused could take any time
            config = transformers.CONFIG_MAPPING[model_type](**flags)
            text = config.get_text_config()
            if layers is not None:
                text.num_hidden_layers = min(layers, text.num_hidden_layers)
            with torch.device("meta"):
                model = transformers.AutoModel.from_config(config)
            return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        except Exception:
            # of any type: the model is refused in any case
            continue
    return {}


def _flags(data: Mapping[str, Any], *, on: bool) -> dict[str, Any]:
    """What a config says besides sizes: what the model has none of and, with `on`, what it has."""
    flags = {k: v for k, v in data.items() if v in (False, on) and type(v) in (bool, int)}
    parts = {k: v for k, v in data.items() if k.endswith("_config") and isinstance(v, Mapping)}
    kinds = {k: {"model_type": v["model_type"]} for k, v in parts.items() if "model_type" in v}
    return flags | {k: _flags(part, on=on) | kinds.get(k, {}) for k, part in parts.items()}


def _names_in_table(model_type: str) -> set[str]:
    """The names of a family's tensors in any of its bodies."""
    family, names = load_family(model_type), set[str]()
    parts = {part for model_class in family.classes.values() for part in model_class.body}
    for row in (row for part in parts for row in family.tensors[part]):
        is_norm = row.norm and not row.alone
        names |= {f"{row.name}.weight", f"{row.name}.bias"} if is_norm else {row.name}
    return _short(names)


def _short(names: Iterable[str]) -> set[str]:
    """Names behind the number of a layer: what is before it differs between classes."""
    behind = (re.split(r"\.(?:\d+|\{l\})\.", name, maxsplit=1)[-1] for name in names)
    return {".".join(name.split(".")[-3:]) for name in behind}
