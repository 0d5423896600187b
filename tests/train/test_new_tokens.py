"""Teachers that lack the student's last tokens, against plain PyTorch in float64.

Shape letters used in this file: N rows, H width, V tokens of the student, A of the teacher.
"""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import growkern
from growkern import InheritanceSchedule, ServedTeacher, TeacherCache, TwoStageTrainer, run as train
from growkern.errors import GrowthError
from growkern.train.dataset.training_data import TokenBlocks
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.topk_teacher.write import cache_teacher
from testbed.tiny import VOCAB, TinyTokenizer, arguments, build, losses_of
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, relative_error
from tests.train.loss.plain import shifted
from tests.train.run.test_run import save_tokenizer, workplace  # noqa: F401
from tests.train.topk_teacher.server import serving
from tests.train.topk_teacher.test_cached_teacher import run_app

N, H, V, A, PADDED = 7, 8, 30, 23, 32
NEW = 6  # tokens that a teacher of VOCAB tokens lacks
DIVERGENCES = {
    "forward": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "reverse": lambda p, q: (q.exp() * (q - p)).sum(-1),
}
LABELS = torch.tensor([3, A, IGNORED, A - 1, V - 1, 0, 7])
TAUGHT = torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()  # of the last row the context is unknown


def truth_of(z, u, *, alpha, temperature, divergence):
    mlm = F.cross_entropy(z[:, :V], LABELS, ignore_index=IGNORED)
    p, q = ((x[:, :A] / temperature).log_softmax(-1) for x in (u, z))
    kl = DIVERGENCES[divergence](p, q)[TAUGHT].mean()
    return (1 - alpha) * mlm + alpha * temperature**2 * kl


def heads(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H), torch.randn(PADDED, H)
    teacher = hidden + 0.1 * torch.randn(N, H), weight[:A] + 0.1 * torch.randn(A, H)
    return [x.to(dtype) for x in (hidden, weight, *teacher)]


def of_all(hidden, weight, x, w, options, **tiles):
    """The three losses, each with the student's tensors as leaves."""
    temperature = options["temperature"]
    logprobs, ids = (x @ w.T / temperature).log_softmax(-1).topk(A)
    rows = LABELS.to(hidden.device)
    return {
        "logits": growkern.kl_mlm_loss(hidden @ weight.T, x @ w.T, rows, **options),
        "linear": growkern.linear_kl_mlm_loss(hidden, weight, x, w, rows, **options, **tiles),
        "topk": growkern.topk_kl_mlm_loss(hidden, weight, ids, logprobs, rows, **options, **tiles),
    }


@pytest.mark.parametrize(
    "backend, divergence", [*((one, "forward") for one in BACKENDS), (BACKENDS[1], "reverse")]
)
def test_the_kl_is_over_the_tokens_that_the_teacher_knows(backend, divergence):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    maths = {"alpha": 0.4, "temperature": 2.0, "divergence": divergence}
    hidden, weight, x, w = (t.to(device) for t in heads())
    wide = [t.double().cpu().requires_grad_() for t in (hidden, weight)]
    truth = truth_of(wide[0] @ wide[1].T, x.double().cpu() @ w.double().cpu().T, **maths)
    expected = torch.autograd.grad(truth, wide)
    # what the row without a teacher has for its context is in the mask; new labels are not
    options = {
        **maths, "backend": backend, "vocab_size": V, "teacher_vocab_size": A,
        "kl_rows": (TAUGHT | (LABELS >= A)).to(device),
    }  # fmt: skip
    for tiles in ({}, {"vocab_tile": 9}):
        student = [t.clone().requires_grad_() for t in (hidden, weight)]
        for loss in of_all(*student, x, w, options, **tiles).values():
            found = torch.autograd.grad(loss, student)
            assert loss.item() == pytest.approx(truth.item(), rel=1e-5)
            for one, other in zip(found, expected, strict=True):
                assert relative_error(one.cpu(), other) < 1e-5
            assert not found[1][V:].any()


