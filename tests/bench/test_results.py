"""A finished piece is recognised, and results say how they were made."""

import re

import pytest

from bench.shared import results
from tests.bench.documents import document


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
