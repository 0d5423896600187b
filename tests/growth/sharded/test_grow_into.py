"""Growing into models that are already built and sharded: each part is the whole's, bit for bit."""

import functools
import itertools
import json
import pickle
import shutil

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import growkern
from growkern.growth import sharded
from growkern.growth.record.lineage import TRAINED
from growkern.growth.source.distributed import runs_of
from testbed.forked_ranks import on_ranks
from testbed.models import BERT, GPT2, LLAMA, outputs, random_model
from tests.growth.optimizer.ranks import KINDS
from tests.growth.plan.test_families import CASES as FAMILIES
from tests.growth.sharded.ranks import CASES, GROWN_CHECKPOINT, OPTIMIZERS, RANKS


def launch(ranks, directory):
    """The results of every rank of a run of tests.growth.sharded.ranks."""
    on_ranks(ranks, "tests.growth.sharded.ranks", directory)
    files = [directory / f"rank-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return launch(4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def two_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two_ranks(two_directory):
    return launch(2, two_directory)


def check_ranks(name, ranks):
    _, sizes, config, how, kind = CASES[name]
    assert all(rank["canary"] == 1 for rank in ranks)
    # of a shorter part, memory is that of the longest
    held = max(rank[name].get("held", 0) for rank in ranks)
    for rank in (rank[name] for rank in ranks):
        assert rank["wrong"] == rank["buffers"] == []
        assert rank["collectives"] == 0
        assert rank["sharded"] > 0
        assert rank["bytes"] == rank["all bytes"]
        assert rank["tied"] == config.get("tie_word_embeddings", True)
        # tensor parallelism sums in another order
        assert rank["output error"] <= (2e-6 if "tp" in name else 0.0)
        uneven = "rms_norm_eps" not in sizes and 20 in how.values()
        # extra coordinates hold means over source tensors, which are summed in float64
        assert rank["largest"] <= (2 * rank["source"] if uneven else held)
        assert "tp" in name or kind == "copies" or held < rank["full"]


@pytest.mark.parametrize("name", RANKS[4])
def test_four_ranks_hold_their_parts_of_the_grown_model(name, four_ranks):
    check_ranks(name, four_ranks)


@pytest.mark.parametrize("name", RANKS[2])
def test_two_ranks_hold_their_parts_of_the_grown_model(name, two_ranks):
    check_ranks(name, two_ranks)


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_ranks_grow_from_what_other_ranks_saved(kind, two_ranks):
    for rank in (rank[f"checkpoint, {kind}"] for rank in two_ranks):
        assert rank["wrong"] == [] and rank["collectives"] == 0
        assert not [name for name in rank["read"] if "optim" in name]
        # half of the tokens' rows, and of the columns that the upper half of the units reads
        whole = kind == "tp"
        assert rank["read"]["model.model.embed_tokens.weight"] == (1.0 if whole else 0.5)
    shares = [rank["checkpoint, tp"]["read"] for rank in two_ranks]
    name = "model.model.layers.0.mlp.up_proj.weight"
    # 17 of 34 rows each: rows 0 to 16 of 20, and rows 17 to 19 and 0 to 13
    assert [share[name] for share in shares] == [17 / 20, 17 / 20]


def test_one_process_grows_from_what_two_saved(two_ranks, two_directory, tmp_path):
    directory = two_directory / "fsdp" / "weights"
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    expected = growkern.grow(source, **GROWN_CHECKPOINT)
    model = target_of(source, "meta", torch.float32, **GROWN_CHECKPOINT)
    growkern.grow_into(model, directory, method="aki")
    assert same_parameters(model, expected)
    assert same_parameters(growkern.grow(directory, **GROWN_CHECKPOINT), expected)
    target = tmp_path / "large"
    growkern.grow_checkpoint(directory, target, progress=False, **GROWN_CHECKPOINT)
    assert same_parameters(transformers.LlamaForCausalLM.from_pretrained(target), expected)


def check_state(name, ranks):
    ranks = [rank[f"state, {name}"] for rank in ranks]
    held = max(rank["held"] for rank in ranks)
    for rank, kind in itertools.product(ranks, KINDS[len(ranks)]):
        found = rank[kind]
        assert found["wrong"] == [], kind
        assert found["lr"] == 0.5
        # what the ranks of this job hold has to meet; files need not
        assert (found["collectives"] > 0) == (kind == "in memory")
        assert found["moving"] > 0
        assert kind != "file" or found["largest"] <= held


@pytest.mark.parametrize("name", OPTIMIZERS[4])
def test_four_ranks_hold_their_parts_of_the_grown_state(name, four_ranks):
    check_state(name, four_ranks)


@pytest.mark.parametrize("name", [*OPTIMIZERS[2], "old slices"])
def test_two_ranks_hold_their_parts_of_the_grown_state(name, two_ranks):
    check_state(name, two_ranks)


def test_sharded_optimizers_take_the_steps_of_whole_ones(two_ranks):
    for rank in (rank["optimizer"] for rank in two_ranks):
        assert rank["difference"] <= 1e-6
        whole, sharded = rank["norms"]
        assert min(whole) > 0.1
        assert sharded == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps(print), "it holds a builtins.print"),
        (pickle.dumps([1]), "not the metadata of"),
        (b"", "not the metadata"),
        (pickle.dumps(Metadata({})), "not the metadata"),
        (
            pickle.dumps(Metadata({"other": None}, storage_data={})),
            "none of the model's tensors; it holds other",
        ),
    ],
)
def test_bad_metadata_is_refused(content, message, tmp_path):
    source = llama()
    source.save_pretrained(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / ".metadata").write_bytes(content)
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.plan(tmp_path / "weights", hidden_size=24)


