"""Lists the `expand` calls that grow a whole Llama, so that checks and benchmarks can make them.

The calls come from a growth plan. The weights are random, so no checkpoint is needed.
"""

import contextlib
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from growkern.ops.expand import Routing, expand


def _config(*sizes: int) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return dict(zip((*names, "num_attention_heads", "num_key_value_heads"), sizes, strict=True))


# Source config and target sizes. 1B is Llama-3.2-1B. 3B has heads of the same width and grouping.
SIZES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "1B to 3B": (
        _config(128_256, 2048, 8192, 16, 32, 8),
        {"hidden_size": 3072, "num_hidden_layers": 20},
    ),
    "toy": (_config(16, 16, 20, 2, 4, 2), {"hidden_size": 24, "num_hidden_layers": 3}),
}
TENSORS = ("rows", "cols", "row_scale", "col_scale", "row_noise", "col_noise")


@dataclass(frozen=True)
class ExpandCall:
    """One call of `expand`, without its weights.

    Attributes:
        source: shape of the weight.
        has_upper: whether the call also takes the layer above.
        given: all other arguments, as the plan has them.
    """

    name: str
    source: tuple[int, ...]
    has_upper: bool
    given: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        maps = (self.given.get("rows"), self.given.get("cols"))
        sizes = zip(self.source, maps, strict=True)
        return tuple(n if index is None else len(index) for n, index in sizes)

    def arguments(self, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Any]:
        """Arguments of `expand` with random weights, on the generator's device."""

        def weight() -> Tensor:
            drawn = torch.randn(self.source, generator=rng, device=rng.device)
            return drawn.to(dtype)

        moved = {k: v.to(rng.device) if k in TENSORS else v for k, v in self.given.items()}
        if "routing" in moved:
            routing = moved["routing"]
            moved["routing"] = routing._replace(copies=routing.copies.to(rng.device))
        return {"weight": weight()} | ({"upper": weight()} if self.has_upper else {}) | moved


def expand_calls(size: str, method: str) -> list[ExpandCall]:
    """The calls of a growth, in its order.

    Returns:
        The calls. A vector is given as a matrix of one row.
    """
    # imported here, because only this function needs them and they take three seconds
    import transformers

    import growkern.growth.plan.tensors.tensor as apply
    from growkern.growth.plan import plan

    source, target = SIZES[size]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**source, tie_word_embeddings=True)
        )
    # a padded stream is built in parts: other readers for each, and 0
    grown = plan(model, method=method, depth="stack", stream="copies", **target)
    # growth reads vectors on the CPU, so they need real memory
    weights = {
        name: x if x.ndim > 1 else torch.zeros(x.shape) for name, x in model.state_dict().items()
    }
    calls: list[ExpandCall] = []
    name = ""

    def keep(weight: Tensor, *, upper: Tensor | None = None, **rest: Any) -> Tensor:
        out, dtype = rest.pop("out", None), rest.pop("out_dtype", None)
        rest.pop("backend", None)
        given = {k: v for k, v in rest.items() if v is not None and not _is_default(v)}
        if "offsets" in given:
            raise ValueError(f"{name} is built in parts, and ExpandCall has no offsets yet")
        shape = tuple(weight.shape)
        if len(shape) == 1:
            # `expand` does the same with a vector
            shape = (1, *shape)
            given = {k.replace("row", "col"): v for k, v in given.items()}
        calls.append(ExpandCall(name, shape, upper is not None, given))
        made = torch.empty(calls[-1].shape[2 - weight.ndim :], dtype=dtype, device="meta")
        return made if out is None else out

    work = mock.Mock(expand=keep)
    with contextlib.ExitStack() as patches:
        for module in [m for k, m in sys.modules.items() if k.startswith("growkern.growth.")]:
            if getattr(module, "expand", None) is expand:
                patches.enter_context(mock.patch.object(module, "expand", keep))
        for task in grown.tasks:
            name = task.name
            out = torch.empty(task.shape, dtype=grown.dtype, device="meta")
            apply.build_tensor(grown, task, read=weights.__getitem__, out=out, work=work)
    return calls


def _is_default(x: Any) -> bool:
    return isinstance(x, (int, tuple)) and not isinstance(x, Routing) and x in (0, (0, 0))
