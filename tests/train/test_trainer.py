"""The trainer against a plain training loop; frozen and finished parts must not change."""

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageConfig, TwoStageTrainer, grow
from growkern.train.dataset.training_data import TokenBlocks
from growkern.train.model.head import align_labels
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from growkern.train.sections import OptimizerOptions
from testbed.tiny import (
    FAMILIES,
    VOCAB,
    Batches,
    TinyTokenizer,
    arguments,
    build,
    is_causal,
    losses_of,
    stack_of,
)
from tests.train import loop

STAGES = TwoStageConfig(layers_per_block=2, stage1_steps=4)
SCHEDULE = InheritanceSchedule(alpha=0.8, end_step=6)
ARGS = {"report_to": "none", "per_device_train_batch_size": 2}


def micro_batches(data, size, accumulation, steps):
    """The batches of a sequential sampler: the last accumulation of an epoch may be short."""
    epoch = [data.rows[i : i + size] for i in range(0, len(data), size)]
    epoch = [{k: torch.cat([row[k] for row in rows]) for k in rows[0]} for rows in epoch]
    epoch = [epoch[i : i + accumulation] for i in range(0, len(epoch), accumulation)]
    return (epoch * steps)[:steps]


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_trainer_equals_the_minimal_loop(family, accumulation, tmp_path):
    # 14 rows in batches of 2, 3 at a time: the third accumulation of an epoch has one batch
    # float64: Adam makes full steps of the rounding of gradients that are zero (a key's bias)
    data, teacher = Batches(14), build(family, layers=2, width=8, seed=9).double()
    model = build(family, tied=True).double()
    twin = copy.deepcopy(model)
    trainer = TwoStageTrainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=accumulation),
        two_stage=STAGES,
        inheritance=SCHEDULE,
        teacher=teacher,
        train_dataset=data,
    )
    trainer.train()
    expected = loop.train(
        twin, micro_batches(data, 2, accumulation, 8), causal=is_causal(family), teacher=teacher,
        learning_rate=1e-2, warmup=2, two_stage=STAGES, schedule=SCHEDULE,
    )  # fmt: skip
    np.testing.assert_allclose(losses_of(trainer), expected, rtol=1e-5)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


class Watch(TrainerCallback):
    """Copies of the parameters and their optimizer state around every step, and layer calls."""

    def __init__(self, model):
        self.calls, self.before, self.steps = [], None, []
        for i, layer in enumerate(stack_of(model)):
            layer.register_forward_hook(lambda *_, i=i: self.calls.append(i))

    def _copy(self, model, optimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return {
            name: [p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())]
            for name, p in model.named_parameters()
        }

    def on_step_begin(self, args, state, control, model, optimizer, **_):
        self.calls.clear()
        self.before = self._copy(model, optimizer)

    def on_step_end(self, args, state, control, model, optimizer, **_):
        after = self._copy(model, optimizer)
        before = self.before
        moved = {n for n, x in after.items() if not all(map(torch.equal, x, before[n]))}
        self.steps.append((list(self.calls), moved))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_runs_and_moves_its_sub_model_only(family, tmp_path):
    model = build(family, tied=True)
    watch = Watch(model)
    stages = TwoStageConfig(layers_per_block=2, stage1_steps=10, seed=1)
    options = {"max_steps": 10, "weight_decay": 0.1, "max_grad_norm": 1.0, "warmup_steps": 0}
    args, data = arguments(tmp_path, **options), Batches(8)
    trainer = TwoStageTrainer(model, args, two_stage=stages, train_dataset=data, callbacks=[watch])
    trainer.train()
    depths = [stages.depth(step, 5) for step in range(10)]
    assert set(depths) == {2, 4, 5}
    names = {id(p): name for name, p in model.named_parameters()}
    layer_names = [{names[id(p)] for p in layer.parameters()} for layer in stack_of(model)]
    for depth, (calls, moved) in zip(depths, watch.steps, strict=True):
        assert calls == list(range(depth))
        for i, own in enumerate(layer_names):
            # a key's bias has no gradient but rounding: it may stay where it is
            still = {name for name in own if "key.bias" in name}
            expected = own if depth - 2 <= i < depth else set()
            assert own & moved in (expected, expected - still), (depth, i)
        outside = moved - set().union(*layer_names)
        embedding = names[id(model.get_input_embeddings().weight)]
        assert embedding in outside, "the tied head trains at every depth"
        lookups = {n for n in outside if "position" in n or "wpe" in n or "token_type" in n}
        assert not lookups and "bert.embeddings.LayerNorm.weight" not in outside


