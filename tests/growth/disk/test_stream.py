"""Streaming onto disk: the same bytes as saving the model grown in memory, whatever the pieces."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

import growkern
from growkern.growth.disk import checksums, stream
from growkern.growth.options import parse_size
from growkern.growth.plan import axes, pieces
from growkern.growth.plan.tensors import extras
from growkern.growth.source.files import Header, read_headers
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.growth.disk.peak import measured
from tests.growth.disk.small_pieces import cut_small

CLASSES = {
    "BertForMaskedLM": (BERT, {"hidden_size": 24}),
    "GPT2LMHeadModel": (GPT2, {"n_embd": 20}),
    "LlamaForCausalLM": (LLAMA, {"hidden_size": 24, "num_hidden_layers": 3}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    cut_small(monkeypatch.setattr)


def save(tmp_path, class_name, sizes, dtype=torch.float32, **config):
    model = random_model(class_name, sizes, dtype=dtype, **config)
    model.save_pretrained(tmp_path / "source", max_shard_size="20kB")
    return tmp_path / "source"


def grow(source, target, **how):
    return growkern.grow_checkpoint(source, target, progress=False, **how)


def files(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize(
    "dtype, limit, how",
    [
        (torch.float32, "12kB", {}),
        (torch.float32, "1GB", {"method": "fresh"}),
        (torch.bfloat16, "12kB", {"method": "aki"}),
        (torch.bfloat16, "1GB", {"method": "direct_copy"}),
    ],
)
@pytest.mark.parametrize("class_name", CLASSES)
def test_files_are_those_save_pretrained_writes(tmp_path, class_name, dtype, how, limit):
    sizes, target = CLASSES[class_name]
    source = save(tmp_path, class_name, sizes, dtype)
    expected = growkern.grow(source, **target, **how)
    expected.save_pretrained(tmp_path / "expected", max_shard_size=limit)
    grow(source, tmp_path / "grown", max_shard_size=limit, **target, **how)
    ours, theirs = files(tmp_path / "grown"), files(tmp_path / "expected")
    assert set(ours) == {*theirs, "lineage.json", "checksums.json"}
    for name in theirs:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("limit", ["1kB", "12kB", "30kB"])
def test_shards_hold_what_their_index_says(tmp_path, limit):
    source = save(tmp_path, "LlamaForCausalLM", LLAMA)
    expected = growkern.grow(source, hidden_size=24)
    grow(source, tmp_path / "grown", hidden_size=24, max_shard_size=limit)
    state = expected.state_dict()
    index = json.loads((tmp_path / "grown" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("grown/*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 1
    for shard in shards:
        names = [name for name, file in index["weight_map"].items() if file == shard.name]
        save_file({n: state.pop(n) for n in names}, tmp_path / "one", metadata={"format": "pt"})
        assert shard.read_bytes() == (tmp_path / "one").read_bytes()
        size = sum(expected.state_dict()[n].nbytes for n in names)
        assert size <= int(limit.removesuffix("kB")) * 1000 or len(names) == 1
    assert not state
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in expected.parameters())
    assert index["metadata"]["total_parameters"] == expected.num_parameters()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


# ------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "text, size",
    [
        ("512MB", 512 * 10**6),
        ("1GiB", 1 << 30),
        (4096, 4096),
        ("1.5kb", 1500),
        (" 2 TB ", 2 * 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size("memory_limit", text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "0", 0, -5, "5 XB", "1e3", None, True, 1.5e300])
def test_bad_sizes(text):
    with pytest.raises(growkern.GrowthError, match="memory_limit="):
        parse_size("memory_limit", text)


def test_too_small_a_limit_names_the_least(tmp_path):
    source = save(tmp_path, "LlamaForCausalLM", LLAMA)
    with pytest.raises(growkern.GrowthError, match=r"limit=1MB.* at least (\d+MB)") as raised:
        grow(source, tmp_path / "grown", hidden_size=24, memory_limit="1MB")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    least = str(raised.value).split()[-1]
    grow(source, tmp_path / "grown", hidden_size=24, memory_limit=least)
    assert (tmp_path / "grown").is_dir()


def test_as_many_workers_as_fit(tmp_path, monkeypatch):
    plan = growkern.plan(save(tmp_path, "LlamaForCausalLM", LLAMA), hidden_size=24)
    monkeypatch.setattr(pieces.os, "sched_getaffinity", lambda _: range(64), raising=False)
    each = pieces._most_in_work(plan)
    least = pieces.FIXED_BYTES + each
    assert pieces.workers_within(plan, least) == 1
    assert pieces.workers_within(plan, least + 2 * each) == 3
    assert pieces.workers_within(plan, 1 << 30) == pieces.MOST_WORKERS
    with pytest.raises(growkern.GrowthError, match="at least"):
        pieces.workers_within(plan, least - 1)


def test_memory_stays_within_its_limit(tmp_path):
    """By the system's own account, in a process that writes four times that."""
    sizes = {**LLAMA, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 45_000, "intermediate_size": 5000})
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(tmp_path / "source")
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    # a tokenizer that is larger than the limit
    with (tmp_path / "source" / "tokenizer.model").open("wb") as file:
        file.truncate(300 << 20)
    how = {"hidden_size": 1024, "num_hidden_layers": 3}
    peak = measured(tmp_path / "source", tmp_path / "grown", "80MB", **how)
    assert (tmp_path / "grown" / "model.safetensors").stat().st_size > 300e6
    assert (tmp_path / "grown" / "tokenizer.model").stat().st_size == 300 << 20
    assert peak < 80


