"""Calls of `python -m bench.paper`: what they refuse, what they keep, and what they save."""

import hashlib
import signal
import tracemalloc

import pytest

from bench.paper import __main__ as command
from bench.paper import corpus, page
from bench.paper.compare import of_text, save
from bench.paper.corpus import HASH, prepare, split
from bench.paper.runs import ROWS, rows_of, take_over
from bench.paper.settings import MICRO_GPT
from bench.shared.results import RESULTS, append_row, read, write
from growkern.errors import GrowthError
from testbed import warm

OLD, NEW = {"train_bytes": 1000, "validation_bytes": 50}, {"train_bytes": 900}


def called(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["paper", *map(str, arguments)])
    command.main()


def refused(monkeypatch, capsys, *arguments):
    """The last line of a call that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        called(monkeypatch, *arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder with the committed paper.json, in place of bench/results."""
    folder = tmp_path / "results"
    write(folder / "paper.json", read(RESULTS / "paper.json"))
    monkeypatch.setattr(command, "RESULTS", folder)
    return folder


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line {i} of the text, times {i * i}\n" for i in range(2000)))
    return file


def row(name, loss=2.0, **more):
    system = name.partition("/")[2].partition("-")[0]
    return {"name": name, "system": system, "losses": [loss], **more}


def test_saving_drops_no_row(results, tmp_path, monkeypatch, capsys):
    """Neither without runs, nor with runs of another size."""
    monkeypatch.setattr(page, "draw", lambda *found, title: drawn.append(title))
    before, drawn = (results / "paper.json").read_bytes(), []
    called(monkeypatch, "report", "--dir", tmp_path / "none")
    shown = capsys.readouterr().out
    assert "bert2BERT, Table 5: GPT-2, tiny" in shown
    called(monkeypatch, "report", "--save", "--dir", tmp_path / "none")
    assert capsys.readouterr().out == shown
    assert (results / "paper.json").read_bytes() == before
    assert "Table 5" in (results / "paper.md").read_text()
    assert "bert2BERT, Table 5: GPT-2, tiny" in drawn

    known = read(results / "paper.json")["rows"]
    micro, small = row("micro-gpt/fpi-8", text=OLD), row("small-gpt/fpi-8", text=OLD)
    again = {**known[0], "losses": [9.0, 1.0]}
    for one in (micro, small, again):
        append_row(tmp_path / "runs" / ROWS, one)
    called(monkeypatch, "report", "--save", "--dir", tmp_path / "runs")
    assert read(results / "paper.json")["rows"] == [again, *known[1:], small]
    # only the few that are there
    assert "Table 5" not in capsys.readouterr().out
    called(monkeypatch, "report", "--known", "--dir", tmp_path / "runs")
    assert "Table 5" in capsys.readouterr().out


def test_an_accuracy_is_that_of_the_row_s_own_model(tmp_path):
    save(tmp_path, [row(f"tiny-gpt/{name}", accuracy=0.5) for name in "ab"] + [row("tiny-gpt/c")])
    # the first model ended elsewhere
    again = [row("tiny-gpt/a", 1.0), row("tiny-gpt/b"), row("tiny-gpt/c", accuracy=0.25)]
    save(tmp_path, again)
    assert read(tmp_path / "paper.json")["rows"] == [
        row("tiny-gpt/a", 1.0),
        row("tiny-gpt/b", accuracy=0.5),
        row("tiny-gpt/c", accuracy=0.25),
    ]
    (tmp_path / "paper.json").write_text("{")
    with pytest.raises(GrowthError, match="not JSON"):
        save(tmp_path, [row("tiny-gpt/a")])


def test_rows_of_another_text_are_neither_taken_over_nor_saved(tmp_path):
    """Old rows are compared by the bytes of their text, new ones by its hash."""
    old, hashed = row("tiny-gpt/a", text=OLD), row("tiny-gpt/b", text={**OLD, HASH: "abc"})
    other = row("tiny-gpt-domain/a", text=NEW)
    save(tmp_path, [old, hashed, other])
    text = {**OLD, HASH: "abc", "validation_bytes": 9}
    # rows of a text that is not known here are left
    assert of_text(tmp_path, {"corpus": text}, "tiny") == [old, hashed]
    assert of_text(tmp_path, {"corpus": text, "domain": NEW}, "tiny") == [old, hashed, other]
    assert of_text(tmp_path, {"corpus": NEW}, "small") == []
    for wrong in (NEW, {**OLD, HASH: "abd"}):
        with pytest.raises(GrowthError, match=r"tiny-gpt/[ab] was trained on 1,000 bytes"):
            of_text(tmp_path, {"corpus": wrong}, "tiny")
    before = (tmp_path / "paper.json").read_bytes()
    with pytest.raises(GrowthError, match="tiny-bert/a was trained on 900 bytes"):
        save(tmp_path, [row("tiny-bert/a", text=NEW)])
    assert (tmp_path / "paper.json").read_bytes() == before


def test_known_rows_join_those_of_a_folder(tmp_path):
    append_row(tmp_path / ROWS, row("tiny-gpt/a", 1.0))
    take_over(tmp_path, [row("tiny-gpt/a", 2.0), row("tiny-gpt/b", 2.0)])
    assert {name: one["losses"] for name, one in rows_of(tmp_path).items()} == {
        "tiny-gpt/a": [1.0],
        "tiny-gpt/b": [2.0],
    }


def parts(files):
    """The texts for training, and those for validation."""
    pieces = list(split(files))
    return [[text for held_out, text in pieces if held_out is kind] for kind in (False, True)]


