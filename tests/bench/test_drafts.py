"""The count of exact drafts: a model type that is lost fails."""

import json

import pytest

from bench import drafts
from bench.shared import tables

# two stacks of layers, which drafts refuse in no time
MODEL = "t5"


@pytest.mark.parametrize("before", ["exact", "refused"])
def test_a_lost_draft_fails(tmp_path, monkeypatch, before):
    row = {"model": MODEL, "table": True, "draft": before}
    (tmp_path / "drafts.json").write_text(json.dumps({"status": "ok", "rows": [row]}))
    monkeypatch.setattr(drafts, "RESULTS", tmp_path)
    assert drafts.main(["--against", "--only", MODEL]) == (before == "exact")


def test_the_table_counts_every_row(monkeypatch):
    words = ("exact", "exact", "wrong", "failed", "refused")
    rows = [{"model": str(n), "table": n < 3, "draft": word} for n, word in enumerate(words)]
    monkeypatch.setattr(tables, "rows_of", lambda *_: rows)
    lines = tables.drafts(None).splitlines()[2:]
    numbers = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert numbers == [["3", "2", "1", "0"], ["2", "0", "1", "1"]]
