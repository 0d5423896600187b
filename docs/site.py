"""Hook of MkDocs: takes files beside the documentation into the site, and makes links fit.

The pages link to files of the repository as `../examples/x.toml`, which works where the repository
is shown. In the site these files lie beside the pages. The README is the home page, and the tables
of all training runs are a page too.

The pages are also there as Markdown, for readers of `llms.txt`, which is their index README.md.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#:]+)")
FOLDER = re.compile(r"\[([^\]]*)\]\(([^)#:]+)\)")
# pages that are not in the folder of the documentation
ELSEWHERE = {"index.md": ROOT / "README.md", "tables.md": ROOT / "bench" / "results" / "paper.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, and each file of the repository that a page links to."""
    pages = [*ELSEWHERE.values(), *sorted(Path(config.docs_dir).glob("*.md"))]
    links = ((page, link) for page in pages for link in LINK.findall(page.read_text()))
    linked = {(page.parent / link).resolve() for page, link in links}
    for path in sorted(linked):
        is_page = path in ELSEWHERE.values() or path.is_relative_to(config.docs_dir)
        if path.is_file() and not is_page:
            name = path.relative_to(ROOT).as_posix()
            # a page of its own would ask for links and a place in the menu
            uri = f"{name}.txt" if name.endswith(".md") else name
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=path.read_text()))
    return files


def on_post_build(config: Any) -> None:
    """Write the pages as Markdown into the site, where the links of llms.txt lead."""
    pages = {page.name: page for page in Path(config.docs_dir).glob("*.md")}
    pages["llms.txt"] = pages.pop("README.md")
    for uri, page in (pages | ELSEWHERE).items():
        text = _with_links(page.read_text(), page.parent, config)
        (Path(config.site_dir) / uri).write_text(text)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the script with which the search works from files from here, not from the network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "iframe_worker.js")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where `on_files` has put their files."""
    path = ELSEWHERE.get(page.file.src_uri)
    return _with_links(markdown, path.parent if path else Path(config.docs_dir), config)


def _with_links(markdown: str, base: Path, config: Any) -> str:
    """A page whose links lead to the places of their files in the site.

    Args:
        base: folder that the links start from.
    """
    uris = {path: uri for uri, path in ELSEWHERE.items()}

    def moved(match: re.Match[str]) -> str:
        path = (base / match[1]).resolve()
        if path.is_relative_to(config.docs_dir):
            return f"]({path.relative_to(config.docs_dir).as_posix()}"
        if path in uris:
            return f"]({uris[path]}"
        name = path.relative_to(ROOT).as_posix()
        return f"]({name}.txt" if name.endswith(".md") else f"]({name}"

    def named(match: re.Match[str]) -> str:
        # a folder has no page
        return match[1] if (base / match[2]).is_dir() else match[0]

    return LINK.sub(moved, FOLDER.sub(named, markdown))
