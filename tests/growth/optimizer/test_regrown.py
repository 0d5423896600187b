"""Growing again and again: the factors of all growths count, so the steps are the first model's."""

import copy
import json
import shutil
import warnings

import pytest
import torch
import transformers

import growkern
from growkern.growth.optimizer.moments import growth_lr_multipliers
from growkern.growth.record.lineage import growth_plan_of
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model
from tests.growth.optimizer import test_muon
from tests.growth.optimizer.test_growth_adamw import GEMMA, OPTIONS, UNEVEN, groups
from tests.growth.optimizer.test_optimizer import COPIED, TIED, UNTIED, train

EVEN = {"symmetry": "none", **COPIED}
WIDE = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4}
WIDER = {"hidden_size": 48, "num_attention_heads": 24, "num_key_value_heads": 8}
WIDEST = {"hidden_size": 96, "num_attention_heads": 48, "num_key_value_heads": 16}
ODD = {"hidden_size": 28, "num_attention_heads": 14, "num_key_value_heads": 14, **COPIED}
UNITS = {"intermediate_size": 240}
BERTS = [{"hidden_size": 24, "num_attention_heads": 6}, {"hidden_size": 72, **UNITS}]
CHAINS = [
    ("GPT2LMHeadModel", GPT2, TIED, [{"n_embd": 24}, {"n_embd": 48}]),
    ("GPT2LMHeadModel", GPT2, UNTIED, [{"n_embd": 24}, {"n_inner": 144}, {"n_embd": 72}]),
    ("BertForMaskedLM", BERT, {}, BERTS),
    ("LlamaForCausalLM", LLAMA, TIED, [WIDE, WIDER, {**WIDEST, **UNITS}]),
    ("Gemma2ForCausalLM", GEMMA, {"query_pre_attn_scalar": 4}, [WIDE, {**WIDER, **UNITS}]),
    # copies that differ in number
    ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 6}, TIED, [UNEVEN, ODD]),
]


def same_factors(one, other):
    assert one.keys() == other.keys()
    for name, factors in one.items():
        for field in ("lr", "eps", "centre"):
            pairs = zip(getattr(factors, field), getattr(other[name], field), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs), name
        assert factors.muon == pytest.approx(other[name].muon, rel=1e-12)


def relative(one, other):
    a, b = outputs(one)["logits"], outputs(other)["logits"]
    return ((a - b).abs().max() / b.abs().max()).item()


def everywhere(model):
    """With weight decay on all parameters, so that the norms of Gemma are pulled too."""
    return [{"params": list(model.named_parameters()), "weight_decay": 0.1}]


def grown(model, optimizer, sizes, **how):
    """The grown model and its optimizer, with the grown state."""
    large = growkern.grow(model, **{**EVEN, **how, **sizes})
    new = growkern.GrowthAdamW(everywhere(large), large.growth_plan, **OPTIONS)
    new.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), large.growth_plan))
    return large, new


@pytest.mark.parametrize("case", CHAINS, ids=lambda case: f"{case[0]}-{case[3]}")
def test_after_every_growth_the_steps_are_those_of_the_first_model(case):
    """Side by side in float64: the model that never grew, and one that grows every ten steps."""
    class_name, sizes, config, chain = case
    small = random_model(class_name, sizes, std=0.2, **config)
    optimizer = torch.optim.AdamW(everywhere(small), **OPTIONS)
    train(small, optimizer, range(10))
    large, new = small, optimizer
    for number, wider in enumerate(chain, start=1):
        start = 20 * number
        large, new = grown(large, new, wider)
        assert relative(large, small) <= 1e-12
        before = outputs(small)["logits"]
        train(small, optimizer, range(start, start + 10))
        train(large, new, range(start, start + 10))
        assert (outputs(small)["logits"] - before).abs().max() > 0.1
        assert relative(large, small) <= 1e-12
        assert growkern.moment_findings(large.growth_plan)[0].level == "exact"


@pytest.mark.parametrize("depth", ["identity", "stack"])
def test_width_and_depth_in_any_order(depth):
    """Wider, deeper, wider again; and deeper alone, with plain AdamW."""
    small = random_model("LlamaForCausalLM", LLAMA, std=0.2)
    deeper = {"num_hidden_layers": 4, "depth": depth}
    deep = growkern.grow(small, **EVEN, **deeper)
    large = growkern.grow(small, **{**EVEN, **WIDE})
    for sizes in (deeper, WIDER):
        large = growkern.grow(large, **{**EVEN, **sizes})
    assert relative(large, deep) <= 1e-12
    train(deep, torch.optim.AdamW(groups(deep), **OPTIONS), range(20))
    train(large, growkern.GrowthAdamW(groups(large), large.growth_plan, **OPTIONS), range(20))
    assert relative(large, deep) <= 1e-12
    assert relative(large, small) > 0.1


