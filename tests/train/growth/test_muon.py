"""optimizer="muon": Muon and AdamW as one optimizer, in one size and through growth."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

import growkern
from growkern import GrowthAdamW, GrowthError, GrowthMuon, OptimizerOptions, TwoStageTrainer
from growkern.growth.optimizer.muon import CombinedOptimizer, Muon
from growkern.train.distributed import shards
from testbed.tiny import Batches, arguments, build, is_causal
from tests.shared import walks
from tests.train.growth.test_growing import GROWTH, STEPS, Watcher, trainer_in
from tests.train.growth.test_optimizer import TWICE, optimizer_of, trained, trained_both_ways
from tests.train.safety.runs import assert_same, weights_of
from tests.train.test_resume import log_of
from tests.train.test_trainer import micro_batches

OWN = OptimizerOptions(muon_lr=2e-2, momentum=0.9, ns_steps=4, adjust_lr_fn="original")


@pytest.fixture
def in_float64(monkeypatch):
    """PyTorch's polynomial of Muon in float64: by itself it rounds to bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def split(model):
    """By the names of the families: the matrices of the blocks, and the rest."""
    named, blocks = dict(model.named_parameters()), (".layer.", ".h.", ".layers.", ".block.")
    matrices = {
        name: p
        for name, p in named.items()
        if p.ndim > 1 and any(x in name for x in blocks) and "relative_attention" not in name
    }
    return matrices, {name: p for name, p in named.items() if name not in matrices}


def decays(name, p):
    return p.ndim > 1 and "bias" not in name


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "mixtral"])
def test_it_steps_as_muon_and_adamw_by_hand(family, tmp_path, in_float64):
    """One schedule for both, weight decay on matrices alone, and clipping by the norm of all."""
    model, data = build(family, layers=2, tied=True).double(), Batches(8)
    twin = copy.deepcopy(model)
    settings = {"max_steps": 4, "warmup_steps": 0, "weight_decay": 0.1, "adam_epsilon": 1e-3}
    args = arguments(tmp_path, max_grad_norm=0.1, **settings)
    TwoStageTrainer(
        model, args, train_dataset=data, optimizer="muon", optimizer_options=OWN
    ).train()
    matrices, rest = split(twin)
    muon = Muon(list(matrices.values()), lr=2e-2, weight_decay=0.1, momentum=0.9, ns_steps=4)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for n, p in rest.items() if decays(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in rest.items() if not decays(n, p)], "weight_decay": 0.0},
        ],
        eps=1e-3,
    )
    for step, (batch,) in enumerate(micro_batches(data, 2, 1, 4)):
        twin.zero_grad()
        labels = batch["labels"]
        if is_causal(family):
            labels = labels.clone()
            labels[:, 0] = -100
        twin(input_ids=batch["input_ids"], labels=labels).loss.backward()
        assert clip_grad_norm_(twin.parameters(), 0.1) > 0.1
        for optimizer, rate in ((muon, 2e-2), (adamw, 1e-2)):
            for group in optimizer.param_groups:
                group["lr"] = rate * (4 - step) / 4
            optimizer.step()
    # transformers rounds logits to float32
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (found - expected).abs().max() <= 1e-5, name


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_grown_then_trained_is_trained_then_grown(family, tmp_path, in_float64):
    """Through the trainer, with clipping: the same function as growth after the same steps."""
    both = trained_both_ways(family, tmp_path, optimizer="muon")
    kinds = [[type(part) for part in optimizer_of(one).optimizers] for one in both]
    assert kinds == [[GrowthAdamW, GrowthMuon], [torch.optim.AdamW, Muon]]


class Counting(TrainerCallback):
    """The FLOPs of every step of an optimizer, by PyTorch's counter."""

    def __init__(self):
        self.flops = []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.mode = FlopCounterMode(display=False)
        self.mode.__enter__()

    def on_optimizer_step(self, *args, **kwargs):
        self.mode.__exit__(None, None, None)
        self.flops.append(self.mode.get_total_flops())


