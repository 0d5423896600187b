"""A teacher on a server trains as the same model does here. A server that fails is named."""

import copy
import socket
from dataclasses import replace

import pytest
import torch
import transformers
from typer.testing import CliRunner

import growkern
import growkern.train.run.start as run_module
from growkern import GrowthError, InheritanceSchedule, ServedTeacher, TeacherCache, run as train
from growkern.cli.commands import app
from growkern.train.loss.batches import first_examples
from growkern.train.topk_teacher import http
from growkern.train.topk_teacher.teacher import TopKTeacher
from testbed.tiny import VOCAB, TinyTokenizer, arguments, build, losses_of
from tests.train.run.test_run import workplace  # noqa: F401
from tests.train.topk_teacher.server import serving
from tests.train.topk_teacher.test_cached_teacher import train_with
from tests.train.topk_teacher.test_teacher_cache import make


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)


def teacher_model():
    return build("llama", layers=2, width=8, seed=9).double().eval()


@pytest.fixture
def server():
    with serving(teacher_model()) as (state, url):
        yield state, url


def padded_batch():
    """Three examples: without padding, with it on the right, with it on the left."""
    tokens = torch.arange(5, 5 + 27).reshape(3, 9) % (VOCAB - 5) + 5
    mask = torch.ones_like(tokens)
    mask[1, 6:], mask[2, :4] = 0, 0
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens}


def test_rows_are_those_of_the_model(server):
    batch = padded_batch()
    ids, logprobs = ServedTeacher(server[1], 7).batch(batch)
    assert ids.shape == logprobs.shape == (3, 9, 7) and ids.dtype == torch.int32
    model = teacher_model()
    for b, mask in enumerate(batch["attention_mask"].bool()):
        at = mask.nonzero().flatten()
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"][b, at][None]).logits[0, :-1]
        best = logits.log_softmax(-1).topk(7)
        assert torch.equal(ids[b, at[:-1]].long(), best.indices)
        torch.testing.assert_close(logprobs[b, at[:-1]].double(), best.values, rtol=0, atol=1e-6)
        rest = torch.ones(9, dtype=torch.bool)
        rest[at[:-1]] = False
        assert (ids[b, rest] == -1).all() and logprobs[b, rest].isnan().all()


def left_padded(rows=2):
    """Examples with padding on the left, and a label at every real token."""
    tokens = torch.arange(5, 5 + 9 * rows).reshape(rows, 9) % (VOCAB - 5) + 5
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    labels = torch.where(mask.bool(), tokens, -100)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def stacked(examples):
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


def test_packed_documents_are_asked_for_one_by_one(server, tmp_path):
    state, url = server
    texts = [[5, 6, 7], [9], [11, 12, 13, 14], [7, 6], [20, 21, 22]]
    pack = transformers.DataCollatorWithFlattening(return_tensors="pt")
    batch = pack([{"input_ids": tokens} for tokens in texts])
    # a label at each start too: nothing predicts it
    batch["labels"] = batch["input_ids"].clone()
    ids, logprobs = ServedTeacher(url, 5).batch(batch)
    sent = [body["prompt"] for _, _, body in state.requests if body]
    assert sorted(sent) == sorted(tokens for tokens in texts if len(tokens) > 1)
    kept, place = torch.zeros(1, 13, dtype=torch.bool), 0
    for tokens in texts:
        at = slice(place, place + len(tokens) - 1)
        kept[0, at], place = True, place + len(tokens)
        with torch.no_grad():
            logits = teacher_model()(input_ids=torch.tensor([tokens])).logits[0, :-1]
        best = logits.log_softmax(-1).topk(5)
        assert torch.equal(ids[0, at].long(), best.indices)
        torch.testing.assert_close(logprobs[0, at].double(), best.values, rtol=0, atol=1e-6)
    assert torch.equal((ids >= 0).all(-1), kept) and torch.equal(~logprobs.isnan().any(-1), kept)

    # the last of five examples is a repetition: its rows are dropped with its tokens
    first = first_examples(batch | {"teacher_topk_ids": ids}, 4, 5)
    assert first["labels"].shape == (1, 10) and torch.equal(first["teacher_topk_ids"], ids[:, :10])

    how = {"collator": lambda _: {**batch}, "temperature": 1.0, "dtype": "float32", "batch_size": 1}
    for rows in ("labels", "all"):
        teacher, folder = ServedTeacher(url, 5, vocab_size=VOCAB), tmp_path / rows
        assert make(folder, model=teacher, blocks=[0], rows=rows, **how).rows == kept.sum()
        found = TeacherCache(folder).batch(batch)
        assert torch.equal(found[0], ids)
        assert torch.equal(found[1].nan_to_num(), logprobs.nan_to_num())


