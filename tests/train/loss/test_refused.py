"""Input that would be trained wrongly in silence is refused with one line, before training."""

import copy
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils import DistributedType, DynamoBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer, inherited_loss, run as train
from growkern.cli.commands import app
from growkern.train.distributed.shards import create_optimizer_state
from growkern.train.loop.checks import check_accelerator
from growkern.train.model.language_model import load_tokenizer
from growkern.train.model.sub_model import layer_stacks
from growkern.train.topk_teacher.computed import ModelTeacher
from testbed.models import random_model
from testbed.relatives import LOCAL
from testbed.tiny import Batches, arguments, build
from tests.train.distributed.conftest import mesh  # noqa: F401
from tests.train.run.test_run import workplace  # noqa: F401

SCHEDULE = InheritanceSchedule(end_step=4)
# those that accelerate reads
SWITCHES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def refuse(match, path, model=None, **options):
    with pytest.raises(GrowthError, match=match) as error:
        TwoStageTrainer(model or build("bert"), arguments(path), **options)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------- tokenizers


def without_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    for file in folder.glob("vocab*"):
        file.unlink()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_a_run_without_tokenizer_files(role, workplace):  # noqa: F811
    without_tokenizer(workplace / role)
    with pytest.raises(GrowthError, match=rf"{role} has no tokenizer files.*: copy"):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("command", ["grow", "verify"])
def test_texts_without_tokenizer_files(workplace, command):  # noqa: F811
    source, target, text = workplace / "model", workplace / "large", workplace / "text" / "a.txt"
    sizes = ["--hidden-size", 32]
    without_tokenizer(source)
    if command == "verify":
        run("grow", source, target, *sizes)
        sizes = []
    with pytest.raises(GrowthError, match="has no tokenizer files"):
        run(command, source, target, *sizes, "--text", text)
    assert target.exists() == (command == "verify")


def run(*words):
    app([str(word) for word in words], standalone_mode=False)


