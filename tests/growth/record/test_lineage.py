"""The lineage file: what it holds, and what tampering does."""

import json

import pytest
import torch
import transformers

import growkern
from growkern.families.model import ModelSpec
from growkern.growth.disk.checksums import verify_checksums
from growkern.growth.disk.stream import lay_out
from growkern.growth.record import lineage
from growkern.growth.record.lineage import config_dict, read_lineage, record_of, value_text
from growkern.publish.manifest import read_manifest, write_manifest
from testbed.families import FAMILIES
from testbed.models import LLAMA, random_model
from tests.growth.plan.test_matrix import deeper, width


def grow(directory, class_name="LlamaForCausalLM", sizes=LLAMA, **how):
    how = how or {"hidden_size": 24}
    random_model(class_name, sizes, dtype=torch.float32).save_pretrained(directory / "small")
    (directory / "small" / "tokenizer.json").write_text("{}")
    return growkern.grow_checkpoint(directory / "small", directory / "large", progress=False, **how)


def files(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_familys_configs_survive_the_record(tmp_path, model_type):
    model = random_model(*FAMILIES[model_type], dtype=torch.float32)
    plan = growkern.plan(model, **width(model_type, "even"), **deeper(model_type))
    record = {"format": lineage.FORMAT, **record_of(plan), "settings": {}}
    (tmp_path / "lineage.json").write_text(json.dumps(record))
    kept = read_lineage(tmp_path)
    assert config_dict(kept.source_config) == config_dict(plan.source.config)
    assert config_dict(kept.target_config) == config_dict(plan.target_config)


def test_of_a_large_model_it_is_small(tmp_path):
    """A Llama of 70B, its files all hole: headers alone are read."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256}
    config = transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    shapes = ModelSpec.of(config, "LlamaForCausalLM").shapes
    layout = lay_out(shapes, dict.fromkeys(shapes, torch.bfloat16), 50 * 10**9)
    for name, size in layout.sizes.items():
        with open(tmp_path / name, "wb") as file:
            file.write(layout.heads[name])
            file.truncate(size)
    (tmp_path / "model.safetensors.index.json").write_text(layout.index)
    for how, most in (({}, 1e6), ({"symmetry": "split"}, 1e7)):
        record = record_of(growkern.plan(tmp_path, hidden_size=16384, **how))
        assert len(json.dumps(record)) < most


def test_another_source_is_said(tmp_path):
    grow(tmp_path)
    other = tmp_path / "other"
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.bfloat16).save_pretrained(other)
    found = growkern.verify(other, tmp_path / "large")
    assert not found.ok and any("source_dtype" in line for line in found.contradictions)
    sizes = {**LLAMA, "intermediate_size": 30}
    random_model("LlamaForCausalLM", sizes, dtype=torch.float32).save_pretrained(tmp_path / "wide")
    assert "small, not from" in found.failure
    message = "grown from .*/small, not from .*wide: give that.*=20, this source has 30"
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.verify(tmp_path / "wide", tmp_path / "large")


# ---------------------------------------------------------------- tampering


def edit(directory, change):
    file = directory / "large" / "lineage.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def verify(directory):
    return growkern.verify(directory / "small", directory / "large")


@pytest.mark.parametrize(
    "change, where",
    [
        (lambda d: d["maps"]["ffn"].update(read="0.25x40"), "maps.ffn.read"),
        (lambda d: d["layer_maps"].update({"": [1, 0]}), "layer_maps"),
        (lambda d: d["sizes"].update(hidden_size=[12, 36]), "sizes.hidden_size"),
        (lambda d: d["tensors"]["model.norm.weight"].update(source="x"), "tensors.model.norm"),
        (lambda d: d["tensors"].pop("model.norm.weight"), "tensors.model.norm.weight"),
        (lambda d: d.update(exact=False), "exact"),
        (lambda d: d["source_config"].update(rope_theta=1, rms_norm_eps=1.0), "source_config.rms"),
        (lambda d: d["source_files"]["model.safetensors"].update(header="00"), "tensors.header"),
        (lambda d: d.update(family="bert"), "family"),
    ],
)
def test_a_lineage_that_says_otherwise(tmp_path, change, where):
    grow(tmp_path)
    edit(tmp_path, change)
    report = verify(tmp_path)
    assert not report.ok and "the lineage disagrees" in report.failure
    assert any(where in line for line in report.contradictions), report.contradictions


def test_other_versions_are_a_note(tmp_path):
    grow(tmp_path)

    def age(data):
        data["versions"] |= {"growkern": "0.0.1", "torch": "1.0"}
        data["growkern"] = "0.0.1"
        data["findings"][0]["why"] = "as it was worded then"

    edit(tmp_path, age)
    report = verify(tmp_path)
    assert report.ok, report.failure
    of_growkern, of_torch = sorted(report.notes)
    assert f"growkern 0.0.1, this is {growkern.__version__}" in of_growkern
    assert f"torch 1.0, this is {torch.__version__}" in of_torch


def test_a_source_in_memory_has_no_files_to_compare(tmp_path):
    grow(tmp_path)
    source = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert growkern.verify(source, tmp_path / "large").ok


@pytest.mark.parametrize(
    "raw",
    [
        *(b"\xff\xfe\x00", b"", b"[]", b"{}", b"[" * 100_000),
        b'{"tensors": []}',
        b'{"tensors": {"a": 1}}',
        b'{"tensors": {"a": {"source": "b", "source_shape": [1], "shape": ["x"], "axes": ["y"]}}}',
    ],
)
def test_what_is_no_lineage(tmp_path, raw):
    grow(tmp_path)
    (tmp_path / "large" / "lineage.json").write_bytes(raw)
    for call in (lambda: verify(tmp_path), lambda: growkern.growth_plan_of(tmp_path / "large")):
        with pytest.raises(growkern.GrowthError, match=r"lineage\.json: not a growth record"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["maps"].pop("ffn"),
        lambda d: d["maps"]["ffn"].update(read="a lot"),
        lambda d: d["maps"]["ffn"].update(read="1.0x3"),
        lambda d: d.pop("maps"),
        # 80 GB, if it were believed
        lambda d: d["maps"]["stream"].update(write="1.0x9999999999"),
        lambda d: d["maps"]["stream"].update(read_index="0-9999999999"),
        lambda d: d["maps"]["stream"].update(read_index="9-0 0-32"),
        lambda d: d["maps"]["ffn"].update(
            read_index=d["maps"]["ffn"]["read_index"].replace("0-", "100000-100001 2-", 1)
        ),
        lambda d: d["source_config"].update(bos_token_id="first"),
        lambda d: d["target_config"].update(rope_parameters="fast"),
        lambda d: d["options"].update(noise="much"),
        lambda d: d["options"].update(method="magic"),
        lambda d: d["options"].update(more=1),
        lambda d: d.update(dtype="int8"),
        lambda d: d["source_config"].update(model_type="mamba9", architectures=["Mamba9"]),
        lambda d: d["source_config"].update(num_hidden_layers=10**9),
        lambda d: d["source_config"].update(save_pretrained=1),
        lambda d: d["target_config"].update(__deepcopy__=1),
        lambda d: d["settings"].update(speed=9),
    ],
)
def test_a_damaged_lineage_makes_no_plan(tmp_path, change):
    grow(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(growkern.GrowthError, match=r"lineage\.json"):
        growkern.growth_plan_of(tmp_path / "large")


@pytest.mark.parametrize("whose", ["source_config", "target_config"])
def test_more_layers_than_tensors_are_refused_before_a_model_is_built(tmp_path, whose):
    """A model of as many layers takes minutes to build."""
    grow(tmp_path)
    edit(tmp_path, lambda d: d[whose].update(num_hidden_layers=10_000))
    with pytest.raises(growkern.GrowthError, match=r"num_hidden_layers=10000, but the fi"):
        growkern.growth_plan_of(tmp_path / "large")


# ------------------------------------------------------------------ the text


@pytest.mark.parametrize(
    "index, text",
    [([], ""), ([0], "0"), ([0, 1, 2, 0, 1], "0-2 0-1"), ([5, 3, 3, 4, 9], "5 3 3-4 9")],
)
def test_index_maps_as_text(index, text):
    assert lineage.index_text(torch.tensor(index, dtype=torch.int64)) == text


def test_values_as_text_to_the_bit():
    rng = torch.Generator().manual_seed(0)
    values = torch.rand(50, generator=rng, dtype=torch.float64).repeat_interleave(3)
    values = torch.cat([values, torch.tensor([1 / 3, -0.0, 1e-300, 5e-324], dtype=torch.float64)])
    runs = [run.partition("x") for run in value_text(values).split()]
    again = [float(x) for x, _, count in runs for _ in range(int(count or 1))]
    assert torch.equal(torch.tensor(again, dtype=torch.float64), values)
    assert value_text(torch.tensor([0.5, 0.5, -1e-7], dtype=torch.float64)) == "0.5x2 -1e-07"


def test_a_record_of_another_format_names_who_reads_it(tmp_path):
    grow(tmp_path)
    write_manifest(tmp_path / "small")
    readers = {
        tmp_path / "large" / "lineage.json": lambda: read_lineage(tmp_path / "large"),
        tmp_path / "large" / "checksums.json": lambda: verify_checksums(tmp_path / "large"),
        tmp_path / "small" / "manifest.json": lambda: read_manifest(tmp_path / "small"),
    }
    for file, read in readers.items():
        record = json.loads(file.read_text())
        assert record["format"] == 1
        read()
        file.write_text(json.dumps({**record, "format": 2, "growkern": "9.1.0"}))
        with pytest.raises(growkern.GrowthError, match=r"format is 2, .* use growkern 9\.1\.0$"):
            read()
        without = {key: value for key, value in record.items() if key not in ("format", "growkern")}
        file.write_text(json.dumps({**without, "growkern": "0.1.0"}))
        with pytest.raises(growkern.GrowthError, match=r"is missing, .* 1: use growkern 0\.1\.0$"):
            read()
        file.write_text(json.dumps(without))
        with pytest.raises(growkern.GrowthError, match=r"use the version that wrote it$"):
            read()
