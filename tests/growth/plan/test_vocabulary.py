"""What new tokens cost where copies of hidden states differ, or where logits are capped."""

import pytest
import torch

import growkern
from testbed.families import FAMILIES
from testbed.models import LLAMA, random_model

TOKENS = "new tokens (nats)"


def finding(plan):
    (found,) = (f for f in plan.findings if f.what.startswith("vocab_size"))
    return found


@pytest.mark.parametrize(
    "how", [{"method": "aki", "aki": "eq16"}, {"routing": 3.0}], ids=["eq16", "routing"]
)
def test_copies_that_differ_bound_no_logit(how):
    """The mean of the old rows gives the mean of the old logits only where copies are equal."""
    source = random_model("LlamaForCausalLM", LLAMA, num_hidden_layers=28, std=1.0)
    with torch.no_grad():
        source.lm_head.weight += 3 * torch.randn(12, generator=torch.Generator().manual_seed(0))
    grown = growkern.grow(source, hidden_size=24, stream="copies", vocab_size=100, **how)
    said = finding(grown.growth_plan)
    assert said.level == "changed" and said.asked
    report = growkern.verify(source, grown)
    # log(2) is the bound for equal copies
    assert report.outputs[TOKENS] > 1 and report.ok and report.level == "changed"


def capped(std):
    class_name, sizes = FAMILIES["gemma2"]
    config = {"final_logit_softcapping": 30.0, "tie_word_embeddings": False}
    return random_model(class_name, sizes, std=std, **config)


def test_logits_near_the_soft_cap_bound_no_cost():
    source = capped(1.0)
    with torch.no_grad():
        # then the mean of the old logits is near the cap too
        source.lm_head.weight[:5] += 100
    grown = growkern.grow(source, vocab_size=100)
    report = growkern.verify(source, grown)
    # log(2) is the bound without a cap
    assert not report.ok and report.outputs[TOKENS] > 1
    source = random_model(*FAMILIES["gemma2"], final_logit_softcapping=1.0)
    said = finding(growkern.plan(source, vocab_size=100))
    assert said.level == "changed" and not said.asked


def test_a_soft_cap_bounds_the_cost_of_smaller_logits():
    source = capped(0.3)
    assert finding(growkern.plan(source, vocab_size=100)).level == "approximate"
    assert growkern.verify(source, growkern.grow(source, vocab_size=100)).ok
    # the logits of a model that is changed on purpose are not the source's
    said = finding(growkern.plan(source, vocab_size=100, method="aki", intermediate_size=40))
    assert said.level == "changed" and said.asked
