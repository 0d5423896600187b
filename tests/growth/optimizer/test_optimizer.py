"""Moments grow with the weights: against the optimizer of the grown model, step by step."""

import re

import pytest
import torch
import transformers
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy

import growkern
from growkern.growth.optimizer.moments import starts_at_zero
from testbed.families import PYTHIA, ROTARY
from testbed.models import BERT, GPT2, LLAMA, Float64Everywhere, images, random_model
from testbed.relatives import RELATIVES
from tests.growth.plan.test_families import CASES as FAMILIES, HEAD_DIM

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# new entries of a padded stream learn from the first step on, which the source's do not
COPIED = {"stream": "copies"}
UNEVEN = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5, **COPIED}
GROUPS = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4, **COPIED}
# 3 heads of 8 become 3 of 16
LARGER = {"hidden_size": 48, "num_attention_heads": 3}

EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 6}

EXACT = [
    ("GPT2LMHeadModel", GPT2, TIED, {"n_embd": 24, **COPIED}),
    ("GPT2LMHeadModel", GPT2, UNTIED, {"n_embd": 36, "n_inner": 50, **COPIED}),
    ("GPT2LMHeadModel", GPT2, TIED, {"n_embd": 24, "n_layer": 3, **COPIED}),
    ("BertForMaskedLM", BERT, {}, {"hidden_size": 24}),
    ("LlamaForCausalLM", LLAMA, TIED, GROUPS),
    ("LlamaForCausalLM", LLAMA, UNTIED, {**GROUPS, "intermediate_size": 33}),
    (
        *RELATIVES["deepseek_v3"][:2],
        {"norm_topk_prob": False},
        {"hidden_size": 24, "q_lora_rank": 15, "v_head_dim": 8, **EXPERTS, **COPIED},
    ),
    (*RELATIVES["vit"][:2], {}, {"hidden_size": 24, **COPIED}),
    (*RELATIVES["dinov2"][:2], {"use_mask_token": False}, {"hidden_size": 24, **COPIED}),
]


def loss_of(model, step):
    """A loss on tokens that change with the step; no key of the batch but the ids."""
    rng = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(3, 50, (2, 3, 9), generator=rng)
    inputs = {"input_ids": tokens}
    if model.main_input_name == "pixel_values":
        inputs = images(model, step)
    elif hasattr(model, "classification_head"):
        tokens[:, 5] = model.config.eos_token_id
    elif model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
        inputs["decoder_input_ids"] = labels
    with Float64Everywhere():
        result = model(**inputs)
    names = ("logits", "prediction_logits")
    logits = next(getattr(result, n) for n in names if getattr(result, n, None) is not None)
    if logits.ndim < 3 or logits.shape[-1] != 50:
        return logits.log_softmax(-1).square().mean()
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def adamw(model, **options):
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
    return torch.optim.AdamW(model.named_parameters(), **options)


def grown_states(source, how, moments="grow", **options):
    """The optimizer that growth makes, and the one that the target would have by itself."""
    target = growkern.grow(source, **{"symmetry": "none", **how})
    own = []
    for model in (source, target):
        # a learning rate of 0: state without steps
        optimizer = adamw(model, lr=0.0, **options)
        train(model, optimizer, range(3))
        own.append(optimizer)
    state = growkern.grow_optimizer(own[0].state_dict(), target.growth_plan, moments=moments)
    return target, by_name(state), by_name(own[1].state_dict()), by_name(own[0].state_dict())


def by_name(state):
    (group,) = state["param_groups"]
    keys = dict(zip(group["param_names"], group["params"], strict=True))
    return {name: state["state"][key] for name, key in keys.items() if key in state["state"]}


def assert_same_moments(actual, expected, names):
    scale = max(entry["exp_avg"].abs().max() for entry in expected.values())
    for name in names:
        for key, atol in (("exp_avg", 1e-13 * scale), ("exp_avg_sq", 1e-16 * scale**2)):
            found, truth = actual[name][key], expected[name][key]
            assert torch.allclose(found, truth, rtol=1e-9, atol=float(atol)), (name, key)
        assert actual[name]["step"] == expected[name]["step"]


# ------------------------------------------------------------------- "grow"


