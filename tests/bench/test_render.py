"""Tables and pictures match the JSON. Where a result is missing they say "not measured yet"."""

import re

from bench import report
from bench.paper.page import page_text
from bench.shared import results, tables
from tests.bench.documents import document

ROOT = results.ROOT


def test_without_results_nothing_is_claimed(tmp_path):
    assert report.gpu_table(tmp_path) == "No GPU has been measured yet."
    assert report.gpus(tmp_path) == []


def test_the_pages_match_the_results():
    text = "\n".join(page.read_text() for page in report.PAGES)
    assert report.with_blocks(text, results.RESULTS) == text, "run python -m bench.report"
    assert all(f"<!-- {name} -->" in text for name in report.BLOCKS)
    aot = (results.RESULTS / "aot.md").read_text()
    assert report.aot_table(results.RESULTS) == aot, "run python -m bench.report"
    paper = (results.RESULTS / "paper.md").read_text()
    assert page_text(results.RESULTS) == paper, "run python -m bench.report"
    shown = set(re.findall(r"\]\((.*?)\)", paper))
    drawn = {path.name for path in results.RESULTS.glob("paper-*-tiny*.png")}
    assert shown == drawn, "run python -m bench.report"


EXPAND = {"dtype": "bfloat16", "maps": "arbitrary", "scaled": "routing", "limit ms": 0.09}
EXPAND |= {"eager ms": 0.6, "compiled ms": 0.3, "ours ms": 0.1, "reused ms": 0.05}


def test_figures_come_from_good_runs_of_real_sizes(tmp_path):
    path = tmp_path / "nvidia-h200" / "bench_expand.json"
    results.write(path, document(rows=[EXPAND]))
    assert "0.90 of a copy, 6.0 x eager, 3.0 x torch.compile" in report.gpu_table(tmp_path)
    assert "NVIDIA H200" in report.gpu_table(tmp_path).splitlines()[0]
    for changes in ({"status": "failed"}, {"toy": True}):
        results.write(path, document(rows=[EXPAND], **changes))
        assert "0.90" not in report.gpu_table(tmp_path)
    assert "failed" not in report.gpu_table(tmp_path), "a dry run is no result"


def test_the_readme_quotes_only_what_a_gpu_measured(tmp_path):
    """A piece that failed, or a peer that is missing, leaves the table as it is."""
    ours = {"provider": "growkern", "wall s": 0.05, "extra MiB": 2048.0, "gradient error": 0.002}
    peer = ours | {"provider": "liger jsd", "wall s": 0.06}
    absent = {"provider": "torch.compile", "why not": "no compiler"}
    path = tmp_path / "nvidia-h200" / "headline.json"
    results.write(path, document(rows=[ours, absent, peer]))
    ((_, own, others),) = tables.measured_on_gpus(tmp_path)
    assert own == "50 ms, 2.0 GiB, gradient error 0.2%"
    assert others == "Liger-Kernel's chunked JSD: 60 ms, 2.0 GiB, gradient error 0.2%"
    assert len([x for x in tables.headline(tmp_path).splitlines() if x.startswith("|")]) == 4
    results.write(path.with_name("train_llama.json"), document(rows=[]))
    for changes in ({"status": "failed"}, {"rows": [absent, peer]}):
        results.write(path, document(**({"rows": [ours, peer]} | changes)))
        assert tables.measured_on_gpus(tmp_path) == []


def test_a_failed_check_reads_failed(tmp_path):
    path = tmp_path / "nvidia-h200" / "check_expand.json"
    why = ["bfloat16: error 1 | 2\nand more", "another"]

    def line():
        return next(x for x in report.gpu_table(tmp_path).splitlines() if "`expand` against" in x)

    results.write(path, document(status="failed", failures=why))
    assert line().endswith("| failed: bfloat16: error 1 / 2 (commit abc) |")
    results.write(path, document(status="crashed", failures=["exit code -11"], rows=[]))
    assert line().endswith("| crashed, failed: exit code -11 (commit abc) |")
    results.write(path, document(status="skipped", reason="needs pytest"))
    assert line().endswith("| skipped: needs pytest |")
    results.write(path, document())
    assert line().endswith("| 1 right (commit abc) |")
    # a failure that is worse documented must still be named
    worse = document(status="failed", failures=why, machine={"dirty": True})
    assert results.keep(path, worse) != path
    assert line().endswith(
        "| 1 right (commit abc); a later run failed: bfloat16: error 1 / 2 (commit abc) |"
    )


def test_a_page_says_which_figures_are_of_other_kernels(tmp_path):
    """A new run of the kernels of today takes its commit from the list."""
    today = results.source_digest(results.KERNELS)
    rows = [{"provider": "growkern", "wall s": 0.05}, {"provider": "GEMMs alone", "wall s": 0.04}]
    for kernels, old in ((None, True), ("others", True), (today, False)):
        made = document(rows=rows, machine={"commit": "abc", "kernels": kernels})
        results.write(tmp_path / "nvidia-h200" / "headline_alone.json", made)
        for text in (report.gpu_table(tmp_path), tables.headline(tmp_path)):
            assert "commit abc" in text or "H200, abc" in text
            assert text.splitlines()[-1].startswith("|") != old
    assert results.machine()["kernels"] == today
