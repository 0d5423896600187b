"""Loads language models from checkpoint directories, and checks that they fit the data.

Here also is how one runs for the span of a call: without dropout, without a cache, or as a probe.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from growkern.errors import GrowthError, warn
from growkern.families import load_family, supported_families
from growkern.files import read_json
from growkern.growth.sharded import free_gathered
from growkern.growth.source import (
    beside_weights,
    load_model,
    read_config,
    refuse_adapter_directory,
    refuse_links_out,
)
from growkern.train.rules import check

# classes that predict masked tokens, and something else
PRETRAINING = ("BertForPreTraining",)
# classes that predict the next token, also of texts without images
CAUSAL = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
}
# the largest, of 260,000 tokens, have 35 MB; a tokenizer config with all of them has 8 MB
MOST_TOKENIZER_BYTES, MOST_BYTES = 200_000_000, 32_000_000


def load_language_model(directory: Path, dtype: torch.dtype | None = None) -> Any:
    """Load the model of a checkpoint directory in the class that its config names."""
    check_directory(directory)
    return load_model(directory, dtype)


def load_tokenizer(directory: Path, config: Any = None) -> Any:
    """Load the tokenizer of a directory. Code beside it is never run."""
    directory = Path(directory)
    if not directory.is_dir():
        raise GrowthError(
            f"{directory} is not a directory: give one that exists, or download a model from the "
            "Hub first: hf download ORGANISATION/NAME --local-dir DIRECTORY"
        )
    # transformers would make an empty tokenizer, to which every word is unknown
    lacks = GrowthError(
        f"{directory} has no tokenizer files: copy those of the model's tokenizer into it, or name "
        "another directory of a tokenizer"
    )
    if not has_tokenizer(directory):
        raise lacks
    _check_tokenizer_files(directory)
    if config is None and (directory / "config.json").exists():
        config = read_config(directory, any_family=True)
    # without it transformers would read the config itself
    tokenizer = _read_tokenizer(directory, **({} if config is None else {"config": config}))
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise lacks
    return tokenizer


def _check_tokenizer_files(directory: Path) -> None:
    """Refuse files that transformers must not open, before it opens any."""
    for file in beside_weights(directory):
        refuse_links_out(file, directory)
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise GrowthError(f"{file}: not a regular file")
        if status.st_size > MOST_TOKENIZER_BYTES:
            raise GrowthError(
                f"{file}: {status.st_size} bytes, more than any tokenizer has "
                f"({MOST_TOKENIZER_BYTES})"
            )
    file = directory / TOKENIZER_CONFIG_FILE
    if file.exists() and not isinstance(read_json(file, MOST_BYTES, "tokenizer config"), dict):
        raise GrowthError(f"{file}: not a JSON object")


def _read_tokenizer(directory: Path, **how: Any) -> Any:
    """The tokenizer of transformers."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True, **how
        )
        # both fail for some damaged files
        len(tokenizer), tokenizer.all_special_ids
    except BaseException as error:
        # damaged files raise errors of all kinds; panics of Rust code are no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise GrowthError(f"{directory}: the tokenizer cannot be loaded: {why[:300]}") from error
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has files of a tokenizer, under any of their usual names."""
    return any(any(Path(directory).glob(pattern)) for pattern in TOKENIZER_FILES)


# config.json alone is not enough
TOKENIZER_FILES = (
    *("tokenizer*", "vocab.*", "vocab-*", "merges.txt", "spiece.model", "*.bpe.model", "*.spm"),
    *("sentencepiece*.model", "tekken.json", "*.tiktoken"),
)


def check_directory(directory: Path) -> None:
    """Check that a directory holds a checkpoint."""
    refuse_adapter_directory(directory)
    if not directory.is_dir():
        raise GrowthError(
            f"{directory} is not a checkpoint directory: give the directory of a model, or its "
            "name on the Hub, ORGANISATION/NAME"
        )
    if not (directory / "config.json").is_file():
        raise GrowthError(f"{directory} is not a checkpoint directory: it has no config.json")


def check_fits(directory: Path, tokenizer: Any, length: int, config: Any = None) -> None:
    """Check that a model has embeddings for all positions of a block and all tokens."""
    config = config or read_config(directory, any_family=True)
    positions, config = positions_of(config), config.get_text_config()
    sizes = {"ids": len(tokenizer), "vocabulary": config.vocab_size}
    check("checkpoint", directory=directory, length=length, positions=positions, **sizes)
    # models are padded by up to 2%, as Phi-2 is
    if len(tokenizer) < 0.9 * config.vocab_size:
        warn(
            f"the tokenizer has only {len(tokenizer)} ids, and {directory} a vocabulary of "
            f"{config.vocab_size}: give the tokenizer of the model"
        )


def positions_of(config: Any) -> int | None:
    """The longest input of a model in tokens, as far as its config tells."""
    if config.model_type in supported_families():
        size = load_family(config.model_type).config.get("positions")
        if size is not None:
            # a RoBERTa numbers its positions from 2
            return size.of(config) - size.reserved
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token (True) or masked tokens (False)."""
    names = {cls.__name__ for cls in type(model).__mro__}
    causal = bool(names & CAUSAL)
    masked = bool(names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(), *PRETRAINING})
    if model.config.is_encoder_decoder or not (causal or masked):
        raise GrowthError(
            f"{type(model).__name__} is neither a masked nor a causal language model: "
            "use a ...ForMaskedLM or ...ForCausalLM model"
        )
    return causal