@pytest.mark.parametrize("rule", test_muon.RULES[1:])
def test_muon_takes_the_steps_of_the_first_model(rule, monkeypatch):
    # the polynomial of Muon in float64: by itself it rounds to bfloat16
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    monkeypatch.setattr(test_muon, "MAX_NORM", 0.1)
    small = random_model("LlamaForCausalLM", LLAMA, std=0.2, **TIED)
    optimizers = test_muon.both(small, rule)
    test_muon.train(small, optimizers, range(3), test_muon.clip_source)
    large, theirs = small, optimizers
    for number, sizes in enumerate([WIDE, WIDER, UNITS], start=1):
        large = growkern.grow(large, **{**EVEN, **sizes})
        theirs = test_muon.both_grown(large, rule, [x.state_dict() for x in theirs])
        steps = range(20 * number, 20 * number + 20)
        test_muon.train(small, optimizers, steps, test_muon.clip_source)
        # clipped by the norm of the first model, too
        test_muon.train(large, theirs, steps, test_muon.clip_target)
        assert relative(large, small) <= 1e-12


# ------------------------------------------------------------------------ disk


@pytest.fixture(scope="module")
def grown_twice(tmp_path_factory):
    """A model that was grown twice, in memory and from disk to disk, and the directory."""
    place = tmp_path_factory.mktemp("chain")
    small = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    small.save_pretrained(place / "small")
    middle = growkern.grow(small, **EVEN, **WIDE)
    large = growkern.grow(middle, **EVEN, **WIDER)
    for source, target, sizes in (("small", "middle", WIDE), ("middle", "large", WIDER)):
        growkern.grow_checkpoint(place / source, place / target, **EVEN, **sizes, progress=False)
    return large, place


@pytest.fixture
def chain(grown_twice, tmp_path):
    """It, to be changed."""
    large, place = grown_twice
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return copy.deepcopy(large)


def loaded(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def test_the_factors_come_from_disk_too(chain, tmp_path):
    expected = growth_lr_multipliers(chain.growth_plan)
    chain.save_pretrained(tmp_path / "saved")
    for name in ("large", "saved"):
        same_factors(growth_lr_multipliers(growth_plan_of(loaded(tmp_path / name))), expected)
    # the sources are not needed
    (tmp_path / "small").rename(tmp_path / "gone")
    (tmp_path / "middle").rename(tmp_path / "gone too")
    same_factors(growth_lr_multipliers(growth_plan_of(loaded(tmp_path / "large"))), expected)


def test_a_third_growth_has_them_from_wherever_it_comes(chain, tmp_path):
    expected = growkern.grow(chain, **EVEN, **WIDEST).growth_plan
    chain.save_pretrained(tmp_path / "saved")
    for source in (tmp_path / "large", tmp_path / "saved", loaded(tmp_path / "large")):
        plan = growkern.plan(source, **EVEN, **WIDEST)
        same_factors(growth_lr_multipliers(plan), growth_lr_multipliers(expected))
        assert growkern.moment_findings(plan)[0].level == "exact"
    config = growkern.plan(tmp_path / "large", **EVEN, **WIDEST).target_config
    target = type(chain)._from_config(config, dtype=torch.float32)
    plan = growkern.grow_into(target, tmp_path / "large", **EVEN).plan
    same_factors(growth_lr_multipliers(plan), growth_lr_multipliers(expected))


def test_a_model_that_was_trained_before_it_was_saved_has_them(chain, tmp_path):
    with torch.no_grad():
        chain.lm_head.weight.mul_(2)
    chain.save_pretrained(tmp_path / "trained")
    plan = growth_plan_of(loaded(tmp_path / "trained"))
    same_factors(growth_lr_multipliers(plan), growth_lr_multipliers(chain.growth_plan))


def lose(directory):
    (directory / "lineage.json").unlink()


def cut(directory):
    file = directory / "lineage.json"
    file.write_text(file.read_text()[:3000])


def keep(directory):
    pass


def edit(**changes):
    def change(directory):
        file = directory / "lineage.json"
        record = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lose, "large/lineage.json is missing: copy it from the grown model"),
        (cut, "not valid JSON"),
        (lambda directory: (directory / "lineage.json").write_text("[]"), "is damaged"),
        (edit(model_class="BertForMaskedLM"), "Bert"),
        (edit(maps={}), "draws other maps"),
        (edit(options={"seed": "3"}), "not a growth record"),
        (edit(earlier_growths=None), "lacks the record of an earlier growth"),
        (edit(earlier_growths=["\x1b[2J"]), "lacks the record of an earlier growth"),
        (edit(earlier_growths=[{}]), "not a growth record"),
    ],
)
def test_a_growth_that_is_not_known_is_said(chain, tmp_path, change, why):
    change(tmp_path / "large")
    plan = growkern.plan(tmp_path / "large", **EVEN, **WIDEST)
    found = growkern.moment_findings(plan)[0]
    assert found.level == "approximate" and why in found.why, found
    assert "how is not known" in found.why and "\x1b" not in found.why
    # the last growth counts alone
    assert growth_lr_multipliers(plan)


