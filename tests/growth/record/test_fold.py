"""Which checkpoints can be folded back, and the result."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.families.load import load_family
from growkern.families.model import ModelSpec
from growkern.growth.disk.companions import complete_config
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, LLAMA, fold_back, random_model
from tests.growth.plan.test_matrix import WIDTHS, deeper, width

# post-norm blocks: their norms are taken apart
DEEP = {"num_hidden_layers": 5, "depth": "identity"}
CASES = [
    ("BertForMaskedLM", BERT, {"hidden_size": 24}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24, **DEEP}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24, "num_hidden_layers": 5}),
    ("BertModel", BERT, {"hidden_size": 48, "num_hidden_layers": 5, "depth": "interleave"}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24, "vocab_size": 64, "stream": "copies"}),
    # the root of four is a power of two
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 48}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 48, "maps": "balanced", "head_dim": 16}),
    ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"hidden_size": 48}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 48, "method": "aki", "num_hidden_layers": 3}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24, "method": "aki", "aki": "eq16"}),
    ("Olmo2ForCausalLM", FAMILIES["olmo2"][1], {"hidden_size": 48, "method": "aki"}),
    ("BertForMaskedLM", BERT, {"hidden_size": 36, "method": "direct_copy", **DEEP}),
    ("BertForMaskedLM", BERT, {"hidden_size": 36, "symmetry": "split"}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 36, "symmetry": "split", "stream": "copies"}),
    ("BertForMaskedLM", BERT, {"hidden_size": 36, "symmetry": "routing", **DEEP}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 60, "routing": 1.5, "stream": "copies"}),
]


def grown(directory, class_name, sizes, how, dtype=torch.bfloat16):
    """The source, grown onto disk; nothing but the grown checkpoint is left."""
    source = random_model(class_name, sizes, dtype=dtype)
    source.save_pretrained(directory / "small")
    growkern.grow_checkpoint(directory / "small", directory / "large", progress=False, **how)
    shutil.rmtree(directory / "small")
    return source


def fold(directory, **how):
    return growkern.fold(directory / "large", directory / "back", progress=False, **how)


def load(source, directory):
    model, info = type(source).from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("class_name, sizes, how", CASES)
def test_what_was_not_trained_is_the_source(tmp_path, class_name, sizes, how, dtype):
    source = grown(tmp_path, class_name, sizes, how, dtype)
    report = fold(tmp_path)
    back = load(source, tmp_path / "back")
    assert back.dtype == dtype
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    source.save_pretrained(tmp_path / "again")
    complete_config(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        written = (tmp_path / "back" / name).read_bytes()
        assert written == (tmp_path / "again" / name).read_bytes(), name
    assert report.bytes_written == sum(p.nbytes for p in back.parameters())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "back", "large"]


@pytest.mark.parametrize("model_type, kind", [*WIDTHS, ("bert", "uneven")])
def test_every_family_within_rounding(tmp_path, model_type, kind):
    """Extra coordinates, the model's own factors; counts and sizes that are not powers of two."""
    class_name, sizes = FAMILIES[model_type]
    family, how = load_family(model_type), {**width(model_type, kind), **deeper(model_type)}
    if not family.forces_head_dim:
        # heads that grow themselves: rotary pairs move, queries hold copies and keys zeros
        small = ModelSpec(family, random_model(class_name, sizes).config, class_name)
        how |= {family.config_field("head_dim"): 2 * small.head_dim()}
    source = grown(tmp_path, class_name, sizes, how, torch.float64)
    fold(tmp_path)
    back = load(source, tmp_path / "back").state_dict()
    for name, tensor in source.state_dict().items():
        assert (back[name] - tensor).norm() <= 1e-14 * tensor.norm(), name


def changed_by_fold(source, how):
    """The source tensors that do not come back bit for bit, and the plan's word on the dtype."""
    grown = growkern.grow(source, **how)
    plan, state, lost = grown.growth_plan, grown.state_dict(), []
    for task in plan.tasks:
        if not task.is_made and task.identity in (None, "affine"):
            weight = plan.source.read(task.source)
            back = fold_back(plan, task, state[task.name]).to(weight.dtype)
            lost += [] if back.equal(weight) else [task.name]
    dtype = str(plan.dtype).removeprefix("torch.")
    return lost, {finding.what: finding.level for finding in plan.findings}.get(dtype)


BITS = [(model_type, "24", {}) for model_type in FAMILIES]
BITS += [(m, "48", {}) for m in ("bart", "bert", "gemma2", "gpt2", "llama", "olmo2", "t5")]
BITS += [(m, "36", {"symmetry": "split"}) for m in ("bert", "gemma3_text", "llama")]
BITS += [(m, "36", {"stream": "copies"}) for m in ("gemma2", "gpt2", "olmo2", "t5")]
BITS += [(m, "24", {"scale_embedding": True}) for m in ("bart",)]
BITS += [("bert", "12", {"identity_gain": gain}) for gain in (1.0, 1e-3, 1e-8)]


