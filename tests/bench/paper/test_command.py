"""Calls of `python -m bench.paper`: what they keep, and what they refuse."""

import pytest

from bench.paper import __main__ as command, page
from bench.paper.compare import of_text, save
from bench.paper.corpus import HASH, prepare, split
from bench.paper.runs import ROWS
from bench.paper.settings import MICRO_GPT
from bench.shared.results import RESULTS, append_row, read, write
from growkern.errors import GrowthError

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