@pytest.mark.parametrize(
    "family, options",
    [
        # in the first steps the lower layer of two has no gradient
        ("mixtral", {"two_stage": growkern.TwoStageConfig(layers_per_block=1, stage1_steps=2)}),
        ("llama", {"growth": [growkern.GrowthStep(at_step=2, sizes=TWICE["llama"])]}),
    ],
)
def test_its_own_products_are_in_the_log(family, options, tmp_path):
    counting, totals = Counting(), []
    for optimizer in ("muon", "adamw"):
        trainer = TwoStageTrainer(
            build(family, layers=2),
            arguments(tmp_path / optimizer, max_steps=4, save_strategy="steps"),
            train_dataset=Batches(8),
            callbacks=[counting] if optimizer == "muon" else [],
            optimizer=optimizer,
            **options,
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        totals.append([line["flops"] for line in lines])
    own = [x - y for x, y in zip(*totals, strict=True)]
    assert [x - y for x, y in zip(own, [0, *own], strict=False)] == counting.flops
    assert 0 < counting.flops[0] < counting.flops[-1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    # set here too: the fixture that makes the tests deterministic lives for one test
    torch.use_deterministic_algorithms(True, warn_only=True)
    watcher = Watcher()
    path = tmp_path_factory.mktemp("straight")
    trainer = trainer_in(path, watcher=watcher, optimizer="muon")
    trainer.train()
    return SimpleNamespace(trainer=trainer, seen=watcher.seen, path=path)


@pytest.mark.parametrize("stop", [3, 2, 4] if walks.times > 1 else [3])
def test_resumed_equals_straight_bit_for_bit(straight, stop, tmp_path):
    """Before, at and after a growth; the new trainer begins with the small model."""
    shutil.copytree(straight.path, tmp_path / "run")
    for later in range(stop + 1, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{later}", ignore_errors=True)
    again = trainer_in(tmp_path / "run", optimizer="muon")
    again.train(resume_from_checkpoint=True)
    assert_same(weights_of(straight.trainer), weights_of(again))
    assert log_of(again) == log_of(straight.trainer)


def test_both_states_grow_in_a_run(straight):
    """The state after a growth is that of `grow_optimizer`, from the checkpoint before it."""
    for one in GROWTH:
        checkpoint = straight.path / f"checkpoint-{one.at_step}"
        small = type(straight.trainer.model).from_pretrained(checkpoint)
        large = growkern.grow(small, **vars(one.how), **one.sizes)
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        expected = growkern.grow_optimizer(state, large.growth_plan)
        names = [name for group in expected["param_groups"] for name in group["param_names"]]
        found = straight.seen[one.at_step]["state"]
        assert sorted(names) == sorted(found)
        matrices, _ = split(large)
        for key, name in enumerate(names):
            entry = expected["state"][key]
            assert ("momentum_buffer" in entry) == (name in matrices)
            for moment, value in entry.items():
                assert torch.equal(value, found[name][moment]), (name, moment)


def test_a_state_of_another_optimizer_is_refused(straight):
    optimizer = optimizer_of(straight.trainer)
    assert isinstance(optimizer, CombinedOptimizer)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    with pytest.raises(GrowthError, match="has 2 parameter groups, but GrowthAdamW and GrowthMuon"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:2]})
    turned = [*state["param_groups"][-1:], *state["param_groups"][:-1]]
    with pytest.raises((GrowthError, ValueError), match="group"):
        optimizer.load_state_dict({**state, "param_groups": turned})
    with pytest.raises(GrowthError, match="before they are combined"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "mun"}, "did you mean 'muon'"),
        ({"optimizer": "growth_adamw"}, "growth-adamw"),
        ({"optimizer": "growth-adamw", "optim": "adafactor"}, "args.optim is 'adafactor'"),
        ({"optimizer": "growth-adamw"}, "was not grown"),
        ({"optimizer": "muon", "optim": "sgd"}, "'muon', but args.optim is 'sgd'"),
        ({"own": {"momentum": 0.9}}, "momentum is an option of Muon, but .* is 'auto'"),
        (
            {"optimizer": "muon", "own": {"rewarm_steps": 2}},
            "rewarm_steps is an option of GrowthAdamW, but training.optimizer is 'muon'",
        ),
        ({"own": {"rewarm_steps": 2}}, "rewarm_steps is for a model that was grown"),
    ],
    ids=str,
)
def test_contradictions_are_refused(options, message, tmp_path):
    own = OptimizerOptions(**options.get("own", {}))
    options = {name: value for name, value in options.items() if name != "own"}
    with pytest.raises(GrowthError, match=message):
        trained(build("bert", layers=2), tmp_path, optimizer_options=own, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rewarm_steps": -1}, "rewarm_steps is -1: it must be 0 or more"),
        ({"rewarm_peak": float("nan")}, "rewarm_peak is nan: it must be positive"),
        ({"muon_lr": -1.0}, "muon_lr is -1.0: it must be 0 or more"),
        ({"momentum": 1.0}, "momentum is 1.0: it must lie in .0, 1."),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"adjust_lr_fn": "orginal"}, "did you mean 'original'"),
    ],
    ids=str,
)
def test_values_are_checked(values, message):
    with pytest.raises(GrowthError, match=message):
        OptimizerOptions(**values)


def test_a_sharded_checkpoint_keeps_the_momentum(tmp_path):
    """Also in a new optimizer, which has no state until its first step."""
    model = build("llama", layers=1)
    named = dict(model.named_parameters())
    matrices = [x for x in named.items() if "proj" in x[0]]
    rest = [x for x in named.items() if "proj" not in x[0]]

    def made():
        return CombinedOptimizer(torch.optim.AdamW(rest), torch.optim.Muon(matrices))

    first, second = made(), made()
    for p in named.values():
        p.grad = torch.ones_like(p)
    first.step()
    shards.write_parts(shards.optimizer_parts(model, first), tmp_path)
    shards.save_groups(first, tmp_path)
    shards.load_optimizer(model, second, tmp_path)
    assert len(first.state) == len(named)
    for p, entry in first.state.items():
        assert second.state[p].keys() == entry.keys()
        assert all(torch.equal(second.state[p][key], entry[key]) for key in entry)
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