@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case[0]}-{case[3]}")
def test_grown_moments_are_those_of_the_grown_models_gradients(case):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    target, grown, own, _ = grown_states(source, how, amsgrad=True)
    # identity blocks stand right above the block they repeat
    inserted = {name for name in own if ".h.1." in name and "n_layer" in how}
    assert_same_moments(grown, own, own.keys() - inserted)
    findings = growkern.moment_findings(target.growth_plan)
    assert findings[0].level == "exact"
    assert grown.keys() == own.keys()
    first = next(iter(grown.values()))
    assert first.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_experts_that_sleep_start_with_the_squares_of_their_source():
    """No token reaches them, so the mean of their own gradients is 0."""
    class_name, sizes, _ = RELATIVES["deepseek_v3"]
    source = random_model(class_name, sizes, std=0.2)
    how = {"n_routed_experts": 12, "hidden_size": 24, **COPIED}
    target, grown, own, _ = grown_states(source, how)
    space, plan = target.growth_plan.layout.space("experts"), target.growth_plan
    awake = space.read.nonzero().flatten()
    assert len(awake) == 8
    for task in (task for task in plan.tasks if task.tensor.axes[:1] == ("write:experts",)):
        if task.name in own:
            # the awake copy of every expert
            own[task.name]["exp_avg_sq"] = own[task.name]["exp_avg_sq"][awake[space.read_index]]
    assert_same_moments(grown, own, own.keys())
    found = {finding.what: finding.level for finding in growkern.moment_findings(plan)}
    assert found == {"moments": "exact", "new experts": "approximate"}


WITH_HEAD = [case for case in FAMILIES if "For" in case[0]]


@pytest.mark.parametrize("case", WITH_HEAD, ids=lambda case: case[0])
def test_findings_say_for_every_family_which_moments_are_exact(case):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    target, grown, own, _ = grown_states(source, how)
    first, *others = growkern.moment_findings(target.growth_plan)
    if first.level != "exact":
        return
    plan = target.growth_plan
    new = {
        task.name
        for task in plan.tasks
        if task.is_made or (task.tensor.stack, task.tensor.layer) in plan.inserted
    }
    approximate = {f.what for f in others}
    assert bool(new) == ("new blocks" in approximate)
    # OLMo 2 has one norm over the keys of all heads
    keys = ("k_proj", "v_proj", "qkv_proj", *(["k_norm"] if "Olmo2" in class_name else []))
    parts = keys if "keys and values" in approximate else ()
    exact = [n for n in own if n not in new and not any(part in n for part in parts)]
    assert_same_moments(grown, own, [n for n in exact if n in grown])


@pytest.mark.parametrize("case", HEAD_DIM, ids=lambda case: f"{case[0]}-{case[3]}")
def test_moments_of_larger_heads_are_exact_but_for_the_new_entries_of_keys(case):
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, std=0.2, **config)
    target, grown, own, _ = grown_states(source, how)
    plan = target.growth_plan
    first, *others = growkern.moment_findings(plan)
    has_norm = any("q_norm" in name for name, _ in source.named_parameters())
    named = {f.what for f in others} & {"keys", "queries and keys"}
    assert named == {"queries and keys" if has_norm else "keys"}
    if first.level != "exact" or "keys and values" in {f.what for f in others}:
        return
    if has_norm:
        own = {name: x for name, x in own.items() if not re.search("[qk]_(proj|norm)", name)}
    for task in (task for task in plan.tasks if task.name in own):
        for dim, axis in enumerate(task.tensor.axes):
            role, _, names = axis.partition(":")
            if role != "write":
                continue
            # what is written as zero are new entries of keys
            spaces = [plan.layout.space(name, task.source_layer) for name in names.split("|")]
            old = torch.cat([space.write != 0 for space in spaces]).nonzero().flatten()
            for entry in (grown[task.name], own[task.name]):
                entry |= {k: entry[k].index_select(dim, old) for k in ("exp_avg", "exp_avg_sq")}
    assert_same_moments(grown, own, own)


