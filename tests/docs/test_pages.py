"""The README and the documentation: all blocks run and print what the page says."""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
from PIL import Image

import growkern
from docs import reference
from growkern.cli.commands import app
from growkern.growth.history import CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.record import lineage
from growkern.plot.curves import MEASURED, QUESTIONS
from growkern.publish import manifest
from growkern.publish.manifest import MANIFEST
from growkern.train.dataset import cache, stream
from growkern.train.loop import meter
from growkern.train.run.file import load_run
from growkern.train.topk_teacher import store
from testbed import warm
from tests.docs.run_blocks import STORIES, blocks_of

ROOT = Path(growkern.__file__).parents[1]
# docs/README.md has nothing but links
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!R]*.md"))]

EXTRAS = set(metadata("growkern").get_all("Provides-Extra"))
# commands of the pages that no test can run as they are, and why
NOT_RUN = {
    "make": "it takes minutes: tests/examples/test_demo.py runs `make demo-quick` with fewer steps",
    "git": "it needs a network",
    "python3": "the environment that it makes would lack all packages",
    "pip": "it needs a network",
}

# panels that are drawn of runs on some machines only
OF_MACHINES = [MEASURED[name][0] for name in ("maxrss", "data_time_share")]


def code_blocks(page, language):
    return [text for kind, text in blocks_of(ROOT / page) if kind == language]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "200")
        patched.setenv("GROWKERN_TOKENS", str(folder / "tokens"))
        done = warm.run("tests.docs.run_blocks", folder, *PAGES)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def printed(ran):
    return json.loads((ran / "printed.json").read_text())


def test_the_picture_of_the_quick_start_is_what_its_commands_draw(ran):
    files = ran / "quickstart/run/loss_vs_flops.png", ROOT / "bench/results/quickstart.png"
    texts = [Image.open(file).text["Description"].split("\n\n", 1) for file in files]
    mine, kept = (
        [re.sub(r"\d+\.\d+", "", x) for x in titles.split("\n") if x not in OF_MACHINES]
        for titles, _ in texts
    )
    assert mine == kept and MEASURED["kl"][0] in kept
    assert all(f"({words})" in texts[1][1] for words in QUESTIONS.values())


def says(line, printed):
    """Whether a line of a page is a part of a printed one, with losses within a tenth."""
    if line.strip() in printed:
        return True
    number = r"\d+\.\d\d\b"
    shown, found = (re.findall(number, text) for text in (line, printed))
    alike = re.sub(number, "", line) == re.sub(number, "", printed)
    return alike and all(
        math.isclose(float(a), float(b), rel_tol=0.1) for a, b in zip(shown, found, strict=True)
    )


def test_every_block_runs_and_prints_what_the_page_says(printed):
    """A block of text is an excerpt of what the block before it printed."""
    compared = 0
    for page in PAGES:
        found, blocks = printed[page.name], blocks_of(page)
        for before, (language, text) in enumerate(blocks[1:]):
            ran = ("python", "bash") if page.name in STORIES else ("python",)
            if language == "text" and blocks[before][0] in ran:
                lines = found[before].splitlines()
                compared += 1
                for line in text.splitlines():
                    assert any(says(line, printed) for printed in lines), (page.name, line)
    assert compared >= 4


def test_run_files_of_the_pages_are_valid(tmp_path):
    def loaded(text):
        (tmp_path / "run.toml").write_text(text)
        return load_run(tmp_path / "run.toml")

    block, growth = code_blocks("docs/training.md", "toml")
    run = loaded(block)
    assert run.two_stage and run.inheritance and run.teacher
    assert loaded(block + growth).later_growths
    (sections,) = code_blocks("docs/distributed.md", "toml")
    run = loaded(re.sub(r"\[model\]\npath = .*\n", "", block) + sections)
    assert run.distributed and run.growth
    (chain,) = code_blocks("docs/chain.md", "toml")
    run = loaded(chain)
    assert run.distributed and run.growth
    (data,) = code_blocks("docs/data.md", "toml")
    of_text = re.search(r"^\[data\]\n(.+\n)+", block, re.M)[0]
    assert loaded(block.replace(of_text, data)).data.text_column == "text"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_pages_name_real_files(page):
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)", text)]
    paths = re.findall(r"`((?:growkern|tests|bench|csrc)/[^`*< ]*)`", text)
    missing = [path for path in (*links, *(ROOT / path for path in paths)) if not path.exists()]
    assert not missing