@pytest.mark.parametrize("model_type, width, how", BITS)
def test_what_growth_does_not_round_comes_back_bit_for_bit(model_type, width, how):
    """The docstring of `fold`: the plan of bfloat16 says so, and float32 follows it."""
    class_name, sizes = FAMILIES[model_type]
    family, how = load_family(model_type), dict(how)
    sizes = {**sizes, **({"scale_embedding": True} if how.pop("scale_embedding", None) else {})}
    how[family.config_field("stream")] = int(width)
    if "identity_gain" in how:
        how |= {"num_hidden_layers": 5, "depth": "identity"}
    lost, word = changed_by_fold(random_model(class_name, sizes, dtype=torch.bfloat16), how)
    assert word in ("exact", "approximate") and bool(lost) <= (word == "approximate"), lost
    if word == "exact":
        lost, _ = changed_by_fold(random_model(class_name, sizes, dtype=torch.float32), how)
        assert not lost


def test_equal_shares_in_powers_of_two_come_back_bit_for_bit_in_float64():
    source = random_model("BertForMaskedLM", BERT)
    assert not changed_by_fold(source, {"hidden_size": 24})[0]
    # products with other shares are rounded as they are summed
    assert changed_by_fold(source, {"hidden_size": 24, "symmetry": "split"})[0]


@pytest.mark.parametrize("kind", ["even", "uneven"])
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "qwen2"])
def test_own_copies_alone_give_a_layer_back(tmp_path, model_type, kind):
    """AKI with unequal shares, of both signs: what is left of an entry may be a small part."""
    class_name, sizes = FAMILIES[model_type]
    how = {**width(model_type, kind), "method": "aki", "symmetry": "split"}
    if model_type == "qwen2":
        # old groups hold several copies of a query head, and none is lost
        how |= {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 3}
    source = grown(tmp_path, class_name, sizes, how, torch.float64)
    fold(tmp_path)
    back = load(source, tmp_path / "back").state_dict()
    for name, tensor in source.state_dict().items():
        assert (back[name] - tensor).norm() <= 1e-13 * tensor.norm(), name


# ------------------------------------------------- by hand, from the text alone


def runs(text, value):
    """A map of the lineage, read by nobody's code but this."""
    found = []
    for run in text.split():
        if value:
            number, _, count = run.partition("x")
            found += [float(number)] * int(count or 1)
        else:
            first, _, last = run.partition("-")
            found += range(int(first), int(last or first) + 1)
    return np.array(found)


def dense(space, what):
    """E, (target, source), or P, (source, target)."""
    index, values = runs(space[f"{what}_index"], False), runs(space[what], True)
    matrix = np.zeros((len(index), space["source"]))
    for row, (column, x) in enumerate(zip(index, values, strict=True)):
        if column < space["source"] and runs(space["write_index"], False)[row] < space["source"]:
            matrix[row, column] = x
    return matrix if what == "write" else matrix.T


@pytest.mark.parametrize("how", [{}, {"symmetry": "split"}, {"scheme": "paper", "seed": 3}])
def test_what_was_trained_is_what_its_copies_make(tmp_path, how):
    """W = P_out U E_in with dense matrices in NumPy, from nothing but the lineage's own text."""
    source = grown(tmp_path, "BertForMaskedLM", BERT, {"hidden_size": 32, **how}, torch.float32)
    file = tmp_path / "large" / "model.safetensors"
    rng = torch.Generator().manual_seed(0)
    trained = {n: t + 0.1 * torch.randn(t.shape, generator=rng) for n, t in load_file(file).items()}
    save_file(trained, file, metadata={"format": "pt"})
    fold(tmp_path, dtype=torch.float64)
    back = load(source, tmp_path / "back").state_dict()
    lineage = json.loads((tmp_path / "large" / "lineage.json").read_text())
    checked = 0
    for name, entry in lineage["tensors"].items():
        if "norm" in entry:
            continue
        value = trained[name].double().numpy()
        for dim, axis in enumerate(entry["axes"]):
            role, _, space = axis.partition(":")
            if not space:
                continue
            layer = f"{space}@{entry.get('layer')}"
            space = lineage["maps"].get(layer) or lineage["maps"][space]
            matrix = dense(space, "read") if role == "write" else dense(space, "write").T
            value = np.moveaxis(np.tensordot(matrix, value, axes=(1, dim)), 0, dim)
        assert np.allclose(back[entry["source"]].numpy(), value, rtol=1e-12, atol=1e-12), name
        checked += 1
    assert checked > 20


def test_trained_norms_are_the_mean_of_their_copies(tmp_path):
    how = {"hidden_size": 24, "symmetry": "none", "num_hidden_layers": 4, "depth": "stack"}
    source = grown(tmp_path, "BertForMaskedLM", BERT, how, torch.float32)
    file = tmp_path / "large" / "model.safetensors"
    trained = {n: t + torch.rand(t.shape) for n, t in load_file(file).items()}
    save_file(trained, file, metadata={"format": "pt"})
    fold(tmp_path, dtype=torch.float64)
    back = load(source, tmp_path / "back").state_dict()
    norms = [n for n in back if "LayerNorm" in n]
    # under a tied head the copies add up
    for name in norms:
        mean = trained[name].double().view(2, 12).mean(0)
        times = 2 if "transform" in name else 1
        assert torch.allclose(back[name], times * mean, rtol=1e-14), name