@pytest.mark.parametrize(
    "class_name, sizes, how",
    [
        ("GPT2LMHeadModel", GPT2, {"n_embd": 20}),
        ("BertForMaskedLM", BERT, {"hidden_size": 20}),
        ("LlamaForCausalLM", LLAMA, {**UNEVEN, "symmetry": "split"}),
        ("LlamaForCausalLM", LLAMA, {"hidden_size": 24, "symmetry": "noise"}),
        ("LlamaForCausalLM", LLAMA, {"head_dim": 8}),
        ("GPTNeoXForCausalLM", PYTHIA, LARGER),
        ("Olmo2ForCausalLM", ROTARY, {"head_dim": 8, **UNEVEN}),
    ],
)
def test_start_values_fold_back_to_the_sources_moments(class_name, sizes, how):
    """E_out^T (P_out^T m E_in^T) P_in^T = m: the part of a gradient that training can see."""
    source = random_model(class_name, sizes, std=0.2)
    target, grown, _, own = grown_states(source, how)
    plan = target.growth_plan
    first, *others = growkern.moment_findings(plan)
    assert first.level != "exact" or any(f.what.endswith("keys") for f in others)
    for task in plan.tasks:
        if task.tensor.norm or starts_at_zero(plan, task, "grow"):
            continue
        moment = grown[task.name]["exp_avg"]
        for dim, axis in enumerate(task.tensor.axes):
            moment = folded(plan, task, axis, moment, dim)
        truth = own[task.source]["exp_avg"]
        assert torch.allclose(moment, truth, rtol=1e-12, atol=1e-15), task.name


def folded(plan, task, axis, moment, dim):
    role, _, names = axis.partition(":")
    if not names:
        return moment
    spaces = [plan.layout.space(name, task.source_layer) for name in names.split("|")]
    parts = []
    pieces = moment.movedim(dim, 0).split([space.target for space in spaces])
    for space, piece in zip(spaces, pieces, strict=True):
        keep = ~space.is_extra
        back = space.write if role == "write" else space.read
        index = (space.write_index if role == "write" else space.read_index)[keep]
        scaled = piece[keep] * back[keep].reshape(-1, *[1] * (piece.ndim - 1))
        parts.append(piece.new_zeros(space.source, *piece.shape[1:]).index_add_(0, index, scaled))
    return torch.cat(parts).movedim(0, dim)


def test_inserted_blocks_start_at_step_zero_and_stacked_ones_copy():
    source = random_model("GPT2LMHeadModel", GPT2)
    for depth, layer, step in (("identity", 1, 0), ("stack", 2, 3)):
        _, grown, _, own = grown_states(source, {"n_layer": 3, "depth": depth})
        inserted = [entry for name, entry in grown.items() if f".h.{layer}." in name]
        assert len(inserted) == 12
        assert all(entry["step"] == step for entry in inserted)
        assert all(bool(entry["exp_avg"].any()) == bool(step) for entry in inserted)
        kept = grown[f"transformer.h.{3 - layer}.mlp.c_fc.weight"]["exp_avg"]
        assert torch.equal(kept, own["transformer.h.1.mlp.c_fc.weight"]["exp_avg"])


def test_aki_takes_moments_from_where_it_takes_weights():
    source = random_model("BertForMaskedLM", BERT)
    _, grown, _, own = grown_states(source, {"hidden_size": 24, "method": "aki"})
    at = "bert.encoder.layer.{}.intermediate.dense.bias"
    moment = grown[at.format(0)]["exp_avg"]
    below, above = (own[at.format(layer)]["exp_avg"] for layer in (0, 1))
    assert torch.allclose(moment, torch.cat([below, above]) / 2, rtol=1e-15)


# ------------------------------------------------------- "old_slices", reset


def test_old_slices_keep_the_old_block_as_it_is_and_nothing_else():
    source = random_model("GPT2LMHeadModel", GPT2)
    how = {"n_embd": 20, "n_layer": 3, "depth": "stack"}
    _, grown, _, own = grown_states(source, how, moments="old_slices")
    for name, entry in grown.items():
        is_new = ".h.2." in name
        assert entry["step"] == (0 if is_new else 3)
        for key in ("exp_avg", "exp_avg_sq"):
            expected = torch.zeros_like(entry[key])
            if not is_new:
                old = own[name][key]
                views = [expected] if "c_attn" not in name else expected.split(20, -1)
                olds = [old] if "c_attn" not in name else old.split(12, -1)
                for view, part in zip(views, olds, strict=True):
                    view[tuple(slice(n) for n in part.shape)] = part
            assert torch.equal(entry[key], expected), (name, key)


