"""The example for TRL trains as TRL itself does."""

import copy
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TRL needs Python 3.11", allow_module_level=True)

from trl import DistillationTrainer

from examples.trl_distillation import FusedDistillationTrainer, tiny_model, trainer_of


@pytest.mark.parametrize("beta, temperature", [(0.0, 1.0), (1.0, 1.5), (0.3, 0.7)])
def test_trains_as_trl_does(beta, temperature, tmp_path):
    """Both draw the same completions, as long as the models agree to rounding."""
    student, teacher = tiny_model(48, 0), tiny_model(48, 1)
    how = {
        "beta": beta,
        "temperature": temperature,
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    lines, models = [], []
    for kind in (DistillationTrainer, FusedDistillationTrainer):
        model = copy.deepcopy(student)
        trainer = trainer_of(kind, model, copy.deepcopy(teacher), str(tmp_path), **how)
        trainer.train()
        lines.append([x for x in trainer.state.log_history if "loss" in x])
        models.append(model)
    for key, error in (("loss", 1e-5), ("grad_norm", 1e-4)):
        theirs, ours = ([line[key] for line in one] for one in lines)
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=error)
    moved = (models[0].lm_head.weight - student.lm_head.weight).abs().mean()
    # Adam turns a gradient near 0 into a step of either sign
    apart = (models[1].lm_head.weight - models[0].lm_head.weight).abs().mean()
    assert moved > 1e-3 and apart < 1e-3 * moved
