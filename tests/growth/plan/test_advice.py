"""Costs against counts made by hand, and advice where and only where it applies."""

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

import growkern
import growkern.growth.plan.measured
from bench.paper import compare
from bench.paper.compare import Share, compared, mean_and_half, runs_of, share, smaller_alone
from bench.paper.plans import TABLES, lines_of
from bench.shared.results import RESULTS
from growkern.errors import human, print_table
from growkern.families import growable_fields
from growkern.files import parse_toml
from growkern.growth.plan.measured import OF_GROWTH, QUESTIONS
from growkern.train.model.flops import ModelCost, TokenCounts
from growkern.train.model.sub_model import find_stacks
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.growth.plan.test_relatives import ALL, described
from tests.shared import walks


def meta(class_name, **sizes):
    """A model whose weights take no memory."""
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


def test_estimate_counts_bytes_and_flops():
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.bfloat16)
    plan = growkern.plan(source, hidden_size=24)
    target = growkern.grow(source, hidden_size=24)
    parameters = sum(p.numel() for p in target.parameters())
    one, four = plan.estimate(), plan.estimate(ranks=4)
    assert one["disk_bytes"] == one["rank_bytes"] == 2 * parameters
    assert four["rank_bytes"] == -(-2 * parameters // 4)
    small = sum(p.numel() for p in source.parameters())
    each = -(-4 * parameters // 4)
    assert four["training_bytes_per_rank"] == {
        "weights": each,
        "gradients": each,
        "optimizer": 2 * each,
        "teacher": -(-4 * small // 4),
    }
    matrices = [p for n, p in target.named_parameters() if p.ndim == 2 and "embed" not in n]
    assert one["flops_per_token"] == 6 * sum(p.numel() for p in matrices)
    assert one["read_bytes"] == 2 * sum(p.numel() for p in source.parameters())


@pytest.mark.parametrize(
    "class_name, sizes, layers",
    [
        ("LlamaForCausalLM", LLAMA, "num_hidden_layers"),
        ("GPT2LMHeadModel", GPT2, "n_layer"),
        ("BertForMaskedLM", BERT, "num_hidden_layers"),
    ],
)
def test_activations_are_at_least_those_that_autograd_keeps(class_name, sizes, layers):
    source = random_model(class_name, sizes, dtype=torch.float32).eval()
    source.set_attn_implementation("sdpa")
    large = growkern.grow(source, **{layers: 6}).eval()
    own = {p.untyped_storage().data_ptr() for p in large.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    tokens = torch.arange(1, 9)[None].repeat(2, 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        large.base_model(tokens, use_cache=False)
    each = sum(size for size, _ in kept.values()) / tokens.numel()
    said = large.growth_plan.estimate()["activation_bytes_per_token"]
    assert said <= each < 2.5 * said


PEAK = """
import json, sys, pathlib, torch, transformers, growkern, growkern.growth.grow
way, source, target = sys.argv[1:]
def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
plan = growkern.plan(source, hidden_size=1024)
estimate = plan.estimate()
with torch.device("meta"):
    large = transformers.LlamaForCausalLM._from_config(plan.target_config, dtype=plan.dtype)
pathlib.Path("/proc/self/clear_refs").write_text("5")
base = status("VmRSS")
if way == "rank":
    growkern.grow_into(large, source)
else:
    growkern.grow_checkpoint(source, target, hidden_size=1024, progress=False)
print(json.dumps([estimate[way + "_peak_bytes"], status("VmHWM") - base]))
"""


@pytest.fixture(scope="module")
def large_source(tmp_path_factory):
    """A checkpoint of 60 million parameters, far more than what a process needs besides."""
    sizes = {**LLAMA, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 45_000, "intermediate_size": 5000})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    directory = tmp_path_factory.mktemp("large") / "source"
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("way, least", [("stream", 0.2), ("rank", 0.8)])
def test_memory_is_what_was_said_before(large_source, tmp_path, way, least):
    """By the system's own account. The peak of a run may be low by chance, but never too high.

    It is low if the system takes file pages from the process, or if the workers take turns.
    """
    highest = 0
    for attempt in range(5):
        command = [sys.executable, "-c", PEAK, way, large_source, tmp_path / f"grown{attempt}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said, taken = json.loads(done.stdout)
        assert taken <= said
        highest = max(highest, taken)
        if least * said < highest:
            return
    pytest.fail(f"{said} bytes were said, at most {highest} taken")


# what the published models have
KNOWN = [
    ("GPT2LMHeadModel", {}, {"n_embd": 1024, "n_layer": 24}, 124_439_808, 354_823_168),
    (
        "BertForMaskedLM",
        {},
        {"hidden_size": 1024, "num_hidden_layers": 24},
        109_514_298,
        335_174_458,
    ),
    (
        # Llama 2, 7B to 13B
        "LlamaForCausalLM",
        {},
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40},
        6_738_415_616,
        13_015_864_320,
    ),
]


@pytest.mark.parametrize("class_name, sizes, growth, before, after", KNOWN)
def test_parameters_are_those_of_published_models(class_name, sizes, growth, before, after):
    plan = growkern.plan(meta(class_name, **sizes), **growth)
    assert plan.parameters("source") == before
    assert plan.parameters() == after
    of = plan.estimate(ranks=8)["training_bytes_per_rank"]
    assert of["weights"] + of["gradients"] + of["optimizer"] == pytest.approx(2 * after, abs=32)


BIG = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
BIG |= {"num_hidden_layers": 4, "vocab_size": 32000}
COUNTED = [
    ("LlamaForCausalLM", LLAMA, "num_hidden_layers"),
    ("GPT2LMHeadModel", GPT2, "n_layer"),
    ("BertForMaskedLM", BERT, "num_hidden_layers"),
]
WIDER = {"hidden_size": 2048}
DEEPER = {"num_hidden_layers": 8}


@pytest.mark.parametrize(
    "class_name, sizes, growth, expected",
    [
        ("LlamaForCausalLM", BIG, {**WIDER, "method": "aki"}, "AquilaMoE"),
        ("BertForMaskedLM", BERT, {"hidden_size": 24, "symmetry": "none"}, "equal gradients"),
        ("LlamaForCausalLM", BIG, {**WIDER, "symmetry": "none"}, "equal gradients"),
    ],
)
def test_advice_where_it_applies(class_name, sizes, growth, expected):
    plan = growkern.plan(meta(class_name, **sizes), allow_nonfinite=True, **growth)
    (line,) = plan.advice()
    assert expected in line
    # each rests on a paper
    assert "arXiv" in line or "AquilaMoE, 2024" in line


def test_no_advice_where_none_applies():
    plan = growkern.plan(random_model("GPT2LMHeadModel", GPT2), n_embd=16, n_head=4, n_layer=3)
    assert plan.advice() == ()
    # without new heads or units, AKI is FPI
    for growth in (DEEPER, {**DEEPER, "method": "aki"}, {"intermediate_size": 8192}):
        plan = growkern.plan(meta("LlamaForCausalLM", **BIG), **growth)
        assert plan.advice() == ()


COMMITTED = compare.committed(RESULTS)


def rows_of_measurements(name="measurement"):
    text = Path(growkern.growth.plan.measured.__file__).with_name("measurements.toml").read_text()
    return parse_toml(text)[name]


def line_and_base(run):
    """The lines of a measurement and of training from scratch, and the runs of both by seed."""
    table, system, *labels = run
    lines = lines_of(table, "tiny")
    found = [
        next(x for x in lines if (x.system, x.label) == wanted)
        for wanted in zip((system, TABLES[table].baseline), labels, strict=True)
    ]
    return found, [runs_of(line, COMMITTED) for line in found]


def words_of(shares):
    """The mean of shares in per cent, with its interval."""
    values = [100 * x.value for x in shares]
    missed, (mean, half) = sum(map(math.isnan, values)), mean_and_half(values)
    if missed:
        return f"not reached by {missed} of {len(shares)}"
    if any(x.bound for x in shares):
        return f"at least {sum(values) / len(shares):.1f}%"
    return f"{mean:.1f}%" if len(shares) == 1 else f"{mean:.1f}% ± {half:.1f}%"


def test_figures_of_ours_are_those_of_their_runs():
    for own in (row for row in rows_of_measurements() if row["citation"] == "growkern's runs"):
        (line, base), (grown, scratch) = line_and_base(own["run"])
        told = own["setting"]
        counts_all = all(runs[-1]["source flops"] == 0 for runs in grown.values())
        assert own.keys() & set(QUESTIONS) == {"size"} | (set() if counts_all else set(OF_GROWTH))
        for question in own.keys() & set(QUESTIONS):
            shares = [share(question, x, Share(0.0), scratch[seed]) for seed, x in grown.items()]
            assert len(shares) == 3 and own[question] == words_of(shares), own
        with torch.device("meta"):
            parameters = line.setting.untrained(line.setting.target, seed=0).num_parameters()
        layers, width, *large = map(int, re.findall(r" (\d+) x (\d+) to (\d+) x (\d+)", told)[0])
        assert own["times"] == max(large[0] / layers, large[1] / width), own
        tokens = base.setting.steps * base.setting.tokens / parameters
        assert own["tokens"] == pytest.approx(tokens, abs=0.05)


def test_a_smaller_model_saves_what_its_runs_say():
    for own in rows_of_measurements("never_grown"):
        table, label = own["run"]
        lines = compared(lines_of(table, "tiny"), table, COMMITTED)
        (base,) = (x for x, pairs in lines.items() if compare.is_base(pairs) and x.label == label)
        found = smaller_alone(base.setting, lines[base], COMMITTED).values()
        small, large = (x.replace(" ", "") for x in re.findall(r"\d+ x \d+", own["setting"]))
        shares = [share for of in found for size, share in of.items() if size.name == small]
        assert own["loss"] == words_of(shares), own
        assert ("one seed" in own["citation"]) == (len(shares) == 1)
        assert base.setting.target.name == large
        # no other smaller size was trained by more seeds
        assert len(shares) == max(sum(size in of for of in found) for of in found for size in of)
        with torch.device("meta"):
            parameters = base.setting.untrained(base.setting.target, seed=0).num_parameters()
        tokens = base.setting.steps * base.setting.tokens / parameters
        assert own["tokens"] == pytest.approx(tokens, abs=0.05)


def test_no_line_that_was_run_is_left_out():
    """Also those that saved nothing: of the tables of a method, every one that grows a model."""
    known = [
        {r["name"] for runs in line_and_base(row["run"])[1][0].values() for r in runs}
        for row in rows_of_measurements()
        if "run" in row
    ]
    # a teacher, plain AdamW, other rates and other stages
    others = re.compile(r"_ki$|taught|_adamw|_moments|_rewarmed|_after_stage1|scratch|continued")
    tables = [name for name in TABLES if TABLES[name].baseline.startswith("scratch")]
    for table in sorted(set(tables) - {"table4", "rates", "rates_gpt", "rates_t5"}):
        for line in lines_of(table, "tiny"):
            runs = runs_of(line, COMMITTED)
            if not others.search(line.system) and len(runs) == 3:
                # tables share some lines
                assert {r["name"] for own in runs.values() for r in own} in known, line


def printed(table, width=600):
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)
    return console.file.getvalue()


def test_the_table_shows_both_trainings_and_what_was_measured():
    plan = growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDER)
    shown = printed(plan.table(tokens=1e11, source_tokens=1e10))
    assert human(plan.flops_per_token() * 1e11) in shown
    assert human(plan.flops_per_token("source") * 1e10) in shown
    assert human((plan.flops_per_token() + plan.flops_per_token("source") / 10) * 1e11) in shown
    assert all(f"note: {line}" in shown for line in plan.advice())
    assert "13% ± 16%" not in shown
    assert all(cell in shown for row in plan.verdict(1e11) for cell in row.values())
    assert "in short" not in str(plan) and "note" not in str(plan)
    # however narrow the terminal is, a measurement has one line. First come those of width and
    # depth at once, and then the nearest
    both = growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDER, **DEEPER)
    lines = printed(both.table(tokens=20 * both.parameters(), verbose=True), 60).splitlines()
    ends = ("(growkern's runs)", "arXiv 2405.15319)", "arXiv 2504.00623)")
    rows = [line for line in lines if line.endswith(ends)]
    alone = [line for line in lines if ", in place of" in line]
    assert len(alone) == 9 and alone[0].startswith("20.0    not reached 1/1  ")
    rows = [line for line in rows if line not in alone]
    assert len(rows) == 40 and rows[0].startswith("2.0     37.9% ± 19.6%    21.0% ± 25.0%  ")
    assert rows[2].startswith("20.0    not reached 3/3  not reached 3/3  ")
    assert f"{len(both.measurements()) - 40} more: --json" in lines
    other = growkern.plan(meta("LlamaForCausalLM", **BIG), intermediate_size=8192)
    assert "neither in a paper nor by us" in printed(other.table(tokens=1e11, verbose=True))


@pytest.mark.parametrize(
    "class_name, growth, tokens, said",
    [
        # GPT-2 of half the width: rows of `test_figures_of_ours`, counted by hand
        (
            "LlamaForCausalLM",
            WIDER,
            2.2,
            [
                "grow (at 2.2 to 2.4: saved in 5 of 5 comparisons, 7.4% ± 6.5% to 36.8% ",
                "ways (at 2.2 to 2.4: saved in 2 of 5",
                "grow (at 2.2 to 2.4: saved in 5 of 5",
                "longer (at 2",
            ],
        ),
        (
            "LlamaForCausalLM",
            {**WIDER, "method": "direct_copy"},
            2.2,
            ["grow (at 2.2 to 2.4: saved in 4 of 5 comparisons, 10.0% ± 3.8% to at least"],
        ),
        (
            "LlamaForCausalLM",
            {**WIDER, "stream": "copies", "symmetry": "noise"},
            2.2,
            ["ways (at 2.2: saved in 0 of 1 comparison"],
        ),
        (
            "LlamaForCausalLM",
            WIDER,
            20,
            ["from scratch (at 20: saved in 0 of 1 comparison, by growk"] * 3,
        ),
        # beyond all that is measured
        (
            "LlamaForCausalLM",
            WIDER,
            294,
            ["from scratch (at 20: saved in 0 of 1 comparison, by growkern's runs"] * 3,
        ),
        ("LlamaForCausalLM", DEEPER, 300, ["(not for such"] * 3),
        ("LlamaForCausalLM", WIDER, 7, ["both ways (not for such"] * 3),
        # measured for one question, so known for the other; the first has no share of its own
        (
            "LlamaForCausalLM",
            {**DEEPER, "depth": "stack"},
            60,
            ["ways (at 42.9: saved in 1 of 1", "(not", "comparison, 35%"],
        ),
        # one setup is too few to say more
        # width and depth were measured at 20, and not at once
        ("LlamaForCausalLM", {**WIDER, **DEEPER}, 20, ["(not"] * 3 + ["this size from scratch"]),
        # growth of both at once, and its interval holds 0
        (
            "LlamaForCausalLM",
            {**WIDER, **DEEPER},
            2,
            [
                "ways (at 2: saved in 1 of 1",
                "ways (at 2: saved in 0 of 1 comparison, by growkern's runs)",
            ],
        ),
        # those from a quarter and an eighth of the width are of another growth
        (
            "BertForMaskedLM",
            {"hidden_size": 16},
            2.4,
            ["(at 2.4: saved in 1 of 1 comparison, 53.4% ± 8.0%"],
        ),
        (
            "BertForMaskedLM",
            {"hidden_size": 48, "method": "aki"},
            2.4,
            ["(at 2.4: saved in 2 of 3"] * 3,
        ),
        (
            "BertForMaskedLM",
            {"hidden_size": 96, "method": "aki"},
            2.4,
            ["scratch (at 2.4: saved in 0 of 1 comparison, by growkern"] * 3,
        ),
        ("LlamaForCausalLM", {"hidden_size": 4096}, 2.2, ["ways (not for"] * 3),
        ("BertForMaskedLM", {"intermediate_size": 64}, 2.4, ["(not for"] * 3),
    ],
)
def test_a_verdict_is_what_the_nearest_measurements_say(class_name, growth, tokens, said):
    sizes = BERT if "Bert" in class_name else BIG
    plan = growkern.plan(meta(class_name, **sizes), **growth)
    rows = plan.verdict(tokens * plan.parameters())
    lines = ["{wanted}: {do} ({measured})".format(**row) for row in rows]
    # questions with the same answer share a line
    answers = [next(x for x in lines if question in x) for question, *_ in QUESTIONS.values()]
    assert all(words in line for words, line in zip(said, answers, strict=False)), lines
    assert len(lines) == len(set(answers)) == len({line.partition(": ")[2] for line in lines})


def test_no_figure_of_one_model_is_said_of_a_mixture():
    plan = growkern.plan(meta("MixtralForCausalLM", **BIG, num_local_experts=4), **WIDER)
    assert all(row["measured"].startswith("not") for row in plan.verdict(2.2 * plan.parameters()))


@pytest.mark.parametrize("class_name, sizes, stack", COUNTED)
def test_flops_are_those_that_the_trainer_counts(class_name, sizes, stack):
    """But for attention, which depends on the length of the texts, and a pooler."""
    model = random_model(class_name, sizes)
    cost = ModelCost(model, find_stacks(model))
    heads, head_dim = model.config.num_attention_heads, getattr(model.config, "head_dim", 4)
    attention = 3 * 4 * heads * head_dim * model.config.num_hidden_layers
    counted = cost.train(TokenCounts.of_rows(1, 1)) - attention + cost.head_row(train=True)
    grown = growkern.plan(model, **{stack: model.config.num_hidden_layers + 1})
    assert grown.flops_per_token("source") == counted


@pytest.mark.parametrize("family", ALL if walks.times > 1 else [*ALL][::4])
def test_every_family_prints_its_plan(family):
    model = described(family)
    stacks = model.family.stacks.values()
    sizes = {model.family.config_field(key): model.size(key) + 1 for key in stacks}
    # ALBERT has one layer, which it repeats
    sizes = {name: sizes[name] for name in growable_fields(model.family) if name in sizes}
    sizes = sizes or {"vocab_size": model.fields.vocab_size + 1}
    plan = growkern.plan(random_model(*ALL[family]), depth="identity", **sizes)
    assert str(plan).split(":")[0] in ("exact", "approximate", "changed")
