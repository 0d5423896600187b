"""Growth inside a run: what goes on, what grows, and what a kill leaves."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import growkern
from growkern import GrowthError, GrowthStep, TwoStageConfig, TwoStageTrainer
from growkern.train.loop.growing import are_above, new_part, plans_of_run
from growkern.train.model.sub_model import ModelPart, layer_stacks
from testbed.tiny import VOCAB, Batches, build
from tests.shared import walks
from tests.train.safety.runs import assert_same, weights_of
from tests.train.test_resume import log_of

STEPS = 9
SIZES = ("num_hidden_layers", "intermediate_size")
GROWTH = (
    GrowthStep(at_step=3, sizes={SIZES[0]: 4}, moments="grow", rewarm_steps=2),
    GrowthStep(
        **{"at_step": 6, "sizes": {SIZES[0]: 5, SIZES[1]: 80}, "moments": "grow"},
        **{"seed": 1, "rate_factor": 0.5},
    ),
)


class Watcher(TrainerCallback):
    """Keeps the model, the optimizer's state and the rate at the beginning of every step."""

    def __init__(self):
        self.seen = {}

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.seen[state.global_step] = {
            "weights": {k: v.clone() for k, v in model.state_dict().items()},
            "state": {
                name: {k: v.clone() for k, v in optimizer.state[p].items()}
                for name, p in model.named_parameters()
            },
            "rates": {group["lr"] for group in optimizer.param_groups},
            "kind": type(optimizer).__name__,
        }


def trainer_in(
    path, growth=GROWTH, family="bert", watcher=None, args=None, cls=TwoStageTrainer, layers=2,
    **options,
):  # fmt: skip
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2, "warmup_steps": 2, "logging_steps": 1, "save_steps": 2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(
        build(family, layers=layers, tied=True),
        TrainingArguments(str(path), **settings | (args or {})),
        growth=growth, train_dataset=Batches(14), callbacks=[watcher] if watcher else None,
        **options,
    )  # fmt: skip


class Reader(TwoStageTrainer):
    """Keeps the tokens of every micro-batch that it trains on."""

    def compute_loss(self, model, inputs, *args, **options):
        self.__dict__.setdefault("read", []).append(inputs["input_ids"].clone())
        return super().compute_loss(model, inputs, *args, **options)


@pytest.fixture(scope="module")
def watched():
    return Watcher()


@pytest.fixture(scope="module")
def straight(watched, tmp_path_factory):
    # set here too: the fixture that makes the tests deterministic lives for one test
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = trainer_in(tmp_path_factory.mktemp("straight"), watcher=watched, cls=Reader)
    trainer.train()
    # of later trainings it reads more
    watched.read = trainer.read[:]
    return trainer


