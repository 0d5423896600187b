"""Writes past the page cache: the right bytes in the right places, whatever the disk can do."""

import errno
import itertools
import os

import pytest
import torch

import growkern
from growkern.growth.disk import stream
from growkern.growth.disk.stream import BLOCK_BYTES, Buffer, TargetFile
from testbed.models import LLAMA, random_model

SIZE = 40 * BLOCK_BYTES + 123
# cuts of a file, as pieces of tensors cut it: through blocks, at their ends, inside one
CUTS = [0, 7, 8, 3000, 5000, 9 * BLOCK_BYTES, 20 * BLOCK_BYTES, 33 * BLOCK_BYTES - 1, SIZE]


@pytest.fixture(autouse=True)
def blocks_are_enough(monkeypatch):
    monkeypatch.setattr(stream, "LEAST_DIRECT_BYTES", BLOCK_BYTES)


@pytest.fixture
def direct(monkeypatch):
    """Sizes of the writes that went past the cache."""
    sizes, descriptors = [], set()
    open_direct, pwrite = stream._open_direct, os.pwrite

    def watch_open(path):
        descriptor = open_direct(path)
        descriptors.add(descriptor)
        return descriptor

    def watch_write(file, data, at):
        done = pwrite(file, data, at)
        if file in descriptors:
            sizes.append(done)
        return done

    monkeypatch.setattr(stream, "_open_direct", watch_open)
    monkeypatch.setattr(os, "pwrite", watch_write)
    return sizes


def write_file(path, content, room=None):
    """All pieces of a file, the last ones first, as workers may come."""
    head = CUTS[1]
    file = TargetFile(path, SIZE, content[:head].numpy().tobytes())
    buffer = Buffer()
    for start, stop in reversed(list(itertools.pairwise(CUTS[1:]))):
        data = (room or buffer.room)(stop - start, start)
        data.copy_(content[start:stop])
        file.write(data, start)
        file.sync()
    file.close()


def can_write_direct(path):
    descriptor = stream._open_direct(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


@pytest.fixture
def content():
    return torch.randint(256, (SIZE,), generator=torch.Generator().manual_seed(0)).byte()


def test_whole_blocks_go_past_the_cache(tmp_path, content, direct):
    write_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    if can_write_direct(tmp_path / "file"):
        # all blocks that no cut goes through: the first two, and the one before the last cut
        assert sum(direct) == (SIZE // BLOCK_BYTES - 3) * BLOCK_BYTES


def test_memory_that_lies_otherwise_goes_through_the_cache(tmp_path, content, direct):
    def elsewhere(size, at):
        return Buffer().room(size + 8, at)[8:]

    write_file(tmp_path / "file", content, elsewhere)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert not direct


def test_a_file_system_without_a_way_past_the_cache(tmp_path, content, direct, monkeypatch):
    open_file = os.open

    def refusing(path, flags, *mode):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    write_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert not direct


def test_a_disk_that_wants_other_blocks(tmp_path, content, monkeypatch):
    pwrite, descriptors, refused = os.pwrite, [], []

    def open_plain(path):
        descriptors.append(os.open(path, os.O_WRONLY))
        return descriptors[-1]

    def refusing(file, data, at):
        if file in descriptors:
            refused.append(at)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(file, data, at)

    monkeypatch.setattr(stream, "_open_direct", open_plain)
    monkeypatch.setattr(os, "pwrite", refusing)
    write_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert refused


@pytest.mark.parametrize("bite", [BLOCK_BYTES, BLOCK_BYTES + 512])
def test_a_disk_takes_a_direct_write_in_bites(tmp_path, content, direct, monkeypatch, bite):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:bite], at))
    write_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()


def test_a_grown_checkpoint_is_the_same_past_the_cache(tmp_path, direct):
    """Tensors of several blocks, none of which begins where a block does."""
    sizes = {"vocab_size": 997, "intermediate_size": 136}
    model = random_model("LlamaForCausalLM", LLAMA | sizes, dtype=torch.float32)
    model.save_pretrained(tmp_path / "source")
    options = {"hidden_size": 40, "max_shard_size": "200kB"}
    growkern.grow_checkpoint(tmp_path / "source", tmp_path / "grown", progress=False, **options)
    growkern.grow(tmp_path / "source", hidden_size=40, progress=False).save_pretrained(
        tmp_path / "saved", max_shard_size="200kB"
    )
    files = sorted(file.name for file in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    assert direct or not can_write_direct(tmp_path / "grown" / files[0])


def test_a_file_with_more_tensors_than_growth_reads_is_refused(monkeypatch):
    monkeypatch.setattr(stream, "MOST_TENSORS", 2)
    shapes = {name: (4,) for name in "abc"}
    assert stream.lay_out(shapes, dict.fromkeys(shapes, torch.float32), 32).sizes
    with pytest.raises(growkern.GrowthError, match=r"would hold 3 tensors.*smaller max_shard_size"):
        stream.lay_out(shapes, dict.fromkeys(shapes, torch.float32), 1000)
