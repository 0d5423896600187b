"""Block sizes and warps of Triton kernels: the default, or what `bench.tune` measured as faster.

The measured choices are in tuned.json beside this file. Its "choices" map a `tuned_key` to block
sizes and warps; "measured" says with the same keys what they saved, and on which device.
"""

import functools
import json
from pathlib import Path

import torch

from growkern.ops.backend.launch import next_power_of_2

TUNED_FILE = Path(__file__).with_name("tuned.json")


@functools.cache
def tuned_choices() -> dict[str, dict[str, int]]:
    """The choices of tuned.json; `bench.tune` puts each candidate in here to time it."""
    return json.loads(TUNED_FILE.read_text(encoding="utf-8"))["choices"]


@functools.cache
def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreted"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tuned_key(kernel: str, x: torch.Tensor, size: int) -> str:
    """Key of a choice: kernel, architecture, dtype, and the power of 2 that holds `size`."""
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{kernel} {_arch(x.device)} {dtype} {next_power_of_2(size)}"


def launch_choice(kernel: str, x: torch.Tensor, size: int, **default: int) -> dict[str, int]:
    """Block sizes and warps for a launch; the default where nothing was measured to be faster.

    `x` has the dtype and device of the launch, and `size` numbers on the axis that is cut.
    """
    return default | tuned_choices().get(tuned_key(kernel, x, size), {})
