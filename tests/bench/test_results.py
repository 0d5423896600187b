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
    assert document.get("rows") or document["curves"], "broken, or empty"
    # machine code is compiled anywhere
    keys = {"aot": ("triton",), "demo": ("devices",)}.get(path.stem, ("cpu", "gpu"))
    shared = document.get("facts", ())
    for made in shared or (document["rows"] if path.stem.startswith("paper") else [document]):
        facts = {**made, **made["machine"]}
        assert re.fullmatch(r"[0-9a-f]{7,40}", facts["commit"]) and not facts.get("dirty")
        assert any(map(facts.get, keys))
    assert all(row["facts"] < len(shared) for row in document.get("rows", ()) if shared)