def said(make):
    """What is warned of the growths of a source while something is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(one.message) for one in caught if "how is not known" in str(one.message)]


@pytest.mark.parametrize(
    "name, change", [("small", keep), ("large", keep), ("large", cut), ("large", lose)]
)
def test_a_lost_record_is_said_in_the_plan_and_by_the_optimizers(name, change, chain, tmp_path):
    place = tmp_path / name
    change(place)
    sizes = {**EVEN, **WIDEST}
    growkern.grow_checkpoint(place, tmp_path / "new", progress=False, **sizes)
    plans = [
        growkern.plan(place, **sizes),
        growkern.grow(loaded(place), **sizes).growth_plan,
        # what was lost before is known to be lost later
        growth_plan_of(loaded(tmp_path / "new")),
    ]
    for number, plan in enumerate(plans):
        model = loaded(tmp_path / "new")
        makers = [
            lambda model=model, plan=plan: growkern.GrowthAdamW(model.named_parameters(), plan),
            lambda model=model, plan=plan: growkern.GrowthMuon(
                [(n, p) for n, p in model.named_parameters() if p.ndim == 2], plan
            ),
        ]
        for make in makers:
            _, lines = said(make)
            assert len(lines) == (change is not keep)
            where = tmp_path / "new" if number == 2 else place
            assert all(str(where / "lineage.json") in line for line in lines)
            assert all("AdamW" in line for line in lines)
        _, lines = said(
            lambda model=model, plan=plan: growkern.GrowthAdamW(
                model.named_parameters(), plan, matched=False
            )
        )
        assert not lines
        notes = [line for line in plan.portability() if "how is not known" in line]
        assert len(notes) == (change is not keep)
    shown = "how is not known" in " ".join(str(plans[0]).split())
    assert shown == (change is not keep)


def saved_elsewhere(model, place):
    """As a trainer of transformers saves it, which knows nothing of lineages."""
    model.save_pretrained(place / "elsewhere")
    return place / "elsewhere"


MOVED = {
    "on disk": saved_elsewhere,
    "in memory": lambda model, place: loaded(saved_elsewhere(model, place)),
    "twice": lambda model, place: saved_elsewhere(
        loaded(saved_elsewhere(model, place)), place / "x"
    ),
    "weights": lambda model, place: filled_from(model),
    "another directory": lambda model, place: model,
}


def filled_from(model):
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("moved", MOVED)
def test_a_growth_is_not_forgotten_where_its_record_is_not(moved, chain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = loaded("large")
    assert growkern.moment_findings(growkern.plan(model, **EVEN, **WIDEST))[0].level == "exact"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    plan = growkern.plan(MOVED[moved](model, tmp_path), **EVEN, **WIDEST)
    found = growkern.moment_findings(plan)[0]
    assert found.level == "approximate" and "lineage.json is missing" in found.why


def test_a_record_that_is_copied_is_known_again(chain, tmp_path):
    place = saved_elsewhere(loaded(tmp_path / "large"), tmp_path)
    shutil.copy(tmp_path / "large" / "lineage.json", place)
    plan = growkern.plan(place, **EVEN, **WIDEST)
    assert growkern.moment_findings(plan)[0].level == "exact"


@pytest.mark.parametrize("moved", MOVED)
def test_a_model_that_never_grew_is_not_said_to_have(moved, chain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = [loaded("small"), random_model("LlamaForCausalLM", LLAMA)]
    (tmp_path / "small").rename(tmp_path / "gone")
    for number, model in enumerate(models):
        source = MOVED[moved](model, tmp_path / str(number))
        found = growkern.moment_findings(growkern.plan(source, **EVEN, **WIDEST))[0]
        assert found.level == "exact", found.why


@pytest.mark.parametrize("has_lineage", [True, False])
def test_a_model_of_the_hub_has_growths_of_its_snapshot(has_lineage, chain, tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "models--somebody--large"
    (cache / "snapshots").mkdir(parents=True)
    snapshot = (tmp_path / "large").rename(cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = loaded(snapshot)
    model.name_or_path = "somebody/large"
    if not has_lineage:
        lose(snapshot)
    if has_lineage:
        assert growth_plan_of(model) is not None
    else:
        with pytest.raises(growkern.GrowthError, match=r"lineage\.json is missing"):
            growth_plan_of(model)
    found = growkern.moment_findings(growkern.plan(model, **EVEN, **WIDEST))[0]
    assert found.level == ("exact" if has_lineage else "approximate"), found.why


def test_a_model_that_was_changed_since_is_not_what_growth_made(chain):
    chain.resize_token_embeddings(60)
    found = growkern.moment_findings(growkern.plan(chain, **EVEN, **WIDEST))[0]
    assert found.level == "approximate" and "not as its growth made it" in found.why


def test_random_weights_take_no_steps_of_a_source():
    small = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    fresh = growkern.grow(small, method="random", **WIDE)
    with_it = growkern.plan(fresh, **EVEN, **WIDER)
    del fresh.growth_plan
    without = growkern.plan(fresh, **EVEN, **WIDER)
    same_factors(growth_lr_multipliers(with_it), growth_lr_multipliers(without))
    assert growkern.moment_findings(with_it)[0].level == "exact"