def test_teacher_runs_while_the_rate_is_positive_and_never_moves(tmp_path):
    teacher, calls = build("bert", layers=2, seed=9).train(), []
    teacher.register_forward_hook(lambda *_: calls.append(teacher.training))
    before = copy.deepcopy(teacher.state_dict())
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    trainer = TwoStageTrainer(
        build("bert"),
        args,
        inheritance=InheritanceSchedule(end_step=3),
        teacher=teacher,
        train_dataset=Batches(16),
        eval_dataset=Batches(4),
    )
    calls.clear()  # the trainer looks at its heads once
    trainer.train()
    assert calls == [False] * 3
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters())
    assert teacher.training
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["alpha"] for line in lines[:4]] == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0])
    assert ["kl" in line for line in lines[:4]] == [True, True, True, False]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_evaluation_is_the_whole_model_alone_and_costs_nothing(family, tmp_path):
    model, data = build(family), Batches(7)
    trainer = TwoStageTrainer(
        model, arguments(tmp_path, per_device_eval_batch_size=2), two_stage=STAGES,
        inheritance=SCHEDULE, teacher=build(family, layers=1, seed=9), train_dataset=data,
    )  # fmt: skip
    result = trainer.evaluate(data)
    total, items = 0.0, 0
    for row in data.rows:
        labels = align_labels(row["labels"], causal=is_causal(family))
        logits = model(input_ids=row["input_ids"]).logits.double().log_softmax(-1)
        keep = labels != -100
        total -= logits[keep].gather(1, labels[keep][:, None]).sum().item()
        items += keep.sum().item()
    assert result["eval_loss"] == pytest.approx(total / items, rel=1e-5)
    assert trainer.state.log_history[-1]["flops"] == 0


def test_evaluation_masks_are_the_same_every_time(tmp_path):
    blocks = TokenBlocks(np.random.default_rng(0).integers(5, VOCAB, (6, 16)).astype(np.int32))
    trainer = TwoStageTrainer(
        build("bert"),
        arguments(tmp_path),
        data_collator=MaskedLMCollator(TinyTokenizer(), 0.3),
        eval_dataset=blocks,
    )
    first = trainer.evaluate()["eval_loss"]
    trainer.data_collator.set_epoch(7)
    assert trainer.evaluate()["eval_loss"] == first


def test_state_of_every_parameter_exists_before_the_first_step(tmp_path):
    model, seen = build("bert"), []
    before = copy.deepcopy(model.state_dict())

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, model, optimizer, **_):
            optimizer = getattr(optimizer, "optimizer", optimizer)
            if state.global_step == 0:
                seen.extend(optimizer.state[p] for p in model.parameters())
                assert all(v.count_nonzero() == 0 for s in seen for v in s.values())
                assert all(p.grad is None for p in model.parameters())
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name]), name

    # a real learning rate and weight decay: a step on the parameters themselves would show
    TwoStageTrainer(
        model,
        arguments(tmp_path, max_steps=1, warmup_steps=0, weight_decay=0.1),
        two_stage=TwoStageConfig(layers_per_block=2, stage1_steps=1),
        train_dataset=Batches(4),
        callbacks=[Look()],
    ).train()
    assert len(seen) == len(list(model.parameters()))
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in seen)


def test_bfloat16_autocast_reaches_student_and_teacher(tmp_path):
    results = []
    for bf16 in (False, True):
        model, teacher, dtypes = build("llama", seed=3), build("llama", layers=2, seed=4), []
        trainer = TwoStageTrainer(
            model,
            arguments(tmp_path, max_steps=2, bf16=bf16, use_cpu=True),
            inheritance=InheritanceSchedule(alpha=0.8, end_step=2),
            teacher=teacher,
            train_dataset=Batches(4),
        )
        for one in (model, teacher):
            projection = stack_of(one)[0].mlp.down_proj
            projection.register_forward_hook(lambda *a, seen=dtypes: seen.append(a[-1].dtype))
        trainer.train()
        assert dtypes == [torch.bfloat16 if bf16 else torch.float32] * 4
        results.append(losses_of(trainer))
    assert results[0] != results[1]
    np.testing.assert_allclose(results[1], results[0], rtol=3e-2)


# ---------------------------------------------------------------- refusals


def refuse(match, model=None, tmp_path="unused", args=None, **options):
    with pytest.raises(GrowthError, match=match):
        TwoStageTrainer(model or build("bert"), args or arguments(tmp_path), **options)