def test_a_teacher_that_is_narrower_than_it_is_said_to_be_is_refused():
    hidden, weight, x, w = heads()
    with pytest.raises(GrowthError, match=rf"teacher_vocab_size={A + 1}, but .* \[{A}\] columns"):
        growkern.linear_kl_mlm_loss(hidden, weight, x, w, LABELS, teacher_vocab_size=A + 1)
    with pytest.raises(GrowthError, match=r"or teacher_vocab_size if the student has more tokens"):
        growkern.linear_kl_mlm_loss(hidden, weight, x, w, LABELS)


# ------------------------------------------------------------------------ batches


def taught_in_words(batch, labels, known, *, causal):
    """The rows that a teacher can judge, position by position."""
    ids = batch["input_ids"]
    real, places = batch.get("attention_mask", torch.ones_like(ids)), batch.get("position_ids")
    taught = torch.zeros_like(ids, dtype=torch.bool)
    for b, s in itertools.product(*map(range, ids.shape)):
        first, last = 0, ids.shape[1]
        if places is not None:
            first = s - int(places[b, s])
            last = next((j for j in range(s + 1, last) if places[b, j] == 0), last)
        context = range(first, s + 1 if causal else last)
        lacks = any(real[b, j] and ids[b, j] >= known for j in context)
        taught[b, s] = not lacks and labels[b, s] < known
    return taught


