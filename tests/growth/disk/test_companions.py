"""Tokenizer and processor files come along whatever they are called; other weights never."""

import contextlib

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.distributed import checkpoint as distributed
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import growkern
from growkern import files
from growkern.growth.disk.checksums import verify_checksums
from growkern.growth.disk.companions import companions
from testbed.models import LLAMA, random_model


@pytest.fixture
def source(tmp_path):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def grow(source, target):
    growkern.grow_checkpoint(source, target, hidden_size=24, progress=False)


def test_a_tokenizer_with_two_chat_templates(source, tmp_path):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.chat_template = {"default": "{{ messages[0] }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    assert (source / "additional_chat_templates" / "tool_use.jinja").is_file()
    grow(source, tmp_path / "large")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "large")
    assert loaded.get_chat_template("tool_use") == "{{ tools }}"
    assert loaded.get_chat_template("default") == "{{ messages[0] }}"
    assert loaded.get_vocab() == tokenizer.get_vocab()


TOKENIZER_FILES = ["spm.model", "tekken.json", "tokenizer.model.v3", "bpe.codes", "qwen.tiktoken"]
TOKENIZER_FILES += ["sentencepiece.bpe.model", "dict.txt", "tokenization_mine.py", "LICENSE"]
TOKENIZER_FILES += ["preprocessor_config.json", "processor_config.json", "chat_template.jinja"]
OTHER_FILES = ["pytorch_model.bin", "tf_model.h5", "other.safetensors", "optimizer.pt", ".cache"]
OTHER_FILES += ["model.fp16.safetensors.index.json", "rng_state_0.pth", "trainer_state.json"]
OTHER_FILES += ["training_args.bin", "README.md", "lineage.json"]
OTHER_FILES += ["checksums.json", "model.onnx_data", "consolidated.00.pth"]


def test_what_comes_along(source, tmp_path):
    for name in (*TOKENIZER_FILES, *OTHER_FILES):
        (source / name).write_text(name)
    (source / "checkpoint-7").mkdir()
    (source / "checkpoint-7" / "spm.model").write_text("of another state")
    grow(source, tmp_path / "large")
    own = {"config.json", "generation_config.json", "model.safetensors"}
    own |= {"lineage.json", "checksums.json", "README.md"}
    found = {p.name for p in (tmp_path / "large").iterdir()}
    assert found == {*own, *TOKENIZER_FILES}
    for name in TOKENIZER_FILES:
        assert (tmp_path / "large" / name).read_text() == name


def test_notes_and_pictures_stay_behind_and_are_named(source, tmp_path):
    names = ["notes.txt", "loss_vs_flops.png", "words.lst", "License.txt", "chat.JSON"]
    for name in names:
        (source / name).write_text("mine")
    (source / "tokenization_mine.py").write_text('FILE = "words.lst"')
    with pytest.warns(UserWarning, match="not copied.* need it: loss_vs_flops.png, notes.txt$"):
        grow(source, tmp_path / "large")
    found = [name for name in names if (tmp_path / "large" / name).exists()]
    assert found == names[2:]


@pytest.mark.parametrize("name", ["vocab.txt", "additional_chat_templates/a.jinja"])
def test_links_out_of_the_checkpoint_are_left_out(source, tmp_path, name):
    """Otherwise a link in a downloaded checkpoint publishes any file of its user."""
    (tmp_path / "secret").write_text("of somebody else")
    link = source / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "secret")
    with pytest.warns(UserWarning, match=r"outside of the checkpoint.*replace the link"):
        grow(source, tmp_path / "large")
    assert not (tmp_path / "large" / name).exists()


def test_links_inside_the_checkpoint_and_its_cached_repository_are_followed(source, tmp_path):
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = repository / "snapshots" / "abc"
    source.rename(snapshot)
    (repository / "blobs" / "1").write_text("one")
    (snapshot / "spm.model").symlink_to("../../blobs/1")
    (snapshot / "same.model").symlink_to("spm.model")
    grow(snapshot, tmp_path / "large")
    for name in ("spm.model", "same.model"):
        copy = tmp_path / "large" / name
        assert copy.read_text() == "one" and not copy.is_symlink()


def test_copies_have_plain_modes(source, tmp_path):
    (source / "run.py").write_text("code")
    (source / "run.py").chmod(0o4755)
    grow(source, tmp_path / "large")
    assert (tmp_path / "large" / "run.py").stat().st_mode & 0o7111 == 0


def test_no_file_of_any_tokenizer_is_left_out(tmp_path):
    names = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    for class_name in sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name}):
        # some need a package that may not be there, one is made of two others
        with contextlib.suppress(ImportError, AttributeError):
            names |= set(getattr(transformers, class_name).vocab_files_names.values())
    assert len(names) > 15
    for name in names:
        (tmp_path / name).touch()
    assert {file.name for file in companions(tmp_path)} == names


def test_folders_are_on_disk_before_they_are_published(source, tmp_path, monkeypatch):
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "a.jinja").write_text("{{ a }}")
    (source / "additional_chat_templates" / "deep").mkdir()
    (source / "additional_chat_templates" / "deep" / "b.jinja").write_text("{{ b }}")
    sync, synced = files.sync, []
    monkeypatch.setattr(files, "sync", lambda path: (synced.append(path.name), sync(path)))
    grow(source, tmp_path / "large")
    wanted = {"a.jinja", "additional_chat_templates", "b.jinja", "config.json", "lineage.json"}
    assert wanted < set(synced)
    assert (tmp_path / "large" / "additional_chat_templates" / "deep" / "b.jinja").is_file()


def test_they_lie_beside_the_config(source, tmp_path):
    """Weights of torch.distributed lie in a folder below."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    (source / "spm.model").write_text("spm")
    distributed.save({"model": model.state_dict()}, checkpoint_id=source / "step_7", no_dist=True)
    grow(source / "step_7", tmp_path / "large")
    assert (tmp_path / "large" / "spm.model").read_text() == "spm"


def test_a_linked_generation_config_is_not_published(source, tmp_path):
    """Its content would become part of the grown model."""
    (tmp_path / "secret").write_text('{"token": "of somebody else"}')
    (source / "generation_config.json").unlink()
    (source / "generation_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(growkern.GrowthError, match="outside of the checkpoint"):
        grow(source, tmp_path / "large")
    assert not (tmp_path / "large").exists()


def test_a_linked_folder_is_not_walked_through(source):
    """It may be the root of the file system, where a walk takes minutes."""
    (source / "additional_chat_templates").symlink_to("/")
    with pytest.warns(UserWarning, match="outside of the checkpoint"):
        found = {file.name for file in companions(source)}
    assert found == {"generation_config.json"}


def test_every_byte_of_a_companion_is_checksummed(source, tmp_path):
    """Only the model's own tensors have checksums besides that of their file's header."""
    (source / "additional_chat_templates").mkdir()
    file = "additional_chat_templates/x.safetensors"
    (source / file).write_bytes(b"\x02" + bytes(7) + b"{}" + b"a" * 1000)
    grow(source, tmp_path / "large")
    assert verify_checksums(tmp_path / "large").ok
    with open(tmp_path / "large" / file, "r+b") as opened:
        opened.seek(500)
        opened.write(b"b")
    (wrong,) = verify_checksums(tmp_path / "large").wrong
    assert wrong.endswith("x.safetensors: the file was changed")
