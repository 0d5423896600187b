"""A teacher's cached rows: the files on disk, their readers, and the state after a kill."""

import json
import os
import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from growkern import GrowthError, TeacherCache, cache_teacher
from growkern.publish.manifest import write_manifest
from growkern.train.dataset.training_data import TokenBlocks
from growkern.train.model.head import align_labels
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from growkern.train.topk_teacher import computed, store, write as writer
from growkern.train.topk_teacher.store import BITS_AT_ONCE, pack_ids, unpack_ids, write_tensors
from growkern.train.topk_teacher.teacher import rows_of
from testbed.tiny import VOCAB, TinyTokenizer, build, is_causal


def blocks_of(rows=11, length=9, seed=0):
    rng = np.random.default_rng(seed)
    return TokenBlocks(rng.integers(5, VOCAB, (rows, length), dtype=np.int32))


def collator_of(family, **options):
    return CausalLMCollator(TinyTokenizer()) if is_causal(family) else MaskedLMCollator(
        TinyTokenizer(), 0.4, **options
    )  # fmt: skip


def make(directory, family="bert", *, model=None, blocks=None, collator=None, **options):
    defaults = {"k": 5, "temperature": 2.0, "batch_size": 4, "progress": False}
    return cache_teacher(
        model or build(family, layers=1, width=8),
        blocks_of() if blocks is None else blocks,
        directory,
        collator=collator or collator_of(family),
        **(defaults | options),
    )


