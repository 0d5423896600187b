"""A kind of tensor is one class: what builds, records and trains a tensor asks nothing else."""

import torch

import growkern
from growkern.growth.plan.tensors import tensor
from growkern.growth.plan.tensors.gather import Gather
from growkern.growth.record.lineage import origin_of
from testbed.models import LLAMA, random_model

NAME = "model.layers.0.mlp.up_proj.weight"


class Sevens(Gather):
    holds, is_new = "", True

    def build(self, read, part, out, work):
        out.fill_(7.0)


def test_a_new_kind_is_one_class(monkeypatch):
    usual = tensor._usual

    def kind_of(plan, task):
        return Sevens(plan, task) if task.name == NAME else usual(plan, task)

    monkeypatch.setattr(tensor, "_usual", kind_of)
    source = random_model("LlamaForCausalLM", LLAMA)
    grown = growkern.grow(source, hidden_size=24)
    plan, tensors = grown.growth_plan, grown.state_dict()
    assert bool((tensors[NAME] == 7).all())
    tasks = {task.name: task for task in plan.tasks}
    assert [name for name, t in tasks.items() if "holds" in origin_of(plan, t)] == [NAME]
    optimizer = torch.optim.AdamW(source.named_parameters())
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = growkern.grow_optimizer(optimizer.state_dict(), plan)
    (group,) = state["param_groups"]
    steps = [state["state"][key]["step"] for key in group["params"]]
    names = zip(group["param_names"], steps, strict=True)
    assert [name for name, step in names if not step] == [NAME]
