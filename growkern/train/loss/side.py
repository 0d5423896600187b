"""Losses beside that of the labels, which some models have: BERT's, ELECTRA's and routers'.

The auxiliary loss of a mixture of experts asks that all experts be used alike. Over the N real
tokens of all layers, with f_e the share of them that chose expert e and P_e the mean probability of
e, a mixture of E experts adds

    E sum_e f_e P_e                                                                        (1)

f_e has no gradient. Processes that share out a batch add up their f_e first. The sum of their terms
is then the term of one process with all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growkern.errors import GrowthError
from growkern.train.loss.rows import ROW_COUNTS, check_keys, real_rows, real_tokens
from growkern.train.model.contexts import probing
from growkern.train.model.flops import is_experts

# ------------------------------------------------------------------- of a second head


class SideParts(NamedTuple):
    """Sums over the items of each example, such as its tokens. (B,) each."""

    losses_B: Tensor  # float
    correct_B: Tensor  # items that were predicted correctly
    items_B: Tensor


class NextSentenceLoss:
    """The cross-entropy of next-sentence prediction, beside the loss of the masked tokens.

    It adds weight * sum of losses / number of items.

    Attributes:
        name: in log lines.
        weight: of the mean over all items.
        keys: keys of the batches that it needs.
        about: for the header of a run: how the two losses are computed.
    """

    name: str = "nsp"
    weight: float = 1.0
    keys: tuple[str, ...] = ("next_sentence_label",)
    about: str = (
        "masked tokens through the fused loss, and the cross-entropy of the 2 classes of "
        "next-sentence prediction added plainly; a teacher's KL is on the masked-LM head only"
    )

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of items of a batch, here pairs, 0-d."""
        labels_B: Tensor = batch["next_sentence_label"]
        return torch.tensor(len(labels_B), device=labels_B.device)

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The targets. Keys that the model does not take are removed from the inputs."""
        return {"labels_B": inputs.pop("next_sentence_label").flatten()}

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The loss of each pair."""
        logits_B2, labels_B = outputs.seq_relationship_logits.float(), targets["labels_B"]
        losses_B = F.cross_entropy(logits_B2, labels_B, reduction="none")
        return SideParts(losses_B, logits_B2.argmax(-1) == labels_B, torch.ones_like(labels_B))