def test_pages_name_real_commands():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known = {name.replace("_", "-") for name in known}
    known |= {group.name for group in app.registered_groups}
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:^|`)growkern ([a-z][a-z-]+)", text, re.M))
    assert named == known


def test_the_reference_is_fresh_and_has_every_public_name():
    """`python -m docs.reference` writes both pages."""
    page = reference.API.read_text()
    assert page == reference.api(page)
    assert reference.RUN_FILE.read_text() == reference.run_file()
    named = set(re.findall(r"^<!-- growkern\.(\w+) -->$", page, re.M))
    assert named == set(growkern.__all__) - {"__version__"}
    for name in named:
        first = inspect.getdoc(getattr(growkern, name)).splitlines()[0]
        assert first in page, name


def test_the_formats_of_records_are_those_of_the_code():
    page = (ROOT / "docs" / "recovery.md").read_text()
    for name, number in {
        f"`{LINEAGE_FILE}`": lineage.FORMAT,
        f"`{MANIFEST}`": manifest.FORMAT,
        f"`{CHECKSUMS_FILE}`": manifest.FORMAT,
        "teacher cache": store.FORMAT,
        "`stream_N.json` of a checkpoint": stream.FORMAT,
        "`log_line_N.json` of a checkpoint": meter.FORMAT,
        "cache of token ids": cache.VERSION,
    }.items():
        assert f"| {name} | {number} |" in page


def test_pages_are_short():
    """What is written by hand; and all of the pages on which a reader decides."""
    whole = {"savings.md": 1500, "choosing.md": 1200}
    for page in PAGES:
        text = page.read_text()
        if page.name not in whole:
            text = re.sub(r"<!-- (\S+) -->\n.*?<!-- /\1 -->", "", text, flags=re.S)
        most = whole.get(page.name, 1500)
        assert page == reference.RUN_FILE or len(text.split()) <= most, page.name


def test_the_index_has_the_groups_and_pages_of_the_site():
    _, *groups = (ROOT / "docs" / "README.md").read_text().split("\n## ")
    found = {x.split("\n")[0]: {*re.findall(r"(\w+\.md)\)", x)} for x in groups}
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:\n  - Home: index.md\n")[2]
    _, *groups = re.split(r"^  - ", menu.replace("tables.md", "paper.md"), flags=re.M)
    assert found == {x.split(":")[0]: {*re.findall(r"- (\w+\.md)", x)} for x in groups}
    assert set().union(*found.values()) == {"paper.md", *(page.name for page in PAGES[1:])}


def test_lines_of_shell_that_do_not_run_name_what_exists():
    """All lines of the stories run in a test, beside those that begin with one of NOT_RUN."""
    blocks = [text for page in PAGES if page.name in STORIES for text in code_blocks(page, "bash")]
    lines = re.findall(r"^(?!growkern ).+", "\n".join(blocks), re.M)
    assert {line.split()[0] for line in lines} == set(NOT_RUN)
    extras = re.findall(r"\[([a-z,]+)\]", "\n".join(lines))
    assert extras and {x for names in extras for x in names.split(",")} <= EXTRAS
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    in_ci = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.M))
    assert {"demo", "demo-quick", "test", "lint"} <= named <= targets
    assert in_ci == {"lint", "test"}


def test_make_test_runs_the_tests_that_are_named():
    given = [f"BIN={Path(sys.executable).parent}", "WORKERS=0", "ARGS=-q tests/plot/test_curve.py"]
    line = ["make", "-o", "setup", "test", *given]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "100%" in done.stdout, done.stdout + done.stderr


def test_the_site_is_built_without_a_warning(tmp_path):
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "llms.txt").read_text())
    assert len(links) > 10 and all((tmp_path / link).is_file() for link in links)
    assert (tmp_path / "bench/results/demo.png").exists()
    # the site works without a network, and its search from files
    scripts = re.findall(r'<script[^>]*src="([^"]+)"', (tmp_path / "index.html").read_text())
    assert scripts and all((tmp_path / script).is_file() for script in scripts)
    for page in PAGES[1:]:
        text = (tmp_path / page.name).read_text()
        dead = [x for x in re.findall(r"\]\(([^)#:]+)", text) if not (tmp_path / x).is_file()]
        assert not dead, (page.name, dead)
