"""`verify` of models that are too large for float64; here the limit is 0 parameters."""

import pytest
import torch

import growkern
from growkern.growth.record import verify as verifying
from tests.growth.models import random_model
from tests.growth.plan.test_matrix import FAMILIES


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_constants_of_models_stay_rounded_to_their_dtype(model_type, tmp_path, monkeypatch):
    """Gemma multiplies by the root of its width, which bfloat16 rounds and float32 does not."""
    monkeypatch.setattr(verifying, "fits", lambda source: False)
    class_name, sizes = FAMILIES[model_type]
    small, large = tmp_path / "small", tmp_path / "large"
    random_model(class_name, sizes, dtype=torch.bfloat16).save_pretrained(small)
    width = 2 * sizes["hidden_size"]
    growkern.grow_checkpoint(small, large, progress=False, dtype=torch.float32, hidden_size=width)
    report = growkern.verify(small, large)
    assert report.plan.exact and report.ok and report.outputs["relative error"] < 1e-4
