"""The loss of routers, beside that of the labels; and the loss of an evaluation.

The auxiliary loss of a mixture of experts asks that all experts be used alike. Over the N real
tokens of all layers, with f_e the share of them that chose expert e and P_e the mean probability of
e, a mixture of E experts adds

    E sum_e f_e P_e                                                                        (1)

f_e has no gradient. Processes that share out a batch add up their f_e first. The sum of their terms
is then the term of one process with all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.train.loss.rows import real_rows
from growkern.train.model import is_experts, probing


class EvaluationSums:
    """Adds up an evaluation, whose loss is a mean over labels, not batches; NaN without any."""

    def __init__(self) -> None:
        # loss, labels
        self._sums: Tensor | float = 0.0

    def add(self, loss_BS: Tensor, labelled_B: Tensor, accelerator: Any) -> None:
        """Add a batch: its loss, and the labels of each example."""
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        # per example, so that the duplicates that fill up the last batch can be dropped
        rows_BC = accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._sums = rows_BC.sum(0) + self._sums

    def write(self, metrics: dict[str, float], prefix: str, sets: Any) -> None:
        """Write the loss of the evaluation into the metrics of Trainer, with a prefix.

        Of several sets of data, the loss of the first is `eval_loss` too.
        """
        loss, labels = self._sums.tolist() if isinstance(self._sums, Tensor) else (0.0, 0.0)
        metrics[f"{prefix}_loss"] = mean = loss / labels if labels else math.nan
        if isinstance(sets, dict) and prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            metrics["eval_loss"] = mean


# ------------------------------------------------------------------- of routers


class RouterTerm(NamedTuple):
    """(1) times the number of real tokens, and that number; of the rows of this process."""

    loss: Tensor
    tokens: Tensor

    def mean(self) -> Tensor:
        """(1), of these rows."""
        return self.loss / self.tokens.clamp(min=1)


def router_weight(model: Any) -> float:
    """The factor of (1) in the loss of a model, 0 if its config does not ask for this loss."""
    return float(model.config.get_text_config().router_aux_loss_coef) if _asks(model) else 0.0


def _asks(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def router_inputs(model: Any) -> dict[str, bool]:
    """Inputs without which a model fails whose config asks for (1), but of which no router runs.

    In stage 1 the layers that run may all be dense.
    """
    if not _asks(model):
        return {}
    # a list shows the layers that run, and modules() all
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    runs = any(is_experts(m) for stack in stacks for layer in stack for m in layer.modules())
    is_off = not runs and any(map(is_experts, model.modules()))
    return {"output_router_logits": False} if is_off else {}


def router_term(
    model: Any,
    outputs: Any,
    real_BS: Tensor,
    add_up: Callable[[Tensor], Tensor] = lambda x: x,
) -> RouterTerm | None:
    """The term of a batch, None if no layer that ran has a router.

    The outputs lose their own auxiliary loss. `add_up` sums a tensor over all processes.
    """
    outputs.aux_loss = None
    if not outputs.router_logits:
        return None
    layers, chosen = outputs.router_logits, model.config.get_text_config().num_experts_per_tok
    real_N1 = real_BS.reshape(-1, 1).to(layers[0].device)
    counts_E: Any = 0.0
    sums_E: Any = 0.0
    for logits_NE in layers:
        wide = torch.promote_types(logits_NE.dtype, torch.float32)
        p_NE = logits_NE.to(real_N1.device).softmax(-1, wide) * real_N1
        used_NE = torch.zeros_like(p_NE).scatter_(1, p_NE.topk(chosen).indices, 1.0)
        counts_E = counts_E + (used_NE * real_N1).sum(0)
        sums_E = sums_E + p_NE.sum(0)
    tokens = real_N1.sum()
    everywhere = add_up(torch.cat([counts_E, tokens[None]]))
    shares_E = everywhere[:-1] / everywhere[-1].clamp(min=1)
    loss = len(shares_E) * (shares_E * sums_E).sum() / len(layers) ** 2
    return RouterTerm(loss, tokens)


def count_tokens(batch: Mapping[str, Any]) -> Tensor:
    """The real tokens of a batch with its labels, 0-d. A batch that only fills up has none."""
    return real_rows(batch, batch["labels"], causal=False).sum()


def check_router(model: Any) -> None:
    """Refuse a model whose config asks for an auxiliary loss that it lacks, or that is not (1)."""
    # of a stage 1 whose layers are all dense nothing can be told
    if not _asks(model) or router_inputs(model):
        return
    config = model.config.get_text_config()
    inputs = {name: x.to(model.device) for name, x in model.dummy_inputs.items()}
    with probing(model):
        outputs = model(**inputs, output_router_logits=True)
    loss = getattr(outputs, "aux_loss", None)
    has_names = hasattr(config, "router_aux_loss_coef") and hasattr(config, "num_experts_per_tok")
    if isinstance(loss, Tensor) and has_names:
        term = router_term(model, outputs, torch.ones_like(inputs[model.main_input_name]))
        # transformers rounds the probabilities to the dtype of the weights
        if term and torch.allclose(mine := term.mean(), loss.to(mine), rtol=0.02):
            return
    raise GrowthError(
        f"{type(model).__name__} has config.output_router_logits=True, but its router's loss is "
        "not the one of Mixtral and its relatives, and inherited_loss would leave it out: set "
        "config.output_router_logits=False to train without it"
    )