def test_a_tokenizer_of_special_tokens_alone(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    transformers.BertTokenizer(vocab=dict(zip(words, range(5), strict=True))).save_pretrained(
        tmp_path
    )
    with pytest.raises(GrowthError, match="has no tokenizer files"):
        load_tokenizer(tmp_path)


# ----------------------------------------------------------------- teachers


def test_a_teachers_tokenizer_without_the_students(tmp_path):
    options = {"teacher": build("bert"), "inheritance": SCHEDULE, "teacher_tokenizer": object()}
    refuse("without the student's tokenizer", tmp_path, **options)


@pytest.mark.parametrize("role", ["teacher", "model"])
def test_rows_longer_than_a_model_has_positions(role, tmp_path):
    models = {"teacher": build("gpt2", layers=2), "model": build("gpt2", layers=2)}
    models[role].config.n_positions = 8
    row = torch.arange(5, 14)[None]
    batch = {"input_ids": row, "labels": row}
    match = rf"a row has 9 tokens .*, but the {role} \(.*\) has 8 positions: cut the rows"
    with pytest.raises(GrowthError, match=match):
        inherited_loss(models["model"], models["teacher"], batch)
    if role == "teacher":
        options = {"k": 2, "temperature": 1.0, "collator": transformers.default_data_collator}
        rows, teacher = [{"input_ids": row[0], "labels": row[0]}], models["teacher"]
        with pytest.raises(GrowthError, match=match):
            growkern.cache_teacher(teacher, rows, tmp_path / "rows", **options)


def test_quantised_teachers_and_students():
    """bitsandbytes keeps the output projection as it is too, unless it is told otherwise."""
    model, row = build("llama", layers=2), torch.arange(5, 14)[None]
    dynamic = torch.ao.quantization.default_dynamic_qconfig
    names = {name for name, _ in model.named_modules() if name.endswith("_proj")}
    body = torch.ao.quantization.quantize_dynamic(model, dict.fromkeys(names, dynamic))
    whole = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    batch = {"input_ids": row, "labels": row}
    _, parts = inherited_loss(model, body, batch, return_parts=True)
    p, q = (one(row).logits.log_softmax(-1)[0, :-1] for one in (body, model))
    torch.testing.assert_close(parts.kl, (p.exp() * (p - q)).sum(-1).mean().detach())
    with pytest.raises(GrowthError, match=r"a quantised output projection .*: keep this layer"):
        inherited_loss(model, whole, batch)
    with pytest.raises(GrowthError, match="is quantised: its weights cannot be trained"):
        inherited_loss(body, model, batch)


# --------------------------------------------------------------------- data


def test_data_without_a_label(tmp_path):
    data = Batches(9)
    for row in data.rows:
        row["labels"].fill_(-100)
    refuse("not a single label", tmp_path, train_dataset=data)
    data.rows[7]["labels"][0, 3] = 5
    TwoStageTrainer(build("bert"), arguments(tmp_path), train_dataset=data)


def test_a_causal_model_does_not_predict_the_first_token(tmp_path):
    """Its labels vanish when they are shifted, and the loss would be 0."""
    data = Batches(9)
    for row in data.rows:
        row["labels"][:, 1:] = -100
        row["labels"][:, 0] = 5
    match = "training data has not a single label: .* first token"
    refuse(match, tmp_path, build("gpt2"), train_dataset=data)
    TwoStageTrainer(build("bert"), arguments(tmp_path), train_dataset=data)


def test_an_evaluation_without_a_label(tmp_path):
    data = Batches(9)
    for row in data.rows:
        row["labels"].fill_(-100)
    for given in (data, {"a": Batches(3), "b": data}):
        refuse("evaluation data has not a single label", tmp_path, eval_dataset=given)
    trainer = TwoStageTrainer(build("bert"), arguments(tmp_path))
    assert math.isnan(trainer.evaluate(data)["eval_loss"])


def test_data_whose_batches_have_no_labels(tmp_path):
    rows = [{"input_ids": torch.arange(5, 13)}] * 4
    refuse("have no 'labels'", tmp_path, train_dataset=rows)


def test_the_search_for_a_label_draws_no_random_numbers(tmp_path):
    def collator(features):
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
        return transformers.default_data_collator(features)

    states = []
    for data in (None, Batches(4)):
        torch.manual_seed(1)
        np.random.seed(1), random.seed(1)  # noqa: NPY002
        args = arguments(tmp_path)
        TwoStageTrainer(build("bert"), args, train_dataset=data, data_collator=collator)
        found = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002
        states.append(found)
    assert states[0] == states[1]


# ------------------------------------------------------------------- models


def test_an_encoder_that_sees_the_tokens_it_predicts(tmp_path):
    config = build("bert").config
    refuse("see the tokens after them", tmp_path, transformers.BertLMHeadModel(config))
    seeing = transformers.BertLMHeadModel(config)
    student = transformers.BertLMHeadModel(copy.deepcopy(config))
    student.config.is_decoder = True
    refuse("see the tokens after them", tmp_path, student, teacher=seeing, inheritance=SCHEDULE)
    with pytest.raises(GrowthError, match="see the tokens after them"):
        ModelTeacher(seeing, 1)
    config.is_decoder = True
    ModelTeacher(transformers.BertLMHeadModel(config), 1)
    TwoStageTrainer(transformers.BertLMHeadModel(config), arguments(tmp_path))


def test_a_router_whose_loss_is_not_known(tmp_path):
    """The coefficient of JetMoE has another name."""
    sizes = {**LOCAL, "num_key_value_heads": 1, "kv_channels": 4, "output_router_logits": True}
    model = random_model("JetMoeForCausalLM", sizes)
    refuse("router's loss is not", tmp_path, model)
    model.config.output_router_logits = False
    TwoStageTrainer(model, arguments(tmp_path))


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_that_rounds_the_weights_in_training(name, tmp_path):
    with pytest.raises(GrowthError, match="precision='bf16'"):
        TwoStageTrainer(build("bert"), arguments(tmp_path, use_cpu=True, **{name: True}))


# ------------------------------------------------------------ sharded training


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_accelerate(name, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setenv(name, "true")
    with pytest.raises(GrowthError, match=f"variable {name} is 'true'"):
        TwoStageTrainer(build("bert"), args)
    monkeypatch.setenv(name, "false")
    TwoStageTrainer(build("bert"), args)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("name", SWITCHES[:1])
@pytest.mark.parametrize(("value", "found"), [("1", "which shards"), ("maybe", "which is neither")])
def test_switches_before_a_run_file(name, value, found, workplace, monkeypatch):  # noqa: F811
    """The arguments of the run, which follow the switches too, are not made yet."""
    monkeypatch.setenv(name, value)
    with pytest.raises(GrowthError, match=f"variable {name} is '{value}', {found}"):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"distributed_type": DistributedType.FSDP}, "set to FSDP"),
        ({"mixed_precision": "fp8"}, "fp8"),
        ({"backend": DynamoBackend.INDUCTOR}, "compile the whole model"),
    ],
)
def test_accelerate_was_told_elsewhere(told, match, tmp_path):
    own = TwoStageTrainer(build("bert"), arguments(tmp_path)).accelerator
    check_accelerator(own)
    plugin = own.state.dynamo_plugin
    accelerator = SimpleNamespace(
        distributed_type=told.get("distributed_type", own.distributed_type),
        mixed_precision=told.get("mixed_precision", own.mixed_precision),
        state=SimpleNamespace(
            dynamo_plugin=SimpleNamespace(backend=told.get("backend", plugin.backend))
        ),
    )
    with pytest.raises(GrowthError, match=match):
        check_accelerator(accelerator)


