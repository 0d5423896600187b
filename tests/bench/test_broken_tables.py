"""Broken tables: the check notices them, and the benchmark notices a check that does not."""

from bench import broken_tables, drafts
from growkern.growth.own_table import SizeCheck
from tests.shared import walks


def test_the_check_notices_broken_tables():
    assert broken_tables.main(["--count", str(2 * walks.times), "--seed", "5"]) == 0


def test_a_check_that_passes_everything_is_found_out(monkeypatch):
    table = broken_tables.copied("llama")
    table["attention"]["pairs"] = "adjacent"
    passes = [SizeCheck("head_dim 8 -> 16", "exact")]
    monkeypatch.setattr(broken_tables, "growths_of", lambda *_: passes)
    assert broken_tables.outcome("llama", table) == "MISSED"


def test_a_draft_that_is_no_longer_exact_ends_with_1(monkeypatch, capsys):
    assert drafts.main(["--against", "--only", "gpt2"]) == 0
    monkeypatch.setattr(drafts, "drafted", lambda _: [{"model": "gpt2", "draft": "refused"}])
    assert drafts.main(["--against", "--only", "gpt2"]) == 1
    assert capsys.readouterr().out.endswith("1 were exact; no longer: gpt2\n")