def batch_of(kind):
    """Tokens of which about one in ten is new, and labels."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (4, 12), generator=rng)
    where = torch.rand(ids.shape, generator=rng)
    ids = torch.where(where < 0.1, VOCAB + 1, ids)
    found = {"input_ids": ids, "labels": torch.where(where < 0.6, ids, IGNORED)}
    if kind == "packed":
        found["position_ids"] = torch.arange(12).sub(torch.tensor([0] * 5 + [5] * 7)).expand(4, 12)
    elif kind == "padded":
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, 7:] = found["attention_mask"][1, :3] = 0
        # padding may be a new token
        found["input_ids"] = torch.where(found["attention_mask"] == 1, ids, VOCAB + NEW - 1)
        found["labels"] = torch.where(found["attention_mask"] == 1, found["labels"], IGNORED)
    return found


def aligned(labels, *, causal):
    return shifted(labels, IGNORED) if causal else labels


def plain(student, teacher, batch, *, causal, alpha, temperature):
    """The loss of a batch, from whole logits; the teacher reads token 0 for a new one."""
    labels = aligned(batch["labels"], causal=causal)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if "position_ids" in batch:
        # transformers keeps documents apart only where it makes no cache
        inputs["use_cache"] = False
    z = student(**inputs).logits
    with torch.no_grad():
        ids = batch["input_ids"]
        u = teacher(**{**inputs, "input_ids": torch.where(ids < VOCAB, ids, 0)}).logits
    rows = taught_in_words(batch, labels, VOCAB, causal=causal) & (labels != IGNORED)
    p, q = ((x[rows][:, :VOCAB] / temperature).log_softmax(-1) for x in (u, z))
    kl = DIVERGENCES["forward"](p, q).mean()
    mlm = F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    lost = (labels != IGNORED).sum() - rows.sum()
    share = lost.item() / (labels != IGNORED).sum().item()
    return (1 - alpha) * mlm + alpha * temperature**2 * kl, share


def grown(family):
    """A teacher, and a student that was grown from it and has new tokens; both in float64."""
    teacher = build(family, layers=1, width=8, seed=9).eval()
    wide = {"bert": "hidden_size", "gpt2": "n_embd", "llama": "hidden_size"}[family]
    student = growkern.grow(teacher, **{wide: 16}, vocab_size=VOCAB + NEW)
    # the teacher's rows differ from the student's in training
    for parameter in student.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(3))
    return teacher.double(), student.double().eval()


@pytest.mark.parametrize(
    "family, kind",
    [("gpt2", "padded"), ("llama", "plain"), ("llama", "packed"), ("bert", "padded")],
)
def test_inherited_loss_of_a_grown_vocabulary(family, kind, tmp_path):
    teacher, student = grown(family)
    batch, options = batch_of(kind), {"alpha": 0.4, "temperature": 2.0}
    expected, _ = plain(student, teacher, batch, causal=family != "bert", **options)
    found = growkern.inherited_loss(student, teacher, batch, teacher_vocab_size=VOCAB, **options)
    weights = list(student.parameters())
    pairs = [torch.autograd.grad(x, weights, allow_unused=True) for x in (found, expected)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("said", [None, 0, True, "48", VOCAB + 1, VOCAB + NEW])
def test_a_wrong_number_of_known_tokens_is_refused_by_name(said):
    teacher, student = (build("llama", vocab_size=v, seed=v) for v in (VOCAB, VOCAB + NEW))
    with pytest.raises(GrowthError, match="teacher_vocab_size"):
        growkern.inherited_loss(
            student, teacher, batch_of("plain"), alpha=0.4, teacher_vocab_size=said
        )


def test_an_encoder_and_its_decoder_may_have_new_tokens():
    teacher, student = (build("t5", layers=1, vocab_size=v, seed=v) for v in (VOCAB, VOCAB + NEW))
    batch = batch_of("plain")
    batch["input_ids"][0] = 7
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :4] = torch.tensor([6, 7, VOCAB + 1, 8])
    options = {"alpha": 1.0, "kl_rows": "labels", "teacher_vocab_size": VOCAB}
    _, parts = growkern.inherited_loss(student, teacher, batch, return_parts=True, **options)
    clean = ~(batch["input_ids"] >= VOCAB).any(1, keepdim=True)
    seen = (batch["labels"] >= VOCAB).cumsum(1) > 0
    only = torch.where(clean & ~seen, batch["labels"], IGNORED)
    decoder = student.prepare_decoder_input_ids_from_labels(batch["labels"])
    with torch.no_grad():
        z = student(input_ids=batch["input_ids"], decoder_input_ids=decoder).logits
        known = {"input_ids": batch["input_ids"], "decoder_input_ids": decoder}
        u = teacher(**{name: torch.where(x < VOCAB, x, 0) for name, x in known.items()}).logits
    p, q = ((x[only != IGNORED][:, :VOCAB] / 2).log_softmax(-1) for x in (u, z))
    assert parts.kl.item() == pytest.approx(4 * DIVERGENCES["forward"](p, q).mean().item(), 1e-4)


# ------------------------------------------------------------------------ trainers


class WideTokenizer(TinyTokenizer):
    """That of the teacher, and new tokens after its own."""

    def __len__(self):
        return VOCAB + NEW

    def get_vocab(self):
        return {str(i): i for i in range(VOCAB + NEW)}


def blocks():
    return TokenBlocks(np.concatenate([batch_of("plain")["input_ids"].int().numpy()] * 2))


def trained(path, student, teacher, temperature, **options):
    """Two steps of two batches of two blocks."""
    trainer = TwoStageTrainer(
        copy.deepcopy(student), arguments(path, max_steps=2, gradient_accumulation_steps=2),
        inheritance=InheritanceSchedule(alpha=0.4, decay="constant", temperature=temperature),
        teacher=teacher, train_dataset=blocks(), data_collator=CausalLMCollator(WideTokenizer()),
        processing_class=WideTokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_trainer_takes_the_small_model_its_cache_and_its_server_as_teacher(tmp_path):
    teacher, student = grown("llama")
    kind = {"temperature": 1.0, "teacher_tokenizer": TinyTokenizer()}
    live = trained(tmp_path / "a", student, copy.deepcopy(teacher), **kind)
    batch = CausalLMCollator(WideTokenizer())([blocks()[i] for i in range(4)])
    expected, share = plain(student, teacher, batch, causal=True, alpha=0.4, temperature=1.0)
    assert losses_of(live)[0] == pytest.approx(expected.item(), rel=1e-7)
    assert live.state.log_history[0]["kl_rows_lost"] == pytest.approx(share) and 0 < share < 1
    cache_teacher(
        teacher, blocks(), tmp_path / "kept", k=VOCAB, temperature=1.0, dtype="float32",
        collator=CausalLMCollator(WideTokenizer()), tokenizer=WideTokenizer(), progress=False,
    )  # fmt: skip
    kept = trained(tmp_path / "b", student, TeacherCache(tmp_path / "kept"), 1.0)
    with serving(teacher) as (_, url):
        # the tokenizer of the teacher tells the tokens that it knows
        known = ServedTeacher(url, VOCAB, vocab_size=VOCAB, tokenizer=TinyTokenizer())
        served = trained(tmp_path / "c", student, known, 1.0)
    for one in (kept, served):
        assert losses_of(one) == pytest.approx(losses_of(live), rel=1e-5)
        assert one.state.log_history[0]["kl_rows_lost"] == pytest.approx(share)


def test_a_smaller_vocabulary_needs_tokenizers_to_compare(tmp_path):
    teacher, student = grown("llama")
    with pytest.raises(GrowthError, match=r"48 tokens, .* 54: padding does not.*teacher_tokenizer"):
        trained(tmp_path, student, teacher, 1.0)
    with pytest.raises(GrowthError, match="another tokenizer"):
        other = type("Other", (TinyTokenizer,), {"get_vocab": lambda _: {"9": 1}})()
        trained(tmp_path, student, teacher, 1.0, teacher_tokenizer=other)


def log_of(out):
    """The lines of training; those of evaluation have no such number."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [line for line in history if "kl_rows_lost" in line]


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_run_file_needs_no_option(workplace):  # noqa: F811
    """Tokenizers lie beside the models, and the student's has more tokens."""
    growkern.grow(workplace / "teacher", vocab_size=VOCAB + NEW).save_pretrained(
        workplace / "model"
    )
    save_tokenizer(workplace / "model", VOCAB + NEW)
    text = workplace / "text" / "a.txt"
    text.write_text(text.read_text().replace("w7 ", f"w{VOCAB - 3} "))
    lines = (workplace / "run.toml").read_text().replace("steps = 6", "steps = 2")
    for old, new in (
        ("eval_every = 3", ""),
        ("stage1_steps = 3", "stage1_steps = 1"),
        ("_step = 4", "_step = 2"),
    ):
        lines = lines.replace(old, new)
    (workplace / "run.toml").write_text(lines)
    train(workplace / "run.toml", progress=False)
    history = log_of(workplace / "out")
    # the student has grown exactly: its first KL is 0
    assert 0 < history[0]["kl_rows_lost"] < 1 and abs(history[0]["kl"]) < 1e-6
    arguments = ["cache-teacher", workplace / "teacher", "--run", workplace / "run.toml"]
    run_app(*arguments, "--out", workplace / "kept", "--k", 48, "--dtype", "float32")
    file = lines.replace('paths = ["teacher"]', 'cache = "kept"')
    (workplace / "kept.toml").write_text(file.replace('"out"', '"out2"'))
    train(workplace / "kept.toml", progress=False)
    again = log_of(workplace / "out2")
    for name in ("loss", "kl_rows_lost"):
        assert again[1][name] == pytest.approx(history[1][name], rel=1e-4)
    # a loop of one's own finds the tokenizers there too
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(workplace / name) for name in ("model", "teacher")]
    _, parts = growkern.inherited_loss(*models, batch_of("plain"), return_parts=True)
    assert abs(parts.kl.item()) < 1e-6
