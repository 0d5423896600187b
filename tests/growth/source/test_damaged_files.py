"""Damaged checkpoints: whatever the bytes, a GrowthError, in no time and in no memory."""

import json
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

import growkern
from growkern.errors import GrowthWarning
from growkern.growth.source.files import MOST_HEADER_BYTES, read_headers
from growkern.growth.stored import MOST_TENSORS
from testbed.models import LLAMA, random_model
from tests.shared.walks import walk

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
GOOD = save(TENSORS, {"format": "pt"})
INDEX = "model.safetensors.index.json"
FUZZ = walk(150)


def outcome(directory):
    """None for a clean refusal, else the headers; anything else that happens fails the test."""
    try:
        headers = read_headers(directory)
    except growkern.GrowthError as error:
        assert str(directory) in str(error)
        return None
    for file in {header.file for header in headers.values()}:
        # nothing is believed that the format's own library refuses
        with safe_open(file, framework="pt") as shard:
            assert set(shard.keys()) <= headers.keys()
    for header in headers.values():
        tensor = header.read()
        assert tensor.shape == header.shape and tensor.dtype == header.dtype
        tensor.double().sum()
    return headers


def with_header(text):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data + GOOD[-32:]


def entry(shape=(2, 3), begin=0, end=24, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


B = entry([4], 24, 32, "BF16")
BAD_FILES = {
    "empty": b"",
    "seven bytes": GOOD[:7],
    "length only": GOOD[:8],
    "half a header": GOOD[:40],
    "a byte short": GOOD[:-1],
    "a byte long": GOOD + b"\0",
    "a header of spaces": with_header(json.dumps({}).encode() + b" " * MOST_HEADER_BYTES),
    "a header of metadata": with_header({"__metadata__": {"a": "b" * MOST_HEADER_BYTES}}),
    "huge header": struct.pack("<Q", 2**62) + GOOD[8:],
    "largest header": struct.pack("<Q", 2**64 - 1) + GOOD[8:],
    "header past the end": struct.pack("<Q", len(GOOD)) + GOOD[8:],
    "no JSON": with_header(b"\xff" * 64),
    "nested": with_header(b"[" * 100_000),
    "nested objects": with_header(b'{"a":' * 50_000),
    "a list": with_header([1, 2]),
    "overlap": with_header({"a": entry(), "b": entry([4], 16, 24, "BF16")}),
    "gap": with_header({"a": entry(), "b": entry([3], 26, 32, "BF16")}),
    "wrong size": with_header({"a": entry([2, 4]), "b": B}),
    "huge shape": with_header({"a": entry([2**62, 2**62]), "b": B}),
    "negative": with_header({"a": entry([-2, -3]), "b": B}),
    "backwards": with_header({"a": entry((2, 3), 24, 0), "b": B}),
    "past the end": with_header({"a": entry(), "b": entry([2**30], 24, 24 + 2**31, "BF16")}),
    "unknown dtype": with_header({"a": entry(dtype="F7"), "b": B}),
    "dtype growth cannot": with_header({"a": entry([24], dtype="F8_E5M2"), "b": B}),
    "twice": with_header(b'{"a":%s,"a":%s}' % ((json.dumps(entry([4, 2], 0, 32)).encode(),) * 2)),
    "missing field": with_header({"a": {"dtype": "F32", "shape": [2, 3]}, "b": B}),
    "number as shape": with_header({"a": entry([2.0, 3]), "b": B}),
    "truth as shape": with_header({"a": entry([True, 6]), "b": B}),
    "metadata of numbers": with_header({"__metadata__": {"n": 1}, "a": entry(), "b": B}),
    "UTF-16": with_header(json.dumps({"a": entry(), "b": B}).encode("utf-16")),
    "text as shape": with_header({"a": entry("23"), "b": B}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    tracemalloc.start()
    assert outcome(tmp_path) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    random_model("LlamaForCausalLM", LLAMA).save_pretrained(tmp_path / "small")
    (tmp_path / "small" / name).write_text(pointer)
    with pytest.raises(growkern.GrowthError, match=rf"{name} .*git lfs pull"):
        growkern.grow_checkpoint(
            tmp_path / "small", tmp_path / "large", hidden_size=24, progress=False
        )


def test_a_whole_file_whose_header_is_too_large_is_not_called_damaged(tmp_path):
    content = BAD_FILES["a header of metadata"]
    (tmp_path / "model.safetensors").write_bytes(content)
    (length,) = struct.unpack("<Q", content[:8])
    message = f"its header has {length} bytes, more than the {MOST_HEADER_BYTES} that growkern"
    with pytest.raises(growkern.GrowthError, match=message) as refused:
        read_headers(tmp_path)
    assert "corrupt" not in str(refused.value)


def test_a_file_larger_than_memory_is_read(tmp_path):
    """A sparse file of a terabyte: a map of all of it is refused on most machines."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        shape, size = [2**20, 2**18], 2**40
        text = json.dumps({"a": entry(shape, 0, size)}).encode()
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    (header,) = read_headers(tmp_path).values()
    assert header.rows(2**20 - 1, 2**20).sum() == 0


def test_a_good_file_is_not(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    headers = outcome(tmp_path)
    assert headers.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(headers[name].read(), tensor)
        assert torch.equal(headers[name].rows(1, 2), tensor[1:2])


@FUZZ
@given(data=st.data())
def test_changed_bytes(tmp_path, data):
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 33))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    outcome(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    outcome(tmp_path)


sizes = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**63, 2**64, 10**30]), st.none())
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "BOOL", "U8", "F4", ""]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
        "more": st.none(),
    },
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@FUZZ
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), entries | json_values),
    tail=st.integers(0, 64),
)
def test_made_up_headers(tmp_path, header, tail):
    data = json.dumps(header).encode()
    raw = struct.pack("<Q", len(data)) + data + bytes(tail)
    (tmp_path / "model.safetensors").write_bytes(raw)
    outcome(tmp_path)


# -------------------------------------------------------------------- index


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    return tmp_path


SHARDS = ["one.safetensors", "two.safetensors", "..", ".", "", "sub/one.safetensors"]
SHARDS += ["../one.safetensors", "/etc/passwd", "one.safetensors\0", "\ud800", "x" * 5000, INDEX]
GOOD_MAP = {"a": SHARDS[0], "b": SHARDS[1]}


@FUZZ
@given(
    weight_map=st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.sampled_from(SHARDS) | json_values, max_size=3
    )
    | json_values
)
def test_made_up_indexes(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    headers = outcome(sharded)
    if headers is not None:
        assert set(headers) >= set(weight_map) and set(weight_map.values()) <= set(SHARDS[:2])


@FUZZ
@given(at=st.integers(0, 60), byte=st.integers(0, 255), stop=st.integers(0, 60))
def test_changed_bytes_of_an_index(sharded, at, byte, stop):
    raw = bytearray(json.dumps({"weight_map": GOOD_MAP}).encode())
    raw[at] = byte
    (sharded / INDEX).write_bytes(raw)
    outcome(sharded)
    (sharded / INDEX).write_bytes(raw[:stop])
    assert outcome(sharded) is None


@pytest.mark.parametrize(
    "text, message",
    [
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (json.dumps({"weight_map": {}}), "names no tensors"),
        (json.dumps({"weight_map": {**GOOD_MAP, "b": SHARDS[0]}}), "b is not in one"),
        (json.dumps({"weight_map": {**GOOD_MAP, "b": "three"}}), "'three' is missing"),
        (json.dumps({"weight_map": {**GOOD_MAP, "b": "../two.safetensors"}}), "not a plain file"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "'a' is given twice"),
    ],
)
def test_a_lying_index_is_refused(sharded, text, message):
    (sharded / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(growkern.GrowthError, match=message):
        read_headers(sharded)


def test_a_single_file_goes_before_an_index(sharded):
    """As in transformers: the index and its files may be left from an earlier save."""
    save_file({"a": TENSORS["a"] + 1}, sharded / "model.safetensors")
    for index in (json.dumps({"weight_map": GOOD_MAP}), "damaged"):
        (sharded / INDEX).write_text(index)
        with pytest.warns(GrowthWarning, match=f"{INDEX} with its files is ignored"):
            headers = read_headers(sharded)
        assert torch.equal(headers.pop("a").read(), TENSORS["a"] + 1) and not headers


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file(TENSORS, sharded / "two.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": GOOD_MAP}))
    with pytest.raises(growkern.GrowthError, match=r"a is in .*one\.safetensors and in two"):
        read_headers(sharded)


def test_a_file_cut_short_after_it_was_opened(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(GOOD)
    header = read_headers(tmp_path)["b"]
    file.write_bytes(GOOD[:-20])
    with pytest.raises(growkern.GrowthError, match="b cannot be read"):
        header.read()


@pytest.mark.parametrize("code", ["F8_E5M2", "F4", "I8"])
def test_quantised_weights_are_called_what_they_are(tmp_path, code):
    """They are not damage: the message says how to continue."""
    header = with_header({"a": entry([32], 0, 32, code)})
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(growkern.GrowthError, match=f"a has dtype {code}, as in a quantised"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [[1] * 100_000, [2**64 - 1], [2**63, 2]],
    ids=["many axes", "a long axis", "a product of 64 bits"],
)
def test_shapes_of_no_tensor_are_refused_briefly(tmp_path, shape):
    (tmp_path / "model.safetensors").write_bytes(with_header({"a": entry(shape, 0, 32)}))
    with pytest.raises(growkern.GrowthError) as error:
        read_headers(tmp_path)
    assert "truncated or corrupt" in str(error.value) and len(str(error.value)) < 500


def test_more_tensors_than_any_model_has_are_refused(tmp_path):
    header = {f"t{i}": entry([0], 0, 0) for i in range(MOST_TENSORS + 1)}
    (tmp_path / "model.safetensors").write_bytes(with_header(header))
    with pytest.raises(growkern.GrowthError, match=f"{MOST_TENSORS + 1} tensors, more than any"):
        read_headers(tmp_path)
