"""The options of `[distributed]` in a run file, under the same names in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from growkern.arguments import Limit, check_fields
from growkern.errors import GrowthError
from growkern.train.rules import check


@dataclass(frozen=True)
class DistributedOptions:
    """How a model is spread over the processes of torchrun.

    The number of processes changes results by rounding only, as the start of a run says.
    Dropout is the exception: every process draws its own.

    Args:
        sharding: "ddp": every process holds the whole model. "fsdp": every process holds a part of
            each parameter, gradient and optimizer state (FSDP2). Each block is a group of its own;
            embeddings, head and all tied weights are in the root group.
        replicas: with "fsdp", the number of copies of the model. The processes of a copy shard it
            among them (HSDP). 1 shards over all processes.
        param_dtype: with "fsdp", the dtype of the gathered parameters and of the arithmetic. The
            shards and the optimizer state stay float32.
        reduce_dtype: with "fsdp", the dtype in which gradients are added up over the processes.
        reshard_after_forward: with "fsdp", free the gathered parameters of a block after its
            forward pass and gather them again for the backward pass.
        cpu_offload: with "fsdp", keep shards, gradients and optimizer state in CPU memory.
        activation_checkpointing: keep only the inputs of each block, and run it again in the
            backward pass.
        async_checkpoints: with "fsdp", copy the state of a checkpoint to CPU memory, and write it
            while training continues. During the write the copy takes as much CPU memory as the
            process holds of weights and optimizer state. Off, training waits for the disk.
        compile_blocks: compile every block with `torch.compile`.
        tensor_parallel: must be 1.

    Raises:
        GrowthError: options that exclude each other, or tensor parallelism.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {"replicas": Limit(lambda x: x >= 1, "be positive")}

    sharding: Literal["ddp", "fsdp"] = "ddp"
    replicas: int = 1
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    async_checkpoints: bool = True
    activation_checkpointing: bool = False
    compile_blocks: bool = False
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "distributed")
        if self.tensor_parallel != 1:
            raise GrowthError(
                f"distributed.tensor_parallel is {self.tensor_parallel}: {NO_TENSOR_PARALLELISM}"
            )
        check("distributed", self)


NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not supported by the trainer. transformers.Trainer hands it to "
    "accelerate, which refuses it on machines without a GPU, so counts, gradient norms and "
    'checkpoints could not be tested with it. Use sharding = "fsdp"; in a loop of your own, '
    'growkern.inherited_loss takes models that were loaded with tp_plan="auto"'
)
