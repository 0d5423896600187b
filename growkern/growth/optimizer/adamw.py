"""`growkern.GrowthAdamW`: AdamW with step sizes that fit the entries of a grown model.

Copies take the steps that their source would have taken. New entries can start with a warmed-up
learning rate of their own. The factors come from `growkern.growth.optimizer.moments`. With (2)
there, a step of AdamW with rate u and eps factor g of every entry is

    p <- p - lr u ratio m / (sqrt(v) + eps g) - lr ratio weight_decay (p - centre)           (1)

with bias-corrected m and v. Growth in even numbers gives all entries of a parameter the same u and
g. (1) is then plain AdamW with lr u ratio, eps g and weight_decay / u, so the fused kernel of
PyTorch does it, for all such parameters at once. Other parameters take `growkern.ops.adamw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from growkern.arguments import check_kind
from growkern.errors import GrowthError, warn
from growkern.growth.models import local_tensor
from growkern.growth.optimizer import checks
from growkern.growth.optimizer.checks import COUNTS
from growkern.growth.optimizer.moments import (
    EntryFactors,
    growth_lr_multipliers,
    warn_of_unknown_growth,
)
from growkern.growth.optimizer.state import decay_names
from growkern.growth.plan import PlanOfModel
from growkern.growth.sharded import local_part
from growkern.growth.stored import own_name
from growkern.ops.adamw import StatePart, UpdateRule, adamw_step

FUSED_DEVICES = ("cpu", "cuda")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of a step computes, with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Uniform(NamedTuple):
    """u and g of (1), where all entries of a part share them."""

    lr: float
    eps: float


def rule_of(group: dict[str, Any], step: float) -> UpdateRule:
    """The settings of a parameter group in its step of this number."""
    lr, eps, weight_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return UpdateRule(lr, beta1, beta2, eps, weight_decay, bool(group["maximize"]), step)


def uniform_of(factors: EntryFactors) -> Uniform | None:
    """The factors that all entries share, or None if they differ."""
    if factors.centre:
        return None
    shared = []
    for vectors in (factors.lr, factors.eps):
        ends = [[x.item() for x in vector.aminmax()] for vector in vectors if vector.numel()]
        if any(low != high for low, high in ends):
            return None
        shared.append(math.prod(low for low, _ in ends))
    return Uniform(*shared)


def is_old_of(factors: EntryFactors) -> bool | None:
    """Whether the source had the entries; None if it had only some of them."""
    if all(bool(x.all()) for x in factors.old):
        return True
    return None if all(bool(x.any()) for x in factors.old) else False


def can_be_fused(part: StatePart) -> bool:
    """Whether PyTorch's fused kernel takes these tensors: it reads them as flat memory."""
    value = part.value
    return value.device.type in FUSED_DEVICES and all(
        x.is_contiguous() and x.dtype == value.dtype for x in part.tensors()
    )


def step_fused(
    parts: Sequence[StatePart], factors: Uniform, ratio: float, rule: UpdateRule
) -> None:
    """(1) for parts whose entries share their factors, all on one device and of one dtype."""
    values, gradients, means, squares, _ = (list(x) for x in zip(*parts, strict=True))
    largest = [part.largest for part in parts if part.largest is not None]
    count = torch.full((), rule.step, dtype=torch.float32, device=values[0].device)
    torch._fused_adamw_(
        values, gradients, means, squares, largest, [count] * len(parts),
        lr=rule.lr * factors.lr * ratio, beta1=rule.beta1, beta2=rule.beta2,
        weight_decay=rule.weight_decay / factors.lr, eps=rule.eps * factors.eps,
        amsgrad=bool(largest), maximize=rule.maximize,
    )  # fmt: skip


