"""Metadata of `torch.distributed.checkpoint` from strangers: lying, damaged, hostile and large."""

import io
import pathlib
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import growkern
from growkern import GrowthError
from growkern.growth.source.distributed import bounds_of, wrong_pieces
from growkern.train.distributed.shards import load_weights
from testbed.models import LLAMA, random_model
from tests.shared.walks import walk

NAME = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def piece(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@pytest.fixture
def source(tmp_path):
    """A distributed checkpoint of a model and its optimizer, and the model."""
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    state = model.state_dict()
    moments = {f"state.{name}.exp_avg": x.clone() for name, x in model.named_parameters()}
    moments |= {k.replace("exp_avg", "exp_avg_sq"): x.abs() for k, x in moments.items()}
    moments |= {f"state.{name}.step": torch.tensor(3.0) for name, _ in model.named_parameters()}
    directory = tmp_path / "source"
    dcp.save({**state, **moments}, checkpoint_id=str(directory), no_dist=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    return directory, model


def edit(directory, change):
    """Change the metadata of a checkpoint."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def rows(directory, name, *bounds):
    """Say that a tensor lies in pieces of these rows, each at a byte of the whole tensor."""

    def change(metadata):
        entry = metadata.state_dict_metadata[name]
        place = metadata.storage_data.pop(MetadataIndex(name, entry.chunks[0].offsets))
        rest = entry.size[1:]
        entry.chunks = [piece((a, *[0] * len(rest)), (b - a, *rest)) for a, b in bounds]
        for i, chunk in enumerate(entry.chunks):
            byte = _StorageInfo(place.relative_path, place.offset + i, 1)
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = byte

    edit(directory, change)


def length_of(model, name):
    return model.state_dict()[name].shape[0]


# each is one way to leave entries without values, or with two
LIES = {
    "none": lambda n: [],
    "the end is missing": lambda n: [(0, n - 1)],
    "the start is missing": lambda n: [(1, n)],
    "a hole": lambda n: [(0, 2), (3, n)],
    "a hole that an overlap makes up for": lambda n: [(0, 3), (2, 4), (5, n)],
    "twice": lambda n: [(0, n), (0, n)],
    "beyond the end": lambda n: [(0, n + 1)],
    "a piece and its half": lambda n: [(0, n), (0, n // 2)],
}


@pytest.mark.parametrize("name", [NAME, NORM])
@pytest.mark.parametrize("lie", LIES)
def test_pieces_that_do_not_fill_a_tensor_are_refused(source, tmp_path, name, lie):
    directory, model = source
    rows(directory, name, *LIES[lie](length_of(model, name)))
    for call in (
        lambda: growkern.plan(directory, num_hidden_layers=4),
        lambda: growkern.grow_checkpoint(directory, tmp_path / "large", num_hidden_layers=4),
    ):
        with pytest.raises(GrowthError, match=rf"\.metadata: {name} of shape .*: copy or save"):
            call()
    assert not (tmp_path / "large").exists()


def test_an_optimizer_whose_pieces_do_not_fill_it_is_refused(source):
    directory, model = source
    rows(directory, f"state.{NAME}.exp_avg", (0, 2))
    grown = growkern.grow(model, num_hidden_layers=4)
    adam = torch.optim.AdamW(grown.parameters())
    with pytest.raises(GrowthError, match=r"exp_avg of shape .* entries lie in no piece"):
        growkern.grow_optimizer_into(grown, adam, directory)


def test_a_checkpoint_of_a_run_whose_pieces_do_not_fill_it_is_refused(tmp_path):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "weights"), no_dist=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_weights(model, tmp_path)
    assert all(p.any() for p in model.parameters())
    rows(tmp_path / "weights", NAME, (1, length_of(model, NAME)))
    with pytest.raises(GrowthError, match="entries lie in no piece"):
        load_weights(model, tmp_path)


def test_a_checkpoint_of_a_run_runs_no_code(tmp_path):
    """`export` reads checkpoints that may be a stranger's."""
    (tmp_path / "weights").mkdir()
    code = b"cposix\nmkdir\n(V" + str(tmp_path / "ran").encode() + b"\ntR."
    (tmp_path / "weights" / ".metadata").write_bytes(code)
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    with pytest.raises(GrowthError, match="not the metadata of a distributed checkpoint"):
        load_weights(model, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_and_truncated_files_are_refused_before_work(source, tmp_path):
    directory, _ = source
    (file,) = directory.glob("*.distcp")
    content = file.read_bytes()
    for data in (content[:1000], None):
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(GrowthError, match=r"distcp is missing or truncated: copy"):
            growkern.plan(directory, num_hidden_layers=4)
        file.touch()


def test_a_tensor_in_many_pieces_is_read_piece_by_piece(source, tmp_path):
    """Pieces of every size, also empty ones, of a file that PyTorch wrote in one piece each."""
    _, model = source
    state = {name: x.clone() for name, x in model.state_dict().items()}
    count, width = state[NAME].shape
    parts = {f"part{i}": state[NAME][i : i + 1].clone() for i in range(count)}
    dcp.save({**state, **parts}, checkpoint_id=str(tmp_path / "cut"), no_dist=True)
    model.config.save_pretrained(tmp_path / "cut")

    def change(metadata):
        entry, places = metadata.state_dict_metadata[NAME], metadata.storage_data
        entry.chunks = [piece((i, 0), (1, width)) for i in range(count)]
        for i in reversed(range(count)):
            places[MetadataIndex(NAME, (i, 0))] = places.pop(MetadataIndex(f"part{i}", (0, 0)))
        entry.chunks.insert(3, piece((count, 0), (0, width)))

    edit(tmp_path / "cut", change)
    grown = growkern.grow(tmp_path / "cut", num_hidden_layers=4).state_dict()
    expected = growkern.grow(model, num_hidden_layers=4).state_dict()
    assert all(grown[name].equal(x) for name, x in expected.items())


def archive(value):
    """What `torch.save` writes."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def damaged(value):
    whole = archive(value)
    data = value.numpy().tobytes()
    return whole.replace(data, data[:-1] + bytes([data[-1] ^ 1]))


ARCHIVES = {
    "a larger tensor": (lambda x: archive(x.repeat(2, 1)), r"\(100, 12\)"),
    "another dtype": (lambda x: archive(x.to(torch.int64)), "of torch.int64"),
    "another shape": (lambda x: archive(x.T.contiguous()), r"of torch.float32 \(12, 50\)"),
    "a sparse tensor": (lambda x: archive(x.to_sparse()), "not a dense tensor"),
    "a tensor of no values": (lambda x: archive(x.to("meta")), "does not hold the values"),
    "a dict": (lambda x: archive({"a": 1}), "holds a dict"),
    "code": (lambda x: archive(pathlib.PurePosixPath("x")), "no archive of a tensor"),
    "changed bytes": (damaged, "its checksum differs"),
    "text": (lambda x: b"x" * 100, "no archive of a tensor"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_piece_must_hold_the_tensor_that_the_metadata_describes(source, name):
    directory, model = source
    (file,) = directory.glob("*.distcp")
    make, message = ARCHIVES[name]
    content, start = make(model.state_dict()[NAME]), file.stat().st_size
    file.write_bytes(file.read_bytes() + content)

    def change(metadata):
        place = metadata.storage_data[MetadataIndex(NAME, (0, 0))]
        place.offset, place.length = start, len(content)

    edit(directory, change)
    with pytest.raises(GrowthError, match=message) as refused:
        growkern.grow(directory, num_hidden_layers=4)
    assert "\n" not in str(refused.value)
    shutil.copytree(directory, directory / "weights")
    with pytest.raises(GrowthError, match=message):
        load_weights(model, directory)


def test_a_piece_without_checksums_is_read(source):
    directory, model = source
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(model.state_dict(), checkpoint_id=str(directory), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    grown = growkern.grow(directory, num_hidden_layers=4).state_dict()
    assert grown[NAME].equal(growkern.grow(model, num_hidden_layers=4).state_dict()[NAME])


# ------------------------------------------------------------------ filling


def cut(rng, low, high, times):
    """Cut a box at random places, along random axes."""
    if not times or not len(low):
        return [(low, high)]
    axis = rng.integers(len(low))
    at = rng.integers(low[axis], high[axis] + 1)
    middle_high, middle_low = list(high), list(low)
    middle_high[axis] = middle_low[axis] = at
    return cut(rng, low, middle_high, times - 1) + cut(rng, middle_low, high, times - 1)


@walk(200)
@given(seed=st.integers(0, 2**32))
def test_filling_agrees_with_counting(seed):
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(0, 4))
    size = tuple(map(int, rng.integers(1, 6, axes)))
    boxes = cut(rng, [0] * axes, list(size), int(rng.integers(0, 4)))
    change = rng.choice(["", "moved", "twice", "missing"])
    if change == "moved" and axes:
        i, axis = rng.integers(len(boxes)), rng.integers(axes)
        low, high = map(list, boxes[i])
        by = 1 if low[axis] > 0 else 0
        low[axis], high[axis] = low[axis] - by, high[axis] - by
        boxes[i] = low, high
    elif change == "twice":
        boxes.append(boxes[rng.integers(len(boxes))])
    elif change == "missing":
        boxes.pop(rng.integers(len(boxes)))
    counts = np.zeros(size, int)
    for low, high in boxes:
        counts[tuple(map(slice, low, high))] += 1
    pieces = [
        piece(map(int, low), (int(b - a) for a, b in zip(low, high, strict=True)))
        for low, high in boxes
    ]
    assert (wrong_pieces(size, *bounds_of(pieces, axes)) is None) == bool((counts == 1).all())


def test_an_empty_tensor_is_filled_by_nothing():
    for pieces in ([], [piece((0, 0), (0, 3))]):
        assert wrong_pieces((0, 3), *bounds_of(pieces, 2)) is None


# ------------------------------------------------------------------ pickles


PATH = b"cpathlib\nPosixPath\n"
HOSTILE = {
    "a frame without its length": b"\x80\x04\x95\x00\x00",
    "a long frame": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "code": b"cos\nsystem\n(\x8c\x04trueetR.",
    "a class with another method": PATH + b"N}\x8c\x04nameK\x01s\x86b.",
    "an instance of a class is made again": PATH + b")\x81}\x8c\x01xK\x01sb.",
    "nothing": b"",
    "a list": b"].",
    "another class": b"cbuiltins\nlist\n)\x81.",
    "not a pickle": b"\xff" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_one_line(source, name):
    directory, _ = source
    (directory / ".metadata").write_bytes(HOSTILE[name])
    before = dict(vars(pathlib.PurePath))
    with pytest.raises(GrowthError, match="not the metadata of a distributed") as refused:
        growkern.plan(directory, num_hidden_layers=4)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000
    assert dict(vars(pathlib.PurePath)) == before


def test_a_file_that_is_too_large_is_refused_unread(source):
    directory, _ = source
    with (directory / ".metadata").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(GrowthError, match="more than any metadata has"):
        growkern.plan(directory, num_hidden_layers=4)


CHANGES = {
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "no places": lambda m: setattr(m, "storage_data", [1]),
    "a name that is a number": lambda m: m.state_dict_metadata.update({3: None}),
    "no dtype": lambda m: setattr(m.state_dict_metadata[NAME].properties, "dtype", "float32"),
    "no shape": lambda m: setattr(m.state_dict_metadata[NAME], "size", (3, 4)),
    "a negative size": lambda m: setattr(m.state_dict_metadata[NAME], "size", torch.Size([-1, -5])),
    "a huge size": lambda m: setattr(
        m.state_dict_metadata[NAME], "size", torch.Size([1 << 40, 1 << 40])
    ),
    "pieces that are none": lambda m: setattr(m.state_dict_metadata[NAME], "chunks", [3]),
    "pieces of other axes": lambda m: setattr(
        m.state_dict_metadata[NAME], "chunks", [piece((0,), (4,))]
    ),
    "negative pieces": lambda m: setattr(
        m.state_dict_metadata[NAME], "chunks", [piece((-1, 0), (5, 4))]
    ),
    "a place that is none": lambda m: m.storage_data.update({MetadataIndex("x"): 3}),
    "a place at a negative byte": lambda m: m.storage_data.update(
        {MetadataIndex("x"): _StorageInfo("x.distcp", -1, 3)}
    ),
    "a file that is a number": lambda m: m.storage_data.update(
        {MetadataIndex("x"): _StorageInfo(7, 1, 3)}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_fields_are_refused_in_one_line(source, name):
    directory, _ = source
    edit(directory, CHANGES[name])
    with pytest.raises(GrowthError, match=r"\.metadata: ") as refused:
        growkern.plan(directory, num_hidden_layers=4)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
