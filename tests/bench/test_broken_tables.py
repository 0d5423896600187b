"""Broken tables: the check notices them, and the benchmark notices a check that does not."""

from bench import broken_tables
from growkern.growth.own_table import SizeCheck
from tests.shared import walks


def test_the_check_notices_broken_tables():
    assert broken_tables.main(["--count", str(2 * walks.times), "--seed", "5"]) == 0


def test_a_check_that_passes_everything_is_found_out(monkeypatch):
    table = broken_tables.copied("llama")
    table["attention"]["pairs"] = "adjacent"
    passes = [SizeCheck("head_dim 8 -> 16", "exact")]
    monkeypatch.setattr(broken_tables, "first_growths", lambda *_: passes)
    assert broken_tables.outcome("llama", table) == "MISSED"