def test_arguments_that_train_another_function_are_refused(tmp_path, monkeypatch):
    def given(**options):
        return arguments(tmp_path, **options)

    two = given()
    # what a second process makes of the arguments
    monkeypatch.setattr(type(two), "world_size", property(lambda args: 2))
    two.average_tokens_across_devices = False
    refuse("gives the labels of small batches", args=two)
    two.average_tokens_across_devices, two.ddp_find_unused_parameters = True, False
    refuse("would wait for ever", args=two)
    two.ddp_find_unused_parameters = None
    two.accelerator_config.even_batches = False
    refuse("even_batches=False gives some processes", args=two)
    monkeypatch.undo()
    for strategy in ("group_by_length", "batch_rebalance"):
        args = given(train_sampling_strategy=strategy)
        refuse(f"train_sampling_strategy='{strategy}' draws another order", args=args)
    args = given(accelerator_config={"use_seedable_sampler": False})
    refuse("use_seedable_sampler=False draws another order", args=args)
    refuse("teacher='org/name' is no model: load", teacher="org/name", inheritance=SCHEDULE)
    refuse("pip install liger-kernel", args=given(use_liger_kernel=True))
    refuse("'lomo', which cannot be used: .*pip install lomo", args=given(optim="lomo"))
    refuse("pip install grokadamw", args=given(optim="grokadamw"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse("would train alone", args=given())
    monkeypatch.undo()
    refuse("sharded training", args=given(fsdp="full_shard"))
    refuse("torch_compile", args=given(torch_compile=True))
    refuse("model_init cannot be used", args=given(), model_init=lambda: build("bert"))
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    refuse("use_reentrant", args=given(gradient_checkpointing=True, **reentrant))
    by_hand = build("bert")
    by_hand.gradient_checkpointing_enable({"use_reentrant": True})
    refuse("the model has gradient checkpointing with use_reentrant", by_hand, tmp_path)
    refuse("compute_metrics", tmp_path=tmp_path, compute_metrics=lambda _: {})
    refuse("layers_per_block", tmp_path=tmp_path, two_stage=TwoStageConfig(6, 2))
    refuse("without teacher", tmp_path=tmp_path, inheritance=SCHEDULE)
    refuse("without inheritance", tmp_path=tmp_path, teacher=build("bert"))


def test_models_without_a_language_head_are_refused(tmp_path):
    refuse("neither a masked nor a causal", build("bert").base_model, tmp_path)
    encoder = transformers.T5EncoderModel(build("t5").config)
    refuse("neither a masked nor a causal", encoder, tmp_path)


def test_teachers_that_do_not_fit_are_refused(tmp_path):
    options = {"tmp_path": tmp_path, "inheritance": SCHEDULE}
    refuse("vocabularies differ", teacher=build("bert", vocab_size=VOCAB + 2), **options)
    model = build("bert")
    refuse("shares parameters", model, teacher=model, **options)


def test_a_teacher_padded_differently_is_taken_with_the_tokenizer(tmp_path):
    trainer = TwoStageTrainer(
        build("gpt2"),
        arguments(tmp_path, max_steps=1),
        inheritance=InheritanceSchedule(end_step=1),
        teacher=build("gpt2", layers=1, vocab_size=VOCAB + 16),
        processing_class=TinyTokenizer(),
        data_collator=CausalLMCollator(TinyTokenizer()),
        train_dataset=TokenBlocks(np.full((2, 8), 7, np.int32)),
    )
    trainer.train()
    assert np.isfinite(losses_of(trainer)).all()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_grown_model_and_its_source_begin_as_well_as_without_a_teacher(bf16, tmp_path):
    """At an alpha of 1 the first gradients are rounding, of which Adam makes full steps."""
    source, data = build("gpt2", layers=2), Batches(32)
    optimizer = torch.optim.AdamW(source.parameters(), 3e-3)
    rows = {key: torch.cat([row[key] for row in data.rows]) for key in data.rows[0]}
    for _ in range(60):
        source(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def losses(steps, **teaching):
        args = arguments(
            tmp_path, max_steps=steps, bf16=bf16, use_cpu=True, learning_rate=1e-3,
            warmup_steps=0, lr_scheduler_type="constant",
        )  # fmt: skip
        model = grow(source, n_embd=32)
        trainer = TwoStageTrainer(model, args, train_dataset=data, **teaching)
        trainer.train()
        return trainer.evaluate(data)["eval_loss"]

    for steps in (1, 3):
        alone = losses(steps)
        # as at the start of a long run
        schedule = InheritanceSchedule(decay="constant")
        taught = losses(steps, teacher=source, inheritance=schedule)
        assert taught <= alone + 1e-3


def test_the_rates_of_the_paper():
    """Linear to 0, constant, and dropped at once, as Qin et al. compare them."""
    linear = InheritanceSchedule(alpha=0.8, end_step=4)
    assert [linear.alpha_at(t) for t in range(6)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0, 0])
    constant = InheritanceSchedule(alpha=0.5, decay="constant")
    assert {constant.alpha_at(t) for t in (0, 1, 10**9)} == {0.5}
    switch = InheritanceSchedule(alpha=0.8, end_step=4, decay="switch")
    assert [switch.alpha_at(t) for t in range(6)] == [0.8] * 4 + [0, 0]


@pytest.mark.parametrize(("epochs", "depths"), [(1, 4), (1.5, 6), (0, 0)])
def test_stage_1_lasts_some_passes_through_the_data(tmp_path, epochs, depths):
    """7 batches, 2 at a time: 4 steps are a pass."""
    trainer = TwoStageTrainer(
        build("bert"),
        arguments(tmp_path, max_steps=9, gradient_accumulation_steps=2),
        two_stage=TwoStageConfig(layers_per_block=1, stage1_epochs=epochs),
        train_dataset=Batches(7 * 2),
    )
    assert trainer.two_stage.stage1_steps == depths
    trainer.train()
    found = {line["step"]: line["depth"] for line in trainer.state.log_history if "loss" in line}
    # steps with the full depth may be of stage 1 as well
    assert all(found[step] == 5 for step in range(depths + 1, 10)) and len(found) == 9
    assert not depths or min(found.values()) < 5


@pytest.mark.parametrize("length", [{"max_steps": 9}, {"max_steps": -1, "num_train_epochs": 2.25}])
def test_a_stage_1_longer_than_the_run_is_refused(tmp_path, length):
    """4 steps are a pass: 2.25 passes are all 9 steps."""

    def make(epochs):
        return TwoStageTrainer(
            build("bert", layers=1),
            arguments(tmp_path, **length),
            two_stage=TwoStageConfig(layers_per_block=1, stage1_epochs=epochs),
            train_dataset=Batches(4 * 2),
        )

    assert make(2.25).two_stage.stage1_steps == 9
    with pytest.raises(GrowthError, match=r"makes 10 steps of 4 per epoch: .* the 9 steps of"):
        make(2.26)


TOO_LATE = {
    "inheritance end_step is 9": {"inheritance": InheritanceSchedule(end_step=9)},
    "two_stage.stage1_steps is 9": {"two_stage": TwoStageConfig(1, 9)},
    "optimizer.rewarm_steps is 9": {"optimizer_options": OptimizerOptions(rewarm_steps=9)},
    "eval_delay is 9": {"eval_delay": 9, "eval_strategy": "steps", "eval_steps": 2},
    "warmup_steps is 9": {"warmup_steps": 9},
}


@pytest.mark.parametrize("match", TOO_LATE)
@pytest.mark.parametrize("length", [{"max_steps": 8}, {"max_steps": -1, "num_train_epochs": 2}])
def test_step_numbers_that_the_run_does_not_reach_are_refused(tmp_path, match, length):
    """4 steps are a pass."""

    def make(length):
        options = dict(TOO_LATE[match])
        own = ("inheritance", "two_stage", "optimizer_options")
        ours = {name: options.pop(name) for name in own if name in options}
        args = TrainingArguments(str(tmp_path), **ARGS | options | length)
        model, teacher = growkern.grow(build("bert", layers=1), num_hidden_layers=2), None
        if "inheritance" in ours:
            teacher = build("bert", layers=1)
        data = {"train_dataset": Batches(8), "eval_dataset": Batches(2)}
        return TwoStageTrainer(model, args, teacher=teacher, **ours, **data)

    with pytest.raises(GrowthError, match=f"{match}.*: it must not be more than the 8 steps of"):
        make(length)
    make({"max_steps": 9})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"end_step": 0}, "end_step"),
        ({}, "end_step is None.* alpha reaches 0"),
        ({"decay": "switch"}, "end_step is None.* alpha reaches 0"),
        ({"decay": "constant", "end_step": 5}, "a constant alpha has no end"),
        ({"decay": "linaer", "end_step": 5}, "did you mean 'linear'"),
        ({"end_step": 5, "alpha": 1.5}, "alpha"),
        ({"end_step": 5, "temperature": 0.0}, "temperature"),
        ({"end_step": 5, "kl_rows": "some"}, "kl_rows"),
        ({"end_step": 5, "teacher_weights": (0.5, 0.6)}, "sum to 1"),
        ({"end_step": 1, "divergence": "revers"}, "did you mean 'reverse'"),
        ({"end_step": 1, "beta": 0.5}, "beta belongs to 'jsd'"),
        ({"end_step": 1, "divergence": "jsd", "beta": 1.0}, r"in \(0, 1\)"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(options, match):
    with pytest.raises(GrowthError, match=match):
        InheritanceSchedule(**options)