def test_old_slices_of_a_fused_matrix_are_where_the_old_entries_of_its_parts_are():
    """4 of 8 entries turn, 8 of 16: pairs 0 and 1 become 0 and 2, entries 4 to 7 become 8 to 11."""
    source = random_model("GPTNeoXForCausalLM", PYTHIA)
    _, grown, _, own = grown_states(source, LARGER, moments="old_slices")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    old, new = own[name]["exp_avg"], grown[name]["exp_avg"]
    turned = [0, 2, 4, 6, 8, 9, 10, 11]
    entries = torch.tensor([*turned, *(16 + i for i in turned), *range(32, 40)])
    rows = (48 * torch.arange(3)[:, None] + entries).flatten()
    expected = torch.zeros_like(new)
    expected[rows, :24] = old
    assert torch.equal(new, expected)


def test_reset_is_zero_at_step_zero_with_the_groups_settings():
    source = random_model("BertForMaskedLM", BERT)
    target = growkern.grow(source, hidden_size=24)
    optimizer = adamw(source)
    train(source, optimizer, range(2))
    optimizer.param_groups[0]["initial_lr"] = 0.5
    state = growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan, moments="reset")
    new = adamw(target, lr=0.3)
    new.load_state_dict(state)
    assert new.param_groups[0]["lr"] == 1e-2 and new.param_groups[0]["initial_lr"] == 0.5
    for p in target.parameters():
        assert new.state[p]["step"] == 0 and not new.state[p]["exp_avg_sq"].any()
        assert new.state[p]["exp_avg"].shape == p.shape


# -------------------------------------------------------------------- names


@pytest.fixture
def trainers_checkpoint(tmp_path):
    """A Trainer after two steps of a BERT, and the directory it saved in."""
    source = random_model("BertForMaskedLM", BERT, dtype=torch.float32)
    data = [{"input_ids": list(range(3, 12)), "labels": list(range(3, 12))}] * 8
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = transformers.Trainer(source, args, train_dataset=data)
    trainer.train()
    return trainer, tmp_path / "checkpoint-2"


def test_the_trainers_optimizer_file_fits_the_trainers_optimizer(trainers_checkpoint):
    """Positions alone say which state belongs to which parameter: decayed ones first."""
    trainer, directory = trainers_checkpoint
    source = trainer.model
    state = torch.load(directory / "optimizer.pt", weights_only=True)
    assert "param_names" not in state["param_groups"][0]
    sizes = {"hidden_size": 24, "num_hidden_layers": 3}
    target = growkern.grow(source, **sizes, depth="stack", symmetry="none")
    plan = target.growth_plan
    new = transformers.Trainer(target, trainer.args).create_optimizer()
    new.load_state_dict(growkern.grow_optimizer(state, plan))
    trained, tasks = trainer.optimizer.state, {task.name: task for task in plan.tasks}
    parameters = dict(source.named_parameters())
    assert {p for group in new.param_groups for p in group["params"]} == set(target.parameters())
    for name, p in target.named_parameters():
        task = tasks[name]
        old = tuple(slice(n) for n in parameters[task.source].shape)
        share = 1.0
        for axis, size in zip(task.tensor.axes, task.shape, strict=True):
            source_size = plan.small.axis_size(axis)
            share /= size // source_size if axis.startswith("write:") else 1
        moment = trained[parameters[task.source]]["exp_avg"]
        # what stands right under the tied matrix is read undivided
        if "transform.LayerNorm" not in name:
            assert torch.allclose(new.state[p]["exp_avg"][old], share * moment, rtol=1e-6), name


def same_state(optimizer, expected):
    """Both have the same state for the same parameters, bit for bit."""
    assert expected.state.keys() == optimizer.state.keys() and expected.state
    for p, entry in expected.state.items():
        assert entry.keys() == optimizer.state[p].keys()
        assert all(torch.equal(x, optimizer.state[p][key]) for key, x in entry.items())