def by_parameter(optimizer, model):
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_state_grows_and_the_rest_goes_on(family, straight, watched, tmp_path):
    layers, units = ("n_layer", "n_inner") if family == "gpt2" else SIZES
    growth = [
        replace(
            one, sizes={{SIZES[0]: layers, SIZES[1]: units}[k]: n for k, n in one.sizes.items()}
        )
        for one in GROWTH
    ]
    trainer, watcher = straight, watched
    if family == "gpt2":
        watcher = Watcher()
        trainer = trainer_in(tmp_path, growth, family=family, watcher=watcher)
        trainer.train()
    assert trainer.state.global_step == STEPS and trainer.model.config.num_hidden_layers == 5
    logged = {x["step"]: x for x in trainer.state.log_history if "loss" in x}
    assert sorted(logged) == list(range(1, STEPS + 1))
    assert logged[3]["parameters"] < logged[4]["parameters"] < logged[7]["parameters"]
    # the first line after a growth says so, with the new sizes and the loss before
    events = {step: line for step, line in logged.items() if "growth" in line}
    assert [line["growth"] for line in events.values()] == [1, 2]
    for one, (step, line) in zip(growth, events.items(), strict=True):
        assert step == one.at_step + 1
        assert line["growth/loss_before"] == logged[one.at_step]["label_loss"]
        assert one.sizes.items() <= {k.removeprefix("growth/"): v for k, v in line.items()}.items()

    # the independent way: the checkpoint of the smaller model, loaded and grown by hand
    for number, one in enumerate(growth):
        checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{one.at_step}"
        small = type(trainer.model).from_pretrained(checkpoint)
        assert small.config.num_hidden_layers == (2, 4)[number]
        large = growkern.grow(small, **vars(one.how), **one.sizes)
        seen = watcher.seen[one.at_step]
        assert_same(large.state_dict(), seen["weights"])
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        optimizer = torch.optim.AdamW(growkern.decay_groups(large, 0.01))
        optimizer.load_state_dict(growkern.grow_optimizer(state, large.growth_plan))
        for name, entry in by_parameter(optimizer, large).items():
            assert float(entry["step"]) == one.at_step
            assert entry["exp_avg_sq"].any(), name
            for key, value in entry.items():
                assert torch.equal(value, seen["state"][name][key]), (name, key)
        assert seen["kind"] == "GrowthAdamW" and watcher.seen[0]["kind"] == "AdamW"
        after = watcher.seen[one.at_step + 1]["weights"]
        assert all(not torch.equal(x, seen["weights"][name]) for name, x in after.items())


def test_by_default_the_state_begins_anew_and_new_layers_are_copies(tmp_path):
    """Where no layers are added, there is no depth that would be refused."""
    growth = [
        GrowthStep(at_step=3, sizes={SIZES[0]: 4}),
        GrowthStep(at_step=6, sizes={SIZES[1]: 80}),
    ]
    watcher = Watcher()
    trainer_in(tmp_path, growth, watcher=watcher).train()
    began = [
        step
        for step, seen in watcher.seen.items()
        if not any(x.any() for entry in seen["state"].values() for x in entry.values())
    ]
    assert began == [0, 3, 6]
    weights = watcher.seen[3]["weights"]
    below = {name: x for name, x in weights.items() if ".layer.2." in name or ".layer.3." in name}
    assert below
    for name, x in below.items():
        assert torch.equal(x, weights[name.replace("r.2.", "r.0.").replace("r.3.", "r.1.")]), name


def test_a_run_may_begin_without_layers(tmp_path):
    """The new ones begin untrained, and so does their state; that of the rest goes on."""
    watcher, how = Watcher(), {"depth": "random", "moments": "grow"}
    growth = GrowthStep(at_step=2, sizes={SIZES[0]: 2}, **how)
    trainer = trainer_in(tmp_path, [growth], watcher=watcher, layers=0, args={"max_steps": 4})
    trainer.train()
    seen, after = watcher.seen[2], watcher.seen[3]["weights"]
    for name, entry in seen["state"].items():
        is_new = ".layer." in name
        assert float(entry["step"]) == (0 if is_new else 2), name
        assert bool(entry["exp_avg_sq"].any()) != is_new, name
        assert is_new or not torch.equal(seen["weights"][name], after[name]), name
    flops = [line["flops"] for line in trainer.state.log_history if "loss" in line]
    assert flops[3] - flops[2] > flops[1] - flops[0] > 0


def test_the_rate_follows_one_schedule(straight, watched):
    """Linear from a warm-up of 2 steps to 0 at step 9, times 1/3 and 2/3 after the first growth.

    And times 1/2 from the second one on.
    """
    for step in range(STEPS):
        factor = step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)
        factor *= {3: 1 / 3, 4: 2 / 3}.get(step, 1) * (0.5 if step >= 6 else 1)
        (rate,) = watched.seen[step]["rates"]
        assert rate == pytest.approx(1e-2 * factor, rel=1e-12), step


def test_the_data_goes_on(straight, watched, tmp_path):
    same = trainer_in(tmp_path, (), cls=Reader)
    same.train()
    assert len(watched.read) == len(same.read) > STEPS
    for one, other in zip(watched.read, same.read, strict=True):
        assert torch.equal(one, other)


