"""What a grown model leaves beside its weights: the card, and the record of `save_pretrained`."""

import copy
import json
import os
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError

import growkern
from growkern.errors import FunctionChangedWarning
from growkern.files import read_json
from growkern.growth.disk.stream import Stream
from growkern.publish.manifest import differences
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.growth.record.test_lineage import files

CASES = [
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 32, "num_hidden_layers": 4}),
    ("LlamaForCausalLM", LLAMA, {"num_hidden_layers": 4, "method": "aki", "seed": 3}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24, "scheme": "paper", "symmetry": "noise", "noise": 0.1}),
    ("BertForMaskedLM", BERT, {"hidden_size": 24, "method": "direct_copy", "n_dtype": "bfloat16"}),
]


def saved(directory, class_name, sizes, name="small"):
    model = random_model(class_name, sizes, dtype=torch.float32)
    model.save_pretrained(directory / name)
    return directory / name


def options(how):
    dtype = how.get("n_dtype")
    kept = {k: v for k, v in how.items() if k != "n_dtype"}
    return {**kept, "dtype": getattr(torch, dtype)} if dtype else kept


@pytest.mark.parametrize("class_name, sizes, how", CASES)
def test_the_cards_command_grows_the_same_files(class_name, sizes, how, tmp_path, monkeypatch):
    from growkern.cli.commands import app

    source = saved(tmp_path, class_name, sizes)
    growkern.grow_checkpoint(source, tmp_path / "large", progress=False, **options(how))
    text = (tmp_path / "large" / "README.md").read_text()
    command = text.split("```bash\n")[1].split("\n```")[0]
    monkeypatch.chdir(tmp_path)
    app(shlex.split(command)[1:], standalone_mode=False)
    assert files(tmp_path / "TARGET") == files(tmp_path / "large")


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_model_in_memory_is_saved_with_its_record(from_disk, tmp_path):
    source = saved(tmp_path, "LlamaForCausalLM", LLAMA)
    growkern.grow_checkpoint(source, tmp_path / "there", hidden_size=32, progress=False)
    small = source if from_disk else random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    large = growkern.grow(small, hidden_size=32)
    assert large.name_or_path == large.config.name_or_path == ""
    copy.deepcopy(large).save_pretrained(tmp_path / "copied")
    large.save_pretrained(tmp_path / "here", max_shard_size="5GB")
    assert growkern.verify(source, tmp_path / "here").ok
    if from_disk:
        there = files(tmp_path / "there")
        del there["checksums.json"]
        assert files(tmp_path / "here") == there


def test_the_record_in_a_new_directory_says_whether_the_model_has_changed(tmp_path):
    def record(name, change):
        large = growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=32)
        change(large).save_pretrained(tmp_path / name)
        found = files(tmp_path / name)
        text = found.get("lineage.json")
        assert text is None or ("README.md" in found) == ("trained_since" not in json.loads(text))
        return text and json.loads(text).get("trained_since", False)

    assert record("grown", lambda model: model) is False
    assert record("trained", trained) is True
    assert record("by kernels", trained_by_kernels) is True
    assert record("by data", one_weight_written_past_autograd) is True
    assert record("cast", lambda model: model.bfloat16()) is True
    (tmp_path / "trained" / "lineage.json").unlink()
    (tmp_path / "trained" / "checksums.json").write_text("my own")
    assert record("trained", trained) is True
    assert (tmp_path / "trained" / "checksums.json").read_text() == "my own"
    # its factors would be of other shapes
    assert record("with more tokens", more_tokens) is None


def more_tokens(model):
    model.resize_token_embeddings(64)
    return model


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    return model


def trained_by_kernels(model):
    """With steps that PyTorch does not make itself."""
    optimizer = growkern.GrowthAdamW(model.named_parameters(), model.growth_plan, lr=0.1)
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    return model


def one_weight_written_past_autograd(model):
    """As some optimizers do it; PyTorch does not count such a write."""
    weight = model.transformer.h[0].mlp.c_fc.weight
    written = weight._version
    weight.data -= 0.1
    assert weight._version == written
    return model


def test_the_record_in_a_directory_says_that_the_weights_were_trained(tmp_path, capsys):
    large = tmp_path / "large"
    source = saved(tmp_path, "GPT2LMHeadModel", GPT2)
    growkern.grow_checkpoint(source, large, n_embd=32, progress=False)
    model = growkern.grow(source, n_embd=32)
    (large / "README.md").write_text((large / "README.md").read_text() + "\n## My own words\n")
    trained(model).save_pretrained(large)
    assert "checksums.json" not in files(large)
    report = growkern.verify(source, large)
    assert not report.ok and "tensors differ" in report.failure
    assert "the model was trained since" in report.failure
    assert "the weights were trained or changed after the growth" in report.notes[0]
    card = (large / "README.md").read_text()
    assert "Before any training, compared with its source:\n\n- exact:" in card
    assert card.endswith("## My own words\n")
    # the other way round, the record is that of the weights again
    capsys.readouterr()
    growkern.grow(source, n_embd=32).save_pretrained(large)
    # no bar where stderr is no terminal
    assert capsys.readouterr().err == ""
    assert growkern.verify(source, large).ok
    assert (large / "README.md").read_text() == card