def factors_of(factors: Mapping[str, EntryFactors], name: str, p: Tensor) -> EntryFactors:
    """The factors of this process's part of a parameter, on its device.

    They are float64 for parameters in float64, and float32 for all others: bfloat16 cannot
    represent a third. Wrappers may have added to the name (`own_name`).
    """
    name = own_name(name)
    if name not in factors:
        raise GrowthError(
            f"the plan has no parameter {name}: pass the parameters of the grown model"
        )
    whole = factors[name]
    shape = tuple(max(n) for n in zip(*(v.shape for v in whole.lr), strict=True))
    checks.check_planned_shape(name, p.shape, shape)
    part = local_part(name, p)
    device = local_tensor(p).device
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32

    def here(vectors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        cut = (v.swapaxes(0, d)[part[d]].swapaxes(0, d) for d, v in enumerate(vectors))
        return tuple(v.to(device, dtype) for v in cut)

    return EntryFactors(
        here(whole.lr, dtype),
        here(whole.eps, dtype),
        here(whole.old, torch.bool),
        here(whole.centre, dtype),
        whole.muon,
    )


# beginning of a warning
HALF_WEIGHTS = "the weights themselves are"
NAMED = "model.named_parameters()"


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Named parameter groups as in `transformers.Trainer`: norms and biases do not decay.

    Args:
        model: whose trainable parameters are grouped.
        weight_decay: of the first group; the second has 0.
    """
    return groups_of(model, decay_names(model), weight_decay)


def groups_of(
    model: nn.Module, decays: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """The groups of `decay_groups` for parameters that decay, by their names."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [x for x in named if x[0] in decays], "weight_decay": weight_decay},
        {"params": [x for x in named if x[0] not in decays], "weight_decay": 0.0},
    ]