# before, at and after growths
@pytest.mark.parametrize("stop", [2, 3, 4, 6, 8] if walks.times > 1 else [2, 3, 8])
def test_resumed_equals_straight_bit_for_bit(straight, stop, tmp_path):
    """Before, at and after a growth; the new trainer begins with the small model."""
    shutil.copytree(straight.args.output_dir, tmp_path / "run")
    for later in range(stop + 1, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{later}", ignore_errors=True)
    again = trainer_in(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    assert_same(weights_of(straight), weights_of(again))
    assert log_of(again) == log_of(straight)
    # and back again with the same trainer, to a smaller size
    if stop == 4:
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        assert_same(weights_of(straight), weights_of(again))


def test_only_new_layers_train_at_first(tmp_path):
    """MSLT: the old layers stay bit for bit, the new ones and the head do not."""
    growth = [GrowthStep(at_step=3, sizes={"num_hidden_layers": 4}, new_layers_steps=2)]
    watcher = Watcher()
    trainer_in(tmp_path, growth, watcher=watcher, args={"warmup_steps": 0}).train()
    weights = {step: seen["weights"] for step, seen in watcher.seen.items()}

    def moved(step):
        names = weights[step]
        return {
            int(n.split(".")[3]) for n in names
            if "encoder.layer" in n and not torch.equal(weights[step + 1][n], weights[step][n])
        }  # fmt: skip

    assert [moved(step) for step in range(8)] == 3 * [{0, 1}] + 2 * [{2, 3}] + 3 * [{0, 1, 2, 3}]
    head = "cls.predictions.transform.dense.weight"
    assert not torch.equal(weights[4][head], weights[3][head])


def test_the_growth_goes_on_from_its_checkpoint_also_if_only_the_best_is_kept(tmp_path):
    """At the end of each part of a run, Trainer deletes all others."""
    args = {
        "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    growth = [GrowthStep(at_step=4, sizes={"num_hidden_layers": 4})]
    trainer = trainer_in(tmp_path, growth, args=args, eval_dataset=Batches(4))
    trainer._evaluate = lambda *_, **__: {"eval_loss": float(trainer.state.global_step)}
    trainer.train()
    assert trainer.state.global_step == STEPS and trainer.model.config.num_hidden_layers == 4
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert kept == {"checkpoint-2", f"checkpoint-{STEPS}"}


def evaluations(trainer):
    lines = trainer.state.log_history
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def test_a_model_is_evaluated_before_and_after_its_growth(tmp_path):
    """A growth that is exact has the loss of the small model; a resumed run measures it once."""
    args = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 1}
    growth, data = [GrowthStep(at_step=3, sizes={SIZES[1]: 80})], Batches(4)
    trainer = trainer_in(tmp_path / "a", growth, args=args, eval_dataset=data)
    trainer.train()
    found = evaluations(trainer)
    assert [step for step, _ in found] == [3, 3, 4, 8, 9]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5) and found[1] != found[2]
    for step in (2, 3, 4):
        again = trainer_in(tmp_path / "a", growth, args=args, eval_dataset=data)
        again.train(resume_from_checkpoint=tmp_path / "a" / f"checkpoint-{step}")
        assert evaluations(again) == found
    # a model that was grown before the run; and without data to evaluate on nothing is
    small = build("bert", layers=2, tied=True)
    large = growkern.grow(small, intermediate_size=80)
    args |= {"max_steps": 2, "output_dir": str(tmp_path / "b")}
    own = TrainingArguments(**{**trainer.args.to_dict(), **args})
    found = []
    for model, rows in ((small, data), (large, data), (large, None)):
        kind = own if rows else replace(own, eval_strategy="no")
        one = TwoStageTrainer(model, kind, train_dataset=data, eval_dataset=rows)
        before = one.evaluate(data)["eval_loss"]
        one.state.log_history.clear()
        one.train()
        found.append([loss for step, loss in evaluations(one) if step == 0])
        assert found[-1] in ([], [before])
    assert [len(losses) for losses in found] == [0, 1, 0]


def test_tensorboard_has_the_validation_losses_before_and_after_a_growth(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    args = {"eval_strategy": "steps", "eval_steps": 4, "report_to": "tensorboard"}
    growth = [GrowthStep(at_step=3, sizes={SIZES[0]: 4})]
    trainer = trainer_in(tmp_path, growth, args=args, eval_dataset=Batches(4))
    trainer.train()
    shown = {}
    for file in tmp_path.rglob("events.*"):
        read = events.EventAccumulator(str(file)).Reload()
        shown |= {tag: read.Scalars(tag)[0].value for tag in read.Tags()["scalars"]}
    found = [shown[f"train/growth/eval_loss_{when}"] for when in ("before", "after")]
    assert found == pytest.approx([loss for _, loss in evaluations(trainer)[:2]])
    assert abs(found[1] - found[0]) > 1e-3


def test_a_run_does_not_start_again_with_a_model_that_is_gone(straight):
    folder = Path(straight.args.output_dir)
    weights, files = weights_of(straight), sorted(folder.iterdir())
    with pytest.raises(GrowthError, match="has grown in this trainer, so the run cannot"):
        straight.train()
    assert_same(weights_of(straight), weights)
    assert sorted(folder.iterdir()) == files
    # the checkpoint before the last growth has the model that is grown again
    straight.train(resume_from_checkpoint=folder / "checkpoint-6")
    assert_same(weights_of(straight), weights)


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_save", "on_evaluate"])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_callback_ends_the_run_at_a_growth(event, strategy, tmp_path):
    class Ends(TrainerCallback):
        pass

    def end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 4

    setattr(Ends, event, end)
    # an epoch has 4 steps
    growth = [replace(GROWTH[0], at_step=4)]
    args = {"eval_strategy": strategy, "eval_steps": 4}
    trainer = trainer_in(tmp_path, growth, args=args, eval_dataset=Batches(2))
    trainer.add_callback(Ends())
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.model.config.num_hidden_layers == 2


@pytest.mark.parametrize("way", ["shard", "by hand"])
def test_blocks_stay_compiled_and_checkpointed(way, tmp_path, monkeypatch):
    """After a growth and in a resumed run, also of a model that is not sharded."""

    class Shown(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            blocks = layer_stacks(model)[0]
            kept.add(all(block.gradient_checkpointing for block in blocks))
            kept.add(all(block._compiled_call_impl is not None for block in blocks))

    def prepare(model):
        if way == "shard":
            options = {"activation_checkpointing": True, "compile_blocks": True}
            growkern.shard(model, growkern.DistributedOptions(**options))
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for block in layer_stacks(model)[0]:
                block.compile()

    def compiled(block):
        block._compiled_call_impl = block._call_impl

    kept = set()
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    for checkpoint in (None, tmp_path / "checkpoint-8"):
        trainer = trainer_in(tmp_path, watcher=Shown())
        prepare(trainer.model)
        trainer.train(checkpoint)
    assert kept == {True}


def test_each_stack_trains_the_layers_that_it_gains():
    config = transformers.T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=3, num_decoder_layers=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    for sizes, trained in (
        ({"num_decoder_layers": 4}, (0, 2)),
        ({"num_layers": 4, "num_decoder_layers": 6}, (1, 4)),
    ):
        growth = GrowthStep(at_step=2, sizes=sizes, new_layers_steps=3)
        (plan,) = plans_of_run(model, [growth])
        large = transformers.T5ForConditionalGeneration(plan.target_config)
        depths = [len(stack) for stack in layer_stacks(large)]
        assert new_part(4, growth, plan) == ModelPart(max(depths), trained)
        assert [n - added for n, added in zip(depths, trained, strict=True)] == [3, 2]
        assert new_part(5, growth, plan) is None


@pytest.mark.parametrize(
    ("depth", "above"),
    [("stack", True), ((0, 1, 0), True), ((0, 0, 1), False), ("identity", False)],
)
def test_new_layers_are_above_by_their_places(depth, above):
    step = GrowthStep(at_step=2, sizes={"num_hidden_layers": 3}, depth=depth)
    assert are_above(plans_of_run(build("bert", layers=2), [step])[0]) == above


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": [GrowthStep(at_step=9, sizes={"num_hidden_layers": 4})]}, "after the run, whi"),
        ({"growth": GROWTH[::-1]}, "a growth at step 3 follows one at step 6: give them in the or"),
        ({"growth": [GrowthStep(at_step=2, sizes={"num_hidden_layer": 4})]}, "step 2: .*no size"),
        ({"growth": [GrowthStep(at_step=2, sizes={"hidden_size": 15})]}, "the growth at step 2"),
        ({"args": {"save_strategy": "no"}}, 'set save_strategy to "steps"'),
        ({"args": {"optim": "adafactor"}}, 'adafactor cannot be grown: set moments to "reset"'),
        ({"args": {"max_steps": -1, "num_train_epochs": 3}}, "give max_steps"),
        (
            {
                "growth": [GrowthStep(at_step=2, sizes={SIZES[0]: 3}, new_layers_steps=1)],
                "two_stage": TwoStageConfig(1, stage1_steps=3),
            },
            "grow after stage 1, or leave one of the two out",
        ),
        (
            {"growth": [GrowthStep(at_step=2, sizes={"hidden_size": 32}, new_layers_steps=1)]},
            "needs new layers above the old ones, but 2 layers become 2",
        ),
    ],
)
def test_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(GrowthError, match=message):
        trainer_in(tmp_path / "out", **options)
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_frozen_parameter_is_refused(tmp_path):
    """The larger model would train it."""
    model = build("gpt2", layers=2)
    model.transformer.wpe.requires_grad_(False)
    growth = [GrowthStep(at_step=2, sizes={"n_layer": 4})]
    with pytest.raises(GrowthError, match=r"transformer\.wpe\.weight is frozen"):
        TwoStageTrainer(model, TrainingArguments(str(tmp_path), max_steps=4), growth=growth)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"at_step": -1}, "at_step is -1: it must be 0 or more"),
        ({}, "needs its source"),
        ({"at_step": 2, "source": "x"}, "source is for a growth at the start of a run; at step 2"),
        ({"source": "x", "rewarm_steps": 2}, "rewarm_steps is for growth inside a run"),
        ({"source": "x", "rate_factor": 0.5}, "rate_factor is for growth inside a run"),
        ({"at_step": 2, "rate_factor": 0}, "rate_factor is 0"),
        ({"at_step": 2, "sizes": {}}, "a growth needs sizes, such as num_hidden_layers = 12"),
    ],
)
def test_values_of_a_growth_are_checked(values, message):
    with pytest.raises(GrowthError, match=message):
        GrowthStep(**{"sizes": {"num_hidden_layers": 4}} | values)


@pytest.mark.parametrize("dtype, width", [(torch.float64, 16), (torch.float32, 18)])
def test_a_dense_model_becomes_a_mixture_that_grouped_products_do_not_take(dtype, width, tmp_path):
    """The default of transformers takes neither float64 nor rows of other than 16 bytes."""
    sizes = {"num_experts": 2, "num_experts_per_tok": 1}
    growth = [GrowthStep(at_step=1, to="qwen3_moe", sizes=sizes)]
    config = transformers.Qwen3Config(
        **{"vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 24, "head_dim": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    )
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    data = [{"input_ids": row, "labels": row} for row in torch.arange(24).view(8, 3)]
    model = transformers.Qwen3ForCausalLM(config).to(dtype)
    trainer = TwoStageTrainer(model, args, train_dataset=data, growth=growth)
    trainer.train()
    assert trainer.model.dtype == dtype
    assert type(trainer.model) is transformers.Qwen3MoeForCausalLM