def test_a_card_that_somebody_wrote_or_edited_is_left_alone(tmp_path):
    card, small = tmp_path / "README.md", random_model("GPT2LMHeadModel", GPT2)
    large, larger = (growkern.grow(small, n_embd=size) for size in (32, 48))
    for own in ("# My notes\n", "", "\n", "x" * 2_000_000):
        card.write_text(own)
        large.save_pretrained(tmp_path)
        assert card.read_text() == own
    card.unlink()
    large.save_pretrained(tmp_path)
    first = card.read_text()
    assert "| n_embd | 12 | 32 |" in first
    # all that it says is still true after training
    trained(growkern.grow(small, n_embd=32)).save_pretrained(tmp_path)
    assert card.read_text() == first
    # one that nobody touched describes the growth of the weights that lie beside it
    larger.save_pretrained(tmp_path)
    assert "| n_embd | 12 | 48 |" in card.read_text()
    large.save_pretrained(tmp_path)
    assert card.read_text() == first
    for edited in (first + "\nMore.\n", first.replace("# GPT2", "# My GPT2"), first[:-70] + "x\n"):
        card.write_text(edited)
        larger.save_pretrained(tmp_path)
        assert card.read_text() == edited


@pytest.mark.parametrize("class_name, sizes, how", CASES)
def test_the_cards_code_grows_the_same_model_in_memory(class_name, sizes, how, tmp_path):
    small = random_model(class_name, sizes, dtype=torch.float32)
    growkern.grow(small, **options(how)).save_pretrained(tmp_path / "large")
    text = (tmp_path / "large" / "README.md").read_text()
    assert f"was grown from a {class_name} in memory" in text and "```bash" not in text
    names = {"growkern": growkern, "torch": torch, "small": small}
    exec(text.split("```python\n")[1].split("\n```")[0], names)
    names["large"].save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "large")


def test_no_checksums_are_promised_that_were_not_written(tmp_path):
    growkern.grow(random_model("GPT2LMHeadModel", GPT2), n_embd=32).save_pretrained(tmp_path)
    assert "checksums" not in read_json(tmp_path / "lineage.json", 10**6, "lineage")
    with pytest.raises(growkern.GrowthError, match=r"use grow_checkpoint, or .* SRC DST"):
        differences(tmp_path)


def test_the_card_keeps_what_the_source_says_of_its_licence(tmp_path):
    name = tmp_path / "models--google--small" / "snapshots"
    source = saved(name, "LlamaForCausalLM", LLAMA, "0123")
    large = tmp_path / "large"
    for head, licence in (
        ("---\nlicense: mit\ntags:\n- tiny\nmodel-index: wrong\n---\n", "mit"),
        ("---\nlicense: [\n---\n", None),
        ("", None),
    ):
        (source / "README.md").write_text(f"{head}# Small\n")
        growkern.grow_checkpoint(
            source, large, hidden_size=32, progress=False, overwrite=large.exists()
        )
        card = ModelCard.load(large / "README.md")
        assert card.data.license == licence
        assert card.data.base_model == "google/small"
        assert card.data.tags == (["growkern", "tiny"] if licence else ["growkern"])
        assert "# google/small, grown with growkern" in card.text and "exact:" in card.text


@pytest.mark.parametrize("name", [b"mod\xe8le", "模型".encode()])
def test_directories_may_have_any_name(name, tmp_path):
    """Names on Linux are bytes, which need not be UTF-8."""
    source = saved(tmp_path, "GPT2LMHeadModel", GPT2, os.fsdecode(name))
    large = tmp_path / os.fsdecode(b"large " + name)
    growkern.grow_checkpoint(source, large, n_layer=4, progress=False)
    assert growkern.verify(source, large).ok
    shown = name.decode(errors="backslashreplace")
    assert read_json(large / "lineage.json", 10**6, "lineage")["source"] == shown
    assert f"# {shown}, grown with growkern" in (large / "README.md").read_text(encoding="utf-8")
    growkern.grow(source, n_layer=4).save_pretrained(tmp_path / "here")
    assert files(tmp_path / "here")["README.md"] == files(large)["README.md"]