class GrowthAdamW(torch.optim.AdamW):
    """AdamW with a learning rate and an eps of its own for every entry of a grown model.

    A weight that growth divided by C needs steps that are C times smaller, but AdamW gives all
    entries steps of the same size. With `matched`, the learning rate and eps of every entry are
    multiplied by its factors from `growth_lr_multipliers`. With the moments of
    `growkern.grow_optimizer`, the target then takes the steps that the source would have taken.
    This holds wherever `moment_findings` says "exact".

    Weight decay is lr times weight_decay, as in AdamW. Norms that multiply by 1 + weight (Gemma)
    decay towards the value that growth gives to a source's 0. Copies that are equal stay equal, so
    train with symmetry="routing", "noise" or "split".

    The state is that of AdamW and a count of steps since growth. Parameters may be DTensors. Where
    all copies of a parameter have the same factors, as in growth by whole multiples, PyTorch's
    fused kernel takes the step. Elsewhere one kernel of this library does it in one pass.

    Args:
        params: named parameters: `model.named_parameters()`, or groups as in `decay_groups`. The
            groups become those of the optimizer, which completes them, as all of PyTorch's do.
        plan: `growkern.growth_plan_of(model)`, for a loaded model too.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        matched: True: apply the factors and this decay. False: plain AdamW.
        rewarm_steps: number of steps in which the learning rate of new entries rises linearly to
            `rewarm_peak` times the learning rate of the others. After that it keeps this ratio,
            whatever the schedule. New entries are those of rows, columns and layers that the source
            did not have. 0: they learn like the others.
        rewarm_peak: the ratio. SPARKLING uses 1.3, after 250 steps.

    Raises:
        GrowthError: parameters without names, a parameter that the plan does not know, a number
            out of range, or a group with settings that this optimizer cannot follow.

    Source: `matched` is derived from the chain rule, the re-warm-up of new slices after SPARKLING.
    """

    def __init__(
        self,
        params: Iterable[Any],
        plan: PlanOfModel = None,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        matched: bool = True,
        rewarm_steps: int = 0,
        rewarm_peak: float = 1.3,
    ) -> None:
        if rewarm_steps < 0 or not 0 < rewarm_peak < float("inf"):
            raise GrowthError(
                f"rewarm_steps={rewarm_steps}, rewarm_peak={rewarm_peak}: give 0 or more steps and "
                "a positive peak"
            )
        check_kind("params", params, Iterable, NAMED)
        factors = growth_lr_multipliers(plan)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        for number, group in enumerate(self.param_groups):
            checks.check_group(f"the given group {number}", group)
        half = {p.dtype for group in self.param_groups for p in group["params"]}
        if half := half & {torch.bfloat16, torch.float16}:
            warn(
                f"{HALF_WEIGHTS} {min(map(str, half)).removeprefix('torch.')}: small steps "
                "round to nothing, and the norms' weights stay where they are. Train float32 "
                "weights, model.float(), under torch.autocast"
            )
        self.matched, self.rewarm_steps, self.rewarm_peak = matched, rewarm_steps, rewarm_peak
        self.plan = plan
        if matched:
            warn_of_unknown_growth(plan)
        self._factors: dict[Tensor, EntryFactors] = {}
        self._uniform: dict[Tensor, Uniform | None] = {}
        self._is_old: dict[Tensor, bool | None] = {}
        for group in self.param_groups:
            for name, p in zip(group.get("param_names", ()), group["params"], strict=False):
                own = factors_of(factors, name, p)
                if not matched:
                    ones = [tuple(map(torch.ones_like, x)) for x in (own.lr, own.eps)]
                    own = replace(own, lr=ones[0], eps=ones[1], centre=())
                self._factors[p], self._uniform[p] = own, uniform_of(own)
                self._is_old[p] = is_old_of(own)
            if "param_names" not in group:
                raise GrowthError(f"GrowthAdamW needs named parameters: {NAMED}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim.AdamW`; all settings of the groups take effect.

        Raises:
            GrowthError: the state is of an Adam that adds weight decay to the gradient, the step
                should be differentiable, or amsgrad is on and its moments are missing.
        """
        checks.check_state_dict(state_dict)
        groups = []
        for number, group in enumerate(state_dict["param_groups"]):
            entries = [state_dict["state"].get(key, {}) for key in group["params"]]
            checks.check_loaded_group(number, group, entries)
            # the step counts then stay on the CPU, where reading them does not wait for a GPU
            groups.append({**group, "capturable": False, "fused": None})
        super().load_state_dict({**state_dict, "param_groups": groups})
        for entry in self.state.values():
            entry.update({key: entry[key].cpu() for key in COUNTS if key in entry})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` as in `torch.optim.AdamW`.

        Raises:
            GrowthError: a group's amsgrad was set to True after steps without it.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        fused: dict[tuple[Any, Any, UpdateRule, Uniform, float], list[StatePart]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            part, step, grown_for = self._count_step(group, p)
            if not part.value.numel():
                continue
            rule, uniform, is_old = rule_of(group, step), self._uniform[p], self._is_old[p]
            # learning rate of new entries over that of the others
            ratio = 1.0
            if self.rewarm_steps:
                ratio = self.rewarm_peak * min(1.0, grown_for / self.rewarm_steps)
            # that of all entries; None if only some of them are new
            share = 1.0 if ratio == 1 or is_old else None if is_old is None else ratio
            if uniform is not None and share is not None and can_be_fused(part):
                key = (part.value.device, part.value.dtype, rule, uniform, share)
                fused.setdefault(key, []).append(part)
                continue
            adamw_step(part, self._factors[p], ratio, rule)
        for (_, _, rule, uniform, share), parts in fused.items():
            step_fused(parts, uniform, share, rule)
        # Compiled kernels write past PyTorch. Without this, a backward pass through the weights
        # before the step would go on with those after it, and nothing would tell of a change
        increment_version([p for p in group["params"] if p.grad is not None])

    def _count_step(self, group: dict[str, Any], p: Tensor) -> tuple[StatePart, float, float]:
        """Count one more step of a parameter; its tensors here, and its steps so far."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(p)
        # missing if growth or another optimizer made this state
        if "growth_step" not in state:
            state["growth_step"] = torch.tensor(0.0)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            raise GrowthError(
                "amsgrad was set to True after steps without it, so max_exp_avg_sq is missing: set "
                "it to False, or make a new GrowthAdamW with amsgrad=True"
            )
        state["step"] += 1
        state["growth_step"] += 1
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        held = [local_tensor(x) for x in (p, p.grad, *(state[k] for k in keys))]
        if not p.ndim:
            held = [x.reshape(1) for x in held]
        # the counts are on the CPU, so reading them does not wait for a GPU
        return StatePart(*held), state["step"].item(), state["growth_step"].item()