def test_blocks_are_held_out_by_their_text(lines, tmp_path):
    train, validation = parts([lines])
    whole = lines.read_text()
    assert "".join(text for _, text in split([lines])) == whole
    assert 0.02 < sum(map(len, validation)) / len(whole) < 0.08
    assert all(part.endswith("\n") for part in (*train, *validation))
    copies = [tmp_path / f"copy{i}.txt" for i in range(2)]
    for copy in copies:
        copy.write_text(whole * 100)
    train, validation = parts(copies)
    assert train[: len(train) // 2] * 2 == train and validation
    # one line without an end
    lines.write_text("word " * 2000)
    assert "".join(text for _, text in split([lines])) == "word " * 2000
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(GrowthError, match=r"short.txt: 9 bytes"):
        split([tmp_path / "short.txt"])
    lines.write_text("the same\n" * 2000)
    with pytest.raises(GrowthError, match="or repeats itself"):
        prepare(tmp_path / "runs", MICRO_GPT, {"corpus": [lines]})
    assert not (tmp_path / "runs" / "corpus" / "train.txt").exists()


@pytest.mark.parametrize("chunk", [7, 1000, 1 << 20])
def test_chunks_change_no_piece(chunk, tmp_path, monkeypatch):
    """Neither where files are cut, nor where a tokenizer's paragraphs are."""
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for i, file in enumerate(files):
        file.write_text("".join(f"{j * j * i}" + "\n" * (j % 5) for j in range(300)))
    whole = "".join(file.read_text() for file in files)
    expected = list(split(files))
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    assert list(split(files)) == expected and len(expected) > 8
    assert "".join(text for _, text in expected) == whole
    (tmp_path / "whole").write_text(whole)
    assert list(corpus._paragraphs(tmp_path / "whole")) == whole.split("\n\n")


def test_a_large_text_is_not_in_memory(tmp_path):
    file, folder = tmp_path / "one.txt", tmp_path / "corpus"
    with file.open("w") as out:
        for i in range(400_000):
            out.write(f"line {i} of the text, times {i * i}\n")
    assert file.stat().st_size > 12 << 20
    tracemalloc.start()
    made, again = (corpus._write_text(folder, "corpus", [file]) for _ in range(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # some chunks of 1 MiB
    assert peak < 6 << 20 and made == again
    train = (folder / "train.txt").read_bytes()
    assert made == hashlib.sha256(train).hexdigest()[:16]
    sizes = [(folder / name).stat().st_size for name in ("train.txt", "validation.txt")]
    assert sizes[1] == pytest.approx(sizes[0] / 19, rel=0.2)
    assert sum(sizes) >= file.stat().st_size


def test_a_folder_has_one_text(lines, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    facts = prepare(folder, MICRO_GPT, {"corpus": [lines]})["corpus"]
    assert facts["train_bytes"] == (folder / "corpus" / "train.txt").stat().st_size
    assert prepare(folder, MICRO_GPT, {"corpus": [lines]})["corpus"] == facts
    call = ("table5", "--size", "micro", "--dir", folder)
    said = refused(monkeypatch, capsys, *call)
    assert facts[HASH] in said and "another --dir" in said
    lines.write_text(lines.read_text() + "more\n")
    assert facts[HASH] in refused(monkeypatch, capsys, *call, "--text", lines)


def test_one_run_is_repeated_beside_the_committed_one(results, tmp_path, monkeypatch, capsys):
    class Place:
        def __init__(self, *_):
            pass

        def make(self, jobs):
            return [{"losses": [5.0, 3.25], "flops": [0, 1e12]} for _ in jobs]

    monkeypatch.setattr(command, "Workplace", Place)
    monkeypatch.setattr(command, "prepare", lambda *_: {})
    name = "tiny-gpt/fpi_padded-1000-0.009-seed2"
    write(results / "paper.json", {"rows": [row(name, 3.5)]})
    command.train_table(command.options_of(["table5", "--row", name, "--dir", str(tmp_path)]))
    assert "loss 3.2500" in (said := capsys.readouterr().out) and said.endswith("loss 3.5000\n")
    wrong = command.options_of(["table5", "--row", name[:-1] + "9", "--dir", str(tmp_path)])
    monkeypatch.setattr(command, "prepare", None)
    with pytest.raises(GrowthError, match=f"The nearest is {name[:-1]}"):
        command.train_table(wrong)


def test_a_killed_command_resumes_and_ends_where_it_would_have(lines, tmp_path):
    call = ["table5", "--size", "micro", "--seeds", "1", "--systems", "scratch", "direct_copy"]
    call += ["--workers", "1", "--text", lines, "--dir"]

    def run(folder, pattern):
        return warm.run("tests.bench.paper.saving", pattern, *call, tmp_path / folder).returncode

    # in the middle of a run whose source is done
    middle = tmp_path / "killed" / "*" / "direct_copy-32-*-seed1" / "checkpoint-8"
    assert run("killed", middle) == -signal.SIGKILL
    before = rows_of(tmp_path / "killed")
    (found,) = (tmp_path / "killed").glob(str(middle.relative_to(tmp_path / "killed")))
    name = f"{found.parts[-3]}/{found.parts[-2]}"
    assert name not in before and len(before) > 2
    nothing = tmp_path / "nothing"
    assert run("killed", nothing) == 0 and run("whole", nothing) == 0
    ends = [rows_of(tmp_path / folder) for folder in ("whole", "killed")]
    first, second = (
        {one["name"]: (one["steps"], one["losses"], one["flops"]) for one in end.values()}
        for end in ends
    )
    assert first == second and len(first) == 6
    # the seconds of a part say nothing of the whole
    assert ends[1][name]["seconds"] is None
    assert [ends[1][done] for done in before] == [*before.values()]
