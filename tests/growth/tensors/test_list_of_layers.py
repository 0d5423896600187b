"""`depth` as a list: each layer is the one that the list names, in every place that reads it."""

import json

import pytest
import torch

import growkern
from growkern import GrowthStep
from growkern.growth.optimizer.moments import growth_lr_multipliers
from testbed import warm
from testbed.models import BERT, GPT2, LLAMA, random_model
from testbed.relatives import RELATIVES

FOUR = {
    "LlamaForCausalLM": (LLAMA, "num_hidden_layers", "model.layers."),
    "GPT2LMHeadModel": (GPT2, "n_layer", "transformer.h."),
    "BertForMaskedLM": (BERT, "num_hidden_layers", "bert.encoder.layer."),
}


def source_of(class_name):
    sizes, field, prefix = FOUR[class_name]
    return random_model(class_name, {**sizes, field: 4}), field, prefix


@pytest.mark.parametrize("class_name", FOUR)
@pytest.mark.parametrize("listed", [[0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 3], [3, 2, 1, 0, 0]], ids=str)
def test_every_layer_is_the_one_that_the_list_names(class_name, listed):
    source, field, prefix = source_of(class_name)
    large = growkern.grow(source, depth=listed)
    assert getattr(large.config, field) == len(listed) and not large.growth_plan.exact
    old, new = source.state_dict(), large.state_dict()
    for i, layer in enumerate(listed):
        names = [name for name in old if name.startswith(f"{prefix}{layer}.")]
        assert names
        for name in names:
            assert torch.equal(
                new[name.replace(f"{prefix}{layer}.", f"{prefix}{i}.", 1)], old[name]
            )
    # in a wider model too, and every parameter has its step
    wide = {"n_embd": 24} if class_name.startswith("GPT2") else {"hidden_size": 24}
    wider = growkern.grow(source, depth=tuple(listed), **wide)
    assert wider.growth_plan.layer_maps == {"": tuple(listed)}
    assert len(growth_lr_multipliers(wider.growth_plan)) == len(wider.growth_plan.tasks)


def test_words_are_names_of_lists():
    source, field, _ = source_of("LlamaForCausalLM")
    for word, listed in (("stack", [*range(4)] * 2), ("interleave", [0, 0, 1, 1, 2, 2, 3, 3])):
        both = growkern.grow(source, depth=word, **{field: 8}), growkern.grow(source, depth=listed)
        for x, y in zip(*(model.state_dict().values() for model in both), strict=True):
            assert torch.equal(x, y)


def test_two_stacks_follow_one_list():
    source = random_model(*RELATIVES["mt5"][:2])
    listed = [*range(source.config.num_layers), 0]
    fields = dict.fromkeys(("num_layers", "num_decoder_layers"), len(listed))
    maps = growkern.plan(source, depth=listed, **fields).layer_maps
    assert set(maps.values()) == {tuple(listed)}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"depth": [0, 1, 2, 3, 4]}, "layer 4.* 0 to 3"),
        ({"depth": [0, 1, 1, 2, 2]}, "layer 3, which would be lost"),
        ({"depth": [0, 1, 2, 3, 3], "num_hidden_layers": 6}, "5 layers.* 6"),
        ({"depth": [1, 0, 2, 3], "hidden_size": 24}, "another order"),
        ({"depth": [0, 1, 2, 3, 1.5]}, "depth=1.5"),
        ({"depth": "0,1,,2"}, "depth is '0,1,,2'"),
        ({"depth": []}, "num_hidden_layers=0"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_are_refused(given, said):
    source, _, _ = source_of("LlamaForCausalLM")
    with pytest.raises(growkern.GrowthError, match=said):
        growkern.plan(source, **given)


def test_record_verify_and_command_know_the_list(tmp_path):
    source, _, _ = source_of("LlamaForCausalLM")
    small, large = tmp_path / "small", tmp_path / "large"
    source.float().save_pretrained(small)
    done = warm.run("growkern", "grow", small, large, "--depth", "0,1,2,1,2,3")
    assert done.returncode == 0, done.stderr
    listed = [0, 1, 2, 1, 2, 3]
    assert json.loads((large / "lineage.json").read_text())["options"]["depth"] == listed
    assert growkern.growth_plan_of(large).layer_maps == {"": tuple(listed)}
    assert growkern.verify(small, large).ok
    # of a run file, where it is a list
    step = GrowthStep(at_step=2, sizes={"num_hidden_layers": 6}, depth=listed)
    assert step.how.depth == tuple(listed)