class DetectionLoss:
    """The binary cross-entropy of ELECTRA's discriminator, as in `NextSentenceLoss`."""

    name: str = "rtd"
    weight: float = 50.0
    keys: tuple[str, ...] = ("original_ids", "uniforms")
    about: str = (
        "the generator's masked tokens through the fused loss, and 50 times the binary "
        "cross-entropy of the discriminator, which the fused loss does not fit, added plainly"
    )

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of real tokens of a batch."""
        return real_tokens(batch).sum()

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The original tokens and the mask of real ones. The model takes both as well."""
        return {"original_BS": inputs["original_ids"], "real_BS": real_tokens(inputs)}

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The loss of each example, summed over its tokens."""
        logits_BS, real_BS = outputs.detection_logits.float(), targets["real_BS"]
        replaced_BS = outputs.corrupted_ids != targets["original_BS"]
        losses_BS = F.binary_cross_entropy_with_logits(
            logits_BS, replaced_BS.float(), reduction="none"
        )
        correct_BS = ((logits_BS > 0) == replaced_BS) & real_BS
        return SideParts((losses_BS * real_BS).sum(1), correct_BS.sum(1), real_BS.sum(1))


SideLoss: TypeAlias = NextSentenceLoss | DetectionLoss
SIDE_LOSSES: dict[str, SideLoss] = {"mlm+nsp": NextSentenceLoss(), "rtd": DetectionLoss()}


def side_loss_of(model: Any) -> SideLoss | None:
    """The loss that a model has beside that of its labels; None if there is none."""
    names = {cls.__name__ for cls in type(model).__mro__}
    if "ReplacedTokenDetection" in names:
        return SIDE_LOSSES["rtd"]
    return SIDE_LOSSES["mlm+nsp"] if "BertForPreTraining" in names else None


class SideTerm:
    """A side loss, as a term of the loss of a model.

    Attributes:
        items: of the side loss in the whole accumulated batch of all processes.
    """

    def __init__(self, loss: SideLoss) -> None:
        self.loss = loss
        self.items = torch.tensor(0)

    def count(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """The items of several batches, 0-d. Batches that only fill up have none."""
        counts = []
        for batch in batches:
            check_keys(batch, *self.loss.keys)
            count = self.loss.count(batch)
            counts.append(torch.zeros_like(count) if _is_filler(batch) else count)
        return torch.stack(counts).sum()

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor] | None:
        """Remove the targets from a batch; None for one that only fills up."""
        check_keys(inputs, *self.loss.keys)
        targets = self.loss.take(inputs)
        return None if _is_filler(inputs) else targets

    def parts(
        self, outputs: Any, targets: dict[str, Tensor] | None, device: torch.device
    ) -> SideParts:
        """The side loss of a batch."""
        if targets is not None:
            return self.loss.losses(outputs, targets)
        # every parameter needs a gradient, if only 0
        zeros = [0.0 * x.float().sum() for x in outputs.values() if isinstance(x, Tensor)]
        none_B = torch.zeros(1, device=device)
        return SideParts(none_B + torch.stack(zeros).sum(), none_B, none_B)

    def mean(self, parts: SideParts) -> Tensor:
        """The term of a batch on its own."""
        return self.loss.weight * parts.losses_B.sum() / parts.items_B.sum().clamp(min=1)

    def added(self, loss: Tensor, parts: SideParts, meter: Any) -> Tensor:
        """The loss of a batch and its share of the term of the whole accumulated batch.

        The meter gets the mean, and the share of the items that were predicted correctly.
        """
        items = parts.items_B.sum()
        each = items.clamp(min=1)
        meter.add(self.loss.name, parts.losses_B.detach().sum() / each, items)
        meter.add(f"{self.loss.name}_accuracy", parts.correct_B.sum() / each, items)
        return loss + self.loss.weight * parts.losses_B.sum() / self.items.clamp(min=1)


class EvaluationSums:
    """Adds up an evaluation, whose loss is a mean over labels, not batches; NaN without any."""

    def __init__(self, side: SideLoss | None) -> None:
        self._side = side
        # loss, labels; side loss, correct items, items
        self._sums: Tensor | float = 0.0

    def add(
        self, loss_BS: Tensor, labelled_B: Tensor, side: SideParts | None, accelerator: Any
    ) -> None:
        """Add a batch: its loss, the labels of each example, and the side loss if there is one."""
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        columns += [x.double() for x in side or ()]
        # per example, so that the duplicates that fill up the last batch can be dropped
        rows_BC = accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._sums = rows_BC.sum(0) + self._sums

    def write(self, metrics: dict[str, float], prefix: str, sets: Any) -> None:
        """Write the numbers of the evaluation into the metrics of Trainer, with a prefix.

        Of several sets of data, the loss of the first is `eval_loss` too.
        """
        sums = self._sums.tolist() if isinstance(self._sums, Tensor) else [0.0, 0.0]
        loss = sums[0] / sums[1] if sums[1] else math.nan
        if self._side is not None and len(sums) > 2 and sums[4]:
            mean, name = sums[2] / sums[4], f"{prefix}_{self._side.name}"
            metrics |= {name: mean, f"{name}_accuracy": sums[3] / sums[4]}
            loss += self._side.weight * mean
        metrics[f"{prefix}_loss"] = loss
        if isinstance(sets, dict) and prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            metrics["eval_loss"] = loss


def _is_filler(batch: dict[str, Any]) -> bool:
    counts = batch.get(ROW_COUNTS)
    return counts is not None and counts.is_filler


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
