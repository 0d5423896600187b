"""The examples train the same as plain logits do, on every kind of head."""

import ast
import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F

import growkern
from examples import accelerate_loop, pytorch_loop
from examples.hf_trainer import InheritingTrainer
from examples.objectives import TEXTS, make_tokenizer
from growkern import InheritanceSchedule
from testbed import warm
from testbed.tiny import VOCAB, arguments, batch, build, losses_of, randomise

FOLDER = Path(pytorch_loop.__file__).parent
SCHEDULE = InheritanceSchedule(alpha=0.8, end_step=2, temperature=2.0)
# the third step has no teacher any more
STEPS = [[batch(seed=2 * i), batch(seed=2 * i + 1, labelled=0.2)] for i in range(3)]
LR = 1e-3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
}


def encoder(name, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return randomise(getattr(transformers, f"{name}ForMaskedLM")(config), 0)


def decoder(name, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=1, **options)
    return randomise(getattr(transformers, f"{name}ForCausalLM")(config), 0)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "bert": lambda: build("bert", layers=2),
    "roberta": lambda: encoder("Roberta", **NO_DROPOUT, max_position_embeddings=40),
    "modernbert": lambda: encoder("ModernBert", attn_implementation="eager"),
    "gpt2, tied": lambda: build("gpt2", layers=2, tied=True),
    "llama": lambda: build("llama", layers=2),
    "llama, tied": lambda: build("llama", layers=2, tied=True),
    "gemma2, capped": lambda: decoder("Gemma2", head_dim=8, final_logit_softcapping=3.0),
    "cohere, scaled": lambda: decoder("Cohere", logit_scale=0.5),
}


def pair(name):
    """Both as `from_pretrained` gives them: to freeze the teacher is the loops' part."""
    student = MODELS[name]()
    return student, randomise(copy.deepcopy(student), 1)


