"""A model that was grown trains with GrowthAdamW, whatever way it comes to the trainer."""

import copy
import warnings

import pytest
import torch
import transformers

import growkern
from growkern import GrowthAdamW, GrowthError, OptimizerOptions, TwoStageTrainer
from growkern.errors import GrowthWarning
from testbed.tiny import Batches, arguments, build
from tests.train.run.test_run import save_tokenizer

TWICE = {
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_head": 4},
    "llama": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        "intermediate_size": 48,
    },
}

# RMSNorm rounds to float32 in transformers, whatever the dtype of the model
ERRORS = {"bert": 1e-12, "gpt2": 1e-12, "llama": 1e-7}


def grown(family="llama", **how):
    source = build(family, layers=2).double()
    return source, growkern.grow(source, **{**TWICE[family], **how})


def trained(model, path, **options):
    names = ("optimizer", "optimizers", "optimizer_options")
    own = {name: options.pop(name) for name in names if name in options}
    settings = {"max_steps": 4, "weight_decay": 0.1, **options}
    trainer = TwoStageTrainer(model, arguments(path, **settings), train_dataset=Batches(14), **own)
    trainer.train()
    return trainer


def optimizer_of(trainer):
    return trainer.optimizer.optimizer


def trained_both_ways(family, path, **options):
    """The trainers of a grown model and of its source, after growth and the same steps commuted."""
    source, large = grown(family, symmetry="none", stream="copies")
    settings = {"max_grad_norm": 0.5, "adam_epsilon": 1e-3, **options}
    trainer, small = (trained(model, path, **settings) for model in (large, source))
    again = growkern.grow(source, symmetry="none", stream="copies", **TWICE[family])
    for (name, found), expected in zip(large.named_parameters(), again.parameters(), strict=True):
        assert (found - expected).abs().max() <= ERRORS[family], name
    norms = [
        [line["grad_norm"] for line in one.state.log_history if "grad_norm" in line]
        for one in (trainer, small)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=100 * ERRORS[family])
    assert max(norms[0]) > 0.5
    return trainer, small


@pytest.mark.parametrize("family", TWICE)
def test_grown_then_trained_is_trained_then_grown(family, tmp_path):
    """By default, with clipping: the same function as growth after the same steps."""
    trainer, small = trained_both_ways(family, tmp_path)
    assert isinstance(optimizer_of(trainer), GrowthAdamW)
    assert type(optimizer_of(small)) is torch.optim.AdamW


