"""A run is resolved before any work: each rule is asked once, and has a message."""

import dis
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from dataclasses import replace
from types import CodeType

import pytest
import torch
from transformers import AlbertConfig, AlbertForMaskedLM

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageConfig, TwoStageTrainer, run as train
from growkern.errors import GrowthWarning
from growkern.train import rules
from growkern.train.loop.checks import length_of_run, steps_per_epoch
from growkern.train.run import resolve as resolving, start
from growkern.train.run.file import load_run
from growkern.train.run.resolve import resolve
from testbed.tiny import VOCAB, arguments, build
from tests.train.model.test_language_model import edit
from tests.train.run.test_run import RUN, save_tokenizer, workplace  # noqa: F401
from tests.train.topk_teacher.test_teacher_cache import make as make_cache


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_resolved_run_has_everything_opened(workplace):  # noqa: F811
    with pytest.warns(GrowthWarning, match=r"a\.txt is training text and validation text"):
        run = resolve(load_run(workplace / "run.toml"), workplace)
    assert run.checkpoint.config.num_hidden_layers == 3
    assert [one.directory for one in run.teachers] == [workplace / "teacher"]
    assert run.data.objective == "mlm" and run.output == workplace / "out"
    assert list(run.inputs) == ["model", "teacher"]
    args = run.args
    assert next(run.model.parameters()).is_meta
    assert run.precision == "fp32" and args.device.type == "cpu"
    assert args.max_steps == 6 and args.optim == "adamw_torch_fused"
    assert not run.output.exists()
    read = (workplace / "text/a.txt").read_bytes()
    # of equal size is not enough, and another name does not hide it
    other = replace(run.settings.data, validation=("other",))
    for text, times in ((bytes(len(read)), 0), (read, 1)):
        (workplace / "other").write_bytes(text)
        with warnings.catch_warnings(record=True) as told:
            resolve(replace(run.settings, data=other), workplace)
        assert len(told) == times
    edit(workplace / "teacher/config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(GrowthError, match=r"teacher is quantised \(gptq\): use the full-precision"):
        resolve(load_run(workplace / "run.toml"), workplace)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("name", ["model", "teacher"])
def test_weights_do_not_go_with_a_config_of_before(workplace, name):  # noqa: F811
    """Hours of tokenising may lie between the two."""
    run = resolve(load_run(workplace / "run.toml"), workplace)
    opened = run.checkpoint if name == "model" else run.teachers[0]
    file = workplace / name / "config.json"
    # as a backup does it
    os.link(file, workplace / "linked.json")
    opened.load()
    edit(file, hidden_act="relu")
    with pytest.raises(GrowthError, match=f"{name}/config.json was changed while it was read"):
        opened.load()


ALONE = "[growth]\nat_step = 3\nnew_layers_steps = 1\nnum_hidden_layers = "
STAGES = "[two_stage]\nlayers_per_block = 1\nstage1_steps = 3\n"
TEXTS = 'train = ["text/*.txt"]\nvalidation = ["text/a.txt"]'
OTHERS = {
    "llama": lambda: build("llama", layers=1),
    "t5": lambda: build("t5", layers=3),
    "start": lambda: build("t5", layers=1),
    "foreign": lambda: build("bert", layers=1, width=8),
    "albert": lambda: AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCAB, embedding_size=8, hidden_size=16, num_attention_heads=2,
            intermediate_size=24,
        )
    ),
}  # fmt: skip
GROWN = """[growth]
source = "teacher"
num_hidden_layers = 3
optimizer = "no.pt"
moments = "grow"
"""
LATER = '[growth]\nat_step = 3\nnum_hidden_layers = 4\nmoments = "grow"\n[trainer]\noptim = "sgd"'
TWO = 'paths = ["teacher", "model"]'
UNFIT = {
    "a tail of a live teacher": (
        ("end_step = 4", 'end_step = 4\ntail = "bucket"'),
        "tail is 'bucket', but a model gives every token its probability: leave it out",
    ),
    "one weight for two teachers": (
        (
            'end_step = 4\n[teacher]\npaths = ["teacher"]',
            f"end_step = 4\nteacher_weights = [1.0]\n[teacher]\n{TWO}",
        ),
        "1 teacher_weights for 2 teachers: give one weight per teacher",
    ),
    "a metric that no evaluation gives": (
        ("[output]", "[trainer]\nmetric_for_best_model = 'los'\n[output]"),
        "metric_for_best_model is 'los', which an evaluation does not give; did you mean 'loss'",
    ),
    "balanced experts without a router": (
        ("[training]", "[training]\nexpert_balancing = 0.1"),
        "BertForMaskedLM has no router with a bias that only chooses experts",
    ),
    "more layers per block than layers": (
        ("layers_per_block = 1", "layers_per_block = 4"),
        "layers_per_block is 4, but the model has 3 layers: give 3 or less",
    ),
    "moments that cannot grow": (
        ("[output]", f"{LATER}\n[output]"),
        'the state of sgd cannot be grown: set moments to "reset" in all growths',
    ),
    "a teacher of the next token for masked tokens": (
        ('paths = ["teacher"]', 'paths = ["llama"]'),
        "teacher 0 (LlamaForCausalLM) predicts the next token, but the student predicts masked",
    ),
    "a teacher of two stacks": (
        ('paths = ["teacher"]', 'paths = ["t5"]'),
        "the teacher (T5ForConditionalGeneration) and the model (BertForMaskedLM) differ, as one",
    ),
    "a teacher with another first token": (
        ('path = "model"', 'path = "t5"'),
        ('paths = ["teacher"]', 'paths = ["start"]'),
        (TEXTS, 'train = ["text/a.jsonl"]\ntarget_column = "other"'),
        ("eval_every = 3\n", ""),
        "starts a decoder's text and fills gaps with the tokens (1, 0), the model with (0, 0)",
    ),
    "a teacher with another tokenizer": (
        ('paths = ["teacher"]', 'paths = ["foreign"]'),
        "teacher 0 has another tokenizer than the student",
    ),
    "the optimizer of a growth that was not": (
        ("[training]", '[training]\noptimizer = "growth-adamw"'),
        "optimizer is 'growth-adamw', but the model was not grown: load it from the directory",
    ),
    "a second warm-up of a model that was not grown": (
        ("[training]", "[optimizer]\nrewarm_steps = 2\n[training]"),
        "optimizer.rewarm_steps is for a model that was grown, and trains with GrowthAdamW",
    ),
    "Muon of a model without blocks": (
        ('path = "model"', 'path = "albert"'),
        (STAGES, ""),
        ("[training]", '[training]\noptimizer = "muon"'),
        "optimizer is 'muon', but AlbertForMaskedLM has no list of transformer blocks",
    ),
    "new layers alone without new layers": (
        ("[output]", f"{ALONE}3\nhidden_size = 32\n[output]"),
        "the growth at step 3: new_layers_steps needs new layers above the old ones, but 3 layers",
    ),
    "new layers alone among the old ones": (
        ("[output]", f"{ALONE}6\ndepth = 'identity'\n[output]"),
        "but 3 layers become 6 with depth='identity': leave it out",
    ),
    "new layers alone in stage 1": (
        ("[output]", f"{ALONE}6\n[output]".replace("at_step = 3", "at_step = 2")),
        "the growth at step 2 lets only its new layers train, for new_layers_steps=1, while stage",
    ),
    "an optimizer state that is not there": (
        ('[model]\npath = "model"\n', GROWN),
        "no.pt: no such file",
    ),
    "a cache of another objective": (
        ('paths = ["teacher"]', 'cache = "next"'),
        "holds a teacher that predicts the next token, but the student predicts masked tokens",
    ),
    "a cache of another vocabulary": (
        ('paths = ["teacher"]', 'cache = "large"'),
        "has a vocabulary of 96 tokens, but the student's head has 48 columns",
    ),
    "a share of masks without masks": (
        ('path = "model"', 'path = "llama"'),
        ('paths = ["teacher"]', 'paths = ["llama"]'),
        ("sequence_length = 16", "sequence_length = 16\nmasking_probability = 0.2"),
        "no tokens are masked with the objective 'clm', or with data.labels_column: leave it",
    ),
    "text for evaluation beside records": (
        ('train = ["text/*.txt"]', 'train = ["text/a.jsonl"]\ninput_ids_column = "ids"'),
        "data.validation is plain text, which has no column 'ids': give files of records or",
    ),
    "a tokenizer without sentinels": (
        ('path = "model"', 'path = "t5"'),
        ('paths = ["teacher"]', 'paths = ["t5"]'),
        "span corruption needs a tokenizer with the tokens <extra_id_0>",
    ),
    "a precision against the arguments of the launcher": (
        "precision is 'fp32', also where a run file says nothing, but the environment variable",
    ),
}


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_before_data_and_weights(workplace, monkeypatch, case):  # noqa: F811
    *changes, match = UNFIT[case]
    text = RUN
    for old, new in changes:
        assert text.count(old) >= 1
        text = text.replace(old, new)
    if not any(changes):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    (workplace / "run.toml").write_text(text)
    (workplace / "text" / "a.jsonl").write_text('{"text": "w1 w2", "other": "w3 w4"}\n')
    for name, make in OTHERS.items():
        if f'"{name}"' in text:
            make().save_pretrained(workplace / name)
            save_tokenizer(workplace / name, words="v" if name == "foreign" else "w")
            if name == "start":
                edit(workplace / name / "config.json", decoder_start_token_id=1)
    if "cache =" in text:
        family, size = ("llama", VOCAB) if "next" in text else ("bert", 2 * VOCAB)
        model = build(family, layers=1, width=8, vocab_size=size)
        make_cache(workplace / re.search('cache = "(.*)"', text)[1], family, model=model)
    monkeypatch.setattr(start, "read_data", None)
    monkeypatch.setattr(start, "build_model", None)
    monkeypatch.setattr(resolving, "load_model", None)
    with pytest.raises(GrowthError, match=re.escape(match)):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_long_stage_1_is_refused_before_weights(workplace, monkeypatch):  # noqa: F811
    """Of two epochs nobody knows the steps before the data was cut into rows."""
    (workplace / "run.toml").write_text(RUN.replace("stage1_steps = 3", "stage1_epochs = 300"))
    monkeypatch.setattr(start, "build_model", None)
    match = r"stage1_epochs is 300.0, which makes \d+ steps of \d+ per epoch: it must not be more"
    with pytest.raises(GrowthError, match=match):
        train(workplace / "run.toml", progress=False)
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_steps_of_an_epoch_are_those_of_the_loader(tmp_path, drop, accumulation):
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 23
    args = arguments(
        tmp_path, max_steps=4, dataloader_drop_last=drop, per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer = TwoStageTrainer(build("bert"), args, train_dataset=rows)
    assert (
        steps_per_epoch(len(rows), args)
        == length_of_run(args, len(trainer.get_train_dataloader()))[0]
    )


# of records that are made again with other values, and of each model, module or source
OFTEN = {"data", "distributed", "checkpoint", "checkpointing", "source"}
CHECKS = ("check_switches", "check_arguments", "check_growths")


def facts_of(rule):
    """The attributes of a record that a rule reads, in its condition and in its message."""
    codes, names = [rule.broken.__code__], set(re.findall(r"\{x\.(\w+)", rule.why + rule.fix))
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        steps = list(dis.get_instructions(code))
        owners = [step.argval if step.opname.startswith("LOAD_") else None for step in steps]
        names |= {
            step.argval
            for owner, step in zip(owners, steps[1:], strict=False)
            if owner == "x" and step.opname == "LOAD_ATTR"
        }
    return names


@pytest.fixture
def asked(monkeypatch):
    """How often each rule was asked, by its record, and each function that checks, by its name.

    A record must have all facts of its rules, also those that a right one does not need.
    """
    counts = Counter()
    wanted = defaultdict(set)
    for rule in rules.RULES:
        wanted[rule.of] |= facts_of(rule)

    def counting(name, function):
        def counted(*args, **options):
            counts[name] += 1
            missing = {fact for fact in wanted[name] if not hasattr(args[0], fact)}
            assert not missing, f"{name!r} lacks {missing}"
            return function(*args, **options)

        return counted

    first = {rule.of: rule for rule in reversed(rules.RULES)}
    monkeypatch.setattr(
        rules,
        "RULES",
        tuple(
            rule._replace(broken=counting(rule.of, rule.broken)) if rule is first[rule.of] else rule
            for rule in rules.RULES
        ),
    )
    for name in CHECKS:
        for module in [m for n, m in sys.modules.items() if n.startswith("growkern.")]:
            if name in vars(module):
                monkeypatch.setattr(module, name, counting(name, vars(module)[name]))
    return counts


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_run_file_is_checked_once(workplace, asked):  # noqa: F811
    train(workplace / "run.toml", progress=False)
    wanted = {"arguments", "block", "teachers", "arguments' optimizer", "precision"}
    assert wanted | set(CHECKS[:2]) <= asked.keys()
    assert {name: n for name, n in asked.items() if n > 1 and name not in OFTEN} == {}


def test_a_trainer_in_python_is_checked_once(tmp_path, asked):
    options = {
        "two_stage": TwoStageConfig(1, stage1_steps=2),
        "teacher": build("bert"),
        "inheritance": InheritanceSchedule(end_step=2),
        "growth": [growkern.GrowthStep(at_step=3, sizes={"num_hidden_layers": 6})],
    }
    TwoStageTrainer(
        build("bert"), arguments(tmp_path, max_steps=4, save_strategy="steps"), **options
    )
    wanted = {"arguments", "block", "teachers", "arguments' optimizer", "precision"}
    assert wanted | {"growth in a run", *CHECKS} <= asked.keys()
    assert {name: n for name, n in asked.items() if n > 1 and name not in OFTEN} == {}
