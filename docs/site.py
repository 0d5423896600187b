"""Hook of MkDocs: takes files beside the documentation into the site, and makes links fit.

The pages link to files of the repository as `../examples/x.toml`, which works where the repository
is shown. In the site these files lie beside the pages. The README is the home page.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#:]+)")
FOLDER = re.compile(r"\[([^\]]*)\]\(([^)#:]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, and each file of the repository that a page links to."""
    pages = [ROOT / "README.md", *sorted(Path(config.docs_dir).glob("*.md"))]
    links = ((page, link) for page in pages for link in LINK.findall(page.read_text()))
    linked = {(page.parent / link).resolve() for page, link in links}
    for path in sorted(linked):
        if path.is_file() and not path.is_relative_to(config.docs_dir):
            name = path.relative_to(ROOT).as_posix()
            # a page of its own would ask for links and a place in the menu
            uri = f"{name}.txt" if name.endswith(".md") else name
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_post_build(config: Any) -> None:
    """Put the sources of the pages beside the site, where the links of llms.txt lead."""
    for page in Path(config.docs_dir).glob("*.md"):
        shutil.copyfile(page, Path(config.site_dir) / page.name)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where `on_files` has put their files."""
    base = ROOT if page.file.src_uri == "index.md" else Path(config.docs_dir)

    def moved(match: re.Match[str]) -> str:
        path = (base / match[1]).resolve()
        if path.is_relative_to(config.docs_dir):
            return f"]({path.relative_to(config.docs_dir).as_posix()}"
        name = path.relative_to(ROOT).as_posix()
        return f"]({name}.txt" if name.endswith(".md") else f"]({name}"

    def named(match: re.Match[str]) -> str:
        # a folder has no page
        return match[1] if (base / match[2]).is_dir() else match[0]

    return LINK.sub(moved, FOLDER.sub(named, markdown))