@pytest.mark.parametrize(
    "value, kept",
    [
        ("[llama, 2024, null, [a], {b: c}, 2024-01-01, llama]", ["growkern", "llama"]),
        ("llama", ["growkern", "llama"]),
        ('["\\ud800", "\\0"]', ["\0", "growkern"]),
        ("2024", ["growkern"]),
        ("false", ["growkern"]),
    ],
)
def test_nothing_in_the_sources_card_fails_a_growth(value, kept, tmp_path):
    source = saved(tmp_path, "GPT2LMHeadModel", GPT2)
    other = "".join(f"{name}: {value}\n" for name in ("license", "language", "datasets"))
    (source / "README.md").write_text(f"---\ntags: {value}\n{other}---\n# Small\n")
    growkern.grow_checkpoint(source, tmp_path / "large", n_layer=4, progress=False)
    found = ModelCard.load(tmp_path / "large" / "README.md").data
    assert found.tags == kept
    texts = [found.license] if isinstance(found.license, str) else found.license or []
    assert {*texts} == {*kept} - {"growkern"}


def test_the_records_are_made_before_the_weights(tmp_path, monkeypatch):
    """What cannot be recorded must fail before hours of work."""
    source = saved(tmp_path, "GPT2LMHeadModel", GPT2)
    monkeypatch.setattr(Stream, "run", lambda *args, **how: pytest.fail("weights were written"))
    for made in ("card_text", "lineage_text"):
        with monkeypatch.context() as patched:
            patched.setattr(f"growkern.growth.grow.{made}", lambda *args, **how: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                growkern.grow_checkpoint(source, tmp_path / "large", n_layer=4, progress=False)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What was sent to the Hub: {"files": name -> bytes, ...}. "card" is the one there."""
    sent = {"card": None}

    def commit(self, *, repo_id, operations, **options):
        sent["files"] = {x.path_in_repo: Path(x.path_or_fileobj).read_bytes() for x in operations}
        return "a commit"

    def download(repo_id, filename, **options):
        if sent["card"] is None:
            raise EntryNotFoundError(filename)
        (tmp_path / "of the hub").write_bytes(sent["card"])
        return str(tmp_path / "of the hub")

    monkeypatch.setattr(HfApi, "create_commit", commit)
    monkeypatch.setattr(HfApi, "create_repo", lambda *a, **how: SimpleNamespace(repo_id="a/b"))
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", download)
    return sent


def grown_gpt2(size=32):
    return growkern.grow(random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32), n_embd=size)


def test_a_push_to_the_hub_sends_the_record_too(tmp_path, hub):
    large = grown_gpt2()
    assert large.push_to_hub("acme/large") == "a commit"
    large.save_pretrained(tmp_path / "saved")
    assert hub["files"] == files(tmp_path / "saved") and "lineage.json" in hub["files"]
    assert b"grown with growkern" in hub["files"]["README.md"]
    trained(large).push_to_hub("acme/large")
    assert b"grown with growkern" not in hub["files"]["README.md"]


def test_a_push_adds_tags_and_replaces_a_card_that_nobody_edited(hub):
    grown_gpt2().push_to_hub("acme/large", tags=["mine", "growkern"])
    hub["card"] = hub["files"]["README.md"]
    assert ModelCard(hub["card"].decode()).data.tags == ["growkern", "mine"]
    grown_gpt2(48).push_to_hub("acme/large", tags=["mine"])
    card = hub["files"]["README.md"].decode()
    assert "| n_embd | 12 | 48 |" in card and ModelCard(card).data.tags == ["growkern", "mine"]


def test_a_push_leaves_a_card_on_the_hub_alone_that_somebody_wrote(hub):
    hub["card"] = b"---\nlicense: mit\n---\n\n# Mine\n"
    large = grown_gpt2()
    large.push_to_hub("acme/large")
    assert hub["files"]["README.md"] == hub["card"]
    large.push_to_hub("acme/large", tags=["new"])
    card = ModelCard(hub["files"]["README.md"].decode())
    assert card.data.tags == ["new"] and card.data.license == "mit" and "# Mine" in card.text


def test_a_growth_says_so_if_it_changes_the_function(tmp_path):
    source = saved(tmp_path, "LlamaForCausalLM", LLAMA)
    how = {"num_hidden_layers": 4, "depth": "stack"}
    with pytest.warns(FunctionChangedWarning, match="layers are stacked") as seen:
        growkern.grow(source, **how)
        growkern.grow_checkpoint(source, tmp_path / "large", progress=False, **how)
    assert [one.filename for one in seen] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # the default keeps the function
        large = growkern.grow(source, num_hidden_layers=4, hidden_size=32)
    assert growkern.verify(source, large).level == "exact"
