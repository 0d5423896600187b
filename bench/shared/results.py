"""Stores results as JSON and decides when a new result may replace an old one.

A result is one JSON document. It says what ran, on which machine, from which sources and how it
ended. Then come its rows. A new result never replaces a better documented one.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
# what `bench.gpu` writes, until `bench.report --take` brings it into RESULTS
GPU_RUNS = ROOT / "runs" / "gpu"
# The files that results depend on. The results themselves and prose do not count.
SOURCES = (
    "growkern/**/*.py",
    "growkern/**/*.toml",
    "growkern/**/*.json",
    "csrc/**/*",
    "testbed/**/*",
    "bench/**/*.py",
)
TESTS = ("tests/*.py", "tests/ops/**/*")
# those of the kernels and of what launches them
KERNELS = ("growkern/ops/**/*.py", "csrc/**/*")
# from the least useful end of a run to the best
STATUSES = ("skipped", "crashed", "timeout", "failed", "ok")
# facts of a run that count as documentation, besides its commit and its GPU
VERSIONS = ("date", "sources", "python", "torch", "triton")
PACKAGES = ("transformers", "liger_kernel", "cut-cross-entropy", "trl")
PACKAGES += ("orda-kernel", "nvidia-cutlass-dsl")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def source_digest(patterns: Sequence[str] = (*SOURCES, *TESTS)) -> str:
    """A hash of the sources' names and contents. It identifies them where there is no git."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        # Python writes these while pieces run
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return getattr(importlib.import_module(package), "__version__", "unknown")


def _packages() -> dict[str, str]:
    """Versions of the installed libraries that are compared, read without importing them."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _gpu_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver, power limit": _output(*query),
    }


def clocks() -> dict[str, str]:
    """The GPU's clocks, temperature and power as they are now; empty without a GPU."""
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    values = _output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    return dict(zip(names, values.splitlines()[0].split(", "), strict=False)) if values else {}


def git_facts() -> dict[str, Any]:
    """The commit of these sources, and whether they differ from it ("dirty").

    GROWKERN_COMMIT names the commit of sources that were copied here, also where git knows an
    earlier one. "dirty" is then None: nobody can tell. Nor can anybody without git.
    """
    if copied := os.environ.get("GROWKERN_COMMIT"):
        return {"commit": copied, "dirty": None}
    # Results and prose do not count. Otherwise writing the first result would make the sources of
    # the second one look changed.
    changed = ("git", "status", "--porcelain", "--untracked-files=no", "--", "growkern", "csrc")
    status = _output(*changed, "testbed", "bench", "tests", ":!bench/results", ":!*.md")
    commit = _output("git", "rev-parse", "--short", "HEAD")
    return {"commit": commit or "unknown", "dirty": None if status is None else bool(status)}


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """The machine, the date, and the versions of everything that the figures depend on."""
    facts = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        **_packages(),
        **git_facts(),
        "sources": source_digest(),
        "kernels": source_digest(KERNELS),
        "date": today(),
    }
    return facts | (_gpu_facts() if torch.cuda.is_available() else {})


def slug(facts: dict[str, Any]) -> str:
    """Name of the directory for a machine's results: "nvidia-h200", or "" without a GPU."""
    return re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", "").lower()).strip("-")