def test_ids_survive_packing():
    rng = np.random.default_rng(0)
    for vocabulary, k in [(2, 1), (48, 5), (30_522, 64), (128_256, 7), (1 << 25, 3)]:
        bits = max(1, (vocabulary - 1).bit_length())
        ids = rng.integers(0, vocabulary, (6, k))
        ids[0], ids[1] = 0, vocabulary - 1
        packed = pack_ids(ids, bits)
        assert packed.shape == (6, -(-k * bits // 8)) and packed.dtype == np.uint8
        unpacked = unpack_ids(packed, k, bits)
        assert unpacked.dtype == np.int32 and np.array_equal(unpacked, ids)
    assert unpack_ids(np.empty((0, 4), np.uint8), 5, 6).shape == (0, 5)


def test_packing_takes_no_more_memory_for_more_rows():
    ids = np.random.default_rng(0).integers(0, 1 << 18, (60_000, 32)).astype(np.int32)
    tracemalloc.start()
    try:
        packed = pack_ids(ids, 18)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 1.9 million ids of 18 bits; all of them apart take 315 MB
    assert peak < packed.nbytes + 10 * BITS_AT_ONCE + (1 << 20)
    assert (unpack_ids(packed, 32, 18) == ids).all()


def test_everybody_may_read_what_they_may_read_elsewhere(tmp_path):
    plain, tensors = tmp_path / "plain", tmp_path / "tensors"
    plain.touch()
    write_tensors(tensors, {"x": np.ones(3)})
    assert tensors.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("rows", ["labels", "all"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_holds_what_the_model_says(family, rows, dtype, tmp_path):
    model, blocks = build(family, layers=1, width=8), blocks_of()
    collator = collator_of(family)
    options = {"rows": rows, "dtype": dtype, "epochs": 2, "shard_bytes": 300}
    report = make(tmp_path / "c", family, model=model, collator=collator, **options)
    cache = TeacherCache(tmp_path / "c")
    assert len(list((tmp_path / "c").glob("rows-*"))) > 2
    assert len(cache) == report.examples == 22 and report.tokens == 22 * 9
    assert report.bytes == sum(f.stat().st_size for f in (tmp_path / "c").iterdir())

    total = 0
    for epoch in range(2):
        if not is_causal(family):
            collator.set_epoch(epoch)
        # another order and other batches than it was written in
        batch = collator([blocks[i] for i in (7, 0, 10, 3, 4)])
        ids, logprobs = cache.batch(batch)
        assert ids.shape == logprobs.shape == (5, 9, 5) and ids.dtype == torch.int32
        assert str(logprobs.dtype) == f"torch.{dtype}"
        kept = torch.ones(5, 9, dtype=torch.bool)
        if is_causal(family):
            kept[:, -1] = False  # predicts what is not there
        elif rows == "labels":
            kept = batch["labels"] != -100
        assert torch.equal(rows_of(batch, rows, is_causal(family), VOCAB), kept)
        total += int(kept.sum())
        with torch.no_grad():
            logits = model.eval()(input_ids=batch["input_ids"]).logits.double()
        expected = (logits / 2.0).log_softmax(-1)[kept].topk(5, dim=-1)
        assert torch.equal(ids[kept].long(), expected.indices)
        rounding = torch.finfo(getattr(torch, dtype)).eps
        torch.testing.assert_close(
            logprobs[kept].double(), expected.values, rtol=rounding, atol=1e-6
        )
        assert (ids[~kept] == -1).all() and logprobs[~kept].isnan().all()
    assert 0 < total < report.rows
    counts = [len(cache.rows([i])[0]) for i in range(22)]
    assert sum(counts) == report.rows and report.bytes_per_row >= 2 * 3


@pytest.mark.parametrize("rows", ["labels", "all"])
def test_no_row_before_the_first_token(rows, tmp_path):
    tokens = torch.arange(5, 5 + 27).reshape(3, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4], mask[2, 6:] = 0, 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    batch["labels"] = torch.where(mask.bool(), tokens, -100)
    data = [{name: x[i] for name, x in batch.items()} for i in range(3)]
    options = {"blocks": data, "rows": rows, "batch_size": 2}
    options["collator"] = lambda some: {n: torch.stack([x[n] for x in some]) for n in some[0]}
    report = make(tmp_path / "new", "llama", **options)
    kept = mask.bool() & align_labels(mask, causal=True).eq(1)
    assert report.rows == int(kept.sum()) == 17
    ids, logprobs = TeacherCache(tmp_path / "new").batch(batch)
    assert torch.equal((ids >= 0).all(-1), kept)
    assert torch.equal(~logprobs.isnan().any(-1), kept)


@pytest.mark.parametrize("offset", [0.0, -60.0, 900.0])
def test_large_logits_keep_their_digits(offset):
    z = 8 * torch.randn(6, 400, generator=torch.Generator().manual_seed(0)) + offset
    # exact products: the logits are the columns of the head
    ids, log_p = computed.topk_of_head(torch.eye(6), z.T.contiguous(), None, 400, 32, 1.0)
    expected = z.double().log_softmax(-1).gather(1, ids)
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double(), expected, rtol=1.2e-7, atol=2.5e-7)


def test_a_cache_of_a_cache_needs_its_rows(tmp_path):
    make(tmp_path / "a", rows="labels")
    cache = TeacherCache(tmp_path / "a")
    assert make(tmp_path / "b", model=cache).rows == make(tmp_path / "c").rows
    with pytest.raises(GrowthError, match=r"lacks \d+ of \d+ rows that the cache is to have"):
        make(tmp_path / "d", model=cache, rows="all")


def test_padding_and_neighbours_do_not_matter(tmp_path):
    """Rows of unequal length: an example is found whatever it is padded to."""
    rng = np.random.default_rng(1)
    rows = [{"input_ids": rng.integers(5, VOCAB, n).astype(np.int32)} for n in (4, 9, 6, 9, 3)]
    model, collator = build("bert", layers=1, width=8), collator_of("bert")
    report = make(tmp_path / "c", model=model, blocks=rows, rows="all", batch_size=2)
    assert report.tokens == report.rows == 31
    cache = TeacherCache(tmp_path / "c")
    batch = collator([rows[i] for i in (0, 3, 4)])
    ids, logprobs = cache.batch(batch)
    with torch.no_grad():
        logits = model.eval()(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
    expected = (logits.double() / 2).log_softmax(-1).topk(5, dim=-1)
    real = batch["attention_mask"].bool()
    assert torch.equal(ids[real].long(), expected.indices[real])
    torch.testing.assert_close(logprobs[real].double(), expected.values[real], rtol=1e-3, atol=1e-6)


def test_examples_without_rows_and_larger_than_a_file(tmp_path):
    collator, blocks = MaskedLMCollator(TinyTokenizer(), 0.1), blocks_of(8)
    batch = collator([blocks[i] for i in range(8)])
    counts = (batch["labels"] != -100).sum(1).tolist()
    assert 0 in counts and max(counts) > 1
    report = make(tmp_path / "c", collator=collator, blocks=blocks, shard_bytes=1)
    cache = TeacherCache(tmp_path / "c")
    assert [len(cache.rows([i])[0]) for i in range(8)] == counts and report.rows == sum(counts)
    one = make(tmp_path / "one", collator=collator, blocks=blocks)
    assert one.rows == report.rows
    for many, few in zip(
        cache.batch(batch), TeacherCache(tmp_path / "one").batch(batch), strict=True
    ):
        assert torch.equal(many.nan_to_num(), few.nan_to_num())


def test_goes_on_after_a_kill(tmp_path, monkeypatch):
    """Killed while a shard is written: whole ones are kept, the half one is not trusted."""
    whole = make(tmp_path / "whole", shard_bytes=300)
    real, runs = writer.kept_rows, []

    def dies(*args):
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(writer, "kept_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "c", shard_bytes=300)
    assert not (tmp_path / "c").exists()
    staging = tmp_path / ".c.caching"
    shards = sorted(staging.glob("new/rows-*"))
    assert shards and not (staging / "new" / "index.safetensors").exists()
    (staging / "new" / ".rows-00099.safetensors.0a0b.part").write_bytes(b"half")
    kept = shards[0].stat().st_mtime_ns
    again = []
    monkeypatch.setattr(writer, "kept_rows", lambda *args: again.append(1) or real(*args))
    report = make(tmp_path / "c", shard_bytes=300)
    assert (tmp_path / "c" / shards[0].name).stat().st_mtime_ns == kept
    assert len(again) > 0 and len(again) + len(shards) <= len(runs) + 4
    assert report.rows == whole.rows and not staging.exists()
    files = sorted((tmp_path / "whole").iterdir())
    assert [file.name for file in files] == sorted(p.name for p in (tmp_path / "c").iterdir())
    for file in files:
        assert (tmp_path / "c" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-3], lambda raw: raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:]]
)
def test_a_damaged_shard_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(writer, "_write_index", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "c")
    monkeypatch.undo()
    shard = tmp_path / ".c.caching" / "new" / "rows-00000.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    report = make(tmp_path / "c")
    make(tmp_path / "d")
    assert (tmp_path / "c" / shard.name).read_bytes() == (
        tmp_path / "d" / shard.name
    ).read_bytes() and report.rows


def test_a_half_made_cache_of_something_else_is_not_mixed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_write_index", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "c")
    monkeypatch.undo()
    for change in (
        {"temperature": 1.0},
        {"k": 4},
        {"dtype": "bfloat16"},
        {"blocks": blocks_of(seed=1)},
        {"model": build("bert", layers=1, width=8, seed=1)},
        {"collator": collator_of("bert", seed=1)},
    ):
        with pytest.raises(GrowthError, match=r"unfinished work that differs .*--overwrite"):
            make(tmp_path / "c", **change)
    make(tmp_path / "c", temperature=1.0, overwrite=True)
    assert TeacherCache(tmp_path / "c").header.temperature == 1.0
    with pytest.raises(GrowthError, match="exists"):
        make(tmp_path / "c")
    make(tmp_path / "c", overwrite=True)
    assert TeacherCache(tmp_path / "c").header.temperature == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_kill_while_the_old_cache_is_deleted(tmp_path):
    """It costs nothing later: what is left of the old one is swept."""
    make(tmp_path / "c")
    child = os.fork()
    if not child:
        unlink = os.unlink

        def killed(name, *, dir_fd=None):
            if name == "rows-00000.safetensors":
                os._exit(9)
            unlink(name, dir_fd=dir_fd)

        os.unlink = killed
        make(tmp_path / "c", k=4, overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert TeacherCache(tmp_path / "c").header.k == 4 and len(list(tmp_path.iterdir())) == 3
    make(tmp_path / "c", k=3, overwrite=True)
    assert TeacherCache(tmp_path / "c").header.k == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_cache_with_a_manifest_of_another_program_is_not_replaced(tmp_path):
    make(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text('{"name": "my web app", "files": {}}')
    with pytest.raises(GrowthError, match=r"manifest\.json is no file of a teacher cache"):
        make(tmp_path / "c", k=4, overwrite=True)
    assert "my web app" in (tmp_path / "c" / "manifest.json").read_text()


@pytest.mark.parametrize(
    "name", ["notes.md", "runs/model.bin", "empty/", "rows-x.safetensors", "model.safetensors"]
)
def test_a_cache_with_anything_else_in_it_is_not_replaced(tmp_path, name):
    make(tmp_path / "c")
    (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "c" / name).mkdir() if name.endswith("/") else (tmp_path / "c" / name).touch()
    # nor if a record names it
    record = json.loads((tmp_path / "c" / "manifest.json").read_text())
    record["files"][name] = {"bytes": 0, "checksum": ""}
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(record))
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(GrowthError, match=f"{name.strip('/')} is no file of a teacher cache"):
        make(tmp_path / "c", k=4, overwrite=True)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_cache_with_a_damaged_header_is_not_replaced(tmp_path):
    make(tmp_path / "c")
    (tmp_path / "c" / "cache.json").write_text("{")
    for overwrite in (False, True):
        with pytest.raises(GrowthError, match=r"cache\.json: not valid JSON") as refused:
            make(tmp_path / "c", overwrite=overwrite)
        assert "overwrite" not in str(refused.value)


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    """The library that writes the files has errors of its own."""

    def full(*args):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(GrowthError, match=r"rows-00000.*No space left on device; nothing"):
        make(tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["text", "seed", "epoch", "probability"])
def test_rows_of_another_batch_are_refused(change, tmp_path):
    make(tmp_path / "c")
    cache, collator, blocks = TeacherCache(tmp_path / "c"), collator_of("bert"), blocks_of()
    if change == "text":
        blocks = blocks_of(seed=1)
    elif change == "seed":
        collator = collator_of("bert", seed=1)
    elif change == "epoch":
        collator.set_epoch(1)
    else:
        collator = MaskedLMCollator(TinyTokenizer(), 0.5)
    with pytest.raises(GrowthError, match="not in"):
        cache.batch(collator([blocks[i] for i in range(3)]))


def test_what_cannot_be_kept_is_refused(tmp_path):
    def random_masks(features):
        batch = collator_of("bert")(features)
        batch["labels"] = torch.where(torch.rand(batch["labels"].shape) < 0.5, 7, -100)
        return batch

    def nothing(features):
        batch = collator_of("bert")(features)
        return batch | {"labels": torch.full_like(batch["labels"], -100)}

    broken = build("bert", layers=1, width=8)
    broken.base_model.embeddings.LayerNorm.bias.data[0] = float("nan")
    for change, message in [
        ({"k": 0}, "k is 0"),
        ({"k": VOCAB + 1}, "k <= vocab_size"),
        ({"vocab_size": VOCAB + 1}, "k <= vocab_size"),
        ({"temperature": 0.0}, "temperature"),
        ({"rows": "label"}, "did you mean 'labels'"),
        ({"dtype": "fp16"}, "dtype"),
        ({"epochs": 0}, "epochs"),
        ({"collator": random_masks}, "other masks each time"),
        ({"collator": nothing}, "has a row to store"),
        ({"collator": lambda features: {"ids": 1}}, "must give input_ids and labels"),
        ({"model": broken}, "NaN"),
        ({"model": tmp_path / "nowhere"}, "not a checkpoint directory"),
    ]:
        with pytest.raises(GrowthError, match=message):
            make(tmp_path / "c", **change)
        assert not (tmp_path / "c").exists()
        shutil.rmtree(tmp_path / ".c.caching", ignore_errors=True)


def test_what_is_no_cache_is_refused(tmp_path):
    with pytest.raises(GrowthError, match="not a teacher cache"):
        TeacherCache(tmp_path)
    make(tmp_path / "c", shard_bytes=300)
    for name, content, message in [
        ("cache.json", b"{}", "not a cache header of format"),
        ("cache.json", b"\xff", "not a teacher cache"),
        ("index.safetensors", b"", "truncated or corrupt"),
        ("rows-00001.safetensors", None, "truncated or corrupt"),
    ]:
        file = tmp_path / "c" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] if content is None else content)
        with pytest.raises(GrowthError, match=message):
            TeacherCache(tmp_path / "c")
        file.write_bytes(whole)
    TeacherCache(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 4}, "shape"),
        ({"k": 0}, "k is 0: it must lie in 1 .."),
        ({"k": 2**40}, "k is 1099511627776: it must lie in 1 .."),
        ({"k": "4"}, "k is '4'"),
        ({"k": True}, "k is True"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": None}, "temperature is None"),
        ({"examples": 10**9}, "expected"),
        ({"epochs": 0}, "epochs is 0"),
        ({"rows": ["labels"]}, r"rows is \['labels'\]: it must be a text"),
        ({"rows": "label"}, "rows is label: it must be labels or all"),
        ({"dtype": "float8"}, "dtype is float8: it must be float16 or"),
        ({"causal": 0}, "causal is 0"),
        ({"teacher": 3}, "teacher is 3"),
        ({"data": "0" * 64}, "not the index of cache.json"),
        ({"data": [[[[]]]] * 10}, "data is"),
    ],
    ids=str,
)
def test_a_wrong_field_of_a_header_is_named(tmp_path, change, message):
    make(tmp_path / "c", shard_bytes=300)
    file = tmp_path / "c" / "cache.json"
    table = json.loads(file.read_text()) | change
    file.write_text(json.dumps(table))
    with pytest.raises(GrowthError, match=message) as refusal:
        TeacherCache(tmp_path / "c")
    said = str(refusal.value)
    assert str(tmp_path / "c") in said and "\n" not in said and len(said) < 500


