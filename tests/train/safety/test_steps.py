"""A step whose loss or gradient is not finite is never taken, and never logged as a number."""

import math

import pytest
import torch

from growkern import GrowthError
from growkern.train.loop.display import warn_of_divergence
from growkern.train.safety import steps as safety
from tests.train.safety.runs import At, assert_same, small_trainer, weights_of

BIAS = "cls.predictions.bias"
FIX = 'lower learning_rate, or set on_nonfinite = "skip"$'


def poison(value):
    """Make the loss of the next forward pass infinite or NaN, and no later one."""

    def act(model):
        def once(module, inputs, output):
            handle.remove()
            return output * value

        handle = model.get_input_embeddings().register_forward_hook(once)

    return act


def poison_gradient(model):
    """A finite loss whose gradient is infinite."""
    p = model.get_parameter(BIAS)
    handle = p.register_hook(lambda gradient: (handle.remove(), gradient + math.inf)[1])


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (poison(math.nan), "the loss is NaN or infinite on rank 0"),
        (poison(math.inf), "the loss is NaN or infinite on rank 0"),
        (poison_gradient, "the gradient norm is (inf|nan)"),
    ],
    ids=["nan", "inf", "gradient"],
)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_run_stops_at_a_step_that_is_not_finite(tmp_path, act, found, clip):
    before = {}
    callbacks = [At(5, act), At(5, lambda model: before.update(model.state_dict()))]
    trainer = small_trainer(tmp_path, callbacks=callbacks, args={"max_grad_norm": clip})
    with pytest.raises(GrowthError, match=f"step 6: {found}; .*checkpoint-4; {FIX}") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert trainer.state.global_step == 5
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("act", [poison(math.nan), poison_gradient], ids=["loss", "gradient"])
def test_skip_leaves_out_the_step_and_counts_it(tmp_path, act):
    seen = {}
    keep = [At(n, lambda model, n=n: seen.update({n: snapshot(model)})) for n in (5, 6, 7)]
    trainer = small_trainer(tmp_path, callbacks=[At(5, act), *keep], on_nonfinite="skip")

    def snapshot(model):
        return weights_of(trainer), str(trainer.optimizer.state_dict()["state"])

    trainer.train()
    assert_same(seen[5][0], seen[6][0])
    assert seen[5][1] == seen[6][1]
    assert any(not torch.equal(seen[7][0][n], value) for n, value in seen[6][0].items())
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert ["skipped_steps" in line for line in lines] == [False] * 5 + [True] * 3
    assert lines[-1]["skipped_steps"] == 1
    assert trainer.state.global_step == 8


def test_a_loss_that_is_nan_is_logged_as_nan(tmp_path):
    trainer = small_trainer(tmp_path, callbacks=[At(5, poison(math.nan))], on_nonfinite="skip")
    result = trainer.train()
    # it would be NaN, and that of the last start alone
    assert "train_loss" not in result.metrics
    assert not any("train_loss" in line for line in trainer.state.log_history)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [math.isnan(loss) for loss in losses] == [False] * 5 + [True] + [False] * 2


def test_a_model_that_is_broken_does_not_skip_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(safety, "MOST_SKIPPED_IN_A_ROW", 3)

    def act(model):
        model.get_parameter(BIAS).data.fill_(math.nan)

    args = {"max_steps": 50, "save_steps": 100}
    trainer = small_trainer(tmp_path, callbacks=[At(1, act)], args=args, on_nonfinite="skip")
    with pytest.raises(GrowthError, match=r"step 5: .* 3 steps before .*; lower learning_rate$"):
        trainer.train()


@pytest.mark.parametrize("rate", [1e-3, 5.0])
@pytest.mark.parametrize("name", ["validation", "label"])
def test_a_run_that_diverges_says_so(tmp_path, recwarn, rate, name):
    """Its model has random weights, so nothing but divergence makes the loss much larger."""
    args = {"learning_rate": rate, "eval_on_start": True, "eval_steps": 4}
    args["eval_strategy"] = "steps" if name == "validation" else "no"
    small_trainer(tmp_path, args=args).train()
    found = [str(x.message) for x in recwarn if " rose from " in str(x.message)]
    assert [text.startswith(f"{name} loss rose from ") for text in found] == [True] * (rate > 1)
    assert all(text.endswith("lower learning_rate, or take fewer steps") for text in found)


@pytest.mark.parametrize(
    ("losses", "since", "said"),
    [
        *(([2.0, 2.29], 0, ""), ([2.0, 1.0, 2.4], 0, "validation loss rose from 2 to 2.4")),
        # one bad batch at the end, and a jump at a growth, after which the loss falls
        (["2", "2", "9"], 0, ""),
        *((["2", "9", "8", "9"], 0, "label loss rose from 2 to 8"), ([2.0, 5.0, 4.0], 1, "")),
        *((["2", "5", "4"], 1, ""), ([2.0, 3.0, 3.5], 1, "validation loss rose from 3 to 3.5")),
    ],
)
def test_noise_and_growth_are_no_divergence(recwarn, losses, since, said):
    """Texts are label losses, logged a step later than evaluations are."""
    history = [
        {"step": n + 1, "label_loss": float(x)}
        if isinstance(x, str)
        else {"step": n, "eval_loss": x}
        for n, x in enumerate(losses)
    ]
    if since and isinstance(losses[0], float):
        # of the smaller model, at the step of the growth
        history.insert(1, {"step": since, "eval_loss": 2.0})
    warn_of_divergence(history, since)
    assert [str(x.message).partition(":")[0] for x in recwarn] == [said] * bool(said)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    def act(model):
        model.get_parameter(BIAS).data[0] = math.inf

    callbacks = [At(3, act, "on_optimizer_step")]
    with pytest.raises(GrowthError, match=r"step 4: the weights are not finite.*checkpoint-2"):
        small_trainer(tmp_path, callbacks=callbacks).train()
    assert not (tmp_path / "checkpoint-4").exists()