def separator_of(tokenizer: Any) -> list[int]:
    """The token that follows each text, if the tokenizer has one."""
    separator = tokenizer.eos_token_id
    if separator is None:
        separator = tokenizer.sep_token_id
    return [] if separator is None else [separator]


def head_of(tokenizer: Any) -> list[int]:
    """The token that each row begins with, if the tokenizer has one."""
    return [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]


@contextlib.contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, an attribute has this value."""
    had, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


def parts_of(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models inside a model. A decoder may have a config of its own, or a copy."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While active, a model makes no cache."""
    with contextlib.ExitStack() as stack:
        for config in {id(part.config): part.config for part in parts_of(model)}.values():
            if getattr(config, "use_cache", None):
                stack.enter_context(setting(config, "use_cache", False))
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While active, a model is in evaluation mode. Afterwards each module has its own mode."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def probing(model: Any) -> Iterator[None]:
    """While active, a model runs without dropout, cache, gradients, compiled code and router loss.

    Compiled code would be compiled again for a probe, and would not call new hooks. The loss of
    routers fails where no layer that runs has one. The parameters of a sharded model are shards
    again afterwards.
    """
    try:
        # the stance counts from its call on: nothing may fail between that and its end
        with (
            evaluating(model),
            without_cache(model),
            setting(model.config.get_text_config(), "output_router_logits", False),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        free_gathered(model)


def probe_inputs(model: Any) -> dict[str, Tensor]:
    """The few tokens that transformers tries a model with, on its device."""
    inputs = {name: x.to(model.device) for name, x in model.dummy_inputs.items()}
    if model.config.is_encoder_decoder:
        # Pegasus does not make them of input_ids, as its kin do
        inputs.setdefault("decoder_input_ids", inputs["input_ids"])
    return inputs


@contextlib.contextmanager
def no_zeros(model: Any) -> Iterator[None]:
    """While active, a model computes as if none of its parameters were zero throughout.

    A layer that was grown to add nothing has an output projection or a norm of zeros. Each module
    computes again with other values there, before a parallel wrapper's own hooks.
    """

    def again(module: nn.Module, inputs: Any, options: Any, output: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, p in dict(module.named_parameters(recurse=False)).items():
                if _is_zero(p):
                    stack.enter_context(setting(module, name, _filled(p)))
                    output = None
            return module.forward(*inputs, **options) if output is None else output

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module is not model.get_input_embeddings():
                hook = module.register_forward_hook(again, with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
        yield


def _is_zero(p: Tensor) -> bool:
    if p.is_meta or not p.is_floating_point():
        return False
    found = p.detach().any()
    return not (found.full_tensor() if isinstance(found, DTensor) else found)


def _filled(p: Tensor) -> nn.Parameter:
    """A parameter of p's shape and kind without zeros: a product of one vector for each axis."""
    rng, x = torch.Generator().manual_seed(0), torch.ones(())
    for size in p.shape:
        x = x[..., None] * torch.randn(size, generator=rng)
    x = x.to(p.device, p.dtype)
    if isinstance(p, DTensor):
        x = distribute_tensor(x, p.device_mesh, p.placements)
    return nn.Parameter(x, requires_grad=False)