def test_lost_pieces_of_a_distributed_checkpoint_are_named(two_ranks, two_directory, tmp_path):
    shutil.copytree(two_directory / "tp", tmp_path / "source")
    lost = tmp_path / "source" / "weights" / "__1_0.distcp"
    lost.write_bytes(lost.read_bytes()[:100])
    model = target_of(llama(), "meta", torch.float32, **GROWN_CHECKPOINT)
    with pytest.raises(growkern.GrowthError, match=r"weights.*: model\..* is missing or truncated"):
        growkern.grow_into(model, tmp_path / "source" / "weights")


def test_runs_are_neighbours():
    assert runs_of(torch.tensor([5, 6, 7, 0, 1, 5])) == [(0, 2), (5, 8)]
    assert runs_of(torch.arange(4)) == [(0, 4)]
    assert runs_of(torch.arange(0)) == []
    assert runs_of(torch.arange(0, 80, 2)) == [(0, 79)]


def test_uneven_shards_leave_ranks_without_rows(four_ranks):
    """Two token types on four ranks."""
    assert [rank["bert, fsdp"]["empty"] for rank in four_ranks][-1] > 0


# --------------------------------------------------------------- one process


# one of each family is enough here
EACH = {case[0].partition("For")[0]: case for case in FAMILIES}


@pytest.mark.parametrize("case", EACH.values(), ids=lambda case: case[0])
def test_meta_model_of_every_family_becomes_what_grow_makes(case, monkeypatch):
    """Parameters, in pieces of few rows; buffers that no checkpoint holds; and outputs."""
    small_pieces = functools.partial(sharded.row_blocks, piece_bytes=1000)
    monkeypatch.setattr(sharded, "row_blocks", small_pieces)
    class_name, sizes, config, how = case
    source = random_model(class_name, sizes, **config)
    grown = growkern.grow(source, **how)
    with torch.device("meta"):
        model = type(grown)._from_config(grown.config, dtype=torch.float64)
    options = {k: v for k, v in how.items() if k in ("method", "depth", "symmetry")}
    growkern.grow_into(model.eval(), source, **options)
    for tensors in ("named_parameters", "named_buffers"):
        expected, actual = (dict(getattr(m, tensors)()) for m in (grown, model))
        assert expected.keys() == actual.keys()
        assert all(torch.equal(t, actual[name]) for name, t in expected.items())
    new = outputs(model)
    assert all(torch.equal(x, new[name]) for name, x in outputs(grown).items())


def llama(**config):
    return random_model("LlamaForCausalLM", LLAMA, **config)


