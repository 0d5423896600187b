"""Files whose names have more in front than the model's. Truth: the model that was saved."""

import pytest
from safetensors.torch import load_file, save_file

import growkern
from testbed.families import FAMILIES
from testbed.models import random_model, relative_error
from testbed.relatives import RELATIVES

ALL = FAMILIES | {name: case[:2] for name, case in RELATIVES.items()}
IMAGES = {"model.": "model.language_model."}
# family, the beginning of names in the model -> in the files
CASES = [
    ("qwen3_5_text", IMAGES),
    ("qwen3_5_moe_text", IMAGES),
    ("mistral", {"": "language_model."}),
    ("llama", {"": "module."}),
    ("bert", {"": "_orig_mod.module."}),
    ("qwen3_moe", {"": "module._orig_mod."}),
    ("gpt2", {"transformer.h.0.": "transformer.h.0._checkpoint_wrapped_module."}),
]


def renamed(directory, begins):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for old, new in begins.items():
        tensors = {
            new + n.removeprefix(old) if n.startswith(old) else n: x for n, x in tensors.items()
        }
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("family, begins", CASES)
def test_more_in_front_of_names_is_read_through(family, begins, tmp_path):
    class_name, sizes = ALL[family]
    model = random_model(class_name, sizes)
    model.save_pretrained(tmp_path / "small")
    renamed(tmp_path / "small", begins)
    how = {"n_embd" if family == "gpt2" else "hidden_size": 24}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", progress=False, **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok
    grown = type(model).from_pretrained(
        tmp_path / "large", dtype="auto", experts_implementation="eager"
    )
    assert relative_error(model, grown.eval()) <= 1e-12


def test_a_tensor_under_two_names_is_refused(tmp_path):
    model = random_model(*ALL["llama"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    both = tensors | {f"module.{name}": x + 1 for name, x in tensors.items()}
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=r"module\.\S+ are both"):
        growkern.plan(tmp_path, hidden_size=24)
