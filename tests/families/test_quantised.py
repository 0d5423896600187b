"""Sources in fp8 and mxfp4. Truth: the numbers they stand for, by transformers' own code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import growkern
from growkern.errors import GrowthError
from growkern.growth.disk import checksums
from growkern.growth.source.loading import load_model
from growkern.growth.source.source import open_source
from growkern.growth.stored import row_blocks
from growkern.train.model.language_model import load_language_model
from growkern.train.run.resolve import Checkpoint
from testbed.models import random_model
from testbed.relatives import LOCAL, RELATIVES, ROTARY, WIDTHS

BLOCK = (4, 8)
SIZES = {"hidden_size": 20, "moe_intermediate_size": 11, "num_experts": 8}


def whole_by_hand(values, scales):
    rows, cols = (torch.arange(n) // b for n, b in zip(values.shape, BLOCK, strict=True))
    return (values.float() * scales[rows][:, cols]).bfloat16()


def make_fp8(whole, packed):
    """A mixture in bfloat16 in a directory, and in another one the fp8 that stands for it."""
    model = random_model("Qwen3MoeForCausalLM", {**LOCAL, **WIDTHS}, dtype=torch.bfloat16)
    for directory in (whole, packed):
        model.save_pretrained(directory)
    state = load_file(whole / "model.safetensors")
    eight_bits = {}
    for name, weight in state.items():
        if "proj" not in name:
            eight_bits[name] = weight
            continue
        counts = [-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True)]
        scales = torch.rand(counts) + 0.01
        values = (100 * torch.randn(weight.shape)).to(torch.float8_e4m3fn)
        eight_bits |= {name: values, f"{name}_scale_inv": scales}
        state[name] = whole_by_hand(values, scales)
        if not (weight.shape[0] % BLOCK[0] or weight.shape[1] % BLOCK[1]):
            truth = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
            assert torch.equal(state[name], truth)
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    save_file(eight_bits, packed / "model.safetensors", metadata={"format": "pt"})
    say_quantised(packed, quant_method="fp8", weight_block_size=BLOCK)
    return eight_bits


def make_mxfp4(whole, packed):
    """The same for gpt-oss."""
    class_name, sizes, _ = RELATIVES["gpt_oss"]
    sizes = {**sizes, "hidden_size": 32, "intermediate_size": 64}
    model = random_model(class_name, sizes, dtype=torch.bfloat16)
    for directory in (whole, packed):
        model.save_pretrained(directory)
    state = load_file(whole / "model.safetensors")
    four_bits = dict(state)
    for name in [n for n in state if n.endswith("_proj") and "experts" in n]:
        experts, read, written = four_bits.pop(name).shape
        blocks = torch.randint(256, (experts, written, read // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
        four_bits |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        truth = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert truth.shape == state[name].shape
        state[name] = truth
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    save_file(four_bits, packed / "model.safetensors", metadata={"format": "pt"})
    say_quantised(packed, quant_method="mxfp4")


def same_summary(plan, other):
    """Whether two plans are the same but for the options, of which one has `dequantize`."""
    one, two = ({**x.to_dict(), "options": 0} for x in (plan, other))
    return one == two


def say_quantised(directory, **how):
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": how}))


@pytest.mark.parametrize(
    "make, sizes",
    [(make_fp8, SIZES), (make_mxfp4, {"intermediate_size": 96, "num_local_experts": 8})],
)
def test_a_quantised_source_grows_as_what_it_stands_for(make, sizes, tmp_path, monkeypatch):
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    make(whole, packed)
    planned, truth = (growkern.plan(directory, **sizes) for directory in (packed, whole))
    assert "--dequantize" in planned.needs and not truth.needs
    first, other = (str(plan).splitlines()[0] for plan in (planned, truth))
    assert first.endswith("--dequantize: " + other.split(":")[0])
    assert first.startswith("cannot grow") and make.__name__.removeprefix("make_") in first
    undone = growkern.plan(packed, dequantize=True, **sizes)
    assert str(undone).splitlines()[0] == other
    stored = load_file(packed / "model.safetensors").values()
    assert undone.estimate()["read_bytes"] == sum(x.nbytes for x in stored)
    assert same_summary(planned, truth) and planned.dtype == truth.dtype
    with pytest.raises(GrowthError, match=r"is quantised .*dequantize=True \(--dequantize\)"):
        growkern.grow_checkpoint(packed, tmp_path / "grown", **sizes)
    # a teacher may be quantised
    truth, read = (load_model(directory).state_dict() for directory in (whole, packed))
    assert all(torch.equal(read[name], x) for name, x in truth.items())
    # pieces of few rows, which the record of checksums must name
    monkeypatch.setattr(row_blocks, "__defaults__", (300,))
    monkeypatch.setattr(checksums, "PIECE_BYTES", 300)
    how = {**sizes, "progress": False, "symmetry": "noise"}
    growkern.grow_checkpoint(whole, tmp_path / "truth", **how)
    growkern.grow_checkpoint(packed, tmp_path / "grown", dequantize=True, **how)
    truth, grown = (load_file(tmp_path / name / "model.safetensors") for name in ("truth", "grown"))
    assert truth.keys() == grown.keys()
    assert all(torch.equal(truth[name], grown[name]) for name in truth)
    record = json.loads((tmp_path / "grown/lineage.json").read_text())
    assert record["options"]["dequantize"]
    assert "quantization_config" not in json.loads((tmp_path / "grown/config.json").read_text())
    monkeypatch.undo()
    assert growkern.verify(packed, tmp_path / "grown").ok
    assert checksums.verify_checksums(tmp_path / "grown", packed).ok


def test_quantised_sources_that_are_refused(tmp_path):
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    state = make_fp8(whole, packed)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"

    def why(planned=True):
        with pytest.raises(GrowthError) as refused:
            growkern.grow(packed, dequantize=True, hidden_size=24)
        if planned:
            needs = growkern.plan(packed, dequantize=True, hidden_size=24).needs
            assert needs == str(refused.value)
            # the option that was given does not help, and neither does it without
            text = str(growkern.plan(packed, hidden_size=24))
            assert text.startswith("cannot grow") and "--dequantize" not in text
        return str(refused.value)

    say_quantised(packed, quant_method="gptq")
    assert "quantised (gptq): use the full-precision checkpoint" in why()
    assert why().endswith("(--dequantize) reads fp8 and mxfp4, not gptq")
    say_quantised(packed, quant_method="fp8", weight_block_size=[0, 8])
    assert "weight_block_size is [0, 8]" in why()
    say_quantised(packed, quant_method="fp8", weight_block_size=None)
    assert "scales of the shape []" in why(planned=False)
    say_quantised(packed, quant_method="fp8", weight_block_size=(8, 8))
    assert "its weight needs scales of the shape [2, 3]" in why(planned=False)
    say_quantised(packed, quant_method="fp8", weight_block_size=BLOCK)
    del state[name]
    save_file(state, packed / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} is missing" in why(planned=False)
    # files of another tool under the same method
    say_quantised(packed, quant_method="fp8", quant_algo="MIXED_PRECISION")
    assert "quantised (fp8 MIXED_PRECISION)" in why() and "not fp8 MIXED" in why()


def test_only_the_rows_of_a_piece_are_computed(tmp_path):
    make_fp8(tmp_path / "whole", tmp_path / "packed")
    headers = open_source(tmp_path / "packed", dequantize=True).headers
    stored = headers["model.layers.0.self_attn.q_proj.weight"]
    rows = []
    object.__setattr__(stored, "fill", lambda out, *run: rows.append(run))
    stored.read_entries([torch.tensor([1, 5, 2]), torch.arange(3)])
    assert rows == [(1, 3), (5, 6)]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_each_tensor(shape, tmp_path):
    """Truth: the product by hand."""
    model = random_model("Qwen3ForCausalLM", ROTARY, dtype=torch.bfloat16)
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    for directory in (whole, packed):
        model.save_pretrained(directory)
    state = load_file(whole / "model.safetensors")
    eight_bits = dict(state)
    for name in [n for n in state if "proj" in n]:
        values = (100 * torch.randn(state[name].shape)).to(torch.float8_e4m3fn)
        scale = torch.rand(shape) + 0.01
        eight_bits |= {name: values, f"{name}_scale_inv": scale}
        state[name] = (values.float() * scale.flatten()).bfloat16()
    save_file(state, whole / "model.safetensors", metadata={"format": "pt"})
    save_file(eight_bits, packed / "model.safetensors", metadata={"format": "pt"})
    say_quantised(packed, quant_method="fp8")
    for source, more in ((whole, {}), (packed, {"dequantize": True})):
        target = tmp_path / f"{source.name}-large"
        growkern.grow_checkpoint(source, target, hidden_size=24, progress=False, **more)
    truth, grown = (
        load_file(tmp_path / f"{x}-large/model.safetensors") for x in ("whole", "packed")
    )
    assert truth.keys() == grown.keys()
    assert all(torch.equal(truth[name], grown[name]) for name in truth)


@pytest.mark.parametrize(
    "name", ["hf_quant_config.json", "quantize_config.json", "quantization_config.json"]
)
def test_a_second_file_that_says_quantised_is_refused(name, tmp_path):
    random_model("Qwen3ForCausalLM", ROTARY, dtype=torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / name).write_text("{}")
    for read in (
        lambda: growkern.grow(tmp_path, hidden_size=24),
        # a teacher, or the model of a run
        lambda: load_language_model(tmp_path),
        lambda: Checkpoint.of(tmp_path),
    ):
        with pytest.raises(GrowthError, match=name):
            read()
    assert name in growkern.plan(tmp_path, hidden_size=24).needs
    (tmp_path / "model.safetensors").unlink()
    assert str(growkern.plan(tmp_path, hidden_size=24)).startswith(
        "cannot grow as it is: quantised"
    )
    assert name in growkern.plan(tmp_path, hidden_size=24).needs


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_bare_config_that_says_quantised_anywhere(key, nested, tmp_path):
    class_name, sizes, _ = RELATIVES["qwen3_vl"]
    model = random_model(class_name, sizes, dtype=torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    owner = config["text_config"] if nested else config
    owner[key] = {"quant_method": "compressed-tensors"}
    config["architectures"] = [class_name]
    file.write_text(json.dumps(config))
    of_quantised = growkern.plan(tmp_path, intermediate_size=64)
    assert "compressed-tensors" in of_quantised.needs
    assert "compressed-tensors weights" in str(of_quantised).splitlines()[0]
    owner[key] = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    file.write_text(json.dumps(config))
    assert "fp8" in growkern.plan(tmp_path, intermediate_size=64).needs
    plan = growkern.plan(tmp_path, intermediate_size=64, dequantize=True)
    assert key not in json.dumps(plan.target_config.to_dict())
    # as a model that was never quantised
    del owner[key]
    file.write_text(json.dumps(config))
    whole = growkern.plan(tmp_path, intermediate_size=64)
    for other in (plan, of_quantised):
        assert other.target_config.to_dict() == whole.target_config.to_dict()