def target_of(source, device="cpu", dtype=torch.float64, **how):
    config = growkern.plan(source, **how).target_config
    with torch.device(device):
        return type(source)._from_config(config, dtype=dtype)


def same_parameters(model, grown):
    expected = dict(grown.named_parameters())
    return all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_materialised_model_is_filled_in_place(tmp_path):
    source = llama()
    source.save_pretrained(tmp_path / "small")
    model = target_of(source, hidden_size=24)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    report = growkern.grow_into(model, source)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert same_parameters(model, growkern.grow(source, hidden_size=24))
    assert report.bytes_written == sum(p.nbytes for p in model.parameters())
    assert report.plan is model.growth_plan
    # its record is that of a growth, and says so if it was trained since
    for large, trained in (("large", False), ("trained", True)):
        model.save_pretrained(tmp_path / large)
        names = {path.name for path in (tmp_path / large).iterdir()}
        assert "lineage.json" in names and "README.md" not in names
        report = growkern.verify(tmp_path / "small", tmp_path / large)
        record = json.loads((tmp_path / large / "lineage.json").read_text())
        assert (report.ok, TRAINED in record) == (not trained, trained)
        with torch.no_grad():
            model.lm_head.weight[0] += 1
    assert all(p._is_hf_initialized for p in model.parameters())


def test_the_model_generates_with_the_settings_of_the_source():
    source = llama()
    source.generation_config.update(repetition_penalty=1.9, suppress_tokens=[7, 8])
    large = target_of(source, hidden_size=24)
    growkern.grow_into(large, source)
    found, expected = (m.generation_config.to_dict() for m in (large, source))
    assert found == expected and large.generation_config is not source.generation_config


def test_to_empty_leaves_buffers_undefined_and_growth_restores_them(empty_is_nan):
    source = llama()
    model = target_of(source, "meta", hidden_size=24).to_empty(device="cpu")
    assert model.model.rotary_emb.inv_freq.isnan().any()
    state = torch.get_rng_state()
    growkern.grow_into(model, source)
    # ranks must not draw numbers here: some have less to do than others
    assert torch.equal(state, torch.get_rng_state())
    grown = growkern.grow(source, hidden_size=24)
    assert torch.equal(model.model.rotary_emb.inv_freq, grown.model.rotary_emb.inv_freq)


def test_the_models_dtype_is_the_growths():
    source = llama()
    model = target_of(source, "meta", torch.bfloat16, hidden_size=24)
    growkern.grow_into(model, source)
    assert same_parameters(model, growkern.grow(source, hidden_size=24, dtype=torch.bfloat16))


@pytest.mark.parametrize("wrap", [torch.compile, "layers", "ddp"])
def test_wrapped_models_are_filled(wrap, tmp_path):
    source = llama()
    model = target_of(source, hidden_size=24)
    outer = model
    if wrap == "layers":
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(layer)
    elif wrap == "ddp":
        file = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
        outer = nn.parallel.DistributedDataParallel(model)
        torch.distributed.destroy_process_group()
    else:
        outer = wrap(model)
    growkern.grow_into(outer, source)
    plain = {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}
    grown = growkern.grow(source, hidden_size=24)
    assert all(torch.equal(p, plain[name]) for name, p in grown.named_parameters())


def bert():
    return random_model("BertForMaskedLM", BERT)


def untied():
    model = target_of(llama(tie_word_embeddings=True), hidden_size=24)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    return model


def with_parameter():
    model = target_of(llama(), hidden_size=24)
    model.model.gate = nn.Parameter(torch.zeros(3).double())
    return model


def without_layer():
    model = target_of(llama(), hidden_size=24)
    del model.model.layers[1]
    return model


def wrong_shape():
    model = target_of(llama(), hidden_size=24)
    model.lm_head = nn.Linear(24, 51, bias=False, dtype=torch.float64)
    return model


def two_dtypes():
    model = target_of(llama(), hidden_size=24)
    model.model.norm.float()
    return model