def test_a_grown_model_from_disk_trains_alike(tmp_path):
    source, _ = grown(symmetry="routing")
    source.float().save_pretrained(tmp_path / "small")
    growkern.grow_checkpoint(
        tmp_path / "small", tmp_path / "large", progress=False, symmetry="routing", **TWICE["llama"]
    )
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "large")
    in_memory = growkern.grow(source, symmetry="routing", **TWICE["llama"])
    trainers = [trained(model, tmp_path) for model in (loaded, in_memory)]
    assert all(isinstance(optimizer_of(one), GrowthAdamW) for one in trainers)
    for found, expected in zip(loaded.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_what_the_user_asks_for_is_used(tmp_path):
    _, large = grown()
    start = copy.deepcopy(large.state_dict())
    own = torch.optim.SGD(large.parameters(), lr=0.1)
    assert optimizer_of(trained(large, tmp_path, optimizers=(own, None))) is own
    large.load_state_dict(start)
    assert type(optimizer_of(trained(large, tmp_path, optimizer="adamw"))) is torch.optim.AdamW
    adafactor = trained(large, tmp_path, optim="adafactor")
    assert "Adafactor" in type(optimizer_of(adafactor)).__name__
    _, random = grown(method="random")
    assert type(optimizer_of(trained(random, tmp_path))) is torch.optim.AdamW


def test_a_subclass_names_the_optimizer(tmp_path):
    class Plain(TwoStageTrainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            return torch.optim.SGD, {"lr": args.learning_rate}

    _, large = grown()
    args = arguments(tmp_path)
    trainer = Plain(large, args, train_dataset=Batches(4))
    assert type(trainer.create_optimizer()) is torch.optim.SGD
    asked = Plain(large, args, train_dataset=Batches(4), optimizer="growth-adamw")
    assert type(asked.create_optimizer()) is GrowthAdamW


@pytest.mark.parametrize("choice", ["adamw", "auto", "muon"])
def test_a_subclass_says_what_decays(choice, tmp_path):
    class OneDecays(TwoStageTrainer):
        def get_decay_parameter_names(self, model):
            return super().get_decay_parameter_names(model)[:1]

    _, large = grown()
    args = arguments(tmp_path, weight_decay=0.1)
    trainer = OneDecays(large, args, train_dataset=Batches(4), optimizer=choice)
    groups = trainer.create_optimizer().param_groups
    assert sum(len(group["params"]) for group in groups if group["weight_decay"]) == 1


@pytest.mark.parametrize("text", ['{"options": {}}', "cut", None, "whole"])
def test_a_lost_lineage_is_said_in_every_training(text, tmp_path):
    """Training of the grown model, and a run that grows it again."""
    source, _ = grown()
    source.float().save_pretrained(tmp_path / "small")
    growkern.grow_checkpoint(
        tmp_path / "small", tmp_path / "large", progress=False, **TWICE["llama"]
    )
    file = tmp_path / "large" / "lineage.json"
    whole = file.read_text()
    file.unlink()
    if text is not None:
        file.write_text({"cut": whole[:3000], "whole": whole}.get(text, text))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "large")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trained(loaded, tmp_path / "plain")
    lines = [str(one.message) for one in caught if issubclass(one.category, GrowthWarning)]
    said = [line for line in lines if "trains with AdamW, because" in line and str(file) in line]
    assert len(said) == (text != "whole")
    # the caller's line
    assert text == "whole" or trained.__code__.co_filename in {one.filename for one in caught}
    assert isinstance(optimizer_of(trainer), GrowthAdamW) == (text == "whole")
    (tmp_path / "c.txt").write_text("w1 w2 w3 w4 w5 w6\n" * 50)
    save_tokenizer(tmp_path / "large")
    (tmp_path / "run.toml").write_text(
        f"[growth]\nsource = '{tmp_path / 'large'}'\nnum_hidden_layers = 3\n"
        f"[data]\ntrain = ['{tmp_path / 'c.txt'}']\nsequence_length = 8\n"
        "[training]\nsteps = 1\nbatch_size = 2\nlearning_rate = 1e-3\n"
        f"[output]\ndirectory = '{tmp_path / 'out'}'\n"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        growkern.run(tmp_path / "run.toml", progress=False)
    lines = [str(one.message) for one in caught if "how is not known" in str(one.message)]
    assert len(lines) == (text != "whole")
    assert all(str(file) in line for line in lines)


def test_a_model_that_was_changed_since_trains_with_adamw(tmp_path):
    _, large = grown()
    large.resize_token_embeddings(60)
    with pytest.warns(GrowthWarning, match="embed_tokens.weight is not as growth made it"):
        trainer = trained(large, tmp_path)
    assert type(optimizer_of(trainer)) is torch.optim.AdamW
    with pytest.raises(GrowthError, match="is not as growth made it"):
        trained(large, tmp_path, optimizer="growth-adamw")


def test_new_entries_are_warmed_up_as_by_hand(tmp_path):
    """The options of the trainer are those of `GrowthAdamW`."""
    _, large = grown()
    start = copy.deepcopy(large.state_dict())
    own = {"rewarm_steps": 3, "rewarm_peak": 2.0}
    found = {}
    for name, options in {
        "by name": {"optimizer_options": OptimizerOptions(**own)},
        "by hand": {
            "optimizers": (
                GrowthAdamW(growkern.decay_groups(large, 0.1), large.growth_plan, lr=1e-2, **own),
                None,
            )
        },
        "neither": {},
    }.items():
        large.load_state_dict(start)
        trained(large, tmp_path, **options)
        found[name] = copy.deepcopy(large.state_dict())
    changed = 0
    for name, expected in found["by hand"].items():
        assert torch.equal(found["by name"][name], expected), name
        changed += not torch.equal(found["neither"][name], expected)
    assert changed > 10