# ---------------------------------------------------------------- checksums


@pytest.fixture
def grown(tmp_path):
    grow(save(tmp_path, "LlamaForCausalLM", LLAMA), tmp_path / "grown", hidden_size=24)
    return tmp_path / "grown"


def flip(header, at):
    with open(header.file, "r+b") as file:
        file.seek(header.start + at)
        byte = file.read(1)[0]
        file.seek(header.start + at)
        file.write(bytes([byte ^ 16]))


def test_every_tensor_is_summed(grown):
    source = grown.parent / "source"
    report = checksums.verify_checksums(grown, source)
    assert report.ok
    for side, directory in (("target", grown), ("source", source)):
        headers = read_headers(directory)
        assert report.checked[side] == len(headers)
        for name, header in headers.items():
            for at in (0, header.nbytes // 2, header.nbytes - 1):
                flip(header, at)
                assert checksums.verify_checksums(grown, source).wrong == (
                    f"{header.file}: {name}",
                )
                flip(header, at)
    assert checksums.verify_checksums(grown, source).ok


def test_sums_do_not_depend_on_the_run(grown, tmp_path):
    again, cut = tmp_path / "again", tmp_path / "cut"
    grow(tmp_path / "source", again, hidden_size=24, memory_limit="50MB")
    assert files(grown) == files(again)
    grow(tmp_path / "source", cut, hidden_size=24, max_shard_size="5kB")
    records = [json.loads((d / "checksums.json").read_text()) for d in (grown, cut)]
    for side in ("source", "target"):
        assert records[0][side] == records[1][side]


def edit(file, change=lambda raw: raw + b" "):
    file.write_bytes(change(file.read_bytes()))


def edit_metadata(grown):
    """Four bytes of a header that no tensor's place hangs on."""
    file = min(grown.glob("*.safetensors"))
    raw = file.read_bytes()
    assert raw.count(b'"pt"') == 1
    file.write_bytes(raw.replace(b'"pt"', b'"tf"'))


def empty(grown, **changes):
    file = grown / "checksums.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


CHANGES = [
    (lambda d: edit(d / "config.json"), "config.json: the file was changed"),
    (lambda d: edit(d / "lineage.json"), "lineage.json: the file was changed"),
    (lambda d: edit(d / "tokenizer.json"), "tokenizer.json: the file was changed"),
    (lambda d: edit(d / "generation_config.json"), "generation_config.json: the file was changed"),
    (
        lambda d: edit(d / "config.json", lambda raw: raw.replace(b"24", b"36")),
        "config.json: the file was changed",
    ),
    (lambda d: edit(d / "model.safetensors.index.json"), "index.json: the file was changed"),
    (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (
        lambda d: (d / "additional_chat_templates" / "tool.jinja").unlink(),
        "additional_chat_templates/tool.jinja is missing",
    ),
    (lambda d: edit_metadata(d), ".safetensors: the header was changed"),
    (lambda d: max(d.glob("*.safetensors")).unlink(), ".safetensors is missing"),
    (lambda d: save_file({"a": torch.ones(2)}, d / "extra.safetensors"), "weights were added"),
    (lambda d: save_file({"a": torch.ones(2)}, d / "model.safetensors"), "weights were added"),
    (lambda d: (d / "pytorch_model.bin").write_bytes(b"x"), "weights were added"),
    (lambda d: empty(d, target={}), "model.norm.weight is not in the record"),
    (lambda d: empty(d, files={}), "config.json is not in the record"),
]


@pytest.fixture
def with_tokenizer(tmp_path):
    source = save(tmp_path, "LlamaForCausalLM", LLAMA)
    (source / "tokenizer.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    grow(source, tmp_path / "grown", hidden_size=24, max_shard_size="20kB")
    return tmp_path / "grown"


@pytest.mark.parametrize("change, message", CHANGES, ids=[message for _, message in CHANGES])
def test_every_file_is_summed(with_tokenizer, change, message):
    assert checksums.verify_checksums(with_tokenizer).ok
    change(with_tokenizer)
    wrong = checksums.verify_checksums(with_tokenizer).wrong
    assert any(message in line for line in wrong), wrong


def test_a_source_that_was_not_read_is_not_compared(tmp_path):
    source = save(tmp_path, "LlamaForCausalLM", LLAMA)
    grow(source, tmp_path / "grown", hidden_size=24, method="random")
    report = checksums.verify_checksums(tmp_path / "grown", source)
    assert report.ok and report.checked["source"] == 0


def test_what_is_no_weight_may_be_added(with_tokenizer):
    for name in ("README.md", "optimizer.pt", "training_args.bin", "trainer_state.json"):
        (with_tokenizer / name).write_text("mine")
    (with_tokenizer / "checkpoint-7").mkdir()
    (with_tokenizer / "checkpoint-7" / "model.safetensors").write_text("trained")
    assert checksums.verify_checksums(with_tokenizer).ok


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no checksums.json"),
        ("", "not valid JSON"),
        ("[1]", "not a record"),
        ("[" * 100_000, "not valid JSON"),
        (
            '{"format": 1, "piece_bytes": 0, "files": {}, "source": {}, "target": {}, '
            '"algorithm": "xxh3_128"}',
            "piece_bytes is 0",
        ),
        (
            '{"format": 1, "piece_bytes": 9, "files": {}, "source": {}, "target": {}, '
            '"algorithm": "md5"}',
            "made with 'md5'",
        ),
    ],
)
def test_a_record_that_is_none(grown, text, message):
    (grown / "checksums.json").unlink()
    if text is not None:
        (grown / "checksums.json").write_text(text)
    with pytest.raises(growkern.GrowthError, match=message):
        checksums.verify_checksums(grown)


def test_a_recorded_tensor_that_is_gone(grown):
    file = grown / "checksums.json"
    record = json.loads(file.read_text())
    record["target"]["more"] = "0"
    file.write_text(json.dumps(record))
    assert checksums.verify_checksums(grown).wrong == (f"{grown}: more is missing",)


def test_pieces_cover_every_shape():
    for shape in [(), (1,), (7,), (3, 200), (5, 0), (0, 4), (2, 3, 50)]:
        blocks = checksums.row_blocks(shape, 4)
        ends = [0, *(stop for _, stop in blocks)]
        assert [start for start, _ in blocks] == ends[:-1]
        assert ends[-1] == (shape[0] if shape else 1)
    assert stream.row_blocks is checksums.row_blocks


@pytest.mark.parametrize("class_name, width", [("GPT2LMHeadModel", 20), ("BertForMaskedLM", 20)])
def test_pieces_share_maps_and_sums(tmp_path, monkeypatch, class_name, width):
    """At an uneven width: a map is made once per axis, a source row is summed once."""
    sizes, target = CLASSES[class_name]
    source = save(tmp_path, class_name, sizes)
    made, read = Counter(), Counter()
    make, rows = axes._make_axis_map, Header.rows

    def counting_map(plan, task, axis, size):
        made[task.name, axis] += 1
        return make(plan, task, axis, size)

    def counting_rows(self, start, stop):
        if Path(self.file).parent == source:
            read[self.raw_name] += (stop - start) / max(1, self.shape[0])
        return rows(self, start, stop)

    monkeypatch.setattr(axes, "_make_axis_map", counting_map)
    monkeypatch.setattr(Header, "rows", counting_rows)
    monkeypatch.setattr(extras, "SUMMED_BYTES", 100)
    grow(source, tmp_path / "grown", **dict.fromkeys(target, width))
    assert len(made) > 20 and set(made.values()) == {1}
    # once to look for NaN, and once for sums where extra coordinates need them
    assert set(map(round, read.values())) == {1, 2}


@pytest.mark.parametrize("size", [4, 12, 37, 100])
def test_sums_do_not_hang_on_where_the_file_keeps_what_they_add(size):
    """Matrix products add in an order that depends on the alignment of their operands."""
    rng = torch.Generator().manual_seed(size)
    value, functional = torch.randn(2, size, generator=rng, dtype=torch.float64)
    source = SimpleNamespace(headers={})
    plan = SimpleNamespace(source=source, sum_dtype=lambda _value: torch.float64)
    sums = set()
    for offset in range(8):
        kept = torch.zeros(size + 8, dtype=torch.float64)[offset : offset + size].copy_(value)
        rows = extras._sum_rows(plan, "in memory", kept, functional[None])
        sums.add(rows.item())
    assert len(sums) == 1