@pytest.mark.parametrize("kl_rows", ["labels", "all"])
@pytest.mark.parametrize("kept", [False, True])
def test_trains_on_the_rows_that_the_teacher_has(kept, kl_rows, tmp_path):
    """The KL term is a mean over them, the label term one over all labels, of two batches."""
    batch, model = left_padded(4), build("llama", tied=True).double()
    data = [{name: x[i] for name, x in batch.items()} for i in range(4)]
    twin = copy.deepcopy(model)
    with serving(teacher_model()) as (_, url):
        teacher = ServedTeacher(url, VOCAB)
        if kept:
            how = {"k": VOCAB, "temperature": 1.0, "dtype": "float32", "vocab_size": VOCAB}
            report = make(
                tmp_path / "c", model=teacher, blocks=data, collator=stacked, rows=kl_rows, **how
            )
            assert report.rows == 4 + 3 * 8
            teacher = TeacherCache(tmp_path / "c")
        trainer = growkern.TwoStageTrainer(
            model,
            arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2),
            inheritance=InheritanceSchedule(
                alpha=0.8, end_step=1, temperature=1.0, kl_rows=kl_rows
            ),
            teacher=teacher,
            train_dataset=data,
            data_collator=stacked,
        )
        trainer.train()
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        log_q = twin(**inputs).logits[:, :-1].log_softmax(-1)
        labels, mask = batch["labels"][:, 1:], batch["attention_mask"].bool()
        taught = mask[:, 1:] & mask[:, :-1]
        ce = torch.nn.functional.cross_entropy(log_q[labels != -100], labels[labels != -100])
        rows = []
        for b in range(4):
            logits = teacher_model()(input_ids=batch["input_ids"][b, mask[b]][None]).logits
            log_p = logits[0, :-1].log_softmax(-1)
            rows.append((log_p.exp() * (log_p - log_q[b, taught[b]])).sum(-1))
        expected = 0.2 * ce + 0.8 * torch.cat(rows).mean()
    assert losses_of(trainer) == pytest.approx([float(expected)], rel=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_trains_as_the_live_teacher(workers, server, tmp_path):
    schedule = InheritanceSchedule(alpha=0.8, end_step=7, temperature=1.0)
    options = {"schedule": schedule, "dataloader_num_workers": workers}
    live = train_with(tmp_path / "a", "llama", copy.deepcopy(teacher_model()), **options)
    served = train_with(tmp_path / "b", "llama", ServedTeacher(server[1], VOCAB), **options)
    # what is sent becomes float32: the model's float64 losses agree to its rounding
    assert losses_of(served) == pytest.approx(losses_of(live), rel=1e-5)
    for name, weight in served.model.named_parameters():
        torch.testing.assert_close(weight, live.model.get_parameter(name), rtol=1e-4, atol=1e-4)


def test_a_cache_of_it_is_asked_for_what_it_gives(server, tmp_path):
    served = ServedTeacher(server[1], 5)
    with pytest.raises(GrowthError, match="does not say how many columns it has: give vocab_size"):
        make(tmp_path / "c", "llama", model=served, temperature=1.0)
    with pytest.raises(GrowthError, match=r"gives \{'k': 5.*is to have \{'k': 4"):
        make(tmp_path / "d", "llama", model=served, vocab_size=VOCAB, temperature=1.0, k=4)


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_command_caches_it(workplace):  # noqa: F811
    """The directory and the server give the same cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(workplace / "teacher")
    text, options = str(workplace / "text" / "a.txt"), "--k 5 --temperature 1 --sequence-length 16"
    with serving(model.eval()) as (_, url):
        for source, out in ((str(workplace / "teacher"), "kept"), (url, "asked")):
            line = ["cache-teacher", source, text, "--out", str(workplace / out), *options.split()]
            line += ["--tokenizer", str(workplace / "teacher"), "--dtype", "float32"]
            done = CliRunner().invoke(app, line)
            assert done.exit_code == 0, done.output
    ours, theirs = (TeacherCache(workplace / name) for name in ("kept", "asked"))
    assert ours.header.data == theirs.header.data
    rows = [one.rows(range(len(ours))) for one in (ours, theirs)]
    assert torch.equal(rows[0][0], rows[1][0])
    torch.testing.assert_close(rows[0][1], rows[1][1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_run_file_names_a_server(workplace):  # noqa: F811
    teacher = transformers.AutoModelForCausalLM.from_pretrained(workplace / "teacher").double()
    run = (workplace / "run.toml").read_text()
    run = run.replace("end_step = 4", "end_step = 4\ntemperature = 1.0")
    (workplace / "live.toml").write_text(run)
    live = train(workplace / "live.toml", progress=False)
    with serving(teacher.eval()) as (state, url):
        lines = f'url = "{url}"\nserved_model = "teacher"\nk = {VOCAB}'
        text = run.replace('paths = ["teacher"]', lines).replace('"out"', '"out2"')
        (workplace / "served.toml").write_text(text)
        served = train(workplace / "served.toml", progress=False)
        assert served.training_loss == pytest.approx(live.training_loss, rel=1e-5)
        assert sum(path == "/v1/completions" for path, _, _ in state.requests) > 8
    for wrong, message in (
        (text.replace(f"k = {VOCAB}", ""), "url and k"),
        (text.replace(f'url = "{url}"', 'cache = "kept"'), "url and k"),
        (text.replace("[output]", 'paths = ["teacher"]\n[output]'), "give one of paths"),
    ):
        (workplace / "wrong.toml").write_text(wrong)
        with pytest.raises(GrowthError, match=message):
            train(workplace / "wrong.toml", progress=False)


def test_tries_again_while_the_server_is_busy(server):
    state, url = server
    state.faults = [
        (503, {}, b""),
        (429, {"Retry-After": "0"}, b'{"error": "slow down"}'),
        # it ends in the middle of an answer, and of the reason of an error
        (200, {"Content-Length": "99"}, b'{"choices": '),
        (502, {"Content-Length": "99"}, b"Bad"),
    ]
    ids, _ = ServedTeacher(url, 3, retries=4, concurrency=1).batch(padded_batch())
    assert ids.any() and not state.faults


@pytest.mark.parametrize(
    "faults, message",
    [
        ([(503, {}, b"upstream is down")] * 9, r"503 .*upstream is down \(3 attempts\)"),
        ([(400, {}, b'{"error": {"message": "at most 20"}}')], "400 Bad Request: at most 20$"),
        ([(401, {}, b"")], "401 Unauthorized: give the server's api_key"),
        ([(200, {}, b"<html>")] * 9, r"the answer is not JSON .*\(3 attempts\)"),
        ([(200, {}, b"{}")], "lacks a prompt's log-probs in the schema of"),
    ],
)
def test_a_failure_is_one_line(faults, message, server):
    state, url = server
    teacher = ServedTeacher(url, 3, retries=2, concurrency=1)
    state.faults = list(faults)
    with pytest.raises(GrowthError, match=message) as error:
        teacher.batch(padded_batch())
    assert "\n" not in str(error.value) and url in str(error.value)


@pytest.mark.parametrize("url", ["http://localhost:port", "http://local host:8000"])
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(GrowthError, match=r"give a URL such as http://host:8000$"):
        ServedTeacher(url, 3)


@pytest.mark.parametrize("url", ["localhost:8000", "//localhost:8000", "ftp://localhost:8000"])
def test_a_url_without_scheme_is_refused_before_any_attempt(url, monkeypatch):
    monkeypatch.setattr(http, "_client", None)
    with pytest.raises(GrowthError, match=r"give http://localhost:8000$"):
        ServedTeacher(url, 3)


def test_the_limit_of_vllm_is_named_with_both_ways_out():
    with serving(teacher_model()) as (state, url):
        teacher = ServedTeacher(url, 6, concurrency=1)
        refusal = b'{"message": "Requested 6, which is greater than max allowed: 2"}'
        state.faults = [(400, {}, refusal)]
        with pytest.raises(GrowthError, match=r"with --max-logprobs 6, or give k = 2$"):
            teacher.batch(padded_batch())


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_dead_server_is_noticed_before_the_data_is_read(workplace, monkeypatch):  # noqa: F811
    monkeypatch.setattr(run_module, "read_data", None)
    text = (workplace / "run.toml").read_text()
    text = text.replace('paths = ["teacher"]', 'url = "http://127.0.0.1:9"\nk = 2')
    (workplace / "dead.toml").write_text(text)
    with pytest.raises(GrowthError, match="is the server running"):
        train(workplace / "dead.toml", progress=False)


def test_a_slow_server_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(GrowthError, match=r"no answer within 0\.1 s: raise timeout \(2 att"):
            ServedTeacher(url, 3, timeout=0.1, retries=1)
    with pytest.raises(GrowthError, match="is the server running"):
        ServedTeacher(url, 3, retries=0)


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    state, url = server
    monkeypatch.setenv("GROWKERN_TEACHER_API_KEY", "secret")
    teacher = ServedTeacher(url + "/v1/", 3)
    teacher.batch(padded_batch())
    assert all(headers["Authorization"] == "Bearer secret" for _, headers, _ in state.requests)
    assert "secret" not in repr(vars(teacher))


def rows_in(answer):
    """The entries of an answer."""
    return answer["choices"][0]["prompt_logprobs"]


def replaced(row):
    """Changes every row to this list of (id, log-prob), and keeps the prompt's own token."""

    def edit(answer):
        entries = rows_in(answer)
        for i, entry in enumerate(entries[1:], 1):
            own = {name: {"logprob": -9.0} for name, x in entry.items() if "own" in x}
            entries[i] = own | {str(name): {"logprob": x} for name, x in row}
        return answer

    return edit


def shorter(answer):
    rows_in(answer).pop()
    return answer


def earlier(answer):
    """Every entry is that of the next token."""
    entries = rows_in(answer)
    entries[:] = [*entries[1:], entries[-1]]
    return answer


def later(answer):
    """Every entry but the first is that of the token before."""
    entries = rows_in(answer)
    entries[1:] = [entries[1], *entries[1:-1]]
    return answer


def another_prompt(answer):
    """The own tokens are those of another text."""
    for entry in rows_in(answer)[1:]:
        for name in [name for name, x in entry.items() if "own" in x]:
            del entry[name]
    return answer


def without_prompt(answer):
    answer["choices"][0].popitem()
    return answer


ROW = [(1, -1.0), (2, -2.0), (3, -3.0)]


@pytest.mark.parametrize(
    "row, message",
    [
        ([(1, 5.0), (2, 4.0), (3, 3.0)], "gives the log-prob 5: check"),
        ([(1, 0.01), (2, -9.0), (3, -9.0)], "gives the log-prob 0.01: check"),
        ([(1, -0.1), (2, -0.1), (3, -0.1)], r"gives probabilities that add up to 2\.71"),
        ([(1, -0.7), (2, -0.7), (3, -2.0)], r"gives probabilities that add up to 1\.12"),
        ([(1, float("inf")), *ROW[1:]], r"gives token \d+ with inf, which is no log-prob: give a"),
        ([(1, float("nan")), *ROW[1:]], r"gives token \d+ with nan, which is no log-prob: give a"),
        (
            # a float64 that is -inf as a float32
            [*ROW, (4, -4e300)],
            r"gives token \d+ with -4e\+300, which is no log-prob: give a smaller k, or",
        ),
        ([*ROW, (4, float("-inf"))], r"gives token \d+ with -inf, which is no log-prob: give a"),
        ([*ROW, (4, "-4.0")], "with '-4.0', which is no log-prob"),
        ([*ROW, (4, True)], "with True, which is no log-prob"),
        ([*ROW, (4, -(10**400))], "0, which is no log-prob"),
        ([*ROW, (4, None)], r"gives token \d+ with None, which is no log-prob: give a smaller k,"),
        ([*ROW, (-1, -4.0)], "'-1' is no token id"),
        ([*ROW, (1 << 31, -4.0)], "'2147483648' is no token id"),
        ([*ROW, (10**30, -4.0)], "is no token id"),
        ([*ROW, (" 1", -4.0)], "' 1' is no token id"),
        ([*ROW, ("01", -4.0)], "'01' is no token id"),
        ([*ROW, ("1_0", -4.0)], "'1_0' is no token id"),
        ([*ROW, (4.0, -4.0)], r"4\.0'?( is no token id|\))"),
        ([*ROW, ("x" * 5000, -4.0)], "xxx"),
    ],
)
def test_rows_that_are_no_distribution_are_refused(row, message, server):
    state, url = server
    state.edit = replaced(row)
    with pytest.raises(GrowthError, match=message) as error:
        ServedTeacher(url, 3, concurrency=1).batch(padded_batch())
    said = str(error.value)
    assert "\n" not in said and url in said and len(said) < 700


def test_rows_within_the_rounding_of_bfloat16_are_taken(server):
    """A server that computes in 16 bits rounds each log-prob by up to 1/512 of it."""
    state, url = server
    state.edit = replaced([(1, -0.6914), (2, -0.6914), (3, -8.0)])
    ids, _ = ServedTeacher(url, 3).batch(padded_batch())
    assert ids[0, 0, 2] == 3


@pytest.mark.parametrize(
    "edit, message",
    [
        (shorter, "tokens were sent, and 8 came back"),
        (earlier, "the first token has a row, so the rows are shifted"),
        (later, r"its token \d is not \d+"),
        (another_prompt, r"its token \d is not \d+, which was sent"),
        (without_prompt, "lacks a prompt's log-probs"),
    ],
)
def test_an_answer_to_another_prompt_is_refused(edit, message, server):
    state, url = server
    state.edit = edit
    with pytest.raises(GrowthError, match=message):
        ServedTeacher(url, 3).batch({"input_ids": padded_batch()["input_ids"][:1]})


def test_wrong_answers_are_refused(server):
    state, url = server
    batch = padded_batch()
    state.most = 2
    with pytest.raises(GrowthError, match=r"gives [23] tokens per row, not k=6"):
        ServedTeacher(url, 6).batch(batch)
    state.most = 10**6
    with pytest.raises(GrowthError, match="vocab_size is 32: teacher and student must have the"):
        ServedTeacher(url, 6, vocab_size=32).batch(batch)
    state.longest = 9
    with pytest.raises(GrowthError, match="has 9 tokens, but teacher is served with room for 9"):
        ServedTeacher(url, 6).batch(batch)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": 0}, "k is 0: it must be at least 1"),
        ({"k": 2.5}, r"k=2\.5: expected a whole number"),
        ({"k": True}, "k=True: expected a whole number"),
        ({"retries": 1.5}, r"retries=1\.5: expected a whole number"),
        ({"concurrency": 1.5}, r"concurrency=1\.5: expected a whole number"),
        ({"timeout": "9"}, "timeout='9': expected a number"),
        ({"timeout": 0}, "timeout is 0: it must be at least 0.001"),
        ({"timeout": float("nan")}, "timeout is nan: it must be at least 0.001"),
        ({"model": "other"}, r"has no model 'other': give model, one of \['teacher'\]"),
    ],
)
def test_wrong_options_are_refused(options, message, server):
    with pytest.raises(GrowthError, match=message):
        ServedTeacher(server[1], **({"k": 3} | options))


def test_what_the_server_is_must_be_clear(server):
    state, url = server
    state.names = ["a", "b"]
    with pytest.raises(GrowthError, match=r"has several models: give model, one of \['a', 'b'\]"):
        ServedTeacher(url, 3)
    assert ServedTeacher(url, 3, model="b").model == "b"


def test_a_teacher_that_does_not_fit_is_refused_before_training(server, tmp_path):
    served = ServedTeacher(server[1], 3, tokenizer=TinyTokenizer())
    with pytest.raises(GrowthError, match=r"'temperature': 1\.0.*asks for.*'temperature': 2\.0"):
        train_with(tmp_path, "llama", served)
    schedule = InheritanceSchedule(end_step=2, temperature=1.0)
    with pytest.raises(GrowthError, match="teacher that predicts the next token"):
        train_with(tmp_path, "bert", served, schedule=schedule)
    served.facts = replace(served.facts, tokenizer="0" * 64)
    with pytest.raises(GrowthError, match="made with another tokenizer"):
        TopKTeacher(served, schedule).common_vocabulary(build("llama"), TinyTokenizer())
