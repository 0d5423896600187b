"""The models of the study: small sources, and the wider models that grow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import growkern
from bench.symmetry.text import LENGTH, MASK

HEAD_DIM = 16
AKI, HALF, PADDED = "aki-", "half-", "padded-"


@dataclass(frozen=True)
class Model:
    """One source and the width that it grows to.

    Attributes:
        family: "gpt2", "llama" or "bert".
        layers: of source and target.
        width: of the source's stream.
        times: how many times wider the target is.
    """

    family: str
    layers: int
    width: int
    times: int = 2

    @property
    def name(self) -> str:
        return f"{self.family} {self.layers}x{self.width}-{self.times * self.width}"

    @property
    def is_masked(self) -> bool:
        """True for a masked language model."""
        return self.family == "bert"

    def config(self) -> Any:
        """The source's config in transformers."""
        width, heads = self.width, self.width // HEAD_DIM
        std = 0.02 * math.sqrt(768 / width)
        common = {"vocab_size": 256, "initializer_range": std}
        if self.family == "gpt2":
            sizes = {"n_embd": width, "n_head": heads, "n_layer": self.layers}
            drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return transformers.GPT2Config(n_positions=LENGTH, **common, **sizes, **drop)
        common |= {"num_hidden_layers": self.layers, "num_attention_heads": heads}
        common |= {"hidden_size": width, "max_position_embeddings": LENGTH}
        if self.family == "bert":
            drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            common |= {"vocab_size": MASK + 4, "intermediate_size": 4 * width}
            return transformers.BertConfig(**common, **drop)
        groups = {"num_key_value_heads": 2 if heads % 2 == 0 else 1}
        return transformers.LlamaConfig(**common, **groups, intermediate_size=3 * width)

    def untrained(self, seed: int) -> Any:
        """A source with random weights."""
        torch.manual_seed(seed)
        classes = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
        return getattr(transformers, classes.get(self.family, "BertForMaskedLM"))(self.config())

    def target(self) -> dict[str, int]:
        """The target's sizes by the config's own names."""
        config, times = self.config(), self.times
        names = ["hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads"]
        if self.family == "gpt2":
            names = ["n_embd", "n_head"]
        return {n: times * getattr(config, n) for n in names if getattr(config, n, None)}


def grown(source: Any, model: Model, symmetry: str, amplitude: float, seed: int) -> Any:
    """The target, grown from a trained source, in training mode.

    Args:
        symmetry: "none", "noise", "split" or "routing"; with "aki-" before it, new heads and units
            come from the next layer; with "half-" before it, a random half of the connections is
            divided equally among the copies; with "padded-" before it, the hidden state has empty
            entries in place of copies.
        amplitude: of noise or routing.
        seed: of noise, shares and routing.
    """
    if symmetry.startswith(HALF):
        other = symmetry.removeprefix(HALF)
        large = grown(source, model, other, amplitude, seed)
        return _mixed(large, grown(source, model, "none", 0.0, seed), model.times, seed)
    how: dict[str, Any] = {"seed": seed, "stream": "copies", **model.target()}
    if symmetry.startswith(AKI):
        symmetry, how["method"] = symmetry.removeprefix(AKI), "aki"
    if symmetry.startswith(PADDED):
        symmetry, how["stream"] = symmetry.removeprefix(PADDED), "padded"
    if symmetry in ("noise", "routing"):
        how[symmetry] = amplitude
    return growkern.grow(source, symmetry=symmetry, **how).train()


@torch.no_grad()
def _mixed(large: Any, equal: Any, times: int, seed: int) -> Any:
    """`large` with a random half of its connections taken from `equal`.

    The copies of input j of a matrix are j, j + n, and so on. All of them take their weight from
    the same model, so that they still add up.
    """
    random = torch.Generator().manual_seed(seed)
    others = dict(equal.named_modules())
    for name, module in large.base_model.named_modules(prefix=large.base_model_prefix):
        # GPT-2 stores matrices as (inputs, outputs), the others the other way around
        by_input = {"Conv1D": 0, "Linear": 1}.get(type(module).__name__)
        if by_input is None:
            continue
        weight, other = (one.weight.movedim(by_input, 0) for one in (module, others[name]))
        connections = (weight.shape[0] // times, weight.shape[1])
        taken = (torch.rand(connections, generator=random) < 0.5).repeat(times, 1)
        weight.copy_(torch.where(taken, other, weight))
    return large


# ---------------------------------------------------------------- distance


@torch.no_grad()
def distances(model: Any, times: int, x: Tensor) -> dict[str, float]:
    """How far copies are apart: the share of their size that is not their mean.

    0 means that all copies are equal. Two unrelated copies have about 0.71.

    Args:
        model: a target, grown with cyclic maps.
        times: number of copies.
        x: inputs.

    Returns:
        One number for the stream between layers, and one for the units of the FFNs.
    """
    units = list[Tensor]()
    with _Inputs(model, units.append):
        hidden = model(input_ids=x, output_hidden_states=True).hidden_states
    # the last one is behind the final norm of some families
    return {"stream": _apart(hidden[1:-1], times), "ffn": _apart(units, times)}


def _apart(activations: Any, times: int) -> float:
    rest = total = 0.0
    for h in activations:
        copies = h.float().unflatten(-1, (times, -1))
        rest += (copies - copies.mean(-2, keepdim=True)).square().sum().item()
        total += copies.square().sum().item()
    return math.sqrt(rest / total)


class _Inputs:
    """Hands the inputs of every FFN's second matrix to a function, inside a `with`."""

    ENDINGS = ("mlp.c_proj", "mlp.down_proj", "output.dense")

    def __init__(self, model: nn.Module, use: Callable[[Tensor], Any]) -> None:
        self.use = use
        named = model.named_modules()
        self.modules = [
            m for n, m in named if n.endswith(self.ENDINGS) and "attention.output" not in n
        ]

    def __enter__(self) -> None:
        hook = self._hook
        self.handles = [m.register_forward_pre_hook(hook) for m in self.modules]

    def _hook(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.use(inputs[0])

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
