"""Random weights: those an untrained model of the class has, whichever part is drawn."""

import pytest
import torch
import transformers

import growkern
from growkern.growth.plan.tensors import random_tensors
from growkern.growth.plan.tensors.tensor import build_tensor, kind_of
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.growth.plan.test_families import CASES


def grown_plan(class_name, sizes, method="random", seed=0, **growth):
    source = random_model(class_name, sizes, dtype=torch.float32)
    return growkern.plan(source, method=method, seed=seed, **growth)


@pytest.mark.parametrize("class_name, sizes, config, growth", CASES)
def test_every_tensor_is_that_of_an_untrained_model(class_name, sizes, config, growth):
    """Truth: the class itself, initialised by transformers."""
    source = random_model(class_name, sizes, dtype=torch.float32, **config)
    plan = growkern.plan(source, method="random", **growth)
    target = plan.target_config
    torch.manual_seed(3)
    models = [getattr(transformers, class_name)(target) for _ in range(8)]
    states = [model.state_dict() for model in models]
    for task in plan.tasks:
        built = build_tensor(plan, task)
        truth = torch.stack([state[task.name] for state in states])
        initial = plan.initial_tensors[task.name]
        assert built.shape == truth.shape[1:]
        if not initial.deviation:
            assert torch.equal(built, truth[0]), task.name
            continue
        # deviations of n normal numbers scatter by 1 / sqrt(2 n)
        found, expected, n = built.std(), truth.std(), built.numel()
        assert abs(found / expected - 1) < 5 * (2 * n) ** -0.5, task.name
        assert abs(built.mean()) < 5 * expected * n**-0.5, task.name
        still = ~truth.reshape(*truth.shape[:2], -1).any(0).any(-1)
        assert torch.equal(~built.reshape(len(built), -1).any(-1), still), task.name


def test_a_cut_off_normal_stays_within():
    config = transformers.ModernBertConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=3000,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
        initializer_cutoff_factor=1.5,
    )
    source = transformers.ModernBertForMaskedLM(config)
    plan = growkern.plan(source, method="random", hidden_size=128)
    task = next(t for t in plan.tasks if "tok_embeddings" in t.name)
    drawn = build_tensor(plan, task)
    assert 1.49 < drawn.abs().max() / config.initializer_range <= 1.5
    # of a normal cut off at 1.5: sqrt(1 - 2 * 1.5 * pdf(1.5) / (2 cdf(1.5) - 1))
    assert abs(drawn.std() / config.initializer_range - 0.7426) < 0.005


def test_moments_of_a_million_numbers():
    plan = grown_plan("GPT2LMHeadModel", {**GPT2, "vocab_size": 5000}, n_embd=204)
    task = plan.tasks[0]
    z = build_tensor(plan, task).double() / 0.02
    n = z.numel()
    assert n > 1_000_000
    # the sampling errors of mean, variance, skewness and kurtosis; 5 of each
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 5 * (variance / n) ** 0.5, power
    for moved in (z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[64:] * z[:-64]):
        assert abs(moved.mean()) < 5 * n**-0.5
    assert len(z.unique()) > 0.9 * n


def test_seeds_tensors_and_tiles_differ():
    plans = [grown_plan("LlamaForCausalLM", LLAMA, seed=s, hidden_size=1044) for s in (0, 0, 1)]
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
    tasks = [[next(t for t in plan.tasks if t.name == n) for n in names] for plan in plans]
    drawn = [[build_tensor(p, t) for t in of] for p, of in zip(plans, tasks, strict=True)]
    (first, second), again, (other, _) = drawn
    assert torch.equal(first, again[0])
    rows, columns = random_tensors.TILE
    unrelated = [(first, second), (first, other)]
    unrelated += [(first[:rows], first[rows : 2 * rows])]
    unrelated += [(first[:, :columns], first[:, columns : 2 * columns])]
    for a, b in unrelated:
        correlation = (a * b).mean() / (a.std() * b.std())
        assert abs(correlation) < 5 * a.numel() ** -0.5


@pytest.mark.parametrize("method", ["random", "direct_copy"])
@pytest.mark.parametrize(
    "class_name, sizes", [("BertForMaskedLM", BERT), ("GPT2LMHeadModel", GPT2)]
)
def test_any_block_has_the_bits_of_the_whole(class_name, sizes, method, monkeypatch):
    monkeypatch.setattr(random_tensors, "TILE", (5, 7))
    width = {"n_embd": 20} if class_name.startswith("GPT2") else {"hidden_size": 20}
    plan = grown_plan(class_name, sizes, method, **width)
    rng = torch.Generator().manual_seed(0)
    for task in plan.tasks:
        whole = build_tensor(plan, task)
        for _ in range(10):
            cuts = [sorted(torch.randint(n + 1, (2,), generator=rng).tolist()) for n in task.shape]
            part = tuple(slice(*cut) for cut in cuts)
            assert torch.equal(build_tensor(plan, task, part=part), whole[part]), task.name


def test_a_part_draws_only_its_own(monkeypatch):
    """In place of memory and time: how many numbers are asked for, and which rows are read."""
    plan = grown_plan("GPT2LMHeadModel", GPT2, "direct_copy", n_embd=1024, vocab_size=6400)
    drawn = []
    draw = random_tensors._drawn

    def counting(key, tile, cutoff):
        drawn.append(len(tile[0][1]) * len(tile[1][1]))
        return draw(key, tile, cutoff)

    monkeypatch.setattr(random_tensors, "_drawn", counting)
    task = plan.tasks[0]
    build_tensor(plan, task, part=(slice(640, 704), slice(0, 512)))
    assert sum(drawn) == 64 * 512
    needs = kind_of(plan, task).needs
    assert [len(i) for i in needs((slice(40, 60), slice(8, 30)))] == [10, 4]
    assert [len(i) for i in needs((slice(640, 704), slice(0, 512)))] == [0, 12]


def test_an_unknown_initialisation_is_refused(monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2

    original = modeling_gpt2.GPT2PreTrainedModel._init_weights

    def other(self, module):
        if isinstance(module, modeling_gpt2.GPT2MLP):
            torch.nn.init.xavier_uniform_(module.c_fc.weight)
        else:
            original(self, module)

    monkeypatch.setattr(modeling_gpt2.GPT2PreTrainedModel, "_init_weights", other)
    plan = grown_plan("GPT2LMHeadModel", GPT2, n_embd=24)
    with pytest.raises(growkern.GrowthError, match=r"GPT2LMHeadModel initialises it is not known"):
        plan.initial_tensors  # noqa: B018
