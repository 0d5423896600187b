"""Checkpoints on disk: what comes out, and what bad input does (nothing)."""

import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as distributed
from typer.testing import CliRunner

import growkern
from growkern.cli.commands import app
from growkern.growth.source.files import Header
from growkern.growth.source.source import open_source
from testbed.families import BART, GROUPED, MODERN, NEOX, ROTARY, T5
from testbed.models import BERT, GPT2, LLAMA, random_model

SIZES = {**BERT, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 40}


def save_source(directory, max_shard_size="5GB", **config):
    model = random_model("BertForMaskedLM", SIZES, dtype=torch.float32, **config)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "vocab.txt").write_text("[PAD]\n")
    return model


@pytest.fixture
def source(tmp_path):
    save_source(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def sharded(tmp_path):
    save_source(tmp_path / "sharded", max_shard_size="8kB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    return tmp_path / "sharded"


def grow(source, target, **how):
    how = {"hidden_size": 48, "progress": False, **how}
    return growkern.grow_checkpoint(source, target, **how)


def snapshot(directory):
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def test_a_grown_checkpoint_loads_like_any_other(source, tmp_path):
    before = snapshot(source)
    report = grow(source, tmp_path / "grown", num_hidden_layers=3)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "grown")
    assert loaded.config.hidden_size == 48 and loaded.config.num_hidden_layers == 3
    assert report.bytes_written == sum(p.numel() * 4 for p in loaded.parameters())
    in_memory = growkern.grow(source, hidden_size=48, num_hidden_layers=3).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, in_memory[name]), name
    for companion in ("tokenizer.json", "vocab.txt"):
        assert (tmp_path / "grown" / companion).read_bytes() == before[companion]
    lineage = json.loads((tmp_path / "grown" / "lineage.json").read_text())
    assert lineage["sizes"]["hidden_size"] == [24, 48]
    assert snapshot(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grown", "source"]


def test_old_names_and_foreign_heads_are_understood(source, tmp_path):
    """gamma/beta, a stored position buffer and the pooler of the published BERT files."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    model = growkern.grow(source, hidden_size=48).state_dict()
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): t
        for n, t in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(18)[None]
    old["bert.pooler.dense.weight"] = torch.ones(24, 24)
    old["bert.pooler.dense.bias"] = torch.ones(24)
    save_file(old, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"pooler\.dense\.weight"):
        again = growkern.grow(source, hidden_size=48).state_dict()
    assert all(torch.equal(model[n], again[n]) for n in model)


@pytest.mark.parametrize(
    "class_name, sizes, old",
    [
        ("LlamaForCausalLM", LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("Qwen3ForCausalLM", ROTARY, "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("Olmo2ForCausalLM", GROUPED, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("Phi3ForCausalLM", GROUPED, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("GPTNeoXForCausalLM", NEOX, "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
        ("ModernBertForMaskedLM", MODERN, "model.layers.0.attn.rotary_emb.inv_freq"),
        ("GPT2LMHeadModel", GPT2, "transformer.h.0.attn.bias"),
        ("BartForConditionalGeneration", BART, "model.encoder.version"),
        (
            "T5ForConditionalGeneration",
            T5,
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ),
    ],
)
def test_what_older_files_hold_and_models_do_not_read_is_left_out(class_name, sizes, old, tmp_path):
    model = random_model(class_name, sizes, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    known = open_source(tmp_path).dtypes
    save_file({**load_file(file), old: torch.ones(2)}, file, metadata={"format": "pt"})
    assert open_source(tmp_path).dtypes == known
    save_file({**load_file(file), old + "x": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=rf"no rule for tensor .*{old}x"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "class_name, sizes, head",
    [
        ("GPT2LMHeadModel", GPT2, "lm_head.weight"),
        ("BertForMaskedLM", BERT, "cls.predictions.decoder.weight"),
        ("BartForConditionalGeneration", BART, "lm_head.weight"),
    ],
)
def test_a_tied_head_that_differs_is_refused(class_name, sizes, head, tmp_path):
    """Transformers loads such files untied, so growing the embedding alone would lose the head."""
    model = random_model(class_name, sizes, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    twin = model.state_dict()[head].clone()
    save_file({**tensors, head: twin}, file, metadata={"format": "pt"})
    assert head not in open_source(tmp_path).dtypes
    twin[3, 2] += 1
    save_file({**tensors, head: twin}, file, metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=f"{head} and .* differ"):
        growkern.plan(tmp_path, **{"vocab_size": 64})
    # in memory too
    model.get_output_embeddings().weight = torch.nn.Parameter(twin)
    with pytest.raises(growkern.GrowthError, match=f"{head} and .* differ"):
        growkern.plan(model, **{"vocab_size": 64})


def test_dtypes_that_cannot_hold_the_source_are_said_and_overflow_is_refused(tmp_path):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "mixed")
    plan = growkern.plan(tmp_path / "mixed", hidden_size=24)
    (finding,) = [f for f in plan.findings if f.what == "bfloat16"]
    assert finding.level == "approximate" and "model.norm.weight" in finding.why
    # 1e6 is a number of bfloat16, and none of float16
    model.bfloat16().model.norm.weight.data.fill_(1e6)
    model.save_pretrained(tmp_path / "large")
    how = {"hidden_size": 24, "dtype": torch.float16}
    assert not growkern.plan(tmp_path / "large", **how).exact
    with pytest.raises(growkern.GrowthError, match=r"model\.norm\.weight: .* 65504"):
        growkern.grow(tmp_path / "large", **how)
    with pytest.raises(growkern.GrowthError, match=r"model\.norm\.weight: .* 65504"):
        grow(tmp_path / "large", tmp_path / "grown", **how)
    assert not (tmp_path / "grown").exists()
    grow(tmp_path / "large", tmp_path / "grown", **how | {"dtype": torch.float32})


@pytest.mark.parametrize(
    "held, added",
    [
        ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
        ("bert.embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
        ("bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight"),
    ],
)
@pytest.mark.parametrize("max_shard_size", ["5GB", "8kB"])
def test_two_tensors_that_are_one_of_the_model_are_refused(tmp_path, held, added, max_shard_size):
    """Growth cannot know which of them is the trained one."""
    source = tmp_path / "source"
    save_source(source, max_shard_size=max_shard_size)
    save_file({added: load(source)[held] * 3}, source / "added.safetensors")
    index = source / "model.safetensors.index.json"
    if index.exists():
        record = json.loads(index.read_text())
        record["weight_map"][added] = "added.safetensors"
        index.write_text(json.dumps(record))
    else:
        tensors = {**load(source), added: load(source)[held] * 3}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    names = sorted([re.escape(held), re.escape(added)])
    message = f"({names[0]} and {names[1]}|{names[1]} and {names[0]}) are both {re.escape(held)} of"
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.plan(source, hidden_size=48)


def load(directory):
    """All tensors of a checkpoint."""
    return {k: v for f in directory.glob("model*.safetensors") for k, v in load_file(f).items()}


def test_gpt2_files_without_prefix_are_understood(tmp_path):
    model = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    model.save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(tensors, file, metadata={"format": "pt"})
    again = growkern.grow(tmp_path / "gpt2", n_embd=24).state_dict()
    for name, tensor in growkern.grow(model, n_embd=24).state_dict().items():
        assert torch.equal(tensor, again[name]), name


# ------------------------------------------------------------------ bad input


def edit_config(directory, **changes):
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensor(directory, name, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors, name)
    save_file(tensors, file, metadata={"format": "pt"})


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


def truncate(d):
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt_header(d):
    file = d / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[10:20] = b"\xff" * 10
    file.write_bytes(bytes(data))


BREAKAGES = [
    (lambda d: edit_config(d, model_type="mamba"), "mamba.*nearest: .*family draft"),
    (lambda d: edit_config(d, model_type=None), "model_type"),
    (lambda d: edit_config(d, architectures=None), "architectures"),
    (lambda d: edit_config(d, architectures=["BertForSpeech"]), "supported: BertModel"),
    (lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}), "quantised"),
    (lambda d: edit_config(d, intermediate_size=41), r"has shape \[40.*\], but its config says"),
    (lambda d: edit_config(d, num_hidden_layers=1), "no rule for tensor bert.encoder.layer.1"),
    (lambda d: edit_config(d, num_hidden_layers=3), "encoder.layer.2.* is missing .and"),
    (lambda d: edit_config(d, model_type=["bert"]), 'no "model_type"'),
    (lambda d: edit_config(d, hidden_act="gelo"), "did you mean 'gelu'"),
    (lambda d: edit_config(d, intermediate_size=0), r"intermediate_size=0 must lie in 1 \.\."),
    (lambda d: edit_config(d, num_hidden_layers=10**9), "num_hidden_layers=10+ must lie in 1"),
    (
        lambda d: edit_tensor(d, QUERY, lambda t, n: t.update({n: t[n].int()})),
        r"has dtype torch\.int32; growth handles F64",
    ),
    (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    (lambda d: (d / "config.json").unlink(), "no config.json"),
    (lambda d: (d / "model.safetensors").unlink(), "a config without weights"),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pickled"),
    (truncate, "truncated or corrupt"),
    (corrupt_header, "truncated or corrupt"),
    (lambda d: edit_tensor(d, QUERY, lambda t, n: t.pop(n)), f"{QUERY} is missing"),
    (
        lambda d: edit_tensor(d, "bert.adapter.weight", lambda t, n: t.update({n: torch.ones(2)})),
        r"no rule for tensor bert.adapter.weight \[2\]",
    ),
    (
        lambda d: edit_tensor(d, QUERY, lambda t, n: t[n].view(-1)[:2].fill_(float("nan"))),
        f"{QUERY}: 2 of 576 values are NaN or Inf",
    ),
    (
        lambda d: edit_tensor(d, QUERY, lambda t, n: t.update({n: t[n].to(torch.float8_e4m3fn)})),
        "dtype F8_E4M3",
    ),
]


@pytest.mark.parametrize("breakage, message", BREAKAGES)
def test_bad_checkpoints_are_refused_and_nothing_is_written(source, tmp_path, breakage, message):
    breakage(source)
    before = snapshot(source)
    with pytest.raises(growkern.GrowthError, match=message):
        grow(source, tmp_path / "grown")
    assert snapshot(source) == before
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_files_that_may_not_be_read_are_not_called_corrupt(sharded, tmp_path, monkeypatch, name):
    if name == "model.safetensors":
        save_source(sharded)
        (sharded / "model.safetensors.index.json").unlink()

    def refusing(opened):
        def refuse(path, *args, **kwargs):
            if os.path.basename(path) == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opened(path, *args, **kwargs)

        return refuse

    for place in (Path, os):
        monkeypatch.setattr(place, "open", refusing(place.open))
    with pytest.raises(growkern.GrowthError, match=f"^[^:]*{name}: Permission denied$"):
        grow(sharded, tmp_path / "grown")


def test_targets_that_the_system_refuses_are_refused(source, tmp_path, monkeypatch):
    for name in ("x" * 300, "x" * 250):
        with pytest.raises(growkern.GrowthError, match="File name too long"):
            grow(source, tmp_path / name)
    stat = Path.stat

    def refuse(self, **kwargs):
        if "closed" in self.parts[:-1]:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(growkern.GrowthError, match="closed/grown: Permission denied: give another"):
        grow(source, tmp_path / "closed" / "grown")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_targets_inside_the_source_are_refused(source):
    before = snapshot(source)
    for target in (source / "grown", source / "a" / "b" / ".." / "grown"):
        for overwrite in (False, True):
            with pytest.raises(growkern.GrowthError, match=r"grown is inside the source .*beside"):
                grow(source, target, overwrite=overwrite)
    assert snapshot(source) == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "float32"])
def test_dtypes_that_growth_does_not_write_are_refused(source, tmp_path, dtype):
    for call in (growkern.plan, growkern.grow):
        with pytest.raises(growkern.GrowthError, match=f"dtype={dtype}, but .* torch.float32,"):
            call(source, hidden_size=48, dtype=dtype)
    with pytest.raises(growkern.GrowthError, match=r"growth writes .*torch\.float64: convert"):
        grow(source, tmp_path / "grown", dtype=dtype)


def test_non_finite_weights_pass_when_asked_for(source, tmp_path):
    edit_tensor(source, QUERY, lambda t, n: t[n].view(-1)[:1].fill_(float("nan")))
    grow(source, tmp_path / "grown", allow_nonfinite=True)
    tensors = load_file(tmp_path / "grown" / "model.safetensors")
    # rows of both copies of the head; in each, routing gives it to one copy of the column
    assert int(tensors[QUERY].isnan().sum()) == 2


def test_existing_target_is_kept_unless_told(source, tmp_path):
    target = tmp_path / "grown"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    with pytest.raises(growkern.GrowthError, match="exists") as refused:
        grow(source, target)
    assert "overwrite" not in str(refused.value)
    with pytest.raises(growkern.GrowthError, match="no record in it says that growkern wrote it"):
        grow(source, target, overwrite=True)
    (target / "precious.txt").rename(tmp_path / "precious.txt")
    grow(source, target, overwrite=True)
    (tmp_path / "precious.txt").rename(target / "precious.txt")
    with pytest.raises(growkern.GrowthError, match=r"precious\.txt is no file of a checkpoint"):
        grow(source, target, overwrite=True)
    (target / "precious.txt").unlink()
    (target / "vocab.txt").write_text("of the old growth")
    before = snapshot(target)
    with pytest.raises(growkern.GrowthError, match="smaller"):
        grow(source, target, hidden_size=12, overwrite=True)
    with pytest.raises(growkern.GrowthError, match=r"exists.*overwrite"):
        grow(source, target)
    assert snapshot(target) == before
    grow(source, target, overwrite=True)
    assert snapshot(target)["vocab.txt"] == (source / "vocab.txt").read_bytes()
    (tmp_path / "config.json").write_text("{}")
    for holds_the_source in (source, tmp_path):
        with pytest.raises(growkern.GrowthError, match="the source itself"):
            grow(source, holds_the_source, overwrite=True)
    (tmp_path / "config.json").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grown", "source"]


FOREIGN = ["thesis.tex", ".git/HEAD", ".git", "checkpoint-1/model.safetensors", "empty/"]
FOREIGN += ["1_Pooling/notes/config.json", "tokenizer_experiments.md", "optimizer.pt"]
FOREIGN += ["additional_chat_templates/tool.jinja", "LICENSE", "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_target_with_anything_else_in_it_is_not_replaced(source, tmp_path, name):
    target = tmp_path / "grown"
    grow(source, target)
    # a record of ours must not give away what is in .git
    record = json.loads((target / "checksums.json").read_text())
    record["files"] |= {".git/HEAD": "", ".git": ""}
    (target / "checksums.json").write_text(json.dumps(record))
    (target / name).parent.mkdir(exist_ok=True, parents=True)
    (target / name).mkdir() if name.endswith("/") else (target / name).write_text("mine")
    before = snapshot(target)
    with pytest.raises(growkern.GrowthError, match=f"{name.strip('/')} is no file of a checkpoint"):
        grow(source, target, overwrite=True)
    assert snapshot(target) == before and (target / name).exists()


@pytest.mark.parametrize("saved", ["by transformers", "names alone", "foreign records"])
def test_a_model_of_another_program_is_not_replaced(source, tmp_path, saved):
    """Names that every model has are no record of ours, nor are records of other programs."""
    target = tmp_path / "theirs"
    target.mkdir()
    files = {"config.json": '{"model_type": "bert"}', "vocab.txt": "my words", "merges.txt": "x"}
    if saved == "by transformers":
        shutil.copytree(source, target, dirs_exist_ok=True)
        files = {}
    elif saved == "foreign records":
        record = json.dumps({"name": "my web app", "files": {"thesis.txt": 1, "config.json": 1}})
        files |= dict.fromkeys(("manifest.json", "checksums.json", "lineage.json"), record)
        files["thesis.txt"] = "mine"
    for name, text in {**files, "README.md": "my thesis"}.items():
        (target / name).write_text(text)
    before = snapshot(target)
    with pytest.raises(growkern.GrowthError, match=r"no record .*move it away.*another dir"):
        grow(source, target, overwrite=True)
    assert snapshot(target) == before


@pytest.mark.parametrize("name", ["thesis.txt", "manifest.json", "README.md"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_foreign_manifest_or_card_keeps_a_grown_model(source, tmp_path, name, in_memory):
    target = tmp_path / "grown"
    if in_memory:
        growkern.grow(source, hidden_size=48).save_pretrained(target)
        assert not (target / "checksums.json").exists()
    else:
        grow(source, target)
    text = json.dumps({"name": "my web app", "files": {"thesis.txt": 1}})
    (target / ("README.md" if name == "README.md" else "manifest.json")).write_text(text)
    if name == "thesis.txt":
        (target / name).write_text("mine")
    before = snapshot(target)
    with pytest.raises(growkern.GrowthError, match=r"(manifest\.json|README\.md) is no file of a"):
        grow(source, target, overwrite=True)
    assert snapshot(target) == before


def test_checkpoints_of_every_kind_are_replaced(source, tmp_path):
    """All that growth and `save_pretrained` wrote, whatever names the source had."""
    target = tmp_path / "grown"
    (source / "LICENSE").write_text("of the source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    grow(source, target)
    assert (target / "LICENSE").is_file()
    (target / "LICENSE").unlink()
    (target / "LICENSE").symlink_to(source, target_is_directory=True)
    grow(source, target, overwrite=True)
    assert not (target / "LICENSE").is_symlink() and (target / "LICENSE").is_file()
    assert (source / "config.json").is_file()
    in_memory = tmp_path / "in memory"
    growkern.grow(source, hidden_size=48).save_pretrained(in_memory)
    grow(source, in_memory, overwrite=True)


def test_a_full_disk_is_noticed_before_and_survived_during(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(growkern.GrowthError, match="GB free"):
        grow(source, tmp_path / "grown")
    monkeypatch.undo()

    # a real short write: no file may grow beyond 20 kB, the weights need more
    grow(source, tmp_path / "grown")
    before = snapshot(tmp_path / "grown")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(growkern.GrowthError, match="nothing was changed"):
            grow(source, tmp_path / "grown", hidden_size=96, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path / "grown") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grown", "source"]


# ------------------------------------------------------------------- verify


def perturb(directory, *names):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors |= {name: tensors[name] * 1.01 for name in names}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "how",
    [
        {"hidden_size": 48, "num_hidden_layers": 4, "depth": "identity"},
        {"hidden_size": 48, "num_hidden_layers": 3, "method": "aki"},
        {"hidden_size": 48, "dtype": torch.bfloat16},
    ],
)
def test_verify_notices_one_percent_on_any_kind_of_tensor(source, tmp_path, how):
    grow(source, tmp_path / "grown", **how)
    report = growkern.verify(source, tmp_path / "grown")
    assert report.ok, report.failure
    kept = (tmp_path / "grown" / "model.safetensors").read_bytes()
    tensors = load_file(tmp_path / "grown" / "model.safetensors")
    kinds = {}
    for task in report.plan.tasks:
        if tensors[task.name].any():
            kinds[task.tensor.template, task.identity] = task.name
    assert len(kinds) > 20
    # a kind is judged by its own tensors, so one of each is wrong at a time
    for identity in {identity for _, identity in kinds}:
        wrong = {kind: name for (kind, i), name in kinds.items() if i == identity}
        perturb(tmp_path / "grown", *wrong.values())
        report = growkern.verify(source, tmp_path / "grown")
        found = {group.kind: group.worst for group in report.groups if not group.ok}
        assert found == wrong and not report.ok
        assert any(name in report.failure for name in wrong.values())
        (tmp_path / "grown" / "model.safetensors").write_bytes(kept)


def test_verify_notices_one_percent_on_untrained_bf16_norms(source, tmp_path):
    """All ones: 1 % is a single step of bf16 there, for every element alike."""
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "fresh")
    grow(tmp_path / "fresh", tmp_path / "grown", dtype=torch.bfloat16)
    assert growkern.verify(tmp_path / "fresh", tmp_path / "grown").ok
    perturb(tmp_path / "grown", "bert.embeddings.LayerNorm.weight")
    assert not growkern.verify(tmp_path / "fresh", tmp_path / "grown").ok


def test_verify_reports_the_size_of_a_planned_gap(source, tmp_path):
    grow(source, tmp_path / "grown", method="aki", num_hidden_layers=4)
    report = growkern.verify(source, tmp_path / "grown")
    assert report.ok and not report.plan.exact
    assert report.outputs["relative error"] > 1e-2
    assert report.outputs["KL (nats)"] > 1e-3


def test_rounding_makes_no_divergence_negative(source, tmp_path):
    grow(source, tmp_path / "grown")
    for seed in range(4):
        tokens = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
        found = growkern.verify(source, tmp_path / "grown", tokens=tokens).outputs
        assert 0 <= found["KL (nats)"] < 1e-12


def test_verify_needs_a_record_that_fits(source, tmp_path):
    grow(source, tmp_path / "grown")
    save_source(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(growkern.GrowthError, match="num_hidden_layers=2, this source has 1"):
        growkern.verify(tmp_path / "other", tmp_path / "grown")
    with pytest.raises(growkern.GrowthError, match="outside 0"):
        growkern.verify(source, tmp_path / "grown", tokens=torch.full((1, 4), 50))
    (tmp_path / "grown" / "lineage.json").unlink()
    with pytest.raises(growkern.GrowthError, match=r"no lineage\.json"):
        growkern.verify(source, tmp_path / "grown")
    with pytest.raises(growkern.GrowthError, match="growth_plan"):
        growkern.verify(source, random_model("BertForMaskedLM", SIZES))


def test_plan_reads_headers_only(source, monkeypatch):
    def unreadable(self, first, count):
        raise AssertionError(f"read {self.raw_name}")

    monkeypatch.setattr(Header, "_map", unreadable)
    plan = growkern.plan(source, hidden_size=48)
    monkeypatch.undo()
    assert plan.parameters("source") == sum(
        t.numel() for t in load_file(source / "model.safetensors").values()
    )
    assert json.loads(json.dumps(plan.to_dict()))["exact"] is True
    assert "hidden_size" in str_of(plan.table())


def str_of(renderable):
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_distributed_source_is_verified_like_any_other(tmp_path):
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32, tie_word_embeddings=True)
    source.config.architectures = ["LlamaForCausalLM"]
    source.config.save_pretrained(tmp_path / "source")
    shards, target = tmp_path / "source" / "step_7", tmp_path / "grown"
    distributed.save({"model": source.state_dict()}, checkpoint_id=shards, no_dist=True)
    growkern.grow_checkpoint(shards, target, hidden_size=24, progress=False)
    report = growkern.verify(shards, target)
    assert report.ok and report.plan.exact
    assert report.outputs == growkern.verify(source, target).outputs
    assert CliRunner().invoke(app, ["verify", str(shards), str(target)]).exit_code == 0
    checked = CliRunner().invoke(app, ["verify", str(shards), str(target), "--checksums"])
    assert checked.exit_code == 0 and "source tensors: 0 changed" in checked.stdout
    with torch.no_grad():
        source.model.norm.weight[0] += 1
    distributed.save({"model": source.state_dict()}, checkpoint_id=shards, no_dist=True)
    assert not growkern.verify(shards, target).ok
    checked = CliRunner().invoke(app, ["verify", str(shards), str(target), "--checksums"])
    assert checked.exit_code == 1 and "model.norm.weight" in checked.stdout
