"""A result never replaces a better documented one, and a finished piece is recognised."""

import re

import pytest

from bench.shared import results
from tests.bench.documents import ROW, document

# Each is worse than the one before it. More rows or facts cannot make up for that.
RANKS = {
    "best": document(rows=[ROW, ROW]),
    "fewer rows": document(),
    "failed": document(status="failed", rows=[ROW] * 9),
    "timeout": document(status="timeout", rows=[ROW] * 9),
    "no version": document(machine={"triton": None}, rows=[ROW] * 9),
    "no gpu": document(machine={"gpu": None, "python": "3"}, rows=[ROW] * 9),
    "said": document(machine={"dirty": None, "python": "3"}, rows=[ROW] * 9),
    "dirty": document(machine={"dirty": True, "python": "3"}, rows=[ROW] * 9),
    "no commit": document(machine={"commit": "unknown", "dirty": None}, rows=[ROW] * 9),
    "toy": document(toy=True, rows=[ROW] * 9),
}


def test_every_rule_of_rank():
    ranked = [results.rank(x) for x in RANKS.values()]
    assert ranked == sorted(ranked, reverse=True) and len(set(ranked)) == len(ranked)
    # A row of a missing library does not count.
    unasked = document(rows=[ROW, {"provider": "theirs", "why not": "x is not installed: no x"}])
    assert results.rank(unasked) == results.rank(RANKS["fewer rows"])


@pytest.mark.parametrize("name", list(RANKS)[1:])
def test_worse_results_lie_beside_better_ones(name, tmp_path):
    path, worse, best = tmp_path / "piece.json", RANKS[name], RANKS["best"]
    assert results.keep(path, worse) == path, "the first result is saved"
    assert results.keep(path, best) == path
    aside = results.keep(path, worse)
    assert aside != path and results.read(path) == best and results.read(aside) == worse
    newer = document(machine={"date": "e"}, rows=[ROW, ROW])
    assert results.keep(path, newer) == path and results.read(path) == newer
    assert not aside.exists(), "a good run makes the failed one obsolete"
    assert results.keep(path, best) == aside and results.read(path) == newer, "an older one"


def test_a_result_aside_is_not_replaced_by_a_worse_one_of_the_same_sources(tmp_path):
    path = tmp_path / "piece.json"
    results.keep(path, RANKS["best"])
    aside = results.keep(path, RANKS["dirty"])
    results.keep(path, RANKS["no commit"])
    assert results.read(aside) == RANKS["dirty"]
    other = document(machine={"commit": "unknown", "dirty": None, "sources": "2"})
    results.keep(path, other)
    assert results.read(aside) == other


def test_a_machine_without_git_recognises_its_own_results(tmp_path):
    """They cannot replace a committed result of older sources, but must not run again."""
    path, facts = tmp_path / "piece.json", document(machine={"sources": "2"})["machine"]
    results.keep(path, document())
    assert not results.is_done(path, facts)
    done = document(machine={"sources": "2", "commit": "unknown", "dirty": None})
    assert results.keep(path, done) == results.aside_of(path)
    assert results.is_done(path, facts) and results.is_done(path, document()["machine"])


def test_results_of_another_machine_are_taken_by_the_same_rule(tmp_path, monkeypatch):
    """A result made without git from the same sources as here gets their commit."""
    monkeypatch.setattr(results, "git_facts", lambda: {"commit": "fff", "dirty": False})
    monkeypatch.setattr(results, "source_digest", lambda: "2")
    there, here = tmp_path / "there", tmp_path / "here"
    nowhere = {"commit": "unknown", "dirty": None, "date": "e"}
    ours = document(machine=nowhere | {"sources": "2"})
    results.write(there / "gpu" / "mine.aside.json", ours)
    results.write(there / "gpu" / "other.json", document(machine=nowhere | {"sources": "3"}))
    for name in ("mine", "other"):
        results.write(here / "gpu" / f"{name}.json", document())
    results.take(there, here)
    mine = results.read(here / "gpu" / "mine.json")
    assert mine["machine"] == ours["machine"] | {"commit": "fff", "dirty": False}
    assert results.read(here / "gpu" / "other.json") == document()
    assert results.read(here / "gpu" / "other.aside.json")["machine"]["sources"] == "3"


def test_a_piece_is_done_for_these_sources_on_this_gpu():
    facts = document()["machine"]
    assert results.same_run(document(), facts)
    assert not results.same_run(document(status="failed"), facts)
    for key in ("sources", "gpu", "torch", "triton"):
        assert not results.same_run(document(), facts | {key: "other"})


@pytest.mark.parametrize("path", sorted(results.RESULTS.rglob("*.json")), ids=lambda x: x.stem)
def test_a_result_says_how_it_was_made(path):
    """From sources that were committed, and on which machine; a study says it of each run."""
    document = results.read(path)
    assert document["rows"], "broken, or empty"
    # machine code is compiled anywhere
    keys = {"aot": ("triton",), "demo": ("devices",)}.get(path.stem, ("cpu", "gpu"))
    shared = document.get("facts", ())
    for made in shared or (document["rows"] if path.stem.startswith("paper") else [document]):
        facts = {**made, **made["machine"]}
        assert re.fullmatch(r"[0-9a-f]{7,40}", facts["commit"]) and not facts.get("dirty")
        assert any(map(facts.get, keys))
    assert all(row["facts"] < len(shared) for row in document["rows"] if shared)