def test_models_that_were_sharded_in_part(mesh, tmp_path):  # noqa: F811
    model = build("bert", layers=2)
    fully_shard(layer_stacks(model)[0][0], mesh=mesh)
    refuse("on parts of the model only", tmp_path, model)
    options = {"teacher": model, "inheritance": SCHEDULE}
    refuse("on parts of the teacher only", tmp_path, **options)
    model = build("bert", layers=2)
    fully_shard(model, mesh=mesh, ignored_params={model.cls.predictions.bias})
    refuse("cls.predictions.bias of the model is not sharded", tmp_path, model)


def test_tied_weights_in_groups_of_their_own(mesh, tmp_path):  # noqa: F811
    model = build("bert", layers=2, tied=True)
    fully_shard(model.get_output_embeddings(), mesh=mesh)
    fully_shard(model, mesh=mesh)
    refuse("cls.predictions.decoder and model share a weight.* in one list", tmp_path, model)
    model = build("llama", layers=2, tied=True)
    fully_shard([model.get_input_embeddings(), model.get_output_embeddings()], mesh=mesh)
    TwoStageTrainer(fully_shard(model, mesh=mesh), arguments(tmp_path, use_cpu=True))


def test_a_model_in_distributed_data_parallel(mesh, tmp_path):  # noqa: F811
    model = torch.nn.parallel.DistributedDataParallel(build("bert"))
    refuse("wrapped in DistributedDataParallel: pass model.module", tmp_path, model)


def test_models_that_pytorch_replicates(mesh, tmp_path):  # noqa: F811
    """By DistributedDataParallel in place, and by the groups of FSDP2."""
    for name in ("replicate", "replicate_with_fsdp"):
        module = pytest.importorskip(f"torch.distributed._composable.{name}")
        for role in ("model", "teacher"):
            model = module.replicate(build("bert", layers=2))
            options = {} if role == "model" else {"teacher": model, "inheritance": SCHEDULE}
            match = f"the {role} is replicated by .*: leave replicate out"
            refuse(match, tmp_path, model if role == "model" else None, **options)


def test_a_tensor_parallel_model(mesh, tmp_path):  # noqa: F811
    model = distribute_module(build("llama", layers=2), mesh)
    refuse("the model is tensor-parallel: .* not supported", tmp_path, model)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}])
def test_optimizer_state_is_that_of_a_step(kind, options, wide):
    p = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
    p.grad = torch.zeros_like(p)
    stepped, ours = kind([p], **options), kind([p], **options)
    if wide:
        torch.set_default_dtype(torch.float64)
    try:
        stepped.step()
        create_optimizer_state(ours)
    finally:
        torch.set_default_dtype(torch.float32)
    expected, found = (
        {key: (value.dtype, value.device, value.shape) for key, value in one.state[p].items()}
        for one in (stepped, ours)
    )
    assert found == expected
    assert not any(value.any() for value in ours.state[p].values())
