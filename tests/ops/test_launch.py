import json
import re

import pytest
import torch

from growkern.ops.backend import launch
from growkern.ops.backend.launch import TUNED_FILE, forced_choice, launch_choice

DEFAULT = {"BLOCK": 512, "num_warps": 4}


def test_the_default_holds_unless_forced():
    x = torch.empty(0)
    assert launch_choice("some", x, 100, **DEFAULT) == DEFAULT
    with forced_choice("some", BLOCK=64):
        assert launch_choice("some", x, 100, **DEFAULT) == {"BLOCK": 64, "num_warps": 4}
        assert launch_choice("other", x, 100, **DEFAULT) == DEFAULT
    assert launch_choice("some", x, 100, **DEFAULT) == DEFAULT


def test_a_kernel_that_does_not_ask_is_noticed():
    with pytest.raises(LookupError, match="no launch of some asks"), forced_choice("some", BLOCK=1):
        pass


def test_the_table_answers_for_its_gpu_dtype_and_size(monkeypatch):
    table = {"some sm_90 bfloat16 32768": {"num_warps": 8}}
    monkeypatch.setattr(launch, "_tuned", lambda: table)
    monkeypatch.setattr(launch, "_arch", lambda device: "sm_90")

    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    assert launch_choice("some", OnGpu, 30_522, **DEFAULT) == {"BLOCK": 512, "num_warps": 8}
    for kernel, size in (("some", 32_769), ("some", 16_384), ("other", 30_522)):
        assert launch_choice(kernel, OnGpu, size, **DEFAULT) == DEFAULT
    assert launch_choice("some", torch.empty(0), 30_522, **DEFAULT) == DEFAULT


def test_every_choice_of_the_shipped_table_was_measured():
    table = json.loads(TUNED_FILE.read_text())
    assert table["choices"].keys() == table["measured"].keys()
    for key, choice in table["choices"].items():
        assert re.fullmatch(r"\w+ (sm_\d+|gfx\w+) (bfloat16|float16|float32) \d+", key), key
        assert choice and all(isinstance(value, int) for value in choice.values())
        assert re.search(r" to .* ms, ", table["measured"][key]), key