@pytest.mark.parametrize("moments", ["grow", "old_slices", "reset"])
def test_state_is_grown_into_the_trainers_optimizer(trainers_checkpoint, moments):
    trainer, directory = trainers_checkpoint
    target = growkern.grow(trainer.model, hidden_size=24, num_hidden_layers=3)
    own = transformers.Trainer(target, trainer.args)
    expected = own.create_optimizer()
    own.optimizer = None
    new = own.create_optimizer()
    state = torch.load(directory / "optimizer.pt", weights_only=True)
    expected.load_state_dict(growkern.grow_optimizer(state, target.growth_plan, moments=moments))
    new.param_groups[0]["lr"] = 0.5
    for given in (state, directory, str(directory / "optimizer.pt")):
        growkern.grow_optimizer_into(target, new, given, moments=moments)
        same_state(new, expected)
        assert new.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("key", ["optim", None])
def test_state_is_grown_from_a_distributed_checkpoint(tmp_path, flat, key):
    """As PyTorch's helpers give it, nested or flat, alone or under a key; a tied head's once."""
    source = random_model("GPT2LMHeadModel", GPT2)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
    train(source, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(source, optimizer, options=options)
    saved = state if key is None else {key: state, "model": source.state_dict()}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    target = growkern.grow(source, n_embd=20, n_layer=3)
    expected, new = (torch.optim.AdamW(target.parameters(), lr=1.0) for _ in range(2))
    growkern.grow_optimizer_into(target, new, tmp_path)
    expected.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan))
    same_state(new, expected)


@pytest.mark.parametrize(
    "before, after", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize(
    "class_name, sizes, growth",
    [
        ("LlamaForCausalLM", LLAMA, {"hidden_size": 24}),
        ("BertForMaskedLM", BERT, {"hidden_size": 20, "intermediate_size": 33, "method": "aki"}),
        (*RELATIVES["mixtral"][:2], {"hidden_size": 20, "num_local_experts": 8}),
    ],
)
def test_grown_moments_take_the_parameters_dtype(class_name, sizes, growth, before, after):
    """They are rounded to the dtype that the source has them in first, in either call."""
    source = random_model(class_name, sizes, dtype=before)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
    for parameter in source.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    target = growkern.grow(source, **growth, dtype=after)
    expected, new = (torch.optim.AdamW(target.parameters()) for _ in range(2))
    expected.load_state_dict(growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan))
    growkern.grow_optimizer_into(target, new, optimizer.state_dict())
    same_state(new, expected)


def test_state_keyed_by_names_stays_keyed_by_names():
    source = random_model("GPT2LMHeadModel", GPT2)
    target = growkern.grow(source, n_embd=24)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-3)
    train(source, optimizer, range(2))
    named = get_optimizer_state_dict(source, optimizer)
    grown = growkern.grow_optimizer(named, target.growth_plan)
    assert set(grown["state"]) == {name for name, _ in target.named_parameters()}
    new = torch.optim.AdamW(target.parameters(), lr=1.0)
    set_optimizer_state_dict(target, new, grown)
    by_position = growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan)["state"]
    for number, (name, p) in enumerate(target.named_parameters()):
        assert torch.equal(new.state[p]["exp_avg"], grown["state"][name]["exp_avg"])
        assert torch.equal(new.state[p]["exp_avg"], by_position[number]["exp_avg"])


def test_groups_without_some_parameters_keep_them_out():
    source = random_model("BertForMaskedLM", BERT)
    target = growkern.grow(source, hidden_size=24)
    frozen = [x for x in source.named_parameters() if "embeddings" not in x[0]]
    optimizer = torch.optim.AdamW(frozen)
    train(source, optimizer, range(1))
    state = growkern.grow_optimizer(optimizer.state_dict(), target.growth_plan)
    names = [name for name, _ in target.named_parameters() if "embeddings" not in name]
    assert state["param_groups"][0]["param_names"] == names


# ----------------------------------------------------------------- refusals


def state_of(make=lambda ps: torch.optim.AdamW(ps), **config):
    source = random_model("BertForMaskedLM", BERT, **config)
    optimizer = make(source.parameters())
    train(source, optimizer, range(1))
    return optimizer.state_dict()