def test_of_layers_that_stand_there_twice_the_first_counts(tmp_path):
    how = {"hidden_size": 24, "num_hidden_layers": 4, "depth": "stack"}
    source = grown(tmp_path, "BertModel", BERT, how)
    file = tmp_path / "large" / "model.safetensors"
    trained = {
        n: t + 9 if ".layer.2." in n or ".layer.3." in n else t for n, t in load_file(file).items()
    }
    save_file(trained, file, metadata={"format": "pt"})
    report = fold(tmp_path)
    back = load(source, tmp_path / "back").state_dict()
    assert all(torch.equal(t, back[name]) for name, t in source.state_dict().items())
    assert all(name == held for name, held in report.tensors.items())


# ------------------------------------------------------------ files and refusals


def test_shards_dtype_and_tokenizer(tmp_path):
    source = grown(tmp_path, "LlamaForCausalLM", LLAMA, {"hidden_size": 48})
    (tmp_path / "large" / "tokenizer.json").write_text("{}")
    fold(tmp_path, max_shard_size="4kB", dtype=torch.float32)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert not (tmp_path / "back" / "lineage.json").exists()
    back = load(source, tmp_path / "back")
    assert back.dtype == torch.float32
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor.float(), back.state_dict()[name]), name


def test_a_trainers_checkpoint_is_folded_with_the_lineage_of_the_growth(tmp_path):
    source = grown(tmp_path, "LlamaForCausalLM", LLAMA, {"hidden_size": 48}, torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(growkern.GrowthError, match=r"trained: no lineage\.json"):
        growkern.fold(tmp_path / "trained", tmp_path / "back", progress=False)
    for lineage in (tmp_path / "large", tmp_path / "large" / "lineage.json"):
        growkern.fold(
            tmp_path / "trained", tmp_path / "back", lineage=lineage, overwrite=True, progress=False
        )
        back = load(source, tmp_path / "back").state_dict()
        assert all(torch.equal(t, back[name]) for name, t in source.state_dict().items())


@pytest.mark.parametrize(
    "class_name, sizes, how, message",
    [
        ("BertModel", BERT, {"hidden_size": 24, "method": "random"}, "kept nothing of the source"),
        (
            "LlamaForCausalLM",
            LLAMA,
            {"method": "aki", "num_attention_heads": 12, "num_key_value_heads": 6},
            r"layers\.0\.self_attn\.q_proj\.weight: 8 of 24 entries, the first 8, have no copy",
        ),
        (
            "ElectraModel",
            {**BERT, "embedding_size": 24},
            {"hidden_size": 24, "method": "direct_copy"},
            r"embeddings_project\.weight cannot be folded: no tensor of the grown model holds it",
        ),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, class_name, sizes, how, message):
    grown(tmp_path, class_name, sizes, how)
    with pytest.raises(growkern.GrowthError, match=message):
        fold(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["large"]


def test_a_lineage_of_another_model_is_refused(tmp_path):
    grown(tmp_path, "LlamaForCausalLM", LLAMA, {"hidden_size": 24})
    other = tmp_path / "other"
    other.mkdir()
    grown(other, "BertModel", BERT, {"hidden_size": 24})
    grown(other / "..", "LlamaForCausalLM", LLAMA, {"hidden_size": 36, "overwrite": True})
    shutil.copy(tmp_path / "large" / "lineage.json", tmp_path / "lineage.json")
    with pytest.raises(growkern.GrowthError, match="describes a BertModel, not a LlamaForCausalLM"):
        fold(tmp_path, lineage=other / "large")
    model = random_model("LlamaForCausalLM", {**LLAMA, "hidden_size": 24}, dtype=torch.bfloat16)
    model.save_pretrained(other / "small")
    with pytest.raises(growkern.GrowthError, match=r"has shape \(50, 24\), .* says \(50, 36\)"):
        growkern.fold(other / "small", other / "back", lineage=tmp_path, progress=False)
    with pytest.raises(growkern.GrowthError, match=r"exists.*--overwrite"):
        growkern.fold(tmp_path / "large", other / "large", progress=False)


def test_a_changed_lineage_is_refused(tmp_path):
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32).save_pretrained(tmp_path / "small")
    growkern.grow_checkpoint(
        tmp_path / "small", tmp_path / "large", progress=False, hidden_size=24, symmetry="split"
    )
    file = tmp_path / "large" / "lineage.json"
    record = json.loads(file.read_text())
    space = next(iter(record["maps"].values()))
    space["read"] = " ".join(["0.5", *space["read"].split()[1:]])
    file.write_text(json.dumps(record))
    with pytest.raises(growkern.GrowthError, match=r"lineage\.json has changed since the growth"):
        growkern.fold(tmp_path / "large", tmp_path / "back", progress=False)
    assert not (tmp_path / "back").exists()