# ------------------------------------------------------------------ checksums


def flip(file, at=-1):
    """Change the lowest bit of a byte; the last byte of a shard is that of a log-prob."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def batch_of_all(blocks):
    return collator_of("bert")([blocks[i] for i in range(len(blocks))])


@pytest.mark.parametrize("shard", ["rows-00000.safetensors", "rows-00002.safetensors"])
def test_a_changed_log_prob_is_refused(tmp_path, shard):
    make(tmp_path / "c", shard_bytes=100)
    flip(tmp_path / "c" / shard, -2)
    cache = TeacherCache(tmp_path / "c")
    # twice, and as a data worker has it
    for each in (cache, cache, pickle.loads(pickle.dumps(cache))):
        with pytest.raises(GrowthError, match=f"{shard} was changed: make the cache again"):
            each.batch(batch_of_all(blocks_of()))


def test_a_changed_header_or_index_is_refused(tmp_path):
    make(tmp_path / "c")
    header, index = (tmp_path / "c" / name for name in ("cache.json", "index.safetensors"))
    table = json.loads(header.read_text())
    header.write_text(json.dumps(table | {"temperature": 3.0}))
    with pytest.raises(GrowthError, match=r"cache\.json (was changed|has)"):
        TeacherCache(tmp_path / "c")
    header.write_text(json.dumps(table, indent=1) + "\n")
    TeacherCache(tmp_path / "c")
    # one row less for an example and one more for the next: nothing but the checksum tells
    arrays = load_file(index)
    arrays["first_row"][1] -= 1
    write_tensors(index, arrays)
    with pytest.raises(GrowthError, match=r"index\.safetensors was changed"):
        TeacherCache(tmp_path / "c")


def test_a_shard_is_compared_once_in_all_processes(tmp_path, monkeypatch):
    make(tmp_path / "c", shard_bytes=100)
    compared, compare = [], store.damage_of
    monkeypatch.setattr(
        store, "damage_of", lambda *args: (compared.append(args[1]), compare(*args))[1]
    )
    cache, batch = TeacherCache(tmp_path / "c"), batch_of_all(blocks_of())
    assert sorted(compared) == ["cache.json", "index.safetensors"]
    cache.batch(batch)
    shards = {file.name for file in (tmp_path / "c").glob("rows-*")}
    assert len(shards) > 2 and set(compared[2:]) == shards and len(compared) == 2 + len(shards)
    copy = pickle.loads(pickle.dumps(cache))
    copy.batch(batch)
    cache.batch(batch)
    assert len(compared) == 2 + len(shards)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"files": {"../x": {}}}'])
def test_a_manifest_that_says_nothing_is_refused(tmp_path, text):
    make(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    if text is not None:
        (tmp_path / "c" / "manifest.json").write_text(text)
    with pytest.raises(GrowthError, match=r"manifest\.json"):
        TeacherCache(tmp_path / "c")


def test_a_checkpoint_directory_and_a_padded_head(tmp_path):
    model = build("bert", layers=1, width=8)
    model.save_pretrained(tmp_path / "model")
    make(tmp_path / "c", model=tmp_path / "model", vocab_size=40, k=40, dtype="float32")
    cache = TeacherCache(tmp_path / "c")
    ids, logprobs = cache.rows(range(len(cache)))
    assert int(ids.max()) < 40 and cache.header.vocab_size == 40
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(ids)))
    make(tmp_path / "same", model=model, vocab_size=40, k=40, dtype="float32")
    assert TeacherCache(tmp_path / "same").header == cache.header


def test_a_model_in_training_is_asked_without_dropout_and_left_as_it_was(tmp_path):
    model = build("bert", layers=1, width=8)
    make(tmp_path / "still", model=model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    make(tmp_path / "c", model=model.train())
    assert model.training and model.config.use_cache
    files = [tmp_path / name / "rows-00000.safetensors" for name in ("still", "c")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "ids, logprobs, message",
    [
        ([7, 7, 8], [-1, -1, -2], "token 7 twice in a row"),
        ([7, 6, 8], [5, 4, 3], "the log-prob 5"),
        ([7, 6, 8], [-0.1, -0.1, -0.1], r"probabilities that add up to 2\.71"),
        ([7, 6, 8], [-1, float("inf"), -2], "the log-prob inf"),
        ([7, 6, 8], [-float("inf"), -1, -2], "the log-prob -inf"),
        ([7, 6, 8], [-1, -2, float("nan")], "the log-prob nan"),
    ],
)
def test_rows_that_no_teacher_gives_are_refused(ids, logprobs, message, tmp_path):
    """The rows of a cache that a stranger wrote, with its checksums."""
    make(tmp_path / "c", k=3, dtype="float32")
    cache = TeacherCache(tmp_path / "c")
    file, count = tmp_path / "c" / "rows-00000.safetensors", len(cache.rows(range(11))[0])
    packed = store.pack_ids(np.array([ids] * count), cache.header.id_bits)
    bits = np.array([logprobs] * count, np.float32).view(np.uint32)
    store.write_tensors(file, {"ids": packed, "logprobs": bits})
    (tmp_path / "c" / "manifest.json").unlink()
    write_manifest(tmp_path / "c")
    with pytest.raises(GrowthError, match=f"is damaged .{message}.*: make the cache again"):
        TeacherCache(tmp_path / "c").rows(range(11))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_and_impossible_tokens_are_no_damage(dtype, tmp_path):
    """A near-certain teacher, whose last columns have the probability 0."""
    model = build("bert").eval()
    bias = model.get_output_embeddings().bias.data
    bias[3], bias[4], bias[9:] = 40.0, 39.9, -float("inf")
    make(tmp_path / "c", model=model, k=12, dtype=dtype)
    ids, logprobs = TeacherCache(tmp_path / "c").rows(range(11))
    assert (ids[:, 0] == 3).all() and logprobs[:, -1].isneginf().all()