def same_run(document: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a document is a good result of these sources on this kind of machine."""
    keys = ("sources", "gpu", "torch", "triton")
    known = document.get("machine", {})
    return document.get("status") == "ok" and all(known.get(k) == facts.get(k) for k in keys)


def is_done(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a piece need not run again, because there is a result of these sources.

    The result may also be the one that was put aside. A machine without git cannot name a commit,
    so its results never replace a committed one. They are recognised by the sources' hash.
    """
    return any(same_run(read(place), facts) for place in (path, aside_of(path)))


def _commit_rank(facts: dict[str, Any]) -> int:
    """3: a commit. 2: a commit that git did not confirm. 1: changed sources. 0: no commit."""
    commit = facts.get("commit") or "unknown"
    # older results write "-dirty" behind the commit
    dirty = facts.get("dirty", "dirty" in commit)
    if commit == "unknown":
        return 0
    return 2 if dirty is None else 1 if dirty else 3


def rank(document: dict[str, Any]) -> tuple[int, ...]:
    """Sort key of a document: how well it is documented, how it ended, how many rows it has."""
    facts = document.get("machine", {})
    status = document.get("status", "ok")
    return (
        not document.get("toy", False),
        _commit_rank(facts),
        bool(facts.get("gpu")),
        sum(facts.get(key) not in (None, "unknown") for key in VERSIONS),
        STATUSES.index(status) if status in STATUSES else -1,
        # a row that only says why it was not measured does not count
        sum("why not" not in row for row in document.get("rows", ())),
    )


def _replaces(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether `new` ranks higher than `old`. Of equal ones the newer wins."""
    dates = (document.get("machine", {}).get("date", "") for document in (new, old))
    return (rank(new), next(dates)) >= (rank(old), next(dates))


def read(path: Path) -> dict[str, Any]:
    """The document of a file; empty if there is none or it is broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def quotable(path: Path) -> dict[str, Any]:
    """A document that may be quoted: a run that ended well, at real sizes. Otherwise empty."""
    document = read(path)
    return document if document.get("status", "ok") == "ok" and not document.get("toy") else {}


def with_commits(text: str, documents: Iterable[dict[str, Any]]) -> str:
    """A table of figures of GPUs, and below it the commits after which the kernels have changed.

    A result says which kernels it ran. The first ones did not yet, and theirs were others.
    """
    facts = [document["machine"] for document in documents if document.get("machine")]
    old = {x["commit"] for x in facts if x.get("kernels") != source_digest(KERNELS)}
    if not old:
        return text
    commits = f"commit{'s' * (len(old) > 1)} {', '.join(sorted(old))}"
    return f"{text}\n\nThe GPU figures of {commits} are older than the last change of the kernels."


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document completely or not at all: the machine may stop at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def aside_of(path: Path) -> Path:
    """The file for a later but worse result."""
    return path.with_name(f"{path.stem}.aside.json")


def keep(path: Path, document: dict[str, Any]) -> Path:
    """Save a document without replacing a better one.

    If there is a better one, the new document goes to `<name>.aside.json`. It replaces the one
    there, unless that has the same sources and ranks higher.

    Returns:
        The file that was written, or the one aside that was kept.
    """
    aside, there = aside_of(path), read(path)
    if there and not _replaces(document, there):
        other = read(aside)
        sources = (d.get("machine", {}).get("sources") for d in (document, other))
        if not other or next(sources) != next(sources) or _replaces(document, other):
            write(aside, document)
        return aside
    write(path, document)
    aside.unlink(missing_ok=True)
    return path


def take(folder: Path, into: Path = RESULTS) -> list[Path]:
    """Bring in the results of another machine, by the rule of `keep`.

    Results that were made without git, but from the same sources as here, get the commit of these.
    """
    ours, digest = git_facts(), source_digest()
    kept = []
    for path in sorted(folder.glob("*/*.json")):
        document = read(path)
        facts = document.get("machine", {})
        if facts.get("sources") == digest and facts.get("dirty") is None and not ours["dirty"]:
            facts |= ours
        name = path.name.replace(".aside.json", ".json")
        kept.append(keep(into / path.parent.name / name, document))
    return kept


def cell(x: Any) -> str:
    """One value as a cell of a table; "-" for None."""
    if x is None:
        return "-"
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def read_rows(file: Path, key_of: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, Any]]:
    """The rows of a study so far, by the text that identifies each run.

    Args:
        file: one JSON document per line. A torn last line is left out.
    """
    rows = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[key_of(row)] = row
    return rows


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Write a row of a study to disk before its next run begins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    is_torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    with file.open("a") as out:
        out.write(("\n" if is_torn else "") + json.dumps(row) + "\n")
        out.flush()
        os.fsync(out.fileno())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
