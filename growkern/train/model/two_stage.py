"""The settings of two-stage training: section [two_stage] of a run file. Needs no PyTorch."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from growkern.arguments import (
    MOST_SEED,
    NOT_NEGATIVE,
    Limit,
    between,
    check_fields,
    check_kind,
    whole_number,
)
from growkern.errors import GrowthError
from growkern.train.rules import check

if TYPE_CHECKING:
    from growkern.train.model.sub_model import ModelPart


@dataclass(frozen=True)
class TwoStageConfig:
    """Two-stage training: first random sub-models, then the whole model.

    In stage 1 every optimizer step runs the bottom layers only, up to a depth that is drawn at
    random, and trains the top block of these. See bert2BERT (Chen et al. 2022), Algorithm 2.

    Args:
        layers_per_block: layers that train in a step of stage 1. Depths are multiples of it.
        stage1_steps: optimizer steps of stage 1.
        stage1_epochs: in place of `stage1_steps`, passes through the training data (E_b in the
            paper). The data must have a length.
        seed: of the depths only.
        embeddings: "frozen": in stage 1 the input embeddings do not train, unless the head uses
            the same matrix. "bottom": they train in the steps that train the bottom layers.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        "layers_per_block": Limit(lambda x: x >= 1, "be positive"),
        **dict.fromkeys(("stage1_steps", "stage1_epochs"), NOT_NEGATIVE),
        "seed": between(0, MOST_SEED),
    }

    layers_per_block: int
    stage1_steps: int | None = None
    seed: int = 0
    embeddings: Literal["frozen", "bottom"] = "frozen"
    stage1_epochs: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check("two_stage", self)

    def in_steps(self, steps_per_epoch: int) -> TwoStageConfig:
        """The same stages with the length of stage 1 in optimizer steps, rounded up."""
        if self.stage1_epochs is None:
            return self
        steps = math.ceil(self.stage1_epochs * steps_per_epoch)
        return replace(self, stage1_steps=steps, stage1_epochs=None)

    def depth(self, step: int, layers: int) -> int | None:
        """The number of layers that run in an optimizer step.

        It depends on the seed and the step only, so all processes and resumed runs agree.

        Args:
            step: optimizer step, counted from 0.
            layers: number of layers of the model.

        Returns:
            The depth, or None in stage 2.

        Raises:
            GrowthError: the length of stage 1 is in epochs, see `in_steps`.
        """
        if self.stage1_steps is None:
            raise GrowthError("stage1_epochs is not in optimizer steps yet: call in_steps first")
        if step >= self.stage1_steps:
            return None
        digest = hashlib.blake2b(f"depth:{self.seed}:{step}".encode(), digest_size=8).digest()
        block = int.from_bytes(digest, "little") % math.ceil(layers / self.layers_per_block)
        return min(layers, self.layers_per_block * (block + 1))

    def part(self, step: int, layers: int) -> ModelPart | None:
        """The part of a model that trains in an optimizer step; arguments as in `depth`."""
        depth = self.depth(step, layers)
        return None if depth is None else self.part_of(depth)

    def part_of(self, depth: int) -> ModelPart:
        """The part that trains when so many layers run."""
        from growkern.train.model.sub_model import ModelPart

        return ModelPart(depth, self.layers_per_block, self.embeddings)

    def sub_model(self, model: Any, step: int) -> contextlib.AbstractContextManager[None]:
        """Stage 1 in a loop of your own: inside, only the part of a step runs and trains.

        Compute the loss inside. In stage 2 nothing changes. The gradients of all other layers stay
        None, so DistributedDataParallel needs `find_unused_parameters=True`.

        Args:
            model: a model of transformers, which may be wrapped or sharded.
            step: optimizer step, counted from 0.

        Raises:
            GrowthError: the model has no list of transformer blocks, the step is no whole number
                from 0 on, or the length of stage 1 is in epochs, see `in_steps`.
        """
        # with PyTorch, which a run file does without
        from torch import nn

        from growkern.train.model.sub_model import layer_stacks, model_depth, sub_model

        check_kind("model", model, nn.Module, "a model of transformers")
        if whole_number("step", step) < 0:
            raise GrowthError(f"step must be 0 or more, got {step}")
        stacks = layer_stacks(model)
        return sub_model(stacks, self.part(step, model_depth(stacks)))
