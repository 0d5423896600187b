"""Experts that are balanced by the bias of their router.

Truth: what the router of transformers chooses, counted from its outputs.
"""

import math

import pytest
import torch

import growkern
from growkern import ExpertBalancing, TwoStageTrainer
from growkern.errors import GrowthWarning
from growkern.train.loop.callbacks import warn_of_imbalance
from growkern.train.loop.setup import set_precision
from testbed.tiny import arguments, build
from tests.train.loss.test_inherited import padded
from tests.train.run.test_run import save_tokenizer

SPEED, STEPS = 0.05, 3
LOSS = {"router_aux_loss_coef": 1.0, "output_router_logits": False}


def bias_of(model):
    return model.model.layers[1].mlp.gate.e_score_correction_bias


def load_of(model, rows):
    """The tokens of each expert."""
    chosen, gate = [], model.model.layers[1].mlp.gate
    hook = gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
    hook.remove()
    real = rows["attention_mask"].flatten().bool()
    return torch.bincount(chosen[0][real].flatten(), minlength=8).double()


def expected_step(model, rows):
    """The bias after a step over these rows."""
    load = load_of(model, rows)
    return bias_of(model) + SPEED * torch.sign(load.mean() - load)


def test_the_bias_moves_once_a_step(tmp_path):
    """With activations computed again, and micro-batches; resumed too."""
    rows, model = padded(), build("deepseek", layers=2)
    data = [{name: x[i] for name, x in rows.items()} for i in (0, 1)]
    found = []

    class Kept(ExpertBalancing):
        def on_optimizer_step(self, *args, **kwargs):
            # every real token chose two experts
            assert self._routers[0][2].sum() == 2 * rows["attention_mask"][:2].sum()
            super().on_optimizer_step(*args, **kwargs)

        def on_step_end(self, *args, model, **kwargs):
            found.append(bias_of(model).clone())

    def trained(model, checkpoint=None):
        # rate 0: the same tokens go through the same router in every step
        args = arguments(
            tmp_path, max_steps=STEPS, learning_rate=0.0, per_device_train_batch_size=1,
            gradient_accumulation_steps=2, gradient_checkpointing=True, use_cpu=True,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        trainer = TwoStageTrainer(model, args, train_dataset=data, callbacks=[Kept(SPEED)])
        trainer.train(resume_from_checkpoint=checkpoint)

    twin, expected = build("deepseek", layers=2).eval(), []
    for _ in range(STEPS):
        step = expected_step(twin, {name: x[:2] for name, x in rows.items()})
        bias_of(twin).copy_(step)
        expected.append(step)
    trained(model)
    assert len(expected[0].unique()) > 1
    torch.testing.assert_close(torch.stack(found), torch.stack(expected).float())
    trained(again := build("deepseek", layers=2), str(tmp_path / "checkpoint-2"))
    assert torch.equal(bias_of(again), found[STEPS - 1])
    assert bias_of(again).dtype == torch.float32


def test_log_lines_have_the_load_of_the_experts(tmp_path, capsys):
    """Of real tokens alone, once with activations computed again, and of the last steps alone."""
    rows, model = padded(), build("deepseek", layers=2)
    data = [{name: x[i] for name, x in rows.items()} for i in (0, 1)]
    args = arguments(
        tmp_path, max_steps=2, learning_rate=0.0, per_device_train_batch_size=1, use_cpu=True,
        gradient_accumulation_steps=2, gradient_checkpointing=True, logging_steps=1,
    )  # fmt: skip
    model.config.update(LOSS)
    trainer = TwoStageTrainer(model, args, train_dataset=data)
    with pytest.warns(GrowthWarning, match="without a balance loss"):
        trainer.train()
    shares = load_of(model.eval(), {name: x[:2] for name, x in rows.items()})
    shares /= shares.sum()
    expected = torch.distributions.Categorical(shares).entropy().item() / math.log(8)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2 and 0 < expected < 1
    assert capsys.readouterr().out.count(f"largest expert share {shares.max():.0%}") == 2
    for line in lines:
        assert line["expert_entropy"] == pytest.approx(expected)
        assert line["expert_largest_share"] == pytest.approx(shares.max().item())
        assert line["expert_equal_share"] == 1 / len(shares)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_moves_where_no_token_was_counted():
    model, balancing, inputs = build("deepseek", layers=2).train(), ExpertBalancing(), padded()
    balancing.watch(model)
    before = bias_of(model).clone()
    model(**{**inputs, "attention_mask": torch.zeros_like(inputs["attention_mask"])})
    balancing.update()
    model(**inputs)
    assert torch.equal(bias_of(model), before)
    balancing.update()
    after = bias_of(model).clone()
    balancing.update()
    assert torch.equal(bias_of(model), after) and not torch.equal(after, before)


def test_experts_that_sleep_wake():
    """A grown model computes the same as its source, until the biases have moved far enough."""
    small, rows = build("deepseek", layers=2), padded()
    model = growkern.grow(small, n_routed_experts=12)
    balancing = ExpertBalancing(0.2)
    balancing.watch(model.train())
    sleeps = model.growth_plan.layout.space("experts").read == 0
    tokens = []
    for _ in range(8):
        model(**rows)
        tokens.append(balancing._routers[0][2][sleeps].sum().item())
        balancing.update()
    # b is 1.01, and both biases move
    assert tokens[:2] == [0, 0]
    assert tokens[-1] > 0


def test_the_bias_stays_float32_in_pure_bf16(tmp_path):
    model = build("deepseek", layers=2)
    bias_of(model).fill_(5.0).add_(torch.arange(8) * 1e-3)
    before = bias_of(model).clone()
    with pytest.warns(GrowthWarning, match="pure-bf16"):
        set_precision(model, arguments(tmp_path), "pure-bf16")
    assert torch.equal(bias_of(model), before)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model(**padded()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "config", "callbacks", "warns"),
    [
        *(("mixtral", LOSS, [], True), ("mixtral", {}, [], False)),
        # its class has no such loss, or it is no mixture
        *(("deepseek", {}, [], False), ("llama", LOSS, [], False)),
        ("mixtral", LOSS, [ExpertBalancing()], False),
    ],
)
def test_experts_that_nothing_balances_are_told_of(recwarn, family, config, callbacks, warns):
    model = build(family, layers=2)
    model.config.update(config)
    warn_of_imbalance(model, callbacks)
    assert ["without a balance loss" in str(x.message) for x in recwarn] == [True] * warns


RUN = """
[model]
path = "model"
[data]
train = ["text.txt"]
sequence_length = 16
[training]
steps = 1
batch_size = 2
learning_rate = 0.0
expert_balancing = 0.05
[output]
directory = "out"
tensorboard = false
"""


def test_a_run_file_balances(tmp_path):
    model = build("deepseek", layers=2)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(200)))
    (tmp_path / "run.toml").write_text(RUN)
    growkern.run(tmp_path / "run.toml", progress=False)
    moved = bias_of(type(model).from_pretrained(tmp_path / "out")) - bias_of(model)
    # some experts had fewer tokens than others
    assert set(moved.div(0.05).round().tolist()) == {-1.0, 1.0}