def quantised():
    model = target_of(llama(), hidden_size=24)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def wrong_rotary():
    config = growkern.plan(llama(), head_dim=6).target_config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize(
    "make, source, message",
    [
        (lambda: target_of(bert(), hidden_size=24), llama, "build a transformers.LlamaForCausalLM"),
        (lambda: bert().bert, bert, "is a BertModel, the source a BertForMaskedLM"),
        (lambda: nn.Sequential(bert()), bert, "pass the transformers.PreTrainedModel"),
        (llama, llama, "nothing grows"),
        (untied, lambda: llama(tie_word_embeddings=True), "lm_head.weight and model.embed_tokens"),
        (with_parameter, llama, r"no rule for the model's parameter model.gate \[3\]"),
        (without_layer, llama, "no parameter model.layers.1"),
        (wrong_shape, llama, r"lm_head.weight has shape \[51, 24\], but its config"),
        (two_dtypes, llama, "several dtypes: .*float64 and model.norm.weight torch.float32"),
        (quantised, llama, "quantised"),
        (wrong_rotary, llama, "built with rope_parameters=.*target_config"),
    ],
)
def test_models_that_do_not_fit_are_refused(make, source, message):
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.grow_into(model, source())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def stage_of(model, stack, layers, *without):
    """A stage of a pipeline: some of the layers, by their names in the whole model."""
    place, _, name = stack.rpartition(".")
    blocks = model.get_submodule(stack)
    setattr(model.get_submodule(place), name, nn.ModuleDict({str(i): blocks[i] for i in layers}))
    for part in without:
        place, _, name = part.rpartition(".")
        setattr(model.get_submodule(place), name, None)
    return model


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "source, how, stages",
    [
        (
            llama,
            {"hidden_size": 24, "num_hidden_layers": 4},
            [("model.layers", (0, 1), "lm_head", "model.norm"),
             ("model.layers", (2, 3), "model.embed_tokens")],
        ),
        # the last stage has the tied weight by its second name
        (
            lambda: random_model("GPT2LMHeadModel", GPT2),
            {"n_embd": 24},
            [("transformer.h", (0,), "lm_head", "transformer.ln_f"),
             ("transformer.h", (1,), "transformer.wte", "transformer.wpe")],
        ),
    ],
)  # fmt: skip
def test_stages_of_a_pipeline_are_filled(source, how, stages, device):
    small = source()
    expected = dict(growkern.grow(small, **how).named_parameters(remove_duplicate=False))
    filled = set()
    for stack, layers, *without in stages:
        stage = stage_of(target_of(small, device, **how), stack, layers, *without)
        with pytest.raises(growkern.GrowthError, match='missing="skip"'):
            growkern.grow_into(stage, small)
        report = growkern.grow_into(stage, small, missing="skip")
        found = dict(stage.named_parameters())
        assert all(torch.equal(p, expected[name]) for name, p in found.items())
        assert report.skipped == len(report.plan.tasks) - len(found) > 0
        assert report.bytes_written == sum(p.nbytes for p in found.values())
        filled |= found.keys()
    assert filled == expected.keys()
    assert growkern.grow_into(target_of(small, **how), small, missing="skip").skipped == 0


def test_bad_requests_are_refused():
    model = target_of(llama(), hidden_size=24)
    with pytest.raises(growkern.GrowthError, match="the model's own config gives the sizes"):
        growkern.grow_into(model, llama(), hidden_size=24)
    with pytest.raises(growkern.GrowthError, match="did you mean 'fpi'"):
        growkern.grow_into(model, llama(), method="fpl")
    with pytest.raises(growkern.GrowthError, match="did you mean 'skip'"):
        growkern.grow_into(model, llama(), missing="skipp")


def test_nonfinite_sources_are_refused_by_the_ranks_that_meet_them():
    source = random_model("GPT2LMHeadModel", GPT2)
    source.transformer.h[1].mlp.c_fc.weight.data[3, 2] = float("inf")
    model = target_of(source, "meta", n_embd=24)
    with pytest.raises(growkern.GrowthError, match=r"h.1.mlp.c_fc.weight: 4 of 2304 .*NaN or Inf"):
        growkern.grow_into(model, source)
    growkern.grow_into(model, source, allow_nonfinite=True)
