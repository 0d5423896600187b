"""Models on the Hub as sources, from a server on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import growkern
from growkern.errors import GrowthWarning
from growkern.growth.source.hub import hub_model, located
from testbed.models import LLAMA, random_model
from tests.growth.record.test_lineage import files
from tests.growth.source.hub_server import commit_of, serving

NAME = "acme/tiny-llama"
# files of a repository that growth does not use
UNUSED = (
    "pytorch_model.bin",
    "onnx/model.onnx",
    "model.fp16.safetensors",
    "consolidated.safetensors",
)


@pytest.fixture
def small(tmp_path):
    directory = tmp_path / "of-acme"
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32).save_pretrained(
        directory, max_shard_size="8KB"
    )
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(directory)
    for name in UNUSED:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("not to be downloaded")
    return directory


@pytest.fixture
def server(small, tmp_path, monkeypatch):
    other = tmp_path / "older"
    shutil.copytree(small, other)
    (other / "dict.txt").write_text("of the first version")
    with serving({NAME: {"main": small, "v1": other}, "acme/closed": "gated"}) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield server


def use(monkeypatch, url, cache, offline=False):
    """Let `huggingface_hub`, which has read its environment already, talk to this server."""
    monkeypatch.setattr(hub, "ENDPOINT", url)
    monkeypatch.setattr(
        hub, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", offline)


def test_a_model_on_the_hub_grows_as_its_directory_does(server, small, tmp_path):
    how = {"hidden_size": 24, "progress": False}
    growkern.grow_checkpoint(small, tmp_path / "from_disk", **how)
    report = growkern.grow_checkpoint(NAME, tmp_path / "large", **how)
    here, there = files(tmp_path / "from_disk"), files(tmp_path / "large")
    assert here.keys() == there.keys()
    # they say where the source lies
    differ = {name for name in here if here[name] != there[name]}
    assert differ == {"lineage.json", "checksums.json", "README.md"}
    lineage = json.loads((tmp_path / "large" / "lineage.json").read_text())
    assert (lineage["source"], lineage["source_commit"]) == (NAME, commit_of(small))
    card = (tmp_path / "large" / "README.md").read_text()
    assert f"growkern grow {NAME} TARGET --revision {commit_of(small)}" in card
    assert ModelCard.load(tmp_path / "large" / "README.md").data.base_model == NAME
    assert hub_model(report.plan.source.directory) == (NAME, commit_of(small))
    assert not [path for _, path, _ in server.asked if path.endswith(UNUSED)]
    # from the cache, and by every other door
    assert growkern.verify(NAME, tmp_path / "large").ok
    large = growkern.grow(NAME, hidden_size=24)
    empty = type(large)(growkern.plan(NAME, hidden_size=24).target_config)
    growkern.grow_into(empty, Path(NAME))
    for (name, x), y in zip(large.state_dict().items(), empty.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    asked = [path for method, path, _ in server.asked if "model-00001-of-" in path]
    assert len(asked) <= 2, "the weights are downloaded once"


def test_a_path_that_exists_is_never_looked_up(server, small):
    shutil.copytree(small, Path(NAME))
    growkern.plan(NAME, hidden_size=24)
    assert not server.asked
    with pytest.raises(growkern.GrowthError, match=r"--revision.* is for models on the Hub"):
        growkern.plan(NAME, hidden_size=24, revision="v1")
    with pytest.raises(growkern.GrowthError, match=r"the source is a LlamaForCausalLM"):
        growkern.grow(random_model("LlamaForCausalLM", LLAMA), hidden_size=24, revision="v1")


def test_a_single_file_on_the_hub_goes_before_an_index(server, small):
    """The plan looks at the headers there, and the growth at the files here."""
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.bfloat16).save_pretrained(
        small.parent / "single"
    )
    shutil.copy(small.parent / "single" / "model.safetensors", small)
    with pytest.warns(GrowthWarning, match="is ignored"):
        assert growkern.plan(NAME, hidden_size=24).dtype == torch.bfloat16
    with pytest.warns(GrowthWarning, match="is ignored"):
        assert growkern.grow(NAME, hidden_size=24).dtype == torch.bfloat16


def test_revisions(server, small, tmp_path):
    for revision, at in (("v1", tmp_path / "older"), (commit_of(small), small)):
        directory = located(NAME, revision)
        assert hub_model(directory) == (NAME, commit_of(at))
    growkern.grow_checkpoint(
        NAME, tmp_path / "large", revision="v1", hidden_size=24, progress=False
    )
    assert (tmp_path / "large" / "dict.txt").exists()
    with pytest.raises(growkern.GrowthError, match=f"{NAME} has no revision 'v2': give a branch"):
        located(NAME, "v2")


@pytest.mark.parametrize("shard_size", ["8KB", "1GB"])
def test_a_plan_downloads_no_weights(server, small, shard_size, monkeypatch):
    """Nor does one that is exact need a large tensor; norms are read by themselves."""
    for file in small.glob("model*"):
        file.unlink()
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(small, max_shard_size=shard_size)
    # the header alone is longer than this
    monkeypatch.setattr("growkern.growth.source.formats.FIRST_BYTES", 100)
    made = growkern.plan(NAME, hidden_size=24)
    assert made.to_dict() == growkern.plan(small, hidden_size=24).to_dict()
    asked = [(method, at) for method, path, at in server.asked if path.endswith(".safetensors")]
    ranges = [at for method, at in asked if method == "GET"]
    assert ranges and all(ranges)
    assert not list(made.source.directory.glob("*.safetensors"))
    for name in made.source.dtypes:
        read, expected = made.source.read(name), model.state_dict()[name]
        assert torch.equal(read, expected), name
    # a large tensor is read from its file, which the growth finds in the cache
    monkeypatch.setattr("growkern.growth.source.formats.MOST_READ", 100)
    name = "model.embed_tokens.weight"
    assert torch.equal(made.source.read(name), model.state_dict()[name])
    assert list(made.source.directory.glob("*.safetensors"))
    assert growkern.grow(NAME, hidden_size=24).growth_plan.exact


def test_the_snapshot_of_a_plan_is_completed_for_a_growth(server, tmp_path):
    directory = located(NAME, weights=False)
    growkern.grow_checkpoint(directory, tmp_path / "large", hidden_size=24, progress=False)
    assert growkern.verify(directory, tmp_path / "large").ok


def test_a_plan_when_the_network_goes(server, small, tmp_path, monkeypatch):
    directory = located(NAME, weights=False)
    use(monkeypatch, server.url, tmp_path / "cache", offline=True)
    for source in (NAME, directory):
        with pytest.raises(growkern.GrowthError, match="HF_HUB_OFFLINE is set: run `hf download"):
            growkern.plan(source, hidden_size=24)


@pytest.mark.parametrize("name", ["acme/tiny-lama", "runs/smal"])
def test_a_typing_error(server, name):
    with pytest.raises(growkern.GrowthError, match=f"{name} is neither a directory nor a model"):
        growkern.plan(name, hidden_size=24)
    assert len(server.asked) == 1


OTHER_NAMES = ["tiny-llama", "/there/is/none", "acme/../c", "acme/tiny/llama", "acme/", "a\0/b"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_not_looked_up(server, name):
    with pytest.raises(growkern.GrowthError, match="no such directory"):
        growkern.plan(name, hidden_size=24)
    assert not server.asked


def test_a_bare_name_is_told_how_models_on_the_hub_are_named(server):
    with pytest.raises(growkern.GrowthError, match=r"tiny: no such .* named ORGANISATION/NAME"):
        growkern.plan("tiny", hidden_size=24)


@pytest.mark.parametrize(
    "name, owner",
    [
        ("gpt2", "openai-community"),
        ("gpt2-medium", "openai-community"),
        ("bert-base-uncased", "google-bert"),
        ("distilroberta-base", "distilbert"),
        ("xlm-roberta-base", "FacebookAI"),
    ],
)
def test_a_name_of_old_is_told_with_its_organisation(server, name, owner):
    with pytest.raises(growkern.GrowthError, match=f"{name}: no such .* {owner}/{name}$"):
        growkern.plan(name, n_embd=24)


def test_a_model_behind_a_gate(server):
    with pytest.raises(growkern.GrowthError, match=r"acme/closed: accept its terms .* hf auth"):
        growkern.plan("acme/closed", hidden_size=24)


def test_offline_the_cache_is_used(server, small, tmp_path, monkeypatch):
    located(NAME)
    before = len(server.asked)
    use(monkeypatch, server.url, tmp_path / "cache", offline=True)
    growkern.grow_checkpoint(NAME, tmp_path / "large", hidden_size=24, progress=False)
    assert len(server.asked) == before
    with pytest.raises(growkern.GrowthError) as refused:
        growkern.plan("acme/other", hidden_size=24, revision="v1")
    text = str(refused.value)
    assert "HF_HUB_OFFLINE is set" in text and "hf download acme/other --revision v1`" in text


def test_without_a_network(small, tmp_path, monkeypatch):
    """Nobody listens on the port of a server that has gone."""
    with serving({NAME: {"main": small}}) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        located(NAME)
    growkern.plan(NAME, hidden_size=24)
    use(monkeypatch, server.url, tmp_path / "empty")
    with pytest.raises(growkern.GrowthError) as refused:
        growkern.plan(NAME, hidden_size=24)
    text = str(refused.value)
    assert "\n" not in text and text.startswith(f"{NAME} is no directory")
    assert "cannot be reached" in text and f"`hf download {NAME}`" in text


def test_a_model_that_cannot_be_grown_is_refused_before_a_download(server, small):
    server.models["acme/pickled"] = {"main": small}
    for file in small.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(growkern.GrowthError, match=r"acme/pickled holds only pickled"):
        growkern.plan("acme/pickled", hidden_size=24)
    assert [path for _, path, _ in server.asked] == ["/api/models/acme/pickled"]


def test_a_quantised_model_is_planned_without_its_weights(server, small):
    server.models["acme/packed"] = {"main": small}
    (small / "hf_quant_config.json").write_text("{}")
    assert "hf_quant_config.json" in growkern.plan("acme/packed", hidden_size=24).needs
    assert not any("safetensors" in path and "index" not in path for _, path, _ in server.asked)
    before = len(server.asked)
    with pytest.raises(growkern.GrowthError, match=r"acme/packed holds quantised weights"):
        growkern.grow("acme/packed", hidden_size=24)
    assert len(server.asked) == before + 1


def test_the_command_line(server, tmp_path):
    """With the environment that its users set."""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_OFFLINE", None)

    def run(*arguments):
        line = [sys.executable, "-m", "growkern", *arguments]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)

    grown = run("grow", NAME, "large", "--hidden-size", "24", "--revision", "v1")
    assert grown.returncode == 0, grown.stderr
    assert f"growkern verify {NAME} " in grown.stdout and "--revision v1" in grown.stdout
    assert (tmp_path / "large" / "dict.txt").exists()
    # as do commands that read a model
    measured = run("eval", NAME, "--text", str(tmp_path / "large" / "dict.txt"))
    assert measured.returncode == 2 and "has 64 positions" in measured.stderr
