"""Arguments of another kind than the public functions take are refused in one line."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import growkern
from growkern.errors import GrowthError
from growkern.growth.options import GrowthOptions
from testbed.models import LLAMA, random_model


@pytest.fixture(scope="module")
def grown():
    return growkern.grow(random_model("LlamaForCausalLM", LLAMA), hidden_size=32)


@pytest.mark.parametrize(
    "option, value",
    [
        *(("seed", value) for value in (1.5, True, "3", None, np.float64(1.0))),
        *(("noise", value) for value in ("a", True, None, 1j, float("nan"), 10**400)),
        *(("routing", "1"), ("carry", "x"), ("identity_gain", None), ("identity_gain", [1])),
        *((name, 3) for name in ("method", "depth", "scheme", "symmetry", "aki", "maps")),
        *(("method", None), ("symmetry", ["noise"]), ("depth", torch.ones(2))),
        *((name, value) for name in ("portable", "dequantize") for value in ("yes", 1, None)),
    ],
)
def test_every_option_is_checked_by_its_type(option, value):
    with pytest.raises(GrowthError, match=f"^{option}[= ].*(expected|allowed|must|mean)"):
        GrowthOptions(**{option: value})
    with pytest.raises(GrowthError, match="'stack': it is a value of depth"):
        GrowthOptions(method="stack")


def test_numbers_of_other_libraries_are_numbers():
    small = random_model("LlamaForCausalLM", LLAMA)
    plan = growkern.plan(
        small, hidden_size=np.int64(32), seed=np.int32(3), noise=np.float32(0.25), symmetry="noise"
    )
    same = growkern.plan(small, hidden_size=32, seed=3, noise=0.25, symmetry="noise")
    assert plan.to_dict() == same.to_dict()
    assert type(plan.options.seed) is int and type(plan.options.noise) is float
    assert GrowthOptions(symmetry="noise", noise=Fraction(1, 4)) == same.options.__class__(
        symmetry="noise", noise=0.25
    )
    for value in (32.0, True, "32", np.float64(32)):
        with pytest.raises(GrowthError, match=r"hidden_size=.*expected a positive whole number"):
            growkern.plan(small, hidden_size=value)


def test_a_model_in_the_place_of_something_else(grown, tmp_path):
    new = tmp_path / "new"
    state = torch.optim.AdamW(grown.parameters()).state_dict()
    matrix = [("model.embed_tokens.weight", grown.model.embed_tokens.weight)]
    calls = {
        "source_dir": lambda: growkern.grow_checkpoint(grown, new, hidden_size=64),
        "target_dir": lambda: growkern.grow_checkpoint("small", grown, hidden_size=64),
        "batch": lambda: growkern.inherited_loss(grown, grown, torch.zeros(2, 3), alpha=0.5),
    }
    plans = [
        lambda: growkern.grow_optimizer(state, grown),
        lambda: growkern.GrowthAdamW(grown.named_parameters(), grown),
        lambda: growkern.GrowthMuon(matrix, grown),
        lambda: growkern.moment_findings(grown),
        lambda: growkern.growth_clip_norm_(grown, 1.0, plan=grown),
    ]
    # the model, where its parameters and its plan should stand
    optimizers = (growkern.GrowthAdamW, growkern.GrowthMuon)
    alone = [("params", lambda kind=kind: kind(grown)) for kind in optimizers]
    for name, call in [*calls.items(), *(("plan", call) for call in plans), *alone]:
        with pytest.raises(GrowthError, match=f"^{name} is a .*: give "):
            call()
    assert not new.exists()


def test_arrays_in_the_place_of_tensors():
    x, labels = torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)
    weight, ids = torch.randn(5, 5), torch.zeros(4, 1, dtype=torch.int64)
    calls = {
        "student_logits": lambda: growkern.kl_mlm_loss(x.numpy(), x, labels),
        "teacher_logits": lambda: growkern.kl_mlm_loss(x, x.numpy(), labels),
        "labels": lambda: growkern.kl_mlm_loss(x, x, labels.numpy()),
        "student hidden": lambda: growkern.linear_kl_mlm_loss(x.numpy(), weight, x, weight, labels),
        "teacher": lambda: growkern.linear_kl_mlm_loss(x, weight, x, weight.numpy(), labels),
        "teacher_topk_logprobs": lambda: growkern.topk_kl_mlm_loss(
            x, weight, ids, np.zeros((4, 1), np.float32), labels
        ),
    }
    for name, call in calls.items():
        with pytest.raises(GrowthError, match=rf"^{name}.* is a ndarray: give a tensor"):
            call()


def test_reports_and_plans_are_short(grown):
    small = random_model("LlamaForCausalLM", LLAMA)
    plan = growkern.plan(small, hidden_size=32)
    report = growkern.verify(small, growkern.grow(small, hidden_size=32))
    for one, words in ((plan, "hidden_size"), (report, "passed: the same function")):
        assert words in repr(one) and len(repr(one)) < 400 and "\n" not in repr(one)
        assert words in str(one) and len(str(one).splitlines()) < 60
