"""The plan of a grown model that was loaded from disk: the same factors, without the source."""

import pytest
import torch
import transformers

import growkern
from growkern.growth.optimizer.moments import growth_lr_multipliers
from growkern.growth.record.lineage import growth_plan_of
from testbed.families import FAMILIES
from testbed.models import LLAMA, random_model
from tests.growth.plan.test_matrix import ANY_WIDTH, deeper, width


def saved(directory, class_name, sizes, **how):
    """A grown checkpoint loaded without its source, and the plan by which it was grown."""
    source = random_model(class_name, sizes, dtype=torch.float32)
    source.save_pretrained(directory / "small")
    report = growkern.grow_checkpoint(
        directory / "small", directory / "large", progress=False, **how
    )
    (directory / "small").rename(directory / "gone")
    loaded = getattr(transformers, class_name).from_pretrained(directory / "large")
    return loaded, report.plan


def same(one, other):
    for name in ("lr", "eps", "old", "centre"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_factors_of_its_growth(tmp_path, family):
    kind = "uneven" if family in ANY_WIDTH else "even"
    sizes = {**width(family, kind), **deeper(family)}
    loaded, plan = saved(tmp_path, *FAMILIES[family], **sizes)
    found = growth_lr_multipliers(growth_plan_of(loaded))
    expected = growth_lr_multipliers(plan)
    assert found.keys() == expected.keys()
    for name, factors in expected.items():
        same(found[name], factors)


@pytest.mark.parametrize(
    "how",
    [
        {"symmetry": "split", "seed": 5},
        {"method": "aki", "maps": "balanced", "num_hidden_layers": 4},
        {"scheme": "paper", "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_every_option_counts(tmp_path, how):
    loaded, plan = saved(tmp_path, "LlamaForCausalLM", LLAMA, hidden_size=24, **how)
    found = growth_lr_multipliers(growth_plan_of(loaded))
    for name, factors in growth_lr_multipliers(plan).items():
        same(found[name], factors)