def plain(model, teacher, steps, causal):
    """The same training on whole logits, with torch's own losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model.train(), teacher.eval()
    losses = []
    for step, micro_batches in enumerate(steps):
        alpha, T, rows = SCHEDULE.alpha_at(step), SCHEDULE.temperature, []
        for b in micro_batches:
            z = model(input_ids=b["input_ids"]).logits
            with torch.no_grad():
                u = teacher(input_ids=b["input_ids"]).logits
            y = b["labels"]
            if causal:
                z, u, y = z[:, :-1], u[:, :-1], y[:, 1:]
            z, u, y = z[y != -100], u[y != -100], y[y != -100]
            kl = F.kl_div((z / T).log_softmax(-1), (u / T).softmax(-1), reduction="none").sum(-1)
            rows.append((1 - alpha) * F.cross_entropy(z, y, reduction="none") + alpha * T**2 * kl)
        loss = torch.cat(rows).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hf_trainer(model, teacher, folder):
    args = arguments(
        folder, max_steps=len(STEPS), per_device_train_batch_size=3, gradient_accumulation_steps=2,
        learning_rate=LR, lr_scheduler_type="constant", use_cpu=True,
    )  # fmt: skip
    micro_batches = [b for step in STEPS for b in step]
    rows = [{k: x[i] for k, x in b.items()} for b in micro_batches for i in range(3)]
    trainer = InheritingTrainer(model, args, train_dataset=rows, teacher=teacher, schedule=SCHEDULE)
    trainer.train()
    return losses_of(trainer)


@pytest.mark.parametrize("name", MODELS)
def test_every_loop_trains_what_plain_logits_train(name, tmp_path):
    student, teacher = pair(name)
    expected_model = copy.deepcopy(student)
    causal = "bert" not in name
    expected = plain(expected_model, teacher, STEPS, causal)
    loops = {
        "pytorch": lambda m: pytorch_loop.train(m, teacher, STEPS, SCHEDULE, LR),
        "accelerate": lambda m: accelerate_loop.train(m, teacher, STEPS, SCHEDULE, LR),
        "Trainer": lambda m: hf_trainer(m, teacher, tmp_path),
    }
    for loop, train in loops.items():
        model = copy.deepcopy(student)
        losses = train(model)
        assert losses == pytest.approx(expected, rel=2e-5), loop
        for (key, p), q in zip(model.named_parameters(), expected_model.parameters(), strict=True):
            # Adam turns a gradient near 0 into a step of either sign, three steps at the most
            off = (p - q).abs()
            assert off.max() <= 3.1 * LR and off.mean() <= 0.05 * LR, (loop, key)


# TRL needs a newer Python
LEFT_OUT = {"__init__"} | (
    {"trl_distillation", "trl_upcycling"} if sys.version_info < (3, 11) else set()
)
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in LEFT_OUT)
# these work on a checkpoint of the user's; test_finetune.py calls the other one
TOOLS = {"centroids", "finetune", "torchtitan_moments"}
# and these need several processes
TRAINING = [path for path in EXAMPLES if path.stem not in TOOLS | {"mesh_2d", "two_gpus"}]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_example_is_a_script_that_learns(path):
    done = warm.run(f"examples.{path.stem}", limit_s=300)
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+) in \d+ steps", done.stdout).groups()
    assert float(last) < 0.8 * float(first)


def test_the_command_of_centroids_writes_what_growth_reads(tmp_path):
    words = make_tokenizer("gpt2")
    config = transformers.Qwen3Config(
        vocab_size=len(words), hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_hidden_layers=2, intermediate_size=24,
    )  # fmt: skip
    dense = randomise(transformers.Qwen3ForCausalLM(config), 0)
    for part in (dense, words):
        part.save_pretrained(tmp_path / "dense")
    rows = tmp_path / "rows.safetensors"
    done = warm.run("examples.centroids", tmp_path / "dense", TEXTS[0], rows, 3, limit_s=300)
    assert done.returncode == 0, done.stderr
    assert {name: row_NH.shape for name, row_NH in load_file(rows).items()} == {
        "layers.0": (3, 16),
        "layers.1": (3, 16),
    }
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    assert growkern.grow(dense, to="qwen3_moe", router=str(rows), **sizes).growth_plan.exact


def torchrun(number, *command):
    """The output of a script on several processes."""
    done = warm.run("testbed.torchrun", number, *command, limit_s=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_shards_learns_on_two_processes():
    output = torchrun(2, FOLDER / "fsdp2.py")
    ((first, last),) = re.findall(r"loss ([\d.]+) -> ([\d.]+) in \d+ steps", output)
    assert float(last) < 0.8 * float(first)


def test_the_check_of_two_gpus_says_right_on_two_processes():
    path = FOLDER / "two_gpus.py"
    assert len(path.read_text().splitlines()) <= 40
    assert float(re.findall(r"^right: weights differ by (\S+)$", torchrun(2, path), re.M)[0]) > 0


def test_the_example_of_three_kinds_of_parallelism_learns_on_four_processes(tmp_path):
    path = FOLDER / "mesh_2d.py"
    assert len(path.read_text().splitlines()) <= 40
    config = transformers.Qwen3Config(
        **SIZES | {"vocab_size": 64, "num_attention_heads": 4}, num_key_value_heads=2, head_dim=8
    )
    small, large = tmp_path / "small", tmp_path / "large"
    dense = randomise(transformers.Qwen3ForCausalLM(config), 0)
    dense.save_pretrained(small)
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    growkern.grow(dense, to="qwen3_moe", **experts).save_pretrained(large)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", torchrun(4, path, small, large))]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_use_public_names_alone(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or alias.name for alias in node.names]
            assert not any(name.startswith(("growkern.", "examples")) for name in modules)


# in place of SLURM's commands, and of the interpreter
STUBS = {
    "scontrol": '[ "$1" = requeue ] && echo "$2" > requeued || echo node7',
    "srun": """
        shift
        export SLURM_PROCID=3 SLURM_LOCALID=1 BATCH=$PPID
        trap 'kill -USR1 "$!"' USR1
        "$@" &
        wait "$!"; code=$?
        while kill -0 "$!" 2>/dev/null; do wait "$!"; code=$?; done
        exit "$code" """,
    "python": """
        echo "$* $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR" > started
        trap 'exit "$CODE"' USR1
        [ "$SIGNAL" ] || exit "$CODE"
        kill -USR1 "$BATCH"
        while :; do sleep 0.02; done""",
}


@pytest.mark.parametrize(
    ("signalled", "code", "requeued"),
    [("yes", 143, True), ("yes", 0, False), ("", 2, False), ("", 0, False)],
)
def test_the_job_for_slurm_passes_signals_on_and_queues_again(signalled, code, requeued, tmp_path):
    """After a signal only, and not if the run ended with it."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": str(tmp_path), "USER": "me",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "31007", "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8", "SIGNAL": signalled, "CODE": str(code),
    }  # fmt: skip
    line = ["bash", FOLDER / "slurm.sbatch", "/shared/a run.toml"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, check=False, timeout=100)
    # 138: the run ended with the signal, before the shell could ask for its code
    assert done.returncode in ((code, 138) if signalled else (code,))
    words = (tmp_path / "started").read_text()
    assert words == "-m growkern train /shared/a run.toml 3 1 8 16 node7\n"
    assert (tmp_path / "requeued").exists() is (requeued or done.returncode == 138)