def three_groups(parameters):
    a, b, *rest = parameters
    return torch.optim.AdamW([{"params": [a]}, {"params": [b]}, {"params": rest}])


def swapped():
    state = state_of()
    state["state"][0], state["state"][6] = state["state"][6], state["state"][0]
    return state


def misnamed():
    state = state_of()
    names = [name for name, _ in random_model("BertForMaskedLM", BERT).named_parameters()]
    state["param_groups"][0]["param_names"] = ["bert.embedings", *names[1:]]
    return state


def several_optimizers(directory):
    state = {"a.state.transformer.ln_f.bias.exp_avg": torch.zeros(12)}
    state["b.state.transformer.ln_f.bias.exp_avg"] = torch.zeros(12)
    checkpoint.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def weights_only(directory):
    checkpoint.save(
        {"transformer.ln_f.bias": torch.zeros(12)}, checkpoint_id=directory, no_dist=True
    )
    return directory


def of_another_size(directory):
    state = {"optim.state.transformer.ln_f.bias.exp_avg": torch.zeros(13)}
    checkpoint.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def made_before(target):
    other = growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=24)
    return torch.optim.AdamW(other.parameters())


@pytest.mark.parametrize(
    "make, source, message",
    [
        (lambda t: torch.optim.SGD(t.parameters()), dict, "is a SGD; growkern grows"),
        (made_before, None, r"parameter of shape \[50, 24\] that the model does not have"),
        (None, lambda d: {"state": {}}, 'no "state" and "param_groups"'),
        (None, lambda d: d / "none.pt", "none.pt: no such file"),
        (None, lambda d: d, "optimizer.pt: no such file"),
        (None, several_optimizers, r"several optimizers \(a., b.\)"),
        (None, weights_only, "no optimizer state of this model; it holds transformer.ln_f.bias"),
        (None, of_another_size, r"exp_avg has shape \[13\], but the parameter has \[12\]"),
        (lambda t: torch.optim.AdamW(t.parameters(), amsgrad=True), None, "with amsgrad=False"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(make, source, message, tmp_path):
    small = random_model("GPT2LMHeadModel", GPT2)
    trained = torch.optim.AdamW(small.parameters())
    train(small, trained, range(1))
    target = growkern.grow(small, n_embd=24)
    optimizer = make(target) if make else torch.optim.AdamW(target.parameters())
    given = trained.state_dict() if source in (None, dict) else source(tmp_path)
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.grow_optimizer_into(target, optimizer, given)
    assert not optimizer.state
    del target.growth_plan
    with pytest.raises(growkern.GrowthError, match="has no growth_plan"):
        growkern.grow_optimizer_into(target, optimizer, given)


def without_step():
    state = state_of()
    del state["state"][3]["step"]
    return state


def with_a_state_of_nothing():
    state = state_of()
    state["state"]["a"] = {}
    return state


def with_a_parameter_twice():
    state = state_of()
    state["param_groups"][0]["params"][1] = 0
    return state


@pytest.mark.parametrize(
    "make, message",
    [
        (with_a_state_of_nothing, "state for parameter 'a', which is in none of its groups"),
        (with_a_parameter_twice, "parameter 0 is 2 times in the groups"),
        (lambda: {"state": {}}, 'no "state" and "param_groups"'),
        (lambda: state_of(lambda ps: torch.optim.SGD(ps, momentum=0.9)), "no rule .*momentum_buf"),
        (lambda: state_of(torch.optim.Adafactor), "no rule .*Adafactor keeps means .*reset"),
        (lambda: state_of(three_groups), "3 groups without param_names"),
        (lambda: state_of(num_hidden_layers=3), r"groups hold \[58\] parameters, .* has \[42\]"),
        (swapped, r"exp_avg has shape \[\d+.*the parameter has \[50, 12\]"),
        (misnamed, "state for bert.embedings"),
        (without_step, "no step count"),
    ],
)
def test_states_that_do_not_fit_are_refused(make, message):
    plan = growkern.plan(random_model("BertForMaskedLM", BERT), hidden_size=24)
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.grow_optimizer(make(), plan)
    with pytest.raises(growkern.GrowthError, match="did you mean 'grow'"):
        growkern.grow_optimizer({}, plan, moments="grown")
