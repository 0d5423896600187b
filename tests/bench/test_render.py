"""Tables and pictures match the JSON. Where a result is missing they say "not measured yet"."""

import re

from bench import report
from bench.paper.page import page_text
from bench.shared import results, tables
from tests.bench.documents import document


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
